"""Galleries in their databases: how much of the exact answer a search finds, and how many queries a second.

    python -m benchmarks.galleries --rows=20000                               a quick try
    python -m benchmarks.galleries                                            the table of docs/galleries.md
    python -m benchmarks.galleries --databases=lancedb,pgvector --dim=512

The gallery is made: classes of ten embeddings of length 1, which like those of trained networks vary mostly in a few
directions (--rank) and by a hundredth of that in all others; it lies memory-mapped on disk. The queries are some of its
rows, which are left out of their own answers. Recall@10 is the share of the exact search's ten nearest that is found.
Each database fills a table, is asked exactly, builds each of its approximate indexes and is asked again, in a process
of its own. It does so with a hundredth and a tenth of the rows first, and goes on to more where that promises to end
in time; after --limit seconds it is ended, and what it did with the most rows is printed. PostgreSQL is started for it,
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
# What each database is asked with, beside the exact search; and what it needs.
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
    """The distances of the ten nearest of the queries: computed once, and kept."""
    path = pathlib.Path(folder, f"answers-{len(vectors)}.npy")
    if not path.exists():
        from tfdml.retrieval import nearest_neighbours

        np.save(path, nearest_neighbours(vectors[queries], vectors, k=NEAREST, own_rows=queries)[1])
    return np.load(path)


def asked(search, vectors, queries, farthest, seconds):
    """(Recall@10, queries a second) of a search, asked some queries at a time for about so long."""
    search(vectors[queries[:ASKED]], queries[:ASKED])
    shares, began = [], time.perf_counter()
    for start in range(0, len(queries), ASKED):
        part = queries[start : start + ASKED]
        near = search(vectors[part], part) <= farthest[start : start + len(part), -1:] + 1e-6
        shares += near.mean(axis=1).tolist()
        if time.perf_counter() - began > seconds:
            break
    return float(np.mean(shares)), len(shares) / (time.perf_counter() - began)


def of_database(gallery):
    """A search of a gallery by rows of it: the distances of their ten nearest others."""

    def search(vectors, rows):
        found = gallery.search(vectors, NEAREST + 1)
        others = np.where(found.ids == rows.astype(str)[:, None], np.inf, found.distances)
        return np.sort(others, axis=1)[:, :NEAREST]

    return search


def one(arguments):
    """Fill tables of more and more rows while that promises to end in time; a line of JSON after each search."""
    began, sizes = time.perf_counter(), (arguments.rows // 100, arguments.rows // 10, arguments.rows)
    if arguments.whole or arguments.one == "exact search":
        sizes = sizes[-1:]
    for rows in sizes:
        filling = asked_of(arguments.one, max(rows, 1000), arguments)
        if 10 * filling > arguments.limit - (time.perf_counter() - began):
            return


def asked_of(database, rows, arguments):
    """Ask one table exactly and by each index; the seconds that it took to write, and to build what is no graph."""
    from tfdml.retrieval import connect, nearest_neighbours

    vectors = np.load(f"{arguments.folder}/gallery.npy", mmap_mode="r")[:rows]
    queries = np.random.default_rng(0).choice(rows, min(arguments.queries, rows), replace=False)
    farthest = answers(arguments.folder, vectors, queries)
    filling = 0.0

    def tell(index, search, what="", began=0.0):
        nonlocal filling
        times = {what: time.perf_counter() - began} if what else {}
        filling += 0 if index.startswith("hnsw") else sum(times.values())
        recall, rate = asked(search, vectors, queries, farthest, arguments.seconds)
        print("TOLD" + json.dumps({"index": index, "rows": rows, "recall": recall, "rate": rate, **times}), flush=True)

    if database == "exact search":
        held = np.array(vectors)
        tell("exact", lambda asked, rows: nearest_neighbours(asked, held, k=NEAREST, own_rows=rows)[1])
        return filling
    uri = arguments.uri.replace("ROWS", str(rows))
    began = time.perf_counter()
    with connect(uri) as gallery:
        for start in range(0, rows, gallery.batch_rows):
            part = range(start, min(start + gallery.batch_rows, rows))
            gallery.upsert(list(map(str, part)), vectors[start : part.stop], {"label": [row // 10 for row in part]})
        gallery.optimize()
        tell("exact", of_database(gallery), "written", began)
    for index in INDEXES[database]:
        began = time.perf_counter()
        with connect(uri + ("&" if "?" in uri else "?") + f"index={index}") as gallery:
            gallery.optimize()
            tell(index.replace("&", ", "), of_database(gallery), "built", began)
    return filling


def measured(database, uri, arguments, folder):
    """By index, what the process of a database told, until its end or its limit, of the most rows."""
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
    lines = [json.loads(line[4:]) for line in out.splitlines() if line.startswith("TOLD")]
    return {line["index"]: line for line in lines}


@contextlib.contextmanager
def address(database, folder):
    """The address of tables that are new, in which ROWS tells them apart."""
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
                found = measured(database, uri, arguments, folder)
            for line in found.values():
                times = [f"{line[name]:,.0f}" if name in line else "" for name in ("written", "built")]
                rates = f"{line['recall']:.4f}", f"{line['rate']:,.0f}"
                row(database, line["index"], f"{line['rows']:,}", *rates, *times)


if __name__ == "__main__":
    main()
