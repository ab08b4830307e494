"""LanceDB, embedded: a folder of Lance files, nothing to start."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

# What its library in Rust logs to the error stream, of a table that is new and of columns to come.
os.environ.setdefault("LANCE_LOG", "error")

import lancedb
import pyarrow as pa
from lancedb.index import HnswFlat, IvfFlat, IvfPq

from tfdml.errors import UserError
from tfdml.io.files import locked
from tfdml.retrieval.database import About, GalleryDatabase, Rows

_KEY = b"tfdml"
# Product quantization learns 256 codes.
_CODES = 256
_INDEXES = {"ivf": IvfFlat, "ivf_pq": IvfPq, "hnsw": HnswFlat}
# What LanceDB calls them, without its underscores.
_KINDS = {"IVFFLAT": "ivf", "IVFPQ": "ivf_pq", "IVFHNSWFLAT": "hnsw"}
_CONFIGS = {"lists": "num_partitions", "bytes": "num_sub_vectors", "links": "m"}


class LanceGallery(GalleryDatabase):
    """A gallery in LanceDB.

    Args:
        address: `lancedb:///folder`.
    """

    _errors = (OSError, ValueError, RuntimeError)
    batch_rows = 50_000
    _database: Any = None
    _table: Any = None

    def _open(self) -> str | bytes | None:
        if not os.path.isdir(self.address.path):
            return None
        self._database = lancedb.connect(self.address.path)
        # LanceDB has no error of its own for a table that is not there.
        if not os.path.isdir(os.path.join(self.address.path, f"{self.address.table}.lance")):
            return None
        try:
            self._table = self._database.open_table(self.address.table)
        except ValueError:
            return None  # another writer is just making it
        return (self._table.schema.metadata or {}).get(_KEY, b"")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep other writers out: LanceDB would keep the rows of both where two insert one id."""
        os.makedirs(self.address.path, exist_ok=True)
        with locked(self.address.path, "uri", f".{self.address.table}.lock", wait=True):
            if self._table is not None:
                self._table.checkout_latest()
            yield

    def _create(self, about: About) -> None:
        self._database = self._database or lancedb.connect(self.address.path)
        kinds = {"integer": pa.int64(), "text": pa.string()}
        columns = [pa.field(name, kinds[kind], False) for name, kind in about.attributes.items()]
        vector = pa.field("vector", pa.list_(pa.float32(), about.dimension), False)
        schema = pa.schema([pa.field("id", pa.string(), False), vector, *columns], {_KEY: about.text().encode()})
        with self._writing():
            self._table = self._database.create_table(self.address.table, schema=schema)

    def _upsert(self, rows: Rows) -> None:
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.vectors.reshape(-1)), rows.vectors.shape[1])
        schema = self._table.schema
        table = pa.table({"id": rows.ids, "vector": vectors, **rows.attributes}).cast(schema)
        with self._writing():
            if not self._table.count_rows():
                self._table.add(table)
            else:
                self._table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(table)

    def _delete(self, ids: list[str]) -> int:
        with self._writing():
            return int(self._table.delete(f"id IN ({', '.join(map(_quoted, ids))})").num_deleted_rows)

    def _nearest(self, vectors: np.ndarray, k: int, conditions: dict[str, Any]) -> list[Rows]:
        names = [*self._columns, "_distance"]
        query = self._table.search(list(vectors), vector_column_name="vector").limit(k).select(names)
        query = query.distance_type("dot" if self._by_product else "l2")
        query = self._tuned(query) if self.approximate else query.bypass_vector_index()
        if conditions:
            query = query.where(_where(conditions), prefilter=True)
        found = query.to_arrow().combine_chunks()
        of_query = found["query_index"].to_numpy() if "query_index" in found.column_names else np.zeros(len(found), int)
        # One query's rows are in one piece.
        order = np.argsort(of_query, kind="stable")
        edges = np.searchsorted(of_query[order], np.arange(len(vectors) + 1))
        whole = found.take(pa.array(order)) if np.any(np.diff(of_query) < 0) else found
        return [self._read(whole.slice(a, b - a)) for a, b in itertools.pairwise(edges)]

    def _tuned(self, query: Any) -> Any:
        address = self.address
        if effort := address.options.get("effort"):
            query = query.ef(effort) if address.index == "hnsw" else query.nprobes(effort)
        return query.refine_factor(address.option("refine", 10)) if address.index == "ivf_pq" else query

    def _count(self, conditions: dict[str, Any]) -> int:
        return int(self._table.count_rows(_where(conditions) if conditions else None))

    def _rows(self, most: int) -> Rows:
        return self._read(self._table.search().limit(most).select(self._columns).to_arrow().combine_chunks())

    def _read(self, table: Any) -> Rows:
        about, vectors = self.existing(), table["vector"].combine_chunks()
        numbers = vectors.flatten().to_numpy(zero_copy_only=False).reshape(-1, about.dimension)
        attributes = {name: table[name].to_pylist() for name in about.attributes}
        return Rows(table["id"].to_pylist(), numbers, attributes)

    def _indexes(self) -> list[tuple[str, dict[str, int]]]:
        found = []
        for index in self._table.list_indices():
            if index.columns == ["vector"]:
                details = index.index_details or {}
                reported = {
                    "bytes": details.get("compression", {}).get("num_sub_vectors"),
                    "links": details.get("hnsw", {}).get("max_connections"),
                }
                parameters = {name: value for name, value in reported.items() if value is not None}
                found.append((_KINDS.get(index.index_type.replace("_", "").upper(), index.index_type), parameters))
        return found

    def _optimize(self) -> None:
        with self._writing():
            self._table.optimize()
        address = self.address
        if not address.index:
            return
        count = self._table.count_rows()
        if address.index == "ivf_pq" and count < _CODES:
            raise UserError(f"`uri={address}`: ivf_pq needs {_CODES} rows at least, and there are {count}")
        lists = address.option("lists", 0)
        if lists > count:  # LanceDB would build fewer, and say so in a log alone
            raise UserError(f"`uri={address}`: lists={lists} needs as many rows at least, and there are {count}")
        options: dict[str, Any] = {_CONFIGS[name]: value for name, value in address.options.items() if name in _CONFIGS}
        config = _INDEXES[address.index](distance_type="dot" if self._by_product else "l2", **options)
        with self._writing():
            self._table.create_index("vector", config=config)

    def _close(self) -> None:
        self._table = self._database = None


def _quoted(value: Any) -> str:
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def _where(conditions: dict[str, Any]) -> str:
    return " AND ".join(f"`{name}` = {_quoted(value)}" for name, value in conditions.items())
