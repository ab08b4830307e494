"""Hubness: how unequally often images are found."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdml.arguments import integer
from tfdml.evaluation.search.exact import nearest_neighbours


def hubness(embeddings: Any, gallery: Any = None, *, k: int = 10, distance: str = "euclidean") -> dict[str, Any]:
    """How unequally often gallery images are among the k nearest of the queries.

    N_k(g) counts the queries that have image g among their k nearest; its mean is k N / G. In high dimensions a few
    images, hubs, are near to very many queries, and others, anti-hubs or orphans, to none.

    Args:
        embeddings: (N, d) the queries.
        gallery: (G, d) what is searched; None: each in all others.
        k: How many neighbours; all where there are fewer.
        distance: As `nearest_neighbours`.

    Returns:
        `k`; `skewness`, E[(N_k - mean)^3] / sd(N_k)^3, 0 where all are found equally often; `orphans`, the share of
        images with N_k = 0; `largest_hub`, the greatest N_k.

    Raises:
        ValueError: `k` is not positive.
        UserError: As `nearest_neighbours`.

    Example:
        >>> hubness(np.array([[0.0], [1.0], [1.9]]), k=1)
        {'k': 1, 'skewness': 0.0, 'orphans': 0.3333333333333333, 'largest_hub': 2}

    Source: Radovanovic, Nanopoulos and Ivanovic, "Hubs in Space", JMLR 2010, eq. 1 (there S_Nk).
    """
    size = len(embeddings) if gallery is None else len(gallery)
    k = min(integer("k", k, at_least=1), size - (gallery is None))
    rows, _ = nearest_neighbours(embeddings, gallery, k=k, distance=distance)
    return hubness_of(rows, size)


def hubness_of(rows: np.ndarray, size: int) -> dict[str, Any]:
    """What `hubness` gives, of neighbours that are known.

    Args:
        rows: (N, k) gallery rows.
        size: G.
    """
    counts = np.bincount(rows.ravel(), minlength=size).astype(np.float64)
    moved = counts - counts.mean()
    spread = np.sqrt((moved**2).mean())
    return {
        "k": rows.shape[1],
        "skewness": float((moved**3).mean() / spread**3) if spread > 0 else 0.0,
        "orphans": float((counts == 0).mean()),
        "largest_hub": int(counts.max()),
    }
