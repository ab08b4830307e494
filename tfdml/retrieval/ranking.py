"""The order of what a database found: distances measured as the exact search measures them, ties by id."""

from __future__ import annotations

import numpy as np

from tfdml.evaluation.search.scoring import Space, measure
from tfdml.retrieval.rows import Rows

# Candidates fetched beyond k, so that a database's rounding cannot decide what is among the k.
SPARE = 4
# Of the squared lengths: how far off a database's float32 distances may be.
_ROUNDING = 1e-6


def ranked(query: np.ndarray, rows: Rows, k: int, distance: str) -> tuple[list[int], np.ndarray, bool]:
    """The k nearest of a query's candidates.

    Args:
        query: (d,) as the database was asked for it.
        rows: The candidates, in any order.
        k: How many to keep.
        distance: What near means.

    Returns:
        Which candidates, nearest first, equally near ones by id; their (k,) float32 distances; and whether a row that
        is no candidate, at least as far as they are by the database's own rounding, cannot be among the k.

    Example:
        >>> rows = Rows(["b", "a", "c"], np.array([[1.0], [1.0], [5.0]], np.float32), {})
        >>> ranked(np.array([0.0], np.float32), rows, 2, "euclidean")
        ([1, 0], array([1., 1.], dtype=float32), True)
    """
    if not len(rows):
        return [], np.zeros(0, np.float32), True
    space = Space(query[None], rows.vectors, distance, 1.0)
    measured = measure(space, slice(0, 1), np.arange(len(rows))[None])[0]
    order = sorted(range(len(rows)), key=lambda row: (measured[row], rows.ids[row]))[:k]
    lengths = float(query @ query) + float(np.einsum("md,md->m", rows.vectors, rows.vectors).max())
    settled = bool(measured.max() > measured[order[-1]] + _ROUNDING * lengths)
    return order, space.in_callers_scale(measured[order]), settled
