"""PostgreSQL with the extension vector: a gallery next to an application's other tables."""

import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tfdml.errors import user_errors
from tfdml.retrieval.galleries import COLUMNS, About, GalleryDatabase, Rows
from tfdml.workarounds import own_symbols_first

with own_symbols_first():
    import psycopg
    from pgvector.psycopg import register_vector
    from psycopg import sql

_SECONDS = 10


class Gallery(GalleryDatabase):
    """A gallery in PostgreSQL.

    Args:
        address: `pgvector://user:password@host:port/database`. A password may also come from the
            variable PGPASSWORD or ~/.pgpass, and the folder of a socket from PGHOST.
    """

    _errors = (psycopg.Error, UnicodeEncodeError)
    _connection: Any = None

    def _open(self) -> str | bytes | None:
        parts = self.address.parts
        options: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port,
            "user": parts.username and urllib.parse.unquote(parts.username),
            "password": parts.password and urllib.parse.unquote(parts.password),
            "dbname": self.address.path.strip("/"),
        }
        self._connection = psycopg.connect(
            **{name: value for name, value in options.items() if value},
            connect_timeout=_SECONDS,
            autocommit=True,
        )
        if self._one("SELECT to_regclass(%s)", (self.address.table,)) is None:
            return None
        self._set_up()
        return self._one("SELECT obj_description(%s::regclass)", (self.address.table,)) or ""

    def _run(self, text: str, values: Sequence[Any] = (), **parts: Any) -> Any:
        """Execute a statement, with the gallery's `{table}` and `{columns}`, and other parts by
        name."""
        columns = sql.SQL(", ").join(map(sql.Identifier, ("id", "vector", *COLUMNS)))
        query = sql.SQL(text).format(
            table=sql.Identifier(self.address.table), columns=columns, **parts
        )
        return self._connection.cursor(binary=bool(values)).execute(query, values or None)

    def _one(self, text: str, values: Sequence[Any] = (), **parts: Any) -> Any:
        return self._run(text, values, **parts).fetchone()[0]

    def _set_up(self) -> None:
        """Make this session search exactly, whatever index is there."""
        register_vector(self._connection)
        self._run("SET enable_indexscan = off")

    def _create(self, about: About) -> None:
        # Who may not create extensions may use one that is there.
        if self._one("SELECT count(*) FROM pg_extension WHERE extname = 'vector'") == 0:
            with user_errors(
                psycopg.Error, "have the owner run CREATE EXTENSION vector", uri=str(self.address)
            ):
                self._run("CREATE EXTENSION IF NOT EXISTS vector")
        self._set_up()
        texts = sql.SQL("").join(
            sql.SQL(", {} text NOT NULL").format(sql.Identifier(name)) for name in COLUMNS
        )
        with self._connection.transaction():
            self._run(
                'CREATE TABLE {table} (id text COLLATE "C" PRIMARY KEY, vector vector({dimension}) '
                "NOT NULL{texts})",
                dimension=about.dimension,
                texts=texts,
            )
            self._run("COMMENT ON TABLE {table} IS {about}", about=about.text())

    def _upsert(self, rows: Rows) -> None:
        names = [sql.Identifier(name) for name in ("vector", *COLUMNS)]
        query = sql.SQL("INSERT INTO {} VALUES ({}) ON CONFLICT (id) DO UPDATE SET {}").format(
            sql.Identifier(self.address.table),
            sql.SQL(", ").join(sql.Placeholder() * (1 + len(names))),
            sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(name) for name in names),
        )
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.executemany(
                query, list(zip(rows.ids, rows.vectors, *rows.columns.values(), strict=True))
            )

    def _delete(self, ids: list[str]) -> int:
        return int(self._run("DELETE FROM {table} WHERE id = ANY(%s)", (ids,)).rowcount)

    def _nearest(self, vectors: np.ndarray, k: int, where: dict[str, str]) -> Iterable[list[tuple]]:
        texts = sql.SQL(", ").join(map(sql.Identifier, ("id", *COLUMNS)))
        conditions: list[Any] = [sql.SQL("{} = %s").format(sql.Identifier(name)) for name in where]
        operator = sql.SQL("<#>" if self._by_product else "<->")
        parts = {
            "texts": texts,
            "conditions": sql.SQL(" AND ").join(conditions or [sql.SQL("true")]),
            "operator": operator,
            "k": k,
        }
        query = (
            "SELECT vector {operator} %s AS far, {texts} FROM {table} WHERE {conditions} ORDER BY "
            "far LIMIT {k}"
        )
        for vector in vectors:
            rows = self._run(query, (vector, *where.values()), **parts).fetchall()
            yield [(far if self._by_product else far**2, *row) for far, *row in rows]

    def _count(self) -> int:
        return int(self._one("SELECT count(*) FROM {table}"))

    def _rows(self, most: int, ids: list[str] | None) -> list[tuple]:
        query = "SELECT {columns} FROM {table} WHERE %s::text[] IS NULL OR id = ANY(%s) LIMIT %s"
        rows = self._run(query, (ids, ids, most)).fetchall()
        return [(name, vector.to_numpy(), *texts) for name, vector, *texts in rows]

    def close(self) -> None:
        """See `GalleryDatabase.close`."""
        if self._connection is not None:
            self._connection.close()
