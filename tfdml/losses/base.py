"""Base classes of the losses: `LabeledLoss` for integer labels, and `PairLoss` for pairs of the global batch."""

from collections.abc import Callable

import keras
from keras import ops

from tfdml import pairwise, replicas
from tfdml.mining.base import Distance, Miner, Relation, as_relation
from tfdml.pairs import Pairs, Scope
from tfdml.saving import SavedByArguments, snake_case

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class LabeledLoss(SavedByArguments, keras.losses.Loss):
    """A Keras loss whose `y_true` are integer class labels (B,).

    `keras.losses.Loss` casts labels to the loss's dtype, in which ids above 2^24 collide; this class keeps them
    integers. Subclasses define `call(labels, y_pred)`, one value per image, and keep each argument in the attribute of
    its name, by which they are saved.

    Args:
        reduction: As in Keras: `"sum_over_batch_size"` (the mean, default), `"sum"`, `"mean_with_sample_weight"` or
            `"none"`.
        name: The loss's name in logs; by default that of the class, as `triplet_loss`.
    """

    def __init__(self, reduction="sum_over_batch_size", name=None):
        super().__init__(reduction=reduction, name=name or snake_case(type(self).__name__))

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Compute the reduced loss of labels (B,) and predictions (B, ...), scaled for the replicas as Keras does."""
        with keras.name_scope(self.name):
            y_pred = ops.cast(ops.convert_to_tensor(y_pred), "float32")
            labels = self.as_labels(y_true)
            values = self.call(labels, y_pred) + pairwise.nan_if_no_label(labels)
            value = self.reduce(values, sample_weight)
            if self.reduction not in _MEANS or replicas.count() == 1:
                return value
            # Keras sums gradients over replicas, so each contributes its share of the global mean; for its logs it
            # expects the local mean divided by their number, which differs if replicas hold unequal numbers of images.
            exact = value * self._share(values, sample_weight)
            return exact + ops.stop_gradient(value / replicas.count() - exact)

    def as_labels(self, labels):
        """Convert labels to what `call` takes: integers (B,)."""
        return pairwise.as_labels(labels)

    def _share(self, values, sample_weight):
        """Return the weight of this replica's mean in that of the global batch."""
        if self.reduction == "mean_with_sample_weight" and sample_weight is not None:
            local = ops.sum(ops.cast(sample_weight, "float32"))
        else:
            local = ops.cast(ops.shape(values)[0], "float32")
        return ops.divide_no_nan(local, ops.sum(replicas.gather(ops.reshape(local, (1,)))))

    def reduce(self, values, sample_weight=None):
        """Reduces one value per image (B,) by `reduction`, without regard to replicas."""
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


class PairLoss(LabeledLoss):
    """A loss over the pairs of a batch of embeddings (B, d).

    A subclass defines `anchor_losses(pairs)`, one value per anchor. It works unchanged on one device, on several
    replicas and workers, with gradient caching, with a cross-batch memory and with label sets: `tfdml.pairs.Pairs`
    holds what differs. Under a distribution strategy the pairs are those of the global batch, and the update equals
    that of a single device on the whole batch.

    Attributes:
        positives: Which images belong together, see `with_positives`; None for equal labels.
        distance: What `pairs.distances()` are: a name of `tfdml.pairwise.DISTANCES`, a `tfdml.mining.Distance`, or a
            function of two matrices.
        mining: A `tfdml.mining.Miner` or a function from `Pairs` to `Pairs`; a name or None for a choice that the
            subclass makes itself.
        whole_batch: Whether `anchor_losses` needs all anchors of the batch, because values depend on one another. Each
            replica then computes them all.
        within_batch: Whether the references must be the anchors themselves, so that no memory can be added to them.

    Example:
        >>> @keras.saving.register_keras_serializable("mine")
        ... class NearestNegativeLoss(tfdml.losses.PairLoss):
        ...     def anchor_losses(self, pairs):
        ...         nearest = keras.ops.min(keras.ops.where(pairs.negatives, pairs.distances(), 2.0), axis=1)
        ...         return 2.0 - nearest
        >>> float(NearestNegativeLoss()([0, 1], [[1.0, 0.0], [0.0, 1.0]]))  # 2 - sqrt(2)
        0.5857864
    """

    positives: Relation | Callable | None = None
    distance: str | Distance | Callable = "euclidean"
    mining: str | Miner | Callable | None = None
    whole_batch = False
    within_batch = False

    def with_positives(self, positives):
        """Return the same loss for labels that are sets or levels of a hierarchy: rows (B, L).

        Pairs are judged one by one, so that two positives of an image need not belong together.

        Args:
            positives: Which images belong together: `tfdml.mining.SameLabel(column)`, `tfdml.mining.shares_a_label`,
                or another `tfdml.mining.Relation` or function. Labels (B,) reach it as (B, 1).

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
        loss = type(self).from_config(self.get_config())
        loss.positives = as_relation(positives)
        return loss

    def get_config(self):
        """Return the arguments, and `positives` where there are any."""
        config = super().get_config()
        if self.positives is None:
            return config
        return {**config, "positives": keras.saving.serialize_keras_object(self.positives)}

    @classmethod
    def from_config(cls, config):
        """Create the loss that `get_config` describes."""
        loss = super().from_config({name: value for name, value in config.items() if name != "positives"})
        if config.get("positives") is not None:
            loss.positives = as_relation(config["positives"])
        return loss

    def as_labels(self, labels):
        """Convert labels to what `call` takes: integers (B,), or rows (B, L) with `positives`."""
        return pairwise.as_labels(labels, rows=self.positives is not None)

    def call(self, labels, embeddings):
        """Compute one value per anchor: (B,), or (B, L) with `positives`, and (B, d) -> (B,)."""
        labels = self.as_labels(labels)
        check_rank(self.name, embeddings, 2, "embeddings (B, d)")
        num_local = ops.shape(labels)[0]
        labels, embeddings = replicas.gather(labels), replicas.gather(ops.cast(embeddings, "float32"))
        whole = self.needs_whole_batch
        scope = Scope() if whole else Scope.of_replica(num_local)
        pairs = Pairs.of_batch(embeddings, labels, self.positives, scope)
        values = self.values_of(pairs)
        return replicas.local_rows(values, num_local) if whole else values

    @property
    def needs_whole_batch(self) -> bool:
        """Whether the loss or its miner needs all anchors of the batch."""
        return self.whole_batch or getattr(self.mining, "whole_batch", False)

    def values_of(self, pairs: Pairs):
        """Compute one value per anchor, (b,), of the pairs that `mining` keeps."""
        pairs = pairs.using(self.distance)
        if callable(self.mining):
            # Before its copy without a gradient, so that miner and loss share one matrix.
            pairs.distances()
            kept = self.mining(pairs.without_gradient())
            if not isinstance(kept, Pairs):
                name = getattr(self.mining, "__name__", type(self.mining).__name__)
                raise ValueError(f"mining {name} must return pairs.keep(positives, negatives), not {kept!r}")
            pairs = pairs.keep(kept.positives, kept.negatives)
        values = ops.convert_to_tensor(self.anchor_losses(pairs))
        check_rank(self.name, values, 1, "one value per anchor (b,) from anchor_losses, which the base class reduces")
        # A mask or a miner may hide a NaN.
        return values + nan_if_any(pairs.references)

    def of_pairs(self, pairs: Pairs):
        """Compute the reduced loss of the batch, or the part of it that these anchors make up."""
        total = ops.sum(self.values_of(pairs))
        if self.reduction == "sum":
            return total
        return total / ops.maximum(ops.cast(pairs.num_anchors, "float32"), 1.0)

    def anchor_losses(self, pairs: Pairs):
        """Compute one value per anchor: (b,)."""
        raise TypeError(f"{type(self).__name__} must define anchor_losses()")

    def mean_over(self, pairs: Pairs, rows, counted):
        """Scale sums of the anchors, (b,), so that their mean is that over `counted`; as they are under `"sum"`."""
        return rows if self.reduction == "sum" else pairs.scale_to_mean(rows, counted)

    def over_pairs(self, pairs: Pairs, values, mask):
        """Compute one value per anchor, whose mean over anchors is the mean of `values` over the pairs of `mask`.

        Under `reduction="sum"` these are the row sums, so that the loss is the plain sum over (ordered) pairs.

        Args:
            pairs: The pairs that `anchor_losses` was given.
            values: (b, B), one for each pair; or (b, 1), one for each anchor.
            mask: Booleans of the same shape, the pairs that count.
        """
        return self.mean_over(pairs, pairwise.masked_sum(values, mask, axis=1), pairwise.masked_count(mask))


def nan_if_any(x, axis=None):
    """Return NaN where `x` has a NaN along `axis` (by default anywhere), and 0 elsewhere; without a gradient.

    Example:
        >>> np.array(nan_if_any(keras.ops.array([[1.0, float("nan")], [0.0, 1.0]]), axis=1))
        array([nan,  0.], dtype=float32)
    """
    return ops.where(ops.any(ops.isnan(x), axis=axis), float("nan"), 0.0)


def check_rank(name, tensor, rank, what):
    """Raise a `ValueError` that names the loss if `tensor` does not have this rank."""
    if len(tensor.shape) != rank:
        raise ValueError(f"{name}: expected {what}, got shape {tuple(tensor.shape)}")
