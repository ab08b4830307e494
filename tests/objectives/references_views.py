"""Slow float64 references of the objectives over two views; nothing here imports tfdml."""

import numpy as np


def unit(x):
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return np.divide(x, length, out=np.zeros_like(x), where=length > 1e-8)


def logits(x, y, log_scale, bias=0.0):
    return np.exp(log_scale) * unit(np.float64(x)) @ unit(np.float64(y)).T + bias


def positives(labels, shared):
    same = (
        np.equal.outer(labels, labels)
        if np.ndim(labels) == 1
        else np.any(labels[:, None] == labels[None], axis=2)
    )
    own = np.eye(len(labels), dtype=bool)
    return (own, own | ~same) if shared == "left_out" else (same | own, np.ones_like(own))


def softmax_across(labels, x, y, log_scale, shared="positive"):
    """The mean of both directions of cross-entropy, its target spread evenly over the positives."""

    def one_direction(values):
        total = 0.0
        for row, target, counted in zip(values, *positives(labels, shared), strict=True):
            top = row[counted].max()
            log_total = top + np.log(np.exp(row[counted] - top).sum())
            total += np.mean([log_total - value for value in row[target]])
        return total / len(values)

    values = logits(x, y, log_scale)
    return (one_direction(values) + one_direction(values.T)) / 2


def sigmoid_across(labels, x, y, log_scale, bias, shared="positive"):
    """The sum over all pairs of the negative log-likelihood of a sigmoid, over the number of
    items."""
    total = 0.0
    for row, target, counted in zip(
        logits(x, y, log_scale, bias), *positives(labels, shared), strict=True
    ):
        total += sum(
            np.logaddexp(0, -z if is_one else z)
            for z, is_one, counts in zip(row, target, counted, strict=True)
            if counts
        )
    return total / len(x)
