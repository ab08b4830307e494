"""Measuring a chain of steps: after each, the metrics, what they gain on the plain embeddings, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.per_query import (
    PER_QUERY_METRICS,
    RetrievalTask,
    check_depth,
    requested,
    retrieval_task,
    search_depth,
    values_per_query,
)
from tfdml.evaluation.reranking.hubness import hubness_of
from tfdml.evaluation.reranking.searched import searched
from tfdml.evaluation.reranking.steps import Sources, Step, TestViews, check_order, name_of
from tfdml.evaluation.search.exact import nearest_neighbours
from tfdml.memory import require_memory

# How far lengths may be from 1 for embeddings to be taken as they are.
_UNIT = 1e-3


def measure_chains(
    embeddings: Any,
    labels: Any,
    gallery: Any = None,
    gallery_labels: Any = None,
    *,
    chains: Sequence[Sequence[Step]],
    sources: Sources | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    metrics: Sequence[str] = ("recall", "map@r"),
    distance: str = "euclidean",
    hubs: int = 10,
) -> list[dict[str, Any]]:
    """Retrieval metrics before the chains and after every step of them.

    A chain is applied in its order, to embeddings scaled to length 1. All-to-all a query is not expanded by its own
    image, finds no gallery image that its own image has moved, and is not found by itself.

    Args:
        embeddings: (N, d) the queries.
        labels: (N,) their class ids.
        gallery: (G, d) what is searched; None: all-to-all.
        gallery_labels: (G,) class ids of the gallery.
        chains: The steps of each chain, see `steps_of`.
        sources: What the steps need beside the embeddings.
        ks: The K of `recall`.
        metrics: As `retrieval_per_query`, without `map`.
        distance: Of the plain search.
        hubs: The k of `hubness`.

    Returns:
        A row for `plain`, one for `length 1` where the embeddings have other lengths, and one for each step of each
        chain: `step` (the chain up to it), `metrics` (fractions), `gain` of each on `plain`, `seconds` of the step and
        the search after it, `bytes` that are kept to search in (vectors of the gallery and what is beside them), and
        `hubness`.

    Raises:
        UserError: As `evaluate_retrieval`; a step cannot be made, or not there; `map` is asked for.

    Example:
        >>> from tfdml.evaluation.reranking import steps_of
        >>> points = np.random.default_rng(0).normal(size=(40, 4)) + np.repeat(np.eye(4), 10, axis=0)
        >>> rows = measure_chains(points, np.repeat(range(4), 10), chains=[steps_of([("query_expansion", {"k": 3})])])
        >>> [row["step"] for row in rows]
        ['plain', 'length 1', 'query_expansion(k=3)']
    """
    for chain in chains:
        check_order(chain)
    names = requested(ks, metrics, PER_QUERY_METRICS)
    if "map" in names:
        raise UserError("map ranks the whole gallery, which steps after the embedding do not: choose map@r or map@K")
    task = retrieval_task(embeddings, labels, gallery, gallery_labels)
    check_depth(task, names)
    sources = sources or Sources()
    depth = max(search_depth(task, names), min(hubs, task.available))
    advice = "leave out map@r and r_precision, which need as many neighbours as the largest class has images"
    require_memory(40.0 * depth * len(task.labels), f"the {depth:,} nearest of each query", advice)

    rows: list[dict[str, Any]] = []

    def add(step: str, found: np.ndarray, began: float, size: int) -> None:
        seconds = time.perf_counter() - began
        values = _means(task, names, found)
        first = rows[0]["metrics"] if rows else values
        rows.append(
            {
                "step": step,
                "metrics": values,
                "gain": {name: values[name] - first[name] for name in names},
                "seconds": seconds,
                "bytes": size,
                "hubness": hubness_of(found[:, : min(hubs, task.available)], len(task.targets)),
            }
        )

    began = time.perf_counter()
    found, _ = nearest_neighbours(task.queries, task.gallery, k=depth, distance=distance)
    add("plain", found, began, (task.queries if task.gallery is None else task.gallery).nbytes)
    start = searched(task.queries, task.gallery)
    lengths = np.linalg.norm(task.queries if task.gallery is None else task.gallery, axis=1)
    if np.abs(lengths - 1).max() > _UNIT:
        began = time.perf_counter()
        add("length 1", start.neighbours(depth)[0], began, start.bytes)
    done = {"plain"}
    for chain in chains:
        what: Any = start
        views = None
        for place, step in enumerate(chain):
            name = " + ".join(map(name_of, chain[: place + 1]))
            began = time.perf_counter()
            what = step.apply(what, sources, views)
            views = step.views if isinstance(step, TestViews) else views
            if name not in done:  # two chains may begin alike
                add(name, what.neighbours(depth)[0], began, what.bytes)
            done.add(name)
    return rows


def _means(task: RetrievalTask, names: Sequence[str], found: np.ndarray) -> dict[str, float]:
    def neighbours(depth: int) -> Any:
        for start in range(0, len(found), 4096):
            block = slice(start, min(start + 4096, len(found)))
            yield block, found[block, :depth], np.zeros(0)

    values = values_per_query(task, names, "euclidean", 0, neighbours=neighbours)
    return {name: float(values[name][task.answerable].mean()) for name in names}
