"""How an embedding treats classes it was not trained on: lambda, the H-divergence, and the gap of
Recall@1."""

from typing import Any

import numpy as np

from tfdml.errors import UserError, check_positive
from tfdml.evaluation.intervals import student_interval
from tfdml.evaluation.relevance import check_labels
from tfdml.evaluation.retrieval import evaluate_retrieval
from tfdml.retrieval.exact import check_embeddings, nearest_neighbors


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

    For every classifier h of a space H, the errors on the unseen and the seen classes satisfy (eq.
    1)

        e_unseen(h) <= e_seen(h) + d_H + lambda

    with d_H = 1 - e*, where e* is the least error of telling images of seen classes from images of
    unseen classes (eq. 2), and lambda = e_seen(h*) + e_unseen(h*), where h* is the best classifier
    of all classes of both together (eq. 3). H are nearest neighbor classifiers. As in the paper
    (sec. 2), a part of the images of both sides is labeled and is what the classifiers are fitted
    to; the errors are those on the rest, which is held out. One neighbor decides both: h* gives an
    image the class of its nearest labeled image of either side, and the other classifier the side
    of that image. Exact: of all labeled images, equal distances decided by the lower row, seen
    classes before unseen.

    Settled here, for the paper leaves it open: half of the images of each class, drawn at random,
    are labeled (a class of one image is labeled, and not measured); an error is the mean of the
    errors on either side, for d_H and for `joint_error`, so that neither counts more where it has
    more images, and d_H is 0.5 by chance; the split is drawn `repeats` times, and the intervals are
    t * s / sqrt(repeats) with Student's t, the half width of a 95 % interval of the mean. They
    speak of the choice of the split alone, not of the images or of the training. Table 3's lambda
    of 0.310 is less than the 0.321 that Recall@1 in table 1 leaves for e_unseen by itself, so it
    may be the mean of the two errors and not eq. 3's sum: compare it with `joint_error` also.

    An image given its right class is given its right side, so that 1 - d_H <= lambda / 2: an
    embedding that finds classes well has a d_H near 1. Read the two together, as the paper does, by
    their sum.

    Classes of the two sides are different classes even where their ids coincide. Cost: one search
    of all images in all (four times that of one side), whatever `repeats` is; 60,000 + 60,000
    images of 512 dimensions take some minutes on two cores, and about four copies of the embeddings
    next to 256 MB.

    Args:
        seen: (N, d) embeddings of the classes trained on.
        seen_labels: (N,) integer class ids.
        unseen: (M, d) embeddings of the other classes, by the same model.
        unseen_labels: (M,) integer class ids.
        labeled: The share of each class's images that is labeled, above 0 and below 1; of two
            images or more, at least one is labeled and one held out.
        repeats: How many splits.
        distance: As `nearest_neighbors`.
        seed: Of the splits.

    Returns:
        Fractions, means over the splits: `lambda` (0 .. 2), `joint_error_seen` and
        `joint_error_unseen`, whose sum it is, and `joint_error`, their mean; `h_divergence` and
        `domain_error`, its e*; `lambda_plus_h_divergence`; `proxy_a_distance`, 2 (1 - 2 e*), as in
        domain adaptation. `lambda_ci95`, `joint_error_ci95`, `h_divergence_ci95` and
        `lambda_plus_h_divergence_ci95` where there are several splits. The counts `held_out_seen`,
        `held_out_unseen` and `splits`.

    Raises:
        UserError: Embeddings that are empty, not finite or of different dimensions; labels that do
            not go with them; no class of two images on a side; an argument out of range.

    Example:
        >>> seen, unseen = [[0.0], [0.1], [5.0], [5.1]], [[50.0], [50.1], [70.0], [70.1]]
        >>> figures = evaluate_divergence(seen, [0, 0, 1, 1], unseen, [2, 2, 3, 3])
        >>> figures["lambda"], figures["h_divergence"]
        (0.0, 1.0)

    Source: Chu et al., "Distance Metric Learning with Joint Representation Diversification", ICML
    2020, sec. 2, eq. 1-3, fig. 2 and table 3; the bound is that of Ben-David et al., "A theory of
    learning from different domains", 2010.
    """
    if not 0 < labeled < 1:
        raise UserError(f"labeled must be a share above 0 and below 1; got {labeled}")
    check_positive(repeats=repeats)
    seen, seen_labels = _checked(seen, seen_labels, "seen")
    unseen, unseen_labels = _checked(unseen, unseen_labels, "unseen")
    for side, side_labels in {"seen": seen_labels, "unseen": unseen_labels}.items():
        if np.unique(side_labels, return_counts=True)[1].max() < 2:
            raise UserError(
                f"{side} classes: none has two images, one to be labeled and one to be held out"
            )
    if seen.shape[1] != unseen.shape[1]:
        raise UserError(
            f"seen embeddings have {seen.shape[1]} dimensions, unseen {unseen.shape[1]}"
        )
    points = np.concatenate([seen, unseen])
    labels = np.concatenate([seen_labels, unseen_labels])
    is_seen = np.arange(len(points)) < len(seen)
    # Those of seen classes first; classes of the two sides are different classes.
    classes = np.unique([~is_seen, labels], axis=1, return_inverse=True)[1]
    errors = []
    for repeat in range(repeats):
        is_labeled = _split(classes, labeled, np.random.default_rng([seed, repeat]))
        errors.append(_errors_of_held_out(points, classes, is_seen, is_labeled, distance))
    (joint_seen, joint_unseen), (side_seen, side_unseen) = np.stack(errors, axis=-1)
    result = _means_of_splits(joint_seen, joint_unseen, (side_seen + side_unseen) / 2)
    # The size of every split is the same.
    result["held_out_seen"] = int((is_seen & ~is_labeled).sum())
    result["held_out_unseen"] = int((~is_seen & ~is_labeled).sum())
    result["splits"] = repeats
    return result


def _means_of_splits(
    joint_seen: np.ndarray, joint_unseen: np.ndarray, domain_error: np.ndarray
) -> dict[str, float | int]:
    """Return the figures of `evaluate_divergence` from the errors of each split (S,)."""
    both = joint_seen + joint_unseen
    values = {
        "lambda": both,
        "joint_error": both / 2,
        "h_divergence": 1 - domain_error,
        "lambda_plus_h_divergence": both + 1 - domain_error,
    }
    means = {
        "joint_error_seen": joint_seen,
        "joint_error_unseen": joint_unseen,
        "domain_error": domain_error,
        "proxy_a_distance": 2 - 4 * domain_error,
    }
    result: dict[str, float | int] = {}
    for name, per_split in values.items():
        result[name] = float(per_split.mean())
        if len(both) > 1:
            interval = student_interval(per_split)
            result[f"{name}_ci95"] = (interval.high - interval.low) / 2
    for name, per_split in means.items():
        result[name] = float(per_split.mean())
    return result


def _errors_of_held_out(
    points: np.ndarray,
    classes: np.ndarray,
    is_seen: np.ndarray,
    is_labeled: np.ndarray,
    distance: str,
) -> np.ndarray:
    """(2, 2) the shares of held-out images whose nearest labeled image is of another class, and of
    the other side; of seen and of unseen classes."""
    gallery = np.flatnonzero(is_labeled)
    held_out = np.flatnonzero(~is_labeled)
    rows, _ = nearest_neighbors(points[held_out], points[gallery], k=1, distance=distance)
    nearest = gallery[rows[:, 0]]
    wrong_class = classes[nearest] != classes[held_out]
    wrong_side = is_seen[nearest] != is_seen[held_out]
    of_seen = is_seen[held_out]
    return np.array(
        [[wrong[of_seen].mean(), wrong[~of_seen].mean()] for wrong in (wrong_class, wrong_side)]
    )


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
    distance: str = "euclidean",
    repeats: int = 10,
    seed: int = 0,
) -> dict[str, float | int]:
    """Measure how far an embedding that was trained on some classes carries over to others.

    Recall@1 all-to-all of the test (unseen) classes, and of the training (seen) classes too where
    their embeddings are given; the difference is the generalization gap (DML-DA's figure 1d). Of
    both together: lambda and the H-divergence (`evaluate_divergence`). What cannot be measured on
    the classes given, for want of a second class or of a second image of any class, is left out.

    Args:
        test_embeddings: (N, d), of classes not trained on.
        test_labels: (N,) integer class ids.
        train_embeddings: (M, d), of the classes trained on; None: what needs them is left out.
        train_labels: (M,) integer class ids, given exactly if `train_embeddings` are.
        distance: As `nearest_neighbors`.
        repeats: Of `evaluate_divergence`: how many splits.
        seed: Of the splits.

    Returns:
        Numbers by name, suited to JSON: `unseen_recall@1`, `seen_recall@1`, and those of
        `evaluate_divergence`, of which lambda may exceed 1.

    Raises:
        UserError: Embeddings or labels that do not go together, or an argument out of range.

    Example:
        >>> evaluate_generalization([[0.0], [0.1], [5.0], [5.1]], [3, 3, 8, 8])
        {'unseen_recall@1': 1.0}
    """
    if (train_embeddings is None) != (train_labels is None):
        raise UserError("train_embeddings and train_labels go together: give both or none")
    sides = {"unseen": _checked(test_embeddings, test_labels, "test")}
    if train_embeddings is not None:
        sides["seen"] = _checked(train_embeddings, train_labels, "train")
    result: dict[str, float | int] = {}
    paired = len(sides) == 2
    for side, (embeddings, labels) in sides.items():
        counts = np.unique(labels, return_counts=True)[1]
        paired = paired and counts.max() > 1
        if len(counts) > 1 and counts.max() > 1:
            recall = evaluate_retrieval(
                embeddings, labels, ks=(1,), metrics=("recall",), distance=distance
            )
            result[f"{side}_recall@1"] = recall["recall@1"]
    if paired:
        result |= evaluate_divergence(
            *sides["seen"], *sides["unseen"], distance=distance, repeats=repeats, seed=seed
        )
    return result


def _checked(embeddings: Any, labels: Any, side: str) -> tuple[np.ndarray, np.ndarray]:
    embeddings = check_embeddings(embeddings, f"{side}_embeddings")
    return embeddings, check_labels(labels, len(embeddings), f"{side}_labels")
