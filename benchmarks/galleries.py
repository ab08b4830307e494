"""Galleries in their databases: how much of the exact answer a search finds, and how many queries a second.

    python -m benchmarks.galleries --rows=20000                               a quick try
    python -m benchmarks.galleries                                            the table of docs/galleries.md
    python -m benchmarks.galleries --databases=lancedb,faiss --dim=512

The gallery is made: classes of ten embeddings of length 1, which like those of trained networks vary mostly in a few
directions (--rank) and by a hundredth of that in all others; it lies memory-mapped on disk. The queries are some of its
rows, which are left out of their own answers. Recall@10 is the share of the exact search's ten nearest that is found.
Each database fills a table, is asked exactly, builds each of its approximate indexes and is asked again, in a process
of its own. It does so with a hundredth and a tenth of the rows first, and goes on to more where that promises to
end within --limit seconds. PostgreSQL is started for it, in a folder that is removed.
"""

import argparse
import contextlib
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from benchmarks.evaluation_arrays import make_gallery

NEAREST = 10
ASKED = 20
# What each database is asked with, beside the exact search; and what it needs.
INDEXES = {
    "faiss": ("ivf&effort=32", "hnsw&effort=128"),
    "lancedb": ("ivf_pq&effort=32&refine=10", "ivf&effort=32"),
    "pgvector": ("ivf&effort=32", "hnsw&effort=128"),
    "milvus": ("ivf&effort=16", "hnsw&effort=128"),
    "qdrant": (),
}
PACKAGES = {
    "faiss": ("faiss",),
    "lancedb": ("lancedb",),
    "pgvector": ("psycopg", "pgvector", "pgserver"),
    "milvus": ("milvus_lite",),
    "qdrant": ("qdrant_client",),
}


def answers(folder, vectors, queries):
    """The distances of the ten nearest of the queries: computed once, and kept."""
    path = pathlib.Path(folder, f"answers-{len(vectors)}.npy")
    if not path.exists():
        from tfdml.evaluation import nearest_neighbours

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
    """Fill a table, and ask it exactly and by each index; a line of JSON after each."""
    from tfdml.evaluation import nearest_neighbours
    from tfdml.retrieval import connect

    vectors = np.load(f"{arguments.folder}/gallery.npy", mmap_mode="r")[: arguments.rows]
    count = min(arguments.queries, len(vectors))
    queries = np.sort(np.random.default_rng(0).choice(len(vectors), count, replace=False))
    np.random.default_rng(1).shuffle(queries)
    farthest = answers(arguments.folder, vectors, queries)

    def tell(index, search, **times):
        recall, rate = asked(search, vectors, queries, farthest, arguments.seconds)
        told = {"index": index, "rows": len(vectors), "recall": recall, "rate": rate, **times}
        print("TOLD" + json.dumps(told), flush=True)

    if arguments.one == "exact search":
        held = np.array(vectors)
        tell("exact", lambda asked, rows: nearest_neighbours(asked, held, k=NEAREST, own_rows=rows)[1])
        return
    began = time.perf_counter()
    with connect(arguments.uri) as gallery:
        for start in range(0, len(vectors), gallery.batch_rows):
            rows = range(start, min(start + gallery.batch_rows, len(vectors)))
            gallery.upsert(list(map(str, rows)), vectors[start : rows.stop], {"label": [row // 10 for row in rows]})
        gallery.optimize()
        tell("exact", of_database(gallery), written=time.perf_counter() - began)
    for index in INDEXES[arguments.one]:
        began = time.perf_counter()
        with connect(arguments.uri + ("&" if "?" in arguments.uri else "?") + f"index={index}") as gallery:
            gallery.optimize()
            built = time.perf_counter() - began
            tell(index.replace("&", ", "), of_database(gallery), built=built)


def told_by(database, uri, rows, arguments, folder):
    """What the process of one database told until its end or its limit, and the seconds that it took."""
    command = [sys.executable, "-m", "benchmarks.galleries", f"--one={database}", f"--uri={uri}", f"--rows={rows}"]
    command += [f"--folder={folder}", f"--queries={arguments.queries}", f"--seconds={arguments.seconds}"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    clock = threading.Timer(arguments.limit, process.kill)
    clock.start()
    out, err = process.communicate()
    clock.cancel()
    if process.returncode not in (0, -9):
        print(f"{database}, {rows:,} rows: {(err.strip() or 'failed').splitlines()[-1][:200]}", flush=True)
    lines = [json.loads(line[4:]) for line in out.splitlines() if line.startswith("TOLD")]
    return lines, time.perf_counter() - began, process.returncode == 0


def measured(database, uris, arguments, folder):
    """By index, what was told at the most rows that ended within the limit."""
    found = {}
    for rows in sorted({max(arguments.rows // 100, 1000), max(arguments.rows // 10, 1000), arguments.rows}):
        lines, seconds, ended = told_by(database, next(uris), rows, arguments, folder)
        found.update({line["index"]: line for line in lines})
        if not ended:
            break
        # Filling grows with the rows; starting and asking do not.
        filling = sum(line.get("written", 0) + line.get("built", 0) for line in lines)
        if rows < arguments.rows and 10 * filling + (seconds - filling) > arguments.limit:
            break
    return found


@contextlib.contextmanager
def addresses(database, folder):
    """Addresses of tables that are new."""
    numbers = iter(range(1000))
    if database != "pgvector":
        yield (f"{database}://{folder}/{database}{number}" for number in numbers)
        return
    import pgserver

    server = pgserver.get_server(f"{folder}/pg", cleanup_mode="stop")
    try:
        yield (f"pgvector://postgres@/postgres?socket={folder}/pg&table=t{number}" for number in numbers)
    finally:
        server.cleanup()


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16, help="directions in which the embeddings vary")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10, help="to ask for, at most about, for each line")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each database at each size")
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
        print("\n| database | search | rows | Recall@10 | queries a second | written, s | index built, s |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for database in ["exact search", *arguments.databases.split(",")]:
            missing = [name for name in PACKAGES.get(database, ()) if importlib.util.find_spec(name) is None]
            if missing:
                print(f"{database}: {', '.join(missing)} is not installed", flush=True)
                continue
            with addresses(database, folder) as uris:
                found = measured(database, uris, arguments, folder)
            for line in found.values():
                cells = [database, line["index"], f"{line['rows']:,}", f"{line['recall']:.4f}", f"{line['rate']:,.0f}"]
                cells += [f"{line[name]:,.0f}" if name in line else "" for name in ("written", "built")]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
