"""Milvus Lite, embedded: a folder, by the package milvus-lite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from milvus_lite import CollectionSchema, DataType, FieldSchema, MilvusLite, MilvusLiteError

from tfdml.retrieval.database import About, GalleryDatabase
from tfdml.retrieval.rows import LONGEST_ID, LONGEST_TEXT, Rows

_KEY = "tfdml"
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})
_TYPES = {"exact": "FLAT", "ivf": "IVF_FLAT", "hnsw": "HNSW"}


class MilvusGallery(GalleryDatabase):
    """A gallery in Milvus Lite.

    Args:
        address: `milvus:///file.db`; one process at a time has it.
    """

    _errors = (MilvusLiteError, OSError, ValueError, TypeError, RuntimeError)
    batch_rows = 2000
    _database: Any = None
    _collection: Any = None

    def _open(self) -> str | bytes | None:
        if not os.path.isdir(self.address.path):
            return None
        self._database = MilvusLite(self.address.path)
        if not self._database.has_collection(self.address.table):
            return None
        self._collection = self._database.get_collection(self.address.table)
        return (self._collection.schema.properties or {}).get(_KEY, "")

    def _create(self, about: About) -> None:
        self._database = self._database or MilvusLite(self.address.path)
        columns = [
            FieldSchema(name, DataType.INT64)
            if kind == "integer"
            else FieldSchema(name, DataType.VARCHAR, max_length=LONGEST_TEXT)
            for name, kind in about.attributes.items()
        ]
        schema = CollectionSchema(
            [
                FieldSchema("id", DataType.VARCHAR, is_primary=True, max_length=LONGEST_ID),
                FieldSchema("vector", DataType.FLOAT_VECTOR, dim=about.dimension),
                *columns,
            ],
            properties={_KEY: about.text()},
        )
        self._collection = self._database.create_collection(self.address.table, schema)

    def _upsert(self, rows: Rows) -> None:
        names = ["id", "vector", *rows.attributes]
        columns = (rows.ids, rows.vectors.tolist(), *rows.attributes.values())
        self._collection.upsert([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)])

    def _delete(self, ids: list[str]) -> int:
        there = self._count_ids(ids)
        self._collection.delete(ids)
        return there

    def _count_ids(self, ids: list[str]) -> int:
        return len(self._collection.get(ids, output_fields=["id"]))

    def _nearest(self, vectors: np.ndarray, k: int, conditions: dict[str, Any]) -> list[Rows]:
        assert self.about is not None
        self._prepare()
        effort = self.address.options.get("effort")
        tuning: dict[str, Any] = {}
        if self.address.index == "hnsw":
            tuning = {"ef": max(effort or 0, k)}
        elif effort:
            tuning = {"nprobe": effort}
        answers = self._collection.search(
            vectors.tolist(),
            k,
            "IP" if self._by_product else "L2",
            expr=_where(conditions) or None,
            output_fields=["vector", *self.about.attributes],
            search_params=tuning or None,
        )
        return [self._read([{"id": one["id"], **one["entity"]} for one in answer]) for answer in answers]

    def _prepare(self) -> None:
        """The index that the address names, or none, and the rows in memory."""
        wanted = _TYPES[self.address.index or "exact"]
        found = self._collection.get_index_info("vector")
        if found is None or found["index_type"] != wanted:
            if found is not None:
                self._collection.release()
                self._collection.drop_index("vector")
            self._collection.create_index(
                "vector",
                {"index_type": wanted, "metric_type": "IP" if self._by_product else "L2", "params": self._built_by()},
            )
        if self._collection.load_state != "loaded":
            self._collection.load()

    def _built_by(self) -> dict[str, int]:
        if self.address.index == "ivf":
            # Of each of the files that the rows lie in.
            return {"nlist": self.address.option("lists", 128)}
        return {"M": self.address.option("links", 16)} if self.address.index else {}

    def _count(self, conditions: dict[str, Any]) -> int:
        if not conditions:
            return int(self._collection.num_entities)
        return len(self._collection.query(_where(conditions), output_fields=["id"]))

    def _rows(self) -> Iterator[Rows]:
        last = ""
        while rows := self._collection.query(f"id > {_quoted(last)}", limit=10 * self.batch_rows, order_by_pk=True):
            yield self._read(rows)
            last = rows[-1]["id"]

    def _read(self, rows: list[dict[str, Any]]) -> Rows:
        assert self.about is not None
        vectors = np.array([row["vector"] for row in rows], np.float32).reshape(-1, self.about.dimension)
        attributes = {name: [row[name] for row in rows] for name in self.about.attributes}
        return Rows([row["id"] for row in rows], vectors, attributes)

    def _optimize(self) -> None:
        self._collection.flush()
        self._prepare()

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()


def _quoted(value: Any) -> str:
    return str(value) if isinstance(value, int) else f'"{value.translate(_ESCAPED)}"'


def _where(conditions: dict[str, Any]) -> str:
    return " and ".join(f"{name} == {_quoted(value)}" for name, value in conditions.items())
