"""Vectors whose distances float32 products lose: far ones among near ones, clusters far apart,
copies, offsets."""

import numpy as np

NAMES = (
    "plain",
    "unit",
    "offset",
    "half precision",
    "one far",
    "one very far",
    "two far and close",
    "two clusters",
    "growing",
    "copies",
    "copies among far",
    "tiny differences",
)


def far_vectors(name, size=40, dim=5, seed=0):
    """(size, dim) float32 of this name."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, dim))
    if name == "unit":
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    elif name == "offset":
        x += 1e3
    elif name == "half precision":
        x = (x + 30).astype(np.float16)
    elif name == "one far":
        x[size // 3] = 1e6
    elif name == "one very far":
        x[size // 3] = 1e15
    elif name == "two far and close":
        x[size // 3 : size // 3 + 2] += 1e4
    elif name == "two clusters":
        x += np.where(rng.random(size) < 0.5, -1e3, 1e3)[:, None]
    elif name == "growing":
        x *= np.geomspace(1e-3, 1e5, size)[rng.permutation(size), None]
    elif name == "copies":
        x = x[rng.integers(size // 3, size=size)]
    elif name == "copies among far":
        x = x[rng.integers(size // 2, size=size)]
        x[x[:, 0] > 1] *= 1e5
    elif name == "tiny differences":
        x = 1 + x * 1e-5
        x[0] = -3e4
    else:
        assert name == "plain"
    return np.ascontiguousarray(x, np.float32)
