"""PostgreSQL with the extension vector: a gallery next to an application's other tables."""

import contextlib
import urllib.parse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tfdml.errors import user_errors
from tfdml.names import warn
from tfdml.retrieval.databases import WritableGallery
from tfdml.retrieval.galleries import COLUMNS, Condition, Rows
from tfdml.workarounds import own_symbols_first

with own_symbols_first():
    import psycopg
    from pgvector.psycopg import register_vector
    from psycopg import sql

_SECONDS = 10
# Of a search by an index: the fewest candidates of HNSW, and lists of IVFFlat that are searched.
_CANDIDATES = 200
_LISTS = 20
_OPERATORS = {
    "=": "{} = %s",
    "!=": "{} <> %s",
    "in": "{} = ANY(%s)",
    "starts": "starts_with({}, %s)",
}


class DatabaseGallery(WritableGallery):
    """A gallery in PostgreSQL. A writer holds an advisory lock until its transaction ends.

    Args:
        address: `pgvector://user:password@host:port/database`. A password may also come from the
            variable PGPASSWORD or ~/.pgpass, and the folder of a socket from PGHOST.
    """

    _errors = (psycopg.Error, UnicodeEncodeError)
    # HNSW returns no more rows than it may have candidates.
    _most_indexed = 1000
    _connection: Any = None
    _knows_vectors = False

    def _open(self) -> None:
        parts = self.place.parts
        user = _unquoted(parts.username)
        password = _unquoted(parts.password)
        database = self.place.path.strip("/")
        self._connection = psycopg.connect(
            host=parts.hostname or None,
            port=parts.port,
            user=user,
            password=password,
            dbname=database or None,
            connect_timeout=_SECONDS,
            autocommit=True,
        )

    def _comment(self) -> str | bytes | None:
        row = self._run(
            "SELECT obj_description(oid, 'pg_class') FROM pg_class WHERE oid = to_regclass(%s)",
            (self.place.table,),
        ).fetchone()
        if row is None:
            return None
        if row[0]:
            self._learn_vectors()
        return row[0] or ""

    def _learn_vectors(self) -> None:
        """Let this connection read and write vectors; the extension must be there."""
        if not self._knows_vectors:
            register_vector(self._connection)
            self._knows_vectors = True

    def _run(self, text: str, values: Sequence[Any] = (), **parts: Any) -> Any:
        """Execute a statement, with the gallery's `{table}` and other parts by name."""
        query = sql.SQL(text).format(table=sql.Identifier(self.place.table), **parts)
        # The plan of a prepared statement would outlive the setting that it was made with.
        cursor = self._connection.cursor(binary=bool(values))
        return cursor.execute(query, values or None, prepare=False)

    def _one(self, text: str, values: Sequence[Any] = (), **parts: Any) -> Any:
        return self._run(text, values, **parts).fetchone()[0]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._connection.transaction():
            # By its name, as two first writers have no table yet.
            self._lock(f"gallery {self.place.table}")
            yield

    def _lock(self, name: str) -> None:
        self._run("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (f"tfdml {name}",))

    def _models(self) -> set[str]:
        # There are two values at most: the gallery's, and empty. The index has both at its ends.
        ends = self._run("SELECT min(model), max(model) FROM {table}").fetchone()
        return {model for model in ends if model is not None}

    def _write(self, rows: Rows) -> None:
        if self._comment() is None:
            self._create(rows.vectors.shape[1])
        names = [sql.Identifier(name) for name in ("vector", *COLUMNS)]
        marks = sql.SQL(", ").join(sql.Placeholder() * (1 + len(names)))
        changes = sql.SQL(", ").join(sql.SQL("{0} = EXCLUDED.{0}").format(name) for name in names)
        query = sql.SQL(
            "INSERT INTO {table} ({columns}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET "
            "{changes}"
        ).format(
            table=sql.Identifier(self.place.table),
            columns=_columns(("id", "vector", *COLUMNS)),
            marks=marks,
            changes=changes,
        )
        texts = [rows.columns[name] for name in COLUMNS]
        values = list(zip(rows.ids, rows.vectors, *texts, strict=True))
        with self._connection.cursor() as cursor:
            cursor.executemany(query, values)

    def _create(self, dimension: int) -> None:
        comment = self._new_comment(dimension)
        # Who may not create extensions may use one that is there.
        self._lock("extension")
        if self._one("SELECT count(*) FROM pg_extension WHERE extname = 'vector'") == 0:
            with user_errors(
                psycopg.Error, "have the owner run CREATE EXTENSION vector", uri=self.address
            ):
                self._run("CREATE EXTENSION vector")
        self._learn_vectors()
        texts = [sql.SQL(", {} text NOT NULL").format(sql.Identifier(name)) for name in COLUMNS]
        self._run(
            'CREATE TABLE {table} (id text COLLATE "C" PRIMARY KEY, vector vector({dimension}) '
            "NOT NULL{texts})",
            dimension=dimension,
            texts=sql.SQL("").join(texts),
        )
        self._run("CREATE INDEX ON {table} (model)")
        self._write_comment(comment)

    def _write_comment(self, text: str) -> None:
        self._run("COMMENT ON TABLE {table} IS {about}", about=text)

    def _delete(self, conditions: list[Condition]) -> int:
        text, values = _where(conditions)
        return int(self._run("DELETE FROM {table} WHERE {where}", values, where=text).rowcount)

    def _nearest(
        self,
        queries: np.ndarray,
        k: int,
        conditions: list[Condition],
        exact: bool,
        by_product: bool,
    ) -> Iterable[list[tuple]]:
        where, values = _where(conditions)
        query = (
            "SELECT vector {operator} %s AS far, {columns} FROM {table} WHERE {where} "
            "ORDER BY far LIMIT {k}"
        )
        parts = {
            "operator": sql.SQL("<#>" if by_product else "<->"),
            "columns": _columns(("id", *COLUMNS)),
            "where": where,
            "k": k,
        }
        with self._connection.transaction():
            # So that no index of the application takes part.
            self._run("SET LOCAL enable_indexscan = {on}", on="off" if exact else "on")
            if not exact and self._has_index(by_product):
                self._run("SET LOCAL enable_seqscan = off")
                candidates = min(max(_CANDIDATES, 2 * k), self._most_indexed)
                self._run("SET LOCAL hnsw.ef_search = {most}", most=candidates)
                self._run("SET LOCAL ivfflat.probes = {lists}", lists=_LISTS)
            for vector in queries:
                rows = self._run(query, (vector, *values), **parts).fetchall()
                yield [(far if by_product else far**2, *row) for far, *row in rows]

    def _has_index(self, by_product: bool) -> bool:
        return bool(self._indexes(by_product))

    def _indexes(self, by_product: bool) -> list[str]:
        """Return the names of the indexes that a search may use."""
        rows = self._run(
            "SELECT index.relname FROM pg_index JOIN pg_class AS index ON index.oid = indexrelid "
            "JOIN pg_opclass AS operators ON operators.oid = indclass[0] "
            "WHERE indrelid = to_regclass(%s) AND operators.opcname = %s AND indisvalid "
            "AND indpred IS NULL",
            (self.place.table, _operators(by_product)),
        ).fetchall()
        return [name for (name,) in rows]

    def _count_unindexed(self) -> int:
        """Return 0: PostgreSQL adds each row to the index."""
        return 0

    def _build_index(self, by_product: bool) -> None:
        before = self._indexes(by_product)
        operators = sql.SQL(_operators(by_product))
        # PostgreSQL has a notice where the build no longer fits into its memory.
        self._connection.add_notice_handler(_warn_of_notice)
        self._run("CREATE INDEX ON {table} USING hnsw (vector {operators})", operators=operators)
        self._connection.remove_notice_handler(_warn_of_notice)
        # Last, as nobody can search the table from here to the end of the transaction.
        for name in before:
            self._run("DROP INDEX {name}", name=sql.Identifier(name))

    def _rows_at(self, places: np.ndarray) -> tuple[list[str], np.ndarray]:
        rows = self._run(
            "SELECT id, vector FROM (SELECT id, vector, row_number() OVER (ORDER BY id) - 1 AS "
            "place FROM {table}) AS rows WHERE place = ANY(%s) ORDER BY place",
            (places.tolist(),),
        ).fetchall()
        ids, vectors = zip(*rows, strict=True)
        return list(ids), np.stack(list(map(_value, vectors)))

    def _count(self) -> int:
        return int(self._one("SELECT count(*) FROM {table}"))

    def _select(
        self, names: Sequence[str], conditions: list[Condition], most: int | None = None
    ) -> list[tuple]:
        if self._comment() is None:
            return []
        where, values = _where(conditions)
        rows = self._run(
            "SELECT {columns} FROM {table} WHERE {where} LIMIT %s",
            (*values, most),
            columns=_columns(names),
            where=where,
        ).fetchall()
        return [tuple(map(_value, row)) for row in rows]

    def close(self) -> None:
        """See `Gallery.close`."""
        if self._connection is not None:
            self._connection.close()


def _unquoted(text: str | None) -> str | None:
    """Return a part of an address as it is meant; None where there is none."""
    return urllib.parse.unquote(text) if text else None


def _value(value: Any) -> Any:
    return value if isinstance(value, str) else value.to_numpy()


def _warn_of_notice(notice: psycopg.errors.Diagnostic) -> None:
    warn(f"{notice.message_primary}; {notice.message_hint}")


def _operators(by_product: bool) -> str:
    """Return the name of the operators by which an index orders vectors."""
    return "vector_ip_ops" if by_product else "vector_l2_ops"


def _columns(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))


def _where(conditions: list[Condition]) -> tuple[sql.Composed, list[Any]]:
    """Return conditions in SQL, and the values of their placeholders."""
    parts: list[Any] = [sql.SQL("true")]
    for column, operator, _ in conditions:
        parts.append(sql.SQL(_OPERATORS[operator]).format(sql.Identifier(column)))
    return sql.SQL(" AND ").join(parts), [condition.value for condition in conditions]
