"""PostgreSQL that stops; writers and readers at once."""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import threading

import numpy as np
import pytest

from tests.retrieval.databases import postgres, psycopg
from tfdml.embeddings import read_embeddings
from tfdml.errors import UserError
from tfdml.retrieval import connect, index_embeddings

pytestmark = pytest.mark.slow
ROWS = 3000


class Server:
    """A PostgreSQL of its own, which can be stopped and started."""

    def __init__(self, folder):
        self.folder = folder

    def uri(self, table):
        return f"pgvector://postgres@/postgres?socket={self.folder}&table={table}"

    def control(self, *words):
        from pgserver._commands import pg_ctl

        user = "pgserver" if os.geteuid() == 0 else None
        pg_ctl([*words, "-w", "-l", f"{self.folder}/log"], pgdata=self.folder, user=user, timeout=60)

    def stop(self):
        self.control("stop", "-m", "immediate")

    def start(self):
        self.control("start", "-o", '-h ""', "-o", f"-k {self.folder}")

    def run(self, statement):
        with psycopg.connect(host=str(self.folder), user="postgres", autocommit=True) as connection:
            connection.execute(statement)


@pytest.fixture(scope="module")
def server():
    with postgres() as reached:
        if not reached:
            pytest.skip("no pgserver here: it has no wheel for Python 3.13")
        yield Server(pathlib.Path(reached["host"]))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors") / "vectors.npz"
    vectors = np.random.default_rng(0).normal(size=(ROWS, 32)).astype(np.float32)
    np.savez(path, embeddings=vectors, labels=np.arange(ROWS) % 10)
    return read_embeddings(path)


@contextlib.contextmanager
def small_batches(uri, rows=100):
    with connect(uri) as gallery:
        gallery.batch_rows = rows
        yield gallery


def assert_whole(uri, stored):
    with connect(uri) as gallery:
        assert len(gallery) == ROWS
        vectors = np.asarray(stored.embeddings[::300])
        assert gallery.search(vectors, k=1).ids[:, 0].tolist() == list(stored.names[::300])


def test_a_server_that_stops_ends_indexing_and_the_next_one_writes_the_rest(server, stored):
    uri = server.uri("stopped")
    with small_batches(uri) as gallery:
        with pytest.raises(UserError, match=r"cannot be written") as raised:
            index_embeddings(gallery, stored, progress=lambda rows, total: server.stop() if rows == 1000 else None)
        assert "\n" not in str(raised.value)
        server.start()
        # The same connection is opened again.
        assert index_embeddings(gallery, stored).added == ROWS - 1000
        server.control("restart", "-m", "immediate")
        with pytest.raises(UserError, match="cannot be searched"):
            gallery.search(stored.embeddings[:1], k=1)
        assert gallery.search(stored.embeddings[:1], k=1).ids.tolist() == [["0"]]
    assert_whole(uri, stored)


@pytest.mark.parametrize("kind", ["pgvector", "lancedb"])
def test_two_writers_and_many_readers(server, stored, kind, tmp_path):
    """Both write all rows; readers see only whole batches."""
    uri = server.uri("shared") if kind == "pgvector" else f"lancedb://{tmp_path}/shared"
    with connect(uri) as gallery:
        first = {name: getattr(stored, name)[:500] for name in ("names", "labels", "embeddings")}
        index_embeddings(gallery, dataclasses.replace(stored, **first))
    begin, ended = threading.Barrier(2), threading.Event()

    def write():
        with small_batches(uri, 500) as gallery:
            begin.wait()
            index_embeddings(gallery, stored)

    def read():
        counts = set()
        while not ended.is_set():
            with connect(uri) as gallery:
                counts.add(len(gallery))
                gallery.search(stored.embeddings[:1], k=3)
        return counts

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        readers, writers = [pool.submit(read) for _ in range(6)], [pool.submit(write) for _ in range(2)]
        concurrent.futures.wait(writers)
        ended.set()
        assert [each.result() for each in writers] == [None, None]
        assert all(count % 500 == 0 for each in readers for count in each.result())
    assert_whole(uri, stored)
