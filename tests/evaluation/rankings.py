"""Retrieval metrics by their definitions: query by query in float64, from the whole ranking."""

import numpy as np

METRICS = (
    "recall@1",
    "recall@4",
    "precision@1",
    "precision@3",
    "map@3",
    "map@r",
    "r_precision",
    "map",
    "minp",
)
METRICS += ("mrr",)


def slow_metrics(hits):
    """The metrics of one query, from whether each image of its whole ranking is relevant."""
    ranks = [rank for rank, hit in enumerate(hits, 1) if hit]
    if not ranks:
        return dict.fromkeys(METRICS, np.nan)
    count = len(ranks)

    def precision(k):
        return sum(hits[:k]) / k

    def average(k, of):
        return sum(precision(rank) for rank in ranks if rank <= k) / of

    return {
        "recall@1": float(ranks[0] <= 1),
        "recall@4": float(ranks[0] <= 4),
        "precision@1": precision(1),
        "precision@3": precision(3),
        "map@3": average(3, min(3, count)),
        "map@r": average(count, count),
        "r_precision": precision(count),
        "map": average(len(hits), count),
        "minp": count / ranks[-1],
        "mrr": 1 / ranks[0],
    }


def ranked_hits(points, query, gallery, relevant, leave_out=lambda row: False):
    """Whether the nearest row of the gallery, the second nearest ... is relevant; equal distances
    by row."""
    rows = [row for row in range(len(gallery)) if not leave_out(row)]
    rows.sort(key=lambda row: (((gallery[row] - points[query]) ** 2).sum(), row))
    return [bool(relevant(query, row)) for row in rows]


def slow(points, gallery, relevant, ignored=lambda query, row: False, own=lambda query: None):
    """The metrics of every query; `relevant` and `ignored` are functions of a query and a gallery
    row."""
    points, gallery = np.asarray(points, np.float64), np.asarray(gallery, np.float64)
    values = []
    for query in range(len(points)):
        leave_out = lambda row, query=query: row == own(query) or ignored(query, row)  # noqa: E731
        values.append(slow_metrics(ranked_hits(points, query, gallery, relevant, leave_out)))
    return {name: np.array([one[name] for one in values]) for name in METRICS}


def check(result, expected):
    for name in METRICS:
        np.testing.assert_allclose(result[name], expected[name], atol=1e-9, rtol=0, err_msg=name)
