"""What is compared with pytorch-metric-learning: its losses, two miners by themselves, and the
batches."""

import numpy as np

from benchmarks.pml_losses import CASES, Case
from tests.support.mathematics import DEGENERATE, degenerate_batches, random_batch

PROXIES = 12  # classes
# The pairs that a miner keeps, and the probabilities with which one draws.
MINERS = {
    "pairs": Case("pairs", None, miner=("MultiSimilarityMiner", {})),
    "weights": Case("weights", None, miner=("DistanceWeightedMiner", {})),
}


def rows():
    """What goes to the other environment: cases with a miner are not run on degenerate batches."""
    losses = [
        {**case.there(), "batches": [*case.batches, *(DEGENERATE if case.miner is None else ())]}
        for case in CASES.values()
    ]
    return losses + [case.there() for case in MINERS.values()]


def batches():
    """Name -> (labels, embeddings); "real" is as large as a batch of a run, "raw" is of vectors of
    any length."""
    two = np.repeat(np.arange(6), 2)
    # Each anchor has one negative nearer than 1.4, so that there is nothing to draw.
    one = np.array([[1, 0, 0.3], [-1, 0, 0.3], [0.9, 0.3, -0.2], [-0.9, 0.2, 0.4]])
    one /= np.linalg.norm(one, axis=1, keepdims=True)
    return {
        "unit": random_batch(0, 12, 3, 8),
        "raw": random_batch(1, 14, 4, 6, unit=False),
        "two a class": (two, random_batch(2, 12, 3, 5)[1]),
        "real": (np.arange(128) % 32 % PROXIES, random_batch(4, 128, 32, 64)[1]),
        "one negative": (np.array([0, 0, 1, 1]), one.astype("float32")),
        **degenerate_batches(),
    }


def proxies(name, per_class):
    """The proxies on a batch: (12, d), or (12, K, d)."""
    dim = batches()[name][1].shape[1]
    shape = (PROXIES, dim) if per_class == 1 else (PROXIES, per_class, dim)
    return np.random.default_rng(5).normal(size=shape).astype("float32")
