"""Bounding boxes that a data set annotates, fitted to the images as they are."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence

import numpy as np
from absl import logging

from tfdml.data.images import FileImages
from tfdml.errors import UserError

# Most of the time goes to waiting for the disk or the network.
_THREADS = 16


def boxed(name: str, paths: Sequence[str], boxes: np.ndarray) -> FileImages:
    """Images cut to their boxes, each clipped to its image; how many had to be is logged.

    Opens every file, to read its size from the header. A file that cannot be opened keeps its box: whoever reads it
    finds the fault.

    Args:
        name: The data set, for messages.
        paths: The files.
        boxes: (N, 4) integers: top, left, bottom, right in pixels, half-open.

    Raises:
        UserError: A box is empty, or has no pixel of its image.

    Example:
        >>> boxed("cub200", ["car.jpg"], np.array([[4, 10, 30, 40]])).size(0)
        (26, 30)
    """
    boxes = np.asarray(boxes, np.int32)
    images, whole = FileImages(tuple(paths), boxes), FileImages(tuple(paths))
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda index: whole.size(index) or (0, 0), range(len(images)))
        sizes = np.array(list(found), np.int32).reshape(-1, 2)
    known = np.flatnonzero(sizes[:, 0] > 0)
    limits = np.concatenate([sizes, sizes], axis=1)
    fitted = boxes.copy()
    fitted[known] = np.clip(fitted[known], 0, limits[known])
    outside = known[(fitted[known, :2] >= fitted[known, 2:]).any(axis=1)]
    if len(outside):
        top, left, bottom, right = boxes[outside[0]].tolist()
        height, width = sizes[outside[0]].tolist()
        raise UserError(
            f"{name}: {len(outside)} of {len(fitted)} bounding boxes lie outside their images, the first is that of "
            f"{images.paths[outside[0]]}: rows {top} to {bottom}, columns {left} to {right} of {height} x {width} "
            "pixels; are these the official images? Load them without crop_boxes if not"
        )
    clipped = np.flatnonzero((fitted != boxes).any(axis=1))
    if len(clipped):
        logging.warning(
            "%s: %d of %d bounding boxes reach beyond their images and were clipped, the first is that of %s",
            name,
            len(clipped),
            len(fitted),
            images.paths[clipped[0]],
        )
    return FileImages(images.paths, fitted)
