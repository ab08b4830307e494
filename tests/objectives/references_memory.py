"""Losses over pairs with a memory, pair by pair: of the distances of each anchor to its positives
and negatives."""

import numpy as np


def contrastive(anchors):
    pulls = [p for positives, _ in anchors for p in positives]
    pushes = [1.0 - n for _, negatives in anchors for n in negatives if n < 1.0]
    return (np.mean(pulls) if pulls else 0.0) + (np.mean(pushes) if pushes else 0.0)


def binomial_sum(anchors):
    """Of distances d of unit vectors: their cosine is 1 - d^2 / 2."""
    total = 0.0
    for positives, negatives in anchors:
        total += sum(np.log1p(np.exp(-2.0 * (0.5 - d * d / 2))) for d in positives)
        total += sum(np.log1p(np.exp(50.0 * (0.5 - d * d / 2))) for d in negatives)
    return total


def triplet(anchors):
    hinges = [
        p * p - n * n + 0.3
        for positives, negatives in anchors
        for p in positives
        for n in negatives
    ]
    active = [hinge for hinge in hinges if hinge > 0]
    return np.mean(active) if active else 0.0


def multi_similarity(anchors):
    """The mean over all anchors of the batch."""
    total = 0.0
    for positives, negatives in anchors:
        total += np.log1p(sum(np.exp(-2.0 * (0.5 - d * d / 2)) for d in positives)) / 2.0
        total += np.log1p(sum(np.exp(10.0 * (0.5 - d * d / 2)) for d in negatives)) / 10.0
    return total / len(anchors)


def reference(of_anchors, labels, x, memory, compared=None):
    """The loss of the distances of each of the images to its positives and its negatives, one pair
    after another.

    The images are compared with each other, or with `compared`: their vectors as constants.
    """
    x = np.asarray(x, np.float64)
    compared = x if compared is None else np.asarray(compared, np.float64)
    anchors = []
    for i, label in enumerate(labels):
        positives, negatives = [], []
        others = [(labels[j], compared[j]) for j in range(len(x)) if j != i] + memory
        for other, vector in others:
            (positives if other == label else negatives).append(
                np.sqrt(np.sum((x[i] - vector) ** 2))
            )
        anchors.append((positives, negatives))
    return of_anchors(anchors)


def _unit(x):
    x = np.asarray(x, np.float64)
    return x / np.linalg.norm(x)


class PrismReference:
    """The procedure of PRISM's paper, image by image."""

    def __init__(self, noise_rate, window, size, start):
        self.noise_rate, self.window, self.size, self.start = noise_rate, window, size, start
        self.memory, self.thresholds, self.steps = [], [], 0

    def probability(self, label, vector):
        means = {}
        for known in {label for label, _ in self.memory}:
            means[known] = np.mean([_unit(v) for other, v in self.memory if other == known], axis=0)
        if label not in means:
            return 1.0
        weights = {known: np.exp(mean @ _unit(vector)) for known, mean in means.items()}
        return weights[label] / sum(weights.values())

    def step(self, labels, x):
        """Which images count; they are remembered."""
        likely = np.array([self.probability(*image) for image in zip(labels, x, strict=True)])
        dropped = int(round(self.noise_rate * len(x), 6))
        lowest = np.sort(likely)[:dropped]
        if dropped and lowest[-1] < 1:
            self.thresholds = [*self.thresholds, lowest[-1]][-self.window :]
            if not np.any(likely > np.mean(self.thresholds)):
                self.thresholds = self.thresholds[-1:]
        kept = likely > np.mean(self.thresholds) if self.thresholds else np.zeros(len(x), bool)
        if not kept.any():
            kept = likely >= np.sort(likely)[dropped]
        kept |= likely >= 1
        if self.steps >= self.start:
            self.memory += [
                image for image, good in zip(zip(labels, x, strict=True), kept, strict=True) if good
            ]
            self.memory = self.memory[-self.size :]
        self.steps += 1
        return kept
