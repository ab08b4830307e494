"""PostgreSQL with the extension vector: a gallery next to an application's other tables."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from tfdml.errors import user_errors
from tfdml.retrieval.database import About, GalleryDatabase, Rows
from tfdml.workarounds import own_symbols_first

with own_symbols_first():
    import psycopg
    from pgvector.psycopg import register_vector
    from psycopg import sql

_TYPES = {"integer": "bigint", "text": "text"}
_MOST_EFFORT = 1000
# Of each kind of index, the extension's name, and the parameter by our name and by the extension's.
_INDEXES = {"ivf": ("ivfflat", "lists", "lists"), "hnsw": ("hnsw", "links", "m")}
_SECONDS = 10
# Seconds that a server which stops or restarts is waited for.
_PATIENCE = 30.0
_Result = TypeVar("_Result")


def _waiting(method: Callable[..., _Result]) -> Callable[..., _Result]:
    """Have a method, which can be repeated, connect again where the connection was lost."""

    @functools.wraps(method)
    def repeated(self: Any, *arguments: Any) -> _Result:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                if self._connection.closed:
                    self._open()
                return method(self, *arguments)
            except psycopg.OperationalError:
                if not self._connection.closed or time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    return repeated


class PostgresGallery(GalleryDatabase):
    """A gallery in PostgreSQL.

    Args:
        address: `pgvector://user:password@host:port/database`; with `?socket=/folder` over a socket of this machine. A
            password may also come from the variable PGPASSWORD or ~/.pgpass.
    """

    _errors = (psycopg.Error,)
    _connection: Any = None

    def _open(self) -> str | bytes | None:
        self._close()
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
        if self._one("SELECT to_regclass(%s)", (address.table,)) is None:
            return None
        self._set_up()
        return self._one("SELECT obj_description(%s::regclass)", (address.table,)) or ""

    def _sql(self, text: str, **parts: Any) -> sql.Composed:
        """Return a statement, with the gallery's `{table}` and its `{columns}`, and other parts by name."""
        columns = sql.SQL(", ").join(map(sql.Identifier, self._columns if self.about else []))
        return sql.SQL(text).format(table=sql.Identifier(self.address.table), columns=columns, **parts)

    def _run(self, text: str, values: Sequence[Any] = (), **parts: Any) -> Any:
        return self._connection.execute(self._sql(text, **parts), values or None)

    def _one(self, text: str, values: Sequence[Any] = (), **parts: Any) -> Any:
        return self._run(text, values, **parts).fetchone()[0]

    def _set_up(self) -> None:
        """Set what this session searches by: no index without one in the address, else the address's effort."""
        address = self.address
        register_vector(self._connection)
        if not address.index:
            self._run("SET enable_indexscan = off")
            return
        version = self._one("SELECT extversion FROM pg_extension WHERE extname = 'vector'")
        if address.index == "hnsw" and tuple(map(int, version.split(".")[:2])) >= (0, 8):
            self._run("SET hnsw.iterative_scan = strict_order")
        if address.index == "ivf" and "effort" in address.options:
            self._run("SET ivfflat.probes = {effort}", effort=address.option("effort", 1))

    def _create(self, about: About) -> None:
        # Who may not create extensions may use one that is there.
        if self._one("SELECT count(*) FROM pg_extension WHERE extname = 'vector'") == 0:
            with user_errors(psycopg.Error, f"`uri={self.address}`: have the owner run CREATE EXTENSION vector"):
                self._run("CREATE EXTENSION IF NOT EXISTS vector")
        self._set_up()
        columns = [
            sql.SQL(", {} {} NOT NULL").format(sql.Identifier(name), sql.SQL(_TYPES[kind]))
            for name, kind in about.attributes.items()
        ]
        with self._connection.transaction():
            self._run(
                'CREATE TABLE {table} (id text COLLATE "C" PRIMARY KEY, '
                "vector vector({dimension}) NOT NULL{attributes})",
                dimension=about.dimension,
                attributes=sql.Composed(columns),
            )
            self._run("COMMENT ON TABLE {table} IS {about}", about=about.text())

    @_waiting
    def _upsert(self, rows: Rows) -> None:
        replaced = sql.SQL(", ").join(
            sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(name)) for name in self._columns[1:]
        )
        kinds = {"integer": "int8", "text": "text"}
        types = ["text", "vector", *(kinds[kind] for kind in self.existing().attributes.values())]
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.execute(self._sql("CREATE TEMP TABLE tfdml_new (LIKE {table}) ON COMMIT DROP"))
            with cursor.copy(self._sql("COPY tfdml_new ({columns}) FROM STDIN WITH (FORMAT BINARY)")) as copy:
                copy.set_types(types)
                for row in zip(rows.ids, rows.vectors, *rows.attributes.values(), strict=True):
                    copy.write_row(row)
            insert = "INSERT INTO {table} ({columns}) SELECT {columns} FROM tfdml_new ON CONFLICT (id) DO UPDATE SET "
            cursor.execute(self._sql(insert + "{replaced}", replaced=replaced))

    @_waiting
    def _delete(self, ids: list[str]) -> int:
        return int(self._run("DELETE FROM {table} WHERE id = ANY(%s)", (ids,)).rowcount)

    @_waiting
    def _nearest(self, vectors: np.ndarray, k: int, conditions: dict[str, Any]) -> list[Rows]:
        if self.address.index == "hnsw":
            effort = min(max(self.address.option("effort", 40), k), _MOST_EFFORT)
            self._run("SET hnsw.ef_search = {effort}", effort=effort)
        query = self._sql(
            "SELECT {columns} FROM {table} {where} ORDER BY vector {operator} %s LIMIT {k}",
            where=_where(conditions),
            operator=sql.SQL("<#>" if self._by_product else "<->"),
            k=k,
        )
        values = tuple(conditions.values())
        with self._connection.cursor(binary=True) as cursor:
            return [self._read(cursor.execute(query, (*values, vector)).fetchall()) for vector in vectors]

    @_waiting
    def _count(self, conditions: dict[str, Any]) -> int:
        values = tuple(conditions.values())
        return int(self._one("SELECT count(*) FROM {table} {where}", values, where=_where(conditions)))

    @_waiting
    def _rows(self, most: int) -> Rows:
        with self._connection.cursor(binary=True) as cursor:
            return self._read(cursor.execute(self._sql("SELECT {columns} FROM {table} LIMIT {k}", k=most)).fetchall())

    def _read(self, rows: list[tuple]) -> Rows:
        about = self.existing()
        ids, vectors, *columns = zip(*rows, strict=True) if rows else ((),) * len(self._columns)
        numbers = np.array([vector.to_numpy() for vector in vectors], np.float32).reshape(-1, about.dimension)
        return Rows(list(ids), numbers, dict(zip(about.attributes, map(list, columns), strict=True)))

    @_waiting
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

    @_waiting
    def _optimize(self) -> None:
        address = self.address
        if address.index:
            name = sql.Identifier(f"{address.table}_tfdml")
            method, ours, theirs = _INDEXES[address.index]
            default = 16 if ours == "links" else max(1, round(2 * self._count({}) ** 0.5))
            # Indexes are built out of this, and fall to disk beyond it.
            self._run("SET maintenance_work_mem = '1GB'")
            self._run("DROP INDEX IF EXISTS {name}", name=name)
            self._run(
                "CREATE INDEX {name} ON {table} USING {method} (vector {operators}) WITH ({option} = {value})",
                name=name,
                method=sql.SQL(method),
                operators=sql.SQL(self._operators),
                option=sql.SQL(theirs),
                value=address.option(ours, default),
            )
        self._run("VACUUM ANALYZE {table}")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _where(conditions: dict[str, Any]) -> sql.Composable:
    if not conditions:
        return sql.SQL("")
    return sql.SQL("WHERE ") + sql.SQL(" AND ").join(
        sql.SQL("{} = %s").format(sql.Identifier(name)) for name in conditions
    )
