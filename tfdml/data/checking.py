"""Checks a data set for bad images, which are an error or are left out."""

from __future__ import annotations

import numpy as np
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.images.faults import ImageError, inspect
from tfdml.data.records import find_faults
from tfdml.errors import UserError

_NAMED_IN_MESSAGES = 3


def check(dataset: ImageDataset, bad_images: str = "error", check_images: str = "headers") -> ImageDataset:
    """Checks all images of a data set before it is used.

    Args:
        dataset: The data set.
        bad_images: `"error"` to stop at bad images, `"skip"` to leave them out and log how many.
        check_images: `"headers"`: the header and the end of each file; `"decode"`: every image is decoded, at about a
            millisecond each.

    Returns:
        The data set, without the bad images.

    Raises:
        UserError: There are bad images and `bad_images` is `"error"`, no image is left, or an argument is none of
            these words.

    Example:
        >>> len(check(load("folder", "photos"), bad_images="skip"))
        6
    """
    for name, value, choices in (
        ("bad_images", bad_images, ("error", "skip")), ("check_images", check_images, ("headers", "decode")),
    ):  # fmt: skip
        if value not in choices:
            raise UserError(f"`{name}={value}`: must be one of {', '.join(choices)}")
    find = find_faults if check_images == "decode" else inspect
    faults = find(dataset.images)
    if not faults:
        return dataset
    where = f"{len(faults)} of {len(dataset)} images of {dataset.name} ({dataset.split})"
    if bad_images == "error":
        raise UserError(
            f"{where} cannot be used: {_first(faults)}; fix or remove them, or leave them out with `bad_images='skip'`"
        )
    if len(faults) == len(dataset):
        raise UserError(f"none of the {where} can be used: {_first(faults)}")
    logging.warning("skipping %s: %s", where, _first(faults))
    return dataset.take(np.setdiff1d(np.arange(len(dataset)), [fault.index for fault in faults]))


def _first(faults: list[ImageError]) -> str:
    named = "; ".join(str(fault).replace("\n", " ") for fault in faults[:_NAMED_IN_MESSAGES])
    return named + ("; ..." if len(faults) > _NAMED_IN_MESSAGES else "")
