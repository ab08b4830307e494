"""How an embedding treats classes it was not trained on: overlap of distances, density, divergence, and a summary."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdml.errors import UserError, check_choice, check_positive
from tfdml.evaluation.intervals import student_interval
from tfdml.evaluation.relevance import check_labels
from tfdml.evaluation.retrieval import evaluate_retrieval
from tfdml.evaluation.verification import AllPairs, PairHistogram, probability_nearer
from tfdml.retrieval.exact import check_embeddings, nearest_neighbors

GENERALIZATION_MEASURES = ("recall", "overlap", "density", "divergence")


def overlap_coefficient(positive: Any, negative: Any) -> float:
    """Return the integral of the lesser of two densities: sum_k min(p_k, q_k), of histograms over the same bins.

    1 where the distributions are the same, 0 where they share no bin.

    Args:
        positive: (K,) counts or probabilities; scaled to the sum 1.
        negative: (K,) the same.

    Example:
        >>> overlap_coefficient([1, 1, 0], [0, 1, 1])
        0.5
    """
    p, q = (np.asarray(counts, np.float64) / np.sum(counts) for counts in (positive, negative))
    return float(np.minimum(p, q).sum())


def jensen_shannon_bits(positive: Any, negative: Any) -> float:
    """Return the Jensen-Shannon divergence in bits, of histograms over the same bins.

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
    from scipy.spatial.distance import jensenshannon

    shares = (np.asarray(counts, np.float64) / np.sum(counts) for counts in (positive, negative))
    return min(float(jensenshannon(*shares, base=2)) ** 2, 1.0)


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
    bins: int | None = None,
) -> dict[str, float | int]:
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
        bins: How many; by default what `default_bins` gives.

    Returns:
        `overlap`, `jsd_bits`, `auc`; `mean_positive_distance` and `mean_negative_distance`, in the distance's unit;
        `num_positive_pairs`, `num_negative_pairs` and `bins`.

    Raises:
        UserError: As `verification`; fewer than one bin asked for.

    Example:
        >>> figures = evaluate_overlap([[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8])
        >>> figures["overlap"], figures["jsd_bits"], figures["auc"]
        (0.0, 1.0, 1.0)

    Source: Kemertas et al., "RankMI: A Mutual Information Maximizing Ranking Loss", CVPR 2020, fig. 1 and eq. 2.
    """
    if bins is not None:
        check_positive(bins=bins)
    fine = AllPairs(embeddings, labels, distance).histogram
    coarse = fine.rebinned(bins or default_bins(fine))
    return {
        "overlap": overlap_coefficient(coarse.positive, coarse.negative),
        "jsd_bits": jensen_shannon_bits(coarse.positive, coarse.negative),
        "auc": probability_nearer(fine.positive, fine.negative),
        "mean_positive_distance": fine.mean_positive,
        "mean_negative_distance": fine.mean_negative,
        "num_positive_pairs": int(fine.positive.sum()),
        "num_negative_pairs": int(fine.negative.sum()),
        "bins": len(coarse.positive),
    }


def class_density(embeddings: Any, labels: Any) -> dict[str, float | int]:
    """Return the density of classes and how far their means lie apart, in squared Euclidean distances.

        D_avg(c) = 1/n_c sum_{i in c} |f_i - mu_c|^2,   mu_c = 1/n_c sum_{i in c} f_i

    as `tfdml.objectives.DensityAdaptivity` of a batch, here of the whole data set, in float64. With unit vectors
    D_avg(c) = 1 - |mu_c|^2. The mean of few images lies closer to them than that of the class: for images drawn from a
    distribution of variance s, D_avg is s (1 - 1/n_c) on average, so compare models on the same images, or classes of
    one size. The paper states no figure for how far classes spread from each other; the squared distances between the
    means are those chosen here.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids, of at least two classes.

    Returns:
        `d_avg_mean`, `d_avg_std`, `d_avg_min` and `d_avg_max` over the classes with at least two images, which are
        counted in `num_dense_classes`; over all classes `d_nearest_mean` and `d_nearest_min`, of a class's mean to the
        nearest other class's, and `d_others_mean`, to those of all other classes; and `separation`, `d_nearest_mean`
        over `d_avg_mean`, left out where every class has collapsed to a point.

    Raises:
        UserError: Embeddings that are empty or not finite, labels that do not go with them, one class only, or no class
            of two images.

    Example:
        >>> figures = class_density([[0.0], [2.0], [5.0], [5.0]], [7, 7, 9, 9])
        >>> figures["d_avg_mean"], figures["d_nearest_mean"], figures["separation"]
        (0.5, 16.0, 32.0)

    Source: Li et al., "Deep Metric Learning with Density Adaptivity", IEEE T-MM 2019, eq. 5.
    """
    embeddings = check_embeddings(embeddings)
    labels = check_labels(labels, len(embeddings))
    classes, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(classes) < 2:
        raise UserError("the density of classes needs at least two classes")
    # Moved to the common mean, which changes no distance, sums of squares cancel least.
    center = embeddings.mean(axis=0, dtype=np.float64)
    means, d_avg = np.zeros((len(classes), embeddings.shape[1])), np.zeros(len(classes))
    rows_of = np.split(np.argsort(place, kind="stable"), np.cumsum(counts)[:-1])
    for i, rows in enumerate(rows_of):
        points = embeddings[rows] - center
        means[i] = points.mean(axis=0)
        d_avg[i] = np.square(points - means[i]).sum(axis=1).mean()
    several = counts > 1
    if not several.any():
        raise UserError("the density of classes needs a class of two images or more")
    d_nearest = np.square(means - means[nearest_neighbors(means, k=1)[0][:, 0]]).sum(axis=1)
    squares = np.einsum("cd,cd->c", means, means)
    # sum_j |m_i - m_j|^2, without a matrix of all pairs
    d_others = (len(classes) * squares + squares.sum() - 2 * means @ means.sum(axis=0)) / (len(classes) - 1)
    result = {f"d_avg_{name}": float(getattr(d_avg[several], name)()) for name in ("mean", "std", "min", "max")}
    result |= {"d_nearest_mean": float(d_nearest.mean()), "d_nearest_min": float(d_nearest.min())}
    result["d_others_mean"] = float(d_others.mean())
    if d_avg[several].any():
        result["separation"] = result["d_nearest_mean"] / result["d_avg_mean"]
    return result | {"num_dense_classes": int(several.sum())}


def evaluate_divergence(
    seen: Any,
    seen_labels: Any,
    unseen: Any,
    unseen_labels: Any,
    *,
    labeled: float = 0.5,
    repeats: int = 10,
    distance: str = "euclidean",
    seed: int = 0,
) -> dict[str, float | int]:
    """Estimate lambda and the H-divergence between the embeddings of seen and of unseen classes.

    For every classifier h of a space H, the errors on the unseen and the seen classes satisfy (eq. 1)

        e_unseen(h) <= e_seen(h) + d_H + lambda

    with d_H = 1 - e*, where e* is the least error of telling images of seen classes from images of unseen classes
    (eq. 2), and lambda = e_seen(h*) + e_unseen(h*), where h* is the best classifier of all classes of both together
    (eq. 3). H are nearest neighbor classifiers. As in the paper (sec. 2), a part of the images of both sides is
    labeled and is what the classifiers are fitted to; the errors are those on the rest, which is held out. One
    neighbor decides both: h* gives an image the class of its nearest labeled image of either side, and the other
    classifier the side of that image. Exact: of all labeled images, equal distances decided by the lower row, seen
    classes before unseen.

    Settled here, for the paper leaves it open: half of the images of each class, drawn at random, are labeled (a class
    of one image is labeled, and not measured); an error is the mean of the errors on either side, for d_H and for
    `joint_error`, so that neither counts more where it has more images, and d_H is 0.5 by chance; the split is drawn
    `repeats` times, and the intervals are t * s / sqrt(repeats) with Student's t, the half width of a 95 % interval of
    the mean. They speak of the choice of the split alone, not of the images or of the training. Table 3's lambda of
    0.310 is less than the 0.321 that Recall@1 in table 1 leaves for e_unseen by itself, so it may be the mean of the
    two errors and not eq. 3's sum: compare it with `joint_error` also.

    An image given its right class is given its right side, so that 1 - d_H <= lambda / 2: an embedding that finds
    classes well has a d_H near 1. Read the two together, as the paper does, by their sum.

    Classes of the two sides are different classes even where their ids coincide. Cost: one search of all images in all
    (four times that of one side), whatever `repeats` is; 60,000 + 60,000 images of 512 dimensions take some minutes on
    two cores, and about four copies of the embeddings next to 256 MB.

    Args:
        seen: (N, d) embeddings of the classes trained on.
        seen_labels: (N,) integer class ids.
        unseen: (M, d) embeddings of the other classes, by the same model.
        unseen_labels: (M,) integer class ids.
        labeled: The share of each class's images that is labeled, above 0 and below 1; of two images or more, at
            least one is labeled and one held out.
        repeats: How many splits.
        distance: As `nearest_neighbors`.
        seed: Of the splits.

    Returns:
        Fractions, means over the splits: `lambda` (0 .. 2), `joint_error_seen` and `joint_error_unseen`, whose sum it
        is, and `joint_error`, their mean; `h_divergence` and `domain_error`, its e*; `lambda_plus_h_divergence`;
        `proxy_a_distance`, 2 (1 - 2 e*), as in domain adaptation. `lambda_ci95`, `joint_error_ci95`,
        `h_divergence_ci95` and `lambda_plus_h_divergence_ci95` where there are several splits. The counts
        `held_out_seen`, `held_out_unseen` and `splits`.

    Raises:
        UserError: Embeddings that are empty, not finite or of different dimensions; labels that do not go with them; no
            class of two images on a side; an argument out of range.

    Example:
        >>> seen, unseen = [[0.0], [0.1], [5.0], [5.1]], [[50.0], [50.1], [70.0], [70.1]]
        >>> figures = evaluate_divergence(seen, [0, 0, 1, 1], unseen, [2, 2, 3, 3])
        >>> figures["lambda"], figures["h_divergence"]
        (0.0, 1.0)

    Source: Chu et al., "Distance Metric Learning with Joint Representation Diversification", ICML 2020, sec. 2, eq.
    1-3, fig. 2 and table 3; the bound is that of Ben-David et al., "A theory of learning from different domains", 2010.
    """
    if not 0 < labeled < 1:
        raise UserError(f"labeled must be a share above 0 and below 1; got {labeled}")
    check_positive(repeats=repeats)
    pairs = [_checked(seen, seen_labels, "seen"), _checked(unseen, unseen_labels, "unseen")]
    for (_, labels), name in zip(pairs, ("seen", "unseen"), strict=True):
        if np.unique(labels, return_counts=True)[1].max() < 2:
            raise UserError(f"{name} classes: none has two images, one to be labeled and one to be held out")
    if pairs[0][0].shape[1] != pairs[1][0].shape[1]:
        raise UserError(f"seen embeddings have {pairs[0][0].shape[1]} dimensions, unseen {pairs[1][0].shape[1]}")
    points, labels = (np.concatenate(side) for side in zip(*pairs, strict=True))
    is_seen = np.arange(len(points)) < len(pairs[0][0])
    # Those of seen classes first; classes of the two sides are different classes.
    classes = np.unique([~is_seen, labels], axis=1, return_inverse=True)[1]
    errors = []
    for repeat in range(repeats):
        is_labeled = _split(classes, labeled, np.random.default_rng([seed, repeat]))
        gallery, held_out = np.flatnonzero(is_labeled), np.flatnonzero(~is_labeled)
        rows, _ = nearest_neighbors(points[held_out], points[gallery], k=1, distance=distance)
        nearest = gallery[rows[:, 0]]
        wrong_class, wrong_side = classes[nearest] != classes[held_out], is_seen[nearest] != is_seen[held_out]
        sides = (is_seen[held_out], ~is_seen[held_out])
        errors.append([wrong[side].mean() for wrong in (wrong_class, wrong_side) for side in sides])
    joint_seen, joint_unseen, side_seen, side_unseen = np.array(errors).T
    domain_error = (side_seen + side_unseen) / 2
    values = {
        "lambda": joint_seen + joint_unseen,
        "joint_error": (joint_seen + joint_unseen) / 2,
        "h_divergence": 1 - domain_error,
        "lambda_plus_h_divergence": joint_seen + joint_unseen + 1 - domain_error,
    }
    result: dict[str, float | int] = {}
    for name, per_split in values.items():
        result[name] = float(per_split.mean())
        if repeats > 1:
            interval = student_interval(per_split)
            result[f"{name}_ci95"] = (interval.high - interval.low) / 2
    return result | {
        "joint_error_seen": float(joint_seen.mean()),
        "joint_error_unseen": float(joint_unseen.mean()),
        "domain_error": float(domain_error.mean()),
        "proxy_a_distance": float(2 - 4 * domain_error.mean()),
        "held_out_seen": int(sides[0].sum()),
        "held_out_unseen": int(sides[1].sum()),
        "splits": repeats,
    }


def _split(classes: np.ndarray, labeled: float, rng: np.random.Generator) -> np.ndarray:
    """(N,) bool, whether each image is labeled; classes are 0 .. C - 1."""
    counts = np.bincount(classes)
    sizes = np.floor(labeled * counts + 0.5).astype(np.int64)
    sizes = np.where(counts > 1, np.clip(sizes, 1, np.maximum(counts - 1, 1)), counts)
    order = np.lexsort((rng.random(len(classes)), classes))  # class by class, at random within each
    rank = np.empty(len(classes), np.int64)
    rank[order] = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank < sizes[classes]


def evaluate_generalization(
    test_embeddings: Any,
    test_labels: Any,
    train_embeddings: Any = None,
    train_labels: Any = None,
    *,
    measures: Sequence[str] = GENERALIZATION_MEASURES,
    distance: str = "euclidean",
    repeats: int = 10,
    seed: int = 0,
) -> dict[str, float | int]:
    """Measure how far an embedding that was trained on some classes carries over to others.

    Of the test (unseen) classes, and of the training (seen) classes too where their embeddings are given:

    - `recall`: Recall@1 all-to-all, whose difference is the generalization gap (DML-DA's figure 1d);
    - `overlap`: of the distances of pairs of one class and of different classes (`evaluate_overlap`);
    - `density`: of classes, and how far their means lie apart (`class_density`).

    Of both together: `divergence`, lambda and the H-divergence (`evaluate_divergence`). What cannot be measured on the
    classes given, for want of a second class or of a second image of any class, is left out.

    Args:
        test_embeddings: (N, d), of classes not trained on.
        test_labels: (N,) integer class ids.
        train_embeddings: (M, d), of the classes trained on; None: what needs them is left out.
        train_labels: (M,) integer class ids, given exactly if `train_embeddings` are.
        measures: Which of `GENERALIZATION_MEASURES`.
        distance: Of `recall`, `overlap` and `divergence`, as `nearest_neighbors`.
        repeats: Of `evaluate_divergence`: how many splits.
        seed: Of whatever is drawn.

    Returns:
        Numbers by name, suited to JSON: those of `evaluate_divergence` as they are; `unseen_` and `seen_` before
        `recall@1` and those of `evaluate_overlap` and `class_density`.
        Their meanings are the pages' of those functions; distances are not fractions, and lambda may exceed 1.

    Raises:
        UserError: Embeddings or labels that do not go together, an unknown measure, or an argument out of range.

    Example:
        >>> figures = evaluate_generalization([[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8])
        >>> figures["unseen_recall@1"], figures["unseen_overlap"]
        (1.0, 0.0)
    """
    for name in measures:
        check_choice("measure", name, GENERALIZATION_MEASURES)
    if (train_embeddings is None) != (train_labels is None):
        raise UserError("train_embeddings and train_labels go together: give both or none")
    sides = {"unseen": _checked(test_embeddings, test_labels, "test")}
    if train_embeddings is not None:
        sides["seen"] = _checked(train_embeddings, train_labels, "train")
    result: dict[str, float | int] = {}
    for side, (embeddings, labels) in sides.items():
        counts = np.unique(labels, return_counts=True)[1]
        values: dict[str, float | int] = {}
        if len(counts) > 1 and counts.max() > 1:
            if "recall" in measures:
                recall = evaluate_retrieval(embeddings, labels, ks=(1,), metrics=("recall",), distance=distance)
                values["recall@1"] = recall["recall@1"]
            if "overlap" in measures:
                values |= evaluate_overlap(embeddings, labels, distance=distance)
            if "density" in measures:
                values |= class_density(embeddings, labels)
        result |= {f"{side}_{name}": value for name, value in values.items()}
    paired = all(np.unique(labels, return_counts=True)[1].max() > 1 for _, labels in sides.values())
    if "divergence" in measures and len(sides) == 2 and paired:
        result |= evaluate_divergence(*sides["seen"], *sides["unseen"], distance=distance, repeats=repeats, seed=seed)
    return result


def _checked(embeddings: Any, labels: Any, side: str) -> tuple[np.ndarray, np.ndarray]:
    embeddings = check_embeddings(embeddings, f"{side}_embeddings")
    return embeddings, check_labels(labels, len(embeddings), f"{side}_labels")
