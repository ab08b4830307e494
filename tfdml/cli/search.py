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

--per_class=mean compares queries with the mean of each class of the gallery, and max_of_means with
several means of each. Neighbors are then classes. A threshold is that of one rule: give tfdml
evaluate the same --per_class.

--approximate searches a database by the index that tfdml index --build_index made, after measuring
its recall against the exact answer.

--out is a .parquet or .csv file with a row for each neighbor.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tfdml.cli.command_line import Command, Flags, load_tensorflow
from tfdml.cli.evaluation.thresholds import MaxDistance
from tfdml.cli.model_flags import ModelFlags, kind_of_gallery, load_source
from tfdml.errors import UserError, counted
from tfdml.io.files import printable, require_writable
from tfdml.names import TEXT, clean
from tfdml.options import changed, condition, option
from tfdml.registry import DISTANCES, PER_CLASS

if TYPE_CHECKING:
    import numpy as np

    from tfdml.embeddings.files import StoredEmbeddings
    from tfdml.results import RetrievalResults
    from tfdml.retrieval import Gallery, WritableGallery

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
    per_class: str = option(
        "nearest",
        words=PER_CLASS,
        requires="is_of_rows",
        help="What stands for a class: each image, or means, which find classes.",
    )
    max_distance: str = option(
        "",
        help="Leave out what is further away: a number in the distance of the search, calibrated, "
        "or a JSON file, see above.",
    )
    approximate: bool = option(
        False,
        requires="is_in_database",
        help="Search by the index of the database, which may miss neighbors, after measuring its "
        "recall on rows of the gallery.",
    )
    min_recall: float = option(
        0.95,
        at_least=0,
        at_most=1,
        requires="approximate",
        help="Refuse an index that finds a smaller share of the k nearest.",
    )
    out: str = option("", help="File to write the neighbors to, see above.")

    @condition("a --gallery in a database, and --per_class=nearest")
    def is_in_database(self) -> bool:
        """Whether the database may search its rows by an index."""
        return kind_of_gallery(self.gallery) == "database" and self.per_class == "nearest"

    @condition("a gallery that embeds no images")
    def embeds_images(self) -> bool:
        """Whether images are embedded by --model."""
        return kind_of_gallery(self.gallery) not in _EMBEDS_ITSELF

    @condition("stored embeddings as --queries")
    def embeds_vectors(self) -> bool:
        """Whether the model may be a head."""
        return not _holds_images(self.queries)

    @condition("a --gallery of embeddings or in a database")
    def is_of_rows(self) -> bool:
        """Whether a rule for classes is chosen here; a retriever has its own."""
        return kind_of_gallery(self.gallery) not in _EMBEDS_ITSELF

    @condition("stored embeddings as --gallery")
    def is_measured(self) -> bool:
        """Whether the distance is chosen here."""
        return kind_of_gallery(self.gallery) == "embeddings"


@dataclasses.dataclass(frozen=True)
class _Queries:
    """What is searched for.

    Args:
        names: What each query is called.
        vectors: (N, d) embeddings, or paths of images that a retriever embeds.
        classes: (N,) names of their classes; None: they are not known.
        model: The fingerprint of what embedded them; empty where it is not known.
        classes_are_numbers: Whether their classes have no names.
    """

    names: list[str]
    vectors: Any
    classes: np.ndarray | None = None
    model: str = ""
    classes_are_numbers: bool = False


def search(flags: SearchFlags) -> None:
    """Search as the flags say."""
    _check_flags(flags)
    kind = kind_of_gallery(flags.gallery)
    # Read first, as embedding queries takes a while.
    within = MaxDistance.read(flags.max_distance, "texts" if flags.text else "images")
    itself = _searched_itself(flags)
    if itself is not None:
        if flags.per_class != "nearest":
            raise UserError(
                "searches a gallery by other images: name other --queries",
                per_class=flags.per_class,
            )
        within = within.for_searches(flags.distance, len(itself))
        results = _in_itself(itself, flags)
    else:
        results, within = _in_gallery(flags, kind, within)
    results = results.within(within.value)
    _print(results, within.value)
    if flags.out:
        results.write(flags.out)
        print(f"written: {printable(flags.out)}")


def _check_flags(flags: SearchFlags) -> None:
    if flags.out:
        require_writable(flags.out, "out")
        if os.path.splitext(flags.out)[1] not in (".parquet", ".csv"):
            raise UserError("name a file as *.parquet or *.csv", out=flags.out)
    if flags.queries and flags.text:
        raise UserError("--text takes the place of --queries")
    if not flags.queries and not flags.text:
        raise UserError("--queries or --text is missing")


def _in_gallery(
    flags: SearchFlags, kind: str, within: MaxDistance
) -> tuple[RetrievalResults, MaxDistance]:
    """Return the neighbors in a gallery, and within which distance they are printed."""
    from tfdml.results import RetrievalResults
    from tfdml.retrieval import WritableGallery, open_gallery

    if kind == "retriever":
        load_tensorflow()
    distance = flags.distance if kind == "embeddings" else ""
    rule = "" if flags.per_class == "nearest" else flags.per_class
    with open_gallery(flags.gallery, distance=distance, per_class=rule) as gallery:
        within = within.of_gallery(gallery)
        about = gallery.about
        assert about is not None  # it is not empty
        if flags.approximate:
            assert isinstance(gallery, WritableGallery)  # as `is_in_database` says
            _check_recall(gallery, flags)
        queries = _read_or_embed_queries(flags, kind)
        within.check_models(queries.model, about.model)
        exact = not flags.approximate
        neighbors = gallery.search(queries.vectors, flags.k, model=queries.model, exact=exact)
        named = neighbors.columns["class"].any()
        columns = {"class": neighbors.columns["class"]} if named else {}
        classes, counts = _truth(queries, gallery) if named else (None, {})
    neighbors = dataclasses.replace(neighbors, columns=columns)
    results = RetrievalResults.of_neighbors(
        queries.names, neighbors, classes=classes, class_counts=counts
    )
    return results, within


def _check_recall(gallery: WritableGallery, flags: SearchFlags) -> None:
    """Print the recall of a database's index, and refuse one that misses too many."""
    result = gallery.measure_index(flags.k)
    if result.recall < flags.min_recall:
        raise UserError(
            f"{result}: search without --approximate, or accept a smaller recall",
            min_recall=flags.min_recall,
        )
    print(result)
    if flags.max_distance:
        print(
            "a query with nothing within --max_distance may have a neighbor that the index misses"
        )


def _truth(queries: _Queries, gallery: Gallery) -> tuple[np.ndarray | None, dict[str, int]]:
    """Return the classes of the queries, and how many rows of each a gallery has; None where
    nothing is counted."""
    if queries.classes is None:
        return None, {}
    about = gallery.about
    if queries.classes_are_numbers or (about and about.classes_are_numbers):
        print(
            "classes of queries or gallery are numbers, which mean something in one file alone: "
            "nothing is counted; store names of classes"
        )
        return None, {}
    counts = gallery.class_counts()
    if not set(queries.classes) & counts.keys():
        print("queries and gallery have no class in common, by name: nothing is counted")
        return None, {}
    return queries.classes, counts


def _print(results: RetrievalResults, limit: float) -> None:
    named = ("query", "rank", "id", "distance", "relevant", "num_relevant", "query_class")
    for values in zip(*results.columns.values(), strict=True):
        row = dict(zip(results.columns, values, strict=True))
        if row["rank"] == 1:
            print(row["query"])
        if row["id"] is None:
            print("  nothing" if limit == float("inf") else f"  nothing within {limit:.4g}")
            continue
        texts = [row["id"]]
        texts += [f"{name}={value}" for name, value in row.items() if value and name not in named]
        print(f"  {row['rank']:>4}  {row['distance']:8.4f}  {'  '.join(texts)}")
    itself = (results.column("query") == results.column("id")) & (results.column("distance") == 0)
    if itself.any():
        print(f"{counted(itself.sum(), 'query', 'find')} their own image, which counts")
    if "relevant" in results.columns and results.column("num_relevant").any():
        first = (results.column("rank") == 1) & (results.column("num_relevant") > 0)
        print(f"Recall@1 {100 * results.column('relevant')[first].mean():.2f} %")


def _holds_images(queries: Sequence[str]) -> bool:
    from tfdml.embeddings.files import holds_embeddings

    return bool(queries) and (
        len(queries) != 1 or not holds_embeddings(os.path.expanduser(queries[0]))
    )


def _paths(flags: SearchFlags) -> list[str]:
    from tfdml.data.readers.image_files import images_named

    paths: list[str] = []
    for text in flags.queries:
        paths += images_named("queries", text)
    return paths


def _read_or_embed_queries(flags: SearchFlags, kind: str) -> _Queries:
    """Return what the flags search for: stored embeddings, or a text or images that are embedded
    here, but for images that a retriever embeds."""
    if flags.text:
        texts = clean([flags.text], TEXT, "text")
        source = load_source(flags)
        # What the query is called, on one line.
        name = " ".join(texts[0].split())
        return _Queries([name], source.embed_texts(texts), None, source.fingerprint())
    if not _holds_images(flags.queries):
        return _read_embeddings(flags)
    paths = _paths(flags)
    if kind == "retriever":
        return _Queries(paths, paths)
    return _embed_images(flags, paths)


def _embed_images(flags: SearchFlags, paths: list[str]) -> _Queries:
    import numpy as np

    from tfdml.data import ImageDataset
    from tfdml.data.faults import check
    from tfdml.data.images import FileImages

    load_tensorflow()
    dataset = check(
        ImageDataset("queries", "all", FileImages(tuple(paths)), np.zeros(len(paths), np.int64))
    )
    source = load_source(flags)
    return _Queries(paths, source.embed(dataset, flags.batch_size), None, source.fingerprint())


def _read_embeddings(flags: SearchFlags) -> _Queries:
    import numpy as np

    from tfdml.embeddings.files import read_embeddings

    read = read_embeddings(os.path.expanduser(flags.queries[0]))
    vectors = np.asarray(read.embeddings)
    model = read.model
    if flags.model:
        from tfdml.data import ImageDataset

        head = load_source(flags)
        labels = np.zeros(len(read), np.int64)
        dataset = ImageDataset("queries", "all", labels=labels, vectors=read.embeddings)
        vectors = head.embed(dataset, flags.batch_size)
        model = head.fingerprint()
    return _Queries(list(read.names), vectors, read.classes, model, read.classes_are_numbers)


def _searched_itself(flags: SearchFlags) -> StoredEmbeddings | None:
    """Return the images to search of labeled embeddings that are the gallery and the queries; None
    where they are not the same."""
    from tfdml.embeddings.files import read_embeddings

    if not flags.queries or flags.model or _holds_images(flags.queries):
        return None
    query, gallery = (
        os.path.realpath(os.path.expanduser(path)) for path in (flags.queries[0], flags.gallery)
    )
    if query != gallery:
        return None
    stored = read_embeddings(gallery)
    return None if stored.labels is None else stored.split("test")


def _in_itself(stored: StoredEmbeddings, flags: SearchFlags) -> RetrievalResults:
    from tfdml.results import RetrievalResults

    return RetrievalResults.of_dataset(
        stored.embeddings,
        stored,  # type: ignore[arg-type]
        k=flags.k,
        distance=flags.distance,
    )


COMMAND = Command(
    "search",
    search,
    Flags(SearchFlags),
    __doc__,
    flag_of={"uri": "gallery"},
    needs_tensorflow=False,
)
