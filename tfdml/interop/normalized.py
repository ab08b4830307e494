"""A loss on the L2-normalised embeddings."""

from __future__ import annotations

import keras
from typing_extensions import override

from tfdml import pairwise
from tfdml.losses import EmbeddingLoss
from tfdml.saving import restore


@keras.saving.register_keras_serializable("tfdml")
class NormalizedLoss(EmbeddingLoss):
    """A loss on pairs, of embeddings that are L2-normalised first: loss(labels, x / |x|).

    pytorch-metric-learning normalises in its distances, tfdml in its `Embedder`; so what another model gives reaches
    the loss as it would there. A zero vector stays zero and gets no gradient. Embeddings of length 1 are left as they
    are, but for rounding.

    Args:
        loss: A loss on pairs of embeddings, such as `tfdml.losses.TripletLoss()`. Its reduction is this one's.
        name: The loss's name in logs; by default the inner loss's.

    Raises:
        ValueError: `loss` is not a loss on pairs of embeddings.

    Example:
        >>> loss = NormalizedLoss(tfdml.losses.ContrastiveLoss(distance="euclidean"))
        >>> float(loss([0, 0], [[3.0, 0.0], [0.0, 0.5]]))  # 2^0.5
        1.4142135
    """

    def __init__(self, loss, name=None):
        loss = restore(loss)
        if not isinstance(loss, EmbeddingLoss):
            raise ValueError(f"expected a loss on pairs of embeddings, got {loss!r}")
        super().__init__(reduction=loss.reduction, name=name or loss.name)
        self.loss = loss

    @property
    def divides(self):
        """As the loss."""
        return self.loss.divides

    def anchor_losses(self, labels, embeddings):
        """The loss's values: (N,), (N, d) -> (N,)."""
        return self.loss.anchor_losses(labels, pairwise.l2_normalize(embeddings))

    @override
    def get_config(self):
        config = super().get_config()
        return {key: config[key] for key in ("loss", "name")}
