"""An approximate index of a large gallery on disk: the part `index` of `benchmarks.evaluation`."""

import functools
import os

from benchmarks.evaluation_arrays import make_gallery, time_call

BUDGET = 256 * 2**20
NEAREST = 10


def index_part(args, folder, results):
    """Build, save and search an approximate index of galleries of each rank."""
    import numpy as np

    from tfdml.retrieval import build_index, index_recall, load_index, nearest_neighbors

    row = results.table(
        "index", "index, rank of the gallery", "lists searched", "recall of the ten nearest", "ms a query"
    )
    built_rows = []
    for rank in args.ranks:
        gallery = make_gallery(f"{folder}/gallery{rank}.npy", args.gallery, args.gallery_dim, rank)
        rows = np.sort(np.random.default_rng(0).choice(len(gallery), min(args.queries, len(gallery)), replace=False))
        queries, options = gallery[rows], {"k": NEAREST, "own_rows": rows}
        for kind in args.kinds.split(","):
            name = f"`{kind}`, {rank or 'full'}"
            built, wall, cpu = time_call(functools.partial(build_index, gallery, kind=kind))
            _, saving, _ = time_call(built.save, f"{folder}/gallery.index")
            size = os.path.getsize(f"{folder}/gallery.index") / 2**20
            index = load_index(f"{folder}/gallery.index", mapped=True)
            lists = index.lists or ""
            built_rows.append((name, lists, f"{wall:.1f}", f"{cpu:.1f}", f"{saving:.1f}", f"{size:,.0f}"))
            efforts = [4, 16, 64, 256] if kind == "ivf" else [16, 64, 256]
            for point in index_recall(index, gallery, k=NEAREST, efforts=efforts, sample=len(rows)):
                _, seconds, _ = time_call(functools.partial(index.search, queries, effort=point.effort, **options))
                recall = f"{point.recall:.3f} ± {point.standard_error:.3f}"
                row(name, point.effort, recall, f"{1e3 * seconds / len(rows):.2f}")
        _, seconds, _ = time_call(
            functools.partial(nearest_neighbors, queries, gallery, memory_budget=BUDGET, **options)
        )
        row(f"exact search, {rank or 'full'}", "", "1", f"{1e3 * seconds / len(rows):.2f}")
    add = results.table(
        "built", "index, rank of the gallery", "lists", "seconds", "processor seconds", "saved, s", "MiB"
    )
    for cells in built_rows:
        add(*cells)
