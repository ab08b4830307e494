"""`RetrievalResults`: the neighbors of every query as data: a table, files, pictures, metrics."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.embeddings.reader import class_of_each
from tfdml.errors import REASON, UserError, check_positive, user_errors
from tfdml.evaluation import per_query
from tfdml.evaluation.relevance import Relevance
from tfdml.evaluation.retrieval import dataset_protocol, dataset_roles
from tfdml.io.files import atomic_write, require_regular

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfdml.data.dataset import ImageDataset

SUFFIXES = (".parquet", ".csv", ".trec")


@dataclasses.dataclass(frozen=True, eq=False)
class RetrievalResults:
    """The k nearest gallery images of each query, without images that are ignored.

    Made by `RetrievalResults.search`, `of_dataset`, `of_arrays` and `read`. In a notebook, `show()` draws some, and
    `to_pandas()` returns them all.

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
            UserError: These results were read, or nothing defines what is relevant.
        """
        task = self._task
        if task is None or self._names is None:
            raise UserError("qrels need what was searched, and its labels: write them where the search was made")
        queries, names = self._names
        with atomic_write(os.fspath(path)) as temporary, open(temporary, "w", encoding="utf-8") as file:
            for query, name in enumerate(queries):
                left_out = np.append(task.relevance.ignored_rows(query), -1 if task.own is None else task.own[query])
                for row in np.setdiff1d(task.relevance.rows_of(query), left_out):
                    file.write(f"{_quoted(name)} 0 {_quoted(names[row])} 1\n")

    @classmethod
    def read(cls, path: str | os.PathLike) -> RetrievalResults:
        """Read the Parquet file that `write` has written.

        Raises:
            UserError: The file cannot be read, or is of something else.
        """
        import pyarrow.parquet

        with user_errors(Exception, f"{path} cannot be read: {REASON}"):  # whatever a damaged file makes of Arrow
            require_regular(path)
            table = pyarrow.parquet.read_table(path)
        if not {"query", "rank", "id", "distance"} <= set(table.column_names):
            raise UserError(f"{path} holds no neighbors; its columns are {', '.join(table.column_names)}")
        return cls(table)

    def show(self, dataset: ImageDataset | None = None, *, num_queries: int = 5, k: int = 6, seed: int = 0) -> Figure:
        """Draw queries with their nearest images: green frames for relevant ones, red ones for others.

        A notebook displays the figure; `figure.savefig("neighbors.png")` writes it. Queries are of different classes as
        far as there are enough, drawn at random among those that have an image to find.

        Args:
            dataset: The images, by their names; None: files, of which the names are the paths.
            num_queries: The number of queries, one row each.
            k: The number of neighbors.
            seed: Of the draw.

        Raises:
            UserError: A number is out of range, an image cannot be read, or no query has an image to find.
        """
        from tfdml.data.images import FileImages

        check_positive(num_queries=num_queries, k=k)
        rank, known = self.column("rank"), set(self.table.column_names)
        first = np.flatnonzero(rank == 1)
        answerable = first[self.column("num_relevant")[first] > 0] if "num_relevant" in known else first
        if not len(answerable):
            raise UserError("no image has another one of its class to find")
        labels = self.column("query_class") if "query_class" in known else np.arange(len(rank))
        chosen = spread_over_classes(np.random.default_rng(seed).permutation(answerable).tolist(), labels)[:num_queries]
        k = min(k, int(rank.max()))
        numbers = {} if dataset is None else {name: number for number, name in enumerate(dataset.names)}
        figure = notebook_figure(1.1 * (k + 1), 1.2 * len(chosen))
        for line, start in zip(figure.subplots(len(chosen), k + 1, squeeze=False), chosen, strict=True):
            rows = self.table.slice(start, k).to_pylist()
            shown = [(rows[0]["query"], "black")]
            for place, row in enumerate(rows, 1):
                color = {None: "#888888", True: "#1a7f37", False: "#cf222e"}[row.get("relevant")]
                shown += [(row["id"], color)] if row["rank"] == place and row["id"] is not None else []
            for axes in line[len(shown) :]:
                axes.set_axis_off()
            for axes, (name, color) in zip(line, shown, strict=False):
                images, number = (FileImages((name,)), 0) if dataset is None else (dataset.images, numbers[name])
                axes.imshow(images.picture(number))
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set(color=color, linewidth=3)
            if start == chosen[0]:
                line[0].set_title("query", fontsize=9)
                line[1].set_title("nearest images", fontsize=9, loc="left")
        return figure


def notebook_figure(width: float, height: float) -> Figure:
    """Return a matplotlib figure that a notebook displays as a cell's value, whether or not pyplot is imported.

    Args:
        width: In inches.
        height: The same.
    """
    from matplotlib.figure import Figure

    def png(figure: Figure) -> bytes:
        stream = io.BytesIO()
        figure.savefig(stream, format="png")
        return stream.getvalue()

    figure = Figure((width, height), layout="constrained")
    vars(figure)["_repr_png_"] = functools.partial(png, figure)
    return figure


def spread_over_classes(rows: Sequence[int], labels: np.ndarray) -> list[int]:
    """`rows` with the first of every class before the others, else in their order.

    Example:
        >>> spread_over_classes([2, 0, 1], np.array([5, 7, 5]))
        [2, 1, 0]
    """
    order = np.asarray(rows, np.int64)
    is_first = np.isin(np.arange(len(order)), np.unique(labels[order], return_index=True)[1])
    return [*order[is_first].tolist(), *order[~is_first].tolist()]


def _names_of(names: Any, count: int, what: str) -> np.ndarray:
    array = np.array([str(name) for name in (range(count) if names is None else names)], object)
    if array.shape != (count,):
        raise UserError(f"{what} must be one name for each of {count} images; got {len(array)}")
    return array


def _quoted(name: str) -> str:
    return re.sub(r"[\s%]", lambda found: urllib.parse.quote(found[0]), name)
