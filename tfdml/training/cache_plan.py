"""What of a run's images is kept decoded in memory."""

from __future__ import annotations

import dataclasses

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import MEGABYTE, decoded_bytes, memory_to_spare
from tfdml.data.transforms import TrainTransform
from tfdml.training.settings import DataSettings


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """What is kept in memory; batches are the same bit by bit either way.

    Args:
        training: The decoded training images.
        evaluation: The evaluation views.
        reason: Why, in words, with the memory that they take.
    """

    training: bool
    evaluation: bool
    reason: str = dataclasses.field(default="", compare=False)


def plan_cache(
    settings: DataSettings,
    train: ImageDataset,
    evaluated: list[ImageDataset],
    transform: TrainTransform,
    images_drawn: int,
) -> CachePlan:
    """Decide what `--cache` means for a run.

    Args:
        settings: What is asked for.
        train: The training images.
        evaluated: The splits that are evaluated.
        transform: The augmentation.
        images_drawn: How many training images the run will draw.

    Returns:
        With `--cache=auto`: both where they fit together, else the training images where they fit alone. A run that
        sees its images hardly once gains nothing, and keeps none.
    """
    images = decoded_bytes(train, transform)
    views = sum(len(split) for split in evaluated) * 3 * transform.image_size**2
    spare = memory_to_spare(settings.cache_limit_mb)
    used_again = images_drawn >= 2 * len(train)
    if settings.cache == "auto":
        keep = used_again and images <= spare, used_again and images + views <= spare
    else:
        keep = settings.cache == "true", settings.cache == "true"
    kept = "both are kept" if keep[1] else "the training images are kept" if keep[0] else "neither is kept"
    once = ", as the run sees its images hardly more than once" if settings.cache == "auto" and not used_again else ""
    reason = (
        f"--cache={settings.cache}: training images take about {images / MEGABYTE:,.1f} MB decoded, evaluation views "
        f"{views / MEGABYTE:,.1f} MB; {spare / MEGABYTE:,.0f} MB may be used: {kept}{once}"
    )
    return CachePlan(*keep, reason)
