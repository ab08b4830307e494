"""Retrieval: metrics by query and their means, of arrays and of data sets, and neighbors as a
table."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.arguments import integer
from tfdml.errors import UserError, check_choice
from tfdml.evaluation.clustering import evaluate_clustering
from tfdml.evaluation.intervals import RESAMPLED, Interval, confidence_intervals, student_interval
from tfdml.evaluation.metrics import (
    DEFAULT_METRICS,
    PER_QUERY,
    Metric,
    find_metric,
    metric_names,
    population_relevances,
)
from tfdml.evaluation.relevance import (
    Relevance,
    RetrievalTask,
    check_labels,
    dataset_protocol,
    dataset_roles,
    retrieval_task,
)
from tfdml.evaluation.verification import measures_of_pairs
from tfdml.labels import require_classes
from tfdml.registry import DISTANCES
from tfdml.retrieval import exact

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset

# Up to this many relevant images, comparing a row with each of their scores is faster than sorting
# the row.
_COUNTED = 64
_BLOCK = 256 * 2**20


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
    memory_budget: int = _BLOCK,
    values: dict[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Measure how well near embeddings share a class, all-to-all or queries against a gallery.

    Every query ranks the gallery by distance (`nearest_neighbors`: exact, the query itself left out
    by identity, ties by gallery row). With R the number of gallery images of the query's class,
    itself not counted, rel(i) 1 if the i-th neighbor shares the class, else 0, and P(i) the share
    of rel = 1 among the first i:

    - `recall@K`: the share of queries with at least one image of their class among the K nearest.
      This is what papers on metric learning call Recall@K (Jegou et al., 2011; Song et al., 2016),
      not the share of the R relevant images that is retrieved; at K = 1 it equals precision@1.
      Re-identification calls it CMC@K.
    - `precision@K`: the mean over queries of P(K).
    - `r_precision`: the mean over queries of P(R).
    - `map@r`: the mean over queries of 1/R sum_{i=1..R} P(i) rel(i) (Musgrave et al., 2020, "A
      Metric Learning Reality Check").
    - `map@K`: the mean over queries of 1/min(K, R) sum_{i=1..K} P(i) rel(i).
    - `map`: the mean over queries of 1/R sum_i P(i) rel(i) over the whole gallery.
    - `minp`: the mean over queries of R divided by the rank of the last relevant image (Ye et al.,
      2021, AGW).
    - `mrr`: the mean over queries of 1 divided by the rank of the first relevant image.
    - `ndcg`, `h_ap`: of graded relevance (`hierarchical_average_precision` and the like). With
      levels each has a value over all of them, without a suffix, next to those of the levels, which
      take each as right or wrong.
    - `nmi`, `ami`, `f1`: agreement of the classes with k-means clusters of the query embeddings, as
      many as there are classes (`evaluate_clustering`).

    `map`, `minp`, `mrr`, `ndcg` and `h_ap` rank the whole gallery, in a search of their own:
    they are not among the defaults. Queries with R = 0 cannot be answered: they are left out of the
    retrieval means and counted. Clustering is the slow part with thousands of classes; name the
    other metrics to leave it out.

    With a `relevance`, it says which images are relevant in place of "of the query's class", and
    images that it ignores are in no ranking. Where a query has fewer than K images left, those
    missing are no hits.

    Args:
        embeddings: (N, d) the queries.
        labels: (N,) or (N, 1) class ids: integers, or floats that are whole numbers. With a
            `relevance` they are not needed: they are the classes of clustering and intervals, by
            default those of the relevance.
        gallery: (G, d) what is searched; None: all-to-all.
        gallery_labels: (G,) class ids of the gallery, given exactly if `gallery` is; not needed
            with a `relevance`.
        ks: The K of Recall@K; by default those of 1, 2, 4 and 8 that the images suffice for, with a
            warning if not all.
        metrics: Any of these, and those that `metrics.metric` has added; `recall` means every K of
            `ks`. By default `recall`, `precision@1`, `map@r`, `r_precision`, and with classes
            `nmi`, `ami` and `f1`.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`. Clusters are Euclidean, of the
            embeddings scaled to length 1 for `cosine`.
        relevance: What is relevant, where that is more than equal labels: the same camera, lists, a
            hierarchy. With levels each metric is computed for each, as `recall@1/0`, and clustering
            with the classes of each.
        own_rows: (N,) gallery row of each query itself, for queries that are a part of the gallery.
        intervals: `"classes"` or `"queries"` adds 95 % bootstrap intervals over them
            (`confidence_intervals`).
        seed: Of k-means and of the bootstrap.
        memory_budget: Bytes that a block of the search may take.
        values: A mapping to which the values of every query are added, see `retrieval_per_query`.

    Returns:
        Fractions by metric name, e.g.
        `{"recall@1": 0.574, ..., "map@r": ..., "r_precision": ..., "nmi": ..., "ami": ..., "f1":
        ...}`, and the counts `num_queries`, `num_gallery` (images that a query is compared with)
        and `queries_without_match`; where asked for, `intervals`, an `Interval` for each of the
        retrieval metrics.

    Raises:
        UserError: No image; embeddings not finite; embeddings, labels or dimensions that do not go
            together; an unknown metric or distance; K beyond the gallery; all-to-all with one
            class; no query with an image of its class to find; or intervals of clustering metrics
            alone.

    Example:
        >>> import numpy as np
        >>> evaluate_retrieval(np.array([[0.0], [0.1], [5.0], [5.1]]), [3, 3, 8, 8],
        ...     ks=[1])["recall@1"]
        1.0
    """
    task = retrieval_task(embeddings, labels, gallery, gallery_labels, own_rows, relevance)
    names = metric_names(DEFAULT_METRICS if metrics is None else metrics, ks, task.available)
    by_query = [name for name in names if find_metric(name)[0].needs in PER_QUERY]
    of_clusters = [name for name in names if name not in by_query]
    if task.labels is None:
        if metrics is not None and of_clusters:
            raise UserError(
                f"{of_clusters[0]} needs classes, which this relevance does not have: give labels"
            )
        of_clusters = []
    if intervals is not None:
        _check_resampled(intervals, names, by_query, task)

    columns = values_per_query(task, by_query, distance, memory_budget) if by_query else {}
    if values is not None:
        values.update(columns)
    result: dict[str, Any] = {}
    for level, of_level in _columns_by_level(task, columns):
        for name, column in of_level.items():
            result[name] = float(column[level.answerable].mean())
    if of_clusters:
        result |= _agreement(task, of_clusters, distance, seed)
    result["num_queries"] = len(task.queries)
    result["num_gallery"] = task.available
    for end, level in task.by_level.items():
        result[f"queries_without_match{end}"] = int(np.count_nonzero(~level.answerable))
    if intervals is not None:
        result["intervals"] = _intervals_of(task, columns, intervals, seed)
    return result


def _check_resampled(
    intervals: str, names: Sequence[str], by_query: Sequence[str], task: RetrievalTask
) -> None:
    """Refuse intervals over what is not there."""
    check_choice("intervals", intervals, RESAMPLED)
    if intervals == "classes" and task.labels is None:
        raise UserError(
            "this relevance has no classes to resample: give labels, or intervals over queries"
        )
    if not by_query:
        raise UserError(f"{names[0]} has no value per query to resample: leave out the intervals")


def _columns_by_level(
    task: RetrievalTask, columns: dict[str, np.ndarray]
) -> Iterator[tuple[RetrievalTask, dict[str, np.ndarray]]]:
    """Yield each level and its columns; those of graded relevance, over all levels, at the end."""
    levels = task.by_level
    left = dict(columns)
    for end, level in levels.items():
        of_level = {name: left.pop(name) for name in columns if end and name.endswith(end)}
        if of_level:
            yield level, of_level
    if left:
        yield task, left


def _intervals_of(
    task: RetrievalTask, columns: dict[str, np.ndarray], over: str, seed: int
) -> dict[str, Interval]:
    """Return the interval of each column, over classes or queries."""
    result: dict[str, Interval] = {}
    for level, of_level in _columns_by_level(task, columns):
        classes = np.arange(len(task.queries)) if level.labels is None else level.labels
        result |= confidence_intervals(of_level, classes, over=over, seed=seed)
    return result


def _agreement(
    task: RetrievalTask, metrics: Sequence[str], distance: str, seed: int
) -> dict[str, float]:
    """Return the agreement of clusters with the classes of each level."""
    result = {}
    for end, level in task.by_level.items():
        agreement = evaluate_clustering(
            task.queries, level.labels, metrics=metrics, distance=distance, seed=seed
        )
        for name, value in agreement.items():
            result[name + end] = value
    return result


def retrieval_per_query(
    embeddings: Any,
    labels: Any = None,
    gallery: Any = None,
    gallery_labels: Any = None,
    ks: Sequence[int] | None = None,
    metrics: Sequence[str] = ("recall", "map@r", "r_precision"),
    distance: str = "euclidean",
    *,
    relevance: Relevance | None = None,
    own_rows: Any = None,
    neighbors: Any = None,
    memory_budget: int = _BLOCK,
) -> dict[str, np.ndarray]:
    """Return the retrieval metrics of each query, whose means `evaluate_retrieval` reports.

    Args:
        embeddings: As `evaluate_retrieval`.
        labels: As `evaluate_retrieval`.
        gallery: As `evaluate_retrieval`.
        gallery_labels: As `evaluate_retrieval`.
        ks: As `evaluate_retrieval`.
        metrics: Retrieval metrics, as `evaluate_retrieval`.
        distance: As `evaluate_retrieval`.
        relevance: As `evaluate_retrieval`.
        own_rows: As `evaluate_retrieval`.
        neighbors: (N, k) gallery rows, nearest first, that are measured in place of the exact
            search: of a re-ranking or an index. They may hold images that the relevance ignores,
            and -1 where fewer than k are known.
        memory_budget: Bytes that a block of the search may take.

    Returns:
        (N,) float64 by metric name, each in 0 .. 1; NaN for queries without an image of their class
        to find.

    Raises:
        UserError: As `evaluate_retrieval`; `neighbors` are too few for a metric, or not those of a
            search.

    Example:
        >>> import numpy as np
        >>> points = np.array([[0.0], [0.1], [5.0], [5.1], [9.0]])
        >>> retrieval_per_query(points, [3, 3, 8, 3, 7], ks=[1],
        ...     metrics=["recall"])["recall@1"].tolist()
        [1.0, 1.0, nan, 0.0, nan]
    """
    task = retrieval_task(embeddings, labels, gallery, gallery_labels, own_rows, relevance)
    names = metric_names(metrics, ks, task.available, PER_QUERY)
    return values_per_query(task, names, distance, memory_budget, neighbors)


def values_per_query(
    task: RetrievalTask,
    names: Sequence[str],
    distance: str,
    memory_budget: int,
    neighbors: Any = None,
) -> dict[str, np.ndarray]:
    """Return what `retrieval_per_query` returns, for a checked task and the names of
    `metric_names`."""
    check_depth(task, names)
    near, ranked = {}, {}
    for name in names:
        metric, k = find_metric(name)
        if metric.needs == "neighbors":
            near[name] = metric, k
        else:
            ranked[name] = metric
    values = {}
    for end in task.by_level:
        for name in names:
            values[name + end] = np.full(len(task.queries), np.nan)
    if neighbors is not None:
        if ranked:
            raise UserError(
                f"{next(iter(ranked))} ranks the whole gallery, neighbors do not: choose map@r or "
                "map@K"
            )
        _measure_neighbors(values, task, near, _blocks_of(task, neighbors, _depth_of(near, task)))
    elif near:
        blocks = nearest_left(task, _depth_of(near, task), distance, memory_budget)
        _measure_neighbors(values, task, near, blocks)
    if ranked:
        _measure_rankings(values, task, ranked, whole_rankings(task, distance, memory_budget))
    return values


def _depth_of(near: dict[str, tuple[Metric, int]], task: RetrievalTask) -> int:
    """Return how many neighbors the metrics need; one without a K needs those of its class."""
    depths = [1]
    for _, k in near.values():
        if k:
            depths.append(k)
        else:
            depths += [int(level.matches.max()) for level in task.by_level.values()]
    return max(depths)


def _measure_neighbors(
    values: dict[str, np.ndarray],
    task: RetrievalTask,
    near: dict[str, tuple[Metric, int]],
    blocks: Iterable[Any],
) -> None:
    """Write the metrics of the nearest into `values`."""
    levels = task.by_level
    for block, rows, *_ in blocks:
        for end, level in levels.items():
            answerable = np.flatnonzero(level.answerable[block])
            queries = block.start + answerable
            hits = level.relevance.of(queries, rows[answerable])
            matches = level.matches[queries]
            for name, (metric, k) in near.items():
                values[name + end][queries] = metric.compute(hits[:, :k] if k else hits, matches)


def _measure_rankings(
    values: dict[str, np.ndarray],
    task: RetrievalTask,
    ranked: dict[str, Metric],
    rankings: Iterable[tuple[int, dict[str, np.ndarray]]],
) -> None:
    """Write the metrics of whole rankings into `values`."""
    levels = task.by_level
    graded = {}
    if "" not in levels:
        graded = {name: metric for name, metric in ranked.items() if metric.graded}
    for name in graded:
        values[name] = np.full(len(task.queries), np.nan)
    for query, ranks_by_level in rankings:
        for end, ranks in ranks_by_level.items():
            for name, metric in ranked.items():
                values[name + end][query] = metric.compute(ranks)
        if graded and ranks_by_level:
            # The images of a level are among those of the next coarser one.
            ranks = list(ranks_by_level.values())[-1]
            is_of_level = [np.isin(ranks, of_level) for of_level in ranks_by_level.values()]
            shared = np.sum(is_of_level, axis=0)
            relevances = population_relevances(
                shared, len(levels), itself=task.own_rows is not None
            )
            for name, metric in graded.items():
                values[name][query] = metric.compute(ranks, shared, relevances)


def _blocks_of(
    task: RetrievalTask, neighbors: Any, depth: int
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield given neighbors as `nearest_left` does, without distances."""
    rows, count = np.asarray(neighbors), len(task.queries)
    least = task.depth_with_ignored(depth)
    if rows.ndim != 2 or len(rows) != count or rows.shape[1] < least or rows.dtype.kind not in "iu":
        raise UserError(
            f"must be gallery rows ({count}, k), k at least {least} for these metrics; got "
            f"{rows.dtype} {rows.shape}",
            neighbors=...,
        )
    if rows.min() < -1 or rows.max() >= len(task.gallery):
        raise UserError(
            f"must lie in 0 .. {len(task.gallery) - 1}, the rows of the gallery, or be -1",
            neighbors=...,
        )
    ordered = np.sort(
        rows if task.own_rows is None else np.column_stack([rows, task.own_rows]), axis=1
    )
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        query = np.flatnonzero(twice.any(axis=1))[0]
        raise UserError(
            f"of query {query} have a gallery row twice, or the query itself: leave it out",
            neighbors=...,
        )
    for block in exact.row_blocks(count, 4096):
        yield block, exact.left_over(rows[block], task.relevance.ignored(block, rows[block]), depth)


def check_depth(task: RetrievalTask, names: Sequence[str]) -> None:
    """Raise UserError where a metric needs more gallery images than there are, or nothing can be
    right or wrong."""
    if task.all_to_all and task.relevance.labels is not None:
        require_classes(task.relevance.labels, "retrieval")
    k, name = max(((find_metric(name)[1], name) for name in names), default=(0, ""))
    if k > task.available:
        raise UserError(f"{name} needs {k} gallery images per query; there are {task.available}")
    for end, level in task.by_level.items():
        if level.answerable.any():
            continue
        if task.labels is None:
            why = "no query has a relevant image to find"
        elif task.all_to_all:
            why = "no query shares its class with another image"
        else:
            why = "queries and gallery have no class in common; do both use the same class ids?"
        if task.relevance.most_ignored:
            why += f"; up to {task.relevance.most_ignored} images of each query are ignored"
        if end:
            why += f" (level {end[1:]})"
        raise UserError(why)


def nearest_left(
    task: RetrievalTask, k: int, distance: str, memory_budget: int = _BLOCK
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Yield what `neighbor_blocks` yields, without images that are ignored; row -1 where fewer than
    k are left.

    Args:
        task: The queries and the gallery.
        k: How many neighbors.
        distance: As `neighbor_blocks`.
        memory_budget: As `neighbor_blocks`.
    """
    relevance = task.relevance
    return exact.neighbor_blocks(
        task.queries,
        task.gallery,
        k=k,
        distance=distance,
        own_rows=task.own_rows,
        memory_budget=memory_budget,
        ignored=relevance.ignored if relevance.most_ignored else None,
        most_ignored=relevance.most_ignored,
    )


def whole_rankings(
    task: RetrievalTask, distance: str, memory_budget: int
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield the ranks of all relevant images in the ranking of the whole gallery, for each query
    that has any.

    A rank is the place, from 1, by distance, equal distances by gallery row, without the query
    itself and without images that are ignored. No row is sorted by index: the rank of an image is
    one more than the number of images before it, which are counted.

    The ranking is that of float32 products of embeddings shifted to the gallery's median. Images
    whose squared distances differ by less than about 1e-7 of the squared spread may change places.
    Exact copies never do: they share a score.

    Args:
        task: The queries and the gallery.
        distance: As `nearest_neighbors`.
        memory_budget: Bytes that a block may take, next to about three copies of the gallery.

    Yields:
        The query, and of each level (see `RetrievalTask.by_level`) that has any, (R,) ascending
        ranks.

    Raises:
        UserError: An unknown distance.
    """
    check_choice("distance", distance, DISTANCES)
    frame = exact.frame_of(task.queries, task.gallery, distance)
    space = exact.Space(task.queries, task.gallery, frame)
    size, count = len(space.gallery), len(task.queries)
    copies, originals = _copies(space.placed_gallery)
    product = exact.scorer(space, size)

    def scores_of(block: slice) -> np.ndarray:
        scores = product(block)
        if len(copies):  # a product need not give equal columns equal results in their last bit
            scores = np.array(scores)
            scores[:, copies] = scores[:, originals]
        return scores

    height = max(
        1, min(memory_budget // (12 * size), count)
    )  # three at once: in use, coming, and its copy
    for block, scores in exact.one_ahead(scores_of, count, height):
        for query in range(block.start, block.stop):
            row = scores[query - block.start].copy()
            if task.own_rows is not None:
                row[task.own_rows[query]] = -np.inf
            if task.relevance.most_ignored:
                row[task.relevance.ignored_rows(query)] = -np.inf
            rows_of = {end: level.relevance.rows_of(query) for end, level in task.by_level.items()}
            relevant = {end: rows[row[rows] > -np.inf] for end, rows in rows_of.items()}
            yield (
                query,
                {
                    end: 1 + np.sort(_images_before(row, rows))
                    for end, rows in relevant.items()
                    if len(rows)
                },
            )


def _copies(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of rows that equal an earlier one, and of the first that they equal."""
    rows = np.ascontiguousarray(rows) + np.float32(0)  # so that -0 has the bytes of 0
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
    _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
    originals = first[inverse]
    copies = np.flatnonzero(originals != np.arange(len(rows)))
    return copies, originals[copies]


def _images_before(scores: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    """(R,) how many images come before each of `relevant`: better score, or the same and a lower
    row."""
    scores_of_relevant = scores[relevant]
    if len(relevant) <= _COUNTED:
        counts = []
        for row, score in zip(relevant, scores_of_relevant, strict=True):
            at_lower_rows = np.count_nonzero(scores[:row] >= score)
            counts.append(at_lower_rows + np.count_nonzero(scores[row:] > score))
        return np.array(counts)
    ascending = np.sort(scores)
    not_better = np.searchsorted(ascending, scores_of_relevant, "right")
    worse = np.searchsorted(ascending, scores_of_relevant, "left")
    before = len(scores) - not_better
    for i in np.flatnonzero(not_better - worse > 1):
        before[i] += np.count_nonzero(scores[: relevant[i]] == scores_of_relevant[i])
    return before


def evaluate_dataset(embeddings: Any, dataset: ImageDataset, **options: Any) -> dict[str, Any]:
    """Measure the embeddings of a data set by its own protocol.

    Args:
        embeddings: (N, d), one row per image of `dataset`, in its order.
        dataset: With query and gallery roles (In-Shop) queries are searched in the gallery, else
            all-to-all. A `protocol` has the default metrics, and lists or levels. Of given `pairs`,
            `evaluate_pairs` is measured too.
        **options: Further arguments of `evaluate_retrieval`.

    Raises:
        UserError: As `evaluate_retrieval`.

    Example:
        >>> evaluate_dataset(embeddings, test, ks=(1, 10))["recall@1"]
        0.668
    """
    arguments = dataset_protocol(embeddings, dataset)
    benchmark, pairs = getattr(dataset, "protocol", None), getattr(dataset, "pairs", None)
    if benchmark is not None:
        options = {"metrics": benchmark.metrics, "ks": benchmark.ks, **options}
        if benchmark.levels is not None:
            sides = [benchmark.levels[rows] for rows in dataset_roles(dataset) if rows is not None]
            arguments["relevance"] = Relevance.levels(*sides)
    result = evaluate_retrieval(**arguments, **options)
    if pairs is not None:
        measures = measures_of_pairs(embeddings, pairs, options.get("distance", "euclidean"))
        if not measures:
            warnings.warn(
                f"{dataset.name}: {len(pairs.rows)} given pairs are too few to be measured",
                stacklevel=2,
            )
        result |= measures
    return result


def split_into_parts(labels: Any, parts: int = 10, seed: int = 0) -> np.ndarray:
    """Assign the images of every class at random to disjoint parts of nearly equal size, each with
    every class.

    Args:
        labels: (N,) integer class ids.
        parts: How many parts, at least 2.
        seed: Of the assignment.

    Returns:
        (N,) int64, the part of each image, 0 .. parts - 1. Neither the parts nor their shares of a
        class differ by more than one image.

    Raises:
        UserError: Labels that are not integers; fewer than 2 parts; classes with fewer images than
            parts.

    Example:
        >>> np.bincount(split_into_parts([7] * 5 + [8] * 7, parts=3)).tolist()
        [4, 4, 4]
    """
    labels = check_labels(labels, np.size(labels))
    parts = integer("parts", parts, at_least=2)
    smallest = np.unique(labels, return_counts=True)[1].min(initial=len(labels))
    if smallest < parts:
        advice = "take fewer parts, or bootstrap with confidence_intervals"
        raise UserError(
            f"{parts} parts need {parts} images of every class; the smallest has {smallest}: "
            f"{advice}"
        )
    order = np.random.default_rng(seed).permutation(len(labels))
    result = np.empty(len(labels), np.int64)
    # From class to class without starting over, which keeps the parts equally large.
    result[order[np.argsort(labels[order], kind="stable")]] = np.arange(len(labels)) % parts
    return result


def part_protocol(
    embeddings: Any,
    labels: Any,
    *,
    parts: int = 10,
    level: float = 0.95,
    seed: int = 0,
    **options: Any,
) -> dict[str, Interval]:
    """Measure disjoint parts of a test set, each by itself, and return their means with Student's
    intervals.

    The protocol of table 2 of Chu et al., 2020 (JRD), for CUB and CARS with ten parts. A query is
    searched in its own part, where its class has a tenth of its images, so the values are far below
    those on the whole set. The paper states neither how images are assigned nor the formula of its
    intervals.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids; a class has something to find in every part from 2 x `parts`
            images on.
        parts: How many parts.
        level: Coverage aimed at, between 0 and 1.
        seed: Of the split.
        **options: Of `evaluate_retrieval`, all-to-all, such as `metrics` and `ks`.

    Raises:
        UserError: As `split_into_parts`, `student_interval` and `evaluate_retrieval`.

    Example:
        >>> labels = np.repeat([0, 1], 20)
        >>> part_protocol(labels[:, None] + 0.01 * np.arange(40)[:, None], labels, parts=4,
        ...     ks=[1])["recall@1"].mean
        1.0
    """
    embeddings = exact.check_embeddings(embeddings)
    labels = check_labels(labels, len(embeddings))
    part = split_into_parts(labels, parts, seed)
    results = [
        evaluate_retrieval(embeddings[part == i], labels[part == i], **options)
        for i in range(parts)
    ]
    intervals = {}
    for name, value in results[0].items():
        if isinstance(value, float):
            intervals[name] = student_interval([result[name] for result in results], level)
    return intervals
