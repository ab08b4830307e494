"""The graph of a retriever: an exported embedder with signatures that search a table."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.export.saved_model import SIGNATURES, quiet, refuse

SEARCHES = ("search_bytes", "search_embedding", "search_each")
# Neighbors of all queries of a request: what an answer may take.
MAX_RESULTS = 4_000_000
# Candidates beyond k, so that the rounding of the product rarely leaves open what is among the k.
_SPARE = 4
# In place of the neighbors of a query that is bad.
_FILLERS = {
    "indices": -1,
    "labels": -1,
    "distances": np.inf,
    "similarities": -1.0,
    "accepted": False,
    "known": False,
}

Answer = dict[str, tf.Tensor]
#: What is searched. Of E entries, which are items or classes: `ids`, `classes` and `metadata` (E,)
#: strings, and `labels` (E,) int64, the numbers of their classes, -1 for none. `embeddings` (R, d)
#: float32: of items, one of length 1 for each. Of classes also `entries` (R,) int32, the class of
#: each vector, `half_squares` (R,) float32, half of its squared length, which is at most 1, and
#: `most_vectors`, the largest number of vectors of a class. `threshold`, if there is one, is the
#: largest distance of an accepted entry.
Table = Mapping[str, Any]


def write_graph(loaded: Any, folder: str | os.PathLike, gallery: Table) -> None:
    """Write a retriever's SavedModel around an exported embedder.

    The embedder's signatures stay, and three are added. k is one int32, or one for each query, of
    which the largest counts; where it is more than the gallery holds, the whole gallery comes back.

    - `search_bytes`: `image_bytes` (B,) strings, `k` -> `indices`, `ids`, `distances` (Euclidean,
      of vectors of length 1), `similarities` (cosines), `labels`, `classes` (their names),
      `metadata` (JSON), each (B, k). Where classes are found, `ids` are their names, and distances
      and similarities those of the nearest mean of each: its similarity is the mean of the cosines
      of its images;
    - `search_embedding`: `embedding` (B, d) float32, `k` -> the same;
    - `search_each`: as `search_bytes`, and `error` (B,) strings: what is wrong with a query, whose
      row is then filled with index -1, or empty. For a server that puts the queries of several
      clients into one batch.

    The first two fail on the first query that is bad, and name it. With a threshold, each has the
    outputs `accepted` (B, k), whether a neighbor is within the threshold, and `known` (B,), whether
    any is.

    Args:
        loaded: The SavedModel of the embedder.
        folder: Where to write; an empty folder or none.
        gallery: The items.
    """
    served = {name: loaded.signatures[name] for name in SIGNATURES}
    module = tf.Module()
    # Of a retriever without its gallery.
    module.embedder = getattr(loaded, "embedder", loaded)
    with tf.device("/CPU:0"):  # where strings live
        module.table = {
            name: tf.Variable(value, trainable=False, name=name) for name, value in gallery.items()
        }

    def by_bytes(image_bytes: tf.Tensor, k: tf.Tensor) -> Answer:
        return search_embedding(
            module.table, served["serving_default"](image_bytes=image_bytes)["embedding"], k
        )

    def by_embedding(embedding: tf.Tensor, k: tf.Tensor) -> Answer:
        return search_embedding(module.table, embedding, k)

    def by_each(image_bytes: tf.Tensor, k: tf.Tensor) -> Answer:
        answer = served["embed_each"](image_bytes=image_bytes)
        return search_each(module.table, answer["embedding"], answer["error"], k)

    text = tf.TensorSpec((None,), tf.string)
    vectors = tf.TensorSpec((None, gallery["embeddings"].shape[1]), tf.float32)
    functions = ((by_bytes, text), (by_embedding, vectors), (by_each, text))
    number = tf.TensorSpec(None, tf.int32)
    module.searches = {
        name: tf.function(function, input_signature=[queries, number], autograph=False)
        for name, (function, queries) in zip(SEARCHES, functions, strict=True)
    }
    with quiet():
        tf.saved_model.save(module, str(folder), signatures={**served, **module.searches})


def search(gallery: Table, queries: tf.Tensor, k: tf.Tensor, checks: list[tf.Operation]) -> Answer:
    """Return the neighbors of queries, unless the answer would be too large.

    Args:
        gallery: What is searched.
        queries: (B, d) float32, not zero.
        k: Int32 of any shape; the largest counts.
        checks: What must run before.

    Returns:
        Tensors (B, min(k, N)), see `write_graph`.
    """
    number = tf.minimum(tf.maximum(tf.reduce_max(k), 1), tf.shape(gallery["ids"])[0])
    depth = _vectors_for(gallery, number)
    results = tf.cast(depth, tf.int64) * tf.shape(queries, tf.int64)[0]
    limits = f"must be at least 1, and {MAX_RESULTS} neighbors in all at most"
    says = tf.strings.format(
        "k: " + limits + "; k is {}, for {} queries", (k, tf.shape(queries)[0])
    )
    checks = [
        *checks,
        tf.debugging.Assert((tf.reduce_min(k) >= 1) & (results <= MAX_RESULTS), [says]),
    ]
    # The CPU is where float32 products are float32.
    with tf.control_dependencies(checks), tf.device("/CPU:0"):
        # Twice, so that squares do not overflow.
        queries = queries / tf.reduce_max(tf.abs(queries), 1, keepdims=True)
        queries = queries / tf.norm(queries, axis=1, keepdims=True)
        return _answer(gallery, queries, depth, number)


def _vectors_for(gallery: Table, number: tf.Tensor) -> tf.Tensor:
    """Return among how many nearest vectors so many nearest entries are, see `references_for`."""
    if "entries" not in gallery:
        return number
    most = (tf.cast(number, tf.int64) - 1) * gallery["most_vectors"] + 1
    available = tf.shape(gallery["entries"], tf.int64)[0]
    return tf.cast(tf.minimum(most, available), tf.int32)


def _answer(gallery: Table, queries: tf.Tensor, depth: tf.Tensor, number: tf.Tensor) -> Answer:
    """Return the nearest entries of queries of length 1, which are among so many vectors."""
    vectors = tf.convert_to_tensor(gallery["embeddings"])
    half_squares = gallery.get("half_squares", 0.5)
    entries, squares = nearest(queries, vectors, depth, half_squares)
    similarities = 1.0 - squares / 2.0
    if "entries" in gallery:
        similarities += tf.gather(half_squares, entries) - 0.5
        entries = tf.gather(gallery["entries"], entries)
        columns = first_of_each(entries, number)
        entries, squares, similarities = (
            tf.gather(values, columns, batch_dims=1) for values in (entries, squares, similarities)
        )
    answer = {"indices": tf.cast(entries, tf.int64)}
    for name in ("ids", "labels", "classes", "metadata"):
        answer[name] = tf.gather(gallery[name], entries)
    answer["distances"] = tf.sqrt(squares)
    answer["similarities"] = similarities
    if "threshold" in gallery:
        answer["accepted"] = answer["distances"] <= gallery["threshold"]
        answer["known"] = tf.reduce_any(answer["accepted"], 1)
    return answer


def first_of_each(entries: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Return the columns that hold an entry of their row for the first time, in their order.

    Args:
        entries: (B, m) int32.
        number: How many, at most as many different ones as each row has.

    Returns:
        (B, number) int32.

    Example:
        >>> first_of_each(tf.constant([[4, 4, 2, 4, 7]]), 3).numpy()
        array([[0, 2, 4]], dtype=int32)
    """
    order = tf.argsort(entries, axis=1, stable=True)
    in_order = tf.gather(entries, order, batch_dims=1)
    is_repeated = in_order[:, 1:] == in_order[:, :-1]
    is_repeated = tf.pad(is_repeated, [[0, 0], [1, 0]])
    is_repeated = tf.gather(is_repeated, tf.argsort(order, axis=1), batch_dims=1)
    return tf.argsort(tf.cast(is_repeated, tf.int32), axis=1, stable=True)[:, :number]


def search_embedding(gallery: Table, embedding: tf.Tensor, k: tf.Tensor) -> Answer:
    """Return the signature `search_embedding`; an embedding of another length is brought to 1."""
    finite = tf.reduce_all(tf.math.is_finite(embedding), 1)
    fault = tf.where(tf.reduce_any(embedding != 0.0, 1), "", "has length 0")
    faults = tf.where(finite, fault, "holds NaN or infinite values")
    return search(gallery, embedding, k, [refuse(faults, "embedding")])


def search_each(gallery: Table, embedding: tf.Tensor, error: tf.Tensor, k: tf.Tensor) -> Answer:
    """Return the signature `search_each`, from what `embed_each` gives: what is wrong with a query
    fails no other."""
    good = (error == "")[:, None]
    # Any direction will do for the others.
    answer = search(gallery, tf.where(good, embedding, 1.0), k, [])
    for name, values in answer.items():
        filler = tf.constant(_FILLERS.get(name, ""), values.dtype)
        answer[name] = tf.where(good if values.shape.rank == 2 else good[:, 0], values, filler)
    return {**answer, "error": error}


def nearest(
    queries: tf.Tensor, gallery: tf.Tensor, k: tf.Tensor, half_squares: Any = 0.5
) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the k rows of the gallery that are nearest to each query, nearest first, equally near
    ones by row.

    Candidates are found by one product, then measured from differences, |q - g|^2, in float64, so
    that exact copies are at exactly 0. Where the rounding of the product leaves open what is among
    the k, candidates are found once more in float64.

    Args:
        queries: (B, d) float32 of length 1.
        gallery: (N, d) float32 of length at most 1.
        k: Scalar int32, at least 0.
        half_squares: (N,) float32, half of the squared lengths, |g|^2 / 2; by default all are of
            length 1.

    Returns:
        (B, min(k, N)) int32 rows and float32 squared distances.

    Example:
        >>> nearest(tf.eye(2), tf.constant([[0.6, 0.8], [1.0, 0.0]]), tf.constant(1))[0].numpy()
        array([[1],
               [0]], dtype=int32)
    """
    count = tf.shape(gallery)[0]
    k = tf.minimum(k, count)
    number = tf.minimum(k + _SPARE, count)

    def best_in_float64() -> tuple[tf.Tensor, tf.Tensor]:
        scores = _scores_in_float64(queries, gallery)
        rows, squares, _ = _best_of_candidates(queries, gallery, scores, number, k)
        return rows, squares

    # Largest for what is nearest: <q, g> - |g|^2 / 2 = (1 - |q - g|^2) / 2.
    scores = tf.matmul(queries, gallery, transpose_b=True) - half_squares
    rows, squares, last = _best_of_candidates(queries, gallery, scores, number, k)
    slack = (8 + gallery.shape[1] ** 0.5) * float(np.finfo(np.float32).eps)
    is_settled = tf.reduce_all((1 - tf.reduce_max(squares, 1)) / 2 >= last + slack)
    is_done = is_settled | (number >= count) | (k < 1)
    rows, squares = tf.cond(is_done, lambda: (rows, squares), best_in_float64)
    return rows, tf.cast(squares, tf.float32)


def _scores_in_float64(queries: tf.Tensor, gallery: tf.Tensor) -> tf.Tensor:
    """Return (B, N) <q, g> - |g|^2 / 2, with lengths as they are after rounding."""
    exact = tf.cast(gallery, tf.float64)
    products = tf.matmul(tf.cast(queries, tf.float64), exact, transpose_b=True)
    return products - tf.reduce_sum(exact * exact, 1) / 2


def _best_of_candidates(
    queries: tf.Tensor, gallery: tf.Tensor, scores: tf.Tensor, number: tf.Tensor, k: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Measure the rows of the best scores, and take the k nearest of them.

    Args:
        queries: (B, d).
        gallery: (N, d).
        scores: (B, N).
        number: How many rows are measured.
        k: How many are taken.

    Returns:
        (B, k) rows, their squared distances in float64, and (B,) the least score of a row that was
        measured.
    """
    best_scores, candidates = tf.math.top_k(scores, number)
    # By row, as top_k prefers what comes first.
    candidates = tf.sort(candidates, axis=1)
    nearness, columns = tf.math.top_k(-_squared_distances(queries, gallery, candidates), k)
    rows = tf.gather(candidates, columns, batch_dims=1)
    return rows, -nearness, tf.cast(tf.reduce_min(best_scores, 1), tf.float64)


def _squared_distances(queries: tf.Tensor, gallery: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return (B, m) float64 squared distances of each query to its rows (B, m) of the gallery."""

    def distances_of(pair: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        query, own = pair
        candidates = tf.cast(tf.gather(gallery, own), tf.float64)
        return tf.reduce_sum(tf.math.squared_difference(candidates, tf.cast(query, tf.float64)), 1)

    def of_each() -> tf.Tensor:
        signature = tf.TensorSpec((None,), tf.float64)
        return tf.map_fn(distances_of, (queries, rows), fn_output_signature=signature)

    # Nothing cannot be mapped.
    nothing = functools.partial(tf.zeros, tf.shape(rows), tf.float64)
    return tf.cond(tf.size(queries) > 0, of_each, nothing)
