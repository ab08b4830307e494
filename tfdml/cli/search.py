"""Find the nearest images of a gallery.

  tfdml search --gallery=models/cars_retriever --queries='photos/*.jpg' --max_distance=calibrated
  tfdml search --gallery=embeddings/cars --model=models/cars --queries=photos/1.jpg --k=3
  tfdml search --gallery=embeddings/cars --queries=queries.npz --out=neighbors.parquet
  tfdml search --gallery=embeddings/cars --queries=embeddings/cars --k=1000 --out=neighbors.csv
  tfdml search --gallery=embeddings/cars_head --model=runs/head --queries=new.npz
  tfdml search --gallery='lancedb:///data/galleries?table=cars' --model=runs/cars_jrd --queries=1.jpg,2.jpg

--gallery is one of
  a retriever that tfdml export --gallery wrote; it embeds the images itself
  a folder that tfdml embed wrote, or a Parquet, .npz or .npy file, which is searched exactly
  the address of a database that tfdml index wrote

--queries are images, which --model embeds, or stored embeddings: of the same model as the gallery, or for a head as
--model. Where gallery and queries are the same embeddings, their test images are searched as tfdml evaluate does:
queries in the gallery, or each in all others.

--max_distance=calibrated leaves out what is beyond the threshold of a retriever (tfdml export --calibrate=fpir=0.01).
For other galleries, name the JSON file that tfdml evaluate --task=classification --target=fpir=0.01 --json=FILE wrote.
A threshold of another distance is refused.

--out is a .parquet or .csv file with a row for each neighbor.
"""

import dataclasses
import os
from typing import Any

import numpy as np

from tfdml.arguments import number
from tfdml.cli import model_flags
from tfdml.cli.command_line import Command, Flags
from tfdml.cli.model_flags import kind_of_gallery
from tfdml.data import ImageDataset
from tfdml.data.dataset import check
from tfdml.data.images import FileImages, VectorImages
from tfdml.data.readers.tables import images_named
from tfdml.effects import Effect, either, needs
from tfdml.embeddings.files import check_same_model, holds_embeddings
from tfdml.errors import REASON, UserError, user_errors
from tfdml.evaluation import Calibration, RetrievalResults
from tfdml.export.exporter import calibration_of_file
from tfdml.export.retriever import Retriever
from tfdml.io.files import as_named, require_writable
from tfdml.retrieval import EmbeddingsToIndex, connect

_BY_MODEL = either(
    Effect(lambda values: kind_of_gallery(values["gallery"]) != "retriever", "a gallery that does not embed images"),
    Effect(lambda values: not _holds_images(values["queries"]), "stored embeddings as --queries"),
)
_STORED = Effect(lambda values: kind_of_gallery(values["gallery"]) == "embeddings", "stored embeddings as --gallery")

FLAGS = Flags()
FLAGS.define("gallery", "", "What is searched, see above.")
_QUERIES = "Images: files, folders, or patterns with * and **; may be repeated. Or one folder or file of embeddings."
FLAGS.define("queries", [], _QUERIES, kind="paths")
FLAGS.define("k", 10, "How many neighbors of each query.", lower_bound=1)
model_flags.define_distance(FLAGS, _STORED)
_LIMIT = (
    "Leave out what is further away: a number in the distance of the search, calibrated, or a JSON file, see above."
)
FLAGS.define("max_distance", "", _LIMIT)
FLAGS.define("out", "", "File to write the neighbors to, see above.")
model_flags.define_model_flags(FLAGS, model=_BY_MODEL, embeds=needs("model"))

# The results, the distance, the number of images of the gallery, and its own threshold.
_Answer = tuple[RetrievalResults, str, int, Calibration | None]
# The names of the queries, their vectors, their classes (None: not known), and the fingerprint of their model.
_Queries = tuple[list[str], np.ndarray, np.ndarray | None, str]


def search(values: Flags) -> None:
    """Search as the flags say."""
    values.require("gallery", "queries")
    if values.out:
        require_writable(values.out, "out")
        if os.path.splitext(values.out)[1] not in (".parquet", ".csv"):
            raise UserError(f"--out={values.out}: name a file as *.parquet or *.csv")
    kind = kind_of_gallery(values.gallery)
    limit: Any = _max_distance(values.max_distance, kind)
    searches = {"database": _in_database, "embeddings": _in_embeddings, "retriever": _in_retriever}
    results, distance, size, own = searches[kind](values)
    if limit is None and own is None:
        advice = "export it with --calibrate=fpir=0.01, or give a number"
        raise UserError(f"--max_distance=calibrated: {values.gallery} has no threshold: {advice}")
    limit = own if limit is None else limit
    if isinstance(limit, Calibration):
        with user_errors(UserError, f"--max_distance={values.max_distance}: {REASON}"):
            print(limit.for_searches(distance, size))
        limit = limit.threshold
    print(f"{distance} distances" + (f", at most {limit:.6g}" if limit < np.inf else ""))
    results = results.within(limit)
    _print(results)
    if values.out:
        results.write(values.out)
        print(f"written: {as_named(values.out)}")


def _max_distance(text: str, kind: str) -> float | Calibration | None:
    """Return the largest distance of a neighbor, or the threshold of a file; None for that of the gallery itself."""
    if text == "calibrated":
        if kind != "retriever":
            raise UserError("--max_distance=calibrated: only a retriever has a threshold; give a number or a JSON file")
        return None
    if text.endswith(".json"):
        return calibration_of_file(text)
    with user_errors(ValueError, f"--max_distance={text}: write a number, calibrated, or a JSON file"):
        return number("max_distance", float(text)) if text else float("inf")


def _print(results: RetrievalResults) -> None:
    named = ("query", "rank", "id", "distance", "relevant", "num_relevant", "query_class")
    for row in results.table.to_pylist():
        if row["rank"] == 1:
            print(row["query"])
        if row["id"] is not None:
            others = [f"{name}={value}" for name, value in row.items() if value and name not in named]
            print(f"  {row['rank']:>4}  {row['distance']:8.4f}  {'  '.join([row['id'], *others])}")
    if "relevant" in results.table.column_names and results.column("num_relevant").any():
        first = (results.column("rank") == 1) & (results.column("num_relevant") > 0)
        print(f"Recall@1 {100 * results.column('relevant')[first].mean():.2f} %")


def _holds_images(queries: list[str]) -> bool:
    return len(queries) != 1 or not holds_embeddings(os.path.expanduser(queries[0]))


def _paths(values: Flags) -> list[str]:
    return [path for text in values.queries for path in images_named("queries", text)]


def _embedded(values: Flags) -> _Queries:
    if not _holds_images(values.queries):
        read = EmbeddingsToIndex.read(os.path.expanduser(values.queries[0]))
        vectors, model = np.asarray(read.stored.embeddings), read.model
        if values.model:
            dataset = ImageDataset("queries", "all", VectorImages(vectors), np.zeros(len(vectors), np.int64))
            head = model_flags.load_source(values)
            vectors, model = head.embed(dataset, values.batch_size), head.fingerprint()
        return read.names, vectors, read.stored.classes, model
    values.require("model")
    paths = _paths(values)
    dataset = check(ImageDataset("queries", "all", FileImages(tuple(paths)), np.zeros(len(paths), np.int64)))
    source = model_flags.load_source(values)
    return paths, source.embed(dataset, values.batch_size), None, source.fingerprint()


def _in_database(values: Flags) -> _Answer:
    names, vectors, _, model = _embedded(values)
    with connect(values.gallery) as gallery:
        neighbors = gallery.search(vectors, values.k, model=model)
        distance, size = gallery.distance, len(gallery)
    columns = {name: column for name, column in neighbors.columns.items() if name in ("class", "role") and column.any()}
    return RetrievalResults.of_arrays(names, neighbors.ids, neighbors.distances, columns), distance, size, None


def _in_embeddings(values: Flags) -> _Answer:
    path = os.path.expanduser(values.gallery)
    gallery = EmbeddingsToIndex.read(path)
    stored, options = gallery.stored, {"k": values.k, "distance": values.distance}
    same = os.path.realpath(os.path.expanduser(values.queries[0])) == os.path.realpath(path)
    if same and stored.labels is not None and not (_holds_images(values.queries) or values.model):
        part = dataclasses.replace(stored, names=tuple(gallery.names)).split("test")
        results = RetrievalResults.of_dataset(part.embeddings, part, **options)  # type: ignore[arg-type]
        return results, values.distance, len(part), None
    names, vectors, classes, model = _embedded(values)
    check_same_model(gallery.model, model, f"--gallery={values.gallery} and the queries")
    if stored.classes is not None and classes is not None and not np.isin(classes, stored.classes).any():
        print("queries and gallery have no class in common, by name: nothing is counted")
        classes = None
    classes = None if stored.classes is None else classes
    options |= {"query_ids": names, "gallery_ids": gallery.ids, "gallery_labels": stored.classes}
    return RetrievalResults.search(vectors, classes, stored.embeddings, **options), values.distance, len(stored), None


def _in_retriever(values: Flags) -> _Answer:
    retriever = Retriever.load(os.path.expanduser(values.gallery))
    queries: Any
    if _holds_images(values.queries):
        names = queries = _paths(values)
    else:
        names, queries, _, model = _embedded(values)
        check_same_model(retriever.card["model"], model, f"--gallery={values.gallery} and the queries")
    neighbors = retriever.search(queries, values.k)
    results = RetrievalResults.of_arrays(names, neighbors.ids, neighbors.distances, {"class": neighbors.classes})
    return results, "euclidean", len(retriever), retriever.calibration


COMMAND = Command("search", search, FLAGS, __doc__, flag_of={"uri": "gallery"})
