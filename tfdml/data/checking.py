"""What becomes of a data set some of whose images are faulty."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import Images
from tfdml.data.images.faults import ImageError, inspect
from tfdml.errors import UserError

_NAMED_IN_MESSAGES = 3


def check(
    dataset: ImageDataset, on_bad: str = "error", find: Callable[[Images], list[ImageError]] = inspect
) -> ImageDataset:
    """Inspects all images of a data set before it is used.

    Args:
        dataset: The data set.
        on_bad: `"error"` to stop at faulty images, `"skip"` to leave them out and log how many.
        find: What looks for faults: `inspect`, or `tfdml.data.records.find_faults`, which decodes every image.

    Returns:
        The data set, without the faulty images.

    Raises:
        UserError: There are faulty images and `on_bad` is `"error"`, or no image is left.

    Example:
        >>> check(load("folder", "my_photos"), on_bad="skip")  # doctest: +SKIP
    """
    if on_bad not in ("error", "skip"):
        raise UserError(f"unknown policy {on_bad!r} for bad images; choose --bad_images=error or --bad_images=skip")
    faults = find(dataset.images)
    if not faults:
        return dataset
    where = f"{len(faults)} of {len(dataset)} images of {dataset.name} ({dataset.split})"
    if on_bad == "error":
        raise UserError(
            f"{where} cannot be used: {_first(faults)}; mend or remove them, or leave them out with --bad_images=skip"
        )
    if len(faults) == len(dataset):
        raise UserError(f"none of the {where} can be used: {_first(faults)}")
    logging.warning("skipping %s: %s", where, _first(faults))
    return dataset.take(np.setdiff1d(np.arange(len(dataset)), [fault.index for fault in faults]))


def _first(faults: list[ImageError]) -> str:
    named = "; ".join(str(fault).replace("\n", " ") for fault in faults[:_NAMED_IN_MESSAGES])
    return named + ("; ..." if len(faults) > _NAMED_IN_MESSAGES else "")
