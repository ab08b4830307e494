"""The retriever's SavedModel: an exported embedder, the search around it, and the gallery in its variables."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.embeddings.backends.base import short_reason
from tfdml.embeddings.backends.model_card import compare_with_card
from tfdml.errors import UserError
from tfdml.export.network import quiet
from tfdml.export.retriever.endpoints import Table, search_each, search_embedding
from tfdml.export.retriever.gallery import Gallery
from tfdml.export.saved_model import SIGNATURES

SEARCHES = ("search_bytes", "search_embedding", "search_each")
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


def write_graph(embedder: str | os.PathLike, folder: str | os.PathLike) -> Any:
    """Write a retriever's SavedModel around an exported embedder, with no item in its gallery yet.

    The embedder's signatures stay, and three are added. k is one int32, or one for each query; where it is more than
    the gallery holds, the whole gallery comes back.

    - `search_bytes`: `image_bytes` (B,) strings, `k` -> `indices`, `ids`, `distances` (Euclidean, of vectors of length
      1), `similarities` (cosines), `labels`, `metadata` (JSON), each (B, k);
    - `search_embedding`: `embedding` (B, d) float32, `k` -> the same;
    - `search_each`: as `search_bytes`, and `error` (B,) strings: what is wrong with a query, whose row is then filled
      with index -1, or empty. For a server that puts the queries of several clients into one batch.

    The first two fail on the first query that is bad, and name it.

    Args:
        embedder: The path of an exported version.
        folder: Where to write; an empty folder or none.

    Returns:
        The embedder, loaded.

    Raises:
        UserError: The embedder cannot be loaded or has other signatures.
    """
    compare_with_card(Path(embedder))
    try:
        loaded = tf.saved_model.load(str(embedder))
    except Exception as error:  # whatever TensorFlow raises on a damaged graph
        raise UserError(f"{embedder} cannot be loaded as a SavedModel: {short_reason(error)}") from error
    missing = [name for name in SIGNATURES if name not in loaded.signatures]
    if missing:
        raise UserError(f"{embedder} is not an export of bin/export: it has no signature {missing[0]}")
    served = {name: loaded.signatures[name] for name in SIGNATURES}
    dimensions = served["serving_default"].structured_outputs["embedding"].shape[1]
    module = tf.Module()
    module.embedder = loaded
    module.table = table = _table(dimensions)
    columns = Table(**table)

    def by_bytes(image_bytes: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        return search_embedding(columns, served["serving_default"](image_bytes=image_bytes)["embedding"], k)

    def by_embedding(embedding: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        return search_embedding(columns, embedding, k)

    def by_each(image_bytes: tf.Tensor, k: tf.Tensor) -> dict[str, tf.Tensor]:
        found = served["embed_each"](image_bytes=image_bytes)
        return search_each(columns, found["embedding"], found["error"], k)

    text, number = tf.TensorSpec((None,), tf.string), tf.TensorSpec(None, tf.int32)
    searches = zip(
        SEARCHES,
        (by_bytes, by_embedding, by_each),
        (text, tf.TensorSpec((None, dimensions), tf.float32), text),
        strict=True,
    )
    module.searches = {
        name: tf.function(function, input_signature=[spec, number], autograph=False)
        for name, function, spec in searches
    }
    with quiet():
        tf.saved_model.save(module, str(folder), signatures={**served, **module.searches})
    return loaded


def _table(dimensions: int) -> dict[str, tf.Variable]:
    empty = {
        "embeddings": np.zeros((0, dimensions), np.float32),
        "ids": np.zeros((0,), object),
        "labels": np.zeros((0,), np.int64),
        "metadata": np.zeros((0,), object),
    }
    with tf.device("/CPU:0"):
        # Without a stated number of rows: another gallery is another checkpoint of the same graph.
        return {
            name: tf.Variable(
                tf.constant(value, tf.string if value.dtype == object else value.dtype),
                shape=tf.TensorShape((None, *value.shape[1:])),
                trainable=False,
                name=f"gallery_{name}",
            )
            for name, value in empty.items()
        }


def copy_with_gallery(source: Path, folder: Path, gallery: Gallery, in_graph: bool) -> None:
    """Write a retriever's SavedModel again with another gallery: the same graph, another checkpoint.

    Args:
        source: The SavedModel of a retriever.
        folder: Where to write: an empty folder.
        gallery: Its items.
        in_graph: Whether the graph holds their embeddings.
    """
    from tensorflow.python.saved_model import fingerprinting_utils

    shutil.copyfile(source / "saved_model.pb", folder / "saved_model.pb")
    (folder / "variables").mkdir()
    strings = {
        name: np.array([text.encode() for text in getattr(gallery, name)], object) for name in ("ids", "metadata")
    }
    columns = {
        "embeddings": gallery.embeddings if in_graph else gallery.embeddings[:0],
        "labels": gallery.labels,
        **strings,
    }
    replaced = {f"table/{name}{_VALUE}": value for name, value in columns.items()}
    reader = _checkpoint(source)
    names = sorted(reader.get_variable_to_shape_map())
    values = [
        tf.constant(replaced[name]) if name in replaced else tf.constant(reader.get_tensor(name)) for name in names
    ]
    # The format of checkpoints, written by name: the objects that wrote it first are not needed.
    tf.raw_ops.SaveV2(
        prefix=str(folder / "variables" / "variables"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=values,
    )
    # It refers to the checkpoint too, so the old one cannot be used.
    fingerprinting_utils.write_fingerprint(str(folder))


def _checkpoint(source: Path):
    return tf.train.load_checkpoint(str(source / "variables" / "variables"))
