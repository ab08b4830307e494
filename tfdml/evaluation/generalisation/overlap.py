"""How far the distances of pairs of one class overlap those of pairs of different classes (RankMI's figure 1)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.generalisation.pair_histogram import PairHistogram, count_pair_distances, sample_pair_histogram


def overlap_coefficient(positive: Any, negative: Any) -> float:
    """The integral of the lesser of two densities: sum_k min(p_k, q_k), of histograms over the same bins.

    1 where the distributions are the same, 0 where they share no bin.

    Args:
        positive: (K,) counts or probabilities; scaled to the sum 1.
        negative: (K,) the same.

    Example:
        >>> overlap_coefficient([1, 1, 0], [0, 1, 1])
        0.5
    """
    p, q = _shares(positive, negative)
    return float(np.minimum(p, q).sum())


def jensen_shannon_bits(positive: Any, negative: Any) -> float:
    """The Jensen-Shannon divergence in bits, of histograms over the same bins.

    JSD = KL(p | m) / 2 + KL(q | m) / 2 with m = (p + q) / 2 and logarithms of base 2: 0 where the distributions are the
    same, 1 where they share no bin. It measures what a pair's distance says about whether its images are of one class,
    when half of the pairs are. In nats it is ln 2 times as much.

    Args:
        positive: (K,) counts or probabilities; scaled to the sum 1.
        negative: (K,) the same.

    Example:
        >>> jensen_shannon_bits([1, 1, 0], [0, 1, 1])
        0.5
    """
    p, q = _shares(positive, negative)
    m = (p + q) / 2

    def divergence(x: np.ndarray) -> float:
        inside = x > 0  # x log x is 0 at 0
        return float((x[inside] * np.log2(x[inside] / m[inside])).sum())

    return min(max((divergence(p) + divergence(q)) / 2, 0.0), 1.0)


def probability_nearer(positive: Any, negative: Any) -> float:
    """P(d+ < d-) + P(d+ = d-) / 2, the area under the ROC curve, of histograms over the same ascending bins.

    Pairs in one bin count as ties: with fine bins the error is at most half of sum_k p_k q_k.

    Args:
        positive: (K,) counts or probabilities of d+; scaled to the sum 1.
        negative: (K,) the same of d-.

    Example:
        >>> probability_nearer([1, 1, 0], [0, 1, 1])
        0.875
    """
    p, q = _shares(positive, negative)
    further = 1 - np.cumsum(q)
    return float((p * (further + q / 2)).sum())


def share_ordered(positive: Any, negative: Any) -> float:
    """The same of the distances themselves: only equal distances are ties, a bin for each that occurs.

    Args:
        positive: (P,) d+.
        negative: (Q,) d-.

    Example:
        >>> share_ordered([1.0, 2.0], [2.0, 3.0])
        0.875
    """
    distances, place = np.unique(np.concatenate([positive, negative]), return_inverse=True)
    counts = [np.bincount(part, minlength=len(distances)) for part in np.split(place, [len(positive)])]
    return probability_nearer(*counts)


def default_bins(histogram: PairHistogram) -> int:
    """Rice's rule for the rarer kind of n pairs, ceil(2 n^(1/3)), and at most 100 bins.

    Between histograms of few pairs chance alone keeps the overlap below 1 and the divergence above 0, the more so the
    more bins there are. The rule depends on nothing but n, so that two models on one data set are compared alike.
    """
    rarer = min(int(histogram.positive.sum()), int(histogram.negative.sum()))
    return min(100, int(np.ceil(2 * rarer ** (1 / 3) - 1e-9)))


def evaluate_overlap(
    embeddings: Any,
    labels: Any,
    *,
    distance: str = "euclidean",
    num_pairs: int | None = None,
    bins: int | None = None,
    seed: int = 0,
) -> dict[str, float | int | bool]:
    """Compare the distances d+ of pairs of one class with the distances d- of pairs of different classes.

    The densities are histograms over equal bins from the least distance that occurs to the largest, so scaling all
    embeddings changes nothing. The paper shows such densities (figure 1) and gives no figure for their overlap; the
    overlap coefficient, the Jensen-Shannon divergence that its loss bounds (eq. 2), and the probability that d+ is less
    than d- are those chosen here. Every pair counts the same, as in a batch of the paper's algorithm 1; its text draws
    the class of a positive pair first, which would count pairs of small classes more.

    Relation to RankMI: minus half of its loss, logged as `<name>_jsd`, is a lower bound on this divergence in nats,
    that is on `jsd_bits` times ln 2, between the distances of the pairs it saw; binning lowers the divergence too.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids.
        distance: `euclidean`, `sqeuclidean`, `cosine` or `dot`. The first three rank pairs of unit vectors alike, but
            equal bins of one are not equal bins of another.
        num_pairs: How many pairs to draw of each kind, with replacement; None: all pairs, each once (a minute for
            60,000 images of 512 dimensions).
        bins: How many; by default what `default_bins` gives.
        seed: Of the draw.

    Returns:
        `overlap`, `jsd_bits`, `auc`; `mean_positive_distance` and `mean_negative_distance`, in the distance's unit;
        `num_positive_pairs`, `num_negative_pairs`, `all_pairs` (False where they were drawn) and `bins`.

    Raises:
        UserError: As `count_pair_distances`; fewer than one pair or bin asked for.

    Example:
        >>> figures = evaluate_overlap([[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8])
        >>> figures["overlap"], figures["jsd_bits"], figures["auc"]
        (0.0, 1.0, 1.0)

    Source: Kemertas et al., "RankMI: A Mutual Information Maximizing Ranking Loss", CVPR 2020, fig. 1 and eq. 2.
    """
    if bins is not None and bins < 1:
        raise UserError(f"bins must be at least 1; got {bins}")
    if num_pairs is None:
        fine = count_pair_distances(embeddings, labels, distance=distance)
    else:
        fine = sample_pair_histogram(embeddings, labels, num_pairs=num_pairs, distance=distance, seed=seed)
    coarse = fine.rebinned(bins or default_bins(fine))
    return {
        "overlap": overlap_coefficient(coarse.positive, coarse.negative),
        "jsd_bits": jensen_shannon_bits(coarse.positive, coarse.negative),
        "auc": probability_nearer(fine.positive, fine.negative),
        "mean_positive_distance": fine.mean_positive,
        "mean_negative_distance": fine.mean_negative,
        "num_positive_pairs": int(fine.positive.sum()),
        "num_negative_pairs": int(fine.negative.sum()),
        "all_pairs": fine.exact,
        "bins": len(coarse.positive),
    }


def _shares(positive: Any, negative: Any) -> tuple[np.ndarray, np.ndarray]:
    p, q = np.asarray(positive, np.float64), np.asarray(negative, np.float64)
    if p.shape != q.shape or p.ndim != 1:
        raise UserError(f"histograms must be over the same bins; got shapes {p.shape} and {q.shape}")
    if not (p.sum() > 0 and q.sum() > 0):
        raise UserError("each histogram must hold a pair")
    return p / p.sum(), q / q.sum()
