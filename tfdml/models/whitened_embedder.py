"""An embedder whose last layer whitens: PCA whitening of training images' embeddings, served with the network."""

from __future__ import annotations

import keras
import numpy as np
from typing_extensions import override

from tfdml.layers import L2Normalize, PrincipalComponents
from tfdml.models.behind_embedder import BehindEmbedder
from tfdml.saving import restore


@keras.saving.register_keras_serializable("tfdml")
class WhitenedEmbedder(BehindEmbedder):
    """Images to whitened unit vectors: f = z / |z|, z_i = <e - mean, u_i> / v_i^(power / 2), e the embedder's vector.

    u_i are the principal components of training images' embeddings, v_i the variances along them; see
    `PrincipalComponents`, whose arguments these are. It is saved, loaded, evaluated and exported as an embedder is,
    except to int8. `with_whitening` makes it.

    Args:
        embedder: An `Embedder`, or what embeds as that does.
        dim: How many components.
        power: 1 whitens, 0 only projects.
        shrinkage: How far the variances are drawn to their mean.

    Raises:
        ValueError: An argument does not fit, or the model is called before its `reduction` is adapted.

    Example:
        >>> view = tfdml.data.EvaluationTransform.of(embedder)
        >>> vectors = tfdml.embeddings.embed(embedder, tfdml.data.evaluation_batches(train, view, 100))
        >>> model = with_whitening(embedder, vectors, dim=3)
        >>> model.save("whitened.keras")
    """

    def __init__(self, embedder, dim, power=1.0, shrinkage=0.0, name="whitened_embedder", **kwargs):
        super().__init__(name=name, **{**kwargs, "autocast": False})
        self.embedder = restore(embedder)
        if not all(hasattr(self.embedder, part) for part in ("embedding_dim", "image_size", "resize", "resize_mode")):
            raise ValueError(f"embedder must be an Embedder, not {embedder!r}")
        self.reduction = PrincipalComponents(dim, True, power, shrinkage, name="whitening")
        self.normalize = L2Normalize(name="normalize")

    def build(self, input_shape):
        """Create the weights that are not there yet."""
        if not self.embedder.built:
            self.embedder.build(input_shape)
            self.embedder.built = True
        if not self.reduction.built:
            self.reduction.build((None, self.embedder.embedding_dim))
            self.reduction.built = True

    def features(self, images):
        """(B, H, W, 3) -> (B, D): the embedder's vectors."""
        return self.embedder(images, training=False)

    @override
    def get_config(self):
        return {
            "name": self.name,
            "embedder": keras.saving.serialize_keras_object(self.embedder),
            "dim": self.reduction.dim,
            "power": self.reduction.power,
            "shrinkage": self.reduction.shrinkage,
        }


def with_whitening(embedder, embeddings, dim: int = 0, power: float = 1.0, shrinkage: float = 0.0) -> WhitenedEmbedder:
    """An embedder with a whitening behind it, fitted to its embeddings of training images.

    Args:
        embedder: A built `Embedder` or `MomentEmbedder`, whose weights it shares.
        embeddings: (M, D) NumPy, what it gives for the training images; never those of the gallery or the test.
        dim: How many components; 0: all D.
        power: See `WhitenedEmbedder`.
        shrinkage: Likewise.

    Raises:
        ValueError: There are not more embeddings than components, one is not finite, or a number is out of range.

    Example:
        >>> embedder = Embedder("conv4", embedding_dim=8, image_size=16)
        >>> images = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3))
        >>> tuple(with_whitening(embedder, np.array(embedder(images)), dim=3)(images).shape)
        (20, 3)
    """
    model = WhitenedEmbedder(embedder, dim or embedder.embedding_dim, power, shrinkage)
    model.build((None, embedder.image_size, embedder.image_size, 3))
    model.built = True
    model.reduction.adapt(np.asarray(embeddings))
    return model
