"""k-reciprocal re-ranking: images whose neighbours are the query's neighbours too come first."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from scipy import sparse

from tfdml.arguments import integer, number
from tfdml.errors import UserError
from tfdml.evaluation.reranking.searched import Searched, blocks, searched
from tfdml.evaluation.search.exact import nearest_neighbours


@dataclasses.dataclass(frozen=True)
class Reciprocal:
    """What k-reciprocal re-ranking keeps of all images; `encode` makes it.

    Args:
        codes: (n, n) sparse, row i the vector V_i of image i.
        sums: (n,) the sum of each row.
    """

    codes: sparse.csr_array
    sums: np.ndarray

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.codes.data.nbytes + self.codes.indices.nbytes + self.codes.indptr.nbytes + self.sums.nbytes

    def jaccard(self, image: int, others: np.ndarray, scratch: np.ndarray) -> np.ndarray:
        """Jaccard distances of an image to others, 1 - sum_j min(V_ij, V_gj) / sum_j max(V_ij, V_gj).

        Args:
            image: i.
            others: (m,) the g.
            scratch: (n,) zeros, which it leaves as they were.

        Returns:
            (m,) float32.
        """
        mine = slice(self.codes.indptr[image], self.codes.indptr[image + 1])
        starts, ends = self.codes.indptr[others], self.codes.indptr[others + 1]
        offsets = np.cumsum(ends - starts) - (ends - starts)
        entries = np.repeat(starts - offsets, ends - starts) + np.arange((ends - starts).sum())
        scratch[self.codes.indices[mine]] = self.codes.data[mine]
        lesser = np.minimum(scratch[self.codes.indices[entries]], self.codes.data[entries])
        scratch[self.codes.indices[mine]] = 0
        # No row is empty: an image is its own neighbour.
        least = np.add.reduceat(lesser, offsets)
        return 1 - least / (self.sums[image] + self.sums[others] - least)


def encode(images: np.ndarray, k1: int, k2: int) -> Reciprocal:
    """The vectors V of all images.

    L_i lists image i itself and then its nearest others. With k-reciprocal neighbours
    R(i, k) = {j in the first k + 1 of L_i : i in the first k + 1 of L_j}:

    1. R*(i) = R(i, k1), joined with R(j, k1 / 2) of each j in it that shares two thirds of it:
       |R(i, k1) and R(j, k1 / 2)| >= 2/3 |R(j, k1 / 2)|.
    2. V_ij = exp(-d(i, j)) for j in R*(i), else 0, divided by their sum; d is the squared Euclidean distance.
    3. Each V_i becomes the mean of V_j over the first k2 of L_i (local query expansion).

    Args:
        images: (n, d) of length 1.
        k1: k1, at most n - 1; half of it is rounded down.
        k2: k2, at most n.
    """
    count = len(images)
    rows, _ = nearest_neighbours(images, k=max(k1, k2 - 1, 1), distance="cosine")
    lists = np.concatenate([np.arange(count)[:, None], rows], axis=1)
    near, half = lists[:, : k1 + 1], lists[:, : k1 // 2 + 1]
    mutual, mutual_half = _mutual(near), _mutual(half)
    keys = [
        _members(part, near, mutual, half, mutual_half) for part in blocks(count, near.shape[1] ** 2 * half.shape[1])
    ]
    row, column = np.divmod(np.concatenate(keys), count)
    weights = np.empty(len(row), np.float32)
    for part in blocks(len(row), 2 * images.shape[1]):
        weights[part] = np.exp(-np.square(images[row[part]] - images[column[part]]).sum(axis=1))
    weights /= np.bincount(row, weights, count)[row]
    starts = np.searchsorted(row, np.arange(count + 1))
    codes = sparse.csr_array((weights, column.astype(np.int32), starts.astype(np.int32)), shape=(count, count))
    if k2 > 1:
        places = np.arange(count + 1, dtype=np.int32) * k2
        data = np.full(count * k2, 1 / k2, np.float32)
        mean = sparse.csr_array((data, lists[:, :k2].ravel().astype(np.int32), places), shape=(count, count))
        codes = mean @ codes
    return Reciprocal(codes, np.asarray(codes.sum(axis=1), np.float32).ravel())


def _mutual(lists: np.ndarray) -> np.ndarray:
    """(n, k) whether row i is in the list of the j-th of its own list."""
    result = np.empty(lists.shape, bool)
    for part in blocks(len(lists), 2 * lists.shape[1] ** 2):
        owners = np.arange(part.start, part.stop)
        result[part] = (lists[lists[part]] == owners[:, None, None]).any(axis=2)
    return result


def _members(
    part: slice, near: np.ndarray, mutual: np.ndarray, half: np.ndarray, mutual_half: np.ndarray
) -> np.ndarray:
    """R*(i) of a part of the images: i n + j for each member j, ascending, once each."""
    count = len(near)
    own = np.where(mutual[part], near[part], -1)  # (B, a), R(i, k1)
    theirs = np.where(mutual_half[near[part]], half[near[part]], -2)  # (B, a, h), R(j, k1 / 2) of each j in the list
    shared = (theirs[..., None] == own[:, None, None, :]).any(axis=3)
    sizes = (theirs >= 0).sum(axis=2)
    joined = mutual[part] & (3 * shared.sum(axis=2) >= 2 * sizes)
    both = np.concatenate([own, np.where(joined[..., None], theirs, -2).reshape(len(own), -1)], axis=1)
    row, _ = np.nonzero(both >= 0)
    return np.unique((row + part.start) * count + both[both >= 0])


def k_reciprocal_neighbours(
    queries: Any,
    gallery: Any = None,
    *,
    k: int,
    k1: int = 20,
    k2: int = 6,
    weight: float = 0.3,
    top: int = 200,
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest gallery images by d* = (1 - weight) d_J + weight d, where d = |q - g|^2 for vectors of length 1.

    d_J is the Jaccard distance of the vectors V that `encode` makes, 1 - sum min(V_q, V_g) / sum max(V_q, V_g). All-to-
    all the images are those given, each once: the query is one of them, and its own row is left out of its answer.
    With a gallery they are the queries and the gallery together, as in the authors' code: the other queries take part
    in the lists of neighbours, though not in the answer.

    The authors published MATLAB code, and list a version in Python. This function differs from them in two places and
    follows the paper there: both divide each row of d by its largest value, and both ask for more than two thirds
    where eq. 5 has at least two thirds. The paper does not define k1 / 2 for odd k1. MATLAB's `round((k1 + 1) / 2)`
    with the image itself rounds it down, as here; Python's `around(k1 / 2)` rounds up where k1 is 3, 7, 11, ...

    What is exact: V is that of all images, and so is d* of each image that is re-ranked. Only the `top` nearest of each
    query by d are; the rest stay behind them in the order of d. With `top` as large as the gallery it is the whole
    re-ranking. Memory grows with n, not with n^2: n (k1 + top) for the lists and some 100 numbers an image for V.

    Args:
        queries: (N, d) embeddings.
        gallery: (G, d) what they are searched in; None: each in all others.
        k: How many neighbours; all where there are fewer.
        k1: Neighbours that may be reciprocal.
        k2: Images that the local query expansion takes the mean of; 1: none.
        weight: Of d, the paper's lambda, 0 .. 1.
        top: How many of each query's nearest images are re-ranked.

    Returns:
        (N, k) int64 gallery rows and (N, k) float32 distances d*, infinite for those that were not re-ranked.

    Raises:
        ValueError: A number is out of range.
        UserError: As `nearest_neighbours`.

    Example:
        >>> points = np.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
        >>> k_reciprocal_neighbours(points, k=1, k1=1, k2=1)[0].ravel().tolist()
        [1, 0, 3, 2]

    Source: Zhong, Zheng, Cao and Li, "Re-ranking Person Re-identification with k-reciprocal Encoding", CVPR 2017, eq. 1
    and 3 to 12.
    """
    return Reranked.of(searched(queries, gallery), k1, k2, weight, top).neighbours(k)


@dataclasses.dataclass(frozen=True)
class Reranked:
    """A search whose answers are re-ranked; see `k_reciprocal_neighbours`."""

    what: Searched
    reciprocal: Reciprocal
    weight: float
    top: int

    @classmethod
    def of(cls, what: Searched, k1: int, k2: int, weight: float, top: int) -> Reranked:
        """Encode the images of a search.

        Raises:
            ValueError: A number is out of range.
            UserError: The queries were changed and the gallery was not, or the gallery differs from query to query.
        """
        k1, k2, top = (integer(name, n, at_least=1) for name, n in (("k1", k1), ("k2", k2), ("top", top)))
        weight = number("weight", weight, at_least=0, at_most=1)
        if what.augmented is not None or (what.leave_one_out and what.queries is not what.gallery):
            raise UserError(
                "k_reciprocal compares the neighbours of queries and gallery: where the queries are the gallery it "
                "cannot follow query_expansion or database_augmentation"
            )
        images = what.gallery if what.leave_one_out else np.concatenate([what.queries, what.gallery])
        return cls(what, encode(images, min(k1, len(images) - 1), min(k2, len(images))), weight, top)

    @property
    def bytes(self) -> int:
        """What is kept to search in."""
        return self.what.bytes + self.reciprocal.bytes

    def neighbours(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(N, k) rows, and distances d*; infinite for those that were not re-ranked."""
        rows, similarities = self.what.neighbours(max(k, self.top))
        first = 0 if self.what.leave_one_out else len(self.what.queries)
        result = np.full(rows.shape, np.inf, np.float32)
        top = min(self.top, rows.shape[1])
        scratch = np.zeros(len(self.reciprocal.sums), np.float32)
        for query in range(len(rows)):
            jaccard = self.reciprocal.jaccard(query, rows[query, :top] + first, scratch)
            plain = np.maximum(2 - 2 * similarities[query, :top], 0)
            distances = (1 - self.weight) * jaccard + self.weight * plain
            order = np.lexsort((rows[query, :top], distances))
            rows[query, :top], result[query, :top] = rows[query, order], distances[order]
        return rows[:, :k], result[:, :k]
