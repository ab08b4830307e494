"""Galleries in a table of a database: `WritableGallery`, which rows are added to and deleted from.

`tfdml.retrieval.lancedb_gallery` and `pgvector_gallery` are those of the two databases.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.embeddings.files import StoredEmbeddings, check_same_model, truncate
from tfdml.errors import ERROR_TEXT, UserError, check_choice, check_positive, counted, user_errors
from tfdml.io.files import Kinds, fields, parse_json, sha256_of
from tfdml.retrieval.addresses import Address
from tfdml.retrieval.exact import check_embeddings, row_blocks, unit_rows
from tfdml.retrieval.galleries import (
    COLUMNS,
    LISTED_AT_ONCE,
    UNKNOWN,
    About,
    Condition,
    Gallery,
    Neighbors,
    Rows,
    check_dimension,
    class_names_of,
    conditions_of,
    plain_texts,
    warn_of_zeros,
)

_VERSION = 3
# Distances by which the database ranks by products, and not by Euclidean distances.
_BY_PRODUCT = ("cosine", "dot")


@dataclasses.dataclass(frozen=True)
class AddCounts:
    """What became of rows that were added.

    Args:
        added: Rows that the gallery lacked.
        replaced: Rows that were there and are written again.
        present: Rows of the same source that were there already.
    """

    added: int = 0
    replaced: int = 0
    present: int = 0

    def __str__(self) -> str:
        changes = f"{self.added:,} added, {self.replaced:,} replaced"
        return f"{changes}, {self.present:,} there already"

    def __add__(self, other: AddCounts) -> AddCounts:
        return AddCounts(
            self.added + other.added,
            self.replaced + other.replaced,
            self.present + other.present,
        )


@dataclasses.dataclass(frozen=True)
class IndexRecall:
    """How well a database's own index finds the nearest rows.

    Args:
        recall: The share of the k nearest others of a row that the index finds.
        k: How many neighbors.
        queries: How many rows of the gallery were searched for.
        unindexed: Rows that the index does not hold, which are compared one by one.
    """

    recall: float
    k: int
    queries: int
    unindexed: int = 0

    def __str__(self) -> str:
        recall = f"the index finds {100 * self.recall:.1f} % of the {self.k} nearest"
        text = f"{recall} of {self.queries:,} rows of the gallery"
        if not self.unindexed:
            return text
        return f"{text}; it lacks {counted(self.unindexed, 'row')} added later, compared one by one"


@dataclasses.dataclass(frozen=True)
class _NewRows:
    """Rows to be added, and how: see `WritableGallery.add`."""

    ids: list[str]
    vectors: Any
    columns: dict[str, list[str]]
    source: str
    model: str
    replace: bool
    # Classes that mean something in one file alone.
    numbers: frozenset[str] = frozenset()


class WritableGallery(Gallery):
    """A gallery in a table of a database.

    Each block of rows is compared and written in one transaction: a block that is refused or fails
    writes nothing, and the rows before it stay. An open gallery sees what others write. For
    `cosine` the vectors are kept at length 1.

    Args:
        address: Where it is.

    Raises:
        UserError: As `open_gallery`.
    """

    _errors: tuple[type[Exception], ...]
    # Rows that are written at once.
    batch_rows = 10_000
    # Neighbors that a search by an index can return.
    _most_indexed = 2**31

    def __init__(self, address: Address):
        self.place = address
        self.address = str(address)
        with self._user_errors("cannot be opened"):
            self._open()
            try:
                self._stored()
            except BaseException:
                self.close()
                raise

    def __len__(self) -> int:
        with self._user_errors("cannot be read"):
            return 0 if self._stored() is None else self._count()

    @property
    def about(self) -> About | None:
        """See `Gallery.about`."""
        with self._user_errors("cannot be read"):
            stored = self._stored()
            if stored is None:
                return None
            models = self._models()
            first = next((model for model in models if model), "")
            return dataclasses.replace(stored, model=first, has_unknown="" in models)

    @property
    def distance(self) -> str:
        """What near means in it; also while there is no table."""
        with self._user_errors("cannot be read"):
            about = self._stored()
        return about.distance if about else self.place.distance or "euclidean"

    def _stored(self) -> About | None:
        """Return distance and dimension of the table; None where there is none."""
        text = self._comment()
        if text is None:
            return None
        values = parse_json(text, f"uri={self.address}") if text else {}
        if not isinstance(values, dict) or values.pop("tfdml", None) != _VERSION:
            raise UserError(
                "is a table of something else: name another by ?table=...", uri=self.address
            )
        kinds: Kinds = {"distance": str, "dimension": int, "admits": list}
        about = About(**fields({"admits": [], **values}, kinds, self.address))
        about = dataclasses.replace(about, admits=tuple(about.admits))
        if self.place.distance not in ("", about.distance):
            raise UserError(
                f"was made with distance={about.distance}; name another ?table=...",
                uri=self.address,
            )
        return about

    def add(
        self,
        ids: Sequence[str],
        vectors: Any,
        columns: Mapping[str, Sequence[str]] | None = None,
        *,
        model: str = "",
        source: str = "",
        replace: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> AddCounts:
        """Add rows. The first call makes the table, and fixes its dimension.

        Rows that are there from the same source are skipped, so that the same call writes what is
        missing after a kill; without a source they are written again.

        Args:
            ids: N names, each once.
            vectors: (N, d).
            columns: N texts each, `path` and `class`. A row that is replaced keeps those that are
                not given.
            model: The fingerprint of the model that embedded them. The first that is known is the
                gallery's. `unknown`: nobody knows it, and they are mixed in.
            source: What identifies the embeddings, such as a checksum.
            replace: Whether rows of other sources with the same ids are replaced.
            progress: Called with how many rows are done, of how many.

        Raises:
            UserError: The rows are not as above; they are of another dimension or model than the
                gallery, or of an unknown one; or an id is there from another source. Nothing is
                written then. Or another writer has added such rows meanwhile, or the database
                fails: the message has the number of rows that are written.
        """
        names = plain_texts(_listed(ids), "id", "ids")
        texts = _columns(columns or {}, len(vectors))
        rows = _NewRows(names, np.asarray(vectors), texts, source, model, replace)
        return self._add(rows, progress)

    def add_embeddings(
        self,
        stored: StoredEmbeddings,
        prefix: str = "",
        truncate_dim: int = 0,
        *,
        model: str = "",
        replace: bool = False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> AddCounts:
        """Add stored embeddings, as `add` does. Their source is their checksum.

        Args:
            stored: The embeddings. The name of each image is its id.
            prefix: Put before every id, and before the class of embeddings whose classes are
                numbers, which mean something in one file alone.
            truncate_dim: How many first dimensions are written, scaled to length 1; 0: all, as they
                are.
            model: Of embeddings that do not state theirs: as `add`.
            replace: As `add`.
            progress: As `add`.

        Raises:
            UserError: As `add`; or classes that are numbers are those of other embeddings.

        Example:
            >>> stored = tfdml.embeddings.read_embeddings("embeddings/cars")
            >>> with tfdml.retrieval.open_gallery(f"lancedb://{os.getcwd()}/galleries") as gallery:
            ...     gallery.add_embeddings(stored).added
            256
        """
        rows = _rows_of(stored, prefix, truncate_dim, model, replace)
        return self._add(rows, progress, stored.source)

    def _add(
        self,
        rows: _NewRows,
        progress: Callable[[int, int], None],
        name: str = "gallery embeddings",
    ) -> AddCounts:
        _check_rows(rows, name)
        blocks = row_blocks(len(rows.ids), self.batch_rows)
        for block in blocks:
            vectors = check_embeddings(rows.vectors[block], name)
            warn_of_zeros(vectors, name)
            with self._user_errors("cannot be read"):
                self._check_addable(rows, self._present(rows.ids[block]), name)
        counts = AddCounts()
        for block in blocks:
            with self._writing(block.start):
                counts += self._add_block(rows, block, name)
            progress(block.stop, len(rows.ids))
        return counts

    @contextlib.contextmanager
    def _writing(self, done: int = 0):
        """Keep other writers out; errors have the number of rows that are written."""
        before = f"; {done:,} rows before are written" if done else ""
        counted = user_errors(UserError, f"{ERROR_TEXT}{before}")
        with counted, self._user_errors("cannot be written"), self._transaction():
            yield

    def _add_block(self, rows: _NewRows, block: slice, name: str) -> AddCounts:
        present = self._present(rows.ids[block])
        self._check_addable(rows, present, name)
        chosen = []
        replaced = 0
        for row, id in enumerate(rows.ids[block], block.start):
            old = present.get(id)
            if old is None or not rows.source or old["source"] != rows.source:
                chosen.append(row)
                replaced += old is not None
        num_present = len(rows.ids[block]) - len(chosen)
        if chosen:
            self._write(self._written(rows, chosen, present))
        return AddCounts(len(chosen) - replaced, replaced, num_present)

    def _written(
        self, rows: _NewRows, chosen: list[int], present: Mapping[str, Mapping[str, str]]
    ) -> Rows:
        """Return the rows to write; of those that are there, with the texts that are not given."""
        ids = [rows.ids[row] for row in chosen]
        columns: dict[str, list[str]] = {}
        for name in ("path", "class"):
            texts = rows.columns.get(name)
            if texts is None:
                columns[name] = [present[id][name] if id in present else "" for id in ids]
            else:
                columns[name] = [texts[row] for row in chosen]
        columns["source"] = [rows.source] * len(ids)
        columns["model"] = ["" if rows.model == UNKNOWN else rows.model] * len(ids)
        vectors = check_embeddings(rows.vectors[chosen], "gallery embeddings")
        return Rows(ids, _placed(vectors, self.distance), columns)

    def _check_addable(
        self, rows: _NewRows, present: Mapping[str, Mapping[str, str]], name: str
    ) -> None:
        """Refuse rows that may not be added; `present` are the texts of those that are there."""
        about = self.about
        if about is None:
            return
        check_dimension(about, rows.vectors.shape[1], name, self.address)
        self._check_model(about.model, rows.model, name)
        others = [id for id, texts in present.items() if texts["source"] != rows.source]
        if others and not rows.replace:
            advice = "set replace=true to replace these rows, or another prefix to keep both"
            text = f"holds {counted(len(others), 'id')} of {name}, of other embeddings"
            raise UserError(f"{text}, such as {min(others)}: {advice}", uri=self.address)
        self._check_numbers(rows, name)

    def _check_model(self, own: str, model: str, name: str) -> None:
        if not own or model == UNKNOWN:
            return
        if not model:
            text = f"its vectors are of model {own}, and that of {name} is not known"
            advice = "embed again, or set model=unknown to mix them in"
            raise UserError(f"{text}: {advice}", uri=self.address)
        check_same_model(own, model, f"{self.address} and {name}")

    def _check_numbers(self, rows: _NewRows, name: str) -> None:
        """Refuse classes that are numbers where other embeddings have classes of these names."""
        if not rows.numbers:
            return
        conditions = [
            Condition("class", "in", sorted(rows.numbers)),
            Condition("source", "!=", rows.source),
        ]
        others = dict(self._select(("id", "class"), conditions))
        for id in others.keys() - rows.ids if others else ():
            text = (
                f"the classes of {name} are numbers, and other embeddings have a class {others[id]}"
            )
            advice = "store names of classes, or keep them apart by a prefix"
            raise UserError(f"{text}: {advice}", uri=self.address)

    def _present(self, ids: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return the texts of those rows of these ids that are there, by id."""
        names = ("path", "class", "source")
        texts = {}
        for part in row_blocks(len(ids), LISTED_AT_ONCE):
            condition = Condition("id", "in", list(ids[part]))
            for id, *values in self._select(("id", *names), [condition]):
                texts[id] = dict(zip(names, values, strict=True))
        return texts

    def delete(
        self, ids: Sequence[str] | None = None, *, where: Mapping[str, str] | None = None
    ) -> int:
        """Remove rows, and return how many were there.

        Args:
            ids: Their names; unknown ones are ignored. None: any.
            where: The texts that their columns must equal. None: any.

        Raises:
            UserError: Neither is given, there is no such column, or the database fails.
        """
        if ids is None and not where:
            raise UserError("name the rows to delete, by ids or by where")
        conditions = conditions_of(where or {})
        parts = [conditions]
        if ids is not None:
            names = list(dict.fromkeys(_listed(ids)))
            blocks = row_blocks(len(names), LISTED_AT_ONCE)
            parts = [[Condition("id", "in", names[part]), *conditions] for part in blocks]
        if not parts or self.about is None:
            return 0
        with self._writing():
            return sum(self._delete(part) for part in parts)

    def prune(self, stored: StoredEmbeddings, prefix: str = "") -> int:
        """Remove the rows that `add_embeddings` has written with this prefix and that are not among
        these embeddings, and return how many.

        Args:
            stored: The embeddings that remain.
            prefix: As `add_embeddings`.

        Raises:
            UserError: The database fails.
        """
        if self.about is None:
            return 0
        kept = {prefix + name for name in stored.names}
        with self._writing():
            # Other prefixes begin with another source.
            conditions = [Condition("source", "starts", _source_of(prefix))]
            ids = [row[0] for row in self._select(("id",), conditions)]
            gone = [name for name in ids if name not in kept]
            blocks = row_blocks(len(gone), LISTED_AT_ONCE)
            return sum(self._delete([Condition("id", "in", gone[part])]) for part in blocks)

    def rows(self, most: int, ids: Sequence[str] | None = None) -> Rows:
        """See `Gallery.rows`."""
        dimension = self._existing().dimension
        names = ("id", "vector", *COLUMNS)
        rows: list[tuple] = []
        with self._user_errors("cannot be read"):
            if ids is None:
                rows = self._select(names, [], most)
            else:
                listed = list(dict.fromkeys(_listed(ids)))
                for part in row_blocks(len(listed), LISTED_AT_ONCE):
                    if len(rows) < most:
                        condition = Condition("id", "in", listed[part])
                        rows += self._select(names, [condition], most - len(rows))
        return _rows_from(rows, names, dimension)

    def _rows_of_classes(self, classes: list[str]) -> Rows:
        dimension = self._existing().dimension
        names = ("id", "vector", *COLUMNS)
        with self._user_errors("cannot be read"):
            rows = self._select(names, [Condition("class", "in", classes)])
        return _rows_from(rows, names, dimension)

    def class_counts(self) -> dict[str, int]:
        """See `Gallery.class_counts`."""
        self._existing()
        with self._user_errors("cannot be read"):
            counts = collections.Counter(group for (group,) in self._select(("class",), []))
        del counts[""]
        return dict(counts)

    def _search(
        self,
        queries: np.ndarray,
        k: int,
        conditions: list[Condition],
        exact: bool,
        distance: str,
    ) -> Neighbors:
        shape = (len(queries), k)
        distances = np.full(shape, np.inf, np.float32)
        names = ("id", *COLUMNS)
        columns = {name: np.full(shape, None, object) for name in names}
        by_product = distance in _BY_PRODUCT
        # An index knows no columns, and may return too few of the rows that are left.
        exact = exact or bool(conditions) or k > self._most_indexed
        with self._user_errors("cannot be searched"):
            near = self._nearest(_placed(queries, distance), k, conditions, exact, by_product)
            for query, rows in enumerate(near):
                for rank, (raw, *texts) in enumerate(sorted(rows)):
                    distances[query, rank] = _scaled(raw, distance)
                    for name, text in zip(names, texts, strict=True):
                        columns[name][query, rank] = text
        return Neighbors(columns.pop("id"), distances, columns)

    def build_index(self) -> None:
        """Build the database's own index of the vectors, in place of one that there is.

        It is IVF_FLAT in LanceDB and HNSW in PostgreSQL. Nobody else writes meanwhile. PostgreSQL
        adds later rows to it; LanceDB compares them one by one until it is built again.

        Raises:
            UserError: There is no table, or the database fails.
        """
        by_product = self._existing().distance in _BY_PRODUCT
        with self._writing():
            self._build_index(by_product)

    def measure_index(self, k: int = 10, *, queries: int = 200, seed: int = 0) -> IndexRecall:
        """Measure how many of the nearest rows the database's index finds.

        Rows of the gallery, drawn at random, search it with and without the index, and leave
        themselves out.

        Args:
            k: How many neighbors.
            queries: How many rows search; all, where there are fewer.
            seed: Of the draw.

        Raises:
            UserError: There is no table, no index of its distance, or less than two rows; or the
                database fails.

        Example:
            >>> with tfdml.retrieval.open_gallery(f"lancedb://{os.getcwd()}/galleries") as gallery:
            ...     gallery.build_index()
            ...     print(gallery.measure_index(k=3))
            the index finds 100.0 % of the 3 nearest of 200 rows of the gallery
        """
        check_positive(k=k, queries=queries)
        distance = self._existing().distance
        count = len(self)
        with self._user_errors("cannot be searched"):
            if not self._has_index(distance in _BY_PRODUCT):
                raise UserError(
                    f"has no index for {distance} distances: build it with tfdml index "
                    "--build_index, or search exactly",
                    uri=self.address,
                )
            if count < 2:
                raise UserError("has less than two rows: search exactly", uri=self.address)
            drawn = np.random.default_rng(seed).permutation(count)[:queries]
            ids, vectors = self._rows_at(np.sort(drawn))
            unindexed = self._count_unindexed()
        exact = self.search(vectors, k + 1, model=UNKNOWN)
        indexed = self.search(vectors, k + 1, model=UNKNOWN, exact=False)
        others = min(k, count - 1)
        hits = [_count_hits(exact, indexed, query, id, others) for query, id in enumerate(ids)]
        return IndexRecall(sum(hits) / (others * len(ids)), k, len(ids), unindexed)

    def _user_errors(self, message: str) -> contextlib.AbstractContextManager[None]:
        return user_errors(self._errors, f"{message}: {ERROR_TEXT}", uri=self.address)

    def _new_comment(self, dimension: int, admits: Sequence[str] = ()) -> str:
        """Return what a table keeps of its rows, and of the models that it admits."""
        values = {"tfdml": _VERSION, "distance": self.distance, "dimension": dimension}
        return json.dumps({**values, "admits": list(admits)}, sort_keys=True)

    def _admit(self, models: tuple[str, ...]) -> None:
        with self._writing():
            about = self._existing()
            # Another writer may have admitted one since.
            others = [model for model in models if model not in about.admits]
            self._write_comment(self._new_comment(about.dimension, [*about.admits, *others]))

    @abc.abstractmethod
    def _write_comment(self, text: str) -> None:
        """Replace what the table keeps."""

    @abc.abstractmethod
    def _open(self) -> None:
        """Connect."""

    @abc.abstractmethod
    def _comment(self) -> str | bytes | None:
        """Return what the table keeps, empty where it is another's, None where there is none."""

    @abc.abstractmethod
    def _transaction(self) -> contextlib.AbstractContextManager[None]:
        """Keep other writers out; on an error, undo what was written."""

    @abc.abstractmethod
    def _models(self) -> set[str]:
        """Return the models of the rows; an empty text among them where one is not known."""

    @abc.abstractmethod
    def _write(self, rows: Rows) -> None:
        """Write rows, in place of those of the same ids; make the table where there is none."""

    @abc.abstractmethod
    def _delete(self, conditions: list[Condition]) -> int:
        """Remove rows, and count them."""

    @abc.abstractmethod
    def _nearest(
        self,
        queries: np.ndarray,
        k: int,
        conditions: list[Condition],
        exact: bool,
        by_product: bool,
    ) -> Iterable[list[tuple]]:
        """Yield the k nearest rows of each query: a squared Euclidean distance or, of products, a
        negative product; the id; and the texts."""

    @abc.abstractmethod
    def _has_index(self, by_product: bool) -> bool:
        """Whether the vectors have an index that a search may use."""

    @abc.abstractmethod
    def _count_unindexed(self) -> int:
        """Return the number of rows that the index does not hold."""

    @abc.abstractmethod
    def _build_index(self, by_product: bool) -> None:
        """Build an index of the vectors, in place of one that there is."""

    @abc.abstractmethod
    def _rows_at(self, places: np.ndarray) -> tuple[list[str], np.ndarray]:
        """Return ids and vectors of the rows at some of the places 0 .. count - 1."""

    @abc.abstractmethod
    def _count(self) -> int:
        """Return the number of rows."""

    @abc.abstractmethod
    def _select(
        self, names: Sequence[str], conditions: list[Condition], most: int | None = None
    ) -> list[tuple]:
        """Return columns of rows, at most so many; none where there is no table."""


def _count_hits(exact: Neighbors, indexed: Neighbors, query: int, id: str, others: int) -> int:
    """Return how many of the nearest others of a row the index finds; one that is as near as the
    last of them counts."""
    is_other = exact.ids[query] != id
    nearest = exact.ids[query][is_other][:others]
    farthest = exact.distances[query][is_other][others - 1]
    is_near = np.isin(indexed.ids[query], nearest) | (indexed.distances[query] <= farthest)
    is_other = (indexed.ids[query] != id) & (indexed.ids[query] != None)  # noqa: E711
    return min(others, int(np.sum(is_near & is_other)))


def _rows_from(rows: list[tuple], names: Sequence[str], dimension: int) -> Rows:
    """Return rows from the values of their columns."""
    columns = dict(zip(names, zip(*rows, strict=True), strict=False))
    texts = {name: list(columns.get(name, ())) for name in COLUMNS}
    matrix = np.array(columns.get("vector", ()), np.float32).reshape(-1, dimension)
    return Rows(list(columns.get("id", ())), matrix, texts)


def _placed(vectors: np.ndarray, distance: str) -> np.ndarray:
    return np.asarray(unit_rows(vectors), np.float32) if distance == "cosine" else vectors


def _scaled(raw: float, distance: str) -> float:
    """Return the distance of a squared Euclidean distance or of a negative product."""
    return {"euclidean": max(raw, 0.0) ** 0.5, "cosine": 1 + raw}.get(distance, raw)


def _listed(ids: Sequence[str]) -> list[str]:
    return [ids] if isinstance(ids, str) else list(ids)


def _columns(columns: Mapping[str, Sequence[str]], count: int) -> dict[str, list[str]]:
    """Return the columns of rows to add as clean texts."""
    texts = {}
    for name, values in columns.items():
        check_choice("column", name, ("path", "class"))
        if len(values) != count:
            raise UserError(f"give {count} vectors as many texts as {name}, not {len(values)}")
        texts[name] = plain_texts(values, name, f"column {name}")
    return texts


def _check_rows(rows: _NewRows, name: str) -> None:
    if np.ndim(rows.vectors) != 2:
        check_embeddings(rows.vectors, name)
    if len(rows.ids) != len(rows.vectors) or "" in rows.ids:
        raise UserError(f"give {len(rows.vectors)} vectors as many ids, and no empty id")
    twice = len(rows.ids) - len(set(rows.ids))
    if twice:
        raise UserError(f"{name}: {counted(twice, 'id', 'occur')} more than once")


def _source_of(prefix: str) -> str:
    """Return what the sources of embeddings with this prefix begin with."""
    return f"{json.dumps(prefix)} "


def _rows_of(
    stored: StoredEmbeddings, prefix: str, truncate_dim: int, model: str, replace: bool
) -> _NewRows:
    """Return stored embeddings as rows to add; see `WritableGallery.add_embeddings`."""
    if stored.model and model not in ("", stored.model):
        raise UserError(f"{stored.source} states its model, {stored.model}", model=model)
    vectors = stored.embeddings
    model = stored.model or model
    if truncate_dim:
        blocks = row_blocks(len(vectors), LISTED_AT_ONCE)
        vectors = np.concatenate([truncate(vectors[block], truncate_dim) for block in blocks])
        if model not in ("", UNKNOWN):
            model = f"{truncate_dim} dimensions of {model}"
    columns = {"path": list(stored.names)}
    numbers: set[str] = set()
    if stored.labels is not None:
        classes = class_names_of(stored)
        if stored.classes_are_numbers:
            classes = [prefix + number for number in classes]
            numbers = set(classes)
        columns["class"] = plain_texts(classes, "class", stored.source)
    files = stored.manifest.get("files") or {"file": sha256_of(Path(stored.source))}
    text = json.dumps([files, prefix, truncate_dim], sort_keys=True)
    source = _source_of(prefix) + hashlib.sha256(text.encode()).hexdigest()[:16]
    ids = plain_texts([prefix + name for name in stored.names], "id", stored.source)
    return _NewRows(ids, vectors, columns, source, model, replace, frozenset(numbers))
