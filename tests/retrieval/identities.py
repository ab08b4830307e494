"""The rules of classes of several images, slowly and in float64."""

import numpy as np


def made(seed=0, classes=6, per_class=5, dim=4, unit=True):
    """Images around centers, their classes in no order, and their groups within a class."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes), per_class))
    centers = rng.normal(size=(classes, dim))
    images = centers[labels] + 0.7 * rng.normal(size=(len(labels), dim))
    if unit:
        images /= np.linalg.norm(images, axis=1, keepdims=True)
    return images.astype(np.float32), labels, rng.integers(0, 2, len(labels))


def distance_between(one, other, distance):
    if distance == "dot":
        return -(one @ other)
    if distance == "cosine":
        return 1 - one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    return np.linalg.norm(one - other) ** (2 if distance == "sqeuclidean" else 1)


def mean_by_hand(images, distance):
    """The mean, which has the mean length of its images where directions count."""
    images = np.asarray(images, np.float64)
    if distance in ("euclidean", "sqeuclidean"):
        return images.mean(axis=0)
    lengths = [np.linalg.norm(image) for image in images]
    mean = np.mean([image / length for image, length in zip(images, lengths, strict=True)], axis=0)
    return mean / np.linalg.norm(mean) * np.mean(lengths)


def references_by_hand(images, groups, rule, distance):
    images = np.asarray(images, np.float64)
    if rule == "nearest":
        return list(images)
    members = [images[groups == group] for group in sorted(set(groups))]
    if rule == "max_of_means":
        return [mean_by_hand(part, distance) for part in members]
    if distance in ("euclidean", "sqeuclidean"):
        return [np.mean([part.mean(axis=0) for part in members], axis=0)]
    lengths = np.linalg.norm(images, axis=1)
    units = images / lengths[:, None]
    mean = np.mean([units[groups == group].mean(axis=0) for group in sorted(set(groups))], axis=0)
    return [mean / np.linalg.norm(mean) * lengths.mean()]


def distances_by_hand(query, images, labels, groups, rule, distance, leave_out=-1):
    """Of each class, in float64, without one row of the gallery; infinite for an empty class."""
    kept = np.arange(len(images)) != leave_out
    row = []
    for label in range(labels.max() + 1):
        mine = kept & (labels == label)
        references = []
        if mine.any():
            references = references_by_hand(images[mine], groups[mine], rule, distance)
        row.append(
            min((distance_between(query, other, distance) for other in references), default=np.inf)
        )
    return np.array(row)
