"""Galleries in databases: the interface that each implements, checks of rows, the order of what is found, `connect`.

And where a gallery lives: a URI with the table, the distance and the parameters of an index.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import importlib
import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdml import arguments
from tfdml.arguments import integer
from tfdml.errors import REASON, UserError, short_message, user_errors
from tfdml.io.manifests import fields, parse_json
from tfdml.pairwise import DISTANCES
from tfdml.retrieval.exact import Space, check_embeddings, measure, row_blocks, unit_rows

TABLE = "gallery"
# Of tables and attributes.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")
# The options that every database takes; those of the kinds of index are integers.
_COMMON = ("table", "distance", "index")


@dataclasses.dataclass(frozen=True)
class Form:
    """What the URIs of one database may say.

    Args:
        place: How its address is written, for messages.
        indexes: The options of each kind of index that it has.
        has_host: Whether it may lie on a server, where the path is the name of a database; else in a file or folder.
        further: Options of its own, texts.
    """

    place: str
    indexes: Mapping[str, tuple[str, ...]]
    has_host: bool = False
    further: tuple[str, ...] = ()


_IVF, _HNSW = ("lists", "effort"), ("links", "effort")
_FORMS = {
    "lancedb": Form(
        "lancedb:///folder",
        {"ivf": _IVF, "ivf_pq": ("lists", "bytes", "effort", "refine"), "hnsw": ("lists", "links", "effort")},
    ),
    "pgvector": Form(
        "pgvector://user:password@host:port/database",
        {"ivf": _IVF, "hnsw": _HNSW},
        has_host=True,
        further=("socket",),
    ),
    "qdrant": Form("qdrant://:key@host:port or qdrant:///folder", {"hnsw": _HNSW}, has_host=True, further=("tls",)),
}
SCHEMES = tuple(_FORMS)


def is_gallery(text: str) -> bool:
    """Whether a text is the URI of a gallery, by its scheme.

    Example:
        >>> is_gallery("lancedb:///data/cars"), is_gallery("http://localhost:8501/v1/models/cars")
        (True, False)
    """
    return text.partition("://")[0] in SCHEMES and "://" in text


@dataclasses.dataclass(frozen=True)
class Address:
    """A URI, read.

    Args:
        scheme: Which database.
        host: The server; empty for files.
        port: Its port; None for the database's own.
        user: Who asks; empty for nobody in particular.
        password: Its password or key; in no text that is made of this.
        path: A file or folder, or the name of a database on the server.
        table: The table, collection or file that holds the gallery.
        distance: What near means; None: as in the gallery, and `euclidean` where it is new.
        index: The kind of approximate index; empty for exact search.
        options: The index's parameters, integers.
        further: Options of the database's own.

    `str()` gives the URI without user, password and options.
    """

    scheme: str
    host: str = ""
    port: int | None = None
    user: str = dataclasses.field(default="", repr=False)
    password: str = dataclasses.field(default="", repr=False)
    path: str = ""
    table: str = TABLE
    distance: str | None = None
    index: str = ""
    options: Mapping[str, int] = dataclasses.field(default_factory=dict)
    further: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}" + ("" if self.table == TABLE else f"?table={self.table}")

    def option(self, name: str, default: int) -> int:
        """Return a parameter of the index."""
        return self.options.get(name, default)


def shown(uri: str) -> str:
    """Return a URI as messages may show it: without user, password and options, however wrong it is.

    Example:
        >>> shown("pgvector://me:se@cret@db/cars?key=1")
        'pgvector://db/cars'
    """
    scheme, mark, rest = str(uri).partition("://")
    return scheme + mark + rest.rpartition("@")[2].partition("?")[0] if mark else "the address"


def parse(uri: str) -> Address:
    """Read a URI.

    Args:
        uri: Such as `pgvector://user:password@host/db?index=hnsw&links=16`.

    Raises:
        UserError: It says something else. The message has no part of it that may be secret.

    Example:
        >>> address = parse("lancedb:///data/cars?index=ivf&lists=100")
        >>> address.path, address.index, address.options
        ('/data/cars', 'ivf', {'lists': 100})
    """
    where = f"`uri={shown(uri)}`"
    scheme = str(uri).partition("://")[0]
    if "://" not in str(uri) or scheme not in _FORMS:
        places = ", ".join(form.place for form in _FORMS.values())
        raise UserError(f"{where}: unknown database; write one of {places}")
    form = _FORMS[scheme]
    try:
        parts = urllib.parse.urlsplit(uri)
        host, port = parts.hostname or "", parts.port
        user, password = (urllib.parse.unquote(text or "") for text in (parts.username, parts.password))
        given = urllib.parse.parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        if parts.fragment or "@" in parts.query:
            raise ValueError
    except ValueError:
        # What Python says of it may quote a password that holds a /, ? or #.
        advice = "with %2F, %40 and the like for signs of a password, and options as ?name=value&name=value"
        raise UserError(f"{where} cannot be read: write {form.place}, {advice}") from None
    path = urllib.parse.unquote(parts.path)
    if (parts.netloc and not form.has_host) or (not host and path in ("", "/")):
        raise UserError(f"{where}: write {form.place}")
    if twice := sorted(name for name, values in given.items() if len(values) > 1):
        raise UserError(f"{where}: the option {twice[0]} is there twice")
    options = {name: value for name, (value,) in given.items()}
    table, distance, index = options.get("table", TABLE), options.get("distance"), options.get("index", "")
    if not _NAME.fullmatch(table):
        raise UserError(f"{where}: a table's name is of a .. z, 0 .. 9 and _, a letter first, at most 60 of them")
    if distance is not None and distance not in DISTANCES:
        raise UserError(f"{where}: unknown distance {distance!r}; one of {', '.join(DISTANCES)}")
    if index and index not in form.indexes:
        known = f"{scheme} has {', '.join(form.indexes)}; leave it out for exact search"
        raise UserError(f"{where}: unknown index {index!r}; {known}")
    own = form.indexes.get(index, ())
    allowed = (*_COMMON, *own, *form.further)
    for name in options:
        if name not in allowed:
            raise UserError(f"{where}: unknown option {name!r:.40}; here it may be {', '.join(allowed)}")
    with user_errors(ValueError, f"{where}: {REASON}"):
        numbers = {name: integer(name, _as_number(options[name]), at_least=1) for name in own if name in options}
    further = {name: options[name] for name in form.further if name in options}
    return Address(scheme, host, port, user, password, path, table, distance, index, numbers, further)


def _as_number(text: str) -> int | str:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else text


# PostgreSQL's indexes of texts end at about 2,700 bytes, the others' later.
LONGEST_ID = 1000
LONGEST_TEXT = 65_535
# Databases sum squares in float32.
LARGEST = 1e15
_TAKEN = ("id", "vector")
_INT64 = np.iinfo(np.int64)

# Candidates fetched beyond k, so that a database's rounding cannot decide what is among the k.
SPARE = 4
# Of the squared lengths: how far off a database's float32 distances may be.
_ROUNDING = 1e-6
# The largest k; and how many candidates are fetched at most where images at one distance crowd.
MOST = 4096
_MOST_CANDIDATES = 4 * MOST
# Numbers of candidates' vectors that are held at once.
_HELD = 2**24
_VERSION = 1
# By scheme, which is also the extra and the beginning of the module's name.
_CLASSES = {"lancedb": "LanceGallery", "pgvector": "PostgresGallery", "qdrant": "QdrantGallery"}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a gallery.

    Args:
        ids: M names.
        vectors: (M, d) float32.
        attributes: M values each, by name.
    """

    ids: list[str]
    vectors: np.ndarray
    attributes: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.ids)


def checked_ids(ids: Any) -> list[str]:
    """Ids as a list of texts, each once.

    Raises:
        UserError: One is empty, no text, too long, or occurs twice.
    """
    if isinstance(ids, str):
        raise UserError("`ids` must be a list of texts, not one text")
    names = [name.item() if isinstance(name, np.str_) else name for name in ids]
    for name in names:
        _checked_text("an id", name, LONGEST_ID)
        if not name:
            raise UserError("an id of `ids` is empty")
    twice = [name for name, times in collections.Counter(names).items() if times > 1]
    if twice:
        raise UserError(f"{len(twice)} `ids` occur more than once, the first is {twice[0]}")
    return names


def checked_vectors(vectors: Any, what: str, dimension: int | None) -> np.ndarray:
    """Vectors as (N, d) float32.

    Raises:
        UserError: They are not (N, d) or not finite, of another dimension than the gallery, or too large.
    """
    checked = check_embeddings(vectors, what)
    if dimension is not None and checked.shape[1] != dimension:
        raise UserError(f"{what} have {checked.shape[1]} dimensions, the gallery {dimension}: embed both by one model")
    if max(checked.max(), -checked.min()) > LARGEST:
        raise UserError(f"{what} hold numbers beyond {LARGEST:g}, of which float32 cannot sum the squares")
    return checked


def checked_attributes(attributes: Mapping[str, Sequence[Any]] | None, count: int) -> dict[str, list[Any]]:
    """Attributes as lists of Python's integers or texts, one value per row.

    Raises:
        UserError: A name that databases do not take; not one value per row; values that are neither all integers nor
            all texts.
    """
    checked: dict[str, list[Any]] = {}
    for name, values in (attributes or {}).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN:
            raise UserError(f"the attribute {name!r:.40} must be of a .. z, 0 .. 9 and _, and neither id nor vector")
        column = values.tolist() if isinstance(values, np.ndarray) else list(values)
        if len(column) != count:
            raise UserError(f"the attribute {name} has {len(column)} values for {count} rows")
        kinds = {kind_of(name, value) for value in column}
        if len(kinds) > 1:
            raise UserError(f"the attribute {name} holds integers and texts: one of them in all rows")
        checked[name] = [int(value) if kinds == {"integer"} else str(value) for value in column]
    return checked


def kind_of(name: str, value: Any) -> str:
    """`"integer"` or `"text"`.

    Raises:
        UserError: It is neither, an integer beyond 64 bits, or a text that not every database holds.
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        if not _INT64.min <= value <= _INT64.max:
            raise UserError(f"the attribute {name} must fit 64 bits, which {value} does not")
        return "integer"
    _checked_text(f"the attribute {name}", value, LONGEST_TEXT)
    return "text"


def checked_filter(conditions: Mapping[str, Any] | None, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that rows must have.

    Raises:
        UserError: There is no such attribute, or it is of another type.
    """
    checked: dict[str, Any] = {}
    for name, value in (conditions or {}).items():
        if name not in kinds:
            known = f"it has {', '.join(kinds)}" if kinds else "it has none"
            raise UserError(f"`filter` names {name!r:.40}, which is no attribute of the gallery; {known}")
        if kind_of(name, value) != kinds[name]:
            raise UserError(f"`filter`: the attribute {name} is of type {kinds[name]}, which {value!r:.40} is not")
        checked[name] = int(value) if kinds[name] == "integer" else str(value)
    return checked


def _checked_text(what: str, value: Any, longest: int) -> None:
    with user_errors(ValueError, REASON):
        size = len(arguments.text(what, value).encode())
    if "\0" in value or size > longest:
        raise UserError(f"{what} must be at most {longest:,} bytes without a NUL among them; got {value[:40]!r}")


def ranked(query: np.ndarray, rows: Rows, k: int, distance: str) -> tuple[list[int], np.ndarray, bool]:
    """Return the k nearest of a query's candidates.

    Args:
        query: (d,) as the database was asked for it.
        rows: The candidates, in any order.
        k: How many to keep.
        distance: What near means.

    Returns:
        Which candidates, nearest first, equally near ones by id; their (k,) float32 distances; and whether a row that
        is no candidate, at least as far as they are by the database's own rounding, cannot be among the k.

    Example:
        >>> rows = Rows(["b", "a", "c"], np.array([[1.0], [1.0], [5.0]], np.float32), {})
        >>> ranked(np.array([0.0], np.float32), rows, 2, "euclidean")
        ([1, 0], array([1., 1.], dtype=float32), True)
    """
    if not len(rows):
        return [], np.zeros(0, np.float32), True
    space = Space(query[None], rows.vectors, distance, 1.0)
    measured = measure(space, slice(0, 1), np.arange(len(rows))[None])[0]
    order = sorted(range(len(rows)), key=lambda row: (measured[row], rows.ids[row]))[:k]
    lengths = float(query @ query) + float(np.einsum("md,md->m", rows.vectors, rows.vectors).max())
    settled = bool(measured.max() > measured[order[-1]] + _ROUNDING * lengths)
    return order, space.in_callers_scale(measured[order]), settled


@dataclasses.dataclass(frozen=True)
class About:
    """What a gallery's table says of itself.

    Args:
        distance: One of `tfdml.pairwise.DISTANCES`.
        dimension: d.
        attributes: `"integer"` or `"text"`, by name.
    """

    distance: str
    dimension: int
    attributes: Mapping[str, str]

    def text(self) -> str:
        """As JSON, for the database to keep."""
        return json.dumps({"tfdml": _VERSION, **dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def read(cls, text: str | bytes | None, where: str) -> About:
        """Return what `text` wrote.

        Raises:
            UserError: It is of something else.
        """
        if not text:
            raise UserError(f"{where} is a table of something else: name another by ?table=...")
        kinds = {"tfdml": int, "distance": str, "dimension": int, "attributes": dict}
        found = fields(parse_json(text, where), kinds, where)
        if found["tfdml"] != _VERSION:
            raise UserError(f"{where} was written by another version of tfdml; write it again")
        return cls(found["distance"], found["dimension"], found["attributes"])


@dataclasses.dataclass(frozen=True)
class Neighbors:
    """What a search found: row i holds the neighbors of query i, nearest first, equally near ones by id.

    Args:
        ids: (N, k) str objects, None where fewer than k rows were found.
        distances: (N, k) float32, as `nearest_neighbors` measures them; infinite where there is no id.
        attributes: (N, k) objects by name, None likewise.
    """

    ids: np.ndarray
    distances: np.ndarray
    attributes: dict[str, np.ndarray]


class GalleryDatabase(abc.ABC):
    """A gallery in a database: rows of an id, a vector and attributes; a context manager. Made by `connect`.

    - A score is the distance that `nearest_neighbors` gives, float32: `euclidean`, `sqeuclidean`, `cosine`
      (1 - cos, of which a zero vector has 0 with everything) or `dot` (the negative product). The database chooses the
      candidates, a few more than k; they are measured and ordered here, so that the order is the same in each.
    - Equal distances are ordered by id. Where candidates at one distance reach beyond those that were fetched, more
      are, up to 16,384.
    - A filter names values that attributes must equal, all of them.
    - For `cosine` the vectors are kept at length 1.
    - What `upsert` has written is durable when it returns.

    Args:
        address: Where it lives.

    Attributes:
        about: Distance, dimension and attributes; None while there is no table.

    Raises:
        UserError: As `connect`.
    """

    # What the client raises where the server or the files are at fault.
    _errors: tuple[type[Exception], ...] = (OSError,)
    # Rows that one call of the client takes well.
    batch_rows = 10_000

    def __init__(self, address: Address):
        self.address = address
        self.about: About | None = None
        self._closed = False
        self._index_checked = False
        with self._as_user_error("cannot be opened"):
            text = self._open()
        if text is not None:
            try:
                self.about = About.read(text or None, f"`uri={address}`")
                if address.distance not in (None, self.about.distance):
                    made = f"distance={self.about.distance}, not {address.distance}"
                    raise UserError(f"`uri={address}` was made with {made}; leave it out, or name another ?table=...")
            except UserError:
                self.close()
                raise

    def __enter__(self) -> GalleryDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return self.count()

    @property
    def approximate(self) -> bool:
        """Whether the search may miss rows."""
        return bool(self.address.index)

    @property
    def distance(self) -> str:
        """What near means here."""
        return self.about.distance if self.about else self.address.distance or "euclidean"

    def upsert(self, ids: Sequence[str], vectors: Any, attributes: Mapping[str, Sequence[Any]] | None = None) -> None:
        """Write rows; one whose id is there already replaces it whole. The first call makes the table.

        Args:
            ids: N names, each once: texts of 1 .. 1,000 bytes.
            vectors: (N, d).
            attributes: N integers or N texts each, by name; the same names and types in every call.

        Raises:
            UserError: The rows are not as above, of another dimension than the gallery, or have other attributes;
                nothing is written then. Or the database fails.
        """
        self._check_open()
        names = checked_ids(ids)
        rows = checked_vectors(vectors, "gallery embeddings", self.about.dimension if self.about else None)
        if len(rows) != len(names):
            raise UserError(f"there are {len(names)} ids for {len(rows)} vectors")
        columns = checked_attributes(attributes, len(names))
        kinds = {name: "integer" if isinstance(column[0], int) else "text" for name, column in columns.items()}
        if self.about is not None and kinds != dict(self.about.attributes):
            held, given = _listed(self.about.attributes), _listed(kinds)
            raise UserError(f"`uri={self.address}` holds the attributes {held}; these rows have {given}")
        with self._as_user_error("cannot be written"):
            if self.about is None:
                self.about = self._created(About(self.distance, rows.shape[1], dict(sorted(kinds.items()))))
            for part in row_blocks(len(names), self.batch_rows):
                piece = {name: columns[name][part] for name in self.about.attributes}
                self._upsert(Rows(names[part], self._placed(rows[part]), piece))

    def _created(self, about: About) -> About:
        """Make the table; where another writer has just made it, take it if it is alike."""
        try:
            self._create(about)
        except self._errors:
            text = self._open()
            if text is None or About.read(text, f"`uri={self.address}`") != about:
                raise
        return about

    def delete(self, ids: Sequence[str]) -> int:
        """Remove rows; unknown ids are passed over.

        Returns:
            How many there were.

        Raises:
            UserError: An id is no text, or the database fails.
        """
        self._check_open()
        names = checked_ids(ids)
        if self.about is None or not names:
            return 0
        with self._as_user_error("cannot be written"):
            return sum(self._delete(names[part]) for part in row_blocks(len(names), 1000))

    def search(self, vectors: Any, k: int = 10, filter: Mapping[str, Any] | None = None) -> Neighbors:
        """Return the k nearest rows of every query, nearest first.

        Args:
            vectors: (N, d) queries, normalized or not.
            k: How many neighbors, 1 .. 4,096.
            filter: The values that attributes must equal; None: all rows.

        Raises:
            UserError: There is no table; queries are of another dimension or not finite; k is out of range; the filter
                names no attribute; the table has no index of the kind and with the parameters of the address; or the
                database fails.
        """
        about = self.existing()
        with user_errors(ValueError, REASON):
            k = integer("`k`", k, at_least=1, at_most=MOST)
        asked = self._placed(checked_vectors(vectors, "query embeddings", about.dimension))
        conditions = checked_filter(filter, about.attributes)
        shape = (len(asked), k)
        found = Neighbors(
            np.full(shape, None, object),
            np.full(shape, np.inf, np.float32),
            {name: np.full(shape, None, object) for name in about.attributes},
        )
        fetch, pending = k + SPARE, np.arange(len(asked))
        with self._as_user_error("cannot be searched"):
            if self.approximate and not self._index_checked:
                self._require_index()
            while len(pending):
                pending = self._fill(found, asked, pending, fetch, conditions)
                fetch *= 2
        return found

    def _fill(
        self, found: Neighbors, asked: np.ndarray, pending: np.ndarray, fetch: int, conditions: dict[str, Any]
    ) -> np.ndarray:
        """Fetch candidates of the pending queries and rank them; which queries need more of them."""
        again = []
        k, last = found.ids.shape[1], self.approximate or fetch >= _MOST_CANDIDATES
        for part in row_blocks(len(pending), max(1, _HELD // (fetch * asked.shape[1]))):
            block = pending[part]
            for query, rows in zip(block, self._nearest(asked[block], fetch, conditions), strict=True):
                order, distances, settled = ranked(asked[query], rows, k, self.distance)
                if not (settled or last or len(rows) < fetch):
                    again.append(query)
                    continue
                found.distances[query, : len(order)] = distances
                for rank, row in enumerate(order):
                    found.ids[query, rank] = rows.ids[row]
                    for name, values in rows.attributes.items():
                        found.attributes[name][query, rank] = values[row]
        return np.array(again, np.int64)

    def count(self, filter: Mapping[str, Any] | None = None) -> int:
        """How many rows there are, or how many a filter leaves; 0 without a table.

        Raises:
            UserError: As `search`, for the filter and the database.
        """
        self._check_open()
        if self.about is None:
            return 0
        conditions = checked_filter(filter, self.about.attributes)
        with self._as_user_error("cannot be read"):
            return self._count(conditions)

    def rows(self, most: int) -> Rows:
        """Return the rows, at most so many, in an order of the database's own.

        Raises:
            UserError: There is no table, or the database fails.
        """
        self.existing()
        with self._as_user_error("cannot be read"):
            return self._rows(most)

    def optimize(self) -> None:
        """Tidy the files, and build the approximate index that the address names. Without an index it may still help.

        Raises:
            UserError: There is no table, too few rows for the index, or the database fails.
        """
        self.existing()
        self._index_checked = False
        with self._as_user_error("cannot be indexed"):
            self._optimize()

    def close(self) -> None:
        """End the connection; a second call does nothing."""
        if not self._closed:
            self._closed = True
            with self._as_user_error("cannot be closed"):
                self._close()

    def _check_open(self) -> None:
        if self._closed:
            raise UserError(f"`uri={self.address}` is closed: connect again")

    def existing(self) -> About:
        """Return what the table says of itself.

        Raises:
            UserError: There is none, or the gallery is closed.
        """
        self._check_open()
        if self.about is None:
            raise UserError(f"`uri={self.address}` holds no table {self.address.table}: write it with tfdml index")
        return self.about

    @property
    def _columns(self) -> list[str]:
        return ["id", "vector", *self.existing().attributes]

    def _require_index(self) -> None:
        """Raise a `UserError` where the database would search without the index of the address, or by another."""
        address, indexes = self.address, self._indexes()
        for kind, parameters in indexes:
            if kind == address.index and all(
                value == parameters.get(name, value) for name, value in address.options.items()
            ):
                self._index_checked = True
                return
        wanted = _with_parameters(address.index, address.options)
        there = ", ".join(_with_parameters(*index) for index in indexes) or "none"
        advice = "build it with tfdml index or `optimize`, or leave `index` out for exact search"
        raise UserError(f"`uri={address}` has no index {wanted} (it has {there}): {advice}")

    def _placed(self, vectors: np.ndarray) -> np.ndarray:
        """Vectors as the database keeps them, and is asked for."""
        return np.asarray(unit_rows(vectors), np.float32) if self.distance == "cosine" else vectors

    @property
    def _by_product(self) -> bool:
        """Whether the database ranks by products, and not by Euclidean distances."""
        return self.distance in ("cosine", "dot")

    @contextlib.contextmanager
    def _as_user_error(self, what: str) -> Iterator[None]:
        """Return what the client raises, as one line without the password."""
        try:
            yield
        except UserError:
            raise
        except self._errors as error:
            # LanceDB adds the line of its source.
            message = re.sub(r",? /\S+\.rs:\d+(:\d+)?", "", short_message(error, named=not str(error)))
            for secret in (self.address.password, urllib.parse.quote(self.address.password, safe="")):
                message = message.replace(secret, "***") if secret else message
            # Without the cause: a client's message may hold what the address does.
            raise UserError(f"`uri={self.address}` {what}: {message}") from None

    @abc.abstractmethod
    def _open(self) -> str | bytes | None:
        """Connect; what the table says of itself, empty where it is another's, None where there is none."""

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
    def _nearest(self, vectors: np.ndarray, k: int, conditions: dict[str, Any]) -> list[Rows]:
        """Return the k nearest rows of each query, in any order; fewer where there are no more."""

    @abc.abstractmethod
    def _count(self, conditions: dict[str, Any]) -> int:
        """Rows with these values."""

    @abc.abstractmethod
    def _rows(self, most: int) -> Rows:
        """Return at most so many rows."""

    @abc.abstractmethod
    def _indexes(self) -> list[tuple[str, dict[str, int]]]:
        """Return the approximate indexes: the kind of each, and the parameters that the database reports."""

    @abc.abstractmethod
    def _optimize(self) -> None:
        """See `optimize`."""

    @abc.abstractmethod
    def _close(self) -> None:
        """See `close`."""


def _with_parameters(kind: str, parameters: Mapping[str, int]) -> str:
    return "&".join([kind, *(f"{name}={value}" for name, value in parameters.items())])


def _listed(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in sorted(kinds.items())) or "none"


def connect(uri: str) -> GalleryDatabase:
    """Open a gallery where it lives.

    `lancedb:///folder`, `pgvector://user:password@host:port/database`, `qdrant://:key@host:port` (or
    `qdrant:///folder`, its client's local mode). Options follow as `?name=value&name=value`: `table` (`gallery`),
    `distance` (`euclidean`, for a new gallery) and, for approximate search, `index` with the parameters of its kind;
    without it the search is exact, whatever indexes are there.
    Nothing is written yet: the first `upsert` makes the table.

    Args:
        uri: The address.

    Returns:
        The gallery; close it, or use it in a `with`.

    Raises:
        UserError: The address is none of these; its client is not installed; the server cannot be reached or refuses;
            the table is of something else, or was made with another distance. No message holds a password.

    Example:
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as folder, connect(f"lancedb://{folder}/cars") as gallery:
        ...     gallery.upsert(["a", "b"], np.array([[0.0, 1.0], [1.0, 0.0]]), {"label": [3, 8]})
        ...     found = gallery.search(np.array([[0.9, 0.1]]), k=1)
        >>> found.ids.tolist(), found.attributes["label"].tolist()
        ([['b']], [[8]])
    """
    address = parse(uri)
    try:
        module = importlib.import_module(f"tfdml.retrieval.{address.scheme}_gallery")
        made = getattr(module, _CLASSES[address.scheme])
    except ImportError as error:
        if (error.name or "").startswith("tfdml"):
            raise
        missing = f"the package {error.name}" if isinstance(error, ModuleNotFoundError) else short_message(error)
        raise UserError(f"`uri={address}` needs {missing}: pip install 'tfdml[{address.scheme}]'") from error
    return made(address)
