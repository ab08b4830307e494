"""Distances d+ between images of one class and d- between images of different classes, from sampled pairs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.retrieval import check_labels
from tfdml.evaluation.search.exact import check_embeddings, unit_rows
from tfdml.pairwise import DISTANCES

# Differences held at once, in pairs.
_CHUNK = 8192


def sample_pair_distances(
    embeddings: Any, labels: Any, *, distance: str = "euclidean", num_pairs: int = 50_000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The distances of pairs drawn at random, with replacement, each pair of its kind being equally likely.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`, as `nearest_neighbours`.
        num_pairs: How many pairs of each kind.
        seed: Of the draw.

    Returns:
        (P,) float32 d+ and (P,) float32 d-; empty where no such pair exists.

    Raises:
        UserError: Embeddings that are empty or not finite, labels that do not go with them, an unknown distance.

    Example:
        >>> import numpy as np
        >>> positive, negative = sample_pair_distances(np.array([[0.0], [1.0], [5.0]]), [0, 0, 1], num_pairs=9)
        >>> set(positive.tolist()), set(negative.tolist()) <= {4.0, 5.0}
        ({1.0}, True)
    """
    if distance not in DISTANCES:
        raise UserError(f"unknown distance {distance!r}; one of {', '.join(DISTANCES)}")
    embeddings = check_embeddings(embeddings)
    labels = check_labels(labels, len(embeddings))
    rng = np.random.default_rng(seed)
    if distance == "cosine":
        embeddings = unit_rows(embeddings)
    positive, negative = _positive_pairs(labels, num_pairs, rng), _negative_pairs(labels, num_pairs, rng)
    return _measure(embeddings, *positive, distance), _measure(embeddings, *negative, distance)


def _positive_pairs(labels: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(labels, kind="stable")
    _, starts, sizes = np.unique(labels[order], return_index=True, return_counts=True)
    pairs = sizes.astype(np.float64) * (sizes - 1)
    if not pairs.any():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    chosen = rng.choice(len(sizes), size=count, p=pairs / pairs.sum())
    size, start = sizes[chosen], starts[chosen]
    first = rng.integers(size)
    second = (first + rng.integers(1, size)) % size  # a step of 1 .. size - 1 never ends where it began
    return order[start + first], order[start + second]


def _negative_pairs(labels: np.ndarray, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(labels, kind="stable")
    _, sizes = np.unique(labels[order], return_counts=True)
    starts, others = np.cumsum(sizes) - sizes, len(labels) - sizes
    pairs = sizes.astype(np.float64) * others
    if not pairs.any():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    chosen = rng.choice(len(sizes), size=count, p=pairs / pairs.sum())
    first = starts[chosen] + rng.integers(sizes[chosen])
    second = rng.integers(others[chosen])
    second += np.where(second >= starts[chosen], sizes[chosen], 0)  # step over the class of the first
    return order[first], order[second]


def _measure(embeddings: np.ndarray, first: np.ndarray, second: np.ndarray, distance: str) -> np.ndarray:
    result = np.empty(len(first), np.float32)
    for start in range(0, len(first), _CHUNK):
        part = slice(start, start + _CHUNK)
        x, y = embeddings[first[part]].astype(np.float64), embeddings[second[part]].astype(np.float64)
        if distance in ("dot", "cosine"):
            product = np.einsum("pd,pd->p", x, y)
            result[part] = -product if distance == "dot" else 1 - product
        else:
            squared = np.square(x - y).sum(axis=1)
            result[part] = np.sqrt(squared) if distance == "euclidean" else squared
    return result
