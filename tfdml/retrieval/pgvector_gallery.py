"""PostgreSQL with the extension vector: a gallery beside an application's other tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import psycopg
from pgvector.psycopg import register_vector
from psycopg import sql

from tfdml.errors import UserError
from tfdml.retrieval.database import About, GalleryDatabase, Rows

_TYPES = {"integer": "bigint", "text": "text"}
_MOST_EFFORT = 1000
# Of each kind of index, the extension's name, and the parameter by our name and by the extension's.
_INDEXES = {"ivf": ("ivfflat", "lists", "lists"), "hnsw": ("hnsw", "links", "m")}
_SECONDS = 10


class PostgresGallery(GalleryDatabase):
    """A gallery in PostgreSQL.

    Args:
        address: `pgvector://user:password@host:port/database`; with `?socket=/folder` over a socket of this machine. A
            password may also come from the variable PGPASSWORD or ~/.pgpass.
    """

    _errors = (psycopg.Error,)
    _connection: Any = None

    def _open(self) -> str | bytes | None:
        address = self.address
        told: dict[str, Any] = {
            "host": address.further.get("socket") or address.host,
            "port": address.port,
            "user": address.user,
            "password": address.password,
            "dbname": address.path.strip("/"),
        }
        self._connection = psycopg.connect(
            **{name: value for name, value in told.items() if value}, connect_timeout=_SECONDS, autocommit=True
        )
        if self._one("SELECT to_regclass({})", sql.Literal(address.table)) is None:
            return None
        register_vector(self._connection)
        self._set_up()
        return self._one("SELECT obj_description({}::regclass)", sql.Literal(address.table)) or ""

    def _one(self, text: str, *parts: Any) -> Any:
        return self._connection.execute(sql.SQL(text).format(*parts)).fetchone()[0]

    def _set_up(self) -> None:
        """What this session searches by: no index without one in the address, else the address's effort."""
        address, execute = self.address, self._connection.execute
        if not address.index:
            execute("SET enable_indexscan = off")
            return
        version = self._one("SELECT extversion FROM pg_extension WHERE extname = 'vector'")
        if address.index == "hnsw" and tuple(map(int, version.split(".")[:2])) >= (0, 8):
            execute("SET hnsw.iterative_scan = strict_order")
        if address.index == "ivf" and "effort" in address.options:
            execute(sql.SQL("SET ivfflat.probes = {}").format(address.option("effort", 1)))

    def _create(self, about: About) -> None:
        execute = self._connection.execute
        # Who may not create extensions may use one that is there.
        if self._one("SELECT count(*) FROM pg_extension WHERE extname = 'vector'") == 0:
            try:
                execute("CREATE EXTENSION IF NOT EXISTS vector")
            except psycopg.Error:
                raise UserError(
                    f"`uri={self.address}`: the database has no extension vector; have its owner run CREATE EXTENSION "
                    "vector"
                ) from None
        register_vector(self._connection)
        self._set_up()
        columns = [
            sql.SQL("{} {} NOT NULL").format(sql.Identifier(name), sql.SQL(_TYPES[kind]))
            for name, kind in about.attributes.items()
        ]
        made = sql.SQL("CREATE TABLE {} (").format(self._table) + sql.SQL(", ").join(
            [
                sql.SQL('id text COLLATE "C" PRIMARY KEY'),
                sql.SQL("vector vector({}) NOT NULL").format(about.dimension),
                *columns,
            ]
        )
        with self._connection.transaction():
            execute(made + sql.SQL(")"))
            execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(self._table, about.text()))

    @property
    def _table(self) -> sql.Identifier:
        return sql.Identifier(self.address.table)

    @property
    def _columns(self) -> list[str]:
        assert self.about is not None
        return ["id", "vector", *self.about.attributes]

    def _upsert(self, rows: Rows) -> None:
        assert self.about is not None
        names = [sql.Identifier(name) for name in self._columns]
        listed = sql.SQL(", ").join(names)
        replaced = sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(name) for name in names[1:])
        types = ["text", "vector", *({"integer": "int8", "text": "text"}[k] for k in self.about.attributes.values())]
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.execute(sql.SQL("CREATE TEMP TABLE tfdml_new (LIKE {}) ON COMMIT DROP").format(self._table))
            into = sql.SQL("COPY tfdml_new ({}) FROM STDIN WITH (FORMAT BINARY)").format(listed)
            with cursor.copy(into) as copy:
                copy.set_types(types)
                for row in zip(rows.ids, rows.vectors, *rows.attributes.values(), strict=True):
                    copy.write_row(row)
            cursor.execute(
                sql.SQL("INSERT INTO {} ({}) SELECT {} FROM tfdml_new ON CONFLICT (id) DO UPDATE SET {}").format(
                    self._table, listed, listed, replaced
                )
            )

    def _delete(self, ids: list[str]) -> int:
        statement = sql.SQL("DELETE FROM {} WHERE id = ANY(%s)").format(self._table)
        return int(self._connection.execute(statement, (ids,)).rowcount)

    def _nearest(self, vectors: np.ndarray, k: int, conditions: dict[str, Any]) -> list[Rows]:
        if self.address.index == "hnsw":
            effort = min(max(self.address.option("effort", 40), k), _MOST_EFFORT)
            self._connection.execute(sql.SQL("SET hnsw.ef_search = {}").format(effort))
        query = sql.SQL("SELECT {} FROM {} {} ORDER BY vector {} %s LIMIT {}").format(
            sql.SQL(", ").join(map(sql.Identifier, self._columns)),
            self._table,
            _where(conditions),
            sql.SQL("<#>" if self._by_product else "<->"),
            k,
        )
        values = tuple(conditions.values())
        with self._connection.cursor(binary=True) as cursor:
            return [self._read(cursor.execute(query, (*values, vector)).fetchall()) for vector in vectors]

    def _count(self, conditions: dict[str, Any]) -> int:
        query = sql.SQL("SELECT count(*) FROM {} {}").format(self._table, _where(conditions))
        return int(self._connection.execute(query, tuple(conditions.values())).fetchone()[0])

    def _rows(self) -> Iterator[Rows]:
        query = sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(map(sql.Identifier, self._columns)), self._table)
        with self._connection.transaction(), self._connection.cursor("tfdml_rows", binary=True) as cursor:
            cursor.execute(query)
            while rows := cursor.fetchmany(self.batch_rows):
                yield self._read(rows)

    def _read(self, rows: list[tuple]) -> Rows:
        assert self.about is not None
        ids, vectors, *columns = zip(*rows, strict=True) if rows else ((), (), *((),) * len(self.about.attributes))
        numbers = [vector.to_numpy() for vector in vectors]
        held = np.stack(numbers) if numbers else np.zeros((0, self.about.dimension), np.float32)
        return Rows(list(ids), held, dict(zip(self.about.attributes, map(list, columns), strict=True)))

    def _indexes(self) -> list[tuple[str, dict[str, int]]]:
        rows = self._connection.execute(
            "SELECT am.amname, coalesce(i.reloptions, '{}') FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid "
            "JOIN pg_am am ON am.oid = i.relam JOIN pg_opclass o ON o.oid = x.indclass[0] "
            "WHERE x.indrelid = %s::regclass AND x.indisvalid AND o.opcname = %s",
            (self.address.table, self._operators),
        ).fetchall()
        found = []
        for name, options in rows:
            kind, ours, theirs = next((kind, *names) for kind, (method, *names) in _INDEXES.items() if method == name)
            set_to = dict(option.split("=") for option in options)
            found.append((kind, {ours: int(set_to[theirs])} if theirs in set_to else {}))
        return found

    @property
    def _operators(self) -> str:
        return "vector_ip_ops" if self._by_product else "vector_l2_ops"

    def _optimize(self) -> None:
        address = self.address
        if address.index:
            name = sql.Identifier(f"{address.table}_tfdml")
            method, ours, theirs = _INDEXES[address.index]
            default = 16 if ours == "links" else max(1, round(2 * self._count({}) ** 0.5))
            execute = self._connection.execute
            # Indexes are built out of this, and fall to disk beyond it.
            execute("SET maintenance_work_mem = '1GB'")
            execute(sql.SQL("DROP INDEX IF EXISTS {}").format(name))
            execute(
                sql.SQL("CREATE INDEX {} ON {} USING {} (vector {}) WITH ({} = {})").format(
                    name,
                    self._table,
                    sql.SQL(method),
                    sql.SQL(self._operators),
                    sql.SQL(theirs),
                    address.option(ours, default),
                )
            )
        self._connection.execute(sql.SQL("VACUUM ANALYZE {}").format(self._table))

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _where(conditions: dict[str, Any]) -> sql.Composable:
    if not conditions:
        return sql.SQL("")
    return sql.SQL("WHERE ") + sql.SQL(" AND ").join(
        sql.SQL("{} = %s").format(sql.Identifier(name)) for name in conditions
    )
