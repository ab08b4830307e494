"""Cross-domain similarity local scaling: images that are near to everything count less."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdml.arguments import integer
from tfdml.evaluation.reranking.searched import Searched, searched


def csls_densities(queries: Any, gallery: Any = None, *, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """The mean cosine of each query and of each gallery image to its k nearest on the other side.

    CSLS(q, g) = 2 cos(q, g) - r(q) - r(g), where r(q) is the mean cosine of the query to its k nearest gallery images,
    r(g) that of the gallery image to its k nearest queries. All-to-all both sides are all images, and none is its own
    neighbour. It takes other queries to know r(g): where these come one at a time, use those of yesterday.

    Args:
        queries: (N, d) embeddings.
        gallery: (G, d); None: all-to-all.
        k: How many neighbours; all where there are fewer.

    Returns:
        (N,) r(q) and (G,) r(g), float32.

    Raises:
        ValueError: `k` is not positive.
        UserError: As `nearest_neighbours`.

    Example:
        >>> of_queries, of_gallery = csls_densities(np.eye(2), np.array([[1.0, 0.0], [0.6, 0.8]]), k=2)
        >>> of_gallery.round(3)
        array([0.5, 0.7], dtype=float32)

    Source: Conneau et al., "Word Translation Without Parallel Data", ICLR 2018, eq. 7.
    """
    return _densities(searched(queries, gallery), k)


def scaled(what: Searched, k: int) -> Searched:
    """A search by CSLS: the queries with a 1 behind them, the gallery with -r(g) / 2, compared by their product.

    That is (CSLS + r(q)) / 2, whose order for each query is that of CSLS.
    """
    _, density = _densities(what, k)
    queries = np.concatenate([what.queries, np.ones((len(what.queries), 1), np.float32)], axis=1)
    gallery = np.concatenate([what.gallery, -density[:, None] / 2], axis=1)
    return Searched(queries, gallery, what.leave_one_out, "dot", extra_bytes=what.extra_bytes)


def _densities(what: Searched, k: int) -> tuple[np.ndarray, np.ndarray]:
    k = integer("k", k, at_least=1)
    other_side = Searched(what.gallery, what.queries, what.leave_one_out)
    return what.neighbours(k)[1].mean(axis=1), other_side.neighbours(k)[1].mean(axis=1)
