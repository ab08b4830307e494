"""Exact nearest neighbours in the graph, block by block, so that a search needs little memory whatever the gallery."""

from __future__ import annotations

import tensorflow as tf

# Candidates beyond k, so that the rounding of the product does not decide what is among the k.
_SPARE = 4
# Scores (queries x rows) held at once: 64 MB.
_SCORES_AT_ONCE = 2**24
# Components of differences (queries x candidates x d) held at once: 16 MB.
_DIFFERENCES_AT_ONCE = 2**22


def nearest(queries: tf.Tensor, gallery: tf.Tensor, k: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The k rows of the gallery that are nearest to each query, nearest first, equally near ones by row.

    Candidates are found by one product a block of the gallery and the best so far, then measured from differences,
    |q - g|^2, so that exact copies are at exactly 0.

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
    count, batch = tf.shape(gallery)[0], tf.shape(queries)[0]
    k = tf.minimum(k, count)
    wanted = tf.minimum(k + _SPARE, count)
    block = tf.maximum(1, _SCORES_AT_ONCE // tf.maximum(batch, 1))

    def advance(start: tf.Tensor, scores: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        # Written so that the sum cannot overflow.
        end = start + tf.minimum(block, count - start)
        products = tf.matmul(queries, gallery[start:end], transpose_b=True)
        found, places = tf.math.top_k(products, tf.minimum(wanted, end - start))
        # Earlier rows come first, and top_k prefers what comes first.
        scores, rows = tf.concat([scores, found], 1), tf.concat([rows, places + start], 1)
        scores, places = tf.math.top_k(scores, tf.minimum(wanted, tf.shape(scores)[1]))
        return end, scores, tf.gather(rows, places, batch_dims=1)

    nothing = (tf.constant(0), tf.zeros((batch, 0)), tf.zeros((batch, 0), tf.int32))
    shapes = (tf.TensorShape(()), tf.TensorShape((None, None)), tf.TensorShape((None, None)))
    _, _, rows = tf.while_loop(
        lambda start, *_: start < count, advance, nothing, shape_invariants=shapes, parallel_iterations=1
    )
    rows = tf.sort(rows, axis=1)
    nearness, places = tf.math.top_k(-_squared_distances(queries, gallery, rows), k)
    return tf.gather(rows, places, batch_dims=1), -nearness


def _squared_distances(queries: tf.Tensor, gallery: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """(B, m) squared distances of queries (B, d) to the gallery's rows (B, m), some columns at a time."""
    batch, columns = tf.shape(rows)[0], tf.shape(rows)[1]
    step = tf.clip_by_value(_DIFFERENCES_AT_ONCE // tf.maximum(tf.size(queries), 1), 1, tf.maximum(columns, 1))
    steps = -(-columns // step)
    filled = tf.pad(rows, [[0, 0], [0, steps * step - columns]])
    parts = tf.transpose(tf.reshape(filled, (batch, steps, step)), (1, 0, 2))

    def measure(part: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.math.squared_difference(tf.gather(gallery, part), queries[:, None]), -1)

    spec = tf.TensorSpec((None, None), tf.float32)
    squares = tf.map_fn(measure, parts, fn_output_signature=spec, parallel_iterations=1)
    return tf.reshape(tf.transpose(squares, (1, 0, 2)), (batch, steps * step))[:, :columns]
