"""The face of every gallery: checks at the edge, and one order of what is found whichever database finds it."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfdml.arguments import integer
from tfdml.errors import UserError, short_message
from tfdml.evaluation.search.scoring import unit_rows
from tfdml.manifests import fields, parse_json
from tfdml.retrieval.address import Address
from tfdml.retrieval.ranking import SPARE, ranked
from tfdml.retrieval.rows import Rows, checked_attributes, checked_filter, checked_ids, checked_vectors

# The largest k; and how many candidates are fetched at most where images at one distance crowd.
MOST = 4096
_MOST_CANDIDATES = 4 * MOST
# Numbers of candidates' vectors that are held at once.
_HELD = 2**24
_VERSION = 1


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
        """What `text` wrote.

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
class Neighbours:
    """What a search found: row i holds the neighbours of query i, nearest first, equally near ones by id.

    Args:
        ids: (N, k) str objects, None where fewer than k rows were found.
        distances: (N, k) float32, as `nearest_neighbours` measures them; infinite where there is no id.
        attributes: (N, k) objects by name, None likewise.
    """

    ids: np.ndarray
    distances: np.ndarray
    attributes: dict[str, np.ndarray]


class GalleryDatabase(abc.ABC):
    """A gallery in a database: rows of an id, a vector and attributes; a context manager. Made by `connect`.

    - A score is the distance that `nearest_neighbours` gives, float32: `euclidean`, `sqeuclidean`, `cosine`
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
                    raise UserError(
                        f"`uri={address}` was made with distance={self.about.distance}, not {address.distance}; leave "
                        "the distance out, or name another table by ?table=..."
                    )
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
            raise UserError(
                f"`uri={self.address}` holds the attributes {_listed(self.about.attributes)}; these rows have "
                f"{_listed(kinds)}"
            )
        with self._as_user_error("cannot be written"):
            if self.about is None:
                about = About(self.distance, rows.shape[1], dict(sorted(kinds.items())))
                self._create(about)
                self.about = about
            for start in range(0, len(names), self.batch_rows):
                part = slice(start, start + self.batch_rows)
                piece = {name: columns[name][part] for name in self.about.attributes}
                self._upsert(Rows(names[part], self._placed(rows[part]), piece))

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
        gone = 0
        with self._as_user_error("cannot be written"):
            for start in range(0, len(names), 1000):
                gone += self._delete(names[start : start + 1000])
        return gone

    def search(self, vectors: Any, k: int = 10, filter: Mapping[str, Any] | None = None) -> Neighbours:
        """The k nearest rows of every query, nearest first.

        Args:
            vectors: (N, d) queries, normalised or not.
            k: How many neighbours, 1 .. 4,096.
            filter: The values that attributes must equal; None: all rows.

        Raises:
            UserError: There is no table; queries are of another dimension or not finite; k is out of range; the filter
                names no attribute; the table has no index of the kind and with the parameters of the address; or the
                database fails.
        """
        about = self._existing()
        try:
            k = integer("`k`", k, at_least=1, at_most=MOST)
        except ValueError as error:
            raise UserError(str(error)) from None
        asked = self._placed(checked_vectors(vectors, "query embeddings", about.dimension))
        conditions = checked_filter(filter, about.attributes)
        shape = (len(asked), k)
        found = Neighbours(
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
        self, found: Neighbours, asked: np.ndarray, pending: np.ndarray, fetch: int, conditions: dict[str, Any]
    ) -> np.ndarray:
        """Fetch candidates of the pending queries and rank them; which queries need more of them."""
        again = []
        k, last = found.ids.shape[1], self.approximate or fetch >= _MOST_CANDIDATES
        step = max(1, _HELD // (fetch * asked.shape[1]))
        for start in range(0, len(pending), step):
            block = pending[start : start + step]
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

    def rows(self) -> Iterator[Rows]:
        """All rows, some at a time, in the database's own order; for `cosine` with vectors of length 1.

        Raises:
            UserError: There is no table, or the database fails.
        """
        self._existing()
        with self._as_user_error("cannot be read"):
            yield from self._rows()

    def optimize(self) -> None:
        """Tidy the files, and build the approximate index that the address names. Without an index it may still help.

        Raises:
            UserError: There is no table, too few rows for the index, or the database fails.
        """
        self._existing()
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
            raise UserError(f"`uri={self.address}` is closed: connect anew")

    def _existing(self) -> About:
        self._check_open()
        if self.about is None:
            raise UserError(
                f"`uri={self.address}` holds no table {self.address.table}: write it with bin/index or `upsert` first"
            )
        return self.about

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
        raise UserError(
            f"`uri={address}` has no index {wanted} (it has {there}): build it with bin/index or `optimize`, or leave "
            "`index` out for exact search"
        )

    def _placed(self, vectors: np.ndarray) -> np.ndarray:
        """Vectors as the database keeps them, and is asked for."""
        return np.asarray(unit_rows(vectors), np.float32) if self.distance == "cosine" else vectors

    @property
    def _by_product(self) -> bool:
        """Whether the database ranks by products, and not by Euclidean distances."""
        return self.distance in ("cosine", "dot")

    @contextlib.contextmanager
    def _as_user_error(self, what: str) -> Iterator[None]:
        """What the client raises, as one line without the password."""
        try:
            yield
        except UserError:
            raise
        except self._errors as error:
            message = short_message(error, named=not str(error))
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
        """The k nearest rows of each query, in any order; fewer where there are no more."""

    @abc.abstractmethod
    def _count(self, conditions: dict[str, Any]) -> int:
        """Rows with these values."""

    @abc.abstractmethod
    def _rows(self) -> Iterator[Rows]:
        """All rows."""

    @abc.abstractmethod
    def _indexes(self) -> list[tuple[str, dict[str, int]]]:
        """The approximate indexes of the vectors: the kind of each, and the parameters that the database reports."""

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
