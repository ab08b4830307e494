"""Slow references in float64, with loops and sets."""

import math

import numpy as np


def unit(rows):
    rows = np.asarray(rows, np.float64)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def ranking(vector, gallery, left_out=()):
    """Rows of a gallery by falling cosine, then by row."""
    rows = [row for row in range(len(gallery)) if row not in left_out]
    # As the search, copies tie exactly.
    return sorted(rows, key=lambda row: (round(((vector - gallery[row]) ** 2).sum(), 12), row))


def moved(vector, gallery, near, alpha):
    total = np.array(vector)
    for row in near:
        similarity = max(float(vector @ gallery[row]), 0.0)
        total = total + (similarity**alpha if alpha else 1.0) * gallery[row]
    length = math.sqrt((total**2).sum())
    return total / length if length else total


def expansion(queries, gallery, k, alpha):
    """Queries expanded by their nearest; without a gallery, by the nearest others."""
    queries = unit(queries)
    images = queries if gallery is None else unit(gallery)
    own = gallery is None
    return np.array(
        [
            moved(query, images, ranking(query, images, {row} if own else ())[:k], alpha)
            for row, query in enumerate(queries)
        ]
    )


def reciprocal_vectors(images, k1, k2):
    """V of every image as a dictionary, by the paper's sets; k1 / 2 rounded as in the authors'
    MATLAB code."""
    images = unit(images)
    count = len(images)
    lists = [[row, *ranking(images[row], images, {row})] for row in range(count)]

    def reciprocal(row, k):
        return {other for other in lists[row][: k + 1] if row in lists[other][: k + 1]}

    # MATLAB's round((k1 + 1) / 2), which counts the image itself.
    half = math.floor((k1 + 1) / 2 + 0.5) - 1
    codes = []
    for row in range(count):
        members = set(reciprocal(row, k1))
        for other in reciprocal(row, k1):
            theirs = reciprocal(other, half)
            if len(theirs & reciprocal(row, k1)) >= 2 / 3 * len(theirs):
                members |= theirs
        code = {other: math.exp(-((images[row] - images[other]) ** 2).sum()) for other in members}
        total = sum(code.values())
        codes.append({other: value / total for other, value in code.items()})
    means = []
    for row in range(count):
        mean = {}
        for other in lists[row][:k2]:
            for column, value in codes[other].items():
                mean[column] = mean.get(column, 0.0) + value / k2
        means.append(mean)
    return means


def reranked(queries, gallery, k1, k2, weight):
    """(N, G) distances d* of all queries to all of the gallery; infinite to a query's own image."""
    images = unit(queries) if gallery is None else unit(np.concatenate([queries, gallery]))
    first = 0 if gallery is None else len(queries)
    codes = reciprocal_vectors(images, k1, k2)
    result = np.full((len(queries), len(images) - first), np.inf)
    for row in range(len(queries)):
        for column in range(first, len(images)):
            if column == row:
                continue
            keys = set(codes[row]) | set(codes[column])
            least = sum(min(codes[row].get(key, 0.0), codes[column].get(key, 0.0)) for key in keys)
            most = sum(max(codes[row].get(key, 0.0), codes[column].get(key, 0.0)) for key in keys)
            plain = ((images[row] - images[column]) ** 2).sum()
            result[row, column - first] = (1 - weight) * (1 - least / most) + weight * plain
    return result
