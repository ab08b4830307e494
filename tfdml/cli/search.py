"""`tfdml search`: the nearest images of a gallery."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.arguments import number
from tfdml.cli import model_flags
from tfdml.cli.command_line import Command, Flags
from tfdml.effects import Effect, both, needs
from tfdml.errors import UserError
from tfdml.io.files import require_writable, write_json

USAGE = f"""
Find the nearest images of a gallery.

  tfdml search --gallery=models/cars_retriever --images='photos/*.jpg'
  tfdml search --gallery=models/cars_retriever --images='photos/*.jpg' --max_distance=calibrated
  tfdml search --gallery=embeddings/cars --model=models/cars --images=photos/1.jpg --k=3
  tfdml search --gallery=embeddings/cars --embeddings=queries.npz --json=nearest.json
  tfdml search --gallery='lancedb:///data/galleries?table=cars' --model=runs/cars_jrd --images=photos/1.jpg,photos/2.jpg

--gallery is one of
  a retriever that tfdml export --gallery wrote; it embeds the images itself
  a folder that tfdml embed wrote, or a Parquet, .npz or .npy file, which is searched exactly
  the address of a database that tfdml index wrote

The queries are --images, which --model embeds, or --embeddings, of the same model as the gallery.

{model_flags.SOURCES}
"""

FLAGS = Flags()
FLAGS.define("gallery", "", "What is searched, see above.")
FLAGS.define("images", [], "Query images: files, or patterns with * and **.")
FLAGS.define("embeddings", "", "Query embeddings: what tfdml embed wrote, or a Parquet, .npz or .npy file.")
FLAGS.define("k", 10, "How many neighbors of each query.", lower_bound=1)
FLAGS.define(
    "distance", "euclidean", "What near means, in stored embeddings.", ["euclidean", "sqeuclidean", "cosine", "dot"]
)
FLAGS.define(
    "max_distance", "", "Leave out what is further away: a distance, or calibrated, the threshold of a retriever."
)
FLAGS.define("json", "", "File to write the neighbors to.")
model_flags.define_model_flags(FLAGS)


def search(values: Flags) -> None:
    """Search as the flags say."""
    values.require("gallery")
    if bool(values.images) == bool(values.embeddings):
        raise UserError("name the queries: --images or --embeddings, one of the two")
    if values.json:
        require_writable(values.json, "json")
    kind = _kind(values.gallery)
    limit = _max_distance(values.max_distance, kind)
    names, queries = _stored_queries(values) if values.embeddings else _query_images(values, kind)
    found = _SEARCHES[kind](values, queries)
    result = []
    for query, items in zip(names, found, strict=True):
        neighbors = [item for item in items if item["id"] and item["distance"] <= limit]
        result.append({"query": query, "neighbors": neighbors})
        print(query)
        for rank, item in enumerate(neighbors, 1):
            others = [f"{name}={value}" for name, value in item.items() if name not in ("id", "distance")]
            print(f"  {rank:>4}  {item['distance']:8.4f}  {'  '.join([item['id'], *others])}")
    if values.json:
        write_json(Path(values.json), {"gallery": values.gallery, "queries": result})
        print(json.dumps({"written": values.json}))


def _kind(gallery: str) -> str:
    """Return what a gallery is: a `database`, stored `embeddings`, or a `retriever`."""
    from tfdml.embeddings.reader import holds_embeddings
    from tfdml.retrieval import is_gallery

    if is_gallery(gallery):
        return "database"
    gallery = os.path.expanduser(gallery)
    return "retriever" if os.path.isdir(gallery) and not holds_embeddings(gallery) else "embeddings"


def _max_distance(text: str, kind: str) -> float:
    """Return the largest distance of a neighbor; of a retriever that is asked for its own, infinity."""
    if text == "calibrated" and kind != "retriever":
        raise UserError("--max_distance=calibrated: only a retriever has a threshold of its own; give a number")
    try:
        return float("inf") if text in ("", "calibrated") else number("max_distance", float(text))
    except ValueError:
        raise UserError(f"--max_distance={text}: write a number, or calibrated") from None


def _stored_queries(values: Flags) -> tuple[Sequence[str], np.ndarray]:
    from tfdml.retrieval import EmbeddingsToIndex

    queries = EmbeddingsToIndex.read(os.path.expanduser(values.embeddings))
    return queries.names, np.asarray(queries.stored.embeddings)


def _query_images(values: Flags, kind: str) -> tuple[list[str], Any]:
    """Return the paths of the images; and the paths again for a retriever, or else the embeddings."""
    patterns = [os.path.expanduser(text) for text in values.images]
    paths = [path for text in patterns for path in (sorted(glob.glob(text, recursive=True)) or [text])]
    if folders := [path for path in paths if os.path.isdir(path)]:
        raise UserError(f"--images={folders[0]} is a folder: name its files, such as {folders[0]}/*.jpg")
    if kind == "retriever":
        return paths, paths
    values.require("model")
    from tfdml.data import ImageDataset
    from tfdml.data.faults import check
    from tfdml.data.images import FileImages

    dataset = check(ImageDataset("queries", "all", FileImages(tuple(paths)), np.zeros(len(paths), np.int64)))
    return paths, model_flags.chosen_source(values).embed(dataset, values.batch_size)


def _in_database(values: Flags, queries: np.ndarray) -> list[list[dict[str, Any]]]:
    from tfdml.retrieval import connect

    with connect(values.gallery) as gallery:
        found = gallery.search(queries, values.k)
    # Its id says the same as its path, and the source is a checksum.
    columns = {name: column for name, column in found.attributes.items() if name not in ("path", "source")}
    return _items(found.ids, found.distances, columns)


def _in_embeddings(values: Flags, queries: np.ndarray) -> list[list[dict[str, Any]]]:
    from tfdml.retrieval import EmbeddingsToIndex
    from tfdml.retrieval.exact import nearest_neighbours

    gallery = EmbeddingsToIndex.read(os.path.expanduser(values.gallery))
    k = min(values.k, len(gallery))
    rows, distances = nearest_neighbours(queries, gallery.stored.embeddings, k=k, distance=values.distance)
    labels = gallery.stored.labels
    return _items(np.array(gallery.ids, object)[rows], distances, {} if labels is None else {"label": labels[rows]})


def _in_retriever(values: Flags, queries: Any) -> list[list[dict[str, Any]]]:
    from tfdml.export.retriever import Retriever

    limit = "calibrated" if values.max_distance == "calibrated" else None
    retriever = Retriever.load(os.path.expanduser(values.gallery))
    found = retriever.search(queries, values.k, max_distance=limit)
    return _items(found.ids, found.distances, {"label": found.labels})


def _items(ids: np.ndarray, distances: np.ndarray, columns: dict[str, np.ndarray]) -> list[list[dict[str, Any]]]:
    """Return the neighbors of each query, with the values of the columns."""
    table = {"id": ids.tolist(), "distance": distances.tolist()} | {name: of.tolist() for name, of in columns.items()}
    return [
        [dict(zip(table, item, strict=True)) for item in zip(*row, strict=True)]
        for row in zip(*table.values(), strict=True)
    ]


_SEARCHES = {"database": _in_database, "embeddings": _in_embeddings, "retriever": _in_retriever}
_EMBEDDING = Effect(lambda given: _kind(given["gallery"]) != "retriever", "a gallery that does not embed images itself")
_BY_MODEL = both(needs("images"), _EMBEDDING)
COMMAND = Command(
    "search",
    search,
    FLAGS,
    USAGE,
    effects={
        **{name: both(_BY_MODEL, effect) for name, effect in model_flags.EFFECTS.items()},
        **dict.fromkeys(("model", "batch_size"), _BY_MODEL),
        "distance": Effect(lambda given: _kind(given["gallery"]) == "embeddings", "stored embeddings as --gallery"),
    },
    flag_of={"uri": "gallery"},
)
