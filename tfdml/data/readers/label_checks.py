"""Checks of labels before training and retrieval: classes without a pair, queries without an answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from absl import logging

from tfdml.errors import UserError


def check_queries(
    name: str,
    source: str,
    labels: np.ndarray,
    is_query: np.ndarray,
    is_gallery: np.ndarray,
    where: Callable[[int], str],
) -> None:
    """Refuses queries none of which the gallery can answer; counts, in a warning, those that it cannot.

    Args:
        name: The data set, for messages.
        source: The file that the roles are from.
        labels: (N,) class ids.
        is_query: (N,) bool.
        is_gallery: (N,) bool.
        where: What to call a row, e.g. `"line 7, label 'cat'"`.

    Raises:
        UserError: Queries and gallery have no class in common.
    """
    hopeless = is_query & ~np.isin(labels, labels[is_gallery])
    count, total = int(hopeless.sum()), int(is_query.sum())
    if not count:
        return
    first = where(int(np.flatnonzero(hopeless)[0]))
    if count == total:
        raise UserError(f"{name}: {source}: queries and gallery have no class in common (the first query: {first})")
    logging.warning(
        "%s: the classes of %d of %d queries of %s are not in the gallery (the first: %s): these queries cannot be "
        "answered.",
        name,
        count,
        total,
        source,
        first,
    )


def warn_singleton_classes(name: str, split: str, labels: np.ndarray, class_names: dict[int, str]) -> None:
    """Counts, in a warning, the classes of a single image, which have no pair to learn from or to be found by.

    Args:
        name: The data set, for messages.
        split: `"train"`, or `"test"` for images that are looked up among each other.
        labels: (N,) class ids.
        class_names: The name of each id.
    """
    classes, counts = np.unique(labels, return_counts=True)
    lone = classes[counts == 1]
    if len(lone):
        logging.warning(
            "%s: %d of %d %s classes have one image only (the first is %s): %s",
            name,
            len(lone),
            len(classes),
            split,
            class_names[int(lone[0])],
            "they give no positive pair to learn from."
            if split == "train"
            else "as queries they have no right answer, and are left out of the figures.",
        )
