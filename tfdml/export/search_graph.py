"""The retriever's SavedModel: an exported embedder, the search around it, and the gallery in its variables."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.embeddings.backends import SavedModelEmbedder
from tfdml.errors import UserError
from tfdml.export.gallery import NO_LABEL, UNKNOWN, Gallery
from tfdml.export.request import refuse
from tfdml.export.saved_model import SIGNATURES, quiet
from tfdml.workarounds import write_fingerprint

SEARCHES = ("search_bytes", "search_embedding", "search_each")
# Of retrievers with a threshold.
DECISIONS = ("classify",)
# Neighbors of one query, and of all queries of a request: what an answer may take.
MAX_NEIGHBORS = 10_000
MAX_RESULTS = 4_000_000
# Candidates beyond k, so that the rounding of the product rarely leaves open what is among the k.
_SPARE = 4
# Scores (queries x rows) held at once: 64 MB.
_SCORES_AT_ONCE = 2**24
# Components of differences (queries x candidates x d), or of gallery rows, held at once in float64: 32 MB.
_DIFFERENCES_AT_ONCE = 2**22
# Of the softmax of votes, as `KNNClassifier`.
TEMPERATURE = 0.07
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"

Answer = dict[str, tf.Tensor]


def load_exported(embedder: str | os.PathLike) -> Any:
    """Return an exported embedder, loaded.

    Args:
        embedder: The path of an exported version.

    Raises:
        UserError: The embedder cannot be loaded or has other signatures.
    """
    loaded = SavedModelEmbedder(embedder).loaded
    missing = [name for name in SIGNATURES if name not in loaded.signatures]
    if missing:
        raise UserError(f"{embedder} is not an export of tfdml export: it has no signature {missing[0]}")
    return loaded


def write_graph(loaded: Any, folder: str | os.PathLike, decides: bool = False) -> None:
    """Write a retriever's SavedModel around an exported embedder, with no item in its gallery yet.

    The embedder's signatures stay, and three are added. k is one int32, or one for each query; where it is more than
    the gallery holds, the whole gallery comes back.

    - `search_bytes`: `image_bytes` (B,) strings, `k` -> `indices`, `ids`, `distances` (Euclidean, of vectors of length
      1), `similarities` (cosines), `labels`, `metadata` (JSON), each (B, k);
    - `search_embedding`: `embedding` (B, d) float32, `k` -> the same;
    - `search_each`: as `search_bytes`, and `error` (B,) strings: what is wrong with a query, whose row is then filled
      with index -1, or empty. For a server that puts the queries of several clients into one batch.

    The first two fail on the first query that is bad, and name it. With a threshold, each has the outputs `accepted`
    (B, k), whether a neighbor is within the threshold, and `known` (B,), whether any is; and there is one more
    signature:

    - `classify`: `image_bytes` (B,) strings, `k` -> what `KNNClassifier` with `weights="softmax"` answers, each (B,):
      `classes` (names; "unknown" beyond the threshold), `labels` (-1), `distances`, `confidences`, and `error`.

    Args:
        loaded: The embedder, as `load_exported` returns it.
        folder: Where to write; an empty folder or none.
        decides: Whether the retriever has a threshold, which `copy_with_gallery` writes.
    """
    served = {name: loaded.signatures[name] for name in SIGNATURES}
    dimensions = served["serving_default"].structured_outputs["embedding"].shape[1]
    module = tf.Module()
    module.embedder = loaded
    module.table = _empty_table(dimensions, decides)
    table = Table(**module.table)

    def by_bytes(image_bytes: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        return search_embedding(table, served["serving_default"](image_bytes=image_bytes)["embedding"], k)

    def by_embedding(embedding: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        return search_embedding(table, embedding, k)

    def by_each(image_bytes: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        found = served["embed_each"](image_bytes=image_bytes)
        return search_each(table, found["embedding"], found["error"], k)

    def by_votes(image_bytes: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        return classify(table, by_each(image_bytes, k))

    text, number = tf.TensorSpec((None,), tf.string), tf.TensorSpec(None, tf.int32)
    searches = {"search_bytes": by_bytes, "search_embedding": by_embedding, "search_each": by_each}
    if decides:
        searches["classify"] = by_votes
    specs = {"search_embedding": tf.TensorSpec((None, dimensions), tf.float32)}
    module.searches = {
        name: tf.function(function, input_signature=[specs.get(name, text), number], autograph=False)
        for name, function in searches.items()
    }
    with quiet():
        tf.saved_model.save(module, str(folder), signatures={**served, **module.searches})


def _empty_table(dimensions: int, decides: bool) -> dict[str, tf.Variable]:
    empty = {name: tf.fill((0,), "") for name in ("ids", "metadata", "classes")}
    empty |= {"embeddings": tf.zeros((0, dimensions)), "labels": tf.zeros((0,), tf.int64)}
    with tf.device("/CPU:0"):
        # Without a stated number of rows: another gallery is another checkpoint of the same graph.
        table = {
            name: tf.Variable(value, trainable=False, shape=(None, *value.shape[1:]), name=f"gallery_{name}")
            for name, value in empty.items()
        }
        return table | ({"threshold": tf.Variable(0.0, trainable=False, name="threshold")} if decides else {})


def copy_with_gallery(source: Path, folder: Path, gallery: Gallery, threshold: float | None = None) -> None:
    """Write a retriever's SavedModel again with another gallery: the same graph, another checkpoint.

    Args:
        source: The SavedModel of a retriever.
        folder: Where to write: an empty folder.
        gallery: Its items.
        threshold: The largest distance of an accepted item; None: the graph has none.
    """
    shutil.copyfile(source / "saved_model.pb", folder / "saved_model.pb")
    (folder / "variables").mkdir()
    strings = {
        name: np.array([text.encode() for text in getattr(gallery, name)], object)
        for name in ("ids", "metadata", "classes")
    }
    columns = {"embeddings": gallery.embeddings, "labels": gallery.labels, **strings}
    columns |= {} if threshold is None else {"threshold": np.array(threshold, np.float32)}
    replaced = {f"table/{name}{_VALUE}": value for name, value in columns.items()}
    reader = tf.train.load_checkpoint(str(source / "variables" / "variables"))
    names = sorted(reader.get_variable_to_shape_map())
    values = [tf.constant(replaced[name] if name in replaced else reader.get_tensor(name)) for name in names]
    # The format of checkpoints, written by name: the objects that wrote it first are not needed.
    tf.raw_ops.SaveV2(
        prefix=str(folder / "variables" / "variables"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=values,
    )
    # It refers to the checkpoint too, so the old one cannot be used.
    write_fingerprint(str(folder))


@dataclasses.dataclass(frozen=True)
class Table:
    """The gallery's variables in the graph.

    Args:
        embeddings: (N, d) float32 of length 1.
        ids: (N,) strings.
        labels: (N,) int64.
        metadata: (N,) strings, JSON.
        classes: (N,) strings, the names of the labels.
        threshold: The largest distance of an accepted item, if there is one.
    """

    embeddings: tf.Variable
    ids: tf.Variable
    labels: tf.Variable
    metadata: tf.Variable
    classes: tf.Variable
    threshold: tf.Variable | float | None = None

    def search(self, queries: tf.Tensor, k: tf.Tensor, checks: list[tf.Operation]) -> Answer:
        """Return the neighbors of queries, unless the answer would be too large.

        Args:
            queries: (B, d) float32, not zero.
            k: (B,) int32, from 0 to `MAX_NEIGHBORS`.
            checks: What must run before.

        Returns:
            Tensors (B, min(largest k, N)): `indices`, `ids`, `distances`, `similarities`, `labels`, `metadata`. Where a
            query asked for fewer than others, the rest of its row holds index -1, label -1, distance infinity,
            similarity -1 and empty strings.
        """
        largest = tf.minimum(tf.reduce_max(tf.concat([k, [0]], 0)), tf.shape(self.ids)[0])
        results = tf.cast(largest, tf.int64) * tf.shape(queries, out_type=tf.int64)[0]
        most = f" neighbors in all, more than the limit of {MAX_RESULTS}"
        checks = [
            *checks,
            tf.debugging.Assert(
                results <= MAX_RESULTS, [tf.strings.join(["k: ", tf.strings.as_string(results), most])]
            ),
        ]
        # The CPU is where strings live, and where float32 products are float32.
        with tf.control_dependencies(checks), tf.device("/CPU:0"):
            queries = queries / tf.reduce_max(tf.abs(queries), 1, keepdims=True)  # so that squares do not overflow
            queries = queries / tf.norm(queries, axis=1, keepdims=True)
            rows, squares = nearest(queries, tf.convert_to_tensor(self.embeddings), largest)
            asked = tf.range(tf.shape(rows)[1])[None] < k[:, None]

            def column(values: tf.Variable, filler: int | str) -> tf.Tensor:
                return tf.where(asked, tf.gather(values, rows), filler)

            distances = tf.where(asked, tf.sqrt(squares), float("inf"))
            decisions = {}
            if self.threshold is not None:
                accepted = distances <= self.threshold
                decisions = {"accepted": accepted, "known": tf.reduce_any(accepted, 1)}
            return {
                "indices": tf.where(asked, tf.cast(rows, tf.int64), -1),
                "ids": column(self.ids, ""),
                "distances": distances,
                "similarities": tf.where(asked, 1.0 - squares / 2.0, -1.0),
                "labels": column(self.labels, -1),
                "metadata": column(self.metadata, ""),
                **decisions,
            }


def k_of_each(k: tf.Tensor, batch: tf.Tensor) -> tuple[tf.Tensor, tf.Operation]:
    """Return the number of neighbors of every query, from one number or one for each.

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
    """Return what is wrong with each k, (B,) int32, as (B,) strings, empty for nothing.

    More than the gallery holds is not wrong; more than the limit is, so that a request does not begin to fail when the
    gallery grows.
    """
    text = tf.strings.as_string(k)
    fault = tf.where(k < 1, tf.strings.join(["k is ", text, ", less than 1"]), "")
    most = f", more than the limit of {MAX_NEIGHBORS}"
    return tf.where(k > MAX_NEIGHBORS, tf.strings.join(["k is ", text, most]), fault)


def embedding_fault(embedding: tf.Tensor) -> tf.Tensor:
    """Return what is wrong with each embedding (B, d), (B,) strings, empty for nothing."""
    finite = tf.reduce_all(tf.math.is_finite(embedding), 1)
    fault = tf.where(tf.reduce_any(embedding != 0.0, 1), "", "has length 0")
    return tf.where(finite, fault, "holds NaN or infinite values")


def search_embedding(table: Table, embedding: tf.Tensor, k: tf.Tensor) -> Answer:
    """Return the signature `search_embedding`; an embedding of another length is brought to 1."""
    shape, dimensions = tf.shape(embedding), embedding.shape[1]
    says = tf.strings.format(f"embedding: must be (B, {dimensions}); its shape is {{}}", shape)
    # The optimizer believes the declared shape, and would drop a comparison with it.
    check = tf.debugging.Assert(tf.size(embedding) == shape[0] * dimensions, [says])
    with tf.control_dependencies([check]):
        embedding = tf.identity(embedding)
    each, check = k_of_each(k, tf.shape(embedding)[0])
    checks = [check, refuse(embedding_fault(embedding), "embedding"), refuse(k_fault(each), "k")]
    return table.search(embedding, each, checks)


def search_each(table: Table, embedding: tf.Tensor, error: tf.Tensor, k: tf.Tensor) -> Answer:
    """Return the signature `search_each`, from what `embed_each` gives: what is wrong with a query fails no other."""
    each, check = k_of_each(k, tf.shape(embedding)[0])
    error = tf.where(error == "", k_fault(each), error)
    good = error == ""
    # Any direction will do for those that ask for nothing.
    found = table.search(tf.where(good[:, None], embedding, 1.0), tf.where(good, each, 0), [check])
    return {**found, "error": error}


def classify(table: Table, found: Answer) -> Answer:
    """Return the signature `classify` from what `search_each` gives: a vote of the neighbors, weighted by distance."""
    distances, labels, error = found["distances"], found["labels"], found["error"]
    # A neighbor that a query did not ask for has the distance infinity, and no weight.
    nearest_first = tf.cast(distances - distances[:, :1], tf.float64)
    weights = tf.where(tf.math.is_finite(distances), tf.exp(-nearest_first / TEMPERATURE), 0.0)
    # One number for each class of each query.
    _, numbers = tf.unique(tf.reshape(labels, (-1,)), tf.int64)
    queries = tf.range(tf.shape(labels, out_type=tf.int64)[0])[:, None]
    keys = queries * tf.size(labels, out_type=tf.int64) + tf.reshape(numbers, tf.shape(labels))
    _, keys = tf.unique(tf.reshape(keys, (-1,)))
    # (B, k): the votes of the class of each neighbor; the nearest of equal classes wins.
    votes = tf.math.unsorted_segment_sum(tf.reshape(weights, (-1,)), keys, tf.size(keys))
    votes = tf.reshape(tf.gather(votes, keys), tf.shape(labels))
    # Without a column there is no best one; with a bad query, no neighbor.
    nothing = tf.fill((tf.shape(labels)[0], 1), tf.constant(-1.0, tf.float64))
    best = tf.argmax(tf.concat([votes, nothing], 1), 1)

    def of_best(values: tf.Tensor, filler: Any) -> tf.Tensor:
        last = tf.fill((tf.shape(values)[0], 1), tf.constant(filler, values.dtype))
        return tf.gather(tf.concat([values, last], 1), best, batch_dims=1)

    distance = of_best(distances, float("inf"))
    label = tf.where(distance <= table.threshold, of_best(labels, NO_LABEL), NO_LABEL)
    rows = of_best(found["indices"], -1)
    with tf.device("/CPU:0"):
        names = tf.where(label == NO_LABEL, UNKNOWN, tf.gather(table.classes, tf.maximum(rows, 0)))
    total = tf.reduce_sum(weights, 1)
    confidence = tf.cast(tf.math.divide_no_nan(of_best(votes, 0.0), total), tf.float32)
    return {
        "classes": tf.where(error == "", names, ""),
        "labels": label,
        "distances": distance,
        "confidences": tf.where(error == "", confidence, 0.0),
        "error": error,
    }


def nearest(queries: tf.Tensor, gallery: tf.Tensor, k: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the k rows of the gallery that are nearest to each query, nearest first, equally near ones by row.

    Candidates are found by one product a block of the gallery and the best so far, then measured from differences,
    |q - g|^2, in float64, so that exact copies are at exactly 0. Where the rounding of the product leaves open what is
    among the k, candidates are found once more in float64.

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
    slack = (8 + gallery.shape[1] ** 0.5) * float(np.finfo(np.float32).eps)

    def candidates(dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the least score and the rows, ascending, of the best."""
        asked, block = tf.cast(queries, dtype), tf.maximum(1, _SCORES_AT_ONCE // tf.maximum(batch, 1))
        if dtype == tf.float64:
            block = tf.minimum(block, max(1, _DIFFERENCES_AT_ONCE // gallery.shape[1]))

        def advance(start: tf.Tensor, scores: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            # Written so that the sum cannot overflow.
            end = start + tf.minimum(block, count - start)
            part = tf.cast(gallery[start:end], dtype)
            products = tf.matmul(asked, part, transpose_b=True)
            if dtype == tf.float64:  # which shows that lengths are 1 but for rounding
                products -= tf.reduce_sum(part * part, 1) / 2
            found, places = tf.math.top_k(products, tf.minimum(wanted, end - start))
            # Earlier rows come first, and top_k prefers what comes first.
            scores, rows = tf.concat([scores, found], 1), tf.concat([rows, places + start], 1)
            scores, places = tf.math.top_k(scores, tf.minimum(wanted, tf.shape(scores)[1]))
            return end, scores, tf.gather(rows, places, batch_dims=1)

        nothing = (tf.constant(0), tf.zeros((batch, 0), dtype), tf.zeros((batch, 0), tf.int32))
        shapes = (tf.TensorShape(()), tf.TensorShape((None, None)), tf.TensorShape((None, None)))
        _, scores, rows = tf.while_loop(
            lambda start, *_: start < count, advance, nothing, shape_invariants=shapes, parallel_iterations=1
        )
        return tf.cast(tf.reduce_min(scores, 1), tf.float64), tf.sort(rows, axis=1)

    def best(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        nearness, places = tf.math.top_k(-_squared_distances(queries, gallery, rows), k)
        return tf.gather(rows, places, batch_dims=1), -nearness

    last, rows = candidates(tf.float32)
    rows, squares = best(rows)
    settled = 1 - tf.reduce_max(squares, 1) / 2 >= last + slack
    done = tf.reduce_all(settled) | (wanted >= count) | (k < 1)
    rows, squares = tf.cond(done, lambda: (rows, squares), lambda: best(candidates(tf.float64)[1]))
    return rows, tf.cast(squares, tf.float32)


def _squared_distances(queries: tf.Tensor, gallery: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """(B, m) float64 squared distances of queries (B, d) to the gallery's rows (B, m), some columns at a time."""
    batch, columns = tf.shape(rows)[0], tf.shape(rows)[1]
    step = tf.clip_by_value(_DIFFERENCES_AT_ONCE // tf.maximum(tf.size(queries), 1), 1, tf.maximum(columns, 1))
    steps = -(-columns // step)
    filled = tf.pad(rows, [[0, 0], [0, steps * step - columns]])
    parts = tf.transpose(tf.reshape(filled, (batch, steps, step)), (1, 0, 2))

    def measure(part: tf.Tensor) -> tf.Tensor:
        near = tf.cast(tf.gather(gallery, part), tf.float64)
        return tf.reduce_sum(tf.math.squared_difference(near, tf.cast(queries[:, None], tf.float64)), -1)

    spec = tf.TensorSpec((None, None), tf.float64)
    squares = tf.map_fn(measure, parts, fn_output_signature=spec, parallel_iterations=1)
    return tf.reshape(tf.transpose(squares, (1, 0, 2)), (batch, steps * step))[:, :columns]
