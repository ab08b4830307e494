"""What can be told of a run that has stopped being finite: its batches, and what they do to the last good weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.models import MetricLearner
from tfdml.training import checkpoints
from tfdml.training.run_folder import RunFolder
from tfdml.training.watching.gradients import GradientSampler
from tfdml.training.watching.watcher import Batches


class Divergence:
    """Describes the batches of the last two steps: a gradient that is not finite shows in the loss one step later.

    Args:
        learner: The learner, whose present weights tell nothing any more.
        folder: The run folder; its newest checkpoint holds the last good weights.
        batches: From a step on, the images that are looked at of each batch.
        indices: step -> the rows of `images` that the batch of that step holds.
        images: The training images, for their names.
    """

    def __init__(
        self,
        learner: MetricLearner,
        folder: RunFolder,
        batches: Batches,
        indices: Callable[[int], np.ndarray],
        images: ImageDataset,
    ):
        self._learner, self._folder, self._batches = learner, folder, batches
        self._indices, self._images = indices, images

    def __call__(self, step: int) -> dict[str, Any]:
        """What `diverged.json` tells besides the terms.

        Args:
            step: The step, from 0, after which something was not finite.

        Returns:
            `indices` and `images` of its batch; those of the batch before as `before`; as `last_good` the checkpoint,
            and as `at_last_good_weights` which embeddings, terms and gradients of those batches are not finite by it.
        """
        told: dict[str, Any] = self._named(step)
        if step:
            told["before"] = {"step": step, **self._named(step - 1)}
        known = checkpoints.list_checkpoints(self._folder.checkpoints)
        if known:
            told["last_good"] = str(known[-1])
            told["at_last_good_weights"] = self._looked_at(step)
        return told

    def _named(self, step: int) -> dict[str, Any]:
        indices = [int(index) for index in self._indices(step)]
        return {"indices": indices, "images": [self._images.images.name(index) for index in indices]}

    def _looked_at(self, step: int) -> list[dict[str, Any]]:
        """By batch, what is not finite; a batch of which all is finite tells that it was not to blame alone."""
        sampler = GradientSampler(self._learner)
        path = checkpoints.list_checkpoints(self._folder.checkpoints)[-1]
        values = checkpoints.values_of(path, self._learner, sampler.variables)
        first = max(0, step - 1)
        found = []
        for number, (images, labels) in zip(range(first, step + 1), self._batches(first), strict=False):
            sample = sampler(images, labels, values)
            bad = np.flatnonzero(~np.isfinite(sample.vectors["embedding"]).all(axis=1))
            names = self._named(number)["images"]
            found.append(
                {
                    "step": number + 1,
                    "images": [names[row] for row in bad],
                    "terms": [name for name, value in sample.terms.items() if not np.isfinite(value)],
                    "gradients": [part for part, value in sample.norms.items() if not np.isfinite(value)],
                }
            )
        return found


def blamed(told: dict[str, Any], most: int = 3) -> str:
    """What of the description of a divergence is worth its line: the images that are not finite by good weights.

    Args:
        told: What `Divergence` tells.
        most: How many images are named.

    Example:
        >>> blamed({"at_last_good_weights": [{"images": ["a.png"], "terms": ["triplet"], "gradients": []}]})
        ', where the embedding of a.png is not finite by the last good weights either'
    """
    names = [name for batch in told.get("at_last_good_weights", ()) for name in batch["images"]]
    if not names:
        return ""
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return f", where the embedding of {shown} is not finite by the last good weights either"
