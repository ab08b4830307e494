"""What of a run's images is kept decoded in memory."""

from __future__ import annotations

import dataclasses

from absl import logging

from tfdml.data.augmentation.train import TrainTransform
from tfdml.data.caching import MEGABYTE, decoded_bytes, memory_to_spare
from tfdml.data.dataset import ImageDataset
from tfdml.training.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """What is kept in memory; batches are the same bit by bit either way.

    Args:
        training: The decoded training images.
        evaluation: The evaluation views.
    """

    training: bool
    evaluation: bool


def plan_cache(
    experiment: Experiment,
    train: ImageDataset,
    evaluated: list[ImageDataset],
    transform: TrainTransform,
    images_drawn: int,
) -> CachePlan:
    """Decide what `--cache` means for a run.

    Args:
        experiment: The settings.
        train: The training images.
        evaluated: The splits that are evaluated.
        transform: The augmentation.
        images_drawn: How many training images the run will draw.

    Returns:
        With `--cache=auto`: both where they fit together, else the training images where they fit alone. A run that
        sees its images hardly once gains nothing, and keeps none.
    """
    if experiment.cache != "auto":
        return CachePlan(experiment.cache == "true", experiment.cache == "true")
    if images_drawn < 2 * len(train):
        return CachePlan(False, False)
    images = decoded_bytes(train, transform)
    views = sum(len(split) for split in evaluated) * 3 * experiment.image_size**2
    spare = memory_to_spare(experiment.cache_limit_mb)
    plan = CachePlan(images <= spare, images + views <= spare)
    logging.info(
        "--cache=auto: training images take about %.0f MB decoded, evaluation views %.0f MB; %.0f MB may be used: %s",
        images / MEGABYTE,
        views / MEGABYTE,
        spare / MEGABYTE,
        "keeping both" if plan.evaluation else "keeping the training images" if plan.training else "keeping none",
    )
    return plan
