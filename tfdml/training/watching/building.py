"""From settings to what a run is watched by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tfdml.data.pipeline import training_batches
from tfdml.data.sampling import Share
from tfdml.training import distribution
from tfdml.training.assembly import Assembly
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import RunSettings
from tfdml.training.watching.divergence import Divergence
from tfdml.training.watching.projector import Projector
from tfdml.training.watching.watcher import Batches, Watcher


@dataclasses.dataclass(frozen=True)
class Watching:
    """What watches a run.

    Args:
        watcher: Looks at batches along the training.
        divergence: Describes the end of a run that is not finite any more.
        projector: Writes embeddings after each epoch; None: none are wanted.
    """

    watcher: Watcher
    divergence: Divergence
    projector: Projector | None


def make_watching(
    run: RunSettings, evaluation_batch_size: int, parts: Assembly, folder: RunFolder, looks: bool = True
) -> Watching:
    """Put together what watches a run; writes nothing.

    Args:
        run: Its settings.
        evaluation_batch_size: Images that are embedded at a time.
        parts: What the run is made of.
        folder: Its folder.
        looks: Whether this process is to look at batches at all.
    """
    learner, splits, sampler = parts.learner, parts.splits, parts.sampler
    every = run.watch_every if looks else 0
    watched = (sampler.batch, splits.train)
    watcher = Watcher(
        learner,
        folder,
        every,
        sampled_batches(run.seed, parts, every or 1),
        *watched,
        run.watch_triplets,
        run.stops_on(),
    )
    divergence = Divergence(learner, folder, sampled_batches(run.seed, parts, 1), *watched)
    projector = None
    if run.watch_projector and looks:
        images = splits.test if splits.validation is None else splits.validation
        projector = Projector(
            images, run.watch_projector, parts.evaluation_view, evaluation_batch_size, folder.tensorboard
        )
    return Watching(watcher, divergence, projector)


def sampled_batches(seed: int, parts: Assembly, every: int) -> Batches:
    """The images of a step that are looked at: one device's share, as much as its memory takes.

    Args:
        seed: Of the run.
        parts: What the run is made of.
        every: Steps from one batch to the next.
    """
    share = Share(parts.sampler, 0, _count(parts))

    def from_step(first: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        batches = training_batches(
            parts.splits.train, share, parts.train_view, seed=seed, first_step=first, every=every
        )
        yield from distribution.own_threads(batches).as_numpy_iterator()

    return from_step


def _count(parts: Assembly) -> int:
    """Into how many equal shares a batch is cut, of which the first is looked at."""
    whole, most = parts.sampler.batch_size, parts.learner.gradient_cache or parts.sampler.batch_size
    devices = parts.strategy.num_replicas_in_sync
    return next(count for count in range(devices, whole + 1) if whole % count == 0 and whole // count <= most)
