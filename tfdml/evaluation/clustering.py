"""Clusters of embeddings: how well those of k-means agree with the classes, and groups of unlabeled
images.

Groups are of average linkage, cut where the same clustering of held-out classes is best.
"""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdml.errors import UserError, check_positive, check_share, counted
from tfdml.evaluation.intervals import Interval, freedom_of, mean_interval, rate_interval
from tfdml.evaluation.metrics import find_metric, metric
from tfdml.evaluation.relevance import check_labels
from tfdml.labels import integer_labels, require_classes
from tfdml.retrieval.exact import (
    check_dimensions,
    check_embeddings,
    measure,
    nearest_first,
    nearest_neighbors,
    unit_rows,
)

#: Those of papers on metric learning.
CLUSTERING_METRICS = ("nmi", "ami", "f1")
# Neighbors of each cluster that are followed through merges.
_FOLLOWED = 16
# Of the pairs of different classes, the share within the distance at which near pairs are counted,
# and the fewest of them that show it.
_NEAR_SHARE = 3e-4
_NEAR_PAIRS = 10
# Images whose pairs are counted.
_DRAWN = 4000


def kmeans(
    embeddings: Any,
    num_clusters: int,
    *,
    distance: str = "euclidean",
    iterations: int = 20,
    seed: int = 0,
) -> np.ndarray:
    """Cluster ids by Lloyd's k-means (faiss) on every embedding, started at a seeded random choice
    of them.

    Args:
        embeddings: (N, d).
        num_clusters: How many clusters, 1 .. N.
        distance: `"cosine"` clusters the embeddings scaled to length 1; any other, the embeddings
            as they are.
        iterations: Rounds of assignment and update, at least 1.
        seed: Of the initial centroids; the same seed gives the same clusters on the same machine.

    Returns:
        (N,) int64 ids in 0 .. num_clusters - 1. Some ids may not occur where embeddings coincide.

    Raises:
        UserError: Embeddings that are empty or not finite; `num_clusters` out of range; no
            iteration.
    """
    embeddings = check_embeddings(embeddings)
    if not 1 <= num_clusters <= len(embeddings):
        raise UserError(
            f"num_clusters must be in 1 .. {len(embeddings)}, the number of images; got "
            f"{num_clusters}"
        )
    check_positive(iterations=iterations)
    import faiss

    # Clusters do not change when everything moves and scales, and float32 products then cancel
    # least.
    points = unit_rows(embeddings) if distance == "cosine" else embeddings
    points = points - points.mean(axis=0, dtype=np.float64).astype(np.float32)
    points /= max(float(np.abs(points).max()), float(np.finfo(np.float32).tiny))
    points = np.ascontiguousarray(points, np.float32)
    model = faiss.Kmeans(
        points.shape[1],
        num_clusters,
        niter=iterations,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(points),
    )
    model.train(points)
    return model.index.search(points, 1)[1][:, 0].astype(np.int64)


@metric("nmi", "clusters", title="NMI")
def _normalized_mutual_information(labels: np.ndarray, clusters: np.ndarray) -> float:
    from sklearn.metrics import normalized_mutual_info_score

    return float(normalized_mutual_info_score(labels, clusters, average_method="arithmetic"))


def expected_mutual_information(class_sizes: Any, cluster_sizes: Any) -> float:
    """Return the mean mutual information, in nats, of two partitions with these sizes, over all
    ways to match them up.

    E = sum over classes i, clusters j and n of n/N log(N n / (a_i b_j)) Pr(n), where Pr is
    hypergeometric: the probability that n of a cluster's b_j images belong to a class of a_i among
    N (Vinh et al., 2010, eq. 24a). The term depends on the two sizes alone, so it is computed once
    for each pair of different sizes and multiplied by how many pairs have them: 11,316 classes of 2
    to 12 images cost what eleven do.

    Args:
        class_sizes: (C,) numbers of images, at least 1 each.
        cluster_sizes: (K,) numbers of images, at least 1 each, with the same sum.

    Returns:
        The expectation.

    Example:
        >>> round(expected_mutual_information([1, 1], [1, 1]), 6)  # always matched one to one
        0.693147
    """
    from scipy.stats import hypergeom

    a_sizes, a_counts = np.unique(np.asarray(class_sizes, np.int64), return_counts=True)
    b_sizes, b_counts = np.unique(np.asarray(cluster_sizes, np.int64), return_counts=True)
    total = int(a_sizes @ a_counts)
    expectation = 0.0
    for a, a_count in zip(a_sizes, a_counts, strict=True):
        # For each b the overlaps n from 1 to min(a, b), in one row of at most `total`.
        overlaps = np.minimum(a, b_sizes)
        starts = np.cumsum(overlaps) - overlaps
        b = np.repeat(b_sizes, overlaps)
        n = 1 + np.arange(len(b)) - np.repeat(starts, overlaps)
        information = n / total * (np.log(total * n.astype(np.float64)) - np.log(float(a) * b))
        weight = np.repeat(b_counts, overlaps) * hypergeom.pmf(n, total, a, b)
        expectation += float(a_count * (weight * information).sum())
    return expectation


@metric("ami", "clusters", title="AMI")
def adjusted_mutual_information(labels: Any, clusters: Any) -> float:
    """AMI = (I - E) / ((H(L) + H(C)) / 2 - E), with E the mutual information expected by chance.

    As scikit-learn's `adjusted_mutual_info_score`, limiting cases included: 1 where neither splits
    the images, else 0 where one of the two does not.

    Args:
        labels: (N,) class ids, N at least 1.
        clusters: (N,) cluster ids.

    Returns:
        At most 1; 0 on average for clusters that do not depend on the classes.

    Example:
        >>> adjusted_mutual_information([0, 0, 1, 1], [5, 5, 9, 9])
        1.0
    """
    from scipy.stats import entropy

    labels, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)[1:]
    clusters, cluster_sizes = np.unique(clusters, return_inverse=True, return_counts=True)[1:]
    if len(class_sizes) == len(cluster_sizes) == 1:
        return 1.0
    if len(class_sizes) == 1 or len(cluster_sizes) == 1:
        return 0.0
    together = np.unique(
        labels.astype(np.int64) * len(cluster_sizes) + clusters, return_counts=True
    )[1]
    h_labels, h_clusters = float(entropy(class_sizes)), float(entropy(cluster_sizes))
    information = h_labels + h_clusters - float(entropy(together))
    expected = expected_mutual_information(class_sizes, cluster_sizes)
    # Where the expectation is the maximum (every image for itself) both differences are 0, and the
    # match is perfect.
    above = _away_from_zero(information - expected)
    return float(above / _away_from_zero((h_labels + h_clusters) / 2 - expected))


def _away_from_zero(x: float) -> float:
    tiny = float(np.finfo(np.float64).eps)
    return min(x, -tiny) if x < 0 else max(x, tiny)


@metric("f1", "clusters", title="Pairwise F1")
def pairwise_f1(labels: Any, clusters: Any) -> float:
    """F1 of the decision "same cluster" as a prediction of "same class", over all pairs of images.

    F1 = 2 TP / (2 TP + FP + FN) = 2 S(n_ij) / (S(n_i.) + S(n_.j)), where n is the table of counts
    of class i in cluster j and S sums n (n - 1) / 2. Counted in integers. It is 1 where no class
    and no cluster has two images.

    Args:
        labels: (N,) class ids.
        clusters: (N,) cluster ids.

    Example:
        >>> pairwise_f1([0, 0, 1, 1], [5, 5, 5, 7])
        0.4
    """
    from sklearn.metrics.cluster import pair_confusion_matrix

    (_, wrong), (missed, right) = pair_confusion_matrix(labels, clusters).tolist()
    return 2 * right / (2 * right + wrong + missed) if right + wrong + missed else 1.0


def clustering_agreement(
    labels: Any, clusters: Any, metrics: Sequence[str] = CLUSTERING_METRICS
) -> dict[str, float]:
    """Return the agreement of clusters with classes.

    `nmi` is I(L; C) / ((H(L) + H(C)) / 2), Manning et al. 2008 with the arithmetic mean; `ami` is
    the same with the value expected by chance subtracted above and below (Vinh et al., 2010); `f1`
    is `pairwise_f1`.

    Args:
        labels: (N,) class ids.
        clusters: (N,) cluster ids.
        metrics: Those that need clusters, by name.

    Returns:
        The metrics by name, as fractions (AMI may be slightly negative).
    """
    labels, clusters = integer_labels(labels), integer_labels(clusters, "clusters")
    # scikit-learn warns that so many classes look like regression targets; class ids they are.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return {
            name: float(find_metric(name, ("clusters",))[0].compute(labels, clusters))
            for name in metrics
        }


def evaluate_clustering(
    embeddings: Any,
    labels: Any,
    *,
    metrics: Sequence[str] = CLUSTERING_METRICS,
    distance: str = "euclidean",
    iterations: int = 20,
    seed: int = 0,
) -> dict[str, float]:
    """Cluster the embeddings into as many clusters as there are classes, and measure the agreement
    with them.

    Args:
        embeddings: (N, d).
        labels: (N,) class ids.
        metrics: As `clustering_agreement`.
        distance: As `kmeans`.
        iterations: As `kmeans`.
        seed: As `kmeans`.

    Returns:
        The metrics by name.

    Raises:
        UserError: Embeddings that are empty or not finite; labels of one class, or that do not go
            with them.

    Example:
        >>> import numpy as np
        >>> evaluate_clustering(np.array([[0.0], [0.1], [5.0], [5.1]]), [3, 3, 8, 8])["nmi"]
        1.0
    """
    labels = check_labels(labels, len(embeddings))
    require_classes(labels, "clustering")
    clusters = kmeans(
        embeddings, len(np.unique(labels)), distance=distance, iterations=iterations, seed=seed
    )
    return clustering_agreement(labels, clusters, metrics)


def average_linkage(embeddings: Any) -> np.ndarray:
    """Return the hierarchical clustering of embeddings by the mean cosine distance of two clusters.

    It is that of `scipy.cluster.hierarchy.linkage(embeddings, "average", "cosine")`, in memory that
    grows with N and not with its square. The mean cosine of two clusters is the product of the
    means of their unit vectors. Each cluster follows its nearest others. All pairs that are each
    other's nearest merge at once, which merges nothing that one merge at a time would not (Murtagh,
    1983, "A survey of recent advances in hierarchical clustering algorithms").

    Args:
        embeddings: (N, d), N at least 2. A zero vector has distance 1 to all others.

    Returns:
        (N - 1, 4) float64, in SciPy's form: the two clusters of each merge, their distance, which
        does not descend, and the number of images of both. The cluster of merge i is N + i.

    Raises:
        UserError: Embeddings that are not finite, or fewer than two.

    Example:
        >>> average_linkage([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
        array([[0., 2., 0., 2.],
               [1., 3., 1., 3.]])
    """
    vectors = _several(embeddings)
    forest = _Forest(np.asarray(unit_rows(vectors), np.float32))
    while len(forest.sizes) > 1:
        forest.merge(*forest.mutual_pairs())
    return forest.linkage(len(vectors))


def _several(embeddings: Any, name: str = "embeddings") -> np.ndarray:
    vectors = check_embeddings(embeddings, name)
    if len(vectors) < 2:
        raise UserError(f"{name}: one image has no groups: give at least two")
    return vectors


class _Forest:
    """Clusters while they merge.

    The nearest `_FOLLOWED` others of each are known, in order. All others are at least at `bounds`
    from it, also after merges: the mean distance to a merged cluster is between those to its parts.

    Args:
        vectors: (N, d) unit vectors.
    """

    def __init__(self, vectors: np.ndarray):
        self.merges: list[np.ndarray] = []
        self.heights: list[np.ndarray] = []
        # Images at one place are one cluster from the start: thousands of them would merge one by
        # one.
        means, first, places = np.unique(vectors, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(first)
        self.means = means[order]
        self.sizes = np.bincount(places.ravel())[order]
        self.nodes = first[order]
        self.next_node = len(vectors)
        self._join_copies(np.argsort(order)[places.ravel()], first[order])
        self.near = np.zeros((len(self.means), _FOLLOWED), np.int64)
        self.far = np.full(self.near.shape, np.inf)
        self.bounds = np.zeros(len(self.means))
        self._search(np.arange(len(self.means)))

    def _join_copies(self, places: np.ndarray, first: np.ndarray) -> None:
        """Record the merges of images at one place, each with those before."""
        is_copy = np.ones(len(places), bool)
        is_copy[first] = False
        for row in np.flatnonzero(is_copy):
            place = places[row]
            self._record(np.array([[self.nodes[place], row]]), np.zeros(1))
            self.nodes[place] = self.next_node - 1

    def _record(self, nodes: np.ndarray, heights: np.ndarray) -> None:
        self.merges.append(nodes)
        self.heights.append(heights)
        self.next_node += len(nodes)

    def mutual_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the clusters that are each other's nearest, the lower one first."""
        nearest = self.near[:, 0]
        rows = np.arange(len(nearest))
        first = np.flatnonzero((nearest[nearest] == rows) & (rows < nearest))
        if not len(first):
            # Rounding can leave none; the nearest pair of all is one in exact numbers.
            row = int(np.argmin(self.far[:, 0]))
            first = np.array([min(row, nearest[row])])
            return first, np.array([max(row, nearest[row])])
        return first, nearest[first]

    def merge(self, first: np.ndarray, second: np.ndarray) -> None:
        """Merge pairs of clusters, each of which takes the place of its first."""
        self._join(first, second)
        is_merged = np.zeros(len(self.sizes), bool)
        is_merged[first] = True
        is_merged[second] = True
        touched = is_merged | is_merged[self.near].any(axis=1)
        near = np.concatenate([self.near, self.near], axis=1)
        near[first, _FOLLOWED:] = self.near[second]
        self.bounds[first] = np.minimum(self.bounds[first], self.bounds[second])
        stays = np.ones(len(self.sizes), bool)
        stays[second] = False
        parents = np.arange(len(stays))
        parents[second] = first
        parents = (np.cumsum(stays) - 1)[parents]
        for name in ("means", "sizes", "nodes", "far", "bounds"):
            setattr(self, name, getattr(self, name)[stays])
        self.near = parents[self.near[stays]]
        rows = np.flatnonzero(touched[stays])
        self._follow(rows, parents[near[stays][rows]])

    def _join(self, first: np.ndarray, second: np.ndarray) -> None:
        """Record merges, and make each first what both are together."""
        self._record(np.column_stack([self.nodes[first], self.nodes[second]]), self.far[first, 0])
        sizes = self.sizes[first] + self.sizes[second]
        share = (self.sizes[first] / sizes).astype(np.float32)[:, None]
        self.means[first] = share * self.means[first] + (1 - share) * self.means[second]
        self.sizes[first] = sizes
        self.nodes[first] = np.arange(self.next_node - len(first), self.next_node)

    def _follow(self, rows: np.ndarray, near: np.ndarray) -> None:
        """Measure what clusters follow again, and search for those that may have nearer others."""
        near = np.sort(near, axis=1)
        far = 1 + measure(self.means[rows], self.means, near, "dot")
        far = far.astype(np.float32).astype(np.float64)
        is_left_out = near == rows[:, None]
        is_left_out[:, 1:] |= near[:, 1:] == near[:, :-1]
        far[is_left_out] = np.inf
        near, far = nearest_first(near, far, near.shape[1])
        self.near[rows] = near[:, :_FOLLOWED]
        self.far[rows] = far[:, :_FOLLOWED]
        self.bounds[rows] = np.minimum(self.bounds[rows], far[:, _FOLLOWED])
        self._search(rows[far[:, 0] > self.bounds[rows]])

    def _search(self, rows: np.ndarray) -> None:
        """Search the nearest others of clusters."""
        k = min(_FOLLOWED, len(self.means) - 1)
        if not len(rows) or not k:
            return
        queries = self.means[rows]
        near, far = nearest_neighbors(queries, self.means, k=k, distance="dot", own_rows=rows)
        self.near[rows] = rows[:, None]
        self.far[rows] = np.inf
        self.near[rows, :k] = near
        self.far[rows, :k] = 1 + far
        self.bounds[rows] = self.far[rows, -1]

    def linkage(self, count: int) -> np.ndarray:
        """Return the merges in the order of their distances, as SciPy orders them."""
        merges = np.concatenate(self.merges)
        heights = np.maximum(np.concatenate(self.heights), 0.0)
        sizes = np.ones(count + len(merges))
        for merge, (one, other) in enumerate(merges):
            below = [heights[node - count] for node in (one, other) if node >= count]
            # Rounding may put a merge below one that it contains.
            heights[merge] = max([heights[merge], *below])
            sizes[count + merge] = sizes[one] + sizes[other]
        order = np.argsort(heights, kind="stable")
        names = np.arange(count + len(merges))
        names[count + order] = count + np.arange(len(order))
        pairs = np.sort(names[merges[order]], axis=1)
        return np.column_stack([pairs, heights[order], sizes[count + order]])


def cut_linkage(linkage: np.ndarray, distance: float) -> np.ndarray:
    """Return the groups of a hierarchical clustering whose merges are within a distance.

    Args:
        linkage: As `average_linkage`.
        distance: The largest distance of a merge.

    Returns:
        (N,) int64 numbers from 0, the largest group first; of equally large ones, that of the first
        image.

    Example:
        >>> cut_linkage(average_linkage([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]]), 0.5)
        array([0, 1, 0])
    """
    from scipy.cluster.hierarchy import fcluster

    clusters = fcluster(linkage, distance, "distance")
    _, first, numbers, sizes = np.unique(
        clusters, return_index=True, return_inverse=True, return_counts=True
    )
    ranks = np.empty(len(sizes), np.int64)
    ranks[np.lexsort((first, -sizes))] = np.arange(len(sizes))
    return ranks[numbers]


@dataclasses.dataclass(frozen=True)
class PairRates:
    """How pairs of labeled images fare at every cut of their hierarchical clustering.

    Args:
        distances: (M,) of the cuts, ascending; the first joins nothing.
        recalls: (M,) the share of the pairs of one class that is in one group.
        false_rates: (M,) the share of the pairs of different classes that is in one group.
    """

    distances: np.ndarray
    recalls: np.ndarray
    false_rates: np.ndarray

    @classmethod
    def of(cls, linkage: np.ndarray, labels: np.ndarray) -> PairRates:
        """Return the rates of a clustering of images of two classes or more, (N,) of which two are
        of one."""
        pairs = [(0, 0)]
        counts = [collections.Counter([label]) for label in labels.tolist()]
        right = 0
        wrong = 0
        for one, other, _, _ in linkage:
            parts = sorted((counts[int(one)], counts[int(other)]), key=len)
            matches = sum(number * parts[1][label] for label, number in parts[0].items())
            wrong += parts[0].total() * parts[1].total() - matches
            right += matches
            pairs.append((right, wrong))
            parts[1].update(parts[0])
            counts.append(parts[1])
        recalls, false_rates = np.array(pairs).T / np.array(pairs[-1])[:, None]
        # Cuts lie between merges of different distances.
        distances = np.concatenate([[0.0], linkage[:, 2]])
        last = np.append(distances[1:] > distances[:-1], True)
        return cls(distances[last], recalls[last], false_rates[last])

    def joined(self, prior: Any) -> np.ndarray:
        """Return the share of pairs that each cut joins.

        Args:
            prior: The share of pairs that are of one class.
        """
        return prior * self.recalls + (1 - prior) * self.false_rates

    def precisions(self, prior: Any) -> np.ndarray:
        """Return the share of joined pairs that are of one class; 1 where none is joined."""
        joined = self.joined(prior)
        right = prior * self.recalls
        return np.divide(right, joined, out=np.ones_like(right), where=joined > 0)

    def aris(self, prior: float) -> np.ndarray:
        """Return the adjusted Rand index of each cut."""
        joined = self.joined(prior)
        by_chance = prior * joined
        return (prior * self.recalls - by_chance) / ((prior + joined) / 2 - by_chance)

    def measures(self, prior: float, cut: int) -> dict[str, float]:
        """Return the measures of one cut, by name as `evaluate_groups`."""
        curves = (self.aris(prior), self.precisions(prior), self.recalls)
        values = [float(curve[cut]) for curve in curves]
        return dict(zip(("ari", "pair_precision", "pair_recall"), values, strict=True))

    def best(self, prior: float, min_precision: float = 0.0) -> int:
        """Return the cut with the best adjusted Rand index, among those of a precision."""
        aris = np.where(self.precisions(prior) >= min_precision, self.aris(prior), -1.0)
        return int(np.argmax(aris))


@dataclasses.dataclass(frozen=True)
class _PairSums:
    """Numbers of pairs of N images: of one class, in one group, and both; numbers or arrays."""

    images: Any
    same: Any
    joined: Any
    right: Any

    def measures(self) -> dict[str, Any]:
        """Return adjusted Rand index, precision and recall of the pairs in one group."""
        pairs = _pairs(self.images)
        by_chance = self.same * self.joined / np.maximum(pairs, 1)
        above = (self.same + self.joined) / 2 - by_chance
        return {
            "ari": _share(self.right - by_chance, above),
            "pair_precision": _share(self.right, self.joined),
            "pair_recall": _share(self.right, self.same),
        }


def _pairs(count: Any) -> Any:
    return count * (count - 1) / 2


def _share(part: Any, whole: Any) -> Any:
    """Return a quotient; 1 where nothing is divided by nothing."""
    whole = np.asarray(whole, np.float64)
    return np.divide(part, whole, out=np.ones(whole.shape), where=whole != 0)


def evaluate_groups(labels: Any, groups: Any, *, level: float = 0.95) -> dict[str, Interval]:
    """Measure how well groups of images agree with their classes.

    Args:
        labels: (N,) class ids.
        groups: (N,) numbers of groups.
        level: The coverage of the intervals, which are for other classes of this kind: the
            jackknife leaves out one class after the other.

    Returns:
        `ari`, the Rand index adjusted for chance (Hubert and Arabie, 1985): 1 for the classes
        themselves, 0 on average for groups at random. `pair_precision`, the share of the pairs in
        one group that are of one class, and `pair_recall`, the share of the pairs of one class that
        are in one group; 1 where there are no such pairs.

    Raises:
        UserError: There is not one label and one group for each image, or one class alone.

    Example:
        >>> rates = evaluate_groups([0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 2])
        >>> [round(rate.mean, 2) for rate in rates.values()]
        [0.44, 0.5, 0.67]
    """
    from scipy.sparse import csr_array

    check_share(level=level)
    groups = integer_labels(groups, "groups")
    labels = check_labels(labels, len(groups))
    require_classes(labels, "measuring groups")
    classes = np.unique(labels, return_inverse=True)[1]
    numbers = np.unique(groups, return_inverse=True)[1]
    table = csr_array((np.ones(len(labels)), (classes, numbers)))
    table.sum_duplicates()
    images = table.sum(axis=1)
    sizes = table.sum(axis=0)
    right = _sums(table, _pairs(table.data))
    whole = _PairSums(len(labels), _pairs(images).sum(), _pairs(sizes).sum(), right.sum())
    # What each class takes with it: its own pairs, and those with others in its groups.
    joined = _sums(table, _pairs(sizes[table.indices]) - _pairs(sizes[table.indices] - table.data))
    parts = (images, _pairs(images), joined, right)
    values = [getattr(whole, field.name) for field in dataclasses.fields(whole)]
    without = _PairSums(*(value - part for value, part in zip(values, parts, strict=True)))
    left = without.measures()
    return {
        name: _jackknife(float(value), left[name], name != "ari", level)
        for name, value in whole.measures().items()
    }


def _sums(table: Any, values: np.ndarray) -> np.ndarray:
    """Return the sum of a value of each entry of a sparse table, for each of its rows."""
    rows = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
    return np.bincount(rows, values, table.shape[0])


def _jackknife(value: float, without: np.ndarray, is_rate: bool, level: float) -> Interval:
    """Return a measure with the interval of its values without each of the classes."""
    parts = without - without.mean()
    count = len(parts)
    variance = (count - 1) / count * float(np.square(parts).sum())
    freedom = freedom_of(parts)
    if is_rate:
        return rate_interval(value, variance, freedom, level, count)
    return mean_interval(value, variance, freedom, level)


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of images, and what held-out classes let expect of them.

    Args:
        numbers: (N,) the group of each image, from 0, the largest first.
        distance: The largest distance of a merge, a mean cosine distance.
        prior: The share of pairs of one class that is assumed.
        expected: `ari`, `pair_precision` and `pair_recall` of the held-out classes at this cut and
            this prior.
    """

    numbers: np.ndarray
    distance: float
    prior: float
    expected: dict[str, float]

    def __str__(self) -> str:
        sizes = np.bincount(self.numbers)
        several = int(np.sum(sizes > 1))
        alone = int(np.sum(sizes == 1))
        rates = ", ".join(f"{name} {100 * rate:.1f} %" for name, rate in self.expected.items())
        images = len(self.numbers) - alone
        counts = (
            f"{counted(several, 'group')} of {images:,} images, {counted(alone, 'image')} alone"
        )
        prior = f"where {100 * self.prior:.3g} % of the pairs are of one class"
        cut = f"distance {self.distance:.4g}"
        return f"{counts}; {cut}\nexpected by the held-out classes: {rates}, {prior}"


def group(
    embeddings: Any,
    held_out: Any,
    held_out_labels: Any,
    *,
    expected_classes: int = 0,
    min_precision: float = 0.0,
    min_ari: float = 0.2,
) -> Groups:
    """Group images without labels, whose classes nobody has counted.

    Both sides are clustered by `average_linkage`. The images are cut at the distance at which the
    held-out classes have the best adjusted Rand index, once their pairs are weighted so that as
    large a share of them is of one class as among the images. That share is estimated from how many
    pairs of either side are near (adjusted counts: Forman, 2008, "Quantifying counts and costs via
    classification").

    Args:
        embeddings: (N, d) the images.
        held_out: (M, d) by the same model, of classes that it was not trained on.
        held_out_labels: (M,) class ids.
        expected_classes: About how many classes the images have, of about the same size; 0:
            estimated.
        min_precision: The smallest share of pairs within a group that are of one class, on the
            held-out classes.
        min_ari: The smallest adjusted Rand index of the held-out classes.

    Returns:
        The groups.

    Raises:
        UserError: The held-out classes show that such embeddings cannot be grouped: they reach no
            `min_ari` or `min_precision`, or do not tell how many classes there are. Or embeddings
            or labels are bad.

    Example:
        >>> classes = np.eye(8)[np.arange(40) % 8]
        >>> held_out = classes + 0.1 * np.random.default_rng(0).normal(size=(40, 8))
        >>> images = classes[:, ::-1] + 0.1 * np.random.default_rng(1).normal(size=(40, 8))
        >>> groups = group(images, held_out, np.arange(40) % 8)
        >>> groups.numbers[:10].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    """
    embeddings = _several(embeddings)
    held_out = _several(held_out, "held-out embeddings")
    check_dimensions(embeddings, held_out)
    labels = check_labels(held_out_labels, len(held_out), "held_out_labels")
    require_classes(labels, "held-out classes")
    if len(np.unique(labels)) == len(labels):
        raise UserError("each has a class of its own: give several images of a class", held_out=...)
    if expected_classes:
        prior = _prior_of(expected_classes, len(embeddings))
    else:
        prior = _estimated_prior(embeddings, held_out, labels)
    rates = PairRates.of(average_linkage(held_out), labels)
    place = rates.best(prior, min_precision)
    expected = rates.measures(prior, place)
    if expected["ari"] < min_ari:
        raise UserError(
            f"held-out classes reach an adjusted Rand index of {expected['ari']:.3f}: these "
            "embeddings cannot be grouped so; train the embedder on such images first",
            min_ari=min_ari,
        )
    distance = float(rates.distances[place])
    return Groups(cut_linkage(average_linkage(embeddings), distance), distance, prior, expected)


def _prior_of(classes: int, images: int) -> float:
    """Return the share of pairs of one class where classes are equally large."""
    if not 1 < classes < images:
        raise UserError(
            f"must be in 2 .. {images - 1}, fewer than the images", expected_classes=classes
        )
    return (images / classes - 1) / (images - 1)


def _estimated_prior(embeddings: np.ndarray, held_out: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of pairs of one class among images.

    Within a distance are a share `recall` of the held-out pairs of one class, and a share `false`
    of the others. So of all pairs there are prior * recall + (1 - prior) * false.
    """
    distances, rows = _drawn_pairs(held_out)
    is_same = labels[rows[0]] == labels[rows[1]]
    others = np.sort(distances[~is_same])
    place = max(_NEAR_PAIRS, int(_NEAR_SHARE * len(others)))
    if place >= len(others) or not is_same.any():
        raise UserError(
            "are too few to estimate how many classes there are: give expected_classes",
            held_out=...,
        )
    near = others[place]
    recall = float(np.mean(distances[is_same] < near))
    false = place / len(others)
    joined = float(np.mean(_drawn_pairs(embeddings)[0] < near))
    if joined <= false or recall <= false:
        raise UserError(
            "held-out classes do not tell how many classes the images have, as pairs of one class "
            "are hardly nearer than others: train the embedder on such images first, or give "
            "expected_classes"
        )
    return min((joined - false) / (recall - false), 1.0)


def _drawn_pairs(embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosine distances of all pairs of images, or of some, and the two rows of each."""
    rng = np.random.default_rng(0)
    rows = np.sort(rng.permutation(len(embeddings))[:_DRAWN])
    vectors = np.asarray(unit_rows(embeddings[rows]), np.float32)
    pairs = np.stack(np.triu_indices(len(rows), 1))
    distances = 1 - vectors @ vectors.T
    return distances[pairs[0], pairs[1]], rows[pairs]
