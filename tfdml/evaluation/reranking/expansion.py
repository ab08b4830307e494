"""Moving embeddings towards their neighbours: expanded queries, and an augmented gallery."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdml.arguments import integer, number
from tfdml.evaluation.reranking.searched import Augmented, Searched, blocks, searched, summed, weights_of


def expand_queries(queries: Any, gallery: Any = None, *, k: int = 10, alpha: float = 3.0) -> np.ndarray:
    """Alpha query expansion: q' = q + sum_{i <= k} max(<q, g_i>, 0)^alpha g_i, scaled to length 1.

    g_1 .. g_k are the query's nearest gallery images, all vectors of length 1. With alpha = 0 all weigh as much as the
    query: average query expansion. All-to-all a query's own row is not among them: it counts once, as the query.

    The source takes k = 50 and alpha = 3, for landmarks with many images each. The default here is k = 10, because
    classes of metric learning are often smaller: neighbors beyond the class pull the query away from it.

    Args:
        queries: (N, d) embeddings.
        gallery: (G, d) what they are searched in; None: each in all others.
        k: How many neighbours; all where there are fewer.
        alpha: The exponent, at least 0.

    Returns:
        (N, d) float32. They are to be searched in the gallery as it was.

    Raises:
        ValueError: `k` or `alpha` is out of range.
        UserError: As `nearest_neighbours`.

    Example:
        >>> expand_queries(np.array([[1.0, 0.0]]), np.array([[0.6, 0.8], [-1.0, 0.0]]), k=1, alpha=0).round(3)
        array([[0.894, 0.447]], dtype=float32)

    Source: Radenovic, Tolias and Chum, "Fine-tuning CNN Image Retrieval with No Human Annotation", TPAMI 2019, sec.
    3.4; alpha = 0: Chum et al., "Total Recall", ICCV 2007.
    """
    return expanded(searched(queries, gallery), k, alpha)


def expanded(what: Searched, k: int, alpha: float) -> np.ndarray:
    """(N, d) the expanded queries of a search; see `expand_queries`."""
    k, alpha = integer("k", k, at_least=1), number("alpha", alpha, at_least=0)
    rows, similarities = what.neighbours(k)
    result = np.empty_like(what.queries)
    for part in blocks(len(rows), rows.shape[1] * what.queries.shape[1]):
        weights = weights_of(similarities[part], alpha)
        result[part] = summed(what.queries[part], what.vectors(part, rows[part]), weights)
    return result


def augment_gallery(gallery: Any, *, k: int = 10, alpha: float = 3.0) -> Augmented:
    """Database-side augmentation: g' = g + sum_{i <= k} max(<g, g_i>, 0)^alpha g_i, scaled to length 1.

    g_1 .. g_k are the nearest other images of the gallery, all vectors of length 1. It is done once, before any
    query; a search then costs what it did. The defaults are those of `expand_queries`.

    Args:
        gallery: (G, d) embeddings.
        k: How many neighbours; all where there are fewer.
        alpha: The exponent; 0: all weigh as much as the image.

    Returns:
        The augmented `vectors` (G, d), and what tells how they would be without one of the images.

    Raises:
        ValueError: `k` or `alpha` is out of range.
        UserError: As `nearest_neighbours`.

    Example:
        >>> augment_gallery(np.array([[1.0, 0.0], [0.6, 0.8]]), k=1, alpha=1).vectors.round(3)
        array([[0.943, 0.333],
               [0.832, 0.555]], dtype=float32)

    Source: Arandjelovic and Zisserman, "Three things everyone should know to improve object retrieval", CVPR 2012,
    sec. 5, where all weigh the same; weighted: Gordo et al., IJCV 2017; these weights: Radenovic et al., TPAMI 2019.
    """
    k, alpha = integer("k", k, at_least=1), number("alpha", alpha, at_least=0)
    what = searched(gallery)
    # One more, which takes the place of an image that is left out.
    rows, similarities = what.neighbours(k + 1)
    k = min(k, rows.shape[1])
    weights = weights_of(similarities, alpha)
    vectors = np.empty_like(what.gallery)
    for part in blocks(len(rows), k * vectors.shape[1]):
        vectors[part] = summed(what.gallery[part], what.gallery[rows[part, :k]], weights[part, :k])
    return Augmented(what.gallery, vectors, rows, weights, k)
