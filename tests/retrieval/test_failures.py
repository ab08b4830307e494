"""Writers that are killed, a full disk, what may not be written: nothing half-written is found
afterwards, and the same call finishes."""

import json
import pathlib

import numpy as np
import pytest

from tests.retrieval.databases import psycopg
from tests.support.processes import run_python
from tfdml.errors import UserError
from tfdml.retrieval import AddCounts, open_gallery

ROWS, BLOCK = 30, 10
VECTORS = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)


def add(gallery):
    gallery.batch_rows = BLOCK
    return gallery.add([f"{row:02}" for row in range(ROWS)], VECTORS, source="test")


@pytest.mark.slow
def test_each_write_of_lancedb_may_be_the_last(tmp_path):
    done = run_python("-m", "tests.retrieval.stopped_writers", tmp_path)
    # All but those of the largest limit, in a gallery that is new and in one that has rows.
    assert json.loads(done.stdout.splitlines()[-1]) == {"killed": 10, "full": 10}


def test_a_file_that_a_full_disk_has_cut_is_not_a_version(databases, monkeypatch):
    """LanceDB commits it; see `stopped_writers` for a real one."""
    with databases.gallery("lancedb") as gallery:
        gallery.batch_rows = BLOCK
        gallery.add(["a"], VECTORS[:1])
        kind = type(gallery)
        merge = kind._write

        def cut(self, rows):
            before = set(data_files(self))
            with monkeypatch.context() as patch:
                patch.setattr(kind, "_check_written", lambda self, rows: None)
                merge(self, rows)
            for path in set(data_files(self)) - before:
                path.write_bytes(path.read_bytes()[:-1000])
            self._check_written(rows)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "_write", cut)
            with pytest.raises(UserError, match="cannot be written"):
                add(gallery)
        assert (len(gallery), gallery.rows(9).ids) == (1, ["a"])
        assert add(gallery) == AddCounts(ROWS)


def data_files(gallery):
    return pathlib.Path(gallery.place.path).rglob("data/*.lance")


def count_statements(uri):
    """How many statements a whole call makes."""
    with open_gallery(uri) as gallery:
        statements = []
        spy_on(gallery, statements.append)
        add(gallery)
    return len(statements)


def spy_on(gallery, act):
    """Call a function before each statement, with its number."""
    run, write = gallery._run, gallery._write
    numbers = iter(range(10**6))

    def before(call):
        def made(*values, **parts):
            act(next(numbers))
            return call(*values, **parts)

        return made

    gallery._run, gallery._write = before(run), before(write)


@pytest.mark.parametrize("failure", ["killed", "full"])
def test_each_statement_of_postgresql_may_be_the_last(databases, failure):
    """The server ends the connection, or has no space left."""
    # The first of all creates the extension.
    count_statements(databases.address("pgvector"))
    total = count_statements(databases.address("pgvector"))
    stopped = 0
    with psycopg.connect(user="postgres", autocommit=True) as other:
        for last in range(0, total, 3):
            uri = databases.address("pgvector")
            gallery = open_gallery(uri)
            process = gallery._connection.info.backend_pid

            def act(number, gallery=gallery, process=process, last=last):
                if number != last:
                    return
                if failure == "killed":
                    other.execute("SELECT pg_terminate_backend(%s, 5000)", (process,))
                else:
                    error = "DO $$ BEGIN RAISE 'no space left' USING ERRCODE = '53100'; END $$"
                    gallery._connection.execute(error)

            spy_on(gallery, act)
            with pytest.raises(UserError, match=r"cannot be (written|read)"):
                add(gallery)
            gallery.close()
            stopped += 1
            with open_gallery(uri) as again:
                count = len(again)
                assert count % BLOCK == 0
                if count:
                    rows = again.rows(ROWS)
                    np.testing.assert_array_equal(rows.vectors, VECTORS[np.array(rows.ids, int)])
                assert add(again) == AddCounts(ROWS - count, 0, count)
                assert len(again) == ROWS
    assert stopped > 5


def test_a_postgresql_that_may_not_be_written_is_refused(databases, monkeypatch):
    uri = databases.address("pgvector")
    with open_gallery(uri) as gallery:
        gallery.add(["a"], VECTORS[:1])
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_read_only=on")
    with open_gallery(uri) as gallery:
        assert gallery.search(VECTORS, 1).ids[0, 0] == "a"
        with pytest.raises(UserError, match=r"cannot be written: .*read-only transaction"):
            add(gallery)
        with pytest.raises(UserError, match=r"cannot be written: .*read-only transaction"):
            gallery.delete(["a"])
        assert len(gallery) == 1
