"""Pairs: the anchors of a batch and everything that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from keras import ops

from tfdml import pairwise, replicas
from tfdml.arguments import one_of


class Rows(NamedTuple):
    """The rows `first` to `first + count - 1` of a batch; both may be tensors."""

    first: Any
    count: Any


class Pairs:
    """Anchors (b, d), the references (B, d) that they are compared with, and which of the pairs count.

    On a single device anchors and references are the batch. On each of several replicas the anchors are its own images
    and the references those of all replicas. With a cross-batch memory the references also hold the memory. A loss need
    not know which case it is in: it computes one value per anchor, (b,), from matrices (b, B), and asks `total` for
    sums over all anchors.

    Make them with `Pairs.of_batch`.

    Attributes:
        anchors: (b, d), or (b, ...) for other representations.
        references: (B, d).
        positives: (b, B) booleans, the pairs of two images of one class. An anchor is never its own positive.
        negatives: (b, B) booleans, the pairs of images of different classes. A pair that is in neither is unknown.
        labels: (B,) integers, or rows (B, L), of the references. Without labels these three are None.
        num_anchors: The number of anchors of the whole batch: a number, or a scalar.
        within: Whether the references are images of the batch alone, without a memory.

    Example:
        >>> pairs = Pairs.of_batch([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], labels=[0, 0, 1])
        >>> np.array(pairs.distances("sqeuclidean"))[1]
        array([0.8, 0. , 0.4], dtype=float32)
        >>> float(pairs.mean(pairs.distances("sqeuclidean"), pairs.positives))
        0.8
    """

    anchors: Any
    references: Any
    labels: Any = None
    positives: Any = None
    negatives: Any = None
    _similarities: Any = None
    num_anchors: Any = None
    within = True
    #: What `distances()` are where none is named.
    distance: Any = "euclidean"
    _rows: Rows | None = None
    _relation: Callable | None = None
    _total: Callable | None = None
    _shared = True

    def __init__(self, anchors, references, **attributes):
        self.anchors, self.references = anchors, references
        self.num_anchors = ops.shape(anchors)[0]
        vars(self).update(attributes)
        self._matrices: dict[Any, Any] = {}

    @classmethod
    def of_batch(
        cls,
        vectors,
        labels=None,
        relation: Callable | None = None,
        rows: Rows | None = None,
        total: Callable | None = None,
    ) -> Pairs:
        """Create the pairs of a batch.

        Args:
            vectors: (N, d), or (N, ...), of the whole batch.
            labels: (N,) integers; with `relation` rows (N, L) too. None if no positives and negatives are wanted.
            relation: A `tfdml.mining.Relation`, which images belong together; None for equal labels.
            rows: The rows that are anchors; None for all.
            total: From the sum over these anchors to the sum over all, if `rows` are not all.
        """
        references = ops.convert_to_tensor(vectors)
        anchors = references if rows is None else take_rows(references, rows)
        pairs = cls(
            anchors, references, num_anchors=ops.shape(references)[0], _rows=rows, _relation=relation, _total=total
        )
        if labels is not None:
            pairs._set_labels(pairwise.as_labels(labels, rows=relation is not None))
        return pairs

    @classmethod
    def between(cls, anchors, references) -> Pairs:
        """Create the pairs of two sets of vectors, (b, d) and (B, d), that share no image."""
        pairs = cls(ops.convert_to_tensor(anchors), ops.convert_to_tensor(references), within=False)
        pairs._shared = False
        return pairs

    def _set_labels(self, labels) -> None:
        together = pairwise.together(self.of_anchors(labels), labels, self._relation)
        self.labels, self._similarities = labels, None
        if together.dtype != "bool":
            known = ops.logical_and(ops.logical_not(ops.isnan(together)), self.others)
            # Of unknown pairs 0, as a NaN would get into gradients even where it is masked.
            self._similarities = ops.where(known, together, 0.0)
            together = self._similarities >= getattr(self._relation, "threshold", 0.5)
            self.positives = ops.logical_and(known, together)
            self.negatives = ops.logical_and(known, ops.logical_not(together))
            return
        self.positives = ops.logical_and(together, self.others)
        self.negatives = ops.logical_not(together)
        if self._relation is not None:
            # An image without any label belongs to none, not even to itself.
            self.negatives = ops.logical_and(self.negatives, self.others)

    @property
    def similarities(self):
        """(b, B) float32, how similar the images of each positive and negative are said to be; 1 and 0 by class."""
        return ops.cast(self.positives, "float32") if self._similarities is None else self._similarities

    @property
    def square(self) -> bool:
        """Whether the references are the anchors, in their order."""
        return self._rows is None and self.within

    @property
    def itself(self):
        """(b, B) booleans, true where the reference is the anchor's own image."""
        if not self._shared:
            return ops.zeros((ops.shape(self.anchors)[0], ops.shape(self.references)[0]), "bool")
        first = 0 if self._rows is None else self._rows.first
        return pairwise.identity_mask(ops.shape(self.anchors)[0], ops.shape(self.references)[0], first)

    @property
    def others(self):
        """(b, B) booleans, true where the reference is another image than the anchor."""
        return ops.logical_not(self.itself)

    @property
    def anchor_labels(self):
        """(b,) integers, or rows (b, L)."""
        return self.of_anchors(self.labels)

    def of_anchors(self, values):
        """Of values (B, ...), one for each reference, those of the anchors: (b, ...)."""
        if self.square:
            return values
        return take_rows(values, self._rows or Rows(0, ops.shape(self.anchors)[0]))

    def distances(self, distance=None):
        """Compute the dissimilarities of anchors and references: (b, B) float32, smaller is more alike.

        Each matrix is computed once. In a loop or branch of a graph, use a matrix that was computed before it.

        Args:
            distance: One of `tfdml.pairwise.DISTANCES`, or a `tfdml.mining.Distance` or function of two matrices. By
                default that of the loss that the pairs were made for.

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
            one_of("distance", distance, pairwise.DISTANCES)
        matrix = ops.convert_to_tensor(distance(self.anchors, self.references))
        size = (self.anchors.shape[0], self.references.shape[0])
        if not _fits(matrix, size):
            name = getattr(distance, "__name__", type(distance).__name__)
            raise ValueError(f"distance {name} must return a matrix {size}, not {tuple(matrix.shape)}")
        matrix = ops.cast(matrix, "float32")
        return -matrix if getattr(distance, "larger_is_closer", False) else matrix

    def cosines(self):
        """Compute the cosines of anchors and references: (b, B) float32; 0 for a zero vector."""
        if "cosines" not in self._matrices:
            anchors = pairwise.l2_normalize(self.anchors)
            references = anchors if self.square else pairwise.l2_normalize(self.references)
            self._matrices["cosines"] = pairwise.dot_products(anchors, references)
        return self._matrices["cosines"]

    def products(self):
        """Compute the dot products of anchors and references: (b, B) float32."""
        if "products" not in self._matrices:
            self._matrices["products"] = pairwise.dot_products(self.anchors, self.references)
        return self._matrices["products"]

    def total(self, values):
        """Return the sum over all anchors of the batch, from the sum over these. No gradient flows through it.

        Args:
            values: A scalar or tensor, what these anchors make up.
        """
        values = ops.stop_gradient(ops.convert_to_tensor(values))
        return values if self._total is None else self._total(values)

    def count(self, mask):
        """Count the pairs of all anchors that `mask` (b, B) has: a float32 scalar."""
        return self.total(pairwise.masked_count(mask))

    def mean(self, values, mask=None):
        """Compute the mean over the pairs of all anchors, or the part of it that these anchors make up.

        Args:
            values: (b, B), or (b,).
            mask: Booleans of the same shape, what counts; None for all. The mean of nothing is 0.
        """
        mask = ops.ones(ops.shape(values), "bool") if mask is None else mask
        return pairwise.masked_sum(values, mask) / ops.maximum(self.count(mask), 1.0)

    def scale_to_mean(self, rows, counted):
        """Scales sums of the anchors, (b,), so that their mean over all anchors is their total over `counted`.

        Args:
            rows: (b,); all 0 where nothing is counted.
            counted: A scalar, how much these anchors count. It may be an expected number, below 1.
        """
        counted = self.total(counted)
        return rows * (ops.cast(self.num_anchors, "float32") / ops.where(counted > 0, counted, 1.0))

    def keep(self, positives, negatives) -> Pairs:
        """Return the same pairs with only those positives and negatives that are in these masks (b, B) too.

        Raises:
            ValueError: A mask has another shape.
        """
        pairs = self._copy()
        for name, mask in (("positives", positives), ("negatives", negatives)):
            mask, present = ops.convert_to_tensor(mask), getattr(self, name)
            if not _fits(mask, tuple(present.shape)):
                raise ValueError(f"{name} to keep must have shape {tuple(present.shape)}, not {tuple(mask.shape)}")
            setattr(pairs, name, ops.logical_and(present, ops.cast(mask, "bool")))
        return pairs

    def keep_images(self, kept) -> Pairs:
        """Return the same pairs without those of references, and of anchors, for which `kept` (B,) is false."""
        mask = ops.logical_and(self.of_anchors(kept)[:, None], kept[None, :])
        return self.keep(mask, mask)

    def using(self, distance) -> Pairs:
        """Return the same pairs, whose `distances()` are by default these."""
        return self._copy(distance=distance)

    def on(self, vectors) -> Pairs:
        """Return the same pairs of another representation: vectors (N, d), or (N, ...), of the whole batch.

        Raises:
            ValueError: The references are not the images of the batch alone.
        """
        if not self.within:
            raise ValueError("pairs with references beyond the batch have no other representation")
        vectors = ops.convert_to_tensor(vectors)
        return self._of(vectors if self._rows is None else take_rows(vectors, self._rows), vectors)

    def map(self, function: Callable) -> Pairs:
        """Return the same pairs of `function(vectors)`, which works on each vector alone."""
        anchors = function(self.anchors)
        return self._of(anchors, anchors if self.square else function(self.references))

    def without_gradient(self) -> Pairs:
        """Return the same pairs, through which no gradient flows."""
        pairs = self.map(ops.stop_gradient)
        pairs._matrices = {name: ops.stop_gradient(matrix) for name, matrix in self._matrices.items()}
        return pairs

    def with_memory(self, vectors, labels) -> Pairs:
        """Return the pairs of the same anchors with further references, which are no anchors.

        The batch's own vectors carry no gradient as references then.

        Args:
            vectors: (M, d), embeddings of earlier batches.
            labels: Theirs, (M,) or (M, L).
        """
        references = ops.concatenate([ops.stop_gradient(self.references), vectors], axis=0)
        pairs = self._of(self.anchors, references)
        pairs.within = False
        pairs._set_labels(ops.concatenate([self.labels, ops.cast(labels, self.labels.dtype)], axis=0))
        return pairs

    def _of(self, anchors, references) -> Pairs:
        """Return the same pairs of other vectors."""
        pairs = self._copy(anchors=anchors, references=references)
        pairs._matrices = {}
        return pairs

    def _copy(self, **changes) -> Pairs:
        pairs = object.__new__(type(self))
        vars(pairs).update(vars(self) | changes)
        return pairs


def pairs_by_name(representations: Mapping[str, Any], *args, **kwargs) -> dict[str, Pairs]:
    """Create the pairs of each representation, which share their masks.

    Args:
        representations: Vectors (N, ...) of the whole batch by name.
        *args: As of `Pairs.of_batch`, after the vectors.
        **kwargs: As of `Pairs.of_batch`.

    Example:
        >>> named = pairs_by_name({"pooled": keras.ops.ones((2, 3)), "embedding": keras.ops.eye(2)}, labels=[0, 1])
        >>> float(named["embedding"].distances("sqeuclidean")[0, 1]), float(named["pooled"].distances()[0, 1])
        (2.0, 0.0)
    """
    first, *others = representations
    pairs = Pairs.of_batch(representations[first], *args, **kwargs)
    return {first: pairs, **{name: pairs.on(representations[name]) for name in others}}


def pairs_of_replica(
    representations: Mapping[str, Any], labels, relation: Callable | None = None, num_local=None, whole=False
) -> dict[str, Pairs]:
    """Create the pairs of this replica's images with those of all replicas, for each representation.

    Args:
        representations: Vectors (N, ...) by name, gathered from all replicas.
        labels: (N,) integers, gathered; with `relation` rows (N, L) too.
        relation: Which images belong together, as of `Pairs.of_batch`.
        num_local: The number of this replica's images.
        whole: Whether the images of all replicas are anchors.
    """
    if whole or replicas.count() == 1:
        return pairs_by_name(representations, labels, relation)
    rows = Rows(replicas.first_row(num_local), num_local)
    return pairs_by_name(representations, labels, relation, rows, _total_of_replicas)


def take_rows(x, rows: Rows):
    """Return these rows of x (N, ...)."""
    if not isinstance(rows.count, int):
        return x[rows.first : rows.first + rows.count]
    # So that the size stays known where the first row is not.
    others = ops.shape(x)[1:]
    return ops.slice(x, (rows.first, *[0] * len(others)), (rows.count, *others))


def _fits(matrix, size: tuple) -> bool:
    """Whether a matrix has this size, as far as both are known."""
    shape = tuple(matrix.shape)
    return len(shape) == len(size) and all(None in two or two[0] == two[1] for two in zip(shape, size, strict=True))


def _total_of_replicas(x):
    return ops.sum(replicas.gather(ops.expand_dims(x, 0)), axis=0)
