"""Synthetic embeddings, and timing, for the benchmarks of the evaluation."""

import dataclasses
import time


@dataclasses.dataclass
class Arrays:
    """The embeddings and labels, and their clusters after k-means."""

    embeddings: object
    labels: object
    clusters: object = None


def made_embeddings(count, dim, classes, seed=0):
    """(N, d) float32 of length 1 and (N,) labels: classes of two images or more, each with a scatter of its own."""
    import numpy as np

    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.repeat(np.arange(classes), 2), rng.integers(0, classes, count - 2 * classes)])
    rng.shuffle(labels)
    centers = rng.normal(size=(classes, dim)).astype(np.float32)
    # At about this scatter images of other classes are as near as those of the class.
    widths = (rng.uniform(0.5, 1.5, (classes, 1)) * dim**0.25 / 2.4).astype(np.float32)
    points = centers[labels] + widths[labels] * rng.standard_normal((count, dim), np.float32)
    return points / np.linalg.norm(points, axis=1, keepdims=True), labels


def time_call(function, *arguments, **options):
    """Return a call's result, its wall seconds and its CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function(*arguments, **options)
    return result, time.perf_counter() - wall, time.process_time() - cpu


def make_gallery(path, count, dim, rank):
    """Write a gallery of classes of ten images, a piece at a time; returns it memory-mapped.

    With a rank below the dimension, the images vary in as many directions, and by a hundredth of that in all others.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    directions = rng.standard_normal((rank, dim), np.float32) if 0 < rank < dim else None
    gallery = np.lib.format.open_memmap(path, "w+", np.float32, (count, dim))
    for start in range(0, count, 100_000):
        size = min(100_000, count - start)
        width = dim if directions is None else rank
        points = made_embeddings(size, width, max(size // 10, 1), seed=start + 1)[0]
        if directions is not None:
            points = points @ directions + np.float32(0.01) * rng.standard_normal((size, dim), np.float32)
            points /= np.linalg.norm(points, axis=1, keepdims=True)
        gallery[start : start + size] = points
    gallery.flush()
    return np.load(path, mmap_mode="r")
