"""Steps after the embedding at the size of SOP: seconds and peak memory.

    python -m benchmarks.reranking
    python -m benchmarks.reranking --images=2000 --dim=32 --classes=200        a quick try

Embeddings are made, in classes of two images or more; training classes are made besides, for the whitening. Each chain
runs in a process of its own, whose peak memory it states, the embeddings among it; the first line is the plain search.
"""

import concurrent.futures
import multiprocessing

from benchmarks.evaluation_arrays import held_memory, made_embeddings
from tools.numbers import Results, command_line

CHAINS = (
    "",
    "whitening(dim=128)",
    "query_expansion(k=5)",
    "k_reciprocal",
    "k_reciprocal(top=1000)",
)


def measure_chain(chain, images, dim, classes, queries):
    """The last row of a chain in this process, and its peak memory in MiB; of the plain search where it is empty."""
    from tfdml.evaluation import Sources, measure_chains, steps_of
    from tfdml.training.expressions import parse_sum

    embeddings, labels = made_embeddings(images, dim, classes)
    train = made_embeddings(min(images, 20_000), dim, min(classes, 8_000), seed=1)[0]
    steps = [steps_of((call.name, call.arguments) for _, call in parse_sum(chain, "chain"))] if chain else []
    parts = {"embeddings": embeddings, "labels": labels}
    if queries:
        parts = {"embeddings": embeddings[:queries], "labels": labels[:queries]}
        parts |= {"gallery": embeddings[queries:], "gallery_labels": labels[queries:]}
    sources = Sources(train=lambda views: train)
    rows = measure_chains(**parts, chains=steps, sources=sources, metrics=["recall@1", "map@r"])
    return rows[-1], held_memory(peak=True)


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--images", type=int, default=60_502)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--classes", type=int, default=11_316)
    parser.add_argument("--queries", type=int, default=0, help="so many of them in the others; 0: all in all")
    parser.add_argument("--chains", nargs="*", default=CHAINS, help="as tfdml evaluate --after; an empty one is plain")
    arguments = parser.parse_args()
    print(f"{arguments.images:,} images, {arguments.dim} dimensions, {arguments.classes:,} classes")
    add = Results(arguments.json).table("cost", "step", "seconds", "peak, MiB")
    how = multiprocessing.get_context("spawn")
    for chain in arguments.chains:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=how) as process:
            sizes = (arguments.images, arguments.dim, arguments.classes, arguments.queries)
            row, peak = process.submit(measure_chain, chain, *sizes).result()
        name = f"`{chain}`" if chain else "plain"
        add(name, f"{row['seconds']:.1f}", f"{peak or 0:,.0f}")


if __name__ == "__main__":
    main()
