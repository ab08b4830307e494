"""The findings of a preparation, and their text."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.data.images.faults import ImageError

_NAMED_IN_MESSAGES = 5


@dataclasses.dataclass
class SplitReport:
    """What a preparation found in one split.

    Args:
        dataset: The split.
        digests: The SHA-256 of every image, empty for one that could not be read.
        faults: The bad images.
        dropped: The images left out because they are copies.
        shards: The manifest's entries of the shards, where any were written.
        resumed: How many of these an earlier run had written.
    """

    dataset: ImageDataset
    digests: list[str] = dataclasses.field(default_factory=list)
    faults: list[ImageError] = dataclasses.field(default_factory=list)
    dropped: list[int] = dataclasses.field(default_factory=list)
    shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    resumed: int = 0

    @property
    def kept(self) -> np.ndarray:
        """The indices of the images that have a record."""
        left_out = [fault.index for fault in self.faults] + self.dropped
        return np.setdiff1d(np.arange(len(self.dataset)), np.array(left_out, np.int64))

    @property
    def lost_classes(self) -> int:
        """How many classes have no image left."""
        return self.dataset.num_classes - len(np.unique(self.dataset.labels[self.kept]))


@dataclasses.dataclass
class Report:
    """What a preparation found and did.

    Args:
        splits: The findings by split.
        copies: The groups of byte-identical images: see `find_copies`.
        finished_before: Whether an earlier run had done it all.
    """

    splits: dict[str, SplitReport]
    copies: list[dict[str, Any]]
    finished_before: bool = False


def bad_images_in_words(report: Report) -> str:
    """How many images are bad, for which reasons, and the first of them.

    Args:
        report: What was found.

    Example:
        >>> bad_images_in_words(Report({}, []))
        'none of the 0 images is bad'
    """
    faults = [fault for found in report.splits.values() for fault in found.faults]
    total = sum(len(found.dataset) for found in report.splits.values())
    if not faults:
        return f"none of the {total:,} images is bad"
    reasons = collections.Counter(_kind(fault.reason) for fault in faults)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    named = "; ".join(one_line(str(fault)) for fault in faults[:_NAMED_IN_MESSAGES])
    more = "; ..." if len(faults) > _NAMED_IN_MESSAGES else ""
    return f"{len(faults):,} of {total:,} images are bad ({counts}): {named}{more}"


def _kind(reason: str) -> str:
    """A reason without what differs from image to image."""
    return one_line(reason).split(":")[0].split(" (")[0].split(";")[0]


def one_line(text: str) -> str:
    """A name or a reason without line ends and tabs.

    Example:
        >>> one_line("a" + chr(10) + "b")
        'a b'
    """
    return " ".join(text.split()) if any(c in text for c in "\n\r\t") else text
