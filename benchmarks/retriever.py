"""A retriever of a large gallery: the time to write, load, change and search it.

    python -m benchmarks.retriever
    python -m benchmarks.retriever --items=20000 --dim=32 --rounds=3           a quick try

The gallery is made: classes of ten embeddings, which like those of trained networks vary mostly in a few directions
(--rank). Queries are further images of its classes.
"""

import pathlib
import statistics
import tempfile

import numpy as np

from benchmarks.evaluation_arrays import time_call
from tools.numbers import Results, command_line

NEAREST = 10
QUERIES = 512


def make_vectors(count, dim, rank, seed):
    """(N, d) float32 of length 1, in classes of ten; the seed draws the images, not the classes."""
    directions = np.random.default_rng(0).standard_normal((rank, dim), np.float32)
    centers = np.random.default_rng(1).standard_normal((-(-count // 10), rank), np.float32)
    rng = np.random.default_rng(seed)
    inner = np.repeat(centers, 10, axis=0)[:count] + 0.5 * rng.standard_normal((count, rank), np.float32)
    points = inner @ directions + 0.01 * rng.standard_normal((count, dim), np.float32)
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--items", type=int, default=250_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20, help="searches of one query, and of a batch of 32")
    arguments = parser.parse_args()
    import tfdml
    from tfdml.export import GalleryItem, Retriever

    embedder = tfdml.models.Embedder(
        tfdml.backbones.resolve("conv4", 32, width=8), embedding_dim=arguments.dim, image_size=32
    )
    embedder.build((None, 32, 32, 3))
    vectors = make_vectors(arguments.items, arguments.dim, arguments.rank, seed=2)
    queries = make_vectors(arguments.items, arguments.dim, arguments.rank, seed=3)
    queries = queries[:: max(1, arguments.items // QUERIES)][:QUERIES]

    def items():
        for row, vector in enumerate(vectors):
            yield GalleryItem(f"item-{row}", embedding=vector, label=row // 10, metadata={"class": str(row // 10)})

    print(f"{arguments.items:,} items, {arguments.dim} dimensions")
    columns = ("write, s", "MB", "load, s", "one query, ms", "32 queries, ms")
    results = Results(arguments.json)
    row = results.table("table", *columns)
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        built, writing, _ = time_call(Retriever.build, embedder, items(), root)
        size = sum(file.stat().st_size for file in built.path.rglob("*") if file.is_file()) / 1e6
        retriever, loading, _ = time_call(Retriever.load, root)
        milliseconds = []
        for size_of_batch in (1, 32):
            starts = range(0, size_of_batch * arguments.rounds, size_of_batch)
            batches = [queries[np.arange(start, start + size_of_batch) % len(queries)] for start in starts]
            milliseconds.append(
                1e3 * statistics.median(time_call(retriever.search, batch, NEAREST)[1] for batch in batches)
            )
        _, adding, _ = time_call(retriever.add, [GalleryItem("new", embedding=queries[0])])
        assert retriever.search(queries[:1], 1).ids[0, 0] == "new"
        _, removing, _ = time_call(retriever.remove, ["new"])
        row(f"{writing:.1f}", f"{size:.0f}", *(f"{value:.1f}" for value in (loading, *milliseconds)))
        results.table("changes", "add one, s", "remove one, s")(f"{adding:.1f}", f"{removing:.1f}")


if __name__ == "__main__":
    main()
