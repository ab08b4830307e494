"""Terms of JRD's generalisation bound, lambda and the H-divergence, by 1-NN classifiers of seen and unseen classes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.retrieval import check_labels
from tfdml.evaluation.search.exact import check_embeddings, nearest_neighbours

# An image whose `depth` nearest images are all held out has its labelled neighbour searched by itself: rarely needed.
_RARE = 1e-4
_DEEPEST = 64


def evaluate_divergence(
    seen: Any,
    seen_labels: Any,
    unseen: Any,
    unseen_labels: Any,
    *,
    labelled: float = 0.5,
    repeats: int = 10,
    distance: str = "euclidean",
    seed: int = 0,
) -> dict[str, float | int]:
    """Estimate lambda and the H-divergence between the embeddings of seen and of unseen classes.

    For every classifier h of a space H, the errors on the unseen and the seen classes satisfy (eq. 1)

        e_unseen(h) <= e_seen(h) + d_H + lambda

    with d_H = 1 - e*, where e* is the least error of telling images of seen classes from images of unseen classes
    (eq. 2), and lambda = e_seen(h*) + e_unseen(h*), where h* is the best classifier of all classes of both together
    (eq. 3). H are nearest neighbour classifiers. As in the paper (sec. 2), a part of the images of both sides is
    labelled and is what the classifiers are fitted to; the errors are those on the rest, which is held out. One
    neighbour decides both: h* gives an image the class of its nearest labelled image of either side, and the other
    classifier the side of that image. Exact: of all labelled images, equal distances decided by the lower row, seen
    classes before unseen.

    Settled here, for the paper leaves it open: half of the images of each class, drawn at random, are labelled (a class
    of one image is labelled, and not measured); an error is the mean of the errors on either side, for d_H and for
    `joint_error`, so that neither counts more where it has more images, and d_H is 0.5 by chance; the split is drawn
    `repeats` times, and the intervals are t * s / sqrt(repeats) with Student's t, the half width of a 95 % interval of
    the mean. They speak of the choice of the split alone, not of the images or of the training. Table 3's lambda of
    0.310 is less than the 0.321 that Recall@1 in table 1 leaves for e_unseen by itself, so it may be the mean of the
    two errors and not eq. 3's sum: compare it with `joint_error` also.

    An image given its right class is given its right side, so that 1 - d_H <= lambda / 2: an embedding that finds
    classes well has a d_H near 1. Read the two together, as the paper does, by their sum.

    Classes of the two sides are different classes even where their ids coincide. Cost: one search of all images in all
    (four times that of one side), whatever `repeats` is; 60,000 + 60,000 images of 512 dimensions take some minutes on
    two cores, and about four copies of the embeddings beside 256 MB.

    Args:
        seen: (N, d) embeddings of the classes trained on.
        seen_labels: (N,) integer class ids.
        unseen: (M, d) embeddings of the other classes, by the same model.
        unseen_labels: (M,) integer class ids.
        labelled: The share of each class's images that is labelled, above 0 and below 1; of two images or more, at
            least one is labelled and one held out.
        repeats: How many splits.
        distance: As `nearest_neighbours`.
        seed: Of the splits.

    Returns:
        Fractions, means over the splits: `lambda` (0 .. 2), `joint_error_seen` and `joint_error_unseen`, whose sum it
        is, and `joint_error`, their mean; `h_divergence` and `domain_error`, its e*; `lambda_plus_h_divergence`;
        `proxy_a_distance`, 2 (1 - 2 e*), as the field on domain adaptation has it. `lambda_ci95`, `joint_error_ci95`,
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
    if not 0 < labelled < 1:
        raise UserError(f"labelled must be a share above 0 and below 1; got {labelled}")
    if repeats < 1:
        raise UserError(f"repeats must be at least 1; got {repeats}")
    points, classes, is_seen = _joined(seen, seen_labels, unseen, unseen_labels)
    depth = min(len(points) - 1, _DEEPEST, math.ceil(math.log(_RARE) / math.log(1 - labelled)))
    near = nearest_neighbours(points, k=max(depth, 1), distance=distance)[0]
    errors = []
    for repeat in range(repeats):
        is_labelled = _split(classes, labelled, np.random.default_rng([seed, repeat]))
        held_out = np.flatnonzero(~is_labelled)
        nearest = _nearest_labelled(points, near, held_out, is_labelled, distance)
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
            result[f"{name}_ci95"] = _half_width(per_split)
    return result | {
        "joint_error_seen": float(joint_seen.mean()),
        "joint_error_unseen": float(joint_unseen.mean()),
        "domain_error": float(domain_error.mean()),
        "proxy_a_distance": float(2 - 4 * domain_error.mean()),
        "held_out_seen": int(sides[0].sum()),
        "held_out_unseen": int(sides[1].sum()),
        "splits": repeats,
    }


def _joined(seen: Any, seen_labels: Any, unseen: Any, unseen_labels: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All embeddings, their classes as 0 .. C - 1, those of either side apart, and whether each is of a seen class."""
    sides, classes = [], []
    first_class = 0
    for points, labels, name in ((seen, seen_labels, "seen"), (unseen, unseen_labels, "unseen")):
        points = check_embeddings(points, f"{name} embeddings")
        labels = check_labels(labels, len(points), f"{name}_labels")
        _, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
        if counts.max() < 2:
            raise UserError(f"{name} classes: none has two images, one to be labelled and one to be held out")
        sides.append(points)
        classes.append(place + first_class)
        first_class += len(counts)
    if sides[0].shape[1] != sides[1].shape[1]:
        raise UserError(
            f"seen embeddings have {sides[0].shape[1]} dimensions, unseen {sides[1].shape[1]}; "
            "both must come from the same model"
        )
    return np.concatenate(sides), np.concatenate(classes), np.arange(len(sides[0]) + len(sides[1])) < len(sides[0])


def _split(classes: np.ndarray, labelled: float, rng: np.random.Generator) -> np.ndarray:
    """(N,) bool, whether each image is labelled; classes are 0 .. C - 1."""
    counts = np.bincount(classes)
    wanted = np.floor(labelled * counts + 0.5).astype(np.int64)
    wanted = np.where(counts > 1, np.clip(wanted, 1, np.maximum(counts - 1, 1)), counts)
    order = np.lexsort((rng.random(len(classes)), classes))  # class by class, at random within each
    rank = np.empty(len(classes), np.int64)
    rank[order] = np.arange(len(classes)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rank < wanted[classes]


def _nearest_labelled(
    points: np.ndarray, near: np.ndarray, rows: np.ndarray, is_labelled: np.ndarray, distance: str
) -> np.ndarray:
    """The nearest labelled image of each of `rows`: the first in its list of neighbours, or else by a search."""
    usable = is_labelled[near[rows]]
    nearest = near[rows, usable.argmax(axis=1)]
    missing = np.flatnonzero(~usable.any(axis=1))
    if len(missing):
        gallery = np.flatnonzero(is_labelled)
        nearest[missing] = gallery[
            nearest_neighbours(points[rows[missing]], points[gallery], k=1, distance=distance)[0][:, 0]
        ]
    return nearest


def _half_width(values: np.ndarray) -> float:
    """Half of the 95 % interval of the mean, by Student's t."""
    from scipy import stats

    return float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
