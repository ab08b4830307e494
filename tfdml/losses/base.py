"""What every loss of tfdml shares: integer labels, one value per anchor, pairs of the global batch."""

from __future__ import annotations

import keras
from keras import ops
from typing_extensions import override

from tfdml import pairwise, replicas
from tfdml.losses.masked import scale_to_mean
from tfdml.mining.composing import Distance, Miner, is_named
from tfdml.mining.relations import as_relation
from tfdml.saving import SavedByArguments, in_words

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class LabelledLoss(SavedByArguments, keras.losses.Loss):
    """A Keras loss whose `y_true` are integer class labels (B,).

    `keras.losses.Loss` casts labels to the loss's dtype, in which ids above 2^24 collide; this class keeps them
    integers. Subclasses define `call(labels, y_pred)`, one value per image, and keep each argument in the attribute of
    its name, by which they are saved.

    Args:
        reduction: As in Keras: `"sum_over_batch_size"` (the mean, default), `"sum"`, `"mean_with_sample_weight"` or
            `"none"`.
        name: The loss's name in logs; by default the class's registered name.
    """

    def __init__(self, reduction="sum_over_batch_size", name=None):
        super().__init__(reduction=reduction, name=name)

    def __call__(self, y_true, y_pred, sample_weight=None):
        """The reduced loss of labels (B,) and predictions (B, ...), scaled for the replicas as Keras does."""
        with keras.name_scope(self.name):
            y_pred = ops.cast(ops.convert_to_tensor(y_pred), "float32")
            values = self.call(pairwise.as_labels(y_true), y_pred)
            value = self.reduce(values, sample_weight)
            if self.reduction not in _MEANS or replicas.count() == 1:
                return value
            # Keras sums gradients over replicas, so each contributes its share of the global mean; for its logs it
            # expects the local mean divided by their number, which differs if replicas hold unequal numbers of images.
            exact = value * self._share(values, sample_weight)
            return exact + ops.stop_gradient(value / replicas.count() - exact)

    def _share(self, values, sample_weight):
        """How much this replica's mean weighs in that of the global batch."""
        if self.reduction == "mean_with_sample_weight" and sample_weight is not None:
            local = ops.sum(ops.cast(sample_weight, "float32"))
        else:
            local = ops.cast(ops.shape(values)[0], "float32")
        return ops.divide_no_nan(local, ops.sum(replicas.gather(ops.reshape(local, (1,)))))

    def reduce(self, values, sample_weight=None):
        """Reduce one value per image (B,) as `reduction` says, without regard to replicas."""
        if sample_weight is not None:
            sample_weight = ops.cast(sample_weight, values.dtype)
            if len(sample_weight.shape) == 2:
                sample_weight = ops.squeeze(sample_weight, -1)
            values = values * sample_weight
        if self.reduction in (None, "none"):
            return values
        total = ops.sum(values)
        if self.reduction == "sum":
            return total
        if self.reduction == "mean_with_sample_weight" and sample_weight is not None:
            return ops.divide_no_nan(total, ops.sum(sample_weight))
        return total / ops.maximum(ops.cast(ops.shape(values)[0], values.dtype), 1.0)

    def __repr__(self):
        return in_words(self)


class EmbeddingLoss(LabelledLoss):
    """A loss over the pairs of a batch of embeddings (B, d).

    Subclasses define `anchor_losses(labels, embeddings)`. Under a distribution strategy the pairs are those of the
    global batch: each replica gathers the embeddings of all and keeps the values of its own anchors, so that the
    update equals the one of a single device on the whole batch. A loss that `divides` computes no more than those: its
    matrices are (n, N) for n of N images.

    Attributes:
        positives: What says which images belong together, see `with_positives`; None for the equality of labels.
    """

    positives = None

    def with_positives(self, positives):
        """The same loss where labels are sets or hierarchies: rows (B, L), of which `positives` makes the pairs.

        Every loss on pairs and every miner takes the positives and negatives from it. Pairs are judged one by one, so
        that two positives of an image need not belong together.

        Args:
            positives: `tfdml.mining.SameLabel(column)`, `tfdml.mining.shares_a_label`, or an object or function of
                one's own: a `tfdml.mining.Relation`. Labels (B,) reach it as (B, 1).

        Returns:
            A new loss, saved with `positives`.

        Raises:
            ValueError: `positives` cannot be called, or not be saved.

        Example:
            >>> embeddings, model_and_make = keras.ops.eye(3), [[0, 0], [1, 0], [2, 1]]
            >>> by_make = tfdml.mining.SameLabel(column=1)
            >>> float(tfdml.losses.TripletLoss(0.1).with_positives(by_make)(model_and_make, embeddings))
            0.1
        """
        again = type(self).from_config(self.get_config())
        again.positives = as_relation(positives)
        return again

    @override
    def get_config(self):
        config = super().get_config()
        if self.positives is None:
            return config
        return {**config, "positives": keras.saving.serialize_keras_object(self.positives)}

    @classmethod
    def from_config(cls, config):
        """The loss that `get_config` describes."""
        loss = super().from_config({name: value for name, value in config.items() if name != "positives"})
        if config.get("positives") is not None:
            loss.positives = as_relation(config["positives"])
        return loss

    def __call__(self, y_true, y_pred, sample_weight=None):
        """The reduced loss of labels (B,), or (B, L) with `positives`, and embeddings (B, d)."""
        with pairwise.positives_by(self.positives):
            return super().__call__(y_true, y_pred, sample_weight)

    def call(self, labels, embeddings):
        """One value per anchor: (B,), (B, d) -> (B,)."""
        with pairwise.positives_by(self.positives):
            return self._own_values(labels, embeddings)

    def _own_values(self, labels, embeddings):
        labels = pairwise.as_labels(labels)
        check_rank(self.name, embeddings, 2, "embeddings (B, d)")
        num_local = ops.shape(labels)[0]
        labels, embeddings = replicas.gather(labels), replicas.gather(ops.cast(embeddings, "float32"))
        if not self.divides:
            return replicas.local_rows(self._values(labels, embeddings), num_local)
        with replicas.own_rows(num_local, ops.shape(labels)[0]):
            return self._values(labels, embeddings)

    def of_batch(self, labels, embeddings):
        """The reduced loss of the global batch; within `pairwise.only_rows` the part of it that its rows make up."""
        with pairwise.positives_by(self.positives):
            value = self.reduce(self._values(labels, ops.cast(embeddings, "float32")))
        return value if self.reduction == "sum" else value * replicas.share_of_rows()

    def _values(self, labels, embeddings):
        """`anchor_losses`, and NaN for every anchor if an embedding has a NaN, which masks and miners may hide."""
        values = ops.convert_to_tensor(self.anchor_losses(labels, embeddings))
        check_rank(self.name, values, 1, "one value per anchor (B,) from anchor_losses, which the base class reduces")
        return values + nan_if_any(embeddings)

    @property
    def divides(self) -> bool:
        """Whether `anchor_losses` within `pairwise.only_rows` gives the values of these rows alone, at their cost."""
        return False

    @property
    def takes_more_columns(self) -> bool:
        """Whether the value of an anchor depends on no other row of the matrices, but for sums over rows.

        Then vectors may be added to compare with that are no anchors, such as those of a memory.
        """
        return self.divides

    def anchor_losses(self, labels, embeddings):
        """One value per anchor of the global batch: (N,), (N, d) -> (N,)."""
        raise TypeError(f"{type(self).__name__} must define anchor_losses()")

    @property
    def averages_pairs(self) -> bool:
        """Whether values are scaled so that their mean is a mean over pairs (else their sum is a sum over pairs)."""
        return self.reduction != "sum"

    def over_pairs(self, values, mask):
        """One value per anchor from pair values (N, N): their mean over anchors is the mean over the pairs of `mask`.

        Under `reduction="sum"` the row sums themselves, so that the loss is the plain sum over (ordered) pairs.

        Args:
            values: (N, N) pair values.
            mask: (N, N) the pairs that count.
        """
        rows = pairwise.masked_sum(values, mask, axis=1)
        if not self.averages_pairs:
            return rows
        return scale_to_mean(rows, pairwise.masked_count(mask))


class MinedLoss(EmbeddingLoss):
    """A loss whose user may choose the pairs by `mining`, and perhaps the `distance`: a name, or an object.

    Attributes:
        mining: A name, or a `tfdml.mining.Miner`; None for all pairs.
        distance: A name, or a `tfdml.mining.Distance`; None where the loss has one of its own.
    """

    mining: str | Miner | None = "all"
    distance: str | Distance | None = None

    @property
    def divides(self):
        """Yes, save with objects, which see square matrices."""
        return is_named(self.distance, self.mining)


def nan_if_any(x, axis=None):
    """NaN where `x` has a NaN along `axis` (by default anywhere), and 0 elsewhere; without a gradient.

    Example:
        >>> np.array(nan_if_any(keras.ops.array([[1.0, float("nan")], [0.0, 1.0]]), axis=1))
        array([nan,  0.], dtype=float32)
    """
    return ops.where(ops.any(ops.isnan(x), axis=axis), float("nan"), 0.0)


def check_rank(name, tensor, rank, what):
    """Raise a `ValueError` that names the loss if `tensor` has another rank than its argument must have."""
    if len(tensor.shape) != rank:
        raise ValueError(f"{name}: expected {what}, got shape {tuple(tensor.shape)}")
