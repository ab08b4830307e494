"""Slow float64 references of objectives over classes, with plain loops; nothing here imports
tfdml."""

import math

import numpy as np

from tests.losses.references import (
    cross_entropy,
    draw_probabilities,
    negatives,
    positives,
    soft_triple,
)
from tests.support.references import (
    contrastive,
    cosine,
    distance,
    dot,
    mean,
    negative_pairs,
    norm,
    softplus,
    squared_distance,
    total,
)


def classes_of(labels):
    return sorted({int(label) for label in labels})


def members(labels, c):
    return [i for i, label in enumerate(labels) if int(label) == c]


def class_pairs(labels):
    """Ordered pairs of different classes."""
    return [(a, b) for a in classes_of(labels) for b in classes_of(labels) if a != b]


def energy_confusion(labels, x, form="log", reduction="mean", offset=0.0):
    """Chen and Deng 2019, eq. 3, 7, 11; the authors' code for "log_of_mean"."""
    if form == "log_of_mean":
        pairs = [0.5 * squared_distance(x[i], x[j]) for i, j in negative_pairs(labels)]
        return math.log(max(mean(pairs) + offset, 1e-12)) if pairs else 0.0
    values = []
    for a, b in class_pairs(labels):
        energy = mean(
            [squared_distance(x[i], x[j]) for i in members(labels, a) for j in members(labels, b)]
        )
        values.append(math.log1p(energy) if form == "log" else energy)
    return total(values) if reduction == "sum" else mean(values)


def density(labels, x, c):
    """Li et al. 2019, eq. 5."""
    rows = [np.asarray(x[i], np.float64) for i in members(labels, c)]
    center = sum(rows) / len(rows)
    return mean([squared_distance(row, center) for row in rows])


def density_adaptivity(
    labels, x, targets, reference=None, eta=0.5, constraint="soft", reduction="mean"
):
    """Li et al. 2019, eq. 6, 7 and 8; for "hard", `targets` is their mean. No `reference`: no
    constraint."""
    known = (
        {} if reference is None else {c: float(r) ** eta for c, r in enumerate(reference) if r > 0}
    )
    present = classes_of(labels)
    if constraint == "hard":
        over = mean(list(known.values()))
        alpha = {c: float(targets) * (known[c] / over if c in known else 1.0) for c in present}
    else:
        alpha = {c: float(targets[c]) for c in present}
    average = total if reduction == "sum" else mean
    value = average([(density(labels, x, c) - alpha[c]) ** 2 for c in present]) - average(
        list(alpha.values())
    )
    if constraint != "soft":
        return value
    gaps = [
        (known[b] * alpha[a] - known[a] * alpha[b]) ** 2 if a in known and b in known else 0.0
        for a in present
        for b in present
    ]
    return value + average(gaps)


def entropy_of_pairs(labels, x, threshold=1.0, reduction="mean"):
    """Minus the mean entropy of p = 1 / (1 + exp(d^2 - threshold))."""
    values = []
    for i in range(len(labels)):
        for j in range(len(labels)):
            if i != j:
                p = 1.0 / (1.0 + math.exp(squared_distance(x[i], x[j]) - threshold))
                values.append(p * math.log(p) + (1 - p) * math.log(1 - p))
    return total(values) if reduction == "sum" else mean(values)


def nearest_entropy(labels, x, reduction="mean"):
    """Sablayrolles et al. 2019: -ln of the distance to the nearest neighbor."""
    values = []
    for i in range(len(labels)):
        gaps = [distance(x[i], x[j], "euclidean") for j in range(len(labels)) if i != j]
        if gaps:
            values.append(-math.log(max(min(gaps), 1e-4)))
    return total(values) if reduction == "sum" else mean(values)


def global_orthogonal(labels, x):
    """Zhang et al. 2017."""
    cosines = [cosine(x[i], x[j]) for i, j in negative_pairs(labels)]
    return mean(cosines) ** 2 + max(mean([c * c for c in cosines]) - 1.0 / len(x[0]), 0.0)


def joint_norms(labels, grams, kind, squared=False, reduction="mean"):
    """Chu et al. 2020, eq. 15 ("mmd") and 16 ("intra"), in the place of S_JRS in eq. 9 and 11."""
    gram = np.prod([np.asarray(g, np.float64) for g in grams], axis=0)

    def inner(a, b):
        return mean([gram[i, j] for i in members(labels, a) for j in members(labels, b)])

    def length(value):
        return max(value, 0.0) if squared else math.sqrt(max(value, 0.0))

    values = []
    for a, b in class_pairs(labels):
        if kind == "mmd":
            gap = -length(inner(a, a) + inner(b, b) - 2 * inner(a, b))
        else:
            gap = -length(inner(a, a)) - length(inner(b, b))
        values.append(len(members(labels, a)) * len(members(labels, b)) * gap)
    return (
        total(values)
        if reduction == "sum"
        else (total(values) / len(negative_pairs(labels)) if values else 0.0)
    )


def learned_margin(labels, x, beta, alpha=0.2, nu=0.0, reduction="mean", probabilities=None):
    """Wu et al. 2017, with a boundary per class; `probabilities` freezes the distribution of the
    negatives."""
    drawn = draw_probabilities(labels, x) if probabilities is None else probabilities
    value, active = 0.0, 0.0
    for a in range(len(labels)):
        b = float(beta[int(labels[a])])
        for p in positives(labels, a):
            terms = [(1.0, distance(x[a], x[p], "euclidean") - b + alpha)]
            terms += [
                (drawn[a][n], b + alpha - distance(x[a], x[n], "euclidean"))
                for n in negatives(labels, a)
            ]
            value += sum(weight * max(term, 0.0) for weight, term in terms) + nu * b
            active += sum(weight for weight, term in terms if term > 0)
    return value if reduction == "sum" or active == 0 else value / active


def regularized_soft_triple(labels, x, centers, tau=0.2, **arguments):
    """Qian et al. 2019: the loss, and tau times the mean of the distances between the centers of a
    class."""
    count, per_class = len(centers), len(centers[0])
    similarities = np.array([[[cosine(row, w) for w in ws] for ws in centers] for row in x])
    gaps = []
    for ws in centers:
        unit = [np.asarray(w, np.float64) / norm(w) for w in ws]
        gaps += [
            math.sqrt(2 - 2 * dot(unit[s], unit[t]))
            for s in range(per_class)
            for t in range(s + 1, per_class)
        ]
    regularizer = (
        tau * total(gaps) / (count * per_class * (per_class - 1)) if per_class > 1 else 0.0
    )
    return soft_triple(labels, similarities, **arguments) + regularizer


def cosines(x, proxies):
    x, proxies = (np.asarray(a, np.float64) for a in (x, proxies))
    norms = [np.maximum(np.linalg.norm(a, axis=1, keepdims=True), 1e-300) for a in (x, proxies)]
    return (x / norms[0]) @ (proxies / norms[1]).T


def curricular(labels, x, proxies, t=0.0, scale=64.0, margin=0.5):
    """Huang et al. 2020."""
    values = []
    for label, row in zip(labels, cosines(x, proxies), strict=True):
        own = float(row[int(label)])
        shifted = math.cos(math.acos(max(-1.0, min(1.0, own))) + margin)
        logits = [scale * (c * (t + c) if c > shifted else c) for c in map(float, row)]
        beyond = own <= math.cos(math.pi - margin)
        logits[int(label)] = scale * (own - margin * math.sin(margin) if beyond else shifted)
        values.append(cross_entropy(label, logits))
    return mean(values)


def sphere_face2(
    labels, x, proxies, bias, scale=40.0, margin=0.4, balance=0.7, adjustment=3.0, at=None
):
    """Wen et al. 2022; `at`, an x and proxies, is where g is taken: what it adds to the cosine is
    then a constant."""
    values, found = [], cosines(x, proxies)
    fixed = found if at is None else cosines(*at)
    for label, row, fixed_row in zip(labels, found, fixed, strict=True):
        value = 0.0
        for j, (c, there) in enumerate(zip(map(float, row), map(float, fixed_row), strict=True)):
            g = c + (2 * ((there + 1) / 2) ** adjustment - 1 - there)
            if j == int(label):
                value += balance / scale * softplus(-(scale * (g - margin) + bias))
            else:
                value += (1 - balance) / scale * softplus(scale * (g + margin) + bias)
        values.append(value)
    return mean(values)


def instance(labels, x, head):
    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64).T
    return mean(
        [
            cross_entropy(label, [float(v) for v in row])
            for label, row in zip(labels, logits, strict=True)
        ]
    )


def divergence(x, margin=0.5, pairs="all", average="active"):
    """Kim et al. 2018, sec. 3.3, on cosines: over heads p != q in either order, and images (i, j)
    or (i, i)."""
    images, heads = x.shape[:2]
    values = [
        max(cosine(x[i, p], x[j, q]) - margin, 0.0)
        for i in range(images)
        for j in range(images)
        if pairs == "all" or i == j
        for p in range(heads)
        for q in range(heads)
        if p != q
    ]
    if average == "active":
        values = [value for value in values if value > 0]
    return mean(values)


def mean_of_heads(labels, x, **options):
    """The mean over heads of the contrastive loss."""
    return mean([contrastive(labels, x[:, head], **options) for head in range(x.shape[1])])
