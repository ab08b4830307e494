"""The retriever's SavedModel: an exported embedder, the search around it, and the gallery in its variables."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.embeddings.backends import SavedModelEmbedder
from tfdml.errors import UserError
from tfdml.export.saved_model import SIGNATURES, quiet, refuse

SEARCHES = ("search_bytes", "search_embedding", "search_each")
# Neighbors of all queries of a request: what an answer may take.
MAX_RESULTS = 4_000_000
# Candidates beyond k, so that the rounding of the product rarely leaves open what is among the k.
_SPARE = 4
# In place of the neighbors of a query that is bad.
_FILLERS = {"indices": -1, "labels": -1, "distances": np.inf, "similarities": -1.0, "accepted": False, "known": False}

Answer = dict[str, tf.Tensor]
# The gallery: `embeddings` (N, d) float32 of length 1; `ids`, `classes` and `metadata` (N,) strings; `labels` (N,)
# int64; and `threshold`, the largest distance of an accepted item, if there is one.
Table = Mapping[str, Any]


def load_exported(embedder: str | os.PathLike) -> SavedModelEmbedder:
    """Return an exported embedder, or that of a retriever, loaded.

    Args:
        embedder: The path of an exported version.

    Raises:
        UserError: The embedder cannot be loaded or has other signatures.
    """
    backend = SavedModelEmbedder(embedder)
    missing = [name for name in SIGNATURES if name not in backend.loaded.signatures]
    if missing:
        raise UserError(f"{embedder} is not an export of tfdml export: it has no signature {missing[0]}")
    return backend


def write_graph(loaded: Any, folder: str | os.PathLike, gallery: Table) -> None:
    """Write a retriever's SavedModel around an exported embedder.

    The embedder's signatures stay, and three are added. k is one int32, or one for each query, of which the largest
    counts; where it is more than the gallery holds, the whole gallery comes back.

    - `search_bytes`: `image_bytes` (B,) strings, `k` -> `indices`, `ids`, `distances` (Euclidean, of vectors of length
      1), `similarities` (cosines), `labels`, `classes` (their names), `metadata` (JSON), each (B, k);
    - `search_embedding`: `embedding` (B, d) float32, `k` -> the same;
    - `search_each`: as `search_bytes`, and `error` (B,) strings: what is wrong with a query, whose row is then filled
      with index -1, or empty. For a server that puts the queries of several clients into one batch.

    The first two fail on the first query that is bad, and name it. With a threshold, each has the outputs `accepted`
    (B, k), whether a neighbor is within the threshold, and `known` (B,), whether any is.

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
        module.table = {name: tf.Variable(value, trainable=False, name=name) for name, value in gallery.items()}

    def by_bytes(image_bytes: tf.Tensor, k: tf.Tensor) -> Answer:
        return search_embedding(module.table, served["serving_default"](image_bytes=image_bytes)["embedding"], k)

    def by_embedding(embedding: tf.Tensor, k: tf.Tensor) -> Answer:
        return search_embedding(module.table, embedding, k)

    def by_each(image_bytes: tf.Tensor, k: tf.Tensor) -> Answer:
        answer = served["embed_each"](image_bytes=image_bytes)
        return search_each(module.table, answer["embedding"], answer["error"], k)

    text, number = tf.TensorSpec((None,), tf.string), tf.TensorSpec(None, tf.int32)
    vectors = tf.TensorSpec((None, gallery["embeddings"].shape[1]), tf.float32)
    searches = zip(SEARCHES, ((by_bytes, text), (by_embedding, vectors), (by_each, text)), strict=True)
    module.searches = {
        name: tf.function(function, input_signature=[spec, number], autograph=False)
        for name, (function, spec) in searches
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
    most = tf.minimum(tf.maximum(tf.reduce_max(k), 1), tf.shape(gallery["ids"])[0])
    results = tf.cast(most, tf.int64) * tf.shape(queries, tf.int64)[0]
    limits = f"must be at least 1, and {MAX_RESULTS} neighbors in all at most"
    says = tf.strings.format("k: " + limits + "; k is {}, for {} queries", (k, tf.shape(queries)[0]))
    checks = [*checks, tf.debugging.Assert((tf.reduce_min(k) >= 1) & (results <= MAX_RESULTS), [says])]
    # The CPU is where float32 products are float32.
    with tf.control_dependencies(checks), tf.device("/CPU:0"):
        queries = queries / tf.reduce_max(tf.abs(queries), 1, keepdims=True)  # so that squares do not overflow
        queries = queries / tf.norm(queries, axis=1, keepdims=True)
        rows, squares = nearest(queries, tf.convert_to_tensor(gallery["embeddings"]), most)
        answer = {name: tf.gather(gallery[name], rows) for name in ("ids", "labels", "classes", "metadata")}
        answer |= {"indices": tf.cast(rows, tf.int64), "distances": tf.sqrt(squares)}
        answer["similarities"] = 1.0 - squares / 2.0
        if "threshold" in gallery:
            answer["accepted"] = answer["distances"] <= gallery["threshold"]
            answer["known"] = tf.reduce_any(answer["accepted"], 1)
        return answer


def search_embedding(gallery: Table, embedding: tf.Tensor, k: tf.Tensor) -> Answer:
    """Return the signature `search_embedding`; an embedding of another length is brought to 1."""
    finite = tf.reduce_all(tf.math.is_finite(embedding), 1)
    fault = tf.where(tf.reduce_any(embedding != 0.0, 1), "", "has length 0")
    faults = tf.where(finite, fault, "holds NaN or infinite values")
    return search(gallery, embedding, k, [refuse(faults, "embedding")])


def search_each(gallery: Table, embedding: tf.Tensor, error: tf.Tensor, k: tf.Tensor) -> Answer:
    """Return the signature `search_each`, from what `embed_each` gives: what is wrong with a query fails no other."""
    good = (error == "")[:, None]
    # Any direction will do for the others.
    answer = search(gallery, tf.where(good, embedding, 1.0), k, [])
    for name, values in answer.items():
        filler = tf.constant(_FILLERS.get(name, ""), values.dtype)
        answer[name] = tf.where(good if values.shape.rank == 2 else good[:, 0], values, filler)
    return {**answer, "error": error}


def nearest(queries: tf.Tensor, gallery: tf.Tensor, k: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the k rows of the gallery that are nearest to each query, nearest first, equally near ones by row.

    Candidates are found by one product, then measured from differences, |q - g|^2, in float64, so that exact copies are
    at exactly 0. Where the rounding of the product leaves open what is among the k, candidates are found once more in
    float64.

    Args:
        queries: (B, d) float32 of length 1.
        gallery: (N, d) float32 of length 1.
        k: Scalar int32, at least 0.

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
    slack = (8 + gallery.shape[1] ** 0.5) * float(np.finfo(np.float32).eps)

    def distances(pair: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        query, rows = pair
        candidates = tf.cast(tf.gather(gallery, rows), tf.float64)
        return tf.reduce_sum(tf.math.squared_difference(candidates, tf.cast(query, tf.float64)), 1)

    def best(products: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the rows, their squared distances, and the least product of a candidate."""
        scores, candidates = tf.math.top_k(products, number)
        candidates = tf.sort(candidates, axis=1)  # top_k prefers what comes first
        squares = tf.cond(  # as nothing can be mapped to nothing
            tf.size(queries) > 0,
            lambda: tf.map_fn(distances, (queries, candidates), fn_output_signature=tf.TensorSpec((None,), tf.float64)),
            lambda: tf.zeros(tf.shape(candidates), tf.float64),
        )
        nearness, places = tf.math.top_k(-squares, k)
        rows = tf.gather(candidates, places, batch_dims=1)
        return rows, -nearness, tf.cast(tf.reduce_min(scores, 1), tf.float64)

    def best_in_float64() -> tuple[tf.Tensor, tf.Tensor]:
        # Which shows that lengths are 1 but for rounding.
        exact = tf.cast(gallery, tf.float64)
        products = tf.matmul(tf.cast(queries, tf.float64), exact, transpose_b=True)
        return best(products - tf.reduce_sum(exact * exact, 1) / 2)[:2]

    rows, squares, last = best(tf.matmul(queries, gallery, transpose_b=True))
    settled = tf.reduce_all(1 - tf.reduce_max(squares, 1) / 2 >= last + slack)
    done = settled | (number >= count) | (k < 1)
    rows, squares = tf.cond(done, lambda: (rows, squares), best_in_float64)
    return rows, tf.cast(squares, tf.float32)
