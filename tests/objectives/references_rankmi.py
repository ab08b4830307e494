"""Slow float64 references of RankMI, with plain loops, from Kemertas et al., CVPR 2020."""

import math

from tests.support import references


def leaky_relu(x):
    return x if x > 0 else 0.1 * x


def statistic(weights, d):
    """Eq. 10 and 14: V(d) = MLP(d) - d; `weights` are kernels (in, out) and biases (out,) in
    turn."""
    x = [float(d)]
    layers = list(zip(weights[::2], weights[1::2], strict=True))
    for n, (kernel, bias) in enumerate(layers):
        x = [
            math.fsum(x[i] * float(kernel[i][o]) for i in range(len(x))) + float(bias[o])
            for o in range(len(bias))
        ]
        if n + 1 < len(layers):
            x = [leaky_relu(value) for value in x]
    return x[0] - float(d)


def slope(weights, d):
    """dV/dd by the chain rule, layer by layer."""
    x, dx = [float(d)], [1.0]
    layers = list(zip(weights[::2], weights[1::2], strict=True))
    for n, (kernel, bias) in enumerate(layers):
        out = range(len(bias))
        dx = [math.fsum(dx[i] * float(kernel[i][o]) for i in range(len(x))) for o in out]
        x = [
            math.fsum(x[i] * float(kernel[i][o]) for i in range(len(x))) + float(bias[o])
            for o in out
        ]
        if n + 1 < len(layers):
            dx = [value if at > 0 else 0.1 * value for value, at in zip(dx, x, strict=True)]
            x = [leaky_relu(value) for value in x]
    return dx[0] - 1.0


def divergence(v, positive, negative):
    """Eq. 6 and 3, over lists of distances: - mean T(d+) - mean log(2 - e^T(d-)), T(d) = log 2 -
    log(1 + e^-V(d))."""

    def t(d):
        return math.log(2) - references.softplus(-v(d))

    matching = -references.mean([t(d) for d in positive])
    # log(2 - e^T) = log(2 - 2 / (1 + e^-V)) = log 2 - log(1 + e^V)
    return matching - references.mean([math.log(2) - references.softplus(v(d)) for d in negative])


def unit(x):
    length = references.norm(x)
    return [float(a) / length if length else 0.0 for a in x]


def distances(x):
    return references.matrix(lambda a, b: references.distance(unit(a), unit(b), "euclidean"), x)


def all_pairs(labels, x, v):
    """The loss of V (algorithm 1, line 10): over every positive and every negative pair."""
    d = distances(x)
    positive, negative = references.positive_pairs(labels), references.negative_pairs(labels)
    return divergence(v, [d[p] for p in positive], [d[n] for n in negative])


def violating_pairs(labels, x, v, beta, margin, drawn=None):
    """The loss of the embedder (lines 18 to 21): d+ > beta - margin, d- < beta + margin and, if
    given, drawn."""
    d = distances(x)
    positive = [d[p] for p in references.positive_pairs(labels) if d[p] > beta - margin]
    negative = [n for n in references.negative_pairs(labels) if d[n] < beta + margin]
    return divergence(v, positive, [d[n] for n in negative if drawn is None or drawn[n]])


def rise(x, weights, points=64):
    """The mean of [dV/dd]_+ over even steps between the smallest and the largest distance of the
    batch."""
    d = distances(x)
    values = [d[i, j] for i in range(len(x)) for j in range(i)]
    low, high = min(values), max(values)
    return references.mean(
        [max(slope(weights, low + (high - low) * n / (points - 1)), 0.0) for n in range(points)]
    )
