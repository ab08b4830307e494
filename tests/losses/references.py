"""Slow float64 references of the losses, with plain loops; nothing here imports tfdml."""

import math

import numpy as np

from tests.support.references import (
    cosine,
    distance,
    dot,
    mean,
    negative_pairs,
    norm,
    positive_pairs,
    softplus,
    total,
)


def log_sum_exp(values):
    if not values:
        return -math.inf
    top = max(values)
    return top + math.log(total(math.exp(value - top) for value in values))


def log1p_sum_exp(values):
    """ln(1 + sum of e^v)."""
    return log_sum_exp([0.0, *values])


def positives(labels, i):
    return [j for j in range(len(labels)) if j != i and int(labels[j]) == int(labels[i])]


def negatives(labels, i):
    return [j for j in range(len(labels)) if int(labels[j]) != int(labels[i])]


def unit(x):
    return (np.array(x, np.float64) / [[norm(row) or 1.0] for row in x]).tolist()


def draw_probabilities(labels, x, cutoff=0.5, last=1.4):
    """Wu et al. 2017: row i gives the probability of each image as the negative of i."""
    vectors, dim = unit(x), len(x[0])
    rows = np.zeros((len(x), len(x)))
    for i in range(len(x)):
        logs = {}
        for j in negatives(labels, i):
            d = distance(vectors[i], vectors[j], "euclidean")
            if d < last:
                d = max(d, cutoff)
                logs[j] = (2 - dim) * math.log(d) - (dim - 3) / 2 * math.log(1 - d * d / 4)
        logs = logs or dict.fromkeys(negatives(labels, i), 0.0)
        for j, value in logs.items():
            rows[i, j] = math.exp(value - log_sum_exp(list(logs.values())))
    return rows


def triplets(labels, x, mining, kind):
    """(weight, anchor, positive, negative) of every triplet that `mining` chooses."""
    d = [[distance(a, b, kind) for b in x] for a in x]
    chosen = []
    for i in range(len(x)):
        near, far = positives(labels, i), negatives(labels, i)
        if not near or not far:
            continue
        if mining == "all":
            chosen += [(1.0, i, p, n) for p in near for n in far]
        elif mining == "hard":
            chosen.append((1.0, i, max(near, key=d[i].__getitem__), min(far, key=d[i].__getitem__)))
        elif mining == "semi_hard":
            for p in near:
                beyond = [n for n in far if d[i][n] > d[i][p]]
                n = min(beyond, key=d[i].__getitem__) if beyond else max(far, key=d[i].__getitem__)
                chosen.append((1.0, i, p, n))
        else:
            probabilities = draw_probabilities(labels, x)[i]
            chosen += [(probabilities[n], i, p, n) for p in near for n in far]
    return chosen


def ratio(numerator, denominator):
    return numerator / denominator if denominator else 0.0


def triplet(
    labels,
    x,
    margin=0.1,
    mining="all",
    kind="sqeuclidean",
    average="active",
    reduction="mean",
    chosen=None,
):
    """`chosen` freezes the triplets, as a gradient does that does not flow through the choice."""
    value, active, mined = 0.0, 0.0, 0.0
    for weight, a, p, n in triplets(labels, x, mining, kind) if chosen is None else chosen:
        difference = distance(x[a], x[p], kind) - distance(x[a], x[n], kind)
        cost = softplus(difference) if margin == "soft" else max(difference + margin, 0.0)
        value += weight * cost
        active += weight * (cost > 0)
        mined += weight
    return value if reduction == "sum" else ratio(value, active if average == "active" else mined)


def quadruplet(labels, x, margin=0.2, pair_margin=0.1, kind="euclidean", reduction="mean"):
    """RankMI eq. 12: per image, the mean over its triplets and the mean over its quadruplets."""
    value = 0.0
    everywhere = [distance(x[k], x[n], kind) for k in range(len(x)) for n in negatives(labels, k)]
    for i in range(len(x)):
        own = [distance(x[i], x[k], kind) for k in negatives(labels, i)]
        for far, gap in ((own, margin), (everywhere, pair_margin)):
            near = [distance(x[i], x[j], kind) for j in positives(labels, i)]
            hinges = [max(pull - d + gap, 0.0) for pull in near for d in far]
            value += mean(hinges)
    return value if reduction == "sum" else ratio(value, len(x))


def cosine_similarity(labels, x, low=0.0, high=1.0, reduction="mean"):
    pairs = [(i, j, 1.0) for i, j in positive_pairs(labels)] + [
        (i, j, 0.0) for i, j in negative_pairs(labels)
    ]
    values = [
        (cosine(x[i], x[j]) - (similarity - low) / (high - low)) ** 2 for i, j, similarity in pairs
    ]
    return total(values) if reduction == "sum" else mean(values)


def threshold_consistent_margin(labels, x, near=0.9, far=0.5, pull=1.0, push=1.0, reduction="mean"):
    """Zhang et al. 2024: the pairs on the wrong side of their margin, each kind by its own mean."""
    over = total if reduction == "sum" else mean
    positive = [near - cosine(x[i], x[j]) for i, j in positive_pairs(labels)]
    negative = [cosine(x[i], x[j]) - far for i, j in negative_pairs(labels)]
    pulls = [gap for gap in positive if gap >= 0]
    return pull * over(pulls) + push * over([gap for gap in negative if gap >= 0])


def margin_loss(labels, x, alpha=0.2, beta=1.2, reduction="mean", probabilities=None):
    """`probabilities` freezes the distribution of the negatives."""
    drawn = draw_probabilities(labels, x) if probabilities is None else probabilities
    value, active = 0.0, 0.0
    for a, p in positive_pairs(labels):
        terms = [(1.0, distance(x[a], x[p], "euclidean") - beta + alpha)]
        terms += [
            (drawn[a][n], beta + alpha - distance(x[a], x[n], "euclidean"))
            for n in negatives(labels, a)
        ]
        for weight, term in terms:
            value += weight * max(term, 0.0)
            active += weight * (term > 0)
    return value if reduction == "sum" else ratio(value, active)


def n_pair(labels, x, l2=0.0, reduction="mean"):
    values = []
    for a, p in positive_pairs(labels):
        values.append(
            log1p_sum_exp([dot(x[a], x[n]) - dot(x[a], x[p]) for n in negatives(labels, a)])
        )
    over = total if reduction == "sum" else mean
    return over(values) + l2 * over([dot(row, row) for row in x])


def angular(labels, x, alpha_degrees=45.0, reduction="mean"):
    x, t = unit(x), math.tan(math.radians(alpha_degrees)) ** 2
    values = []
    for a, p in positive_pairs(labels):
        far = [n for n in negatives(labels, a) if n in negatives(labels, p)]
        if far:
            sums = [dot(x[a], x[n]) + dot(x[p], x[n]) for n in far]
            terms = [4 * t * both - 2 * (1 + t) * dot(x[a], x[p]) for both in sums]
            values.append(log1p_sum_exp(terms))
    return total(values) if reduction == "sum" else mean(values)


def multi_similarity(labels, x, alpha=2.0, beta=50.0, base=0.5, epsilon=0.1, reduction="mean"):
    values = []
    for i in range(len(x)):
        near = [cosine(x[i], x[j]) for j in positives(labels, i)]
        far = [cosine(x[i], x[j]) for j in negatives(labels, i)]
        if epsilon is not None:
            least, most = min(near, default=math.inf), max(far, default=-math.inf)
            near, far = (
                [s for s in near if s - epsilon < most],
                [s for s in far if s + epsilon > least],
            )
        pull = log1p_sum_exp([-alpha * (s - base) for s in near]) / alpha
        values.append(pull + log1p_sum_exp([beta * (s - base) for s in far]) / beta)
    return total(values) if reduction == "sum" else mean(values)


def lifted(labels, x, margin=1.0, reduction="mean"):
    values = []
    for i, j in positive_pairs(labels):
        terms = [margin - distance(x[i], x[k], "euclidean") for k in negatives(labels, i)]
        terms += [margin - distance(x[j], x[k], "euclidean") for k in negatives(labels, j)]
        values.append(0.5 * max(distance(x[i], x[j], "euclidean") + log_sum_exp(terms), 0.0) ** 2)
    return total(values) if reduction == "sum" else mean(values)


def circle(labels, x, margin=0.4, gamma=80.0, reduction="mean", frozen=None):
    """`frozen` are the vectors from which the weights, that carry no gradient, are computed."""
    frozen = x if frozen is None else frozen
    values = []
    for i in range(len(x)):
        pull, push = [], []
        for j in positives(labels, i):
            weight = max(1 + margin - cosine(frozen[i], frozen[j]), 0.0)
            pull.append(-gamma * weight * (cosine(x[i], x[j]) - 1 + margin))
        for j in negatives(labels, i):
            weight = max(cosine(frozen[i], frozen[j]) + margin, 0.0)
            push.append(gamma * weight * (cosine(x[i], x[j]) - margin))
        if pull and push:
            values.append(softplus(log_sum_exp(pull) + log_sum_exp(push)))
    return total(values) if reduction == "sum" else mean(values)


def sup_con(labels, x, temperature=0.1, reduction="mean"):
    values = []
    for i in range(len(x)):
        logits = [cosine(x[i], row) / temperature for row in x]
        over = log_sum_exp([logits[j] for j in positives(labels, i) + negatives(labels, i)])
        if positives(labels, i):
            values.append(mean([over - logits[j] for j in positives(labels, i)]))
    return total(values) if reduction == "sum" else mean(values)


def soft_histogram(values, low, high, bins):
    step = (high - low) / bins
    return [
        total(max(1 - abs(v - (low + r * step)) / step, 0.0) for v in values)
        for r in range(bins + 1)
    ]


def histogram(labels, x, bins=100, reduction="mean"):
    near, far = (
        [min(max(cosine(x[i], x[j]), -1.0), 1.0) for i, j in pairs if i < j]
        for pairs in (positive_pairs(labels), negative_pairs(labels))
    )
    if not near or not far:
        return 0.0
    near_nodes = [h / len(near) for h in soft_histogram(near, -1.0, 1.0, bins)]
    far_nodes = [h / len(far) for h in soft_histogram(far, -1.0, 1.0, bins)]
    value = total(far_nodes[r] * total(near_nodes[: r + 1]) for r in range(bins + 1))
    return value * 2 * len(far) if reduction == "sum" else value


def fast_ap(labels, x, bins=10, reduction="mean"):
    values = []
    for i in range(len(x)):
        near = positives(labels, i)
        squared = {
            j: min(max(2 - 2 * cosine(x[i], x[j]), 0.0), 4.0) for j in near + negatives(labels, i)
        }
        if not near:
            continue
        relevant = soft_histogram([squared[j] for j in near], 0.0, 4.0, bins)
        everything = soft_histogram(list(squared.values()), 0.0, 4.0, bins)
        terms = [
            ratio(relevant[r] * total(relevant[: r + 1]), total(everything[: r + 1]))
            for r in range(bins + 1)
        ]
        values.append(1 - total(terms) / len(near))
    return total(values) if reduction == "sum" else mean(values)


def cross_entropy(label, logits):
    return log_sum_exp(logits) - logits[int(label)]


def arc_face(labels, cosines, scale=64.0, margin=0.5, reduction="mean"):
    values = []
    for label, row in zip(labels, cosines, strict=True):
        logits = [float(c) for c in row]
        theta = math.acos(logits[int(label)])
        shifted = math.cos(theta + margin)
        beyond = logits[int(label)] - margin * math.sin(margin)
        logits[int(label)] = shifted if theta + margin < math.pi else beyond
        values.append(cross_entropy(label, [scale * logit for logit in logits]))
    return total(values) if reduction == "sum" else mean(values)


def proxy_nca(labels, cosines, scale=18.0, reduction="mean"):
    values = []
    for label, row in zip(labels, cosines, strict=True):
        others = [scale * float(c) for j, c in enumerate(row) if j != int(label)]
        values.append(log_sum_exp(others) - scale * float(row[int(label)]) if others else 0.0)
    return total(values) if reduction == "sum" else mean(values)


def proxy_anchor(labels, cosines, alpha=32.0, margin=0.1, reduction="mean"):
    pulls, pushes = [], []
    for c in range(len(cosines[0])):
        own = [
            -alpha * (float(row[c]) - margin)
            for y, row in zip(labels, cosines, strict=True)
            if int(y) == c
        ]
        others = [
            alpha * (float(row[c]) + margin)
            for y, row in zip(labels, cosines, strict=True)
            if int(y) != c
        ]
        if own:
            pulls.append(log1p_sum_exp(own))
        pushes.append(log1p_sum_exp(others))
    over = total if reduction == "sum" else mean
    return over(pulls) + over(pushes)


def soft_triple(labels, similarities, scale=20.0, gamma=0.1, margin=0.01, reduction="mean"):
    values = []
    for label, classes in zip(labels, similarities, strict=True):
        logits = []
        for c, row in enumerate(classes):
            over = log_sum_exp([float(s) / gamma for s in row])
            relaxed = total(math.exp(float(s) / gamma - over) * float(s) for s in row)
            logits.append(scale * (relaxed - (margin if c == int(label) else 0.0)))
        values.append(cross_entropy(label, logits))
    return total(values) if reduction == "sum" else mean(values)


def reduced(values, reduction):
    return total(values) if reduction == "sum" else mean(values)


def nt_xent(labels, x, temperature=0.07, reduction="mean"):
    values = []
    for a, p in positive_pairs(labels):
        own = cosine(x[a], x[p]) / temperature
        values.append(
            log1p_sum_exp([cosine(x[a], x[n]) / temperature - own for n in negatives(labels, a)])
        )
    return reduced(values, reduction)


def soft_nearest_neighbor(labels, x, temperature=0.2, kind="sqeuclidean", reduction="mean"):
    values = []
    for a in range(len(x)):
        if positives(labels, a):
            near = [-distance(x[a], x[p], kind) / temperature for p in positives(labels, a)]
            others = near + [
                -distance(x[a], x[n], kind) / temperature for n in negatives(labels, a)
            ]
            values.append(log_sum_exp(others) - log_sum_exp(near))
    return reduced(values, reduction)


def tuplet_margin(labels, x, degrees=5.73, scale=64.0, weight=0.0, slack=0.01, reduction="mean"):
    values, near, far = [], [], []
    for a, p in positive_pairs(labels):
        near.append(cosine(x[a], x[p]))
        own = math.cos(math.acos(min(max(near[-1], -1.0), 1.0)) - math.radians(degrees))
        values.append(
            log1p_sum_exp([scale * (cosine(x[a], x[n]) - own) for n in negatives(labels, a)])
        )
    far = [cosine(x[a], x[n]) for a, n in negative_pairs(labels)]
    pulls = [max((1 - slack) * mean(near) - s, 0.0) ** 2 for s in near]
    pushes = [max(s - (1 + slack) * mean(far), 0.0) ** 2 for s in far]
    return reduced(values, reduction) + weight * (
        reduced(pulls, reduction) + reduced(pushes, reduction)
    )


def generalized_lifted(
    labels, x, margin=1.0, positive_margin=0.0, kind="euclidean", reduction="mean"
):
    values = []
    for a in range(len(x)):
        pull = [distance(x[a], x[p], kind) - positive_margin for p in positives(labels, a)]
        push = [margin - distance(x[a], x[n], kind) for n in negatives(labels, a)]
        if pull and push:
            values.append(max(log_sum_exp(pull) + log_sum_exp(push), 0.0))
    return reduced(values, reduction)


def ranked_list(
    labels,
    x,
    margin=0.4,
    boundary=1.2,
    t_n=10.0,
    t_p=0.0,
    balance=0.5,
    reduction="mean",
    frozen=None,
):
    """`frozen` are the vectors from which the weights, that carry no gradient, are computed."""
    frozen = x if frozen is None else frozen

    def part(a, others, violation, temperature):
        active = [j for j in others if violation(distance(frozen[a], frozen[j], "euclidean")) > 0]
        weights = [
            math.exp(temperature * violation(distance(frozen[a], frozen[j], "euclidean")))
            for j in active
        ]
        terms = [
            w * violation(distance(x[a], x[j], "euclidean"))
            for w, j in zip(weights, active, strict=True)
        ]
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
        near = positives(labels, i)
        others = near + negatives(labels, i)
        terms = []
        for j in near:
            first, rank = (
                1 + total(smooth_step((s[k] - s[j]) / temperature) for k in among if k != j)
                for among in (near, others)
            )
            terms.append(first / rank)
        if near:
            values.append(1 - mean(terms))
    return reduced(values, reduction)


def recall_at_k(labels, x, ks=(1, 2, 4, 8, 16), t_rank=0.01, t_recall=1.0, reduction="mean"):
    values = []
    for i in range(len(x)):
        s, near = [cosine(x[i], row) for row in x], positives(labels, i)
        others = near + negatives(labels, i)
        ranks = [
            1 + total(smooth_step((s[k] - s[j]) / t_rank) for k in others if k != j) for j in near
        ]
        if near:
            found = [
                min(total(smooth_step((k - rank) / t_recall) for rank in ranks), k) for k in ks
            ]
            values.append(
                1 - mean([number / min(k, len(near)) for k, number in zip(ks, found, strict=True)])
            )
    return reduced(values, reduction)


def vic_reg(
    labels, x, invariance=25.0, variance=25.0, covariance=1.0, deviation=1.0, reduction="mean"
):
    count, dim = len(x), len(x[0])
    pull = reduced(
        [distance(x[i], x[j], "sqeuclidean") / dim for i, j in positive_pairs(labels)], reduction
    )
    means = [mean([float(row[c]) for row in x]) for c in range(dim)]

    def cov(a, b):
        return total((float(row[a]) - means[a]) * (float(row[b]) - means[b]) for row in x) / max(
            count - 1, 1
        )

    shortfall = mean([max(deviation - math.sqrt(cov(c, c) + 1e-4), 0.0) for c in range(dim)])
    between = total(cov(a, b) ** 2 for a in range(dim) for b in range(dim) if a != b) / dim
    images = count if reduction == "sum" else 1
    return invariance * pull + images * (variance * shortfall + covariance * between)
