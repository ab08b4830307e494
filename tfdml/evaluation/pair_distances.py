"""Distances d+ between images of one class and d- of different classes: all pairs, counted and compared."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfdml.errors import UserError, check_choice
from tfdml.evaluation.per_query import check_labels
from tfdml.pairwise import DISTANCES
from tfdml.retrieval.exact import check_embeddings, frame_of, placed, row_blocks

# Rows and columns of the distance matrix that are counted at once: 16 MB with the bins.
_TILE = 1024
# The share of |x|^2 + |y|^2 from which on |x - y|^2 is that of products, to 1e-4 in float32 and 1e-9 in float64.
_OF_PRODUCTS: dict[Any, float] = {np.float32: 1e-3, np.float64: 1e-6}
# Numbers of the differences that are measured at once: 8 MB.
_DIFFERENCES_AT_ONCE = 2**20
# Below the largest distance by this many powers of two there is one bin; twice as many for squares.
_OCTAVES = 32


@dataclasses.dataclass(frozen=True)
class PairHistogram:
    """Counts of the pairs of images by distance.

    Args:
        edges: (K + 1,) float64, ascending: bin k reaches from `edges[k]` to `edges[k + 1]`.
        positive: (K,) int64 pairs of one class.
        negative: (K,) int64 pairs of different classes.
        mean_positive: The mean d+, of the distances and not of the bins.
        mean_negative: The mean d-.
    """

    edges: np.ndarray
    positive: np.ndarray
    negative: np.ndarray
    mean_positive: float
    mean_negative: float

    def rebinned(self, bins: int) -> PairHistogram:
        """Return the same pairs in at most `bins` bins, from the least distance that occurs to the largest.

        They are as wide as one another as far as the present edges allow, at which they begin and end.

        Example:
            >>> histogram = count_pair_distances([[0.0], [1.0], [5.0]], [0, 0, 1]).rebinned(2)
            >>> histogram.positive.tolist(), histogram.negative.tolist()
            ([1, 0], [0, 2])
        """
        occupied = np.flatnonzero(self.positive + self.negative)
        first, stop = int(occupied[0]), int(occupied[-1]) + 1
        new_edges = np.linspace(self.edges[first], self.edges[stop], bins, endpoint=False)
        starts = np.unique(np.searchsorted(self.edges, new_edges, side="right") - 1)
        positive, negative = (np.add.reduceat(counts[:stop], starts) for counts in (self.positive, self.negative))
        return dataclasses.replace(
            self, edges=self.edges[np.append(starts, stop)], positive=positive, negative=negative
        )


def count_pair_distances(embeddings: Any, labels: Any, *, distance: str = "euclidean") -> PairHistogram:
    """Return the histogram of the distances of all pairs of images, each unordered pair counted once.

    The 2**18 bins have widths in proportion to the distance, 1e-4 of it, so that far images do not put all others into
    one bin. Only below a billionth of the largest distance there is one bin. Distances come from float32 products, tile
    by tile of the matrix, with a relative error below 1e-4. Tiles that hold pairs too close for that are computed in
    float64. Exact copies are at distance 0. Besides the embeddings it takes a copy of them and some 60 MB; 60,502
    images of 512 dimensions take about a minute on two cores.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`, as `nearest_neighbors`.

    Raises:
        UserError: Embeddings that are empty or not finite, labels that do not go with them, an unknown distance, or
            not both pairs of one class and pairs of different classes.

    Example:
        >>> histogram = count_pair_distances([[0.0], [1.0], [5.0]], [0, 0, 1])
        >>> histogram.positive.sum().item(), histogram.negative.sum().item(), round(histogram.mean_negative, 3)
        (1, 2, 4.5)
    """
    return AllPairs(embeddings, labels, distance).histogram()


class AllPairs:
    """All pairs of images, sorted by class, with their distances tile by tile of the matrix.

    Attributes:
        classes: (N,) the place of each image's class in `sizes`, ascending.
        sizes: (C,) the number of images of each class.
        scale: What the distances of the tiles are multiplied by.
        precisions: In which they are computed: in the next one where a pair is too close for one.
        bins: How many bins there are, a power of two: so many that what happens within one does not matter.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`.

    Raises:
        UserError: Embeddings that are empty or not finite, labels that do not go with them, an unknown distance, or
            not both pairs of one class and pairs of different classes.
    """

    precisions: tuple[Any, ...] = (np.float32, np.float64)
    bins = 2**18

    def __init__(self, embeddings: Any, labels: Any, distance: str):
        check_choice("distance", distance, DISTANCES)
        embeddings = check_embeddings(embeddings)
        labels = check_labels(labels, len(embeddings))
        # Sorted by class, the pairs of one class lie in few tiles.
        order = np.argsort(labels, kind="stable")
        _, self.classes, self.sizes = np.unique(labels[order], return_inverse=True, return_counts=True)
        classes = len(self.sizes)
        if not 1 < classes < len(labels):
            missing = "of one class" if classes == len(labels) else "of different classes"
            raise UserError(f"there is no pair of images {missing}: {len(labels)} images of {classes} classes")
        self._points = embeddings[order]
        self._distance = distance
        self._shift, self._unit = frame_of(self._points, self._points, distance)
        squares = np.concatenate([_squares(self._placed(rows)) for rows in row_blocks(len(order), _TILE)])
        self.scale = {"euclidean": self._unit, "cosine": 1.0}.get(distance, self._unit**2)
        # Bins are ranges of the bits of float32, which order its positive numbers. No distance is beyond `largest`.
        largest = float(squares.max()) or 1.0
        largest = {"euclidean": 2 * largest**0.5, "sqeuclidean": 4 * largest, "cosine": 2.0, "dot": largest}[distance]
        self._magnitudes = self.bins // 2 if distance == "dot" else self.bins
        octaves = 2 * _OCTAVES if distance == "sqeuclidean" else _OCTAVES
        self._shift_of_bits = (octaves * 2**23 // self._magnitudes).bit_length() - 1
        self._first_bits = int(np.float32(largest).view(np.int32)) + 1 - (self._magnitudes << self._shift_of_bits)

    def _placed(self, rows: slice, dtype: Any = np.float32) -> np.ndarray:
        return placed(self._points[rows].astype(dtype, copy=False), self._distance, self._shift, self._unit)

    @functools.cached_property
    def edges(self) -> np.ndarray:
        """(bins + 1,) float64, the ends of the bins."""
        bits = self._first_bits + (np.arange(self._magnitudes + 1) << self._shift_of_bits)
        ends = bits.astype(np.int32).view(np.float32).astype(np.float64)
        ends[0] = 0
        return np.concatenate([-ends[:0:-1], ends]) if self._distance == "dot" else ends

    def bins_of(self, distances: np.ndarray) -> np.ndarray:
        """Return the bin of each distance."""
        places = (np.abs(distances).view(np.int32) - self._first_bits) >> self._shift_of_bits
        places = np.clip(places, 0, self._magnitudes - 1)
        if self._distance == "dot":
            places = np.where(distances < 0, self._magnitudes - 1 - places, self._magnitudes + places)
        return places

    def histogram(self) -> PairHistogram:
        """Return the counts of all pairs."""
        everything, positive = np.zeros((2, self.bins), np.int64)
        sum_of_all = sum_of_positive = 0.0
        for rows, columns, distances, kept in self.tiles():
            same = self.same(rows, columns)
            distances = distances[kept]
            bin_of = self.bins_of(distances)
            everything += np.bincount(bin_of.ravel(), minlength=self.bins)
            sum_of_all += float(distances.sum(dtype=np.float64))
            if same is not None:
                positive += np.bincount(bin_of[same[kept]], minlength=self.bins)
                sum_of_positive += float(distances[same[kept]].sum(dtype=np.float64))
        num_positive, num_negative = int(positive.sum()), int(everything.sum() - positive.sum())
        return PairHistogram(
            self.scale * self.edges,
            positive,
            everything - positive,
            self.scale * sum_of_positive / num_positive,
            self.scale * (sum_of_all - sum_of_positive) / num_negative,
        )

    def tiles(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[slice, slice, np.ndarray, Any]]:
        """Yield rows, columns, their distances (float32), and which of these count, so that each pair counts once.

        Args:
            start: The first row.
            stop: The row after the last; None for all.
        """
        stop = len(self._points) if stop is None else stop
        above_diagonal = np.triu(np.ones((_TILE, _TILE), bool), 1)
        for i in range(start, stop, _TILE):
            rows = slice(i, min(i + _TILE, stop))
            for j in range(i, len(self._points), _TILE):
                columns = slice(j, min(j + _TILE, len(self._points)))
                distances = self._tile(rows, columns)
                kept: Any = above_diagonal[: distances.shape[0], : distances.shape[1]] if i == j else ...
                yield rows, columns, distances, kept

    def _tile(self, rows: slice, columns: slice) -> np.ndarray:
        """Return the distances of a tile, float32, before `scale`."""
        for dtype in self.precisions:
            x, y = self._placed(rows, dtype), self._placed(columns, dtype)
            values = x @ y.T
            if self._distance == "dot":
                break
            # Of cosine 1 - <x, y>, which is |x - y|^2 / 2 of unit vectors.
            sums = dtype(1) if self._distance == "cosine" else _squares(x)[:, None] + _squares(y)
            values *= dtype(-1 if self._distance == "cosine" else -2)
            values += sums
            close = values <= dtype(_OF_PRODUCTS[dtype]) * sums
            if not close.any():
                break
        else:
            of_pair = np.argwhere(close)
            for part in row_blocks(len(of_pair), max(1, _DIFFERENCES_AT_ONCE // x.shape[1])):
                i, j = of_pair[part].T
                values[i, j] = _squares(x[i] - y[j]) / (2 if self._distance == "cosine" else 1)
        values = -values if self._distance == "dot" else values
        return (np.sqrt(values) if self._distance == "euclidean" else values).astype(np.float32, copy=False)

    def same(self, rows: slice, columns: slice) -> np.ndarray | None:
        """Return which pairs of a tile are of one class; None where none is."""
        if self.classes[rows.stop - 1] < self.classes[columns.start]:
            return None
        return self.classes[rows, None] == self.classes[columns]


def _squares(rows: np.ndarray) -> np.ndarray:
    return np.einsum("nd,nd->n", rows, rows)


def overlap_coefficient(positive: Any, negative: Any) -> float:
    """Return the integral of the lesser of two densities: sum_k min(p_k, q_k), of histograms over the same bins.

    1 where the distributions are the same, 0 where they share no bin.

    Args:
        positive: (K,) counts or probabilities; scaled to the sum 1.
        negative: (K,) the same.

    Example:
        >>> overlap_coefficient([1, 1, 0], [0, 1, 1])
        0.5
    """
    p, q = _shares(positive, negative)
    return float(np.minimum(p, q).sum())


def jensen_shannon_bits(positive: Any, negative: Any) -> float:
    """Return the Jensen-Shannon divergence in bits, of histograms over the same bins.

    JSD = KL(p | m) / 2 + KL(q | m) / 2 with m = (p + q) / 2 and logarithms of base 2: 0 where the distributions are the
    same, 1 where they share no bin. It measures what a pair's distance says about whether its images are of one class,
    when half of the pairs are. In nats it is ln 2 times as much.

    Args:
        positive: (K,) counts or probabilities; scaled to the sum 1.
        negative: (K,) the same.

    Example:
        >>> jensen_shannon_bits([1, 1, 0], [0, 1, 1])
        0.5
    """
    from scipy.spatial.distance import jensenshannon

    return min(float(jensenshannon(*_shares(positive, negative), base=2)) ** 2, 1.0)


def probability_nearer(positive: Any, negative: Any) -> float:
    """P(d+ < d-) + P(d+ = d-) / 2, the area under the ROC curve, of histograms over the same ascending bins.

    Pairs in one bin count as ties: with fine bins the error is at most half of sum_k p_k q_k.

    Args:
        positive: (K,) counts or probabilities of d+; scaled to the sum 1.
        negative: (K,) the same of d-.

    Example:
        >>> probability_nearer([1, 1, 0], [0, 1, 1])
        0.875
    """
    p, q = _shares(positive, negative)
    further = 1 - np.cumsum(q)
    return float((p * (further + q / 2)).sum())


def default_bins(histogram: PairHistogram) -> int:
    """Rice's rule for the rarer kind of n pairs, ceil(2 n^(1/3)), and at most 100 bins.

    Between histograms of few pairs chance alone keeps the overlap below 1 and the divergence above 0, the more so the
    more bins there are. The rule depends on nothing but n, so that two models on one data set are compared alike.
    """
    rarer = min(int(histogram.positive.sum()), int(histogram.negative.sum()))
    return min(100, int(np.ceil(2 * rarer ** (1 / 3) - 1e-9)))


def _shares(positive: Any, negative: Any) -> tuple[np.ndarray, np.ndarray]:
    p, q = np.asarray(positive, np.float64), np.asarray(negative, np.float64)
    if p.shape != q.shape or p.ndim != 1:
        raise UserError(f"histograms must be over the same bins; got shapes {p.shape} and {q.shape}")
    if not (p.sum() > 0 and q.sum() > 0):
        raise UserError("each histogram must hold a pair")
    return p / p.sum(), q / q.sum()
