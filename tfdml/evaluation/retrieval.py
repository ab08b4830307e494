"""Retrieval metrics of embeddings: Recall@K, MAP@R, R-precision, and the clustering metrics beside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.clustering import CLUSTERING_METRICS, evaluate_clustering
from tfdml.evaluation.neighbours import check_embeddings, check_own_rows, neighbour_blocks

METRICS = ("recall", "map@r", "r_precision", *CLUSTERING_METRICS)


def check_labels(labels: Any, count: int, what: str = "labels") -> np.ndarray:
    """`labels` as (count,) int64.

    Raises:
        UserError: Not integers, not one per embedding, or beyond int64.
    """
    array = np.asarray(labels)
    if array.shape != (count,):
        raise UserError(f"{what} must be one class id per embedding, {count}; got shape {array.shape}")
    if array.dtype.kind not in "iub":
        raise UserError(f"{what} must be integers; got dtype {array.dtype}")
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise UserError(f"{what} must fit int64; the largest is {array.max()}")
    return array.astype(np.int64)


def matches_in_gallery(labels: np.ndarray, gallery_labels: np.ndarray | None = None) -> np.ndarray:
    """R of every query: how many gallery images share its class, the query itself not counted.

    Args:
        labels: (N,) class ids of the queries.
        gallery_labels: (G,) class ids of the gallery; None: all-to-all.

    Returns:
        (N,) int64.
    """
    classes, counts = np.unique(labels if gallery_labels is None else gallery_labels, return_counts=True)
    place = np.minimum(np.searchsorted(classes, labels), len(classes) - 1)
    found = np.where(classes[place] == labels, counts[place], 0)
    return found - 1 if gallery_labels is None else found


def precision_sums(hits: np.ndarray, matches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average precision at R and R-precision of every query.

    Args:
        hits: (B, K) bool, whether the i-th neighbour shares the query's class; K at least `matches.max()`.
        matches: (B,) R of every query, at least 1.

    Returns:
        (B,) AP@R = 1/R sum_{i <= R} hit_i precision_i, and (B,) R-precision = hits among the first R, over R.
    """
    rank = np.arange(1, hits.shape[1] + 1)
    within = hits & (rank <= matches[:, None])
    precision = np.cumsum(within, axis=1) / rank
    return (precision * within).sum(axis=1) / matches, within.sum(axis=1) / matches


def evaluate_retrieval(
    embeddings: Any,
    labels: Any,
    gallery: Any = None,
    gallery_labels: Any = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    metrics: Sequence[str] = METRICS,
    distance: str = "euclidean",
    *,
    own_rows: Any = None,
    seed: int = 0,
    memory_budget: int = 256 * 2**20,
) -> dict[str, float | int]:
    """Measure how well near embeddings share a class, all-to-all or queries against a gallery.

    Every query ranks the gallery by distance (`nearest_neighbours`: exact, the query itself left out by identity,
    ties by gallery row). With R the number of gallery images of the query's class, itself not counted:

    - `recall@K`: the share of queries with at least one image of their class among the K nearest. This is what
      papers on metric learning call Recall@K (Jegou et al., 2011; Song et al., 2016), not the share of the R
      relevant images that is retrieved; at K = 1 it equals precision@1.
    - `r_precision`: the mean over queries of (images of the class among the R nearest) / R.
    - `map@r`: the mean over queries of 1/R sum_{i=1..R} P(i) rel(i), where rel(i) is 1 if the i-th neighbour
      shares the class, else 0, and P(i) is the precision of the first i (Musgrave et al., 2020, "A Metric
      Learning Reality Check").
    - `nmi`, `ami`, `f1`: agreement of the classes with k-means clusters of the query embeddings, as many as there
      are classes (`evaluate_clustering`).

    Queries with R = 0 cannot be answered: they are left out of the retrieval means and counted. Clustering is the
    slow part with thousands of classes; name the other metrics to leave it out.

    Args:
        embeddings: (N, d) the queries.
        labels: (N,) integer class ids, any int64.
        gallery: (G, d) what is searched; None: all-to-all.
        gallery_labels: (G,) class ids of the gallery, given exactly if `gallery` is.
        ks: The K of Recall@K.
        metrics: Any of `recall` (every K of `ks`), `recall@K` (one K), `map@r`, `r_precision`, `nmi`, `ami`, `f1`.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`. Clusters are Euclidean, of the embeddings scaled to
            length 1 for `cosine`.
        own_rows: (N,) gallery row of each query itself, for queries that are a part of the gallery.
        seed: Of k-means.
        memory_budget: Bytes that a block of the search may take.

    Returns:
        Fractions by metric name, e.g. `{"recall@1": 0.574, ..., "map@r": ..., "r_precision": ..., "nmi": ...,
        "ami": ..., "f1": ...}`, and the counts `num_queries`, `num_gallery` (images that a query is compared with)
        and `queries_without_match`.

    Raises:
        UserError: No image; embeddings not finite; embeddings, labels or dimensions that do not go together; an
            unknown metric or distance; K beyond the gallery; no query with an image of its class to find.

    Example:
        >>> import numpy as np
        >>> evaluate_retrieval(np.array([[0.0], [0.1], [5.0], [5.1]]), [3, 3, 8, 8], ks=[1])["recall@1"]
        1.0
    """
    ks, wanted = _requested(ks, metrics)
    embeddings = check_embeddings(embeddings, "embeddings" if gallery is None else "query embeddings")
    labels = check_labels(labels, len(embeddings))
    if (gallery is None) != (gallery_labels is None):
        raise UserError("gallery and gallery_labels go together: give both (query/gallery) or none (all-to-all)")
    if gallery is not None:
        gallery = check_embeddings(gallery, "gallery embeddings")
        gallery_labels = check_labels(gallery_labels, len(gallery), "gallery_labels")
    matches = matches_in_gallery(labels, gallery_labels)
    if own_rows is not None:
        if gallery is None:
            raise UserError("own_rows goes with a gallery; without one each query's own row is its own index")
        own_rows = check_own_rows(own_rows, len(labels), len(gallery))
        matches -= gallery_labels[own_rows] == labels
    targets = labels if gallery_labels is None else gallery_labels
    available = len(targets) - (gallery is None or own_rows is not None)
    if ks and max(ks) > available:
        raise UserError(f"recall@{max(ks)} needs {max(ks)} gallery images per query; there are {available}")

    result: dict[str, float | int] = {}
    answerable = matches > 0
    if wanted - set(CLUSTERING_METRICS):
        if not answerable.any():
            raise UserError(
                "no query shares its class with another image"
                if gallery is None
                else "queries and gallery have no class in common; do both use the same class ids?"
            )
        depth = max(ks, default=1)
        if wanted & {"map@r", "r_precision"}:
            depth = max(depth, int(matches.max()))
        totals = dict.fromkeys([*(f"recall@{k}" for k in ks), "map@r", "r_precision"], 0.0)
        blocks = neighbour_blocks(
            embeddings, gallery, k=depth, distance=distance, own_rows=own_rows, memory_budget=memory_budget
        )
        for block, indices, _ in blocks:
            keep = answerable[block]
            hits = (targets[indices] == labels[block, None])[keep]
            for k in ks:
                totals[f"recall@{k}"] += float(hits[:, :k].any(axis=1).sum())
            if wanted & {"map@r", "r_precision"}:
                average_precision, r_precision = precision_sums(hits, matches[block][keep])
                totals["map@r"] += float(average_precision.sum())
                totals["r_precision"] += float(r_precision.sum())
        result |= {name: total / int(answerable.sum()) for name, total in totals.items() if name in wanted}
    clustering = [name for name in CLUSTERING_METRICS if name in wanted]
    if clustering:
        result |= evaluate_clustering(embeddings, labels, metrics=clustering, distance=distance, seed=seed)
    return result | {
        "num_queries": len(labels),
        "num_gallery": available,
        "queries_without_match": int((~answerable).sum()),
    }


def _requested(ks: Sequence[int], metrics: Sequence[str]) -> tuple[list[int], set[str]]:
    """The K wanted, ascending, and the names of the results wanted."""
    if isinstance(metrics, str):
        metrics = [metrics]
    if not metrics:
        raise UserError(f"no metric is asked for; choose from {', '.join(METRICS)}")
    chosen: set[int] = set()
    wanted: set[str] = set()
    for name in metrics:
        single = re.fullmatch(r"recall@([1-9]\d*)", name)
        if single:
            chosen.add(int(single[1]))
        elif name == "recall":
            chosen.update(int(k) for k in ks)
        elif name in METRICS:
            wanted.add(name)
        else:
            raise UserError(f"unknown metric {name!r}; one of {', '.join(METRICS)}, or recall@K")
    if "recall" in metrics and (not ks or min(ks) < 1):
        raise UserError(f"ks must be one or more integers of at least 1; got {list(ks)}")
    return sorted(chosen), wanted | {f"recall@{k}" for k in chosen}
