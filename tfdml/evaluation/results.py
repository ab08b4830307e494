"""`RetrievalResults`: the neighbors of every query as a table, and in files."""

from __future__ import annotations

import dataclasses
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.embeddings.reader import class_of_each
from tfdml.errors import UserError, user_errors
from tfdml.evaluation import per_query
from tfdml.evaluation.relevance import Relevance
from tfdml.evaluation.retrieval import dataset_protocol, dataset_roles
from tfdml.io.files import atomic_write

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset

SUFFIXES = (".parquet", ".csv", ".trec")


@dataclasses.dataclass(frozen=True, eq=False)
class RetrievalResults:
    """The k nearest gallery images of each query, without images that are ignored.

    Made by `RetrievalResults.search`, `of_dataset` and `of_arrays`.

    Attributes:
        table: A `pyarrow.Table` with a row for each neighbor, nearest first: `query` and `id` (names), `rank` from 1,
            `distance`; where it is known which are right, `relevant` and `num_relevant`, how many the gallery has for
            the query; and further columns, such as `query_class` and `class`, the names. A query without neighbors has
            one row without `id`.

    Example:
        >>> results = RetrievalResults.search(np.array([[0.0], [0.1], [5.0], [5.1]]), [3, 3, 8, 8], k=1)
        >>> results.table["id"].to_pylist()
        ['1', '0', '3', '2']
        >>> results.column("relevant").tolist()
        [True, True, True, True]
    """

    table: Any
    _task: per_query.RetrievalTask | None = None
    _names: tuple[np.ndarray, np.ndarray] | None = None  # of the task's queries and gallery

    @classmethod
    def of_arrays(
        cls,
        query_ids: Sequence[str],
        ids: np.ndarray,
        distances: np.ndarray,
        columns: Mapping[str, np.ndarray] | None = None,
        **searched: Any,
    ) -> RetrievalResults:
        """Return results from arrays, such as those of a search in a database.

        Args:
            query_ids: (N,) what the queries are called.
            ids: (N, k) what the neighbors are called, nearest first; None where there are fewer than k.
            distances: (N, k).
            columns: Further columns by name: (N, k) values of neighbors, or (N,) of queries.
            **searched: For `write_qrels`.
        """
        import pyarrow as pa

        kept = np.array([[name is not None for name in row] for row in ids], bool).reshape(np.shape(ids))
        kept[:, :1] = True
        query, place = np.nonzero(kept)
        table = {"query": pa.array(np.array(query_ids, object)[query], pa.string()), "rank": place + 1}
        table |= {"id": pa.array(ids[kept], pa.string()), "distance": distances[kept]}
        further = {name: np.asarray(values) for name, values in (columns or {}).items()}
        return cls(pa.table(table | {n: v[kept] if v.ndim == 2 else v[query] for n, v in further.items()}), **searched)

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
            labels: As `evaluate_retrieval`, or the names of classes; without labels and relevance nothing defines which
                neighbors are right.
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
        if labels is not None and np.asarray(labels).dtype.kind in "UO":
            sides = [labels] if gallery is None else [labels, gallery_labels]
            names, codes = np.unique(np.concatenate(sides).astype(str), return_inverse=True)
            labels, gallery_labels = codes[: len(labels)], codes[len(labels) :] if len(sides) > 1 else None
            class_names = dict(enumerate(names.tolist()))
        known = relevance is not None or labels is not None
        relevance = relevance if known else Relevance.lists([[]] * len(embeddings))
        task = per_query.retrieval_task(embeddings, labels, gallery, gallery_labels, own_rows, relevance)
        queries = _names_of(query_ids, len(task.queries), "query_ids")
        names = queries if gallery is None else _names_of(gallery_ids, len(task.searched), "gallery_ids")
        blocks = list(per_query.nearest_left(task, min(k, task.available), distance))
        near = np.concatenate([rows for _, rows, _ in blocks])
        columns: dict[str, Any] = {}
        if known:
            relevant = task.relevance.of(slice(None), near) > 0
            columns |= {"relevant": relevant, "num_relevant": task.matches}
        if task.labels is not None:
            columns["query_class"] = class_of_each(task.labels, class_names or {})
        targets = labels if gallery is None else gallery_labels
        if targets is not None:
            columns["class"] = class_of_each(targets, class_names or {})[near]
        ids: Any = np.where(near < 0, None, names[near])
        distances = np.concatenate([measured for _, _, measured in blocks])
        searched = {"_task": task, "_names": (queries, names)} if known else {}
        return cls.of_arrays(queries.tolist(), ids, distances, columns, **searched)

    @classmethod
    def of_dataset(
        cls, embeddings: Any, dataset: ImageDataset, *, k: int = 10, distance: str = "euclidean"
    ) -> RetrievalResults:
        """Search a data set by its own protocol, see `dataset_protocol`; images are called by their names.

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
            >>> results.to_pandas().columns[:4].tolist()
            ['query', 'rank', 'id', 'distance']
        """
        names = np.array(dataset.names, object)
        queries, gallery = dataset_roles(dataset)
        ids = {} if gallery is None else {"gallery_ids": names[gallery]}
        ids |= {"query_ids": names[queries], "class_names": dataset.class_names}
        return cls.search(**dataset_protocol(embeddings, dataset), k=k, distance=distance, **ids)

    def within(self, max_distance: float) -> RetrievalResults:
        """Return the neighbors that are at most so far; a query that has none keeps one row, without `id`."""
        import pyarrow as pa

        near, table = self.column("distance") <= max_distance, self.table
        for name in ("id", "relevant"):
            if name in table.column_names:
                kept = np.where(near, self.column(name), np.array(None)) if name == "id" else near & self.column(name)
                column = pa.array(kept, pa.string() if name == "id" else pa.bool_())
                table = table.set_column(table.column_names.index(name), name, column)
        return dataclasses.replace(self, table=table.filter(pa.array(near | (self.column("rank") == 1))))

    def column(self, name: str) -> np.ndarray:
        """Return a column of the table as an array."""
        return self.table[name].to_numpy()

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`.

        Raises:
            UserError: pandas is not installed.
        """
        with user_errors(ImportError, "`to_pandas` needs pandas: pip install pandas, or take `table`, of pyarrow"):
            return self.table.to_pandas()

    def write(self, path: str | os.PathLike) -> None:
        """Write the neighbors atomically, in the format of the suffix.

        `.parquet` and `.csv` hold the table. `.trec` is a run as trec_eval, ranx and ir_measures read it:
        query, Q0, id, rank, score, name. The score is the negative distance; of equal ones each is the next smaller
        number, which keeps the order. White space and `%` in names are written as in URLs.

        Raises:
            UserError: The suffix is none of these.
        """
        path = os.fspath(path)
        suffix = os.path.splitext(path)[1]
        if suffix not in SUFFIXES:
            raise UserError(f"{path}: neighbors are written as {', '.join(SUFFIXES)}")
        with atomic_write(path) as temporary:
            if suffix == ".parquet":
                import pyarrow.parquet

                pyarrow.parquet.write_table(self.table, temporary)
            elif suffix == ".csv":
                import pyarrow.csv

                pyarrow.csv.write_csv(self.table, temporary)
            else:
                Path(temporary).write_text("".join(self._run_lines()), encoding="utf-8")

    def _run_lines(self) -> Any:
        score = np.inf
        for row in self.table.to_pylist():
            score = min(-row["distance"], float(np.nextafter(np.inf if row["rank"] == 1 else score, -np.inf)))
            if row["id"] is not None:
                yield f"{_quoted(row['query'])} Q0 {_quoted(row['id'])} {row['rank']} {score!r} tfdml\n"

    def write_qrels(self, path: str | os.PathLike) -> None:
        """Write all relevant images of each query, found or not, as TREC's qrels: query, 0, id, 1.

        Raises:
            UserError: Nothing defines what is relevant.
        """
        task = self._task
        if task is None or self._names is None:
            raise UserError("qrels need the labels of queries and gallery: give them to the search")
        queries, names = self._names
        with atomic_write(os.fspath(path)) as temporary, open(temporary, "w", encoding="utf-8") as file:
            for query, name in enumerate(queries):
                left_out = np.append(task.relevance.ignored_rows(query), -1 if task.own is None else task.own[query])
                for row in np.setdiff1d(task.relevance.rows_of(query), left_out):
                    file.write(f"{_quoted(name)} 0 {_quoted(names[row])} 1\n")


def _names_of(names: Any, count: int, what: str) -> np.ndarray:
    array = np.array([str(name) for name in (range(count) if names is None else names)], object)
    if array.shape != (count,):
        raise UserError(f"{what} must be one name for each of {count} images; got {len(array)}")
    return array


def _quoted(name: str) -> str:
    return re.sub(r"[\s%]", lambda found: urllib.parse.quote(found[0]), name)
