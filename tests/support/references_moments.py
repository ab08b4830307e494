"""High-order moments and their loss in float64 NumPy, with loops, from the paper's formulas."""

import numpy as np


def moments(features, projections, orders, mode="cascaded", scaled=True):
    """Order -> (B, d), by algorithm 1 and eq. 8 (cascaded) or eq. 4 (independent, random).

    `features` is (B, ..., c); `projections` the matrices W' (d, c), as the layer lists them.
    """
    features = np.asarray(features, np.float64)
    projections = [np.asarray(matrix, np.float64) for matrix in projections]
    dim = projections[0].shape[0]
    found, first = {}, 0
    for order in orders:
        chain = projections[:order] if mode == "cascaded" else projections[first : first + order]
        first += order
        found[order] = np.zeros((len(features), dim))
        for i, image in enumerate(features):
            positions = image.reshape(-1, image.shape[-1])
            for x in positions:
                phi = np.full(dim, 1 / np.sqrt(dim) if scaled else 1.0)
                for matrix in chain:
                    phi = phi * (matrix @ x)
                found[order][i] += phi / len(positions)
    return found


def unit(x):
    """Rows of length 1; zero rows stay."""
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.where(norms > 0, norms, 1.0)


def embeddings(features, projections, dense, orders, mode="cascaded", reduction=None):
    """Order -> unit vectors (B, d'), through the matrices of `dense` (d, d'), one for each order,
    or none."""
    if reduction is not None:
        features = np.asarray(features, np.float64) @ np.asarray(reduction, np.float64)
    found = moments(features, projections, orders, mode)
    matrices = dense or [np.eye(found[orders[0]].shape[1])] * len(orders)
    return {
        k: unit(found[k] @ np.asarray(matrix, np.float64))
        for k, matrix in zip(orders, matrices, strict=True)
    }
