r"""Find the nearest images of a gallery.

  tfdml search --gallery=models/cars_retriever --queries='photos/*.jpg' --max_distance=calibrated
  tfdml search --gallery=embeddings/cars --model=models/cars --queries=photos/1.jpg --k=3
  tfdml search --gallery=embeddings/signs --model=runs/signs --text="a stop sign"
  tfdml search --gallery=embeddings/cars --queries=queries.npz --out=neighbors.parquet
  tfdml search --gallery=embeddings/cars --queries=embeddings/cars --k=1000 --out=neighbors.csv
  tfdml search --gallery=embeddings/cars_head --model=runs/head --queries=new.npz
  tfdml search --gallery='lancedb:///data/galleries?table=cars' --model=runs/cars_jrd \
      --queries=1.jpg,2.jpg

--gallery is one of
  a retriever that tfdml export --gallery wrote; it embeds the images itself
  a folder that tfdml embed wrote, or a Parquet, .npz or .npy file, which is searched exactly
  the address of a database that tfdml index wrote

--queries are images, which --model embeds, or stored embeddings: of the same model as the gallery,
or for a head as --model. Where gallery and queries are the same embeddings, their test images are
searched as tfdml evaluate does: queries in the gallery, or each in all others.

--max_distance=calibrated leaves out what is beyond the threshold of a retriever (tfdml export
--calibrate=fpir=0.01). For other galleries, name the JSON file that tfdml evaluate
--task=classification --target=fpir=0.01 --json=FILE wrote. A threshold of another distance is
refused.

--out is a .parquet or .csv file with a row for each neighbor.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tfdml.cli.command_line import Command, Flags, load_tensorflow
from tfdml.cli.model_flags import ModelFlags, kind_of_gallery, load_source
from tfdml.errors import REASON, UserError, user_errors
from tfdml.io.files import printable, read_json, require_writable
from tfdml.names import TEXT, clean
from tfdml.options import changed, condition, option
from tfdml.registry import DISTANCES

if TYPE_CHECKING:
    import numpy as np

    from tfdml.data import ImageDataset
    from tfdml.evaluation import Calibration
    from tfdml.results import RetrievalResults

_EMBEDS_ITSELF = ("retriever", "images")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchFlags(ModelFlags):
    """What is searched, and for what."""

    title: ClassVar[str] = "What is searched, and for what"

    model: str = changed(ModelFlags, "model", requires="embeds_images or embeds_vectors")
    gallery: str = option(help="What is searched, see above.")
    queries: tuple[str, ...] = option(
        (),
        paths=True,
        help="Images: files, folders, or patterns with * and **; may be repeated. Or one folder or "
        "file of embeddings.",
    )
    text: str = option(
        "",
        help="In place of --queries, what the images show, in words, for a --model of images and "
        "texts.",
    )
    k: int = option(10, at_least=1, help="How many neighbors of each query.")
    distance: str = option(
        "euclidean", words=DISTANCES, requires="is_measured", help="What near means."
    )
    max_distance: str = option(
        "",
        help="Leave out what is further away: a number in the distance of the search, calibrated, "
        "or a JSON file, see above.",
    )
    out: str = option("", help="File to write the neighbors to, see above.")

    @condition("a gallery that embeds no images")
    def embeds_images(self) -> bool:
        """Whether images are embedded by --model."""
        return kind_of_gallery(self.gallery or "") not in _EMBEDS_ITSELF

    @condition("stored embeddings as --queries")
    def embeds_vectors(self) -> bool:
        """Whether the model may be a head."""
        return not _holds_images(self.queries)

    @condition("stored embeddings as --gallery")
    def is_measured(self) -> bool:
        """Whether the distance is chosen here."""
        return kind_of_gallery(self.gallery or "") == "embeddings"


def search(flags: SearchFlags) -> None:
    """Search as the flags say."""
    import numpy as np

    from tfdml.evaluation import Calibration

    if flags.out:
        require_writable(flags.out, "out")
        if os.path.splitext(flags.out)[1] not in (".parquet", ".csv"):
            raise UserError("name a file as *.parquet or *.csv", out=flags.out)
    if bool(flags.queries) == bool(flags.text):
        raise UserError(
            "--text takes the place of --queries"
            if flags.text
            else "--queries or --text is missing"
        )
    kind = kind_of_gallery(flags.gallery)
    limit: Any = _max_distance(flags, kind)
    search_in = {"database": _in_database, "embeddings": _in_embeddings}.get(kind, _in_retriever)
    results, distance, size, own = search_in(flags)
    if limit is None and own is None:
        advice = "export it with --calibrate=fpir=0.01, or give a number"
        raise UserError(f"{flags.gallery} has no threshold: {advice}", max_distance="calibrated")
    limit = own if limit is None else limit
    if isinstance(limit, Calibration):
        with user_errors(UserError, REASON, max_distance=flags.max_distance):
            print(limit.for_searches(distance, size))
        limit = limit.threshold
    print(f"{distance} distances" + (f", at most {limit:.9g}" if limit < np.inf else ""))
    results = results.within(limit)
    _print(results)
    if flags.out:
        results.write(flags.out)
        print(f"written: {printable(flags.out)}")


def _max_distance(flags: SearchFlags, kind: str) -> float | Calibration | None:
    """Return the largest distance of a neighbor, or the threshold of a file; None for that of the
    gallery itself."""
    from tfdml.arguments import number
    from tfdml.evaluation.calibration import calibration_in

    text = flags.max_distance
    if text == "calibrated":
        if flags.text:
            raise UserError(
                "the gallery's threshold is of images as queries, not of texts", max_distance=text
            )
        if kind not in _EMBEDS_ITSELF:
            raise UserError(
                "only a retriever has a threshold; give a number or a JSON file", max_distance=text
            )
        return None
    if text.endswith(".json"):
        return calibration_in(read_json(text), text, "texts" if flags.text else "images")
    with user_errors(ValueError, "write a number, calibrated, or a JSON file", max_distance=text):
        return number("max_distance", float(text)) if text else float("inf")


def _print(results: RetrievalResults) -> None:
    named = ("query", "rank", "id", "distance", "relevant", "num_relevant", "query_class")
    for values in zip(*results.columns.values(), strict=True):
        row = dict(zip(results.columns, values, strict=True))
        if row["rank"] == 1:
            print(row["query"])
        if row["id"] is not None:
            others = [
                f"{name}={value}" for name, value in row.items() if value and name not in named
            ]
            print(f"  {row['rank']:>4}  {row['distance']:8.4f}  {'  '.join([row['id'], *others])}")
    itself = (results.column("query") == results.column("id")) & (results.column("distance") == 0)
    if itself.any():
        print(f"{itself.sum():,} queries find their own image, which counts")
    if "relevant" in results.columns and results.column("num_relevant").any():
        first = (results.column("rank") == 1) & (results.column("num_relevant") > 0)
        print(f"Recall@1 {100 * results.column('relevant')[first].mean():.2f} %")


def _holds_images(queries: Sequence[str]) -> bool:
    from tfdml.embeddings.files import holds_embeddings

    return bool(queries) and (
        len(queries) != 1 or not holds_embeddings(os.path.expanduser(queries[0]))
    )


def _paths(flags: SearchFlags) -> list[str]:
    from tfdml.data.readers.tables import images_named

    return [path for text in flags.queries for path in images_named("queries", text)]


def _embedded(flags: SearchFlags) -> tuple[list[str], np.ndarray, np.ndarray | None, str]:
    """Return the names of the queries, their vectors, classes (None: not known) and model."""
    if flags.text:
        texts = clean([flags.text], TEXT, "text")
        source = load_source(flags)
        # What the query is called, on one line.
        name = " ".join(texts[0].split())
        return [name], source.embed_texts(texts), None, source.fingerprint()
    if not _holds_images(flags.queries):
        return _stored(flags)
    return _images(flags)


def _images(flags: SearchFlags) -> tuple[list[str], np.ndarray, np.ndarray | None, str]:
    import numpy as np

    from tfdml.data import ImageDataset
    from tfdml.data.dataset import check
    from tfdml.data.images import FileImages

    load_tensorflow()
    paths = _paths(flags)
    dataset = check(
        ImageDataset("queries", "all", FileImages(tuple(paths)), np.zeros(len(paths), np.int64))
    )
    source = load_source(flags)
    return paths, source.embed(dataset, flags.batch_size), None, source.fingerprint()


def _stored(flags: SearchFlags) -> tuple[list[str], np.ndarray, np.ndarray | None, str]:
    import numpy as np

    from tfdml.embeddings.files import read_embeddings

    read = read_embeddings(os.path.expanduser(flags.queries[0]))
    if not flags.model:
        return list(read.names), np.asarray(read.embeddings), read.classes, read.model
    head = load_source(flags)
    vectors = head.embed(_as_images(read.embeddings), flags.batch_size)
    return list(read.names), vectors, read.classes, head.fingerprint()


def _as_images(vectors: np.ndarray) -> ImageDataset:
    import numpy as np

    from tfdml.data import ImageDataset
    from tfdml.data.images import VectorImages

    images = VectorImages(np.asarray(vectors))
    return ImageDataset("queries", "all", images, np.zeros(len(vectors), np.int64))


def _in_database(flags: SearchFlags) -> tuple[RetrievalResults, str, int, Calibration | None]:
    """Return the results, the distance, how many images the gallery has, and its threshold."""
    from tfdml.results import RetrievalResults
    from tfdml.retrieval import connect

    names, vectors, _, model = _embedded(flags)
    with connect(flags.gallery) as gallery:
        neighbors = gallery.search(vectors, flags.k, model=model)
        distance, size = gallery.distance, len(gallery)
    if not size:
        raise UserError("is empty: write it with tfdml index", gallery=gallery.address)
    columns = {
        name: column
        for name, column in neighbors.columns.items()
        if name in ("class", "role") and column.any()
    }
    return (
        RetrievalResults.of_arrays(names, neighbors.ids, neighbors.distances, columns),
        distance,
        size,
        None,
    )


def _in_embeddings(flags: SearchFlags) -> tuple[RetrievalResults, str, int, Calibration | None]:
    import numpy as np

    from tfdml.embeddings.files import check_same_model, read_embeddings
    from tfdml.results import RetrievalResults

    path = os.path.expanduser(flags.gallery)
    stored, options = read_embeddings(path), dict[str, Any](k=flags.k, distance=flags.distance)
    same = bool(flags.queries) and os.path.realpath(
        os.path.expanduser(flags.queries[0])
    ) == os.path.realpath(path)
    if same and stored.labels is not None and not (_holds_images(flags.queries) or flags.model):
        part = stored.split("test")
        results = RetrievalResults.of_dataset(part.embeddings, part, **options)  # type: ignore[arg-type]
        return results, flags.distance, len(part), None
    names, vectors, classes, model = _embedded(flags)
    check_same_model(stored.model, model, f"--gallery={flags.gallery} and the queries")
    if bool(stored.model) != bool(model):
        print("the models of the gallery and the queries are not compared: one is not known")
    if (
        stored.classes is not None
        and classes is not None
        and not np.isin(classes, stored.classes).any()
    ):
        print("queries and gallery have no class in common, by name: nothing is counted")
        classes = None
    classes = None if stored.classes is None else classes
    options |= {"query_ids": names, "gallery_ids": stored.names, "gallery_labels": stored.classes}
    return (
        RetrievalResults.search(vectors, classes, stored.embeddings, **options),
        flags.distance,
        len(stored),
        None,
    )


def _in_retriever(flags: SearchFlags) -> tuple[RetrievalResults, str, int, Calibration | None]:
    from tfdml.embeddings.files import check_same_model
    from tfdml.export.retriever import Retriever
    from tfdml.results import RetrievalResults

    load_tensorflow()
    retriever = Retriever.load(os.path.expanduser(flags.gallery))
    queries: Any
    if _holds_images(flags.queries):
        names = queries = _paths(flags)
    else:
        names, queries, _, model = _embedded(flags)
        check_same_model(
            retriever.card["model"], model, f"--gallery={flags.gallery} and the queries"
        )
    neighbors = retriever.search(queries, flags.k)
    results = RetrievalResults.of_arrays(
        names, neighbors.ids, neighbors.distances, {"class": neighbors.classes}
    )
    return results, "euclidean", len(retriever), retriever.calibration


COMMAND = Command(
    "search",
    search,
    Flags(SearchFlags),
    __doc__,
    flag_of={"uri": "gallery"},
    needs_tensorflow=False,
)
