"""Slow float64 references of softmax, list and rank losses on pairs, with plain loops; nothing here imports tfdml."""

import math

from tests.losses.references_ranking import log1p_sum_exp, log_sum_exp, negatives, positives
from tests.references import cosine, distance, mean, negative_pairs, positive_pairs, total


def reduced(values, reduction):
    return total(values) if reduction == "sum" else mean(values)


def nt_xent(labels, x, temperature=0.07, reduction="mean"):
    values = []
    for a, p in positive_pairs(labels):
        own = cosine(x[a], x[p]) / temperature
        values.append(log1p_sum_exp([cosine(x[a], x[n]) / temperature - own for n in negatives(labels, a)]))
    return reduced(values, reduction)


def soft_nearest_neighbor(labels, x, temperature=0.2, kind="sqeuclidean", reduction="mean"):
    values = []
    for a in range(len(x)):
        if positives(labels, a):
            near = [-distance(x[a], x[p], kind) / temperature for p in positives(labels, a)]
            others = [-distance(x[a], x[j], kind) / temperature for j in range(len(x)) if j != a]
            values.append(log_sum_exp(others) - log_sum_exp(near))
    return reduced(values, reduction)


def tuplet_margin(labels, x, degrees=5.73, scale=64.0, weight=0.0, slack=0.01, reduction="mean"):
    values, near, far = [], [], []
    for a, p in positive_pairs(labels):
        near.append(cosine(x[a], x[p]))
        own = math.cos(math.acos(min(max(near[-1], -1.0), 1.0)) - math.radians(degrees))
        values.append(log1p_sum_exp([scale * (cosine(x[a], x[n]) - own) for n in negatives(labels, a)]))
    far = [cosine(x[a], x[n]) for a, n in negative_pairs(labels)]
    pulls = [max((1 - slack) * mean(near) - s, 0.0) ** 2 for s in near]
    pushes = [max(s - (1 + slack) * mean(far), 0.0) ** 2 for s in far]
    return reduced(values, reduction) + weight * (reduced(pulls, reduction) + reduced(pushes, reduction))


def generalized_lifted(labels, x, margin=1.0, positive_margin=0.0, kind="euclidean", reduction="mean"):
    values = []
    for a in range(len(x)):
        pull = [distance(x[a], x[p], kind) - positive_margin for p in positives(labels, a)]
        push = [margin - distance(x[a], x[n], kind) for n in negatives(labels, a)]
        if pull and push:
            values.append(max(log_sum_exp(pull) + log_sum_exp(push), 0.0))
    return reduced(values, reduction)


def ranked_list(labels, x, margin=0.4, boundary=1.2, t_n=10.0, t_p=0.0, balance=0.5, reduction="mean", frozen=None):
    """`frozen` are the vectors from which the weights, that carry no gradient, are computed."""
    frozen = x if frozen is None else frozen

    def part(a, others, violation, temperature):
        active = [j for j in others if violation(distance(frozen[a], frozen[j], "euclidean")) > 0]
        weights = [math.exp(temperature * violation(distance(frozen[a], frozen[j], "euclidean"))) for j in active]
        terms = [w * violation(distance(x[a], x[j], "euclidean")) for w, j in zip(weights, active, strict=True)]
        return total(terms) / total(weights) if active else 0.0

    values = []
    for a in range(len(x)):
        pull = part(a, positives(labels, a), lambda d: d - (boundary - margin), t_p)
        push = part(a, negatives(labels, a), lambda d: boundary - d, t_n)
        values.append((1 - balance) * pull + balance * push)
    return reduced(values, reduction)


def smooth_step(z):
    """1 / (1 + e^-z)."""
    return 1 / (1 + math.exp(-z)) if z > 0 else math.exp(z) / (1 + math.exp(z))


def smooth_ap(labels, x, temperature=0.01, reduction="mean"):
    values = []
    for i in range(len(x)):
        s = [cosine(x[i], row) for row in x]
        near, others = positives(labels, i), [k for k in range(len(x)) if k != i]
        terms = []
        for j in near:
            first, rank = (
                1 + total(smooth_step((s[k] - s[j]) / temperature) for k in among if k != j) for among in (near, others)
            )
            terms.append(first / rank)
        if near:
            values.append(1 - mean(terms))
    return reduced(values, reduction)


def recall_at_k(labels, x, ks=(1, 2, 4, 8, 16), t_rank=0.01, t_recall=1.0, reduction="mean"):
    values = []
    for i in range(len(x)):
        s, near = [cosine(x[i], row) for row in x], positives(labels, i)
        ranks = [1 + total(smooth_step((s[k] - s[j]) / t_rank) for k in range(len(x)) if k not in (i, j)) for j in near]
        if near:
            found = [min(total(smooth_step((k - rank) / t_recall) for rank in ranks), k) for k in ks]
            values.append(1 - mean([number / min(k, len(near)) for k, number in zip(ks, found, strict=True)]))
    return reduced(values, reduction)


def vic_reg(labels, x, invariance=25.0, variance=25.0, covariance=1.0, deviation=1.0, reduction="mean"):
    count, dim = len(x), len(x[0])
    pull = reduced([distance(x[i], x[j], "sqeuclidean") / dim for i, j in positive_pairs(labels)], reduction)
    means = [mean([float(row[c]) for row in x]) for c in range(dim)]

    def cov(a, b):
        return total((float(row[a]) - means[a]) * (float(row[b]) - means[b]) for row in x) / max(count - 1, 1)

    shortfall = mean([max(deviation - math.sqrt(cov(c, c) + 1e-4), 0.0) for c in range(dim)])
    between = total(cov(a, b) ** 2 for a in range(dim) for b in range(dim) if a != b) / dim
    images = count if reduction == "sum" else 1
    return invariance * pull + images * (variance * shortfall + covariance * between)
