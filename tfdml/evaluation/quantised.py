"""Recall@1 in galleries that are kept in fewer bytes: what 8 bits a number, or product quantisation, cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.per_query import retrieval_task, values_per_query
from tfdml.evaluation.search.index import row_blocks
from tfdml.evaluation.search.scoring import unit_rows

_KIND = re.compile(r"int8|pq([1-9]\d*)?")
# Rows of the gallery that the quantiser is fitted to.
_TRAINING_ROWS = 2**16
# Numbers of the embedding for each byte of pq, where none are named.
_NUMBERS_PER_BYTE = 8


def quantised_recall(
    embeddings: Any,
    labels: Any,
    gallery: Any = None,
    gallery_labels: Any = None,
    *,
    kinds: Sequence[str] = ("int8", "pq"),
    distance: str = "euclidean",
    seed: int = 0,
    memory_budget: int = 256 * 2**20,
) -> dict[str, dict[str, float]]:
    """Recall@1 where the gallery is quantised, the queries are not, and all of the gallery is compared.

    `int8`: 8 bits a number, between its least and greatest value (faiss's SQ8). `pqM`: each vector is cut into M
    pieces, and each piece is the nearest of 256 centres, one byte (Jegou et al., 2011, "Product quantization for
    nearest neighbor search"); `pq` takes a byte for every 8 numbers, or the nearest number of pieces that the
    dimension has.
    The quantiser is fitted to a seeded sample of the gallery.

    Args:
        embeddings: (N, d) the queries.
        labels: (N,) their class ids.
        gallery: (G, d) what is searched; None: all-to-all.
        gallery_labels: (G,) class ids of the gallery.
        kinds: Of `int8`, `pq` and `pqM`.
        distance: As `evaluate_retrieval`.
        seed: Of the sample.
        memory_budget: Of the exact search, for float32.

    Returns:
        For `float32` and each kind `recall@1`, `bytes` of a vector in the gallery, and `lost`, by how much the recall
        is below that of float32.

    Raises:
        UserError: An unknown kind; M does not divide the dimension; as `evaluate_retrieval`.

    Example:
        >>> points = np.random.default_rng(0).normal(size=(600, 8)).astype(np.float32) + np.arange(600)[:, None] // 6
        >>> found = quantised_recall(points, np.arange(600) // 6, kinds=["int8"])
        >>> found["float32"]["bytes"], found["int8"]["bytes"]
        (32, 8)
    """
    check_kinds(kinds)
    task = retrieval_task(embeddings, labels, gallery, gallery_labels)
    dimension = task.queries.shape[1]
    structures = {kind: _structure(kind, dimension) for kind in kinds}
    values = values_per_query(task, ["recall@1"], distance, memory_budget)["recall@1"]
    exact = float(values[task.answerable].mean())
    result = {"float32": {"recall@1": exact, "bytes": 4 * dimension, "lost": 0.0}}
    for kind, structure in structures.items():
        index = _filled(structure, task.queries if task.gallery is None else task.gallery, distance, seed)
        hits = _hits(index, task, distance)
        recall = float(hits[task.answerable].mean())
        result[kind] = {"recall@1": recall, "bytes": int(index.sa_code_size()), "lost": exact - recall}
    return result


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise a `UserError` where one of these is no `kinds` of `quantised_recall`."""
    for kind in kinds:
        if _KIND.fullmatch(kind) is None:
            raise UserError(f"unknown quantisation {kind!r}; int8, pq, or pq with a number of bytes, such as pq64")


def _structure(kind: str, dimension: int) -> str:
    """What faiss's factory calls it."""
    if kind == "int8":
        return "SQ8"
    divisors = [pieces for pieces in range(1, dimension + 1) if dimension % pieces == 0]
    pieces = int(kind[2:] or min(divisors, key=lambda count: abs(count - dimension / _NUMBERS_PER_BYTE)))
    if pieces not in divisors:
        raise UserError(f"{kind}: {pieces} does not divide the {dimension} dimensions; one of {divisors[-12:]} does")
    return f"PQ{pieces}"


def _filled(structure: str, gallery: np.ndarray, distance: str, seed: int) -> Any:
    import faiss

    metric = faiss.METRIC_INNER_PRODUCT if distance in ("cosine", "dot") else faiss.METRIC_L2
    index: Any = faiss.index_factory(gallery.shape[1], structure, metric)
    count = min(len(gallery), _TRAINING_ROWS)
    chosen = np.sort(np.random.default_rng(seed).choice(len(gallery), count, replace=False))
    if structure.startswith("PQ"):
        if count < 256:
            raise UserError(
                f"product quantisation fits 256 centres: it takes as many images at least; there are {count}"
            )
        index.pq.cp.min_points_per_centroid = 1  # no warning of few images
        index.do_polysemous_training = False  # orders the codes for a search that is not made here, for seconds a byte
    index.train(_placed(gallery[chosen], distance))
    for block in row_blocks(gallery.shape):
        index.add(_placed(gallery[block], distance))
    return index


def _hits(index: Any, task: Any, distance: str) -> np.ndarray:
    """(N,) whether the nearest image, the query itself left out, shares the query's class."""
    own = np.arange(len(task.labels)) if task.gallery is None else task.own_rows
    hits = np.zeros(len(task.labels), bool)
    for block in row_blocks(task.queries.shape):
        _, found = index.search(_placed(task.queries[block], distance), 1 if own is None else 2)
        nearest = found[:, 0]
        if own is not None:
            nearest = np.where(nearest == own[block], found[:, 1], nearest)
        hits[block] = task.targets[nearest] == task.labels[block]
    return hits


def _placed(rows: np.ndarray, distance: str) -> np.ndarray:
    rows = np.ascontiguousarray(rows, np.float32)
    return unit_rows(rows) if distance == "cosine" else rows
