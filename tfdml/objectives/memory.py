"""Objectives with a memory of earlier batches: XBM, and PRISM, which also leaves wrong labels
out."""

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import integer, number, one_of
from tfdml.losses.base import PairLoss
from tfdml.losses.classification import target_mask
from tfdml.objectives.base import Objective, reduction_of, share_of
from tfdml.registry import register
from tfdml.saving import restore


@register("objective", alias="xbm")
class CrossBatchMemory(Objective):
    """A loss over the pairs of the batch's images with those of the batch and of a memory of
    earlier ones.

    L = loss over pairs (i, j),   i of the batch,   j of the batch or of the memory

    with the loss's own formula. Only the images of the batch are anchors. Every j is a constant,
    also an image of the batch: the gradient reaches an image as the anchor i alone. With an empty
    memory the contrastive gradient is therefore half of that of the loss alone. The authors' code
    and pytorch-metric-learning do the same.

    The memory holds the last `size` embeddings and labels as they were when their batch was trained
    on. After the first steps embeddings change slowly, so an anchor sees thousands of negatives at
    the cost of one matrix product.

    The paper adds this to the loss of the batch alone, with a weight:

        objectives = [MetricLoss(loss), CrossBatchMemory(loss, start=1000)]

    In its code, as here, the pairs of the batch are among those with the memory. There this term is
    0 for the first `start` steps; here it is the loss of the batch, so that it may also stand
    alone.

    Until the memory is full, the places that are empty make no pair. Batches are remembered in
    training alone, each after its step. The memory is a part of the weights, saved and resumed with
    them. Under a distribution strategy every replica has the same memory, of the global batches. On
    JAX labels must fit 32 bits.

    Args:
        loss: A loss of tfdml over pairs in which each anchor's value comes from its own pairs, such
            as `tfdml.losses.ContrastiveLoss()`; not `LiftedStructureLoss`, `AngularLoss`,
            `QuadrupletLoss` or `VICRegLoss`.
        size: How many embeddings are remembered. The default is that of the authors' code.
        start: For this many steps nothing is remembered, while embeddings change fast. The authors'
            code has 2,000 of 4,000 steps. The default is 0, since the memory of a shorter training
            would stay empty.
        representation: The name of the vectors (B, d) that are compared.
        label_columns: L, where labels are rows (B, L) and the loss has `positives`.
        name: The term's name in logs; by default `cross_batch_` and the loss's.

    Raises:
        ValueError: The loss is not one over pairs, or takes no memory. An argument is out of range,
            or labels have another number of columns.

    Example:
        >>> objective = CrossBatchMemory(tfdml.losses.ContrastiveLoss(distance="euclidean"), size=4)
        >>> batch = {"embedding": keras.ops.array([[1.0, 0.0], [0.6, 0.8]])}
        >>> float(objective(batch, keras.ops.array([0, 1]),
        ...     training=True))  # one negative: 1 - sqrt(0.8)
        0.1055728
        >>> float(objective(batch, keras.ops.array([1,
        ...     0])))  # classes exchanged: sqrt(0.8) + (2 - sqrt(0.8)) / 2
        1.4472136

    Source: Wang et al., "Cross-Batch Memory for Embedding Learning", CVPR 2020, sec. 3.2 and
    algorithm 1; the authors' code, https://github.com/msight-tech/research-xbm.
    """

    def __init__(
        self,
        loss,
        size=8192,
        start=0,
        representation="embedding",
        label_columns=1,
        name=None,
        **kwargs,
    ):
        loss = restore(loss)
        if not isinstance(loss, PairLoss) or loss.within_batch:
            raise ValueError(
                "CrossBatchMemory takes a loss of each anchor's own pairs, not "
                f"{type(loss).__name__}"
            )
        super().__init__(name=name or f"cross_batch_{loss.name}", **kwargs)
        self.representation, self.reduction = representation, reduction_of(loss)
        self.loss, self.whole_batch = loss, loss.needs_whole_batch
        self.size = integer("size", size, at_least=1)
        self.start = integer("start", start, at_least=0)
        self.label_columns = integer("label_columns", label_columns, at_least=1)
        if self.label_columns > 1 and loss.positives is None:
            raise ValueError(
                f"label_columns={label_columns} needs a loss with positives, such as shares_a_label"
            )

    def as_labels(self, labels):
        """As of `Objective`; rows of `label_columns` labels where the loss has `positives`."""
        labels = super().as_labels(labels)
        if self.positives is not None and labels.shape[1] not in (None, self.label_columns):
            raise ValueError(
                f"{self.name}: give labels {tuple(labels.shape)} their "
                f"label_columns={labels.shape[1]}"
            )
        return labels

    def build_from(self, shapes):
        """Create the memory, empty."""
        shape = self.select(shapes)[self.representation]
        if len(shape) != 2:
            raise ValueError(
                f"{self.name}: {self.representation!r} must be vectors (B, d), not {tuple(shape)}"
            )

        def state(name, shape, dtype):
            return self.add_weight(
                name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=False
            )

        self.memory = state("memory", (self.size, shape[-1]), "float32")
        labels_shape = (self.size,) if self.positives is None else (self.size, self.label_columns)
        self.memory_labels = state(
            "memory_labels", labels_shape, "int32" if keras.backend.backend() == "jax" else "int64"
        )
        # The newest stand last.
        self.filled = state("filled", (), "int32")
        self.steps = state("steps", (), "int32")

    def compute_pairs(self, pairs):
        """Compute the loss over the pairs of the batch's images with the batch and the memory."""
        batch = pairs[self.representation]
        kept = self.kept(batch.labels, batch.references)
        mask = ops.concatenate([kept, self._is_filled()], axis=0)
        return self.loss.of_pairs(
            batch.with_memory(self.memory, self.memory_labels).keep_images(mask)
        )

    def kept(self, labels, x):
        """(B,) boolean: the images of a batch that count; here all."""
        return ops.ones(ops.shape(labels)[:1], "bool")

    def remember(self, representations, labels):
        """Put the batch into the memory, in the place of the oldest."""
        count = self.filled + ops.shape(labels)[0]
        labels, x = self._with_batch(
            labels, ops.stop_gradient(representations[self.representation])
        )
        self._memorize(labels[-self.size :], x[-self.size :], count)

    def _memorize(self, labels, x, count):
        """Let the memory be these `size` vectors, the last `count` of them of images."""
        self.memory.assign(ops.reshape(x, self.memory.shape))
        self.memory_labels.assign(ops.reshape(labels, self.memory_labels.shape))
        self.filled.assign(ops.where(self.steps < self.start, 0, ops.minimum(count, self.size)))
        # Counted no further than is asked, so that it never overflows.
        self.steps.assign(ops.minimum(self.steps + 1, self.start))

    def forget(self):
        """Empty the memory, and forget what came of it."""
        for variable in self.non_trainable_weights:
            variable.assign(ops.zeros_like(variable))

    def _is_filled(self):
        """(size,) boolean: what of the memory is filled."""
        return ops.arange(self.size) >= self.size - self.filled

    def _with_batch(self, labels, x):
        """Return the labels and the vectors of the memory and, last, of a batch."""
        labels = ops.concatenate(
            [self.memory_labels, ops.cast(labels, self.memory_labels.dtype)], axis=0
        )
        return labels, ops.concatenate([self.memory, ops.cast(x, "float32")], axis=0)


@register("objective")
class Prism(CrossBatchMemory):
    """A loss over pairs with a memory, without the images whose labels look wrong compared with
    what the memory holds.

    P_i = exp(w_y . x_i) / sum over classes k in the memory of exp(w_k . x_i),   y the label of
    image i

    where w_k is the mean of the unit embeddings of class k in the memory. Of a batch of n images
    those count whose P_i is above the mean of the last `window` values of Q, where Q of a batch is
    its floor(noise_rate n)-th smallest P. If none is, or there is no Q yet, all but the
    floor(noise_rate n) of smallest P count. Images of a class that the memory does not hold have P
    = 1 and count. The others are in no pair, neither as anchors nor as others, and are not
    remembered: the memory becomes cleaner than the labels.

    What a `CrossBatchMemory` is said to be holds here too: pairs of the batch with batch and
    memory, an empty memory at first (so that the first batches count whole), the state saved with
    the learner. A loss that is a mean over images still divides by all n. Logged next to the value:
    `<name>_kept`, the share of images that count.

    Args:
        loss: As `CrossBatchMemory` takes it.
        num_classes: C, for labels 0 .. C - 1; images of other labels count.
        noise_rate: The share of labels that is thought to be wrong: at least 0 and below 1.
        window: Over how many batches Q is averaged.
        size: How many embeddings are remembered: a few for each class.
        start: For this many steps nothing is remembered, and all images count.
        pairs: `"memory"`: those of the batch's images with batch and memory; `"batch"`: the batch's
            alone, and the memory only judges labels. In training from random weights embeddings
            change too fast to compare with.
        representation: The name of the vectors (B, d) that are compared.

    Raises:
        ValueError: The loss is not one over pairs, or takes no memory; or an argument is out of
            range.

    Example:
        >>> objective = Prism(tfdml.losses.ContrastiveLoss(), num_classes=2, noise_rate=0.25,
        ...     size=8)
        >>> batch = {"embedding": keras.ops.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])}
        >>> value = objective(batch, keras.ops.array([0, 0, 1, 1]), training=True)
        >>> np.array(objective.kept(keras.ops.array([0, 1, 1, 1]), batch["embedding"])).tolist()
        [True, False, True, True]

    Source: Liu et al., "Noise-resistant Deep Metric Learning with Ranking-based Instance
    Selection", CVPR 2021, with the average similarity and the smoothed top-R threshold; what is
    done where nothing would be left, and the window of 5, are the authors' code's. There a class
    that has left the memory keeps its last mean.
    """

    observes = ("kept",)
    fixed = ("label_columns",)

    def __init__(
        self,
        loss,
        num_classes,
        noise_rate=0.2,
        window=5,
        size=4096,
        start=0,
        pairs="memory",
        name="prism",
        **kwargs,
    ):
        super().__init__(loss, size, start, name=name, **kwargs)
        if self.positives is not None:
            raise ValueError(
                "Prism compares images with the means of classes: it takes no loss with positives"
            )
        self.num_classes = integer("num_classes", num_classes, at_least=1)
        self.noise_rate = number("noise_rate", noise_rate, at_least=0, below=1)
        self.window = integer("window", window, at_least=1)
        self.pairs = one_of("pairs", pairs, ("memory", "batch"))

    def build_from(self, shapes):
        """Create the memory and the thresholds of the last batches, empty."""
        super().build_from(shapes)
        self.thresholds = self.add_weight(
            name="thresholds", shape=(self.window,), initializer="zeros", trainable=False
        )
        # Of the thresholds; the newest stands last.
        self.known = self.add_weight(
            name="known", shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def clean_probabilities(self, labels, x):
        """P of each image, (B,) float32: 1 where the memory holds none of its class."""
        filled = ops.cast(self._is_filled(), "float32")
        index = ops.convert_to_tensor(self.memory_labels)
        # What is of none of the classes is in no sum.
        index = ops.cast(
            ops.where(ops.logical_and(index >= 0, index < self.num_classes), index, -1), "int32"
        )
        unit = pairwise.l2_normalize(self.memory) * filled[:, None]
        sums = ops.segment_sum(unit, index, self.num_classes)
        counts = ops.segment_sum(filled, index, self.num_classes)
        has_mean = counts > 0
        means = sums / ops.where(has_mean, counts, 1.0)[:, None]
        similarities = pairwise.dot_products(pairwise.l2_normalize(ops.stop_gradient(x)), means)
        logits = ops.where(has_mean[None, :], similarities, -1e30)
        targets = ops.logical_and(target_mask(labels, self.num_classes), has_mean[None, :])
        probabilities = pairwise.masked_sum(ops.softmax(logits, axis=1), targets, axis=1)
        return ops.where(ops.any(targets, axis=1), probabilities, 1.0)

    def compute_pairs(self, pairs):
        """Compute the loss over the pairs of the images that count, with the memory or by
        themselves."""
        if self.pairs == "memory":
            return super().compute_pairs(pairs)
        batch = pairs[self.representation]
        return self.loss.of_pairs(batch.keep_images(self.kept(batch.labels, batch.references)))

    def update(self, representations, labels):
        """Take the batch's Q into the window; where the window's mean would leave no image, Q
        alone."""
        probabilities = self.clean_probabilities(labels, representations[self.representation])
        num_dropped = share_of(self.noise_rate, ops.shape(probabilities)[0])
        quantile = _ascending(probabilities)[ops.maximum(num_dropped - 1, 0)]
        thresholds = ops.concatenate([self.thresholds[1:], quantile[None]], axis=0)
        count = ops.minimum(self.known + 1, self.window)
        leaves_any = ops.any(probabilities > self._mean(thresholds, count))
        # Q says nothing where so small a batch drops no image, or where it is of classes that
        # nothing is known of.
        is_informative = ops.logical_and(num_dropped > 0, quantile < 1)
        self.thresholds.assign(ops.where(is_informative, thresholds, self.thresholds))
        count = ops.where(leaves_any, count, 1)
        self.known.assign(ops.where(is_informative, count, self.known))

    def kept(self, labels, x):
        """(B,) boolean: the images of a batch that count."""
        probabilities = self.clean_probabilities(labels, x)
        above = probabilities > self._mean(self.thresholds, self.known)
        by_window = ops.logical_and(self.known > 0, ops.any(above))
        num_dropped = share_of(self.noise_rate, ops.shape(probabilities)[0])
        lowest = _ascending(probabilities)[num_dropped]
        kept = ops.where(by_window, above, probabilities >= lowest)
        return ops.logical_or(kept, probabilities >= 1)

    def _mean(self, thresholds, count):
        """Return the mean of the newest of the thresholds."""
        newest = ops.arange(self.window) >= self.window - count
        return pairwise.masked_mean(ops.convert_to_tensor(thresholds), newest)

    def remember(self, representations, labels):
        """Put the images that count into the memory, in the place of the oldest."""
        x = ops.stop_gradient(representations[self.representation])
        kept = self.kept(labels, x)
        labels, x = self._with_batch(labels, x)
        mask = ops.concatenate([self._is_filled(), kept], axis=0)
        # Images stand last, the newest at the end.
        num_rows = ops.shape(mask)[0]
        rows = ops.arange(num_rows)
        newest = ops.argsort(rows + ops.cast(mask, rows.dtype) * num_rows)[-self.size :]
        count = self.filled + ops.sum(ops.cast(kept, "int32"))
        self._memorize(ops.take(labels, newest, axis=0), ops.take(x, newest, axis=0), count)

    def observe(self, pairs):
        """Count the anchors whose images count."""
        batch = pairs[self.representation]
        kept = batch.of_anchors(self.kept(batch.labels, batch.references))
        return {"kept": (pairwise.masked_count(kept), ops.shape(kept)[0])}


def _ascending(values):
    # One more, so that a batch without images has a value too.
    return ops.pad(ops.sort(values), ((0, 1),), constant_values=float("inf"))
