"""Find the nearest images of a gallery.

  tfdml search --gallery=models/cars_retriever --queries='photos/*.jpg' --max_distance=calibrated
  tfdml search --gallery=embeddings/cars --model=models/cars --queries=photos/1.jpg --k=3
  tfdml search --gallery=embeddings/signs --model=runs/signs --text="a stop sign"
  tfdml search --gallery=embeddings/cars --queries=queries.npz --out=neighbors.parquet
  tfdml search --gallery=embeddings/cars_head --model=runs/head --queries=new.npz
  tfdml search --gallery='lancedb:///data/galleries?table=cars' --model=runs/cars_jrd --queries=1.jpg,2.jpg

--gallery is one of
  a retriever that tfdml export --gallery wrote; it embeds the images itself
  a folder that tfdml embed wrote, or a Parquet, .npz or .npy file, which is searched exactly
  the address of a database that tfdml index wrote

--queries are images, which --model embeds, or stored embeddings: of the same model as the gallery, or for a head as
--model. A gallery that is its own queries leaves out each image itself. tfdml evaluate measures a model.

--max_distance=calibrated leaves out what is beyond the threshold of a retriever (tfdml export --calibrate=fpir=0.01).
For other galleries, name the JSON file that tfdml evaluate --task=classification --target=fpir=0.01 --json=FILE wrote.
A threshold of another distance is refused.

--out is a .parquet or .csv file with a row for each neighbor.
"""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from tfdml.arguments import number
from tfdml.cli.command_line import Command, Flags, ModelFlags, load_source
from tfdml.data import ImageDataset
from tfdml.data.dataset import check
from tfdml.data.images import FileImages, VectorImages
from tfdml.data.readers.tables import images_named
from tfdml.demo.gallery import check_queries, is_retriever, open_gallery
from tfdml.embeddings.files import holds_embeddings, read_embeddings
from tfdml.errors import REASON, UserError, user_errors
from tfdml.evaluation import Calibration, RetrievalResults
from tfdml.export.exporter import calibration_of_file
from tfdml.io.files import as_named, require_writable
from tfdml.pairwise import DISTANCES
from tfdml.retrieval import connect, is_gallery
from tfdml.training.settings import choice, positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchFlags(ModelFlags):
    """What is searched, and for what.

    Args:
        gallery: What is searched, see above.
        queries: Images: files, folders, or patterns with * and **, with commas. Or one folder or file of
            embeddings.
        text: In place of --queries, what the images show, in words, for a --model of images and texts.
        k: How many neighbors of each query.
        distance: What near means, in stored embeddings. A database and a retriever have their own.
        max_distance: Leave out what is further away: a number in the distance of the search, calibrated, or a JSON
            file, see above.
        out: File to write the neighbors to, see above.
    """

    gallery: str
    queries: Sequence[str] = ()
    text: str = ""
    k: int = choice(10, check=positive)
    distance: str = choice("euclidean", choices=DISTANCES)
    max_distance: str = ""
    out: str = ""


# The results, their distance, the number of images of the gallery, and its own threshold.
_Answer = tuple[RetrievalResults, str, int, Calibration | None]


def search(values: Flags) -> None:
    """Search as the flags say."""
    flags = values.settings(SearchFlags)
    if flags.out:
        require_writable(flags.out, "out")
    if bool(flags.queries) == bool(flags.text):
        raise UserError("--text takes the place of --queries" if flags.text else "--queries or --text is missing")
    results, distance, size, own = (_in_database if is_gallery(flags.gallery) else _in_memory)(flags)
    limit = _max_distance(flags, own)
    if isinstance(limit, Calibration):
        with user_errors(UserError, f"--max_distance={flags.max_distance}: {REASON}"):
            print(limit.for_searches(distance, size))
        limit = limit.threshold
    print(f"{distance} distances" + (f", at most {limit:.9g}" if limit < np.inf else ""))
    results = results.within(limit)
    _print(results)
    if flags.out:
        results.write(flags.out)
        print(f"written: {as_named(flags.out)}")


def _max_distance(flags: SearchFlags, own: Calibration | None) -> float | Calibration:
    """Return the largest distance of a neighbor, or the threshold of a file or of the gallery itself."""
    text = flags.max_distance
    if flags.text and (text == "calibrated" or text.endswith(".json")):
        raise UserError(f"--max_distance={text} is of images as queries, not of words: give a number")
    if text == "calibrated" and own is not None:
        return own
    if text == "calibrated":
        advice = "export a retriever with --calibrate=fpir=0.01, or give a number or a JSON file"
        raise UserError(f"--max_distance=calibrated: {flags.gallery} has no threshold: {advice}")
    if text.endswith(".json"):
        return calibration_of_file(text)
    with user_errors(ValueError, f"--max_distance={text}: write a number, calibrated, or a JSON file"):
        return number("max_distance", float(text)) if text else float("inf")


def _print(results: RetrievalResults) -> None:
    for row in results.table.to_pylist():
        if row["rank"] == 1:
            print(row["query"])
        if row["id"] is not None:
            others = [f"{name}={row[name]}" for name in ("class", "role") if row.get(name)]
            print(f"  {row['rank']:>4}  {row['distance']:8.4f}  {'  '.join([row['id'], *others])}")


def _are_stored(queries: Sequence[str]) -> bool:
    return len(queries) == 1 and holds_embeddings(os.path.expanduser(queries[0]))


def _embedded(flags: SearchFlags) -> tuple[list[str], np.ndarray, str]:
    """Return the names of the queries, their vectors, and the fingerprint of their model."""
    if flags.text:
        source = load_source(flags)
        return [flags.text], source.embed_texts([flags.text]), source.fingerprint()
    if _are_stored(flags.queries):
        stored = read_embeddings(os.path.expanduser(flags.queries[0]))
        names, vectors = list(stored.names), np.asarray(stored.embeddings)
        if not flags.model:
            return names, vectors, stored.model
        dataset = ImageDataset("queries", "all", VectorImages(vectors), np.zeros(len(vectors), np.int64))
    else:
        names = [path for text in flags.queries for path in images_named("queries", text)]
        dataset = check(ImageDataset("queries", "all", FileImages(tuple(names)), np.zeros(len(names), np.int64)))
    source = load_source(flags)
    return names, source.embed(dataset, flags.batch_size), source.fingerprint()


def _in_database(flags: SearchFlags) -> _Answer:
    names, vectors, model = _embedded(flags)
    with connect(flags.gallery) as gallery:
        neighbors = gallery.search(vectors, flags.k, model=model)
        distance, size = gallery.distance, len(gallery)
    if not size:
        raise UserError(f"--gallery={gallery.address} is empty: write it with tfdml index")
    columns = {name: column for name, column in neighbors.columns.items() if name in ("class", "role") and column.any()}
    return RetrievalResults.of_arrays(names, neighbors.ids, neighbors.distances, columns), distance, size, None


def _in_memory(flags: SearchFlags) -> _Answer:
    address = os.path.expanduser(flags.gallery)
    embeds_itself = is_retriever(address) and not (flags.model or _are_stored(flags.queries))
    if embeds_itself:
        flags = dataclasses.replace(flags, model=address)
    gallery = open_gallery(address, None, "", flags.distance)
    names, vectors, model = _embedded(flags)
    if not embeds_itself:
        check_queries(gallery, model)
        if bool(gallery.model) != bool(model):
            print("the models of the gallery and the queries are not compared: one is not known")
    query = os.path.expanduser(flags.queries[0]) if flags.queries and not flags.model else ""
    own_rows = np.arange(len(gallery)) if os.path.realpath(query) == os.path.realpath(address) else None
    rows, distances = gallery.search(vectors, flags.k, own_rows)
    columns = {"class": np.array(gallery.classes, object)[rows]} if gallery.classes else {}
    ids = np.array(gallery.names, object)[rows]
    results = RetrievalResults.of_arrays(names, ids, distances, columns)
    return results, gallery.distance, len(gallery), gallery.calibration


COMMAND = Command("search", search, Flags(SearchFlags), __doc__, {"uri": "gallery"})
