"""One pass over the training images, for what objectives measure before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from keras import ops

from tfdml.models.inference import compiled
from tfdml.objectives import Calibrated, Objective


def measure(embedder, names: list[str], batches: Iterable[Any]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Representations of all images, in inference mode.

    Args:
        embedder: A `tfdml.models.Embedder`.
        names: Which of its representations; vectors, not maps.
        batches: Batches of (images, labels) that end.

    Returns:
        By name (N, D) float32, and the labels (N,) int64.

    Raises:
        ValueError: There is no batch, one is no pair of images and labels, or they never end.
    """
    if never_ends(batches):
        raise ValueError("the batches never end: give one pass over the training images")
    run, parts, labels = _compiled(embedder, names), [], []
    for batch in batches:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError("each batch must be (images, labels)")
        vectors = run(batch[0])
        parts.append({name: ops.convert_to_numpy(vectors[name]) for name in names})
        labels.append(ops.convert_to_numpy(batch[1]).reshape(-1).astype(np.int64))
    if not parts:
        raise ValueError("there is no batch to calibrate on")
    return {name: np.concatenate([part[name] for part in parts]) for name in names}, np.concatenate(labels)


def warn_of_uncalibrated(objectives: list[Objective]) -> None:
    """Say which objectives train without what they should have measured first, and what that means."""
    for objective in objectives:
        if isinstance(objective, Calibrated) and not objective.calibrated:
            without = f" ({objective.without_calibration})" if objective.without_calibration else ""
            warnings.warn(
                f"{objective.name} is not calibrated and trains without what it should know of the training set"
                f"{without}: call learner.calibrate(batches), one pass over the training images, before fit",
                stacklevel=3,
            )


def _compiled(embedder, names: list[str]):
    def run(images):
        representations = embedder.represent(images, training=False)
        return {name: ops.cast(representations[name], "float32") for name in names}

    return compiled(embedder, run)


def never_ends(batches: Any) -> bool:
    """Whether batches are a `tf.data.Dataset` without end."""
    cardinality = getattr(batches, "cardinality", None)
    # -1 is tf.data's INFINITE_CARDINALITY.
    return callable(cardinality) and int(cardinality()) == -1
