"""Searches of many clients at once in each database: queries a second, and the latency.

    python -m benchmarks.database_load --rows=2000 --seconds=2        a quick try
    python -m benchmarks.database_load                                the table of docs/galleries.md

The gallery is that of `benchmarks.galleries`, searched by the index hnsw (qdrant, which has none in this process,
exactly). Each client is a thread with a connection of its own, and asks for the ten nearest of one query after another.
Of qdrant, whose files one connection opens, all clients share that. Client and database share the machine.
"""

import tempfile
import threading
import time

import numpy as np

from benchmarks.evaluation_arrays import make_gallery
from benchmarks.galleries import address
from tfdml.retrieval import connect
from tools.numbers import Results, command_line

INDEXES = {"lancedb": "hnsw&effort=64", "pgvector": "hnsw&effort=64", "qdrant": ""}


def with_index(uri, index):
    """The address with an index."""
    return f"{uri}{'&' if '?' in uri else '?'}index={index}" if index else uri


def waits(galleries, vectors, seconds):
    """Return the seconds of each search of the clients, and the seconds of all."""
    taken, begin = [], threading.Barrier(len(galleries) + 1)
    ends = [0.0]

    def ask(number, gallery):
        rng, own = np.random.default_rng(number), []
        gallery.search(vectors[:1], k=10)
        begin.wait()
        while (now := time.perf_counter()) < ends[0]:
            gallery.search(vectors[rng.integers(len(vectors))][None], k=10)
            own.append(time.perf_counter() - now)
        taken.extend(own)

    clients = [threading.Thread(target=ask, args=pair) for pair in enumerate(galleries)]
    for client in clients:
        client.start()
    began = time.perf_counter()
    ends[0] = began + 3600
    begin.wait()
    began = time.perf_counter()
    ends[0] = began + seconds
    for client in clients:
        client.join()
    return np.array(taken), time.perf_counter() - began


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=8, help="to ask for, for each line")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--databases", default=",".join(INDEXES))
    arguments = parser.parse_args()
    columns = ("search", "clients", "queries a second", "median, ms", "99th percentile, ms")
    row = Results(arguments.json).table("table", "database", *columns)
    with tempfile.TemporaryDirectory() as folder:
        vectors = make_gallery(f"{folder}/gallery.npy", arguments.rows, arguments.dim, 16)
        for database in arguments.databases.split(","):
            with address(database, folder) as uri:
                uri = with_index(uri.replace("ROWS", "rows"), INDEXES[database])
                with connect(uri) as gallery:
                    gallery.upsert([str(number) for number in range(len(vectors))], vectors)
                    gallery.optimize()
                for clients in map(int, arguments.clients.split(",")):
                    shared = database == "qdrant"
                    opened = [connect(uri) for _ in range(1 if shared else clients)]
                    taken, seconds = waits(opened * clients if shared else opened, vectors, arguments.seconds)
                    for gallery in opened:
                        gallery.close()
                    median, slowest = 1000 * np.percentile(taken, [50, 99])
                    how = INDEXES[database].replace("&", ", ") or "exact"
                    row(database, how, clients, f"{len(taken) / seconds:,.0f}", f"{median:,.1f}", f"{slowest:,.1f}")


if __name__ == "__main__":
    main()
