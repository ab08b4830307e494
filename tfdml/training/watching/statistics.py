"""What a batch of embeddings tells: how far it fills its space, its pairs, its hardest triplets, its proxies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


def spread(embeddings: np.ndarray) -> dict[str, float]:
    """How far embeddings spread, and over how many directions.

    With the eigenvalues l_1 .. l_d of their covariance and p_i = l_i / sum_j l_j:

        variance = sum_i l_i
        effective_rank = exp(-sum_i p_i ln p_i)
        participation_ratio = (sum_i l_i)^2 / sum_i l_i^2

    Both ranks lie between 1 and min(B - 1, d). Of unit vectors the variance is at most 1, and half the mean squared
    distance of two of them (drawn with replacement).

    Args:
        embeddings: (B, d).

    Returns:
        The three by name; of images that all have one embedding, variance 0 and ranks of 1.

    Example:
        >>> spread(np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]]))["effective_rank"]
        2.0

    Source: Roy and Vetterli, "The effective rank", EUSIPCO 2007.
    """
    x = np.asarray(embeddings, np.float64)
    # The singular values of the centred rows are those of the covariance, of the smaller of both sizes.
    values = np.linalg.svd(x - x.mean(axis=0), compute_uv=False) ** 2 / len(x)
    total = float(values.sum())
    # Rounding of float32 is no direction.
    if total <= 1e-12:
        return {"variance": total, "effective_rank": 1.0, "participation_ratio": 1.0}
    shares = values[values > 0] / total
    return {
        "variance": total,
        "effective_rank": float(np.exp(-(shares * np.log(shares)).sum())),
        "participation_ratio": float(1.0 / (shares**2).sum()),
    }


def distances(embeddings: np.ndarray) -> np.ndarray:
    """The Euclidean distances of all pairs: (B, d) -> (B, B) float64."""
    x = np.asarray(embeddings, np.float64)
    norms = (x**2).sum(axis=1)
    squared = norms[:, None] + norms[None, :] - 2.0 * (x @ x.T)
    np.fill_diagonal(squared, 0.0)
    return np.sqrt(np.maximum(squared, 0.0))


def pair_distances(matrix: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distances of positive and of negative pairs, each pair once.

    Args:
        matrix: (B, B) distances.
        labels: (B,) class ids.
    """
    first, second = np.triu_indices(len(labels), 1)
    same = labels[first] == labels[second]
    values = matrix[first, second]
    return values[same], values[~same]


class Triplet(NamedTuple):
    """An anchor with its farthest positive and its nearest negative, as rows of a batch."""

    anchor: int
    positive: int
    negative: int
    d_pos: float
    d_neg: float

    @property
    def violation(self) -> float:
        """d_pos - d_neg: by how much the wrong image is nearer."""
        return self.d_pos - self.d_neg


def hardest_triplets(matrix: np.ndarray, labels: np.ndarray, count: int) -> list[Triplet]:
    """The worst triplets of a batch, one for each anchor at most, the worst first.

    Args:
        matrix: (B, B) distances.
        labels: (B,) class ids.
        count: How many.

    Example:
        >>> x = np.array([[0.0], [3.0], [1.0]])
        >>> hardest_triplets(distances(x), np.array([0, 0, 1]), 1)
        [Triplet(anchor=0, positive=1, negative=2, d_pos=3.0, d_neg=1.0)]
    """
    same = labels[:, None] == labels[None, :]
    positives = same & ~np.eye(len(labels), dtype=bool)
    farthest = np.where(positives, matrix, -np.inf)
    nearest = np.where(same, np.inf, matrix)
    found = []
    for anchor in np.flatnonzero(positives.any(axis=1) & ~same.all(axis=1)):
        positive, negative = int(farthest[anchor].argmax()), int(nearest[anchor].argmin())
        d_pos, d_neg = float(matrix[anchor, positive]), float(matrix[anchor, negative])
        found.append(Triplet(int(anchor), positive, negative, d_pos, d_neg))
    return sorted(found, key=lambda triplet: -triplet.violation)[:count]


def nearest_proxies(vectors: np.ndarray, proxies: np.ndarray) -> np.ndarray:
    """The row of the proxy with the largest cosine to each vector: (B, d), (P, d) -> (B,)."""
    lengths = np.linalg.norm(proxies, axis=1, keepdims=True)
    return (np.asarray(vectors, np.float32) @ (proxies / np.maximum(lengths, 1e-12)).T).argmax(axis=1)


def gradient_shares(gram: np.ndarray) -> np.ndarray:
    """The share of each term's gradient g_t in their sum g: <g_t, g> / |g|^2, which add up to 1.

    A share below 0 pulls against the sum of all.

    Args:
        gram: (T, T) <g_s, g_t>.

    Returns:
        (T,); 0 where the gradients cancel out.
    """
    total = float(gram.sum())
    return gram.sum(axis=1) / total if total > 0 else np.zeros(len(gram))
