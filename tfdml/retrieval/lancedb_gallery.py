"""LanceDB, embedded: a folder of Lance files, nothing to start."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

# What its library in Rust logs to the error stream, of a table that is new and of columns to come.
os.environ.setdefault("LANCE_LOG", "error")

import lancedb
import pyarrow as pa

from tfdml.io.files import locked
from tfdml.retrieval.exact import row_blocks
from tfdml.retrieval.galleries import COLUMNS, About, GalleryDatabase, Rows

_KEY = b"tfdml"
_LISTED_AT_ONCE = 10_000


class Gallery(GalleryDatabase):
    """A gallery in LanceDB.

    Args:
        address: `lancedb:///folder`.
    """

    _errors = (OSError, ValueError, RuntimeError)
    batch_rows = 50_000
    _table: Any = None

    def _open(self) -> str | bytes | None:
        # LanceDB has no error of its own for a table that is not there.
        if not os.path.isdir(os.path.join(self.address.path, f"{self.address.table}.lance")):
            return None
        self._table = lancedb.connect(self.address.path).open_table(self.address.table)
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
        columns = [pa.field(name, pa.string(), False) for name in COLUMNS]
        vector = pa.field("vector", pa.list_(pa.float32(), about.dimension), False)
        schema = pa.schema(
            [pa.field("id", pa.string(), False), vector, *columns], {_KEY: about.text().encode()}
        )
        with self._writing():
            self._table = lancedb.connect(self.address.path).create_table(
                self.address.table, schema=schema
            )

    def _upsert(self, rows: Rows) -> None:
        vectors = pa.FixedSizeListArray.from_arrays(
            pa.array(rows.vectors.reshape(-1)), rows.vectors.shape[1]
        )
        table = pa.table({"id": rows.ids, "vector": vectors, **rows.columns}).cast(
            self._table.schema
        )
        with self._writing():
            self._table.merge_insert(
                "id"
            ).when_matched_update_all().when_not_matched_insert_all().execute(table)

    def _delete(self, ids: list[str]) -> int:
        with self._writing():
            parts = row_blocks(len(ids), _LISTED_AT_ONCE)
            return sum(
                int(self._table.delete(_listed(ids[part])).num_deleted_rows) for part in parts
            )

    def _nearest(self, vectors: np.ndarray, k: int, where: dict[str, str]) -> Iterable[list[tuple]]:
        query = self._table.search(list(vectors), vector_column_name="vector").limit(k)
        query = query.distance_type("dot" if self._by_product else "l2").select(
            ["id", *COLUMNS, "_distance"]
        )
        query = query.bypass_vector_index()
        if where:
            query = query.where(
                " AND ".join(f"`{name}` = {_quoted(value)}" for name, value in where.items()), True
            )
        answers: list[list[tuple]] = [[] for _ in vectors]
        for row in query.to_arrow().to_pylist():
            # Of products LanceDB returns 1 - product.
            raw = row["_distance"] - 1 if self._by_product else row["_distance"]
            answers[row.get("query_index", 0)].append(
                (raw, row["id"], *(row[name] for name in COLUMNS))
            )
        return answers

    def _count(self) -> int:
        return int(self._table.count_rows())

    def _rows(self, most: int, ids: list[str] | None) -> list[tuple]:
        rows: list[tuple] = []
        for where in (
            [None]
            if ids is None
            else [_listed(ids[part]) for part in row_blocks(len(ids), _LISTED_AT_ONCE)]
        ):
            query = self._table.search().limit(most - len(rows)).select(["id", "vector", *COLUMNS])
            table = (query.where(where) if where else query).to_arrow()
            vectors = table["vector"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            vectors = vectors.reshape(len(table), -1) if len(table) else []
            texts = (table[name].to_pylist() for name in ("id", *COLUMNS))
            rows += [
                (name, vector, *others)
                for vector, name, *others in zip(vectors, *texts, strict=True)
            ]
        return rows

    def close(self) -> None:
        """See `GalleryDatabase.close`."""
        self._table = None


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _listed(ids: list[str]) -> str:
    return f"id IN ({', '.join(map(_quoted, ids))})"
