"""Results that are kept: neighbors as a table, and the metrics of every query, compared between
runs."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.embeddings.files import ImageTable, class_of_each
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.evaluation.intervals import Interval, paired_differences, seed_difference
from tfdml.evaluation.relevance import (
    Relevance,
    are_names,
    dataset_protocol,
    dataset_roles,
    ids_or_names,
    joined_labels,
    retrieval_task,
)
from tfdml.evaluation.retrieval import nearest_left
from tfdml.io.files import atomic_write
from tfdml.names import ID, class_names_of, clean
from tfdml.retrieval.galleries import Neighbors

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset


@dataclasses.dataclass(frozen=True)
class QueryValues:
    """Retrieval metrics of every query of a test set.

    Args:
        ids: (N,) uint64, which image each query is: the first eight bytes of the SHA-256 of its
            name.
        labels: (N,) int64 class ids of the queries.
        images: Checksums of the names, labels, roles and groups of all test images, so also of what
            is searched, and of the images themselves, unless they are stored vectors.
        values: Metric name to (N,) values; NaN where a query has nothing to find.

    Raises:
        UserError: They differ in number.

    Example:
        >>> ids, labels = np.array([7, 9], np.uint64), np.array([0, 0])
        >>> one = QueryValues(ids, labels, "sha256:a", {"recall@1": np.array([1.0, 0.0])})
        >>> one.difference_to(dataclasses.replace(one, ids=ids[::-1]))
        'other queries, or in another order'
    """

    ids: np.ndarray
    labels: np.ndarray
    images: str
    values: Mapping[str, np.ndarray]

    def __post_init__(self):
        for name, column in {"labels": self.labels, **self.values}.items():
            if np.shape(column) != np.shape(self.ids) or np.ndim(column) != 1:
                raise UserError(
                    f"{name} of shape {np.shape(column)} for ids of shape {np.shape(self.ids)}"
                )

    @classmethod
    def of(
        cls, dataset: ImageDataset, values: Mapping[str, Any], directory: str | os.PathLike = ""
    ) -> QueryValues:
        """Those of a data set.

        Args:
            dataset: The images; with roles its queries alone have values.
            values: As `retrieval_per_query` returns them.
            directory: Where the data set lies: names count from there.
        """
        table = ImageTable.of([dataset], directory)
        queries, _ = dataset_roles(dataset)
        names = (table.names[row].encode("utf-8", "surrogateescape") for row in queries)
        hashes = (hashlib.sha256(name).digest()[:8] for name in names)
        ids = np.array([int.from_bytes(value, "little") for value in hashes], np.uint64)
        checksum = table.checksum()
        if dataset.vectors is None:
            checksum += f" {dataset.checksum()}"
        return cls(
            ids,
            dataset.labels[queries],
            checksum,
            {name: np.asarray(v) for name, v in values.items()},
        )

    @classmethod
    def read(cls, path: str | os.PathLike) -> QueryValues:
        """Those that `write` has written.

        Raises:
            UserError: The file cannot be read, or is of something else.
        """
        with user_errors(
            Exception, f"{path} cannot be read: {ERROR_TEXT}"
        ):  # whatever NumPy raises on a damaged file
            with np.load(path, allow_pickle=False) as file:
                columns = {name: file[name] for name in file.files}
            ids, labels, images = (columns.pop(name) for name in ("ids", "labels", "images"))
            return cls(
                ids,
                labels,
                str(images),
                {name: column.astype(np.float64) for name, column in columns.items()},
            )

    def write(self, path: Path) -> None:
        """Write them as a compressed .npz, values in single precision.

        Args:
            path: The file.
        """
        columns: dict[str, Any] = {
            name: values.astype(np.float32) for name, values in self.values.items()
        }
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(
                file, ids=self.ids, labels=self.labels, images=self.images, **columns
            )

    def difference_to(self, other: QueryValues) -> str:
        """Why the values of another run are not of the same queries, in words; empty where they
        are.

        Args:
            other: Those of the other run.
        """
        comparisons = {
            "other queries, or in another order": np.array_equal(self.ids, other.ids),
            "the same queries with other classes": np.array_equal(self.labels, other.labels),
            "queries of the same names, of other images or searched among others": self.images
            == other.images,
        }
        return next((difference for difference, same in comparisons.items() if not same), "")


@dataclasses.dataclass(frozen=True)
class Differences:
    """How much better one model is than another, by metric; positive where it is.

    Args:
        classes: With intervals over classes, see `paired_differences`.
        seeds: With intervals over seeds, see `seed_difference`; empty where a side has one run
            alone.
    """

    classes: Mapping[str, Interval]
    seeds: Mapping[str, Interval]


def compare_queries(
    first: Sequence[QueryValues], second: Sequence[QueryValues], *, seeds: bool = True
) -> Differences:
    """Compare two models on the same queries.

    Args:
        first: Of each run of the first model, one for each seed.
        second: Of each run of the second.
        seeds: Whether the runs differ by their seeds, so that intervals over seeds mean something.

    Raises:
        UserError: A side has no run, the queries are not the same, or no metric is common to all
            runs.

    Example:
        >>> ids, labels = np.arange(4, dtype=np.uint64), np.array([0, 0, 1, 1])
        >>> sides = [[QueryValues(ids, labels, "", {"recall@1": np.full(4,
        ...     value)})] for value in (1.0, 0.5)]
        >>> compare_queries(*sides).classes["recall@1"].mean
        0.5
    """
    runs = [*first, *second]
    for other in runs[1:]:
        if difference := runs[0].difference_to(other):
            raise UserError(f"their queries are not the same: {difference}")
    ours = [run.values for run in first]
    theirs = [run.values for run in second]
    classes = paired_differences(ours, theirs, runs[0].labels)
    over_seeds = {}
    if seeds and len(ours) > 1 and len(theirs) > 1:
        for name in classes:
            over_seeds[name] = seed_difference(_means(ours, name), _means(theirs, name))
    return Differences(classes, over_seeds)


def _means(runs: Sequence[Mapping[str, np.ndarray]], name: str) -> list[float]:
    return [float(np.nanmean(values[name])) for values in runs]


@dataclasses.dataclass(frozen=True, eq=False)
class RetrievalResults:
    """The k nearest gallery images of each query as a table, without images that are ignored.

    Made by `RetrievalResults.search`, `of_dataset` and, of the neighbors that a gallery returns,
    `of_neighbors`.

    Args:
        columns: Arrays by name, with a row for each neighbor, nearest first: `query` and `id`
            (names), `rank` from 1, `distance`; where something defines which are right, `relevant`
            and `num_relevant`, how many the gallery has for the query; and further columns, such as
            `query_class` and `class`, the names. A query without neighbors has one row, without
            `id`, `distance` (NaN, null in a file) and what else is a neighbor's.
        query_columns: Which columns are of the query, and not of the neighbor.

    Example:
        >>> results = RetrievalResults.search(np.array([[0.0], [0.1], [5.0], [5.1]]), [3, 3, 8, 8],
        ...     k=1)
        >>> results.column("id").tolist()
        ['1', '0', '3', '2']
        >>> results.column("relevant").tolist()
        [True, True, True, True]
    """

    columns: Mapping[str, np.ndarray]
    query_columns: frozenset[str] = frozenset({"query", "rank", "num_relevant", "query_class"})

    @classmethod
    def of_neighbors(
        cls,
        query_ids: Sequence[str],
        neighbors: Neighbors,
        columns: Mapping[str, Any] | None = None,
        classes: Any = None,
        class_counts: Mapping[str, int] | None = None,
    ) -> RetrievalResults:
        """Return the table of the neighbors that a gallery returned.

        Args:
            query_ids: (N,) what the queries are called.
            neighbors: Those of N queries.
            columns: Further columns by name: (N, k) values of neighbors, or (N,) of queries.
            classes: (N,) names of the classes of the queries, by which neighbors are right; None:
                they are not known.
            class_counts: How many rows the gallery has of each class, with `classes`.
        """
        names = np.array(neighbors.ids, object)
        present = names != np.array(None)
        names[present] = clean(names[present], ID, "ids")
        columns = {**neighbors.columns, **(columns or {})}
        if classes is not None:
            query_classes = np.asarray(classes, object)
            counts = class_counts or {}
            columns["relevant"] = neighbors.columns["class"] == query_classes[:, None]
            columns["num_relevant"] = [counts.get(name, 0) for name in query_classes]
            columns["query_class"] = query_classes
        query_names = clean(query_ids, ID, "query_ids")
        return cls._of_names(query_names, names, neighbors.distances, columns)

    @classmethod
    def _of_names(
        cls,
        query_ids: Sequence[str],
        names: np.ndarray,
        distances: np.ndarray,
        columns: Mapping[str, Any],
    ) -> RetrievalResults:
        """As `of_neighbors`, of names that are plain."""
        mask = names != np.array(None)
        mask[:, :1] = True
        query, column_of = np.nonzero(mask)
        table = {
            "query": np.array(query_ids, object)[query],
            "rank": column_of + 1,
            "id": names[mask],
            "distance": distances[mask],
        }
        of_queries = set(cls.query_columns)
        for name, values in columns.items():
            column = np.asarray(values)
            if column.ndim == 2:
                table[name] = column[mask]
            else:
                table[name] = column[query]
                of_queries.add(name)
        results = cls(table, frozenset(of_queries))
        return results._without(table["id"] == np.array(None))

    @classmethod
    def search(
        cls,
        embeddings: Any,
        labels: Any = None,
        gallery: Any = None,
        gallery_labels: Any = None,
        *,
        k: int = 10,
        distance: str = "euclidean",
        relevance: Relevance | None = None,
        own_rows: Any = None,
        query_ids: Sequence[str] | None = None,
        gallery_ids: Sequence[str] | None = None,
        class_names: Mapping[int, str] | None = None,
    ) -> RetrievalResults:
        """Search exactly, as `evaluate_retrieval` does.

        Args:
            embeddings: As `evaluate_retrieval`.
            labels: As `evaluate_retrieval`, or the names of classes; without labels and relevance
                nothing defines which neighbors are right.
            gallery: As `evaluate_retrieval`.
            gallery_labels: As `labels`.
            k: How many neighbors; all there are, where there are fewer.
            distance: As `evaluate_retrieval`.
            relevance: As `evaluate_retrieval`, without levels.
            own_rows: As `evaluate_retrieval`.
            query_ids: (N,) what the queries are called; their rows by default.
            gallery_ids: (G,) what the images of a gallery are called; their rows by default.
            class_names: Names of the class ids; their digits by default.

        Raises:
            UserError: As `evaluate_retrieval`, or ids of another number.
        """
        class_names = class_names_of(class_names or {}, "class_names")
        if labels is not None and are_names(labels):
            labels, gallery_labels, class_names = _numbered(labels, gallery_labels)
        has_truth = relevance is not None or labels is not None
        if not has_truth:
            relevance = Relevance.lists([[]] * len(embeddings))
        task = retrieval_task(embeddings, labels, gallery, gallery_labels, own_rows, relevance)
        query_names = gallery_names = _names_of(query_ids, len(task.queries), "query_ids")
        if gallery is not None:
            gallery_names = _names_of(gallery_ids, len(task.gallery), "gallery_ids")
        blocks = nearest_left(task, min(k, task.available), distance)
        _, rows_of_blocks, distances = zip(*blocks, strict=True)
        rows = np.concatenate(rows_of_blocks)
        columns: dict[str, Any] = {}
        if has_truth:
            columns["relevant"] = task.relevance.of(slice(None), rows) > 0
            columns["num_relevant"] = task.matches
        if task.labels is not None:
            columns["query_class"] = class_of_each(task.labels, class_names)
        classes = labels if gallery is None else gallery_labels
        if classes is not None:
            columns["class"] = _classes_of_rows(rows, classes, len(task.gallery), class_names)
        names: Any = np.where(rows < 0, None, gallery_names[rows])
        return cls._of_names(query_names.tolist(), names, np.concatenate(distances), columns)

    @classmethod
    def of_dataset(
        cls, embeddings: Any, dataset: ImageDataset, *, k: int = 10, distance: str = "euclidean"
    ) -> RetrievalResults:
        """Search a data set by its own protocol, see `dataset_protocol`; images are called by their
        names.

        Args:
            embeddings: (N, d), one row per image of `dataset`, in its order.
            dataset: The images; also `StoredEmbeddings` that have names.
            k: As `search`.
            distance: As `search`.

        Raises:
            UserError: As `dataset_protocol` and `search`.

        Example:
            >>> results = RetrievalResults.of_dataset(embeddings, test, k=5)
            >>> results.write("neighbors.parquet")
            >>> results.table.column_names[:4]
            ['query', 'rank', 'id', 'distance']
        """
        names = np.array(dataset.names, object)
        queries, gallery = dataset_roles(dataset)
        return cls.search(
            **dataset_protocol(embeddings, dataset),
            k=k,
            distance=distance,
            query_ids=names[queries],
            gallery_ids=None if gallery is None else names[gallery],
            class_names=dataset.class_names,
        )

    def within(self, max_distance: float) -> RetrievalResults:
        """Return the neighbors that are at most so far; a query that has none has one row, as one
        without neighbors."""
        near = self.columns["distance"] <= max_distance
        rows = near | (self.columns["rank"] == 1)
        columns = {name: column[rows] for name, column in self.columns.items()}
        return dataclasses.replace(self, columns=columns)._without(~near[rows])

    def _without(self, refused: np.ndarray) -> RetrievalResults:
        """Return the table with nothing of some neighbors."""
        if not refused.any():
            return self
        columns = dict(self.columns)
        for name in columns.keys() - self.query_columns:
            column = columns[name]
            empty: Any = None
            if column.dtype.kind in "fb":
                empty = np.nan if column.dtype.kind == "f" else False
            else:
                column = column.astype(object)
            columns[name] = np.where(refused, np.array(empty, column.dtype), column)
        return dataclasses.replace(self, columns=columns)

    def column(self, name: str) -> np.ndarray:
        """Return a column of the table."""
        return self.columns[name]

    @property
    def table(self) -> Any:
        """The columns as a `pyarrow.Table`."""
        import pyarrow as pa

        columns = {name: pa.array(self.columns[name], pa.string()) for name in ("query", "id")}
        # Of a query without neighbors it is NaN.
        columns["distance"] = pa.array(self.columns["distance"], from_pandas=True)
        return pa.table({**self.columns, **columns})

    def write(self, path: str | os.PathLike) -> None:
        """Write the table atomically, as `.parquet` or `.csv`.

        Raises:
            UserError: The suffix is neither.
        """
        import pyarrow.csv
        import pyarrow.parquet

        writers = {".parquet": pyarrow.parquet.write_table, ".csv": pyarrow.csv.write_csv}
        write = writers.get(os.path.splitext(os.fspath(path))[1])
        if write is None:
            raise UserError(f"{path}: neighbors are written as {', '.join(writers)}")
        with atomic_write(os.fspath(path)) as temporary:
            write(self.table, temporary)


def _classes_of_rows(
    rows: np.ndarray, classes: Any, count: int, class_names: Mapping[int, str]
) -> np.ndarray:
    """Return the name of the class of each row of a gallery, in the shape of `rows`.

    Args:
        rows: Rows of the gallery.
        classes: The class id or name of each of its images.
        count: How many images it has.
        class_names: The names of class ids.
    """
    ids = ids_or_names(classes, count, "gallery_labels")
    return class_of_each(ids, class_names)[rows]


def _numbered(labels: Any, gallery_labels: Any) -> tuple[np.ndarray, Any, dict[int, str]]:
    """Return ids in place of names of classes, and the name of each id."""
    sides = [ids_or_names(labels, len(labels))]
    if gallery_labels is not None:
        sides.append(ids_or_names(gallery_labels, len(gallery_labels), "gallery_labels"))
    names, ids = np.unique(joined_labels(*sides), return_inverse=True)
    of_gallery = None if gallery_labels is None else ids[len(labels) :]
    return ids[: len(labels)], of_gallery, dict(enumerate(names.tolist()))


def _names_of(names: Any, count: int, argument: str) -> np.ndarray:
    """Return the names of images, their rows by default, as an array of texts."""
    values = range(count) if names is None else names
    array = np.array(clean(values, ID, argument), object)
    if array.shape != (count,):
        raise UserError(f"{argument} must be one name for each of {count} images; got {len(array)}")
    return array
