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

from tfdml.retrieval import open_gallery
from tfdml.workarounds import own_symbols_first

with own_symbols_first():
    import psycopg

KINDS = ("lancedb", "pgvector")
_numbers = itertools.count()


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL server: the folder of its socket. Empty where there is none."""
    if importlib.util.find_spec("pgserver") is None:
        yield ""
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pgserver

    # Not in pytest's folder: the server runs as another user, whom every pytest that starts shuts
    # out of that folder.
    with tempfile.TemporaryDirectory(prefix="postgres-") as place:
        folder = pathlib.Path(place) / "pg"
        try:
            server = pgserver.get_server(folder, cleanup_mode="stop")
        except subprocess.TimeoutExpired:
            # The server is up, but pg_ctl has not seen it in its ten seconds; the second call finds
            # it.
            server = pgserver.get_server(folder, cleanup_mode="stop")
        try:
            yield str(folder)
        finally:
            server.cleanup()


class Databases:
    """Addresses of galleries that are new, of every kind.

    Args:
        folder: Where their files lie.
        has_server: Whether PGHOST names a server's socket; tests that need one are skipped where it
            does not.
    """

    def __init__(self, folder, has_server):
        self.folder, self.has_server = folder, has_server

    def address(self, kind: str, **options: object) -> str:
        """An address that no other call has given."""
        number = next(_numbers)
        query = "&".join(f"{name}={value}" for name, value in options.items())
        if kind == "pgvector":
            if not self.has_server:
                pytest.skip("no pgserver here: it has no wheel for Python 3.13")
            return f"pgvector://postgres@/postgres?table=t{number}" + (f"&{query}" if query else "")
        return f"{kind}://{self.folder}/{kind}{number}" + (f"?{query}" if query else "")

    @contextlib.contextmanager
    def gallery(self, kind: str, **options: object) -> Iterator:
        """A gallery that is new, and gone afterwards."""
        uri = self.address(kind, **options)
        with open_gallery(uri) as gallery:
            yield gallery
        if kind == "pgvector":
            with psycopg.connect(user="postgres", autocommit=True) as connection:
                connection.execute(f"DROP TABLE IF EXISTS {gallery.place.table}")
        else:
            shutil.rmtree(gallery.place.path, ignore_errors=True)
