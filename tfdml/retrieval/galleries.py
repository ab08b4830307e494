"""Galleries: vectors with names that are searched, in memory, in a database, or in a retriever.

`open_gallery` opens one by its address. Each is a `Gallery`, one of stored embeddings a
`MemoryGallery`, and a search of any returns `Neighbors`. `tfdml.retrieval.databases` has those that
are written to.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdml.embeddings.files import (
    StoredEmbeddings,
    admit_models,
    check_same_model,
    read_embeddings,
)
from tfdml.errors import ERROR_TEXT, UserError, check_choice, check_positive, counted, user_errors
from tfdml.names import CLASS, ID, PATH, Kind, clean, warn
from tfdml.retrieval.addresses import kind_of_gallery, parse
from tfdml.retrieval.exact import check_embeddings, nearest_neighbors, row_blocks
from tfdml.retrieval.identities import (
    Identities,
    check_rule,
    each_class_once,
    group_numbers,
    references_for,
)

#: What a row has besides its id and vector: texts, empty where they are not known.
COLUMNS = ("path", "class", "source", "model")
#: Of vectors whose model nobody knows, and that are added or searched all the same.
UNKNOWN = "unknown"
#: Ids that one statement names.
LISTED_AT_ONCE = 10_000
_KINDS = {"id": ID, "path": PATH, "class": CLASS}
_RETRIEVER = "tfdml.export.retriever"


@dataclasses.dataclass(frozen=True)
class About:
    """What is known of all vectors of a gallery.

    Args:
        distance: One of `tfdml.registry.DISTANCES`.
        dimension: d.
        model: The fingerprint of the model that embedded them: of a database, that of the first row
            that has one. Empty where it is not known.
        has_unknown: Whether there are vectors of an unknown model among them.
        classes_are_numbers: Whether the classes are those of one file, which has no names for them.
        per_class: What stands for a class: `nearest` (each row), `mean` or `max_of_means`. But for
            `nearest`, the vectors are means, and neighbors are classes.
        admits: The fingerprints of other models whose vectors may search it, see `Gallery.admit`.
    """

    distance: str
    dimension: int
    model: str = ""
    has_unknown: bool = False
    classes_are_numbers: bool = False
    per_class: str = "nearest"
    admits: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """The models whose vectors may search it: its own, and those that it admits; none where
        its own is not known."""
        return (self.model, *self.admits) if self.model else ()

    def check_model(self, model: str, vectors: str) -> None:
        """Raise a `UserError` where the vectors of a model may not search it; a fingerprint that is
        not known (empty) may.

        Args:
            model: The fingerprint.
            vectors: What is compared, for the message.
        """
        if model and self.models and model not in self.models:
            advice = "to let this model search it, see tfdml index --admit"
            with user_errors(UserError, f"{ERROR_TEXT}; {advice}"):
                check_same_model(self.model, model, vectors)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a gallery.

    Args:
        ids: M names.
        vectors: (M, d) float32.
        columns: M texts each, by name: of `COLUMNS` in a database.
    """

    ids: list[str]
    vectors: np.ndarray
    columns: dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Neighbors:
    """The result of a search: row i holds the neighbors of query i, nearest first.

    Args:
        ids: (N, k) str objects, None where there are fewer than k.
        distances: (N, k) float32, infinite where there is no id.
        columns: (N, k) objects by name, None where there is no id: `class`, and what else the
            gallery has. Of a retriever with a threshold also `accepted`, (N, k) bool.
    """

    ids: np.ndarray
    distances: np.ndarray
    columns: dict[str, np.ndarray]

    @classmethod
    def padded(
        cls, k: int, ids: np.ndarray, distances: np.ndarray, columns: Mapping[str, np.ndarray]
    ) -> Neighbors:
        """Return (N, k) neighbors from (N, m) arrays, m at most k."""
        shape = (len(ids), k)

        def fill(values: np.ndarray, empty: Any, dtype: Any) -> np.ndarray:
            array = np.full(shape, empty, dtype)
            array[:, : values.shape[1]] = values
            return array

        texts = {}
        for name, values in columns.items():
            is_bool = values.dtype == bool
            texts[name] = fill(values, False if is_bool else None, bool if is_bool else object)
        return cls(fill(ids, None, object), fill(distances, np.inf, np.float32), texts)


class Gallery(abc.ABC):
    """Vectors with names, all of one model; a context manager, opened by `open_gallery`.

    Distances are those of `nearest_neighbors`.

    Attributes:
        address: Where it is, without a password.
        calibration: The `Calibration` that was written with it; None: there is none.
    """

    address: str
    calibration: Any = None

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @property
    @abc.abstractmethod
    def about(self) -> About | None:
        """What is known of its vectors; None while there is no table in the database."""

    @property
    def distance(self) -> str:
        """What near means in it."""
        return self._existing().distance

    def search(
        self,
        vectors: Any,
        k: int = 10,
        where: Mapping[str, str] | None = None,
        *,
        model: str = "",
        exact: bool = True,
    ) -> Neighbors:
        """Return the k nearest rows of every query.

        Equally near ones come by their ids in a database, else by their rows.

        Args:
            vectors: (N, d) queries.
            k: How many neighbors.
            where: The texts that columns must equal; None: all rows.
            model: The fingerprint of the model that embedded the queries. Empty: it is not known,
                which is logged where that of the gallery is. `unknown`: the same, not logged.
            exact: Whether every row is compared. If not, a database uses the index that it has,
                which may miss neighbors: see `WritableGallery.measure_index`.

        Raises:
            UserError: There is no table; queries are not finite, or of another dimension or model;
                or the database fails.
        """
        check_positive(k=k)
        conditions = conditions_of(where or {})
        queries = check_embeddings(vectors, "query embeddings")
        warn_of_zeros(queries, "query embeddings")
        about = self.check(queries.shape[1], model, "query embeddings")
        return self._search(queries, k, conditions, exact, about.distance)

    def check(self, dimension: int, model: str, name: str) -> About:
        """Return what is known of its vectors; raise a `UserError` where there is no table, or
        others may not search it.

        Args:
            dimension: Of the others.
            model: As `search`.
            name: What they are called.
        """
        about = self._existing()
        check_dimension(about, dimension, name, self.address)
        if model == UNKNOWN:
            return about
        about.check_model(model, f"{self.address} and the {name}")
        if bool(model) != bool(about.model):
            side = "the gallery" if model else f"the {name}"
            warn(f"{self.address}: the model of {side} is not known: models are not compared")
        elif about.has_unknown and about.model:
            warn(f"{self.address}: the model of some of its vectors is not known")
        return about

    def admit(self, model: str) -> None:
        """Let the vectors of another model search it, such as one that is aligned to its own.

        A database, and a folder of `tfdml embed`, keep it. Rows stay those of one model.

        Args:
            model: Its fingerprint.

        Raises:
            UserError: The model of the gallery is not known, it embeds what is searched itself, or
                it cannot be written.
        """
        about = self._existing()
        if not model or not about.model:
            whose = "the gallery" if model else "the queries"
            raise UserError(f"{self.address}: the model of {whose} is not known: nothing to admit")
        if model not in about.models:
            self._admit((*about.admits, model))

    def _admit(self, models: tuple[str, ...]) -> None:
        """Keep which other models may search it."""
        raise UserError(f"{self.address} embeds what is searched itself, and admits no model")

    def identities(self, per_class: str, groups: str = "") -> Gallery:
        """Return the classes of this gallery as one that a search returns classes from.

        It is a copy in memory of what is here now. Its ids are the names of the classes; rows
        without a class are left out, and counted.

        Args:
            per_class: What stands for a class, see `Identities`: `mean` or `max_of_means`.
                `nearest`: this gallery.
            groups: The column that tells the groups of a class, such as `source`; empty: there are
                none.

        Raises:
            UserError: There is no such rule or column, or no row has a class.

        Example:
            >>> rows = Rows(["a", "b"], np.eye(2), {"class": ["bus", "bus"]})
            >>> gallery = MemoryGallery("cars", rows, About("euclidean", 2)).identities("mean")
            >>> neighbors = gallery.search(np.array([[1.0, 0.0]]), k=1)
            >>> neighbors.ids.tolist(), neighbors.distances.round(3).tolist()
            ([['bus']], [[0.7070000171661377]])
        """
        check_rule(per_class, groups or None)
        about = self._existing()
        if per_class == about.per_class and not groups:
            return self
        with user_errors(UserError, ERROR_TEXT, per_class=per_class):
            self.check_holds_rows()
        names: list[str] = []
        vectors = [np.zeros((0, about.dimension), np.float32)]
        for rows in self._rows_by_class():
            some, references = _references(rows, per_class, about.distance, groups)
            names += some
            vectors.append(references)
        left_out = len(self) - sum(self.class_counts().values())
        if not names:
            raise UserError(f"no row of {self.address} has a class", per_class=per_class)
        if left_out:
            warn(f"{self.address}: leaves out {counted(left_out, 'row')} without a class")
        rows = Rows(names, np.concatenate(vectors), {"class": names})
        return MemoryGallery(self.address, rows, dataclasses.replace(about, per_class=per_class))

    def check_holds_rows(self) -> None:
        """Raise a `UserError` where there is no table, or it holds classes and not their rows."""
        rule = self._existing().per_class
        if rule != "nearest":
            raise UserError(
                f"{self.address} holds classes by per_class={rule}, not their images: name what it "
                "was made from"
            )

    def _rows_by_class(self) -> Iterator[Rows]:
        """Yield all rows that have a class, those of a class together."""
        part: list[str] = []
        count = 0
        for name, rows in self.class_counts().items():
            part.append(name)
            count += rows
            if count >= LISTED_AT_ONCE:
                yield self._rows_of_classes(part)
                part = []
                count = 0
        if part:
            yield self._rows_of_classes(part)

    @abc.abstractmethod
    def _rows_of_classes(self, classes: list[str]) -> Rows:
        """Return the rows of these classes."""

    def class_counts(self) -> dict[str, int]:
        """Return how many rows each class has; without rows of an unknown class."""
        counts = collections.Counter(self.rows(len(self)).columns["class"])
        del counts[""]
        return dict(counts)

    def _existing(self) -> About:
        about = self.about
        if about is None:
            raise UserError("holds no gallery: write it with tfdml index", uri=self.address)
        return about

    @abc.abstractmethod
    def rows(self, most: int, ids: Sequence[str] | None = None) -> Rows:
        """Return the rows of these ids, or any, and at most so many."""

    @abc.abstractmethod
    def _search(
        self,
        queries: np.ndarray,
        k: int,
        conditions: list[Condition],
        exact: bool,
        distance: str,
    ) -> Neighbors:
        """Return the neighbors of queries that may search it."""

    def close(self) -> None:  # noqa: B027 -- most have nothing to close
        """End what is open."""


def _references(
    rows: Rows, per_class: str, distance: str, groups: str
) -> tuple[list[str], np.ndarray]:
    """Return the references of the classes of rows: the class of each, and vectors."""
    if groups and groups not in rows.columns:
        raise UserError(f"no such column; there are {', '.join(rows.columns)}", groups=groups)
    numbers = group_numbers(rows.columns[groups] if groups else None, len(rows.ids))
    names, classes = np.unique(np.array(rows.columns["class"], object), return_inverse=True)
    identities = Identities(rows.vectors, classes, per_class, distance, numbers)
    return names[identities.reference_classes].tolist(), identities.references


class Condition(NamedTuple):
    """What a column of a row must be: `=` or `!=` a text, `in` a list, or `starts` with a text."""

    column: str
    operator: str
    value: Any


def conditions_of(where: Mapping[str, str]) -> list[Condition]:
    """Return the conditions that columns equal texts.

    Raises:
        UserError: There is no such column, or a text is no name.
    """
    conditions = []
    for name, value in where.items():
        check_choice("column", name, ("id", *COLUMNS))
        (text,) = plain_texts([value], name, f"where {name}")
        conditions.append(Condition(name, "=", text))
    return conditions


def warn_of_zeros(vectors: np.ndarray, name: str) -> None:
    """Warn of vectors that are 0 in all dimensions, whose neighbors mean nothing."""
    zeros = np.flatnonzero(~vectors.any(axis=1))
    if len(zeros):
        count = f"{len(zeros):,} of {len(vectors):,} {name} are 0 in all dimensions"
        warn(f"{count}, the first is row {zeros[0]}: their neighbors mean nothing")


def plain_texts(texts: Sequence[Any], column: str, source: str) -> list[str]:
    """Return the texts of a column as `clean` makes them; empty ones stay empty."""
    kind: Kind | None = _KINDS.get(column)
    if kind is None:
        return list(map(str, texts))
    rows = [row for row, text in enumerate(texts) if text is not None and text != ""]
    names = clean([texts[row] for row in rows], kind, source, lambda at: f"row {rows[at]}")
    plain = [""] * len(texts)
    for row, name in zip(rows, names, strict=True):
        plain[row] = name
    return plain


def check_dimension(about: About, dimension: int, name: str, address: str) -> None:
    """Raise a `UserError` where others are not of the dimension of a gallery."""
    if dimension != about.dimension:
        sizes = f"{dimension} dimensions, {address} has {about.dimension}"
        raise UserError(f"{name} have {sizes}: embed both by one model, or open another gallery")


class MemoryGallery(Gallery):
    """A gallery of vectors in memory, or mapped into it, searched exactly by NumPy.

    Args:
        address: What it is called.
        rows: The rows.
        about: What is known of them.

    Example:
        >>> rows = Rows(["a", "b"], np.eye(2), {"class": ["bus", "van"]})
        >>> gallery = MemoryGallery("cars", rows, About("euclidean", 2))
        >>> gallery.search(np.array([[0.9, 0.1]]), k=1).ids.tolist()
        [['a']]
    """

    def __init__(self, address: str, rows: Rows, about: About):
        self.address = address
        self._rows = rows
        self._about = about
        self._ids = np.array(rows.ids, object)
        self._columns = {name: np.array(texts, object) for name, texts in rows.columns.items()}
        for block in row_blocks(len(rows.ids), LISTED_AT_ONCE):
            warn_of_zeros(rows.vectors[block], f"gallery embeddings of {address}")

    @classmethod
    def of_embeddings(cls, stored: StoredEmbeddings, distance: str = "euclidean") -> MemoryGallery:
        """Return the gallery of stored embeddings, whose names are its ids.

        Args:
            stored: The embeddings.
            distance: What near means.
        """
        names = list(stored.names)
        columns = {"path": names, "class": class_names_of(stored)}
        if stored.groups is not None:
            columns["group"] = list(map(str, stored.groups))
        about = About(
            distance,
            stored.embeddings.shape[1],
            stored.model,
            classes_are_numbers=stored.classes_are_numbers,
            admits=stored.admits,
        )
        return cls(stored.source, Rows(names, stored.embeddings, columns), about)

    def __len__(self) -> int:
        """Return the number of rows, or of classes where those are found."""
        return len(self._ids) if self._about.per_class == "nearest" else len(self._classes[0])

    @functools.cached_property
    def _classes(self) -> tuple[np.ndarray, np.ndarray]:
        """The names of the classes, and the number of each row's."""
        names, numbers = np.unique(self._columns["class"], return_inverse=True)
        return names, numbers

    @property
    def about(self) -> About:
        """See `Gallery.about`."""
        return self._about

    def _admit(self, models: tuple[str, ...]) -> None:
        admit_models(self.address, models)
        self._about = dataclasses.replace(self._about, admits=models)

    def class_counts(self) -> dict[str, int]:
        """See `Gallery.class_counts`."""
        if self._about.per_class != "nearest":
            return dict.fromkeys(self._classes[0].tolist(), 1)
        counts = collections.Counter(self._columns["class"].tolist())
        del counts[""]
        return dict(counts)

    def _rows_of_classes(self, classes: list[str]) -> Rows:
        return self._rows_at(np.flatnonzero(np.isin(self._columns["class"], classes)))

    def rows(self, most: int, ids: Sequence[str] | None = None) -> Rows:
        """See `Gallery.rows`."""
        part: Any = slice(most)
        if ids is not None:
            part = np.flatnonzero(np.isin(self._ids, np.array(ids, object)))[:most]
        return self._rows_at(part)

    def _rows_at(self, part: Any) -> Rows:
        columns = {name: texts[part].tolist() for name, texts in self._columns.items()}
        return Rows(self._ids[part].tolist(), self._rows.vectors[part], columns)

    def _search(
        self,
        queries: np.ndarray,
        k: int,
        conditions: list[Condition],
        exact: bool,
        distance: str,
    ) -> Neighbors:
        own: Any = slice(None)
        vectors = self._rows.vectors
        if conditions:
            own = self._rows_where(conditions)
            vectors = vectors[own]
        if self._about.per_class != "nearest":
            return self._search_classes(queries, k, vectors, own, distance)
        near = np.zeros((len(queries), 0), int)
        distances = np.zeros((len(queries), 0), np.float32)
        if len(vectors):
            depth = min(k, len(vectors))
            near, distances = nearest_neighbors(queries, vectors, k=depth, distance=distance)
        columns = {name: texts[own][near] for name, texts in self._columns.items()}
        return Neighbors.padded(k, self._ids[own][near], distances, columns)

    def _search_classes(
        self, queries: np.ndarray, k: int, vectors: np.ndarray, own: Any, distance: str
    ) -> Neighbors:
        """Return the k nearest classes of some of the rows."""
        names, numbers = self._classes
        numbers = numbers[own]
        classes = np.full((len(queries), k), -1)
        distances = np.full((len(queries), k), np.inf, np.float32)
        if len(vectors):
            depth = references_for(k, int(np.bincount(numbers).max()), len(vectors))
            near, far = nearest_neighbors(queries, vectors, k=depth, distance=distance)
            classes, distances = each_class_once(numbers[near], far, k)
        texts = np.full(classes.shape, None, object)
        is_found = classes >= 0
        texts[is_found] = names[classes[is_found]]
        return Neighbors(texts, distances, {"class": texts.copy()})

    def _rows_where(self, conditions: list[Condition]) -> np.ndarray:
        mask = np.ones(len(self._ids), bool)
        for column, _, value in conditions:
            if self._about.per_class != "nearest" and column not in ("id", "class"):
                raise UserError(f"classes have no {column}: choose rows by their class")
            texts = self._ids if column == "id" else self._columns.get(column)
            mask &= np.zeros(len(self._ids), bool) if texts is None else texts == value
        return np.flatnonzero(mask)


def class_names_of(stored: StoredEmbeddings) -> list[str]:
    """Return the class of each of stored embeddings, or its number; empty texts without labels."""
    classes = stored.classes
    return [""] * len(stored) if classes is None else list(map(str, classes))


def open_gallery(
    address: str, *, distance: str = "", per_class: str = "", groups: str = ""
) -> Gallery:
    """Open a gallery where it is.

    A database is `lancedb:///folder` or `pgvector://user:password@host:port/database`. Options
    follow as `?name=value&name=value`: `table` (`gallery`) and `distance` (`euclidean`, for a new
    gallery). The first `add` makes the table. Any other address is a path: of stored embeddings, as
    `read_embeddings` reads them, or of a retriever of `tfdml export --gallery`, which loads
    TensorFlow.

    Args:
        address: The address.
        distance: What near means in stored embeddings, `euclidean` by default. Databases and
            retrievers have their own.
        per_class: What stands for a class, as `Gallery.identities`: `mean` and `max_of_means` find
            classes. Empty: what the gallery has, for all but some retrievers `nearest`.
        groups: As `Gallery.identities`.

    Returns:
        A `Gallery`, of a database a `WritableGallery`; close it, or use it in a `with`.

    Raises:
        UserError: There is no gallery; the client of the database is not installed; the server
            cannot be reached or refuses; the table is of something else; or the gallery has another
            distance. No message holds a password.

    Example:
        >>> import tempfile, numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> with open_gallery(f"lancedb://{folder.name}/cars") as gallery:
        ...     vectors = np.array([[0.0, 1.0], [1.0, 0.0]])
        ...     counts = gallery.add(["a", "b"], vectors, {"class": ["bus", "coupe"]})
        ...     neighbors = gallery.search(np.array([[0.9, 0.1]]), k=1)
        >>> neighbors.ids.tolist(), neighbors.columns["class"].tolist()
        ([['b']], [['coupe']])
    """
    gallery = _open(address, distance)
    if not per_class:
        return gallery
    try:
        identities = gallery.identities(per_class, groups)
    except BaseException:
        gallery.close()
        raise
    if identities is not gallery:
        gallery.close()
    return identities


def _open(address: str, distance: str) -> Gallery:
    """Open a gallery as it is, see `open_gallery`."""
    kind = kind_of_gallery(address)
    if kind == "embeddings":
        stored = read_embeddings(os.path.expanduser(address))
        return MemoryGallery.of_embeddings(stored, distance or "euclidean")
    if kind == "images":
        raise UserError(
            f"{address} holds no gallery: neither embeddings nor a retriever; embed its images "
            "with tfdml embed"
        )
    gallery = _open_database(address) if kind == "database" else _open_retriever(address)
    if distance not in ("", gallery.distance):
        own = gallery.distance
        gallery.close()
        raise UserError(f"the distance of {gallery.address} is {own}", distance=distance)
    return gallery


def _open_database(uri: str) -> Gallery:
    address = parse(uri)
    scheme = address.parts.scheme
    with user_errors(ImportError, f"{ERROR_TEXT}; pip install 'tfdml[{scheme}]'", uri=str(address)):
        module = importlib.import_module(f"tfdml.retrieval.{scheme}_gallery")
    return module.DatabaseGallery(address)


def _open_retriever(path: str) -> Gallery:
    # A package above this one, which needs TensorFlow.
    return importlib.import_module(_RETRIEVER).Retriever.load(os.path.expanduser(path))
