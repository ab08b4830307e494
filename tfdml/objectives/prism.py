"""PRISM: images whose labels are likely to be wrong are left out of a loss over pairs."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import integer, one_of, share
from tfdml.losses.classification import target_mask
from tfdml.objectives.base import Observed
from tfdml.objectives.cross_batch import CrossBatchMemory
from tfdml.objectives.wrappers import share_of


@keras.saving.register_keras_serializable("tfdml")
class Prism(Observed, CrossBatchMemory):
    """A loss over pairs with a memory, without the images whose labels look wrong beside what the memory holds.

    P_i = exp(w_y . x_i) / sum over classes k in the memory of exp(w_k . x_i),   y the label of image i

    where w_k is the mean of the unit embeddings of class k in the memory. Of a batch of n images those count whose P_i
    is above the mean of the last `window` values of Q, where Q of a batch is its floor(noise_rate n)-th smallest P. If
    none is, or there is no Q yet, all but the floor(noise_rate n) of smallest P count. Images of a class that the
    memory does not hold have P = 1 and count. The others are in no pair, neither as anchors nor beside others, and are
    not remembered: the memory becomes cleaner than the labels.

    What a `CrossBatchMemory` is said to be holds here too: pairs of the batch with batch and memory, an empty memory at
    first (so that the first batches count whole), the state saved with the learner. A loss that is a mean over images
    still divides by all n. Logged beside the value: `<name>_kept`, the share of images that count.

    Args:
        loss: As `CrossBatchMemory` takes it.
        num_classes: C, for labels 0 .. C - 1; images of other labels count.
        noise_rate: The share of labels that is thought to be wrong: at least 0 and below 1.
        window: Over how many batches Q is averaged.
        size: How many embeddings are remembered: a few for each class.
        start: For this many steps nothing is remembered, and all images count.
        pairs: `"memory"`: those of the batch's images with batch and memory; `"batch"`: the batch's alone, and the
            memory only judges labels. In training from random weights embeddings change too fast to compare with.
        representation: The name of the vectors (B, d) that are compared.
        weight: The factor of this term.
        name: The term's name in logs.

    Raises:
        ValueError: The loss is not one over pairs, or takes no memory; or an argument is out of range.

    Example:
        >>> objective = Prism(tfdml.losses.ContrastiveLoss(), num_classes=2, noise_rate=0.25, size=8)
        >>> batch = {"embedding": keras.ops.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])}
        >>> value = objective(batch, keras.ops.array([0, 0, 1, 1]), training=True)
        >>> np.array(objective.kept(keras.ops.array([0, 1, 1, 1]), batch["embedding"])).tolist()
        [True, False, True, True]

    Source: Liu et al., "Noise-resistant Deep Metric Learning with Ranking-based Instance Selection", CVPR 2021, with
    the average similarity and the smoothed top-R threshold; what is done where nothing would be left, and the window of
    5, are the authors' code's. There a class that has left the memory keeps its last mean.
    """

    observes = ("kept",)

    def __init__(
        self,
        loss,
        num_classes,
        noise_rate=0.2,
        window=5,
        size=4096,
        start=0,
        pairs="memory",
        representation="embedding",
        weight=1.0,
        name="prism",
        **kwargs,
    ):
        super().__init__(loss, size, start, representation, weight=weight, name=name, **kwargs)
        if self.positives is not None:
            raise ValueError("Prism compares images with the means of classes: it takes no loss with with_positives()")
        self.num_classes = integer("num_classes", num_classes, at_least=1)
        self.noise_rate = share("noise_rate", noise_rate, "for images to be left")
        self.window = integer("window", window, at_least=1)
        self.pairs = one_of("pairs", pairs, ("memory", "batch"))

    @property
    def takes_label_sets(self):
        """No: it knows classes by their means."""
        return False

    def build_from(self, shapes):
        """Create the memory and the thresholds of the last batches, empty."""
        super().build_from(shapes)
        self.thresholds = self.add_weight(name="thresholds", shape=(self.window,), initializer="zeros", trainable=False)
        # Of the thresholds; the newest stands last.
        self.known = self.add_weight(name="known", shape=(), dtype="int32", initializer="zeros", trainable=False)

    def clean_probabilities(self, labels, x):
        """P of each image, (B,) float32: 1 where the memory holds none of its class."""
        there = ops.cast(self._there(), "float32")
        index = ops.convert_to_tensor(self.memory_labels)
        # What is of none of the classes is in no sum.
        index = ops.cast(ops.where(ops.logical_and(index >= 0, index < self.num_classes), index, -1), "int32")
        unit = pairwise.l2_normalize(self.memory) * there[:, None]
        sums = ops.segment_sum(unit, index, self.num_classes)
        counts = ops.segment_sum(there, index, self.num_classes)
        held = counts > 0
        means = sums / ops.where(held, counts, 1.0)[:, None]
        similarities = ops.matmul(pairwise.l2_normalize(ops.stop_gradient(x)), ops.transpose(means))
        logits = ops.where(held[None, :], similarities, -1e30)
        own = ops.logical_and(target_mask(labels, self.num_classes), held[None, :])
        return ops.where(ops.any(own, axis=1), pairwise.masked_sum(ops.softmax(logits, axis=1), own, axis=1), 1.0)

    def compute_pairs(self, pairs):
        """Computes the loss over the pairs of the images that count, with the memory or by themselves."""
        if self.pairs == "memory":
            return super().compute_pairs(pairs)
        batch = pairs[self.representation]
        return self.loss.of_pairs(batch.keep_images(self.kept(batch.labels, batch.references)))

    def update(self, representations, labels):
        """Take the batch's Q into the window; where the window's mean would leave no image, Q alone."""
        likely = self.clean_probabilities(labels, representations[self.representation])
        dropped = share_of(self.noise_rate, ops.shape(likely)[0])
        own = _ascending(likely)[ops.maximum(dropped - 1, 0)]
        moved = ops.concatenate([self.thresholds[1:], own[None]], axis=0)
        known = ops.minimum(self.known + 1, self.window)
        some = ops.any(likely > self._mean(moved, known))
        # Q says nothing where so small a batch drops no image, or where it is of classes that nothing is known of.
        says = ops.logical_and(dropped > 0, own < 1)
        self.thresholds.assign(ops.where(says, moved, self.thresholds))
        self.known.assign(ops.where(says, ops.where(some, known, 1), self.known))

    def kept(self, labels, x):
        """(B,) boolean: the images of a batch that count."""
        likely = self.clean_probabilities(labels, x)
        above = likely > self._mean(self.thresholds, self.known)
        by_window = ops.logical_and(self.known > 0, ops.any(above))
        lowest = _ascending(likely)[share_of(self.noise_rate, ops.shape(likely)[0])]
        return ops.logical_or(ops.where(by_window, above, likely >= lowest), likely >= 1)

    def _mean(self, thresholds, known):
        newest = ops.arange(self.window) >= self.window - known
        return pairwise.masked_mean(ops.convert_to_tensor(thresholds), newest)

    def remember(self, representations, labels):
        """Put the images that count into the memory, in the place of the oldest."""
        x = ops.stop_gradient(representations[self.representation])
        kept = self.kept(labels, x)
        labels, x = self._with_memory(labels, x, batch_last=True)
        there = ops.concatenate([self._there(), kept], axis=0)
        # Those that are there stand last, as old as they are.
        places = ops.arange(ops.shape(there)[0])
        order = ops.argsort(places + ops.cast(there, places.dtype) * ops.shape(there)[0])[-self.size :]
        known = self.filled + ops.sum(ops.cast(kept, "int32"))
        self._memorise(ops.take(labels, order, axis=0), ops.take(x, order, axis=0), known)

    def forget(self):
        """Empty the memory and the window."""
        super().forget()
        for variable in (self.thresholds, self.known):
            variable.assign(ops.zeros_like(variable))

    def observe(self, pairs):
        """Computes the share of the batch that counts."""
        batch = pairs[self.representation]
        kept = ops.cast(self.kept(batch.labels, batch.references), "float32")
        return {"kept": (ops.mean(kept), ops.shape(kept)[0])}


def _ascending(values):
    # One more, so that a batch without images has a value too.
    return ops.pad(ops.sort(values), ((0, 1),), constant_values=float("inf"))
