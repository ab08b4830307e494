"""Time verification over all pairs, and count how often calibrated thresholds keep to their intervals.

    python -m benchmarks.verification
    python -m benchmarks.verification --embeddings=vectors.npz

Without `--embeddings`: seconds and memory of 60,000 made embeddings of 128 dimensions. With an .npz file (`embeddings`,
`labels`): the threshold comes from one random half of the classes, the rates from the other.
"""

import argparse
import resource
import time

import numpy as np

from tfdml.evaluation import calibrate, verification
from tfdml.evaluation.verification import accepted_rates


def time_all_pairs(images, dim):
    """Print how long all pairs take, and how much memory."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(images // 5), 5)
    centers = rng.normal(size=(images // 5, dim))
    embeddings = (centers[labels] + rng.normal(size=(len(labels), dim))).astype("float32")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    result = verification(embeddings, labels)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    pairs = result.num_same + result.num_different
    print(f"{pairs:,} pairs: {time.perf_counter() - start:.0f} s, {memory:.0f} MiB more than before")


def count_covered(embeddings, labels, splits, far):
    """Print in how many random halves of the classes the rates lie in their intervals."""
    rng, classes = np.random.default_rng(1), np.unique(labels)
    covered = dict.fromkeys(("far", "tar", "precision"), 0)
    for _ in range(splits):
        half = np.isin(labels, rng.permutation(classes)[: len(classes) // 2])
        calibration = calibrate(embeddings[half], labels[half], far=far)
        found = accepted_rates(embeddings[~half], labels[~half], calibration.threshold)
        for name in covered:
            interval = getattr(calibration, name)
            covered[name] += interval.low <= getattr(found, name).mean <= interval.high
    print(", ".join(f"{name} in its interval {count} of {splits}" for name, count in covered.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--embeddings", default="", help="an .npz file with embeddings and labels")
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("--far", type=float, default=1e-3)
    options = parser.parse_args()
    if options.embeddings:
        with np.load(options.embeddings) as file:
            count_covered(file["embeddings"], file["labels"], options.splits, options.far)
    else:
        time_all_pairs(options.images, options.dim)
