"""Mutual information adjusted for chance, exactly, where many classes have the same size."""

from __future__ import annotations

from typing import Any

import numpy as np


def expected_mutual_information(class_sizes: Any, cluster_sizes: Any) -> float:
    """The mean mutual information, in nats, of two partitions with these sizes, over all ways to match them up.

    E = sum over classes i, clusters j and n of n/N log(N n / (a_i b_j)) Pr(n), where Pr is hypergeometric: the
    probability that n of a cluster's b_j images belong to a class of a_i among N (Vinh et al., 2010, eq. 24a). The
    term depends on the two sizes alone, so it is computed once for each pair of different sizes and multiplied by how
    many pairs have them: 11,316 classes of 2 to 12 images cost what eleven do.

    Args:
        class_sizes: (C,) numbers of images, at least 1 each.
        cluster_sizes: (K,) numbers of images, at least 1 each, with the same sum.

    Returns:
        The expectation.

    Example:
        >>> round(expected_mutual_information([1, 1], [1, 1]), 6)  # always matched one to one
        0.693147
    """
    from scipy.special import gammaln

    a_sizes, a_times = np.unique(np.asarray(class_sizes, np.int64), return_counts=True)
    b_sizes, b_times = np.unique(np.asarray(cluster_sizes, np.int64), return_counts=True)
    total = int(a_sizes @ a_times)
    log_factorial = gammaln(np.arange(total + 1) + 1.0)

    expectation = 0.0
    for a, times in zip(a_sizes, a_times, strict=True):
        # Every n of every b, in one flat row: never longer than N, since the sizes b differ.
        most = np.minimum(a, b_sizes)
        b = np.repeat(b_sizes, most)
        n = np.arange(len(b)) - np.repeat(np.cumsum(most) - most, most) + 1
        possible = n >= a + b - total
        b, n = b[possible], n[possible]
        weight = np.repeat(b_times, most)[possible]
        log_probability = (
            log_factorial[a]
            + log_factorial[b]
            + log_factorial[total - a]
            + log_factorial[total - b]
            - log_factorial[total]
            - log_factorial[n]
            - log_factorial[a - n]
            - log_factorial[b - n]
            - log_factorial[total - a - b + n]
        )
        information = n / total * (np.log(total * n.astype(np.float64)) - np.log(float(a) * b))
        expectation += float(times) * float(np.sum(weight * information * np.exp(log_probability)))
    return expectation


def adjusted_mutual_information(labels: Any, clusters: Any) -> float:
    """AMI = (I - E) / ((H(L) + H(C)) / 2 - E), with E the mutual information expected by chance.

    As scikit-learn's `adjusted_mutual_info_score`, limiting cases included: 1 where neither splits the images, else 0
    where one of the two does not.

    Args:
        labels: (N,) class ids, N at least 1.
        clusters: (N,) cluster ids.

    Returns:
        At most 1; 0 on average for clusters that do not depend on the classes.

    Example:
        >>> adjusted_mutual_information([0, 0, 1, 1], [5, 5, 9, 9])
        1.0
    """
    labels, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)[1:]
    clusters, cluster_sizes = np.unique(clusters, return_inverse=True, return_counts=True)[1:]
    if len(class_sizes) == len(cluster_sizes) == 1:
        return 1.0
    if len(class_sizes) == 1 or len(cluster_sizes) == 1:
        return 0.0
    together = np.unique(labels.astype(np.int64) * len(cluster_sizes) + clusters, return_counts=True)[1]
    h_labels, h_clusters = _entropy(class_sizes), _entropy(cluster_sizes)
    information = h_labels + h_clusters - _entropy(together)
    expected = expected_mutual_information(class_sizes, cluster_sizes)
    # Where the expectation is the maximum (every image for itself) both differences are 0, and the match is perfect.
    above = _away_from_zero(information - expected)
    return float(above / _away_from_zero((h_labels + h_clusters) / 2 - expected))


def _entropy(counts: np.ndarray) -> float:
    """Entropy in nats of counts that are at least 1."""
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())


def _away_from_zero(x: float) -> float:
    tiny = float(np.finfo(np.float64).eps)
    return min(x, -tiny) if x < 0 else max(x, tiny)
