"""LanceDB, embedded: a folder of Lance files, nothing to start."""

import contextlib
import glob
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

# What its library in Rust logs to the error stream, of a table that is new and of columns to come.
os.environ.setdefault("LANCE_LOG", "error")

import lancedb
import pyarrow as pa
from lancedb.index import IvfFlat

from tfdml.errors import counted
from tfdml.io.files import locked
from tfdml.retrieval.databases import WritableGallery
from tfdml.retrieval.exact import row_blocks
from tfdml.retrieval.galleries import COLUMNS, LISTED_AT_ONCE, Condition, Rows

_KEY = b"tfdml"
# Of a search by an index: the fewest partitions that are searched, their share of sqrt(N), and
# candidates for each neighbor where vectors are compressed.
_FEWEST_PARTITIONS = 50
_SHARE_OF_PARTITIONS = 0.2
_CANDIDATES = 10
# In the metadata of a field: LanceDB then repeats a merge that another one has overtaken, and never
# inserts an id twice.
_PRIMARY_KEY = {"lance-schema:unenforced-primary-key": "true"}


class DatabaseGallery(WritableGallery):
    """A gallery in LanceDB. A lock keeps writers apart.

    Args:
        address: `lancedb:///folder`.
    """

    _errors = (OSError, ValueError, RuntimeError)
    batch_rows = 50_000

    def _open(self) -> None:
        """LanceDB has nothing to connect to."""

    def _table(self) -> Any:
        """Return the table as it is now; None where there is none.

        A table that is kept open would not see what others write. A writer that was killed before
        its first commit leaves files without a manifest.
        """
        return self._database().open_table(self.place.table) if self._manifests() else None

    def _manifests(self) -> set[str]:
        """Return the file of each version of the table."""
        folder = os.path.join(self.place.path, f"{self.place.table}.lance", "_versions")
        return set(glob.glob(f"{glob.escape(folder)}/*.manifest"))

    def _database(self) -> Any:
        return lancedb.connect(self.place.path)

    def _comment(self) -> str | bytes | None:
        table = self._table()
        if table is None:
            return None
        schema = table.schema
        comment = (schema.metadata or {}).get(_KEY, b"")
        if not comment:  # a table of something else
            return b""
        # That of a field can be replaced, that of the table cannot.
        return (schema.field("model").metadata or {}).get(_KEY, comment)

    def _write_comment(self, text: str) -> None:
        self._table().update_field_metadata({"path": "model", "metadata": {_KEY.decode(): text}})

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        os.makedirs(self.place.path, exist_ok=True)
        with locked(self.place.path, "uri", f".{self.place.table}.lock", wait=True):
            before = self._manifests()
            try:
                yield
            except BaseException:
                # A full disk has room for no further version that would restore the last one.
                for path in self._manifests() - before:
                    os.unlink(path)
                raise

    def _models(self) -> set[str]:
        table = self._table()
        known = table.search().where("model != ''").select(["model"]).limit(1).to_list()
        models = {row["model"] for row in known}
        if table.count_rows("model = ''"):
            models.add("")
        return models

    def _write(self, rows: Rows) -> None:
        table = self._table()
        if table is None:
            data = _arrow(rows, self._schema(rows.vectors.shape[1]))
            self._database().create_table(self.place.table, data=data)
        else:
            merge = table.merge_insert("id")
            merge = merge.when_matched_update_all().when_not_matched_insert_all()
            merge.execute(_arrow(rows, table.schema))
        self._check_written(rows)

    def _check_written(self, rows: Rows) -> None:
        """Read rows back: where a disk is full, LanceDB commits files that it has cut."""
        vectors = dict(zip(rows.ids, rows.vectors, strict=True))
        for part in row_blocks(len(rows.ids), LISTED_AT_ONCE):
            condition = Condition("id", "in", rows.ids[part])
            for name, vector in self._select(("id", "vector"), [condition]):
                if np.array_equal(vector, vectors[name]):
                    del vectors[name]
        if vectors:
            raise OSError(f"{counted(len(vectors), 'row')} cannot be read back")

    def _schema(self, dimension: int) -> pa.Schema:
        columns = [pa.field(name, pa.string(), False) for name in COLUMNS]
        vector = pa.field("vector", pa.list_(pa.float32(), dimension), False)
        name = pa.field("id", pa.string(), False, metadata=_PRIMARY_KEY)
        return pa.schema([name, vector, *columns], {_KEY: self._new_comment(dimension).encode()})

    def _delete(self, conditions: list[Condition]) -> int:
        count = int(self._table().delete(_expression(conditions)).num_deleted_rows)
        # As `_check_written`: this reads which rows are deleted.
        if self._table().count_rows(_expression(conditions)):
            raise OSError("rows are left that were deleted")
        return count

    def _nearest(
        self,
        queries: np.ndarray,
        k: int,
        conditions: list[Condition],
        exact: bool,
        by_product: bool,
    ) -> Iterable[list[tuple]]:
        query = self._table().search(list(queries), vector_column_name="vector").limit(k)
        query = query.distance_type(_distance_type(by_product))
        query = query.select(["id", *COLUMNS, "_distance"])
        index = None if exact else self._index()
        if index is None:
            query = query.bypass_vector_index()
        else:
            partitions = int(_SHARE_OF_PARTITIONS * math.sqrt(self._count()))
            query = query.nprobes(max(_FEWEST_PARTITIONS, partitions))
            if index.index_type != "IVF_FLAT":
                # Another finds candidates by few bits; distances are those of their vectors.
                query = query.refine_factor(_CANDIDATES)
        if conditions:
            query = query.where(_expression(conditions), True)
        answers: list[list[tuple]] = [[] for _ in queries]
        for row in query.to_arrow().to_pylist():
            # Of products LanceDB returns 1 - product.
            raw = row["_distance"] - 1 if by_product else row["_distance"]
            texts = [row[name] for name in COLUMNS]
            answers[row.get("query_index", 0)].append((raw, row["id"], *texts))
        return answers

    def _index(self) -> Any:
        """Return the index of the vectors; None where there is none."""
        for index in self._table().list_indices():
            if index.columns == ["vector"]:
                return self._table().index_stats(index.name)
        return None

    def _has_index(self, by_product: bool) -> bool:
        index = self._index()
        return index is not None and index.distance_type == _distance_type(by_product)

    def _count_unindexed(self) -> int:
        return int(self._index().num_unindexed_rows)

    def _build_index(self, by_product: bool) -> None:
        config = IvfFlat(
            distance_type=_distance_type(by_product), num_partitions=math.isqrt(self._count())
        )
        self._table().create_index("vector", config=config)

    def _rows_at(self, places: np.ndarray) -> tuple[list[str], np.ndarray]:
        table = self._table().take_offsets(places.tolist()).select(["id", "vector"]).to_arrow()
        return table["id"].to_pylist(), np.asarray(_values(table["vector"]))

    def _count(self) -> int:
        return int(self._table().count_rows())

    def _select(
        self, names: Sequence[str], conditions: list[Condition], most: int | None = None
    ) -> list[tuple]:
        table = self._table()
        if table is None or most == 0:
            return []
        query = table.search().select(list(names))
        # Without a limit LanceDB has one of its own; of 0 it makes none.
        query = query.limit(table.count_rows() + 1 if most is None else most)
        if conditions:
            query = query.where(_expression(conditions))
        result = query.to_arrow()
        return list(zip(*(_values(result[name]) for name in names), strict=True))


def _distance_type(by_product: bool) -> Literal["l2", "dot"]:
    return "dot" if by_product else "l2"


def _values(column: pa.ChunkedArray) -> Any:
    """Return the texts or the vectors of a column."""
    if pa.types.is_string(column.type):
        return column.to_pylist()
    if not len(column):
        return []
    flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return flat.reshape(len(column), -1)


def _arrow(rows: Rows, schema: pa.Schema) -> pa.Table:
    flat = pa.array(rows.vectors.reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(flat, rows.vectors.shape[1])
    columns = {"id": rows.ids, "vector": vectors, **rows.columns}
    return pa.table(columns).select(schema.names).cast(schema)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _expression(conditions: list[Condition]) -> str:
    """Return conditions in LanceDB's SQL."""
    parts = []
    for column, operator, value in conditions:
        if operator == "in":
            parts.append(f"`{column}` IN ({', '.join(map(_quoted, value))})")
        elif operator == "starts":
            parts.append(f"starts_with(`{column}`, {_quoted(value)})")
        else:
            parts.append(f"`{column}` {operator} {_quoted(value)}")
    return " AND ".join(parts)
