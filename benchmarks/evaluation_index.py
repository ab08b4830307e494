"""An approximate index of a large gallery on disk: the part `index` of `benchmarks.evaluation`."""

import os
import time

from benchmarks.evaluation_arrays import clocked, make_gallery

BUDGET = 256 * 2**20
NEAREST = 10


def index_part(args, folder):
    """Build, save and search an approximate index."""
    import numpy as np

    from tfdml.retrieval import build_index, index_recall, load_index, nearest_neighbours

    gallery = make_gallery(f"{folder}/gallery.npy", args.gallery, args.gallery_dim, args.gallery_rank)
    rows = np.sort(np.random.default_rng(0).choice(len(gallery), min(args.queries, len(gallery)), replace=False))
    queries = gallery[rows]
    options = {"k": NEAREST, "own_rows": rows}
    for kind in args.kinds.split(","):
        rank = f" of rank {args.gallery_rank}" if args.gallery_rank else ""
        print(f"\nindex {kind}, {len(gallery):,} x {gallery.shape[1]}{rank}; {len(rows):,} of them are the queries")
        started = time.perf_counter()

        def tell(what, done, of, started=started):
            print(f"  {what}: {done:,} of {of:,} after {time.perf_counter() - started:.0f} s", flush=True)

        built, wall, cpu = clocked(lambda kind=kind, tell=tell: build_index(gallery, kind=kind, progress=tell))
        _, saving, _ = clocked(built.save, f"{folder}/gallery.index")
        size = os.path.getsize(f"{folder}/gallery.index") / 2**20
        print(f"  built in {wall:.1f} s ({cpu:.1f} s of the processors); saved in {saving:.1f} s, {size:,.0f} MiB")
        index = load_index(f"{folder}/gallery.index", mapped=True)
        efforts = [4, 16, 64, 256] if kind == "ivf" else [16, 64, 256]
        results = list(index_recall(index, gallery, k=NEAREST, efforts=efforts, sample=len(rows)))
        about = f"of {index.lists:,} lists, the effort is how many are searched" if index.lists else "effort: efSearch"
        print(f"  {about}\n  {'effort':>8}{f'recall@{NEAREST}':>12}{'± error':>10}{'ms a query':>12}")
        for result in results:
            _, seconds, _ = clocked(lambda e=result.effort, index=index: index.search(queries, effort=e, **options))
            text = f"  {result.effort:>8}{result.recall:>12.4f}{result.standard_error:>10.4f}"
            print(f"{text}{1e3 * seconds / len(queries):>12.3f}", flush=True)
        _, seconds, _ = clocked(lambda: nearest_neighbours(queries, gallery, memory_budget=BUDGET, **options))
        print(f"  {'exact':>8}{1:>12.4f}{'':>10}{1e3 * seconds / len(queries):>12.3f}", flush=True)
