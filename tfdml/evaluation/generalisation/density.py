"""How densely each class lies around its mean, and how far the means lie from one another (DML-DA)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.retrieval import check_labels
from tfdml.evaluation.search.exact import check_embeddings, nearest_neighbours

# Rows whose differences from their class's mean are held in float64 at once.
_ROWS = 8192


@dataclasses.dataclass(frozen=True)
class ClassDensity:
    """One row per class; all distances are squared Euclidean, as in the paper's eq. 1.

    Args:
        classes: (C,) int64 class ids, ascending.
        counts: (C,) int64 images of each class.
        d_avg: (C,) float64, D_avg: the mean squared distance of the class's images to their mean. The denser a class,
            the smaller. Exactly 0 for a class of one image.
        d_nearest: (C,) float64, the squared distance of the class's mean to the nearest other class's.
        nearest_class: (C,) int64, the id of that class.
        d_others: (C,) float64, the mean squared distance of the class's mean to all other classes'.
    """

    classes: np.ndarray
    counts: np.ndarray
    d_avg: np.ndarray
    d_nearest: np.ndarray
    nearest_class: np.ndarray
    d_others: np.ndarray

    def summary(self) -> dict[str, float | int]:
        """The classes taken together.

        Returns:
            `d_avg_mean`, `d_avg_std`, `d_avg_min` and `d_avg_max` over the classes with at least two images, which are
            counted in `num_dense_classes`; `d_nearest_mean`, `d_nearest_min` and `d_others_mean` over all classes;
            and `separation`, `d_nearest_mean` over `d_avg_mean`, left out where every class has collapsed to a point.

        Raises:
            UserError: Every class has one image only.
        """
        several = self.counts > 1
        if not several.any():
            raise UserError("the density of classes needs a class of two images or more")
        d_avg = self.d_avg[several]
        result = {
            "d_avg_mean": d_avg.mean(),
            "d_avg_std": d_avg.std(),
            "d_avg_min": d_avg.min(),
            "d_avg_max": d_avg.max(),
            "d_nearest_mean": self.d_nearest.mean(),
            "d_nearest_min": self.d_nearest.min(),
            "d_others_mean": self.d_others.mean(),
        }
        if d_avg.any():
            result["separation"] = self.d_nearest.mean() / d_avg.mean()
        return {name: float(value) for name, value in result.items()} | {"num_dense_classes": int(several.sum())}


def class_density(embeddings: Any, labels: Any) -> ClassDensity:
    """The density of each class and the distances between their means.

        D_avg(c) = 1/n_c sum_{i in c} |f_i - mu_c|^2,   mu_c = 1/n_c sum_{i in c} f_i

    as `tfdml.objectives.DensityAdaptivity` has it of a batch, here of the whole data set, in float64. With unit vectors
    D_avg(c) = 1 - |mu_c|^2. The mean of few images lies closer to them than that of the class: for images drawn from a
    distribution of variance s, D_avg is s (1 - 1/n_c) on average, so compare models on the same images, or classes of
    one size. The paper states no figure for how far classes spread from each other; the squared distances between the
    means are those chosen here.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids, of at least two classes.

    Raises:
        UserError: Embeddings that are empty or not finite, labels that do not go with them, or one class only.

    Example:
        >>> table = class_density([[0.0], [2.0], [5.0], [5.0]], [7, 7, 9, 9])
        >>> table.d_avg.tolist(), table.d_nearest.tolist(), table.nearest_class.tolist()
        ([1.0, 0.0], [16.0, 16.0], [9, 7])

    Source: Li et al., "Deep Metric Learning with Density Adaptivity", IEEE T-MM 2019, eq. 5.
    """
    embeddings = check_embeddings(embeddings)
    labels = check_labels(labels, len(embeddings))
    classes, place, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(classes) < 2:
        raise UserError("the density of classes needs at least two classes")
    # Moved to the common mean, which changes no distance, sums of squares cancel least.
    centre = embeddings.mean(axis=0, dtype=np.float64)
    means, d_avg = np.zeros((len(classes), embeddings.shape[1])), np.zeros(len(classes))
    order = np.argsort(place, kind="stable")
    chunks = [order[start : start + _ROWS] for start in range(0, len(order), _ROWS)]
    for rows in chunks:
        _add_by_class(means, place[rows], embeddings[rows] - centre)
    means /= counts[:, None]
    for rows in chunks:
        differences = embeddings[rows] - centre - means[place[rows]]
        _add_by_class(d_avg, place[rows], np.einsum("nd,nd->n", differences, differences))
    nearest = nearest_neighbours(means, k=1)[0][:, 0]
    squares = np.einsum("cd,cd->c", means, means)
    others = len(classes) - 1
    return ClassDensity(
        classes=classes,
        counts=counts,
        d_avg=d_avg / counts,
        d_nearest=np.square(means - means[nearest]).sum(axis=1),
        nearest_class=classes[nearest],
        # sum_j |m_i - m_j|^2, without a matrix of all pairs
        d_others=(len(classes) * squares + squares.sum() - 2 * means @ means.sum(axis=0)) / others,
    )


def _add_by_class(sums: np.ndarray, place: np.ndarray, values: np.ndarray) -> None:
    """Add the values of each class, `place` being sorted, to the class's row of `sums`."""
    starts = np.flatnonzero(np.append(True, place[1:] != place[:-1]))
    sums[place[starts]] += np.add.reduceat(values, starts, axis=0)
