"""What is searched in what, while it is changed step by step: queries, gallery, and what a query may not see."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.search.exact import check_dimensions, check_embeddings, nearest_neighbours, unit_rows

# Numbers of the gathered neighbours that are held at once: 64 MB.
_GATHERED_AT_ONCE = 2**24


@dataclasses.dataclass(frozen=True)
class Augmented:
    """A gallery whose images were each moved by their neighbours; `augment_gallery` makes it.

    In leave-one-out the query's own image may be such a neighbour. No search of that query may see it: `without`
    gives the images as they are in a gallery that lacks it, the next neighbour in its place.

    Args:
        plain: (G, d) the images before.
        vectors: (G, d) float32 of length 1, the images after.
        neighbours: (G, k + 1) rows of each image's neighbours, one more than it is moved by.
        weights: (G, k + 1) their weights.
        k: How many neighbours an image is moved by.
    """

    plain: np.ndarray
    vectors: np.ndarray
    neighbours: np.ndarray
    weights: np.ndarray
    k: int

    def saw(self, rows: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Whether images `rows` (B, m) were moved by the image `own` (B,) of the query."""
        return (self.neighbours[rows, : self.k] == own[:, None, None]).any(axis=2)

    def without(self, rows: np.ndarray, own: np.ndarray) -> np.ndarray:
        """(P, d) images `rows` (P,), which image `own` (P,) had moved, as they are where it is not in the gallery."""
        result = np.empty((len(rows), self.plain.shape[1]), np.float32)
        for part in blocks(len(rows), self.neighbours.shape[1] * self.plain.shape[1]):
            near = self.neighbours[rows[part]]
            weights = np.where(near == own[part, None], np.float32(0), self.weights[rows[part]])
            result[part] = summed(self.plain[rows[part]], self.plain[near], weights)
        return result

    def seeing(self) -> tuple[np.ndarray, np.ndarray]:
        """For each image the images that it moved: their rows one after another, and (G + 1,) where each begins."""
        moved_by = self.neighbours[:, : self.k].ravel()
        order = np.argsort(moved_by, kind="stable")
        starts = np.searchsorted(moved_by[order], np.arange(len(self.plain) + 1))
        return order // max(self.k, 1), starts


@dataclasses.dataclass(frozen=True)
class Searched:
    """Queries and the gallery that they are searched in; made by `searched`.

    Args:
        queries: (N, d) float32.
        gallery: (G, d) float32.
        leave_one_out: Whether query i is row i of the gallery, and left out of its own search.
        distance: As `nearest_neighbours`; `"cosine"` until a step scores otherwise.
        augmented: How the gallery was moved; None: it was not, or no query lies in it.
        extra_bytes: What a step keeps beside the gallery's vectors.
    """

    queries: np.ndarray
    gallery: np.ndarray
    leave_one_out: bool
    distance: str = "cosine"
    augmented: Augmented | None = None
    extra_bytes: int = 0

    @property
    def available(self) -> int:
        """How many images a query is compared with."""
        return len(self.gallery) - self.leave_one_out

    @property
    def bytes(self) -> int:
        """What is kept to search in: the gallery's vectors and what a step has put beside them."""
        return self.gallery.nbytes + self.extra_bytes

    def neighbours(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k nearest gallery images of every query, all where they are fewer.

        Returns:
            (N, m) int64 rows and (N, m) float32 similarities: cosines, or what a step scores by.
        """
        k = min(k, self.available)
        if k < 1:
            return np.zeros((len(self.queries), 0), np.int64), np.zeros((len(self.queries), 0), np.float32)
        if self.augmented is not None:
            return self._neighbours_without_own(self.augmented, k)
        own = np.arange(len(self.queries)) if self.leave_one_out else None
        rows, distances = nearest_neighbours(self.queries, self.gallery, k=k, distance=self.distance, own_rows=own)
        return rows, (-distances if self.distance == "dot" else 1 - distances)

    def vectors(self, part: slice, rows: np.ndarray) -> np.ndarray:
        """(B, m, d) the gallery images `rows` (B, m) as the queries of a part (B of them) may see them."""
        found = self.gallery[rows]
        if self.augmented is not None:
            own = np.arange(part.start, part.start + len(rows))
            query, column = np.nonzero(self.augmented.saw(rows, own))
            found[query, column] = self.augmented.without(rows[query, column], own[query])
        return found

    def _neighbours_without_own(self, augmented: Augmented, k: int) -> tuple[np.ndarray, np.ndarray]:
        """As `neighbours`, where some gallery images differ from query to query.

        Those that a query's own image has moved are measured as they are without it; the rest come from one search,
        deep enough to hold k of them. Queries are taken by how many they have moved, for hubs move many.
        """
        moved, starts = augmented.seeing()
        counts = np.diff(starts)
        rows = np.empty((len(self.queries), k), np.int64)
        similarities = np.empty((len(self.queries), k), np.float32)
        sizes = np.ceil(np.log2(np.maximum(counts, 1))).astype(int)
        for size in np.unique(sizes):
            members, most = np.flatnonzero(sizes == size), int(2**size)
            deepest = min(k + most, self.available)
            # Their vectors, and the comparisons of lists that find them.
            held = most * self.gallery.shape[1] + 2 * (deepest + most) * (augmented.k + 8)
            for piece in blocks(len(members), held):
                own = members[piece]
                near, distances = nearest_neighbours(
                    self.queries[own], self.gallery, k=deepest, distance="cosine", own_rows=own
                )
                distances[augmented.saw(near, own)] = np.inf
                query = np.repeat(np.arange(len(own)), counts[own])
                column = np.arange(len(query)) - np.repeat(np.cumsum(counts[own]) - counts[own], counts[own])
                image = moved[starts[own][query] + column]
                others = np.full((len(own), most), len(self.gallery), np.int64)
                far = np.full((len(own), most), np.inf, np.float32)
                others[query, column] = image
                vectors = augmented.without(image, own[query])
                far[query, column] = 1 - np.einsum("pd,pd->p", vectors, self.queries[own[query]])
                near, distances = np.concatenate([near, others], axis=1), np.concatenate([distances, far], axis=1)
                order = np.lexsort((near, distances), axis=-1)[:, :k]
                rows[own] = np.take_along_axis(near, order, axis=1)
                similarities[own] = 1 - np.take_along_axis(distances, order, axis=1)
        return rows, similarities


def searched(queries: Any, gallery: Any = None) -> Searched:
    """Embeddings, checked and scaled to length 1, as what is searched in what.

    Args:
        queries: (N, d) embeddings.
        gallery: (G, d) what is searched; None: each query in all others.

    Raises:
        UserError: As `nearest_neighbours`; there is nothing to search in.

    Example:
        >>> searched(np.eye(3)).neighbours(2)[0].tolist()
        [[1, 2], [0, 2], [0, 1]]
    """
    queries = check_embeddings(queries, "embeddings" if gallery is None else "query embeddings")
    if gallery is None:
        if len(queries) < 2:
            raise UserError("one image has no other to be compared with")
        queries = unit_rows(queries)
        return Searched(queries, queries, True)
    gallery = check_embeddings(gallery, "gallery embeddings")
    check_dimensions(queries, gallery)
    return Searched(unit_rows(queries), unit_rows(gallery), False)


def summed(own: np.ndarray, near: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(B, d) own + sum_i weights_i near_i, of length 1: own (B, d), near (B, m, d), weights (B, m)."""
    return unit_rows(own + np.einsum("bmd,bm->bd", near, weights))


def weights_of(similarities: np.ndarray, alpha: float) -> np.ndarray:
    """max(s, 0)^alpha of each similarity; 1 for all where alpha is 0."""
    return (np.maximum(similarities, 0) ** np.float32(alpha)).astype(np.float32)


def blocks(count: int, numbers_each: int) -> list[slice]:
    """Slices that cover `count` rows, few enough in each for what they gather, `numbers_each` a row.

    Example:
        >>> blocks(5, 2**23)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rows = max(1, _GATHERED_AT_ONCE // max(numbers_each, 1))
    return [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
