"""Writers and readers of one gallery at once."""

import concurrent.futures
import dataclasses
import re
import threading

import numpy as np
import pytest

from tests.retrieval.databases import KINDS
from tfdml.embeddings import read_embeddings
from tfdml.errors import UserError
from tfdml.retrieval import open_gallery

ROWS = 3000


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_writers_and_many_readers(databases, kind, tmp_path):
    """Both write all rows; readers see only whole batches."""
    vectors = np.random.default_rng(0).normal(size=(ROWS, 32)).astype(np.float32)
    np.savez(tmp_path / "vectors.npz", embeddings=vectors, labels=np.arange(ROWS) % 10)
    stored, uri = read_embeddings(tmp_path / "vectors.npz"), databases.address(kind)
    with open_gallery(uri) as gallery:
        first = {name: getattr(stored, name)[:500] for name in ("names", "labels", "embeddings")}
        gallery.add_embeddings(dataclasses.replace(stored, **first))
    begin, ended = threading.Barrier(2), threading.Event()

    def write():
        with open_gallery(uri) as gallery:
            gallery.batch_rows = 500
            begin.wait()
            gallery.add_embeddings(stored)

    def read():
        counts = set()
        while not ended.is_set():
            with open_gallery(uri) as gallery:
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
    with open_gallery(uri) as gallery:
        assert len(gallery) == ROWS
        assert gallery.search(vectors[::300], k=1).ids[:, 0].tolist() == list(stored.names[::300])


def at_once(*works):
    """Run functions in threads that start together; return their results or errors."""
    begin = threading.Barrier(len(works))

    def run(work):
        begin.wait()
        return work()

    with concurrent.futures.ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(run, work) for work in works]
        return [future.exception() or future.result() for future in futures]


def labeled(folder, seed):
    """Stored embeddings whose names of images are those of any other seed."""
    vectors = np.random.default_rng(seed).normal(size=(60, 4)).astype(np.float32)
    np.savez(folder / f"{seed}.npz", embeddings=vectors)
    return read_embeddings(folder / f"{seed}.npz")


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_jobs_with_the_same_names_none_loses_rows(databases, kind, tmp_path):
    """One is refused, or each where the other was first: what is counted is there."""
    for attempt in range(3):
        jobs = [labeled(tmp_path, 2 * attempt), labeled(tmp_path, 2 * attempt + 1)]
        uri = databases.address(kind)

        def write(stored, uri=uri):
            with open_gallery(uri) as gallery:
                gallery.batch_rows = 10
                return gallery.add_embeddings(stored)

        results = at_once(*(lambda stored=stored: write(stored) for stored in jobs))
        refused = [error for error in results if isinstance(error, UserError)]
        assert len(refused) in (1, 2)
        assert all("of other embeddings" in str(error) for error in refused)
        with open_gallery(uri) as gallery:
            sources = gallery.rows(99).columns["source"]
            rows = gallery.rows(99)
            vectors = dict(zip(rows.ids, rows.vectors, strict=True))
        if len(refused) == 1:
            assert len(set(sources)) == 1
            assert len(sources) == 60
            (done,) = (job for job, error in zip(jobs, results, strict=True) if error != refused[0])
            for name, vector in zip(done.names, done.embeddings, strict=True):
                np.testing.assert_array_equal(vectors[name], vector)
        else:
            # The message of each has the number of its rows that are there.
            assert len(sources) == sum(map(rows_before, refused))


def rows_before(error):
    found = re.search(r"; (\d+) rows before are written", str(error))
    return int(found[1]) if found else 0


@pytest.mark.parametrize("kind", KINDS)
def test_two_first_writers_both_succeed(databases, kind):
    """Each with names of its own."""
    for _ in range(3):
        uri = databases.address(kind)

        def write(name, uri=uri):
            with open_gallery(uri) as gallery:
                return gallery.add([f"{name}{row}" for row in range(20)], np.eye(20)).added

        assert at_once(*(lambda name=name: write(name) for name in "abc")) == [20] * 3
        with open_gallery(uri) as gallery:
            assert len(gallery) == 60


@pytest.mark.parametrize("kind", KINDS)
def test_an_open_gallery_sees_what_others_write(databases, kind):
    uri = databases.address(kind)
    with open_gallery(uri) as first, open_gallery(uri) as second:
        assert (len(first), first.about) == (0, None)
        with pytest.raises(UserError, match="holds no gallery"):
            first.search(np.eye(2))
        second.add(["a", "b"], np.eye(2), {"class": ["bus", "van"]}, source="x", model="m")
        assert (len(first), first.about.model) == (2, "m")
        assert first.search(np.eye(2), 1, model="m").ids.tolist() == [["a"], ["b"]]
        second.delete(["a"])
        assert first.search(np.eye(2), 2, model="m").ids.tolist() == [["b", None]] * 2
        assert (first.rows(9).ids, first.class_counts()) == (["b"], {"van": 1})
        # What has come in between is compared, not overwritten.
        with pytest.raises(UserError, match="holds 1 id of gallery embeddings"):
            first.add(["b"], np.eye(2)[:1], source="y", model="m")
        with pytest.raises(UserError, match="different models"):
            first.add(["c"], np.eye(2)[:1], model="n")
        with pytest.raises(UserError, match="3 dimensions"):
            first.add(["c"], np.eye(3)[:1], model="m")
        np.testing.assert_array_equal(second.rows(9).vectors, [[0, 1]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_write_that_is_refused_leaves_no_table(databases, kind, monkeypatch):
    """Not even an empty one of its dimension."""
    uri = databases.address(kind)
    with open_gallery(uri) as gallery:
        with pytest.raises(UserError, match="NaN"):
            gallery.add(["a"], [[np.nan, 1.0]])
        with pytest.raises(UserError, match="empty id"):
            gallery.add([""], [[0.0, 1.0]])
        assert gallery.about is None
        write = type(gallery)._write

        def fail(self, rows):
            write(self, rows)
            raise type(self)._errors[0]("no space left")

        if kind == "pgvector":
            with monkeypatch.context() as patch:
                patch.setattr(type(gallery), "_write", fail)
                with pytest.raises(UserError, match="cannot be written: no space left"):
                    gallery.add(["a"], [[0.0, 1.0]])
        assert gallery.about is None
        gallery.add(["a"], [[0.0, 1.0, 2.0]])
        assert gallery.about.dimension == 3
