"""The search signatures of a retriever, and what they refuse."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdml.export.request import refuse
from tfdml.export.retriever.exact import nearest

# Neighbours of one query, and of all queries of a request: what an answer may take.
MAX_NEIGHBOURS = 10_000
MAX_RESULTS = 4_000_000

Answer = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Table:
    """The gallery's variables in the graph.

    Args:
        embeddings: (N, d) float32 of length 1; without rows where an index beside the graph is searched.
        ids: (N,) strings.
        labels: (N,) int64.
        metadata: (N,) strings, JSON.
    """

    embeddings: tf.Variable
    ids: tf.Variable
    labels: tf.Variable
    metadata: tf.Variable

    def search(self, queries: tf.Tensor, k: tf.Tensor) -> Answer:
        """The neighbours of queries that have been checked.

        Args:
            queries: (B, d) float32, not zero.
            k: (B,) int32, from 1 to `MAX_NEIGHBOURS`.

        Returns:
            Tensors (B, min(largest k, N)): `indices`, `ids`, `distances`, `similarities`, `labels`, `metadata`. Where a
            query asked for fewer than others, the rest of its row holds index -1, label -1, distance infinity,
            similarity -1 and empty strings.
        """
        with tf.device("/CPU:0"):  # where strings live, and where float32 products are float32
            queries = queries / tf.reduce_max(tf.abs(queries), 1, keepdims=True)  # so that squares do not overflow
            queries = queries / tf.norm(queries, axis=1, keepdims=True)
            largest = tf.reduce_max(tf.concat([k, [0]], 0))
            rows, squares = nearest(queries, tf.convert_to_tensor(self.embeddings), largest)
            asked = tf.range(tf.shape(rows)[1])[None] < k[:, None]

            def column(values: tf.Variable, filler: int | str) -> tf.Tensor:
                return tf.where(asked, tf.gather(values, rows), filler)

            return {
                "indices": tf.where(asked, tf.cast(rows, tf.int64), -1),
                "ids": column(self.ids, ""),
                "distances": tf.where(asked, tf.sqrt(squares), float("inf")),
                "similarities": tf.where(asked, 1.0 - squares / 2.0, -1.0),
                "labels": column(self.labels, -1),
                "metadata": column(self.metadata, ""),
            }

    def check(self, results: tf.Tensor) -> list[tf.Operation]:
        """Refuse a search that the graph cannot do, or whose answer would be too large.

        Args:
            results: Scalar int64, neighbours in the answer before the gallery bounds them, by query and in all.
        """
        here = tf.shape(self.embeddings)[0] > 0
        message = "this gallery is too large for the graph: it is searched by its index, in Python"
        most = f" neighbours in all, more than the limit of {MAX_RESULTS}"
        return [
            tf.debugging.Assert(here, [message]),
            tf.debugging.Assert(
                results <= MAX_RESULTS, [tf.strings.join(["k: ", tf.strings.as_string(results), most])]
            ),
        ]


def k_of_each(k: tf.Tensor, batch: tf.Tensor) -> tuple[tf.Tensor, tf.Operation]:
    """The number of neighbours of every query, from one number or one for each.

    Args:
        k: Int32 of any rank.
        batch: Scalar int32, the number of queries B.

    Returns:
        (B,) int32, and the check that must run before it is used.
    """
    shape = tf.shape(k)
    fits = (tf.size(shape) == 0) | ((tf.size(shape) == 1) & (tf.size(k) == batch))
    says = tf.strings.format("k: must be one number, or one for each of {} queries; its shape is {}", (batch, shape))
    check = tf.debugging.Assert(fits, [says])
    with tf.control_dependencies([check]):
        return tf.broadcast_to(tf.reshape(k, (-1,)), (batch,)), check


def k_fault(k: tf.Tensor) -> tf.Tensor:
    """What is wrong with each k, (B,) int32, as (B,) strings, empty for nothing.

    More than the gallery holds is not wrong; more than the limit is, so that a request does not begin to fail when the
    gallery grows.
    """
    text = tf.strings.as_string(k)
    fault = tf.where(k < 1, tf.strings.join(["k is ", text, ", less than 1"]), "")
    most = f", more than the limit of {MAX_NEIGHBOURS}"
    return tf.where(k > MAX_NEIGHBOURS, tf.strings.join(["k is ", text, most]), fault)


def embedding_fault(embedding: tf.Tensor) -> tf.Tensor:
    """What is wrong with each embedding (B, d), (B,) strings, empty for nothing."""
    finite = tf.reduce_all(tf.math.is_finite(embedding), 1)
    fault = tf.where(tf.reduce_any(embedding != 0.0, 1), "", "has length 0")
    return tf.where(finite, fault, "holds NaN or infinite values")


def search_embedding(table: Table, embedding: tf.Tensor, k: tf.Tensor) -> Answer:
    """The signature `search_embedding`; an embedding of another length is brought to 1."""
    with tf.control_dependencies([_shape_check(embedding)]):
        embedding = tf.identity(embedding)
    count, batch = tf.shape(table.ids)[0], tf.shape(embedding)[0]
    each, check = k_of_each(k, batch)
    results = tf.cast(tf.reduce_max(tf.concat([tf.minimum(each, count), [0]], 0)), tf.int64) * tf.cast(batch, tf.int64)
    checks = [check, refuse(embedding_fault(embedding), "embedding"), refuse(k_fault(each), "k")]
    with tf.control_dependencies([*checks, *table.check(results)]):
        return table.search(tf.identity(embedding), tf.identity(each))


def _shape_check(embedding: tf.Tensor) -> tf.Operation:
    shape, dimensions = tf.shape(embedding), embedding.shape[1]
    says = tf.strings.format(f"embedding: must be (B, {dimensions}); its shape is {{}}", shape)
    # The optimiser believes the declared shape, and would drop a comparison with it.
    return tf.debugging.Assert(tf.size(embedding) == shape[0] * dimensions, [says])


def search_each(table: Table, embedding: tf.Tensor, error: tf.Tensor, k: tf.Tensor) -> Answer:
    """The signature `search_each`, from what `embed_each` gives: what is wrong with a query fails no other."""
    count, batch = tf.shape(table.ids)[0], tf.shape(embedding)[0]
    each, check = k_of_each(k, batch)
    error = tf.where(error == "", k_fault(each), error)
    good = error == ""
    asked = tf.where(good, each, 0)
    results = tf.cast(tf.reduce_max(tf.concat([tf.minimum(asked, count), [0]], 0)), tf.int64) * tf.cast(batch, tf.int64)
    with tf.control_dependencies([check, *table.check(results)]):
        # Any direction will do for those that ask for nothing.
        queries = tf.where(good[:, None], embedding, 1.0)
        return {**table.search(queries, asked), "error": error}
