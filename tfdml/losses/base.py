"""Base classes of the losses: `LabeledLoss` for integer labels, and `PairLoss` for pairs of the
global batch."""

from collections.abc import Callable

import keras
from keras import ops

from tfdml import pairwise, replicas
from tfdml.mining.base import Distance, Miner, Relation, component
from tfdml.pairs import Pairs, Scope
from tfdml.registry import DISTANCES, snake_case
from tfdml.saving import SavedByArguments

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


class LabeledLoss(SavedByArguments, keras.losses.Loss):
    """A Keras loss whose `y_true` are integer class labels (B,).

    `keras.losses.Loss` casts labels to the loss's dtype, in which ids above 2^24 collide; this
    class keeps them integers. Subclasses define `image_losses(labels, y_pred)`, and keep each
    argument in the attribute of its name, by which they are saved.

    Args:
        reduction: As in Keras: `"sum_over_batch_size"` (the mean, default), `"sum"`,
            `"mean_with_sample_weight"` or `"none"`.
        name: The loss's name in logs; by default that of the class, as `triplet_loss`.
    """

    def __init__(self, reduction="sum_over_batch_size", name=None):
        super().__init__(reduction=reduction, name=name or snake_case(type(self).__name__))

    def __call__(self, y_true, y_pred, sample_weight=None):
        """Compute the reduced loss of labels (B,) and predictions (B, ...), scaled for the replicas
        as Keras does."""
        with keras.name_scope(self.name):
            values = self.call(y_true, y_pred)
            value = self.reduce(values, sample_weight)
            if self.reduction not in _MEANS or replicas.count() == 1:
                return value
            # Keras sums gradients over replicas, so each contributes its share of the global mean;
            # for its logs it expects the local mean divided by their number, which differs if
            # replicas hold unequal numbers of images.
            exact = value * self._share(values, sample_weight)
            return exact + ops.stop_gradient(value / replicas.count() - exact)

    def call(self, labels, y_pred):
        """Compute one value per image: labels in any form that `as_labels` takes, (B, ...) ->
        (B,)."""
        labels, y_pred = self.as_labels(labels), ops.convert_to_tensor(y_pred)
        pairwise.check_counts(self.name, labels, y_pred)
        values = self.image_losses(labels, ops.cast(y_pred, "float32"))
        return values + pairwise.nan_if_no_label(labels)

    def image_losses(self, labels, y_pred):
        """Compute one value per image: integers (B,), (B, ...) float32 -> (B,)."""
        raise TypeError(f"{type(self).__name__} must define image_losses()")

    def as_labels(self, labels):
        """Convert labels to integers (B,)."""
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

    A subclass defines `anchor_losses(pairs)`, one value per anchor. It works unchanged on one
    device, on several replicas and workers, with gradient caching, with a cross-batch memory and
    with label sets: `tfdml.pairs.Pairs` holds what differs. Under a distribution strategy the pairs
    are those of the global batch, and the update equals that of a single device on the whole batch.

    Args:
        distance: What `pairs.distances()` are: a name of `tfdml.registry.DISTANCES`, where
            `"cosine"` is 1 - cos and `"dot"` is -x.y; a registered name; or a
            `tfdml.mining.Distance` or function of two matrices. None for the class's own. A loss
            that is defined on one measure takes no other.
        mining: Which pairs count: one of the class's `own_mining`, a registered name such as
            `"easy_positive"`, or a `tfdml.mining.Miner` or function from `Pairs` to `Pairs`. None
            for the first of `own_mining`.
        positives: Which images belong together, where labels are sets, levels of a hierarchy or
            ids: a registered name, or a `tfdml.mining.Relation` or function, such as
            `tfdml.mining.SameLabel(column)`. Labels are then rows (B, L). Pairs are judged one by
            one, so that two positives of an image need not belong together. None for equal labels.
        reduction: As in Keras, see `LabeledLoss`.
        name: The loss's name in logs; by default that of the class, as `triplet_loss`.

    Attributes:
        own_mining: What the class mines itself, by name; the first is the default.
        whole_batch: Whether `anchor_losses` needs all anchors of the batch, because values depend
            on one another. Each replica then computes them all.
        within_batch: Whether the references must be the anchors themselves, so that no memory can
            be added to them.

    Raises:
        ValueError: An argument is none of these.

    Example:
        >>> @tfdml.register("loss")
        ... class NearestLoss(tfdml.losses.PairLoss):
        ...     def anchor_losses(self, pairs):
        ...         nearest = keras.ops.min(keras.ops.where(pairs.negatives, pairs.distances(),
        ...         2.0), axis=1)
        ...         return 2.0 - nearest
        >>> float(NearestLoss()([0, 1], [[1.0, 0.0], [0.0, 1.0]]))  # 2 - sqrt(2)
        0.5857864
        >>> model_and_make, by_make = [[0, 0], [1, 0], [2, 1]], tfdml.mining.SameLabel(column=1)
        >>> float(tfdml.losses.TripletLoss(0.1, positives=by_make)(model_and_make,
        ...     keras.ops.eye(3)))
        0.1
    """

    distance: str | Distance | Callable = "euclidean"
    own_mining: tuple[str, ...] = ("all",)
    whole_batch = False
    within_batch = False

    def __init__(self, *, distance=None, mining=None, positives=None, **kwargs):
        super().__init__(**kwargs)
        if distance is not None:
            if "distance" in self.fixed:
                raise ValueError(
                    f"{self.name}: its distance is {self.distance!r}, leave `distance` out"
                )
            self.distance = component("distance", distance, "distance", DISTANCES)
        mining = self.own_mining[0] if mining is None else mining
        self.mining: str | Miner | Callable = component("miner", mining, "mining", self.own_mining)
        self.positives: Relation | Callable | None = None
        if positives is not None:
            self.positives = component("relation", positives, "positives")

    def as_labels(self, labels):
        """Convert labels to integers (B,), or rows (B, L) with `positives`."""
        return pairwise.as_labels(labels, rows=self.positives is not None)

    def image_losses(self, labels, y_pred):
        """Compute one value per anchor: (B,), or (B, L) with `positives`, and (B, d) -> (B,)."""
        check_rank(self.name, y_pred, 2, "embeddings (B, d)")
        num_local, is_whole = ops.shape(labels)[0], self.needs_whole_batch
        labels, embeddings = replicas.gather(labels), replicas.gather(y_pred)
        scope = Scope() if is_whole else Scope.of_replica(num_local)
        values = self.values_of(Pairs.of_batch(embeddings, labels, self.positives, scope))
        return replicas.local_rows(values, num_local) if is_whole else values

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
                raise ValueError(
                    f"mining {name} must return pairs.keep(positives, negatives), not {kept!r}"
                )
            pairs = pairs.keep(kept.positives, kept.negatives)
        values = ops.convert_to_tensor(self.anchor_losses(pairs))
        check_rank(
            self.name,
            values,
            1,
            "one value per anchor (b,) from anchor_losses, which the base class reduces",
        )
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
        """Scale sums of the anchors, (b,), so that their mean is that over `counted`; as they are
        under `"sum"`."""
        return rows if self.reduction == "sum" else pairs.scale_to_mean(rows, counted)

    def over_pairs(self, pairs: Pairs, values, mask):
        """Compute one value per anchor, whose mean over anchors is the mean of `values` over the
        pairs of `mask`.

        Under `reduction="sum"` these are the row sums, so that the loss is the plain sum over
        (ordered) pairs.

        Args:
            pairs: The pairs that `anchor_losses` was given.
            values: (b, B), one for each pair; or (b, 1), one for each anchor.
            mask: Booleans of the same shape, the pairs that count.
        """
        return self.mean_over(
            pairs, pairwise.masked_sum(values, mask, axis=1), pairwise.masked_count(mask)
        )


class CosinePairLoss(PairLoss):
    """A loss on the cosines s of pairs; a miner sees the distances 1 - s."""

    distance = "cosine"
    fixed = ("distance",)


def nan_if_any(x, axis=None):
    """Return NaN where `x` has a NaN along `axis` (by default anywhere), and 0 elsewhere; without a
    gradient.

    Example:
        >>> np.array(nan_if_any(keras.ops.array([[1.0, float("nan")], [0.0, 1.0]]), axis=1))
        array([nan,  0.], dtype=float32)
    """
    return ops.where(ops.any(ops.isnan(x), axis=axis), float("nan"), 0.0)


def check_rank(name, tensor, rank, expected):
    """Raise a `ValueError` that names the loss if `tensor` does not have this rank."""
    if len(tensor.shape) != rank:
        raise ValueError(f"{name}: expected {expected}, got shape {tuple(tensor.shape)}")
