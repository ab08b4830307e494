"""Checks of the data of `fit` and `predict` before the first step: endless batches, wrong labels, images in 0..1."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np

from tfdml.errors import UserError
from tfdml.models.calibration import never_ends
from tfdml.pairwise import integer_labels

# Images of an array that are looked at.
_COUNT = 100


def check_training_data(embedder: Any, x: Any, y: Any, steps_per_epoch: int | None, one_label: bool) -> None:
    """Raises an error for data that `fit` cannot train on, and warns of images in 0..1.

    Args:
        embedder: What images go to.
        x: Images, or batches of (images, labels), as `fit` takes them.
        y: Labels, where `x` is an array.
        steps_per_epoch: As `fit` takes it.
        one_label: Whether each image has one label, not a row of them.

    Raises:
        UserError: Batches never end and no number of steps is given; or labels are no integers.
    """
    if never_ends(x) and not steps_per_epoch:
        raise UserError(
            "the training batches never end: give fit steps_per_epoch=..., e.g. images // images per batch, or make "
            "batches that end, with num_steps=..."
        )
    images, labels = _first_batch(x)
    labels = labels if y is None else y
    if one_label and labels is not None:
        integer_labels(labels)
    _warn_of_small_pixels(embedder, images)


def check_images(embedder: Any, x: Any) -> None:
    """Warns of images in 0..1."""
    if embedder.warns_of_small_pixels:
        _warn_of_small_pixels(embedder, _first_batch(x)[0])


def _warn_of_small_pixels(embedder: Any, images: Any) -> None:
    """Once for each embedder; all-black images say nothing."""
    if images is None or not embedder.warns_of_small_pixels:
        return
    largest = float(np.max(images, initial=0))
    if 0 < largest <= 1:
        embedder.warns_of_small_pixels = False
        warnings.warn(
            f"the largest pixel of the first images is {largest:g}: an Embedder takes pixels of 0 to 255 and scales "
            "them itself; multiply images in 0..1 by 255",
            stacklevel=4,
        )


def _first_batch(x: Any) -> tuple[Any, Any]:
    """The first images and labels as arrays; None for what cannot be looked at without using it up, or needs no look.

    Batches of integers are not made for it: that may take as long as filling a buffer to shuffle.
    """
    if hasattr(x, "element_spec"):
        spec = x.element_spec if isinstance(x.element_spec, tuple | list) else (x.element_spec,)
        if not hasattr(x, "take") or not any(getattr(part.dtype, "is_floating", False) for part in spec[:2]):
            return None, None
        batch = next(iter(x.take(1)), ())
    elif isinstance(x, keras.utils.PyDataset):
        batch = x[0]
    elif hasattr(x, "shape"):
        return keras.ops.convert_to_numpy(x[:_COUNT]), None
    else:
        return None, None
    parts = [*batch][:2] if isinstance(batch, tuple | list) else [batch]
    images, labels = (*map(keras.ops.convert_to_numpy, parts), None, None)[:2]
    return images, labels
