"""Identities: what stands for a class of several images in a search, by one rule.

A query is compared with references. By `nearest`, each image is one. By `mean`, each class has one:
the mean of its images or, where they are in groups, of the means of its groups, as the templates of
IJB (Whitelam et al., 2017, "IARPA Janus Benchmark-B face dataset"). By `max_of_means`, each group
of a class has one, and the nearest of them counts; without groups they are found by k-means.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdml.errors import UserError, check_choice, counted
from tfdml.registry import PER_CLASS
from tfdml.retrieval.exact import (
    check_embeddings,
    in_float32,
    left_over,
    measure,
    nearest_first,
    neighbor_blocks,
    unit_rows,
)

# Steps of k-means, and the images of a class that its first centers are chosen from.
_MOST_STEPS = 50
_MOST_CANDIDATES = 2_000
# Distances by which lengths count apart from directions.
_BY_PRODUCT = ("cosine", "dot")


def check_rule(per_class: str, groups: Any = None) -> None:
    """Raise a `UserError` where there is no such rule, or it has no groups."""
    check_choice("per_class", per_class, PER_CLASS)
    if per_class == "nearest" and groups is not None:
        raise UserError("go with per_class='mean' or 'max_of_means'", groups=...)


def references_of(points: np.ndarray, groups: Any, per_class: str, distance: str) -> np.ndarray:
    """Return the references of one class.

    Args:
        points: (n, d) its images.
        groups: (n,) the group of each, a number; None: there are none.
        per_class: `mean` or `max_of_means`.
        distance: By `cosine` and `dot`, each image counts by its direction alone, and a mean has
            the mean length of its images.

    Returns:
        (m, d) float64.

    Example:
        >>> images = np.array([[0.0], [2.0], [9.0]])
        >>> references_of(images, None, "mean", "euclidean").ravel().tolist()
        [3.6666666666666665]
        >>> references_of(images, np.array([0, 0, 1]), "mean", "euclidean").ravel().tolist()
        [5.0]
        >>> references_of(images, np.array([0, 0, 1]), "max_of_means", "euclidean").ravel().tolist()
        [1.0, 9.0]
    """
    points = np.asarray(points, np.float64)
    by_product = distance in _BY_PRODUCT
    if per_class == "mean":
        return _mean(points, groups, by_product)[None]
    if groups is None:
        groups = _clusters(unit_rows(points) if by_product else points)
    parts = [points[groups == group] for group in np.unique(groups)]
    return np.stack([_mean(part, None, by_product) for part in parts])


def _mean(points: np.ndarray, groups: Any, by_product: bool) -> np.ndarray:
    """Return the mean of images, (d,), or of the means of their groups."""
    if len(points) == 1:
        return points[0]
    rows = unit_rows(points) if by_product else points
    if groups is not None:
        rows = np.stack([rows[groups == group].mean(axis=0) for group in np.unique(groups)])
    mean = rows.mean(axis=0)
    if by_product:
        return unit_rows(mean) * np.linalg.norm(points, axis=1).mean()
    return mean


def _clusters(points: np.ndarray) -> np.ndarray:
    """Return of each of n images of a class which of ceil(sqrt(n)) clusters of k-means it is in.

    The first centers are images: each brings the distances to the nearest center down the most
    (BUILD of Kaufman and Rousseeuw, 1990), so that nothing is drawn at random.
    """
    count = math.isqrt(len(points) - 1) + 1
    places = np.linspace(0, len(points) - 1, min(len(points), _MOST_CANDIDATES)).astype(int)
    candidates = points[places]
    squares = _squares_between(candidates, candidates)
    nearest = np.full(len(candidates), np.inf)
    centers = np.zeros((count, points.shape[1]))
    for cluster in range(count):
        best = np.argmin(np.minimum(squares, nearest).sum(axis=1))
        nearest = np.minimum(nearest, squares[best])
        centers[cluster] = candidates[best]
    clusters = np.argmin(_squares_between(points, centers), axis=1)
    for _ in range(_MOST_STEPS):
        for cluster in np.unique(clusters):
            centers[cluster] = points[clusters == cluster].mean(axis=0)
        before = clusters
        clusters = np.argmin(_squares_between(points, centers), axis=1)
        if np.array_equal(clusters, before):
            break
    return clusters


def _squares_between(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return (n, m) squared distances."""
    lengths = np.einsum("nd,nd->n", points, points)[:, None]
    return lengths + np.einsum("md,md->m", others, others) - 2 * points @ others.T


@dataclasses.dataclass(frozen=True, eq=False)
class Identities:
    """The references of the classes of a gallery.

    Attributes:
        references: (R, d) float32; by `nearest`, the images.
        reference_classes: (R,) the class of each, a number from 0.

    Args:
        embeddings: (G, d) the images.
        classes: (G,) the class of each, a number from 0.
        per_class: `nearest`, `mean` or `max_of_means`.
        distance: As `nearest_neighbors`.
        groups: (G,) the group of each image within its class, such as a session: a number; None:
            there are none. Not for `nearest`.

    Raises:
        UserError: As `check_rule`, or the embeddings are bad.

    Example:
        >>> images = [[0.0], [2.0], [5.0], [9.0]]
        >>> identities = Identities(images, np.array([0, 0, 1, 1]), "mean")
        >>> identities.references.ravel().tolist()
        [1.0, 7.0]
        >>> identities.search([[8.0], [2.0]], 1, own_rows=np.array([-1, 1]))
        (array([[1],
               [0]]), array([[1.],
               [2.]], dtype=float32))
    """

    embeddings: np.ndarray
    classes: np.ndarray
    per_class: str = "nearest"
    distance: str = "euclidean"
    groups: np.ndarray | None = None
    references: np.ndarray = dataclasses.field(init=False)
    reference_classes: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self):
        check_rule(self.per_class, self.groups)
        embeddings = check_embeddings(self.embeddings, "gallery embeddings")
        object.__setattr__(self, "embeddings", embeddings)
        references = embeddings
        classes = self.classes
        if self.per_class != "nearest":
            parts = [self._of_rows(rows) for rows in self._rows_by_class]
            sizes = [len(part) for part in parts]
            classes = np.repeat(np.arange(len(parts)), sizes)
            references = np.concatenate(parts).astype(np.float32)
        object.__setattr__(self, "references", references)
        object.__setattr__(self, "reference_classes", classes)

    @functools.cached_property
    def _rows_by_class(self) -> list[np.ndarray]:
        """The rows of each class."""
        order = np.argsort(self.classes, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.classes))[:-1])

    def _of_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the references of some images of one class, (m, d)."""
        if not len(rows):
            return np.zeros((0, self.embeddings.shape[1]))
        groups = None if self.groups is None else self.groups[rows]
        return references_of(self.embeddings[rows], groups, self.per_class, self.distance)

    @functools.cached_property
    def most(self) -> int:
        """The largest number of references of a class."""
        return int(np.bincount(self.reference_classes).max())

    def __len__(self) -> int:
        """Return how many there are to find: images by `nearest`, else classes."""
        if self.per_class == "nearest":
            return len(self.references)
        return len(np.unique(self.reference_classes))

    def search(self, queries: Any, k: int, own_rows: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the k nearest of every query, see `search_blocks`: (Q, k) classes and (Q, k)
        distances."""
        blocks = [block[1:] for block in self.search_blocks(queries, k, own_rows)]
        classes, distances = map(np.concatenate, zip(*blocks, strict=True))
        return classes, distances

    def search_blocks(
        self, queries: Any, k: int, own_rows: Any = None, without: Any = None
    ) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yield the k nearest of every query, one block of queries at a time.

        Args:
            queries: (Q, d).
            k: How many: images by `nearest`, else classes.
            own_rows: (Q,) the row of each query, where they are images of the gallery. Each
                searches it as if it did not have that image, which is then in no mean either.
            without: (Q,) the class that each query does not find; None: each finds all.

        Yields:
            The slice of queries, their (B, k) classes and their (B, k) float32 distances: -1 and
            infinite where there are fewer.

        Raises:
            UserError: The queries are bad, or of another dimension, or of another class than the
                one that they do not find.
        """
        queries = check_embeddings(queries, "query embeddings")
        if self.per_class != "nearest":
            yield from self._class_blocks(queries, k, own_rows, without)
            return
        blocks = self._reference_blocks(queries, k, without, own_rows)
        for block, rows, distances in blocks:
            yield block, np.where(rows < 0, -1, self.reference_classes[rows]), distances

    def _reference_blocks(
        self, queries: np.ndarray, k: int, without: Any = None, own_rows: Any = None
    ) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yield the k nearest references of every query, see `neighbor_blocks`."""
        most_ignored = 0 if without is None else self.most

        def is_hidden(block: slice, rows: np.ndarray) -> np.ndarray:
            return self.reference_classes[rows] == without[block, None]

        return neighbor_blocks(
            queries,
            self.references,
            k=k,
            distance=self.distance,
            own_rows=own_rows,
            ignored=None if without is None else is_hidden,
            most_ignored=most_ignored,
        )

    def _class_blocks(
        self, queries: np.ndarray, k: int, own_rows: Any, without: Any
    ) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        """Yield as `search_blocks`, where classes are found."""
        own = None if own_rows is None else self.classes[own_rows]
        if own is not None and without is not None and np.any(own != without):
            raise UserError("names rows of other classes than those of the queries", own_rows=...)
        depth = references_for(k, self.most, len(self.references))
        hidden = own if without is None else without
        blocks = self._reference_blocks(queries, depth, hidden)
        for block, rows, distances in blocks:
            classes = np.where(rows < 0, -1, self.reference_classes[rows])
            classes, distances = each_class_once(classes, distances, k)
            if own is not None and without is None:
                near = self._to_own(queries[block], own_rows[block])
                ends = np.where(near < np.inf, own[block], -1)
                classes = np.column_stack([classes, ends])
                distances = np.column_stack([distances, near])
                classes, distances = nearest_first(classes, distances, k)
            yield block, classes, distances

    def _to_own(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the distance of each image to its class without it, (B,) float32; infinite where
        the class has no other image."""
        distances = np.full(len(queries), np.inf)
        for query, row in enumerate(rows):
            others = self._rows_by_class[self.classes[row]]
            references = self._of_rows(others[others != row])
            if len(references):
                places = np.arange(len(references))[None]
                vectors = references.astype(np.float32)
                far = measure(queries[query, None], vectors, places, self.distance)
                distances[query] = far.min()
        return in_float32(distances, self.distance)


def references_for(k: int, most: int, available: int) -> int:
    """Return among how many nearest references the k nearest classes are: before the last of them
    come those of k - 1 others, of at most so many references each.

    Example:
        >>> references_for(3, 2, 100)
        5
    """
    return min((k - 1) * most + 1, available)


def each_class_once(
    classes: np.ndarray, distances: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k nearest classes of each query from those of its references, nearest first.

    Args:
        classes: (B, m) numbers, -1 for none.
        distances: (B, m), ascending.
        k: How many.

    Returns:
        (B, k) classes and distances: -1 and infinite where there are fewer.

    Example:
        >>> each_class_once(np.array([[4, 4, 2]]), np.array([[0.1, 0.2, 0.3]]), 2)
        (array([[4, 2]]), array([[0.1, 0.3]]))
    """
    order = np.argsort(classes, axis=1, kind="stable")
    in_order = np.take_along_axis(classes, order, axis=1)
    is_repeated = np.zeros(classes.shape, bool)
    as_before = in_order[:, 1:] == in_order[:, :-1]
    np.put_along_axis(is_repeated, order[:, 1:], as_before, axis=1)
    columns = np.broadcast_to(np.arange(classes.shape[1]), classes.shape)
    columns = left_over(columns, is_repeated | (classes < 0), k)
    is_missing = columns < 0
    near = np.where(is_missing, -1, np.take_along_axis(classes, columns, axis=1))
    far = np.take_along_axis(distances, columns, axis=1)
    far[is_missing] = np.inf
    return near, far


def set_distances(
    embeddings: Any,
    sets: Any,
    pairs: Any,
    *,
    per_class: str = "mean",
    distance: str = "euclidean",
    groups: Any = None,
) -> np.ndarray:
    """Return the distance of each pair of sets of images, such as the templates of IJB.

    It is that of the two nearest references of the sets. `tfdml.evaluation.verify_pairs` measures
    the distances.

    Args:
        embeddings: (N, d) the images.
        sets: (N,) the set of each, a number or a name.
        pairs: (P, 2) sets.
        per_class: What stands for a set: `nearest` (each image), `mean` or `max_of_means`.
        distance: As `nearest_neighbors`.
        groups: (N,) the group of each image within its set, such as its video: a number or a name.

    Returns:
        (P,) float32.

    Raises:
        UserError: There is no such rule, or a pair names a set that has no image.

    Example:
        >>> images, videos = [[0.0], [2.0], [2.0], [9.0]], [7, 8, 8, 9]
        >>> set_distances(images, ["a", "a", "a", "b"], [["a", "b"]], groups=videos)
        array([8.], dtype=float32)
    """
    embeddings = check_embeddings(embeddings)
    names, classes = np.unique(np.asarray(sets), return_inverse=True)
    pairs = np.asarray(pairs)
    if classes.shape != (len(embeddings),) or pairs.ndim != 2 or pairs.shape[1] != 2:
        raise UserError("give one set for each embedding, and pairs of two sets")
    ends = np.minimum(np.searchsorted(names, pairs), len(names) - 1)
    missing = names[ends] != pairs
    if missing.any():
        name = pairs[missing].tolist()[0]
        raise UserError(
            f"{counted(missing.sum(), 'set', 'have')} no image, the first is {name!r}", pairs=...
        )
    numbers = group_numbers(groups, len(embeddings))
    identities = Identities(embeddings, classes, per_class, distance, numbers)
    order = np.argsort(identities.reference_classes, kind="stable")
    rows = np.split(order, np.cumsum(np.bincount(identities.reference_classes))[:-1])
    distances = np.empty(len(pairs))
    for place, (first, second) in enumerate(ends):
        queries = identities.references[rows[first]]
        others = np.broadcast_to(rows[second], (len(queries), len(rows[second])))
        distances[place] = measure(queries, identities.references, others, distance).min()
    return in_float32(distances, distance)


def group_numbers(groups: Any, count: int) -> np.ndarray | None:
    """Return the groups of images as numbers; None where there are none.

    Raises:
        UserError: There is not one for each image.
    """
    if groups is None:
        return None
    values = np.asarray(groups, object)
    if values.shape != (count,):
        raise UserError(f"give one for each of the {counted(count, 'image')}", groups=...)
    missing = sum(value is None or value == "" or value != value for value in values)
    if missing:
        raise UserError(f"{missing:,} of {count:,} images have none", groups=...)
    return np.unique(values.astype(str), return_inverse=True)[1]
