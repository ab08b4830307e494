"""Retrieval metrics of embeddings: means over queries, clustering, the protocols of data sets and of disjoint parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.embeddings.compute import truncate
from tfdml.errors import UserError, check_choice, check_share
from tfdml.evaluation.clustering import CLUSTERING_METRICS, evaluate_clustering
from tfdml.evaluation.intervals import RESAMPLED, Interval, confidence_intervals, student_interval
from tfdml.evaluation.per_query import (
    PER_QUERY_METRICS,
    check_depth,
    dataset_roles,
    global_average_precision,
    nearest_hits,
    requested,
    require_wrong_answers,
    retrieval_task,
    values_per_query,
)
from tfdml.evaluation.relevance import Relevance, check_labels
from tfdml.evaluation.verification import measures_of_pairs
from tfdml.memory import require_memory
from tfdml.retrieval.exact import check_embeddings, left_over
from tfdml.retrieval.faiss_index import build_index, rescore

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset, Protocol

# Of all queries at once, by confidence.
CONFIDENCE_METRICS = ("gap", "gap_known")
METRICS = (*PER_QUERY_METRICS, *CONFIDENCE_METRICS, *CLUSTERING_METRICS)
# Without those of whole rankings, which need a search of their own.
DEFAULT_METRICS = ("recall", "precision@1", "map@r", "r_precision", *CLUSTERING_METRICS)


def evaluate_retrieval(
    embeddings: Any,
    labels: Any = None,
    gallery: Any = None,
    gallery_labels: Any = None,
    ks: Sequence[int] | None = None,
    metrics: Sequence[str] | None = None,
    distance: str = "euclidean",
    *,
    relevance: Relevance | None = None,
    own_rows: Any = None,
    intervals: str | None = None,
    seed: int = 0,
    memory_budget: int = 256 * 2**20,
    per_query: Callable[..., dict[str, np.ndarray]] = values_per_query,
) -> dict[str, Any]:
    """Measure how well near embeddings share a class, all-to-all or queries against a gallery.

    Every query ranks the gallery by distance (`nearest_neighbors`: exact, the query itself left out by identity,
    ties by gallery row). With R the number of gallery images of the query's class, itself not counted, rel(i) 1 if
    the i-th neighbor shares the class, else 0, and P(i) the share of rel = 1 among the first i:

    - `recall@K`: the share of queries with at least one image of their class among the K nearest. This is what
      papers on metric learning call Recall@K (Jegou et al., 2011; Song et al., 2016), not the share of the R
      relevant images that is retrieved; at K = 1 it equals precision@1. Re-identification calls it CMC@K.
    - `precision@K`: the mean over queries of P(K).
    - `r_precision`: the mean over queries of P(R).
    - `map@r`: the mean over queries of 1/R sum_{i=1..R} P(i) rel(i) (Musgrave et al., 2020, "A Metric Learning
      Reality Check").
    - `map@K`: the mean over queries of 1/min(K, R) sum_{i=1..K} P(i) rel(i).
    - `mp@K`: the mean over queries of P(min(K, rank of the last relevant image)) (Radenovic et al., 2018, Revisited
      Oxford and Paris).
    - `mmp@K`: the mean over queries of P(min(K, R)) (Ypsilantis et al., 2023, UnED, with K = 5).
    - `map`: the mean over queries of 1/R sum_i P(i) rel(i) over the whole gallery.
    - `map_trapezoidal`: the same with (P(i - 1) + P(i)) / 2 in place of P(i), and P(0) = 1 (Revisited Oxford).
    - `minp`: the mean over queries of R divided by the rank of the last relevant image (Ye et al., 2021, AGW).
    - `mrr`: the mean over queries of 1 divided by the rank of the first relevant image.
    - `ndcg`, `h_ap`, `asi`: of graded relevance (`hierarchical_average_precision` and the like). With levels each has
      a value over all of them, without a suffix, next to those of the levels, which take each as right or wrong.
    - `gap`: global average precision of the nearest images as predictions, with the negative distance as confidence
      (`global_average_precision`); queries with R = 0 count as wrong predictions. `gap_known` leaves them out.
    - `nmi`, `ami`, `f1`: agreement of the classes with k-means clusters of the query embeddings, as many as there
      are classes (`evaluate_clustering`).

    `map`, `map_trapezoidal`, `minp`, `mrr`, `ndcg`, `h_ap` and `asi` rank the whole gallery, in a search of their own:
    they are not among the defaults. Queries with R = 0 cannot be answered: they are left out of the retrieval means and
    counted. Clustering is the slow part with thousands of classes; name the other metrics to leave it out.

    With a `relevance`, it says which images are relevant in place of "of the query's class", and images that it ignores
    are in no ranking. Where a query has fewer than K images left, those missing are no hits.

    Args:
        embeddings: (N, d) the queries.
        labels: (N,) or (N, 1) class ids: integers, or floats that are whole numbers. With a `relevance` they are not
            needed: they are the classes of clustering and intervals, by default those of the relevance.
        gallery: (G, d) what is searched; None: all-to-all.
        gallery_labels: (G,) class ids of the gallery, given exactly if `gallery` is; not needed with a `relevance`.
        ks: The K of Recall@K; by default those of 1, 2, 4 and 8 that the images suffice for, with a warning if not all.
        metrics: Any of these; `recall` means every K of `ks`. By default `recall`, `precision@1`, `map@r`,
            `r_precision`, and with classes `nmi`, `ami` and `f1`.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`. Clusters are Euclidean, of the embeddings scaled to
            length 1 for `cosine`.
        relevance: What is relevant, where that is more than equal labels: the same camera, lists, a hierarchy. With
            levels each metric is computed for each, as `recall@1/0`, and clustering with the classes of each.
        own_rows: (N,) gallery row of each query itself, for queries that are a part of the gallery.
        intervals: `"classes"` or `"queries"` adds 95 % bootstrap intervals over them (`confidence_intervals`).
        seed: Of k-means and of the bootstrap.
        memory_budget: Bytes that a block of the search may take.
        per_query: What computes the metrics of every query: for one that also records them.

    Returns:
        Fractions by metric name, e.g. `{"recall@1": 0.574, ..., "map@r": ..., "r_precision": ..., "nmi": ...,
        "ami": ..., "f1": ...}`, and the counts `num_queries`, `num_gallery` (images that a query is compared with)
        and `queries_without_match`; where asked for, `intervals`, an `Interval` for each of the retrieval metrics.

    Raises:
        UserError: No image; embeddings not finite; embeddings, labels or dimensions that do not go together; an
            unknown metric or distance; K beyond the gallery; all-to-all with one class; no query with an image of its
            class to find; intervals of clustering metrics alone; or too little memory for k-means.

    Example:
        >>> import numpy as np
        >>> evaluate_retrieval(np.array([[0.0], [0.1], [5.0], [5.1]]), [3, 3, 8, 8], ks=[1])["recall@1"]
        1.0
    """
    if intervals is not None:
        check_choice("unit of intervals", intervals, RESAMPLED)
    task = retrieval_task(embeddings, labels, gallery, gallery_labels, own_rows, relevance)
    names = requested(ks, DEFAULT_METRICS if metrics is None else metrics, METRICS, task.available)
    clustering = [name for name in names if name in CLUSTERING_METRICS]
    confident = [name for name in names if name in CONFIDENCE_METRICS]
    retrieval = [name for name in names if name not in (*clustering, *confident)]
    if task.labels is None:
        if metrics is not None and clustering:
            raise UserError(f"{clustering[0]} needs classes, which this relevance does not have: give labels")
        if intervals == "classes":
            raise UserError("this relevance has no classes to resample: give labels, or intervals over queries")
        clustering = []
    if clustering:  # k-means makes a copy that it moves, and faiss one of its own
        require_memory(2.0 * task.queries.nbytes, "k-means of the embeddings", f"leave out {', '.join(clustering)}")
    if intervals is not None and not retrieval:
        raise UserError(f"{names[0]} has no value per query to resample; see part_protocol for intervals of it")

    result: dict[str, Any] = {}
    resampled: dict[str, Interval] = {}
    levels = task.by_level
    if retrieval:
        values = per_query(task, retrieval, distance, memory_budget)
        for end, level in {**levels, "": task}.items():  # the values of graded relevance have no end
            of_level = {name: values[name] for name in (name + end for name in retrieval) if name in values}
            result |= {name: float(found[level.answerable].mean()) for name, found in of_level.items()}
            if intervals is not None and of_level:
                classes = np.arange(len(task.queries)) if level.labels is None else level.labels
                resampled |= confidence_intervals(of_level, classes, over=intervals, seed=seed)
    if confident:
        require_wrong_answers(task)
        hits, distances = nearest_hits(task, distance, memory_budget)
        for name, rows in (("gap", slice(None)), ("gap_known", task.answerable)):
            if name in confident:
                known = int(np.count_nonzero(task.answerable))
                result[name] = global_average_precision(hits[rows], -distances[rows], known)
    for end, level in levels.items() if clustering else ():
        measured = evaluate_clustering(
            task.queries,
            level.labels,
            metrics=clustering,
            distance=distance,
            seed=seed,
        )
        result |= {name + end: value for name, value in measured.items()}
    result |= {"num_queries": len(task.queries), "num_gallery": task.available}
    for end, level in levels.items():
        result[f"queries_without_match{end}"] = int(np.count_nonzero(~level.answerable))
    if intervals is not None:
        result["intervals"] = resampled
    return result


def recall_by_size(
    embeddings: Any,
    labels: Any = None,
    gallery: Any = None,
    gallery_labels: Any = None,
    dims: Sequence[int] = (),
    *,
    relevance: Relevance | None = None,
    own_rows: Any = None,
    candidates: int = 40,
    sample: int = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return Recall@1 of embeddings that are cut to fewer dimensions and kept in fewer bits.

    The first dimensions, scaled to length 1, are searched as float32, as int8 and by their signs (`build_index`). Then
    the images that this search finds are measured again by the cosine of whole vectors (`rescore`).

    Args:
        embeddings: As `evaluate_retrieval`.
        labels: As `evaluate_retrieval`.
        gallery: As `evaluate_retrieval`.
        gallery_labels: As `evaluate_retrieval`.
        dims: Numbers of dimensions; by default all of them, halved up to four times, down to 8.
        relevance: As `evaluate_retrieval`; of levels, sharing any counts.
        own_rows: As `evaluate_retrieval`.
        candidates: How many images are measured again for each query.
        sample: How many queries are searched in the whole gallery, drawn from those that have an answer.
        seed: Of the draw.

    Returns:
        For each number of dimensions and each precision: `dim`, `precision`, `bytes` of the code of an image,
        `recall@1` and `recall@1_rescored`.

    Raises:
        UserError: As `evaluate_retrieval`; or there are not so many dimensions.

    Example:
        >>> points = np.repeat(2 * np.eye(8) - 1, 2, axis=0)
        >>> recall_by_size(points, np.repeat(np.arange(8), 2))[2]
        {'dim': 8, 'precision': 'binary', 'bytes': 1, 'recall@1': 1.0, 'recall@1_rescored': 1.0}
    """
    task = retrieval_task(embeddings, labels, gallery, gallery_labels, own_rows, relevance)
    check_depth(task, ("recall@1",))
    known, whole = np.flatnonzero(task.answerable), task.queries.shape[1]
    asked = np.sort(np.random.default_rng(seed).choice(known, min(sample, len(known)), replace=False))
    queries, own = task.queries[asked], None if task.own is None else task.own[asked]
    depth = task.depth_with_ignored(1)
    rows = []
    for dim in dims or [whole >> power for power in range(5) if whole >> power >= 8] or [whole]:
        cut, searched = truncate(queries, dim), truncate(task.searched, dim)
        for precision in ("float32", "int8", "binary"):
            index = build_index(searched, kind="flat", storage=precision)
            found, _ = index.search(cut, k=min(max(candidates, depth), task.available), own_rows=own)
            row: dict[str, Any] = {"dim": dim, "precision": precision, "bytes": int(index.index.code_size)}
            rescored, _ = rescore(queries, task.searched, found, k=depth, distance="cosine")
            for name, ranked in (("recall@1", found), ("recall@1_rescored", rescored)):
                nearest = left_over(ranked, task.relevance.ignored(asked, ranked), 1)
                row[name] = float((task.relevance.of(asked, nearest) > 0).mean())
            rows.append(row)
    return rows


def images_to_search(dataset: ImageDataset) -> int:
    """Return how many images of a data set a query is compared with."""
    queries, gallery = dataset_roles(dataset)
    return len(queries) - 1 if gallery is None else len(gallery)


def dataset_protocol(embeddings: Any, dataset: ImageDataset) -> dict[str, Any]:
    """Return the arguments by which `evaluate_retrieval` and `retrieval_per_query` measure a data set.

    Args:
        embeddings: (N, d), one row per image of `dataset`, in its order.
        dataset: With query and gallery roles (In-Shop) queries are searched in the gallery, else all-to-all. With
            `groups`, such as cameras, images of the query's class and group are ignored. With a `protocol` that lists
            what is right, its first setting counts.

    Returns:
        `embeddings` and `labels`, with roles `gallery` and `gallery_labels`, and with groups or lists `relevance`.

    Raises:
        UserError: Embeddings that are empty or not finite; not as many as images.

    Example:
        >>> values = retrieval_per_query(**dataset_protocol(embeddings, test), metrics=["map@r"])
        >>> values["map@r"].shape
        (256,)
    """
    queries, gallery = dataset_roles(dataset)
    if len(embeddings) != len(dataset.labels):
        raise UserError(f"{len(embeddings)} embeddings for the {len(dataset.labels)} images of {dataset.name}")
    groups, benchmark = getattr(dataset, "groups", None), getattr(dataset, "protocol", None)
    sets = getattr(dataset, "label_rows", None) if benchmark is None else None
    sides = [queries] if gallery is None else [queries, gallery]

    def by_side(values: np.ndarray, name: str) -> dict[str, np.ndarray]:
        return {f"{start}{name}": values[rows] for start, rows in zip(("", "gallery_"), sides, strict=False)}

    labels = by_side(dataset.labels, "labels")
    protocol: dict[str, Any] = {"embeddings": embeddings, **labels}
    if gallery is not None:
        embeddings = check_embeddings(embeddings)
        protocol |= {"embeddings": embeddings[queries], "gallery": embeddings[gallery]}
    if groups is not None:
        protocol["relevance"] = Relevance.classes(**labels, **by_side(groups, "not_same"))
    if sets is not None:
        protocol["relevance"] = Relevance.sets(*(sets[rows] for rows in sides))
    if benchmark and benchmark.lists:
        protocol["relevance"] = _listed(benchmark, next(iter(benchmark.lists)), queries, sides[-1])
    return protocol


def _listed(benchmark: Protocol, setting: str, queries: np.ndarray, gallery: np.ndarray) -> Relevance:
    """Return the relevance of a setting of lists, whose ids become rows of the gallery."""
    assert benchmark.ids is not None
    assert benchmark.lists is not None
    row_of = {int(image): row for row, image in enumerate(benchmark.ids[gallery])}
    asked = [int(image) for image in benchmark.ids[queries]]
    right, ignored = (
        [[row_of[int(image)] for image in side.get(query, ()) if int(image) in row_of] for query in asked]
        for side in benchmark.lists[setting]
    )
    return Relevance.lists(right, ignored)


def evaluate_dataset(embeddings: Any, dataset: ImageDataset, **options: Any) -> dict[str, Any]:
    """Measure the embeddings of a data set by its own protocol.

    Args:
        embeddings: (N, d), one row per image of `dataset`, in its order.
        dataset: With query and gallery roles (In-Shop) queries are searched in the gallery, else all-to-all. A
            `protocol` has the default metrics, and what else its benchmark measures: each of several settings, whose
            names end those of the metrics (`map_trapezoidal/hard`), or levels. Of given `pairs`, `evaluate_pairs` is
            measured too.
        **options: Further arguments of `evaluate_retrieval`.

    Raises:
        UserError: As `evaluate_retrieval`.

    Example:
        >>> evaluate_dataset(embeddings, test, ks=(1, 10))["recall@1"]
        0.555
    """
    pairs = getattr(dataset, "pairs", None)
    found = _evaluate_retrieval_of(embeddings, dataset, **options)
    if pairs is None:
        return found
    measured = measures_of_pairs(embeddings, pairs, options.get("distance", "euclidean"))
    if not measured:
        warnings.warn(f"{dataset.name}: {len(pairs.rows)} given pairs are too few to be measured", stacklevel=2)
    return found | measured


def _evaluate_retrieval_of(embeddings: Any, dataset: ImageDataset, **options: Any) -> dict[str, Any]:
    arguments = dataset_protocol(embeddings, dataset)
    benchmark = getattr(dataset, "protocol", None)
    if benchmark is None:
        return evaluate_retrieval(**arguments, **options)
    options = {"metrics": benchmark.metrics, "ks": benchmark.ks, **options}
    queries, gallery = dataset_roles(dataset)
    if benchmark.levels is not None:
        sides = [benchmark.levels[rows] for rows in (queries, gallery) if rows is not None]
        return evaluate_retrieval(**arguments | {"relevance": Relevance.levels(*sides)}, **options)
    if not benchmark.lists:
        return evaluate_retrieval(**arguments, **options)
    result: dict[str, Any] = {}
    intervals: dict[str, Interval] = {}
    for setting in benchmark.lists:
        arguments["relevance"] = _listed(benchmark, setting, queries, queries if gallery is None else gallery)
        found = evaluate_retrieval(**arguments, **options)
        intervals |= {name + setting: value for name, value in found.pop("intervals", {}).items()}
        # The numbers of queries and of gallery images are those of every setting.
        result |= {name if name.startswith("num_") else name + setting: value for name, value in found.items()}
    return result | ({"intervals": intervals} if intervals else {})


def split_into_parts(labels: Any, parts: int = 10, seed: int = 0) -> np.ndarray:
    """Assign the images of every class to disjoint parts of nearly equal size, so that each part holds every class.

    Args:
        labels: (N,) integer class ids.
        parts: How many parts, at least 2.
        seed: Of the order in which a class's images are assigned.

    Returns:
        (N,) int64, the part of each image, 0 .. parts - 1. The parts' shares of a class differ by at most one image.

    Raises:
        UserError: Labels that are not integers; fewer than 2 parts; classes with fewer images than parts.

    Example:
        >>> np.bincount(split_into_parts([7] * 5 + [8] * 7, parts=3)).tolist()
        [4, 4, 4]
    """
    labels = check_labels(labels, np.size(labels))
    if parts < 2:
        raise UserError(f"parts must be at least 2; got {parts}")
    counts = np.unique(labels, return_counts=True)[1]
    if not len(counts) or counts.min() < parts:
        raise UserError(
            f"{parts} parts need {parts} images of every class; {int((counts < parts).sum())} of {len(counts)} classes "
            f"have fewer (the smallest {min(counts, default=0)}). Take fewer parts, or bootstrap with "
            "confidence_intervals"
        )
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    # Assigned on from class to class without starting over, which keeps the parts equally large.
    result = np.empty(len(labels), np.int64)
    result[by_class] = np.arange(len(labels)) % parts
    return result


def part_protocol(
    embeddings: Any,
    labels: Any,
    *,
    parts: int = 10,
    level: float = 0.95,
    seed: int = 0,
    ks: Sequence[int] | None = None,
    metrics: Sequence[str] = ("recall",),
    **options: Any,
) -> dict[str, Interval]:
    """Split the test set into disjoint parts that each hold every class, measure each by itself, and average.

    The protocol of table 2 of Chu et al., 2020 (JRD), for CUB and CARS with ten parts. A query is searched in its own
    part, where its class has a tenth of its images: the values are far below those on the whole set, and compare only
    with others of this protocol. The interval is mean +- t s / sqrt(parts), with s the standard deviation of the parts'
    values (divisor parts - 1) and t the quantile of Student's distribution with parts - 1 degrees of freedom. The
    paper states neither how images are assigned nor the formula of its intervals: here they are assigned at random.

    It answers how the metric varies with the images drawn from these classes, not with other classes.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids; every class needs at least `parts` images, and twice as many for a query of it
            to have something to find in every part.
        parts: How many parts.
        level: Coverage aimed at, between 0 and 1.
        seed: Of the split.
        ks: As `evaluate_retrieval`.
        metrics: As `evaluate_retrieval`, clustering included.
        **options: Further arguments of `evaluate_retrieval`, all-to-all.

    Returns:
        An `Interval` per metric; its standard error is s / sqrt(parts).

    Raises:
        UserError: As `split_into_parts` and `evaluate_retrieval`; `level` not between 0 and 1.

    Example:
        >>> labels = np.repeat([0, 1], 20)
        >>> part_protocol(labels[:, None] + 0.01 * np.arange(40)[:, None], labels, parts=4, ks=[1])["recall@1"].mean
        1.0
    """
    check_share(level=level)
    embeddings = check_embeddings(embeddings)
    labels = check_labels(labels, len(embeddings))
    part = split_into_parts(labels, parts, seed)
    measured = [
        evaluate_retrieval(embeddings[part == i], labels[part == i], ks=ks, metrics=metrics, **options)
        for i in range(parts)
    ]
    names = [name for name, value in measured[0].items() if isinstance(value, float)]
    return {name: student_interval([one[name] for one in measured], level) for name in names}
