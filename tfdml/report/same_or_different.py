"""The section "Same or different?": error rates over pairs of images, and a calibrated threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from tfdml.errors import UserError
from tfdml.evaluation.pair_distances import PairHistogram, count_pair_distances
from tfdml.evaluation.verification import accepted_rates, calibrate, verification
from tfdml.report import plots
from tfdml.report.rendering import render

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which comparing folders does not
    from tfdml.data.dataset import ImageDataset

#: What the threshold is calibrated to.
TARGET = {"far": 0.01}
_IN_WORDS = {"far": "a false accept rate of at most {:g} %", "precision": "a precision of at least {:g} %"}
# The pairs of so many images are counted within seconds.
_MOST_IMAGES = 10_000


def verification_html(
    embeddings: np.ndarray,
    dataset: ImageDataset,
    distance: str,
    held_out: tuple[Any, Any] | None = None,
    target: Mapping[str, float] = TARGET,
) -> Markup:
    """Return the ROC curve, both histograms with the threshold, and the rates as tables.

    Args:
        embeddings: (N, d) all images.
        dataset: The images.
        distance: As `verification`.
        held_out: Embeddings and labels of other classes that the embedder was not trained on, for the threshold; None:
            half of the classes of `dataset`, and only the other half is shown.
        target: What the threshold is calibrated to, `far` or `precision`.
    """
    labels, shown = dataset.labels, np.ones(len(dataset), bool)
    halved = held_out is None
    if held_out is None:
        half = np.isin(labels, drawn_classes(labels)[::2])
        held_out, shown = (embeddings[half], labels[half]), ~half
    kept = sampled_images(held_out[1])
    try:
        calibration = calibrate(np.asarray(held_out[0])[kept], held_out[1][kept], distance=distance, **target)
    except UserError:  # there are too few pairs, or none reaches the precision
        calibration, shown = None, np.ones(len(dataset), bool)
    rows = np.flatnonzero(shown)
    rows = rows[sampled_images(labels[rows])]
    points, labels = embeddings[rows], labels[rows]
    if not 1 < len(np.unique(labels)) < len(labels):
        return Markup("<p>There are not both pairs of one class and pairs of different classes.</p>")
    measured = verification(points, labels, distance=distance)
    threshold = measured.eer_threshold if calibration is None else calibration.threshold
    rates = accepted_rates(points, labels, threshold, distance=distance)
    return render(
        "same_or_different.html",
        measured=measured,
        calibration=calibration,
        halved=halved,
        target=" and ".join(_IN_WORDS[name].format(100 * rate) for name, rate in target.items()),
        threshold=threshold,
        rates=rates,
        sampled=len(rows) < shown.sum(),
        roc=plots.roc_curve(measured, rates),
        histogram=plots.histogram_html(measured.counts, distance, threshold=threshold),
    )


def drawn_classes(labels: np.ndarray) -> np.ndarray:
    """Return the classes in a random order, always the same."""
    return np.random.default_rng(0).permutation(np.unique(labels))


def sampled_images(labels: np.ndarray) -> np.ndarray:
    """(N,) bool, the images of classes drawn at random: at least two classes, else no more images than are measured."""
    classes = drawn_classes(labels)
    counts = np.unique(labels, return_counts=True)[1]
    images = np.cumsum(counts[np.searchsorted(np.sort(classes), classes)])
    return np.isin(labels, classes[: max(2, int(np.searchsorted(images, _MOST_IMAGES, side="right")))])


def pair_histogram(embeddings: np.ndarray, labels: np.ndarray, distance: str) -> PairHistogram | None:
    """Return the histogram of the pairs of images of `sampled_images`; None where there are not both kinds of pairs."""
    kept = sampled_images(labels)
    if not 1 < len(np.unique(labels[kept])) < kept.sum():
        return None
    return count_pair_distances(embeddings[kept], labels[kept], distance=distance)
