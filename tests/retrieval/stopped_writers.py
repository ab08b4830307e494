"""Writers of a LanceDB gallery that are stopped at each write to the disk: a program of its own, as
it forks.

    python -m tests.retrieval.stopped_writers FOLDER

A limit on the size of files stops a writer at the first write that exceeds it: by a signal that
kills it, or by an error, as a full disk does. After each, the gallery must hold whole blocks alone,
and the same call must finish. The last line counts what stopped.
"""

import ctypes
import json
import os
import pathlib
import resource
import signal
import sys
import warnings

import numpy as np

# So that it is imported before the forks, and starts nothing.
import tfdml.retrieval.lancedb_gallery  # noqa: F401
from tfdml.errors import UserError
from tfdml.retrieval import open_gallery

ROWS, BLOCK = 60, 20
# Below and above the sizes of its files: of transactions, of versions, and of rows.
LIMITS = (0, 400, 1000, 1950, 3100, 10**7)
_DROP_CAPABILITY, _OVERRIDE_PERMISSIONS = 24, 1

warnings.simplefilter("ignore", RuntimeWarning)


def add(uri):
    """Add the rows of the test, as `tfdml index` does, block by block."""
    vectors = np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)
    with open_gallery(uri) as gallery:
        gallery.batch_rows = BLOCK
        return gallery.add([f"{row:02}" for row in range(ROWS)], vectors, source="test")


def in_child(work):
    """Return the signal or the exit status of a fork that does a work: 3 for a `UserError`."""
    process = os.fork()
    if process:
        status = os.waitpid(process, 0)[1]
        killed = os.WIFSIGNALED(status)
        return -os.WTERMSIG(status) if killed else os.WEXITSTATUS(status)
    signal.alarm(60)
    try:
        work()
    except UserError as error:
        os.write(2, f"{error}\n".encode())
        os._exit(3 if "cannot be written" in str(error) else 4)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        os._exit(5)
    os._exit(0)


def limited(limit, kills):
    """Bound the size of files of this process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kills else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def check_whole(uri):
    """Assert that a gallery holds whole blocks, each row with its vector."""

    def look():
        with open_gallery(uri) as gallery:
            count = len(gallery)
            assert count % BLOCK == 0, count
            if count:
                rows = gallery.rows(ROWS)
                vectors = np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)
                np.testing.assert_array_equal(rows.vectors, vectors[np.array(rows.ids, int)])
                assert len(gallery.search(vectors, 1).ids) == ROWS

    assert in_child(look) == 0


def stop_at_each_write(folder, kills):
    """Return how many writers were stopped, of a gallery that is new or has a block."""
    stopped = 0
    for begun in (False, True):
        for limit in LIMITS:
            uri = f"lancedb://{folder}/{'killed' if kills else 'full'}{begun}{limit}"
            if begun:
                assert in_child(lambda uri=uri: first_block(uri)) == 0

            def write(uri=uri, limit=limit):
                limited(limit, kills)
                add(uri)

            status = in_child(write)
            assert status in (0, -signal.SIGXFSZ if kills else 3), status
            stopped += status != 0
            check_whole(uri)
            assert in_child(lambda uri=uri: finish(uri)) == 0
    return stopped


def first_block(uri):
    """Write the first block alone."""
    vectors = np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)
    with open_gallery(uri) as gallery:
        gallery.add([f"{row:02}" for row in range(BLOCK)], vectors[:BLOCK], source="test")


def finish(uri):
    """Make the same call again, and count."""
    counts = add(uri)
    assert counts.added + counts.present == ROWS
    assert not counts.replaced
    with open_gallery(uri) as gallery:
        assert len(gallery) == ROWS


def refuse_read_only(folder):
    """A folder that may not be written is refused, and may be searched."""
    uri = f"lancedb://{folder}/read_only"
    assert in_child(lambda: first_block(uri)) == 0
    place = pathlib.Path(folder, "read_only")
    paths = [place, *place.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def write():
        # Also for root; it takes effect for a program that is started.
        ctypes.CDLL(None).prctl(_DROP_CAPABILITY, _OVERRIDE_PERMISSIONS, 0, 0, 0)
        program = f"from tests.retrieval import stopped_writers as w; w.add_or_exit({uri!r})"
        os.execv(sys.executable, [sys.executable, "-c", program])

    assert in_child(write) == 3
    check_whole(uri)
    for path in paths:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert in_child(lambda: finish(uri)) == 0


def add_or_exit(uri):
    """Search, then add; exit with 3 where only that is refused."""
    with open_gallery(uri) as gallery:
        assert len(gallery.search(np.ones((1, 16)), 1).ids) == 1
    try:
        add(uri)
    except UserError:
        sys.exit(3)


if __name__ == "__main__":
    place = sys.argv[1]
    counts = {name: stop_at_each_write(place, name == "killed") for name in ("killed", "full")}
    refuse_read_only(place)
    print(json.dumps(counts))
