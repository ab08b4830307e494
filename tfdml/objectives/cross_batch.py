"""Cross-batch memory: a loss over pairs of the batch with the embeddings of the batches before it (XBM)."""

from __future__ import annotations

import keras
from keras import ops

from tfdml.arguments import integer
from tfdml.losses.base import PairLoss, check_rank
from tfdml.objectives.base import Stateful
from tfdml.saving import restore


@keras.saving.register_keras_serializable("tfdml")
class CrossBatchMemory(Stateful):
    """A loss over the pairs of the batch's images with those of the batch and of a memory of earlier ones.

    L = loss over pairs (i, j),   i of the batch,   j of the batch or of the memory

    with the loss's own formula. Only the images of the batch are anchors. Every j is a constant, also an image of the
    batch: the gradient reaches an image as the anchor i alone. With an empty memory the contrastive gradient is
    therefore half of that of the loss alone. The authors' code and pytorch-metric-learning do the same.

    The memory holds the last `size` embeddings and labels as they were when their batch was trained on. After the first
    steps embeddings change slowly, so an anchor sees thousands of negatives at the cost of one matrix product.

    The paper adds this to the loss of the batch alone, with a weight:

        objectives = [MetricLoss(loss), CrossBatchMemory(loss, start=1000)]

    In its code, as here, the pairs of the batch are among those with the memory. There this term is 0 for the first
    `start` steps; here it is the loss of the batch, so that it may also stand alone.

    Until the memory is full, the places that are empty make no pair. Batches are remembered in training alone, each
    after its step. The memory is a part of the weights, saved and resumed with them. Under a distribution strategy
    every replica has the same memory, of the global batches. On JAX labels must fit 32 bits.

    Args:
        loss: A loss of tfdml over pairs in which each anchor's value comes from its own pairs, such as
            `tfdml.losses.ContrastiveLoss()`; not `LiftedStructureLoss`, `AngularLoss`, `QuadrupletLoss` or
            `VICRegLoss`.
        size: How many embeddings are remembered. The default is that of the authors' code.
        start: For this many steps nothing is remembered, while embeddings change fast. The authors' code has 2,000 of
            4,000 steps. The default is 0, since the memory of a shorter training would stay empty.
        representation: The name of the vectors (B, d) that are compared.
        label_columns: L, where labels are rows (B, L) and the loss has `with_positives`.
        weight: The factor of this term.
        name: The term's name in logs; by default `cross_batch_` and the loss's.

    Raises:
        ValueError: The loss is not one over pairs, or takes no memory. An argument is out of range, or labels have
            another number of columns.

    Example:
        >>> objective = CrossBatchMemory(tfdml.losses.ContrastiveLoss(distance="euclidean"), size=4)
        >>> batch = {"embedding": keras.ops.array([[1.0, 0.0], [0.6, 0.8]])}
        >>> float(objective(batch, keras.ops.array([0, 1]), training=True))  # one negative: 1 - sqrt(0.8)
        0.1055728
        >>> float(objective(batch, keras.ops.array([1, 0])))  # classes exchanged: sqrt(0.8) + (2 - sqrt(0.8)) / 2
        1.4472136

    Source: Wang et al., "Cross-Batch Memory for Embedding Learning", CVPR 2020, sec. 3.2 and algorithm 1; the authors'
    code, https://github.com/msight-tech/research-xbm.
    """

    def __init__(
        self,
        loss,
        size=8192,
        start=0,
        representation="embedding",
        label_columns=1,
        weight=1.0,
        name=None,
        **kwargs,
    ):
        loss = restore(loss)
        if not isinstance(loss, PairLoss) or loss.within_batch:
            raise ValueError(
                "CrossBatchMemory takes a loss of tfdml over pairs in which each anchor's value comes from its own "
                f"pairs, such as ContrastiveLoss(), not {type(loss).__name__}"
            )
        super().__init__(weight=weight, name=name or f"cross_batch_{loss.name}", **kwargs)
        self.loss = loss
        self.size = integer("size", size, at_least=1)
        self.start = integer("start", start, at_least=0)
        self.representation = representation
        self.label_columns = integer("label_columns", label_columns, at_least=1)
        if self.label_columns > 1 and loss.positives is None:
            raise ValueError(
                f"label_columns={label_columns} needs a loss that says which label sets belong together, such as "
                f"{type(loss).__name__}(...).with_positives(tfdml.mining.shares_a_label)"
            )
        self.reduction = "sum" if loss.reduction == "sum" else "mean"

    def as_labels(self, labels):
        """As of `Objective`; rows of `label_columns` labels where the loss has `positives`."""
        labels = super().as_labels(labels)
        if self.positives is not None and labels.shape[1] not in (None, self.label_columns):
            raise ValueError(
                f"{self.name} keeps {self.label_columns} labels of each image, and the labels are "
                f"{tuple(labels.shape)}: give it label_columns={labels.shape[1]}"
            )
        return labels

    def build_from(self, shapes):
        """Create the memory, empty."""
        shape = self.select(shapes)[self.representation]
        if len(shape) != 2:
            raise ValueError(f"{self.name}: {self.representation!r} must be vectors (B, d), not {tuple(shape)}")

        def state(name, shape, dtype):
            return self.add_weight(name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=False)

        self.memory = state("memory", (self.size, shape[-1]), "float32")
        labels_shape = (self.size,) if self.positives is None else (self.size, self.label_columns)
        self.memory_labels = state(
            "memory_labels", labels_shape, "int32" if keras.backend.backend() == "jax" else "int64"
        )
        # The newest stand last.
        self.filled = state("filled", (), "int32")
        self.steps = state("steps", (), "int32")

    @property
    def whole_batch(self):
        """As the loss."""
        return self.loss.needs_whole_batch

    def compute_pairs(self, pairs):
        """Computes the loss over the pairs of the batch's images with the batch and the memory."""
        batch = pairs[self.representation]
        check_rank(self.name, batch.references, 2, f"{self.representation!r} to be vectors (B, d)")
        kept = ops.concatenate([self.kept(batch.labels, batch.references), self._there()], axis=0)
        return self.loss.of_pairs(batch.with_memory(self.memory, self.memory_labels).keep_images(kept))

    def kept(self, labels, x):
        """(B,) boolean: the images of a batch that count; here all."""
        del x
        return ops.ones(ops.shape(labels)[:1], "bool")

    def remember(self, representations, labels):
        """Put the batch into the memory, in the place of the oldest."""
        known = self.filled + ops.shape(labels)[0]
        labels, x = self._with_memory(labels, ops.stop_gradient(representations[self.representation]), batch_last=True)
        self._memorise(labels[-self.size :], x[-self.size :], known)

    def _memorise(self, labels, x, known):
        """Let the memory be these `size` vectors, of which the last `known` are vectors of images."""
        self.memory.assign(ops.reshape(x, self.memory.shape))
        self.memory_labels.assign(ops.reshape(labels, self.memory_labels.shape))
        self.filled.assign(ops.where(self.steps < self.start, 0, ops.minimum(known, self.size)))
        # Counted no further than is asked, so that it never overflows.
        self.steps.assign(ops.minimum(self.steps + 1, self.start))

    def forget(self):
        """Empty the memory."""
        for variable in (self.memory, self.memory_labels, self.filled, self.steps):
            variable.assign(ops.zeros_like(variable))

    def _there(self):
        """(size,) boolean: what of the memory is filled."""
        return ops.arange(self.size) >= self.size - self.filled

    def _with_memory(self, labels, x, batch_last=False):
        memory = (ops.convert_to_tensor(self.memory_labels), ops.convert_to_tensor(self.memory))
        batch = (ops.cast(labels, self.memory_labels.dtype), ops.cast(x, "float32"))
        pairs = zip(memory, batch, strict=True) if batch_last else zip(batch, memory, strict=True)
        return tuple(ops.concatenate(pair, axis=0) for pair in pairs)
