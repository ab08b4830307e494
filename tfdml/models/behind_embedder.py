"""What models that put layers behind an embedder share, so that they are evaluated and exported as it is."""

from __future__ import annotations

import keras


class BehindEmbedder(keras.Model):
    """A model of `embedder`, a `reduction` of what it gives and `normalize`.

    Subclasses create these three, and define `features(images)`, what `reduction` takes.
    """

    @property
    def image_size(self) -> int:
        """The height and width in pixels of its images."""
        return self.embedder.image_size

    @property
    def resize(self) -> int:
        """The size in pixels before the centre crop."""
        return self.embedder.resize

    @property
    def resize_mode(self) -> str:
        """How images are brought to that size: see `Embedder`."""
        return self.embedder.resize_mode

    @property
    def pad_color(self) -> list[int]:
        """What fills up the square in `resize_mode="pad"`."""
        return self.embedder.pad_color

    @property
    def embedding_dim(self) -> int:
        """d, the number of components."""
        return self.reduction.dim

    def call(self, images, training=None):
        """(B, H, W, 3) -> (B, d), unit vectors."""
        del training
        return self.normalize(self.reduction(self.features(images)))

    def compute_output_shape(self, input_shape):
        """(B, d)."""
        return (input_shape[0], self.embedding_dim)
