"""Pairs: the anchors of a batch and everything that they are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from tfdml import pairwise, replicas
from tfdml.arguments import one_of
from tfdml.registry import DISTANCES


@dataclasses.dataclass(frozen=True)
class Scope:
    """Which images of a batch are anchors; by default all.

    Attributes:
        first: The first anchor's row of the batch. It may be a tensor, as `count` may.
        count: The number of anchors; None for the whole batch.
        total: From the sum over these anchors to the sum over the whole batch; None where they are
            the same.
    """

    first: Any = 0
    count: Any = None
    total: Callable | None = None

    @classmethod
    def of_replica(cls, num_local) -> Scope:
        """Return the scope of this replica's images, of which there are `num_local`, in the batch
        of all replicas."""
        if replicas.count() == 1:
            return cls()
        return cls(replicas.first_row(num_local), num_local, _total_of_replicas)

    def take(self, x):
        """Return the rows of the anchors, of x (N, ...)."""
        return x if self.count is None else take_rows(x, self.first, self.count)


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Anchors (b, d), the references (B, d) that they are compared with, and which of the pairs
    count.

    On a single device anchors and references are the batch. On each of several replicas the anchors
    are its own images and the references those of all replicas. With a cross-batch memory the
    references also hold the memory. A loss need not know which case it is in: it computes one value
    per anchor, (b,), from matrices (b, B), and asks `total` for sums over all anchors.

    Make them with `Pairs.of_batch`.

    Attributes:
        anchors: (b, d) float32, or (b, ...) for other representations.
        references: (B, d).
        num_anchors: The number of anchors of the whole batch: a number, or a scalar.
        scope: Which of the references are the anchors.
        within: Whether the references are images of the batch alone, without a memory.
        apart: Whether no anchor is one of the references: of two sets, and of two views of a batch.
        relation: Which images belong together; None for equal labels.
        labels: (B,) integers, or rows (B, L), of the references. Without labels this and the masks
            are None.
        positives: (b, B) booleans, the pairs of two images of one class. An anchor is never its own
            positive.
        negatives: (b, B) booleans, the pairs of images of different classes. A pair that is in
            neither is unknown.
        grades: (b, B) float32, the similarities that the relation returns; None where it returns
            booleans.
        distance: What `distances()` are where none is named.

    Example:
        >>> pairs = Pairs.of_batch([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], labels=[0, 0, 1])
        >>> np.array(pairs.distances("sqeuclidean"))[1]
        array([0.8, 0. , 0.4], dtype=float32)
        >>> float(pairs.mean(pairs.distances("sqeuclidean"), pairs.positives))
        0.8
    """

    anchors: Any
    references: Any
    num_anchors: Any
    scope: Scope = Scope()
    within: bool = True
    apart: bool = False
    relation: Callable | None = None
    labels: Any = None
    positives: Any = None
    negatives: Any = None
    grades: Any = None
    distance: Any = "euclidean"
    _matrices: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def of_batch(
        cls, vectors, labels=None, relation: Callable | None = None, scope: Scope = Scope()
    ) -> Pairs:
        """Create the pairs of a batch.

        Args:
            vectors: (N, d), or (N, ...), of the whole batch.
            labels: (N,) integers; with `relation` rows (N, L) too. None if no positives and
                negatives are wanted.
            relation: A `tfdml.mining.Relation`, which images belong together; None for equal
                labels.
            scope: Which images are anchors; by default all.
        """
        references = _float32(vectors)
        pairs = cls(
            scope.take(references), references, ops.shape(references)[0], scope, relation=relation
        )
        return (
            pairs
            if labels is None
            else pairs._with_labels(pairwise.as_labels(labels, rows=relation is not None))
        )

    @classmethod
    def between(cls, anchors, references) -> Pairs:
        """Create the pairs of two sets of vectors, (b, d) and (B, d), that share no image."""
        anchors, references = _float32(anchors), _float32(references)
        return cls(anchors, references, ops.shape(anchors)[0], within=False, apart=True)

    def _with_labels(self, labels) -> Pairs:
        """Return the same pairs with these labels of the references, and the masks and grades that
        they give."""
        together, others = (
            pairwise.together(self.scope.take(labels), labels, self.relation),
            self.others,
        )
        if together.dtype == "bool":
            negatives = ops.logical_not(together)
            if self.relation is not None:
                # An image without any label belongs to none, not even to itself.
                negatives = ops.logical_and(negatives, others)
            masks = {
                "positives": ops.logical_and(together, others),
                "negatives": negatives,
                "grades": None,
            }
        else:
            graded = ops.logical_and(ops.logical_not(ops.isnan(together)), others)
            # Of unknown pairs 0, as a NaN would get into gradients even where it is masked.
            grades = ops.where(graded, together, 0.0)
            together = grades >= getattr(self.relation, "threshold", 0.5)
            negatives = ops.logical_and(graded, ops.logical_not(together))
            masks = {
                "positives": ops.logical_and(graded, together),
                "negatives": negatives,
                "grades": grades,
            }
        return dataclasses.replace(self, labels=labels, **masks)

    @property
    def similarities(self):
        """(b, B) float32, how similar the images of each positive and negative are said to be; 1
        and 0 by class."""
        return ops.cast(self.positives, "float32") if self.grades is None else self.grades

    @property
    def square(self) -> bool:
        """Whether the references are the anchors, in their order."""
        return self.scope.count is None and not self.apart

    @property
    def itself(self):
        """(b, B) booleans, true where the reference is the anchor's own image."""
        # As rows behind those of the references, no anchor is one of them.
        first = ops.shape(self.references)[0] if self.apart else self.scope.first
        return pairwise.identity_mask(
            ops.shape(self.anchors)[0], ops.shape(self.references)[0], first
        )

    @property
    def others(self):
        """(b, B) booleans, true where the reference is another image than the anchor."""
        return ops.logical_not(self.itself)

    @property
    def anchor_labels(self):
        """(b,) integers, or rows (b, L)."""
        return self.scope.take(self.labels)

    def of_anchors(self, values):
        """Of values (B, ...), one for each reference, those of the anchors: (b, ...)."""
        return self.scope.take(values)

    def distances(self, distance=None):
        """Compute the dissimilarities of anchors and references: (b, B) float32, smaller is more
        alike.

        Each matrix is computed once. In a loop or branch of a graph, use a matrix that was computed
        before it.

        Args:
            distance: One of `tfdml.registry.DISTANCES`, or a `tfdml.mining.Distance` or function of
                two matrices. By default that of the loss that the pairs were made for.

        Raises:
            ValueError: `distance` is none of these, or does not return a matrix (b, B).
        """
        distance = self.distance if distance is None else distance
        if distance not in self._matrices:
            self._matrices[distance] = self._distances(distance)
        return self._matrices[distance]

    def _distances(self, distance):
        if distance == "euclidean":
            return pairwise.safe_sqrt(self.distances("sqeuclidean"))
        if distance == "cosine":
            return 1.0 - self.cosines()
        if distance == "dot":
            return -self.products()
        if distance == "sqeuclidean":
            if self.square:
                return pairwise.squared_distances(self.anchors)
            return pairwise.squared_distances(self.anchors, self.references, self.itself)
        if isinstance(distance, str):
            one_of("distance", distance, DISTANCES)
        matrix = ops.convert_to_tensor(distance(self.anchors, self.references))
        size = (self.anchors.shape[0], self.references.shape[0])
        if not _fits(matrix, size):
            name = getattr(distance, "__name__", type(distance).__name__)
            raise ValueError(
                f"distance {name} must return a matrix {size}, not {tuple(matrix.shape)}"
            )
        matrix = ops.cast(matrix, "float32")
        return -matrix if getattr(distance, "larger_is_closer", False) else matrix

    def cosines(self):
        """Compute the cosines of anchors and references: (b, B) float32; 0 for a zero vector."""
        if "cosines" not in self._matrices:
            anchors = pairwise.l2_normalize(self.anchors)
            references = None if self.square else pairwise.l2_normalize(self.references)
            self._matrices["cosines"] = pairwise.dot_products(anchors, references)
        return self._matrices["cosines"]

    def products(self):
        """Compute the dot products of anchors and references: (b, B) float32."""
        if "products" not in self._matrices:
            references = None if self.square else self.references
            self._matrices["products"] = pairwise.dot_products(self.anchors, references)
        return self._matrices["products"]

    def total(self, values):
        """Return the sum over all anchors of the batch, from the sum over these.

        Gradients flow through it, to the anchors of all replicas.

        Args:
            values: A scalar or tensor, what these anchors make up.

        Example:
            >>> pairs = Pairs.of_batch([[0.0], [1.0], [2.0]], labels=[0, 0, 1])
            >>> spread = keras.ops.sum(pairs.distances(), axis=1)
            >>> np.array(spread / pairs.total(keras.ops.sum(spread)))
            array([0.375, 0.25 , 0.375], dtype=float32)
        """
        values = ops.convert_to_tensor(values)
        return values if self.scope.total is None else self.scope.total(values)

    def count(self, mask):
        """Count the pairs of all anchors that `mask` (b, B) has: a float32 scalar.

        Raises:
            ValueError: `mask` has no booleans. A count has no gradient, and weights would have one.
        """
        mask = ops.convert_to_tensor(mask)
        if keras.backend.standardize_dtype(mask.dtype) != "bool":
            raise ValueError(
                f"a mask of pairs must be booleans, not {mask.dtype}: of weights divide the sum of "
                "weighted values by pairs.total(sum of the weights)"
            )
        return self.total(pairwise.masked_count(mask))

    def mean(self, values, mask=None):
        """Compute the mean over the pairs of all anchors, or the part of it that these anchors make
        up.

        Args:
            values: (b, B), or (b,).
            mask: Booleans of the same shape, what counts; None for all. The mean of nothing is 0.

        Raises:
            ValueError: `mask` has no booleans.
        """
        mask = ops.ones(ops.shape(values), "bool") if mask is None else mask
        return pairwise.masked_sum(values, mask) / ops.maximum(self.count(mask), 1.0)

    def scale_to_mean(self, rows, counted):
        """Scales sums of the anchors, (b,), so that their mean over all anchors is their total over
        `counted`.

        Args:
            rows: (b,); all 0 where nothing is counted.
            counted: A scalar, how much these anchors count. It may be an expected number, below 1.
                Gradients flow through it as through `total`.
        """
        counted = self.total(counted)
        return rows * (ops.cast(self.num_anchors, "float32") / ops.where(counted > 0, counted, 1.0))

    def keep(self, positives, negatives) -> Pairs:
        """Return the same pairs with only those positives and negatives that are in these masks (b,
        B) too.

        Raises:
            ValueError: A mask has another shape.
        """
        masks = {
            "positives": ops.convert_to_tensor(positives),
            "negatives": ops.convert_to_tensor(negatives),
        }
        for name, mask in masks.items():
            present = getattr(self, name)
            if not _fits(mask, tuple(present.shape)):
                raise ValueError(
                    f"{name} to keep must have shape {tuple(present.shape)}, not "
                    f"{tuple(mask.shape)}"
                )
            masks[name] = ops.logical_and(present, ops.cast(mask, "bool"))
        return dataclasses.replace(self, **masks)

    def keep_images(self, kept) -> Pairs:
        """Return the same pairs without those of references, and of anchors, for which `kept` (B,)
        is false."""
        mask = ops.logical_and(self.scope.take(kept)[:, None], kept[None, :])
        return self.keep(mask, mask)

    def using(self, distance) -> Pairs:
        """Return the same pairs, whose `distances()` are by default these."""
        return dataclasses.replace(self, distance=distance)

    def on(self, vectors) -> Pairs:
        """Return the same pairs of another representation: vectors (N, d), or (N, ...), of the
        whole batch.

        Raises:
            ValueError: The references are not the images of the batch alone.
        """
        if not self.within:
            raise ValueError("pairs with references beyond the batch have no other representation")
        vectors = _float32(vectors)
        return self._of(self.scope.take(vectors), vectors)

    def across(self, other: Pairs, shared: bool = True) -> Pairs:
        """Return the pairs of these anchors with the references of another view of the batch.

        An anchor's own other view is a positive.

        Args:
            other: The pairs of the other view, with the same labels and scope.
            shared: Whether the positives of these pairs are positives too; else they are in neither
                mask.
        """
        own = self.itself
        grades = None if self.grades is None else ops.where(own, 1.0, self.grades)
        positives = ops.logical_or(self.positives, own) if shared else own
        negatives = ops.logical_and(self.negatives, ops.logical_not(own))
        masks = {"positives": positives, "negatives": negatives, "grades": grades}
        pairs = self._of(self.anchors, other.references)
        return dataclasses.replace(pairs, within=False, apart=True, **masks)

    def map(self, function: Callable) -> Pairs:
        """Return the same pairs of `function(vectors)`, which works on each vector alone."""
        anchors = function(self.anchors)
        return self._of(anchors, anchors if self.square else function(self.references))

    def without_gradient(self) -> Pairs:
        """Return the same pairs, through which no gradient flows."""
        matrices = {name: ops.stop_gradient(matrix) for name, matrix in self._matrices.items()}
        return dataclasses.replace(self.map(ops.stop_gradient), _matrices=matrices)

    def with_memory(self, vectors, labels) -> Pairs:
        """Return the pairs of the same anchors with further references, which are no anchors.

        The batch's own vectors carry no gradient as references then.

        Args:
            vectors: (M, d), embeddings of earlier batches.
            labels: Theirs, (M,) or (M, L).
        """
        references = ops.concatenate([ops.stop_gradient(self.references), vectors], axis=0)
        scope = dataclasses.replace(self.scope, count=ops.shape(self.anchors)[0])
        pairs = dataclasses.replace(self._of(self.anchors, references), scope=scope, within=False)
        return pairs._with_labels(
            ops.concatenate([self.labels, ops.cast(labels, self.labels.dtype)], axis=0)
        )

    def _of(self, anchors, references) -> Pairs:
        """Return the same pairs of other vectors."""
        return dataclasses.replace(self, anchors=anchors, references=references, _matrices={})


def pairs_by_name(
    representations: Mapping[str, Any],
    labels,
    relation: Callable | None = None,
    scope: Scope = Scope(),
) -> dict[str, Pairs]:
    """Create the pairs of each representation, which share their masks.

    Args:
        representations: Vectors (N, ...) of the whole batch by name.
        labels: As of `Pairs.of_batch`.
        relation: As of `Pairs.of_batch`.
        scope: As of `Pairs.of_batch`.

    Example:
        >>> named = pairs_by_name({"pooled": keras.ops.ones((2, 3)), "embedding": keras.ops.eye(2)},
        ...     labels=[0, 1])
        >>> float(named["embedding"].distances("sqeuclidean")[0,
        ...     1]), float(named["pooled"].distances()[0, 1])
        (2.0, 0.0)
    """
    first, *others = representations
    pairs = Pairs.of_batch(representations[first], labels, relation, scope)
    return {first: pairs, **{name: pairs.on(representations[name]) for name in others}}


def take_rows(x, first, count):
    """Return the rows `first` to `first + count - 1` of x (N, ...); both may be tensors."""
    if not isinstance(count, int):
        return x[first : first + count]
    # So that the size stays known where the first row is not.
    others = ops.shape(x)[1:]
    return ops.slice(x, (first, *[0] * len(others)), (count, *others))


def _float32(vectors):
    return ops.cast(ops.convert_to_tensor(vectors), "float32")


def _fits(matrix, size: tuple) -> bool:
    """Whether a matrix has this size, as far as both are known."""
    shape = tuple(matrix.shape)
    if len(shape) != len(size):
        return False
    return all(None in two or two[0] == two[1] for two in zip(shape, size, strict=True))


def _total_of_replicas(x):
    return ops.sum(replicas.gather(ops.expand_dims(x, 0)), axis=0)
