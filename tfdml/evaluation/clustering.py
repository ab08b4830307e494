"""How well k-means clusters of the embeddings agree with the classes: NMI, AMI, pairwise F1."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdml.errors import UserError, check_positive
from tfdml.evaluation.metrics import find_metric, metric
from tfdml.evaluation.relevance import check_labels
from tfdml.labels import integer_labels, require_classes
from tfdml.retrieval.exact import check_embeddings, unit_rows

#: Those of papers on metric learning.
CLUSTERING_METRICS = ("nmi", "ami", "f1")


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

    a_sizes, a_times = np.unique(np.asarray(class_sizes, np.int64), return_counts=True)
    b_sizes, b_times = np.unique(np.asarray(cluster_sizes, np.int64), return_counts=True)
    total = int(a_sizes @ a_times)
    expectation = 0.0
    for a, times in zip(a_sizes, a_times, strict=True):
        # Every n of every b, in one flat row: never longer than N, since the sizes b differ.
        most = np.minimum(a, b_sizes)
        b = np.repeat(b_sizes, most)
        n = np.arange(len(b)) - np.repeat(np.cumsum(most) - most, most) + 1
        information = n / total * (np.log(total * n.astype(np.float64)) - np.log(float(a) * b))
        weight = np.repeat(b_times, most) * hypergeom.pmf(n, total, a, b)
        expectation += float(times * (weight * information).sum())
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
