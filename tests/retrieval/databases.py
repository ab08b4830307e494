"""The databases that the tests run for real, one of each kind for all of them."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import pathlib
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator

import pytest

from tfdml.retrieval import connect
from tfdml.workarounds import own_symbols_first

with own_symbols_first():
    import psycopg

KINDS = ("lancedb", "pgvector")
_numbers = itertools.count()


@contextlib.contextmanager
def postgres() -> Iterator[dict[str, str]]:
    """A PostgreSQL server; what `psycopg.connect` takes to reach it. Empty where there is none."""
    if importlib.util.find_spec("pgserver") is None:
        yield {}
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pgserver

    # Not in pytest's folder: the server runs as another user, whom every pytest that starts shuts out of that folder.
    with tempfile.TemporaryDirectory(prefix="postgres-") as place:
        folder = pathlib.Path(place) / "pg"
        try:
            server = pgserver.get_server(folder, cleanup_mode="stop")
        except subprocess.TimeoutExpired:
            # The server is up, but pg_ctl has not seen it in its ten seconds; the second call finds it.
            server = pgserver.get_server(folder, cleanup_mode="stop")
        try:
            yield {"host": str(folder), "user": "postgres", "dbname": "postgres"}
        finally:
            server.cleanup()


class Databases:
    """Addresses of galleries that are new, of every kind.

    Args:
        folder: Where their files lie.
        socket: The folder of the server's socket; empty: there is no server, and tests that need it are skipped.
    """

    def __init__(self, folder, socket):
        self.folder, self.socket = folder, socket

    def address(self, kind: str, **options: object) -> str:
        """An address that no other call has given."""
        number = next(_numbers)
        query = "&".join(f"{name}={value}" for name, value in options.items())
        if kind == "pgvector":
            if not self.socket:
                pytest.skip("no pgserver here: it has no wheel for Python 3.13")
            query = f"socket={self.socket}&table=t{number}" + ("&" + query if query else "")
            return f"pgvector://postgres@/postgres?{query}"
        return f"{kind}://{self.folder}/{kind}{number}" + (f"?{query}" if query else "")

    @contextlib.contextmanager
    def gallery(self, kind: str, **options: object) -> Iterator:
        """A gallery that is new, and gone afterwards."""
        uri = self.address(kind, **options)
        with connect(uri) as gallery:
            yield gallery
        if kind == "pgvector":
            with psycopg.connect(host=self.socket, user="postgres", autocommit=True) as connection:
                connection.execute(f"DROP TABLE IF EXISTS {gallery.address.table}")
        else:
            shutil.rmtree(gallery.address.path, ignore_errors=True)
