"""Galleries in databases: the recall of a search against the exact one, and queries a second.

    python -m benchmarks.galleries --rows=20000                               a quick try
    python -m benchmarks.galleries                                            the table of docs/galleries.md
    python -m benchmarks.galleries --databases=lancedb,pgvector --dim=512

The gallery is made: classes of ten embeddings of length 1, which like those of trained networks vary mostly in a few
directions (--rank) and by a hundredth of that in all others; it lies memory-mapped on disk. The queries are some of its
rows, which are left out of their own answers. Recall@10 is the share of the exact search's ten nearest that is found.
Each database fills a table, is asked exactly, builds each of its approximate indexes and is asked again, in a process
of its own. It does so with a hundredth and a tenth of the rows first, and with all where that is expected to end in
time. After --limit seconds it is stopped, and the results with the most rows are printed. PostgreSQL is started for it,
in a folder that is removed.
"""

import argparse
import contextlib
import importlib.util
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from benchmarks.evaluation_arrays import make_gallery
from tools.numbers import Results, command_line

NEAREST = 10
ASKED = 20
# The indexes that each database is searched with, besides the exact search; and the packages that it needs.
INDEXES = {
    "lancedb": ("ivf&effort=32", "ivf_pq&effort=32&refine=10", "hnsw&effort=128"),
    "pgvector": ("ivf&effort=32", "hnsw&effort=128"),
    "qdrant": (),
}
PACKAGES = {
    "lancedb": ("lancedb",),
    "pgvector": ("psycopg", "pgvector", "pgserver"),
    "qdrant": ("qdrant_client",),
}


def answers(folder, vectors, queries):
    """Return the distances of the ten nearest of the queries, which are computed once."""
    path = pathlib.Path(folder, f"answers-{len(vectors)}.npy")
    if not path.exists():
        from tfdml.retrieval import nearest_neighbors

        np.save(path, nearest_neighbors(vectors[queries], vectors, k=NEAREST, own_rows=queries)[1])
    return np.load(path)


def time_search(search, vectors, queries, farthest, seconds):
    """Return Recall@10 and queries a second of a search that runs for about `seconds`."""
    search(vectors[queries[:ASKED]], queries[:ASKED])
    shares, began = [], time.perf_counter()
    for start in range(0, len(queries), ASKED):
        part = queries[start : start + ASKED]
        near = search(vectors[part], part) <= farthest[start : start + len(part), -1:] + 1e-6
        shares += near.mean(axis=1).tolist()
        if time.perf_counter() - began > seconds:
            break
    return float(np.mean(shares)), len(shares) / (time.perf_counter() - began)


def database_search(gallery):
    """Return a search by rows of the gallery: the distances of their ten nearest others."""

    def search(vectors, rows):
        found = gallery.search(vectors, NEAREST + 1)
        others = np.where(found.ids == rows.astype(str)[:, None], np.inf, found.distances)
        return np.sort(others, axis=1)[:, :NEAREST]

    return search


def one(arguments):
    """Fill tables of more and more rows while that is expected to end in time; print JSON after each search."""
    began, sizes = time.perf_counter(), (arguments.rows // 100, arguments.rows // 10, arguments.rows)
    if arguments.whole or arguments.one == "exact search":
        sizes = sizes[-1:]
    for rows in sizes:
        filling = measure_table(arguments.one, max(rows, 1000), arguments)
        if 10 * filling > arguments.limit - (time.perf_counter() - began):
            return


def measure_table(database, rows, arguments):
    """Search one table exactly and by each index; return the seconds of writing, and of building all but graphs."""
    from tfdml.retrieval import connect, nearest_neighbors

    vectors = np.load(f"{arguments.folder}/gallery.npy", mmap_mode="r")[:rows]
    queries = np.random.default_rng(0).choice(rows, min(arguments.queries, rows), replace=False)
    farthest = answers(arguments.folder, vectors, queries)
    filling = 0.0

    def report_line(index, search, what="", began=0.0):
        nonlocal filling
        times = {what: time.perf_counter() - began} if what else {}
        filling += 0 if index.startswith("hnsw") else sum(times.values())
        recall, rate = time_search(search, vectors, queries, farthest, arguments.seconds)
        print(
            "REPORT" + json.dumps({"index": index, "rows": rows, "recall": recall, "rate": rate, **times}), flush=True
        )

    if database == "exact search":
        copy = np.array(vectors)
        report_line("exact", lambda queries, rows: nearest_neighbors(queries, copy, k=NEAREST, own_rows=rows)[1])
        return filling
    uri = arguments.uri.replace("ROWS", str(rows))
    began = time.perf_counter()
    with connect(uri) as gallery:
        for start in range(0, rows, gallery.batch_rows):
            part = range(start, min(start + gallery.batch_rows, rows))
            gallery.upsert(list(map(str, part)), vectors[start : part.stop], {"label": [row // 10 for row in part]})
        gallery.optimize()
        report_line("exact", database_search(gallery), "written", began)
    for index in INDEXES[database]:
        began = time.perf_counter()
        with connect(uri + ("&" if "?" in uri else "?") + f"index={index}") as gallery:
            gallery.optimize()
            report_line(index.replace("&", ", "), database_search(gallery), "built", began)
    return filling


def measure_database(database, uri, arguments, folder):
    """Return by index what the process of a database reports of the most rows, until its end or its limit."""
    command = [sys.executable, "-m", "benchmarks.galleries", f"--one={database}", f"--uri={uri}", f"--folder={folder}"]
    command += [f"--{name}={getattr(arguments, name)}" for name in ("rows", "queries", "seconds", "limit")]
    command += ["--whole"] if arguments.whole else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    clock = threading.Timer(arguments.limit, process.kill)
    clock.start()
    out, err = process.communicate()
    clock.cancel()
    if process.returncode not in (0, -signal.SIGKILL):
        print(f"{database}: {(err.strip() or 'failed').splitlines()[-1][:200]}", flush=True)
    lines = [json.loads(line[len("REPORT") :]) for line in out.splitlines() if line.startswith("REPORT")]
    return {line["index"]: line for line in lines}


@contextlib.contextmanager
def address(database, folder):
    """Return the address of new tables, in which ROWS is replaced by the number of rows."""
    if database != "pgvector":
        yield f"{database}://{folder}/{database}ROWS"
        return
    import pgserver

    server = pgserver.get_server(f"{folder}/pg", cleanup_mode="stop")
    try:
        yield f"pgvector://postgres@/postgres?socket={folder}/pg&table=tROWS"
    finally:
        server.cleanup()


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="at least 1,000")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16, help="directions in which the embeddings vary")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10, help="to ask for, at most about, for each line")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each database")
    parser.add_argument("--whole", action="store_true", help="all rows at once, not a hundredth and a tenth first")
    parser.add_argument("--databases", default=",".join(INDEXES))
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--uri", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_gallery(f"{folder}/gallery.npy", arguments.rows, arguments.dim, arguments.rank)
        print(f"{arguments.rows:,} x {arguments.dim}, classes of ten, rank {arguments.rank}; {ASKED} queries a call")
        columns = ("search", "rows", "Recall@10", "queries a second", "written, s", "index built, s")
        row = Results(arguments.json).table("table", "database", *columns)
        for database in ["exact search", *arguments.databases.split(",")]:
            missing = [name for name in PACKAGES.get(database, ()) if importlib.util.find_spec(name) is None]
            if missing:
                print(f"{database}: {', '.join(missing)} is not installed", flush=True)
                continue
            with address(database, folder) as uri:
                found = measure_database(database, uri, arguments, folder)
            for line in found.values():
                times = [f"{line[name]:,.0f}" if name in line else "" for name in ("written", "built")]
                rates = f"{line['recall']:.4f}", f"{line['rate']:,.0f}"
                row(database, line["index"], f"{line['rows']:,}", *rates, *times)


if __name__ == "__main__":
    main()
