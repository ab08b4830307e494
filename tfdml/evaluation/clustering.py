"""How well k-means clusters of the embeddings agree with the classes: NMI, AMI, pairwise F1."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn import metrics as sk

from tfdml.errors import UserError, check_positive
from tfdml.evaluation.metrics import find_metric, metric
from tfdml.evaluation.relevance import check_labels
from tfdml.pairwise import integer_labels, require_classes
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
    """Cluster ids by Lloyd's k-means (faiss) on every embedding, started at a seeded random choice of them.

    Args:
        embeddings: (N, d).
        num_clusters: How many clusters, 1 .. N.
        distance: `"cosine"` clusters the embeddings scaled to length 1; any other, the embeddings as they are.
        iterations: Rounds of assignment and update, at least 1.
        seed: Of the initial centroids; the same seed gives the same clusters on the same machine.

    Returns:
        (N,) int64 ids in 0 .. num_clusters - 1. Some ids may not occur where embeddings coincide.

    Raises:
        UserError: Embeddings that are empty or not finite; `num_clusters` out of range; no iteration.
    """
    embeddings = check_embeddings(embeddings)
    if not 1 <= num_clusters <= len(embeddings):
        raise UserError(f"num_clusters must be in 1 .. {len(embeddings)}, the number of images; got {num_clusters}")
    check_positive(iterations=iterations)
    import faiss

    # Clusters do not change when everything moves and scales, and float32 products then cancel least.
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
    return float(sk.normalized_mutual_info_score(labels, clusters, average_method="arithmetic"))


@metric("ami", "clusters", title="AMI")
def _adjusted_mutual_information(labels: np.ndarray, clusters: np.ndarray) -> float:
    return float(sk.adjusted_mutual_info_score(labels, clusters))


@metric("f1", "clusters", title="Pairwise F1")
def pairwise_f1(labels: Any, clusters: Any) -> float:
    """F1 of the decision "same cluster" as a prediction of "same class", over all pairs of images.

    F1 = 2 TP / (2 TP + FP + FN) = 2 S(n_ij) / (S(n_i.) + S(n_.j)), where n is the table of counts of class i in
    cluster j and S sums n (n - 1) / 2. Counted in integers. It is 1 where no class and no cluster has two images.

    Args:
        labels: (N,) class ids.
        clusters: (N,) cluster ids.

    Example:
        >>> pairwise_f1([0, 0, 1, 1], [5, 5, 5, 7])
        0.4
    """
    (_, wrong), (missed, right) = sk.cluster.pair_confusion_matrix(labels, clusters).tolist()
    return 2 * right / (2 * right + wrong + missed) if right + wrong + missed else 1.0


def clustering_agreement(labels: Any, clusters: Any, metrics: Sequence[str] = CLUSTERING_METRICS) -> dict[str, float]:
    """Return the agreement of clusters with classes.

    `nmi` is I(L; C) / ((H(L) + H(C)) / 2), Manning et al. 2008 with the arithmetic mean; `ami` is the same
    with the value expected by chance subtracted above and below (Vinh et al., 2010); `f1` is `pairwise_f1`.

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
        return {name: float(find_metric(name, ("clusters",))[0].compute(labels, clusters)) for name in metrics}


def evaluate_clustering(
    embeddings: Any,
    labels: Any,
    *,
    metrics: Sequence[str] = CLUSTERING_METRICS,
    distance: str = "euclidean",
    iterations: int = 20,
    seed: int = 0,
) -> dict[str, float]:
    """Cluster the embeddings into as many clusters as there are classes, and measure the agreement with them.

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
        UserError: Embeddings that are empty or not finite; labels of one class, or that do not go with them.

    Example:
        >>> import numpy as np
        >>> evaluate_clustering(np.array([[0.0], [0.1], [5.0], [5.1]]), [3, 3, 8, 8])["nmi"]
        1.0
    """
    labels = check_labels(labels, len(embeddings))
    require_classes(labels, "clustering")
    clusters = kmeans(embeddings, len(np.unique(labels)), distance=distance, iterations=iterations, seed=seed)
    return clustering_agreement(labels, clusters, metrics)
