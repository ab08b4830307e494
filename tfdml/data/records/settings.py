"""The settings of a preparation."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdml.data.images.formats import DECODER_LIMIT
from tfdml.errors import UserError

SHRINK_FORMATS = ("jpeg", "png")
BAD_IMAGES = ("error", "skip")
DROP_COPIES = ("none", "across")


@dataclasses.dataclass(frozen=True)
class RecordSettings:
    """How images are checked and stored.

    Args:
        shrink: Images whose shorter side is longer than this many pixels are resized to it and encoded again; 0 keeps
            every byte. Smaller images are never enlarged or touched.
        shrink_format: `"jpeg"` (quality 95) or `"png"` (lossless) for the images that are resized.
        shard_mb: MiB of source images in a shard.
        bad_images: `"error"` to end without records if an image is bad, `"skip"` to leave the bad ones out.
        drop_copies: `"across"` to leave out test images that are byte-identical to a training image, `"none"` to keep
            all.
        max_pixels: An image whose header states more is bad, and is not decoded.
        workers: Images read and decoded at once.

    Raises:
        UserError: A value is out of range.

    Example:
        >>> RecordSettings(shrink=256).job()["shrink"]
        256
    """

    shrink: int = 0
    shrink_format: str = "jpeg"
    shard_mb: float = 128.0
    bad_images: str = "error"
    drop_copies: str = "none"
    max_pixels: int = DECODER_LIMIT
    workers: int = 2

    def __post_init__(self):
        if self.shrink < 0:
            raise UserError(f"`shrink={self.shrink}`: give the pixels of the shorter side, or 0 for no change")
        for name, low in (("shard_mb", 0), ("max_pixels", 0), ("workers", 0)):
            if not low < getattr(self, name) < float("inf"):
                raise UserError(f"`{name}={getattr(self, name)}` must be more than {low}, and finite")
        for name, values in (
            ("shrink_format", SHRINK_FORMATS), ("bad_images", BAD_IMAGES), ("drop_copies", DROP_COPIES),
        ):  # fmt: skip
            if getattr(self, name) not in values:
                raise UserError(f"`{name}={getattr(self, name)}` must be one of {', '.join(values)}")

    def job(self) -> dict[str, Any]:
        """The settings that decide what the records hold; a job goes on only with the same ones."""
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if name not in ("bad_images", "workers")}
