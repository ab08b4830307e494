"""Slow float64 references with plain loops, written from the papers' formulas; nothing here imports
tfdml."""

import math

import numpy as np


def norm(x):
    return math.sqrt(sum(float(a) ** 2 for a in x))


def dot(x, y):
    return sum(float(a) * float(b) for a, b in zip(x, y, strict=True))


def cosine(x, y):
    """The cosine of the angle; 0 if either vector is 0."""
    length = norm(x) * norm(y)
    return dot(x, y) / length if length else 0.0


def squared_distance(x, y):
    return sum((float(a) - float(b)) ** 2 for a, b in zip(x, y, strict=True))


def absolute_distance(x, y):
    return sum(abs(float(a) - float(b)) for a, b in zip(x, y, strict=True))


def distance(x, y, kind):
    if kind == "euclidean":
        return math.sqrt(squared_distance(x, y))
    if kind == "sqeuclidean":
        return squared_distance(x, y)
    if kind == "cosine":
        return 1.0 - cosine(x, y)
    assert kind == "dot"
    return -dot(x, y)


def matrix(function, x, y=None):
    # Python's numbers: NumPy's scalars are several times slower.
    rows, columns = (np.asarray(side, np.float64).tolist() for side in (x, x if y is None else y))
    return np.array([[function(a, b) for b in columns] for a in rows], np.float64)


def positive_pairs(labels):
    n = len(labels)
    return [
        (i, j) for i in range(n) for j in range(n) if i != j and int(labels[i]) == int(labels[j])
    ]


def negative_pairs(labels):
    n = len(labels)
    return [(i, j) for i in range(n) for j in range(n) if int(labels[i]) != int(labels[j])]


def total(values):
    return math.fsum(values)


def mean(values):
    return math.fsum(values) / len(values) if len(values) else 0.0


def softplus(x):
    """ln(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def contrastive(labels, x, margin=1.0, kind="sqeuclidean", average="active", reduction="mean"):
    """Hadsell et al. 2006; DML-DA eq. 2: d over positives, [margin - d]_+ over negatives, ordered
    pairs."""
    pulls = [distance(x[i], x[j], kind) for i, j in positive_pairs(labels)]
    pushes = [max(margin - distance(x[i], x[j], kind), 0.0) for i, j in negative_pairs(labels)]
    if reduction == "sum":
        return total(pulls) + total(pushes)
    if average == "active":
        pushes = [push for push in pushes if push > 0]
    return mean(pulls) + mean(pushes)


def cosine_contrastive(labels, x, margin=0.5, reduction="mean"):
    """HORDE's public code: (s - 1)^2 / 2 over positives, [s - margin]_+ / 2 over the active
    negatives."""
    pulls = [(cosine(x[i], x[j]) - 1.0) ** 2 / 2 for i, j in positive_pairs(labels)]
    pushes = [max(cosine(x[i], x[j]) - margin, 0.0) / 2 for i, j in negative_pairs(labels)]
    if reduction == "sum":
        return total(pulls) + total(pushes)
    return mean(pulls) + mean([push for push in pushes if push > 0])


def binomial(labels, x, alpha=2.0, beta=0.5, cost=25.0, reduction="mean"):
    """ECAML eq. 10 on cosines, the cost inside the exponent."""
    over = total if reduction == "sum" else mean
    pulls = [softplus(-alpha * (cosine(x[i], x[j]) - beta)) for i, j in positive_pairs(labels)]
    pushes = [
        softplus(alpha * cost * (cosine(x[i], x[j]) - beta)) for i, j in negative_pairs(labels)
    ]
    return over(pulls) + over(pushes)


def am_softmax(labels, cosines, scale=20.0, margin=0.1, reduction="mean"):
    """JRD eq. 12."""
    values = []
    for label, row in zip(labels, cosines, strict=True):
        own = scale * (float(row[int(label)]) - margin)
        # -ln(a / (a + b)) = ln(1 + b / a), which keeps its digits where b is next to nothing.
        others = [math.exp(scale * float(c) - own) for j, c in enumerate(row) if j != int(label)]
        values.append(math.log1p(total(others)))
    return total(values) if reduction == "sum" else mean(values)


def norm_softmax(labels, cosines, scale=20.0, reduction="mean"):
    return am_softmax(labels, cosines, scale=scale, margin=0.0, reduction=reduction)


def class_similarities(x, proxies):
    """JRD sec. 4.1: x+ = cosines to the class proxies."""
    return matrix(cosine, x, proxies)


def bandwidth(x, y=None, kind=squared_distance):
    """JRD sec. 5.1: the mean distance in the exponent, between different images; 1 if all
    coincide."""
    distances = matrix(kind, x, y)
    tau = mean(distances[~np.eye(len(x), dtype=bool)] if y is None else distances.ravel())
    return tau if tau > 0 else 1.0


def gaussian(x, y=None, multipliers=(0.5, 1.0, 2.0), tau=None):
    """JRD sec. 5.1: (1/K) sum_k exp(-|x - x'|^2 / (m_k tau))."""
    tau = bandwidth(x, y) if tau is None else tau

    def kernel(a, b):
        squared = squared_distance(a, b)
        return mean([math.exp(-squared / (m * tau)) for m in multipliers])

    return matrix(kernel, x, y)


def laplace(x, y=None, multiplier=1.0, tau=None):
    """JRD table 4: exp(-|x - x'|_1 / sigma)."""
    tau = bandwidth(x, y, absolute_distance) if tau is None else tau
    return matrix(lambda a, b: math.exp(-absolute_distance(a, b) / (multiplier * tau)), x, y)


def polynomial(x, y=None, degree=2):
    """JRD table 4: (x . x' + 1)^p."""
    return matrix(lambda a, b: (dot(a, b) + 1.0) ** degree, x, y)


def exponential(x, y=None):
    """JRD table 4: exp(x . x')."""
    return matrix(lambda a, b: math.exp(dot(a, b)), x, y)


def joint_representation_similarity(labels, grams, reduction="mean"):
    """JRD eq. 9 and 11: the product of the levels' kernels over ordered pairs of different
    class."""
    values = [math.prod(float(gram[i, j]) for gram in grams) for i, j in negative_pairs(labels)]
    return total(values) if reduction == "sum" else mean(values)


def joint_exponential(labels, levels):
    """The logarithm of eq. 11 with exp(x . x') on every level, by the largest term, so that it may
    have any size."""
    exponents = [sum(dot(x[i], x[j]) for x in levels) for i, j in negative_pairs(labels)]
    return max(exponents) + math.log(mean([math.exp(e - max(exponents)) for e in exponents]))


def intra_class_penalty(labels, x, reduction="sum"):
    """JRD eq. 4, without alpha: minus, for each class, the mean over its pairs of exp(-|x_i -
    x_j|^2 / 2)."""
    pairs = positive_pairs(labels)
    classes = sorted({int(labels[i]) for i, _ in pairs})
    values = [
        mean([math.exp(-squared_distance(x[i], x[j]) / 2) for i, j in pairs if int(labels[i]) == c])
        for c in classes
    ]
    return -(total(values) if reduction == "sum" else mean(values))
