"""Writers and readers of one gallery at once."""

import concurrent.futures
import dataclasses
import threading

import numpy as np
import pytest

from tests.retrieval.databases import KINDS
from tfdml.embeddings import read_embeddings
from tfdml.retrieval import connect, index_embeddings

ROWS = 3000


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_writers_and_many_readers(databases, kind, tmp_path):
    """Both write all rows; readers see only whole batches."""
    vectors = np.random.default_rng(0).normal(size=(ROWS, 32)).astype(np.float32)
    np.savez(tmp_path / "vectors.npz", embeddings=vectors, labels=np.arange(ROWS) % 10)
    stored, uri = read_embeddings(tmp_path / "vectors.npz"), databases.address(kind)
    with connect(uri) as gallery:
        first = {name: getattr(stored, name)[:500] for name in ("names", "labels", "embeddings")}
        index_embeddings(gallery, dataclasses.replace(stored, **first))
    begin, ended = threading.Barrier(2), threading.Event()

    def write():
        with connect(uri) as gallery:
            gallery.batch_rows = 500
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
        readers, writers = (
            [pool.submit(read) for _ in range(6)],
            [pool.submit(write) for _ in range(2)],
        )
        concurrent.futures.wait(writers)
        ended.set()
        assert [each.result() for each in writers] == [None, None]
        assert all(count % 500 == 0 for each in readers for count in each.result())
    with connect(uri) as gallery:
        assert len(gallery) == ROWS
        assert gallery.search(vectors[::300], k=1).ids[:, 0].tolist() == list(stored.names[::300])
