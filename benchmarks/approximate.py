"""Measure a database's own index: time to build, time and recall of searches, memory.

  python -m benchmarks.approximate --json=docs/numbers/approximate.json
  PGOPTIONS='-c maintenance_work_mem=3GB' python -m benchmarks.approximate \
      --pgvector=pgvector://postgres@/postgres

The vectors have 128 dimensions. Those of `classes` are 20 noisy copies of each center, of length 1:
two of a class have a cosine of about 0.67. Those of `noise` are uniform, which no embedder makes
and where every index is at its worst. Each data set is a process of its own, whose peak memory is
measured; the server's is not. Times are seconds of the wall and of the client's processor.
"""

from __future__ import annotations

import multiprocessing
import queue
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdml.retrieval import WritableGallery, open_gallery
from tools.numbers import Results, command_line

DIMENSIONS = 128
IMAGES = 20
SPREAD = 0.7
QUERIES = 100
COLUMNS = ("database", "data", "rows", "build", "exact", "by the index", "recall", "memory")


def classes(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return (rows, 128) vectors of length 1, 20 of each class together."""
    centers = rng.standard_normal((rows // IMAGES, DIMENSIONS), np.float32)
    vectors = np.repeat(centers, IMAGES, axis=0)
    vectors += SPREAD * rng.standard_normal(vectors.shape, np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def noise(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return (rows, 128) uniform vectors."""
    return rng.random((rows, DIMENSIONS), np.float32)


DATA = {"classes": classes, "noise": noise}


def timed(function: Callable[[], Any]) -> str:
    """Return the seconds of a call: of the wall, and of the processor."""
    wall = time.perf_counter()
    processor = time.process_time()
    function()
    return f"{time.perf_counter() - wall:.1f} ({time.process_time() - processor:.1f})"


def measure(address: str, data: str, rows: int, results: Any) -> None:
    """Put what is measured of one gallery into a queue, as the cells of a row."""
    rng = np.random.default_rng(0)
    vectors = DATA[data](rng, rows)
    with open_gallery(address) as gallery:
        assert isinstance(gallery, WritableGallery)
        gallery.add([f"{row:07}" for row in range(rows)], vectors)
        queries = vectors[rng.permutation(rows)[:QUERIES]]
        built = timed(gallery.build_index)
        # What is read first stays in memory.
        gallery.search(queries, 10)
        exact = timed(lambda: gallery.search(queries, 10))
        gallery.search(queries, 10, exact=False)
        indexed = timed(lambda: gallery.search(queries, 10, exact=False))
        recall = gallery.measure_index(10).recall
        gallery.delete(where={"source": ""})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    results.put((built, exact, indexed, f"{100 * recall:.1f} %", f"{peak:.1f} GB"))


def main() -> None:
    """Measure both data sets in LanceDB and, where it is named, in PostgreSQL."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--pgvector", default="", help="the address of an empty gallery")
    arguments = parser.parse_args()
    results = Results(arguments.json)
    add = results.table("indexes", *COLUMNS)
    spawn = multiprocessing.get_context("spawn")
    rows = arguments.rows
    runs = [("LanceDB", "")]
    if arguments.pgvector:
        runs.append(("pgvector", arguments.pgvector))
    for database, address in runs:
        for data in DATA:
            folder = tempfile.mkdtemp()
            place = f"{address}?table={data}" if address else f"lancedb://{folder}"
            cells = spawn.Queue()
            process = spawn.Process(target=measure, args=(place, data, rows, cells))
            process.start()
            while True:
                try:
                    row = cells.get(timeout=10)
                    break
                except queue.Empty:
                    if not process.is_alive():
                        raise SystemExit(f"{database}, {data}: failed") from None
            process.join()
            shutil.rmtree(folder)
            add(database, data, f"{rows:,}", *row)


if __name__ == "__main__":
    main()
