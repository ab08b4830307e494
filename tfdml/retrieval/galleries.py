"""Galleries in databases: the interface that both implement, their addresses, `connect`, and
indexing embeddings."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
import importlib
import json
import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.embeddings.files import StoredEmbeddings, check_same_model, truncate
from tfdml.errors import REASON, UserError, check_choice, check_positive, redact, user_errors
from tfdml.io.files import fields, parse_json, sha256_of
from tfdml.registry import DISTANCES
from tfdml.retrieval.exact import check_embeddings, row_blocks, unit_rows

#: What a row has besides its id and vector: texts, empty where they are not known.
COLUMNS = ("path", "class", "role", "source")
_VERSION = 2
# Each is also the extra and the beginning of the module's name.
SCHEMES = ("lancedb", "pgvector")


def is_gallery(text: str) -> bool:
    """Whether a text is the address of a gallery, by its scheme.

    Example:
        >>> is_gallery("lancedb:///data/cars"), is_gallery("http://localhost:8501/v1/models/cars")
        (True, False)
    """
    return text.partition("://")[0] in SCHEMES and "://" in text


@dataclasses.dataclass(frozen=True)
class Address:
    """The parts of an address.

    Args:
        uri: The address itself, which may hold a password; `str()` leaves it out.
        parts: Scheme, host, port, user, password and path.
        path: A folder, or the name of a database after a slash.
        table: The table that holds the gallery.
        distance: Of a new gallery; empty for any.
    """

    uri: str = dataclasses.field(repr=False)
    parts: urllib.parse.SplitResult = dataclasses.field(repr=False)
    path: str
    table: str = "gallery"
    distance: str = ""

    def __str__(self) -> str:
        return redact(self.uri)


def parse(uri: str) -> Address:
    """Read an address.

    Raises:
        UserError: It is none. The message holds no user and no password.

    Example:
        >>> address = parse("lancedb:///data/cars?table=vans")
        >>> address.path, address.table
        ('/data/cars', 'vans')
    """
    where, scheme = f"uri={redact(uri)}", uri.partition("://")[0]
    forms = "lancedb:///folder or pgvector://user:password@host:port/database"
    if not is_gallery(uri):
        raise UserError(f"{where}: write {forms}")
    try:
        parts = urllib.parse.urlsplit(uri)
        pairs = urllib.parse.parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)
        )
        options = dict(pairs)
        has_place = bool(parts.path.strip("/") or parts.hostname) and not (
            parts.netloc and scheme == "lancedb"
        )
        # The port raises where it is no number.
        if parts.fragment or parts.port == 0 or not has_place or len(options) < len(pairs):
            raise ValueError
    except ValueError:
        advice = "options as ?name=value&name=value, and %2F, %40, %23, %3F in a password"
        # Python's message may quote a part of the password.
        raise UserError(f"{where} cannot be read: write {forms}, {advice}") from None
    with user_errors(UserError, REASON, uri=redact(uri)):
        for name in options:
            check_choice("option", name, ("table", "distance"))
        check_choice("distance", options.get("distance", "euclidean"), DISTANCES)
        if not re.fullmatch("[a-z][a-z0-9_]{0,59}", options.get("table", "gallery")):
            raise UserError("the name of a table has a .. z, 0 .. 9 and _, and a letter first")
    return Address(uri, parts, urllib.parse.unquote(parts.path), **options)


@dataclasses.dataclass(frozen=True)
class About:
    """What a table keeps about its rows.

    Args:
        distance: One of `tfdml.registry.DISTANCES`.
        dimension: d.
        model: The fingerprint of the model that embedded them; empty where it is not known.
    """

    distance: str
    dimension: int
    model: str

    def text(self) -> str:
        """Return JSON, for the database to keep."""
        return json.dumps({"tfdml": _VERSION, **dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def read(cls, text: str | bytes, where: str) -> About:
        """Return what `text` wrote.

        Raises:
            UserError: It is of something else.
        """
        values = parse_json(text, where) if text else {}
        if not isinstance(values, dict) or values.pop("tfdml", None) != _VERSION:
            raise UserError(f"{where} is a table of something else: name another by ?table=...")
        return cls(**fields(values, {"distance": str, "dimension": int, "model": str}, where))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a gallery.

    Args:
        ids: M names.
        vectors: (M, d) float32.
        columns: M texts each, of `COLUMNS`.
    """

    ids: list[str]
    vectors: np.ndarray
    columns: dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Neighbors:
    """The result of a search: row i holds the neighbors of query i, nearest first, equally near
    ones by id.

    Args:
        ids: (N, k) str objects, None where there are fewer than k.
        distances: (N, k) float32, infinite where there is no id.
        columns: (N, k) str objects, of `COLUMNS`; None likewise.
    """

    ids: np.ndarray
    distances: np.ndarray
    columns: dict[str, np.ndarray]


class GalleryDatabase(abc.ABC):
    """A table of ids, vectors and texts in a database; a context manager, made by `connect`.

    It has four methods: `upsert`, `delete`, `search` and `rows`. Distances are those of
    `nearest_neighbors`. For `cosine` the vectors are kept at length 1.

    Args:
        address: Where it is.

    Attributes:
        about: Distance, dimension and model; None while there is no table.

    Raises:
        UserError: As `connect`.
    """

    _errors: tuple[type[Exception], ...]
    # Rows that are written at once.
    batch_rows = 10_000

    def __init__(self, address: Address):
        self.address = address
        with self._user_errors("cannot be opened"):
            text = self._open()
        self.about = None if text is None else About.read(text, f"uri={address}")
        if self.about and address.distance not in ("", self.about.distance):
            self.close()
            raise UserError(
                f"was made with distance={self.about.distance}; name another ?table=...",
                uri=str(address),
            )

    def __enter__(self) -> GalleryDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        with self._user_errors("cannot be read"):
            return 0 if self.about is None else self._count()

    @property
    def distance(self) -> str:
        """What near means here."""
        return self.about.distance if self.about else self.address.distance or "euclidean"

    def upsert(
        self,
        ids: Sequence[str],
        vectors: Any,
        columns: Mapping[str, Sequence[str]] | None = None,
        *,
        model: str = "",
    ) -> None:
        """Write rows; one whose id is there is replaced. The first call makes the table.

        Args:
            ids: N names, each once.
            vectors: (N, d).
            columns: N texts each, of `COLUMNS`.
            model: The fingerprint of the model that embedded them.

        Raises:
            UserError: The rows are not as above, or of another dimension or model than the gallery;
                nothing is written. Or the database fails.
        """
        for name in columns or ():
            check_choice("column", name, COLUMNS)
        ids = [ids] if isinstance(ids, str) else list(ids)
        texts = {
            name: list(map(str, (columns or {}).get(name, [""] * len(ids)))) for name in COLUMNS
        }
        vectors = self._placed(check_embeddings(vectors, "gallery embeddings"))
        if (
            {len(ids), *map(len, texts.values())} != {len(vectors)}
            or len({*ids}) < len(ids)
            or "" in ids
        ):
            raise UserError(
                f"give {len(vectors)} vectors as many different ids and texts, and no empty id"
            )
        if self.about:
            self.check(vectors.shape[1], model, "gallery embeddings")
        with self._user_errors("cannot be written"):
            if self.about is None:
                about = About(self.distance, vectors.shape[1], model)
                self._create(about)
                self.about = about
            for part in row_blocks(len(ids), self.batch_rows):
                self._upsert(
                    Rows(ids[part], vectors[part], {name: texts[name][part] for name in COLUMNS})
                )

    def delete(self, ids: Sequence[str]) -> int:
        """Remove rows, ignore unknown ids, and return how many were there."""
        with self._user_errors("cannot be written"):
            return self._delete(list(ids)) if self.about and ids else 0

    def search(
        self, vectors: Any, k: int = 10, where: Mapping[str, str] | None = None, *, model: str = ""
    ) -> Neighbors:
        """Return the k nearest rows of every query, nearest first.

        Args:
            vectors: (N, d) queries.
            k: How many neighbors.
            where: The texts that columns must equal; None: all rows.
            model: The fingerprint of the model that embedded the queries.

        Raises:
            UserError: There is no table; queries are not finite, or of another dimension or model;
                or the database fails.
        """
        check_positive(k=k)
        for name in where or ():
            check_choice("column", name, COLUMNS)
        queries = check_embeddings(vectors, "query embeddings")
        self.check(queries.shape[1], model, "query embeddings")
        ids, *texts = (np.full((len(queries), k), None, object) for _ in ("id", *COLUMNS))
        distances = np.full((len(queries), k), np.inf, np.float32)
        with self._user_errors("cannot be searched"):
            for query, rows in enumerate(
                self._nearest(self._placed(queries), k, dict(where or {}))
            ):
                for rank, (raw, *values) in enumerate(sorted(rows)):
                    distances[query, rank] = self._scaled(raw)
                    for array, value in zip((ids, *texts), values, strict=True):
                        array[query, rank] = value
        return Neighbors(ids, distances, dict(zip(COLUMNS, texts, strict=True)))

    def rows(self, most: int, ids: Sequence[str] | None = None) -> Rows:
        """Return the rows of these ids, or any, and at most so many."""
        dimension = self._existing().dimension
        with self._user_errors("cannot be read"):
            rows = self._rows(most, None if ids is None else list(ids))
        names, vectors, *texts = zip(*rows, strict=True) if rows else ((),) * (2 + len(COLUMNS))
        matrix = np.array(vectors, np.float32).reshape(-1, dimension)
        return Rows(list(names), matrix, dict(zip(COLUMNS, map(list, texts), strict=True)))

    def check(self, dimension: int, model: str, what: str) -> None:
        """Raise a `UserError` where there is no table, or it is of another dimension or model than
        these vectors."""
        about = self._existing()
        if dimension != about.dimension:
            sizes = f"{dimension} dimensions, uri={self.address} has {about.dimension}"
            raise UserError(
                f"{what} have {sizes}: embed both by one model, or name another ?table=..."
            )
        check_same_model(about.model, model, f"uri={self.address} and the {what}")

    def _existing(self) -> About:
        if self.about is None:
            raise UserError(
                f"holds no table {self.address.table}: write it with tfdml index",
                uri=str(self.address),
            )
        return self.about

    def _placed(self, vectors: np.ndarray) -> np.ndarray:
        return np.asarray(unit_rows(vectors), np.float32) if self.distance == "cosine" else vectors

    @property
    def _by_product(self) -> bool:
        """Whether the database ranks by products, and not by Euclidean distances."""
        return self.distance in ("cosine", "dot")

    def _scaled(self, raw: float) -> float:
        """Return the distance of a squared Euclidean distance or of a negative product."""
        return {"euclidean": max(raw, 0.0) ** 0.5, "cosine": 1 + raw}.get(self.distance, raw)

    def _user_errors(self, what: str) -> contextlib.AbstractContextManager[None]:
        return user_errors(self._errors, f"{what}: {REASON}", uri=str(self.address))

    @abc.abstractmethod
    def _open(self) -> str | bytes | None:
        """Connect; return what the table keeps, empty where it is another's, None where there is
        none."""

    @abc.abstractmethod
    def _create(self, about: About) -> None:
        """Make the table."""

    @abc.abstractmethod
    def _upsert(self, rows: Rows) -> None:
        """Write at most `batch_rows` rows."""

    @abc.abstractmethod
    def _delete(self, ids: list[str]) -> int:
        """Remove rows, and count them."""

    @abc.abstractmethod
    def _nearest(self, vectors: np.ndarray, k: int, where: dict[str, str]) -> Iterable[list[tuple]]:
        """Yield the k nearest rows of each query: what `_scaled` takes, the id and the texts."""

    @abc.abstractmethod
    def _count(self) -> int:
        """Return the number of rows."""

    @abc.abstractmethod
    def _rows(self, most: int, ids: list[str] | None) -> list[tuple]:
        """Return rows: the id, the vector and the texts."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the connection."""


def connect(uri: str) -> GalleryDatabase:
    """Open a gallery where it is: `lancedb:///folder` or
    `pgvector://user:password@host:port/database`.

    Options follow as `?name=value&name=value`: `table` (`gallery`) and `distance` (`euclidean`, for
    a new gallery). The first `upsert` makes the table.

    Args:
        uri: The address.

    Returns:
        The gallery; close it, or use it in a `with`.

    Raises:
        UserError: The address is neither; its client is not installed; the server cannot be reached
            or refuses; the table is of something else, or was made with another distance. No
            message holds a password.

    Example:
        >>> import tempfile, numpy as np
        >>> folder = tempfile.TemporaryDirectory()
        >>> with connect(f"lancedb://{folder.name}/cars") as gallery:
        ...     vectors = np.array([[0.0, 1.0], [1.0, 0.0]])
        ...     gallery.upsert(["a", "b"], vectors, {"class": ["bus", "coupe"]})
        ...     neighbors = gallery.search(np.array([[0.9, 0.1]]), k=1)
        >>> neighbors.ids.tolist(), neighbors.columns["class"].tolist()
        ([['b']], [['coupe']])
    """
    address = parse(uri)
    scheme = address.parts.scheme
    with user_errors(ImportError, f"{REASON}; pip install 'tfdml[{scheme}]'", uri=str(address)):
        module = importlib.import_module(f"tfdml.retrieval.{scheme}_gallery")
    return module.Gallery(address)


@dataclasses.dataclass(frozen=True)
class IndexCounts:
    """What became of embeddings that were indexed.

    Args:
        added: Rows that the gallery lacked.
        replaced: Rows of other embeddings with the same ids.
        present: Rows that were there already.
    """

    added: int
    replaced: int
    present: int


def index_embeddings(
    gallery: GalleryDatabase,
    stored: StoredEmbeddings,
    prefix: str = "",
    truncate_dim: int = 0,
    replace: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> IndexCounts:
    """Write the embeddings that a gallery lacks.

    Rows are written `gallery.batch_rows` at a time. After a kill, the same call writes the rest. A
    row's `source` identifies the embeddings by their checksums.

    Args:
        gallery: Where to.
        stored: What. The name of each image is its id.
        prefix: Put before every name, for an id.
        truncate_dim: How many first dimensions are written, scaled to length 1; 0: all, as they
            are.
        replace: Replace rows of other embeddings that have the same ids.
        progress: Called with how many rows are written, of how many.

    Raises:
        UserError: Names occur twice, there are fewer dimensions, the gallery is of another
            dimension or model, or an id is that of other embeddings, and `replace` is not set;
            nothing is written then. Or the database fails.

    Example:
        >>> with connect(f"lancedb://{os.path.abspath('galleries')}") as gallery:
        ...     index_embeddings(gallery, read_embeddings("embeddings/cars")).added
        256
    """
    ids = [f"{prefix}{name}" for name in stored.names]
    if len(set(ids)) < len(ids):
        raise UserError(f"{stored.source}: {len(ids) - len(set(ids)):,} names occur more than once")

    def vectors(rows: Any) -> np.ndarray:
        return (
            truncate(stored.embeddings[rows], truncate_dim)
            if truncate_dim
            else stored.embeddings[rows]
        )

    model = (
        f"{truncate_dim} dimensions of {stored.model}"
        if stored.model and truncate_dim
        else stored.model
    )
    files = stored.manifest.get("files") or {"file": sha256_of(Path(stored.source))}
    source = hashlib.sha256(
        json.dumps([files, prefix, truncate_dim], sort_keys=True).encode()
    ).hexdigest()[:16]
    sources: dict[str, str] = {}
    dimension = vectors(slice(1)).shape[1]
    if gallery.about is not None:
        gallery.check(dimension, model, stored.source)
        for block in row_blocks(len(ids), gallery.batch_rows):
            present = gallery.rows(len(ids), ids[block])
            sources |= zip(present.ids, present.columns["source"], strict=True)
    others = [row for row, name in enumerate(ids) if sources.get(name, source) != source]
    if others and not replace:
        count = f"{len(others):,} ids of {stored.source}, of other embeddings, such as"
        advice = "set replace=true to replace these rows, or another prefix to keep both"
        raise UserError(f"holds {count} {ids[others[0]]}: {advice}", uri=str(gallery.address))
    rows = np.array([row for row, name in enumerate(ids) if sources.get(name) != source], int)
    texts = {"path": stored.names, "class": stored.classes, "role": stored.roles}
    for block in row_blocks(len(rows), gallery.batch_rows):
        part = rows[block]
        columns = {
            name: [str(of[row]) for row in part] for name, of in texts.items() if of is not None
        }
        columns["source"] = [source] * len(part)
        gallery.upsert([ids[row] for row in part], vectors(part), columns, model=model)
        progress(block.stop, len(rows))
    return IndexCounts(len(rows) - len(others), len(others), len(ids) - len(rows))
