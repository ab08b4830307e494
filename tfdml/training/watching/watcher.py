"""Looks at a batch every so many steps: writes what it sees for TensorBoard and `watch.json`, and raises alarms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import training_batches
from tfdml.data.sampling import Share
from tfdml.errors import UserError
from tfdml.io.files import write_json
from tfdml.io.manifests import read_json
from tfdml.models import MetricLearner
from tfdml.objectives import ProxyLoss
from tfdml.training import checkpoints
from tfdml.training.build.components import Components
from tfdml.training.distributed.devices import own_threads
from tfdml.training.experiment import Experiment
from tfdml.training.run_folder import RunFolder
from tfdml.training.watching import alarms, measures
from tfdml.training.watching.measures import GradientSampler, ProxyWatch

# (first step, every) -> (images, labels) of that step and of every so-manieth after it.
Batches = Callable[[int, int], Iterator[tuple[np.ndarray, np.ndarray]]]


# How many images the last line of a run that has diverged names.
_NAMED = 3


class Watcher:
    """What a run is watched by, in the process that writes its folder; it changes nothing of the training.

    Args:
        learner: A built learner.
        folder: The run folder.
        every: Steps from one look to the next; 0: it never looks.
        batches: See `Batches`.
        indices: step -> the rows of `images` that the batch of that step holds.
        images: The training images, for their names.
        stop_on: Which kinds of alarms end the run.
    """

    def __init__(
        self,
        learner: MetricLearner,
        folder: RunFolder,
        every: int,
        batches: Batches,
        indices: Callable[[int], np.ndarray],
        images: ImageDataset,
        stop_on: frozenset[str] = frozenset(),
    ):
        self.folder, self.every, self.stop_on = folder, every, stop_on
        self._learner, self._batches, self._indices, self._images = learner, batches, indices, images
        self._stream: Iterator[tuple[np.ndarray, np.ndarray]] | None = None
        self._sampler: GradientSampler | None = None
        self._proxies = [ProxyWatch(o) for o in learner.objectives if isinstance(o, ProxyLoss)] if every else []
        self._epoch_began = 0
        self._too_large = False
        self.samples: list[dict[str, Any]] = []
        self.alarms: list[dict[str, Any]] = []

    def resume(self, step: int) -> None:
        """Take up what was seen before this step."""
        if not self.folder.watch.is_file():
            return
        try:
            known = read_json(self.folder.watch, {"samples": list, "alarms": list})
        except UserError as error:
            logging.warning("%s; watching begins again", error)
            return
        # What came of steps that are made again comes again.
        self.samples = [sample for sample in known["samples"] if sample["step"] <= step]
        self.alarms = [alarm for alarm in known["alarms"] if alarm["step"] <= step]

    def is_due(self, step: int) -> bool:
        """Whether the batch of this step, from 0, is to be looked at: never the first."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def look(self, step: int, writer: Any) -> list[dict[str, Any]]:
        """Look at the batch that the next step will learn from; returns the alarms that it raises.

        Args:
            step: How many steps have been made.
            writer: TensorBoard's.
        """
        if self._too_large or any(sample["step"] == step for sample in self.samples):
            return []  # of such a step: an alarm ended the run here, and it is resumed
        if self._stream is None:
            self._stream = self._batches(step, self.every)
            self._sampler = GradientSampler(self._learner, [watch.objective.representation for watch in self._proxies])
        images, labels = next(self._stream)
        assert self._sampler is not None
        try:
            found = self._sampler(images, labels)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, tf.errors.ResourceExhaustedError):
                raise
            logging.warning("a look at a batch does not fit the memory beside the training: the run goes on unwatched")
            self._too_large = True
            return []
        embeddings = found.vectors["embedding"]
        if not np.isfinite(embeddings).all():
            return []  # the step itself will tell, with all of its batch
        d_pos, d_neg = measures.pair_distances(embeddings, labels)
        sample: dict[str, Any] = {
            "step": step,
            "terms": found.terms,
            "gradient_norm": found.norms,
            "gradient_share": dict(zip(found.terms, measures.gradient_shares(found.gram).tolist(), strict=True)),
            **measures.spread(embeddings),
            "classes": len(np.unique(labels)),
            "images": len(labels),
            "d_pos": float(d_pos.mean()) if len(d_pos) else None,
            "d_neg": float(d_neg.mean()) if len(d_neg) else None,
        }
        for watch in self._proxies:
            watch.follow(found.vectors[watch.objective.representation], labels)
        raised = alarms.new_alarms(sample, self.samples)
        self.samples.append(sample)
        self._write_scalars(sample, d_pos, d_neg, writer)
        self._tell(raised)
        return raised

    def begin_epoch(self, step: int) -> None:
        """Note where proxies point.

        Args:
            step: How many steps have been made.
        """
        self._epoch_began = step
        for watch in self._proxies:
            watch.begin_epoch()

    def end_epoch(self, step: int, writer: Any) -> list[dict[str, Any]]:
        """Count idle proxies; returns the alarms that the epoch raises.

        Args:
            step: How many steps have been made.
            writer: TensorBoard's.
        """
        if not self.every:
            return []
        raised = []
        with writer.as_default(step=step):
            for watch in self._proxies:
                tf.summary.scalar(f"watch/idle_proxies/{watch.objective.name}", len(watch.idle()))
                seen = watch.dead()
                # Once is enough of an objective: how many there are is in the scalar.
                if seen and not self._has_told(watch):
                    raised.append(alarms.alarm("dead_proxies", step, self._epoch_began, seen))
        self._tell(raised)
        return raised

    def diverged(self, step: int, what: str, terms: dict[str, str]) -> str:
        """Write `diverged.json`, and note that the run ends because something stopped being finite.

        A gradient that is not finite shows in the loss one step later. So the file has the `indices` and `images` of
        the step's batch, those of the batch before as `before`; as `last_good` the newest checkpoint, and as
        `at_last_good_weights` which embeddings, terms and gradients of both batches are not finite by its weights.

        Args:
            step: How many steps have been made.
            what: What is not finite.
            terms: The values of the step.

        Returns:
            What the file adds to the run's last line: the images that are not finite by good weights.
        """
        about: dict[str, Any] = {"step": step, "what": what, "terms": terms, **self._named(step - 1)}
        if step > 1:
            about["before"] = {"step": step - 1, **self._named(step - 2)}
        known = checkpoints.list_checkpoints(self.folder.checkpoints)
        if known:
            about["last_good"] = str(known[-1])
            about["at_last_good_weights"] = self._by_weights_of(known[-1], step - 1)
        write_json(self.folder.diverged, about)
        names = [name for batch in about.get("at_last_good_weights", ()) for name in batch["images"]]
        shown = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        blamed = f", where the embedding of {shown} is not finite by the last good weights either" if names else ""
        if self.every:
            well = checkpoints.step_of(known[-1]) if known else None
            self.alarms.append(alarms.alarm("nan", step, well, what + blamed))
            self._write()
        return blamed

    def _named(self, step: int) -> dict[str, Any]:
        indices = [int(index) for index in self._indices(step)]
        return {"indices": indices, "images": [self._images.images.name(index) for index in indices]}

    def _by_weights_of(self, checkpoint: Path, step: int) -> list[dict[str, Any]]:
        """Return what is not finite of a batch and of the one before it; all may be finite."""
        sampler = GradientSampler(self._learner)
        values = checkpoints.values_of(checkpoint, self._learner, sampler.variables)
        first = max(0, step - 1)
        found = []
        for number, (images, labels) in zip(range(first, step + 1), self._batches(first, 1), strict=False):
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

    def stops(self, raised: list[dict[str, Any]]) -> list[str]:
        """Return the lines of those alarms that end the run."""
        return [alarm["line"] for alarm in raised if alarm["kind"] in self.stop_on]

    def _has_told(self, watch: ProxyWatch) -> bool:
        own = f" of {watch.objective.name}"
        return any(alarm["kind"] == "dead_proxies" and alarm["seen"].endswith(own) for alarm in self.alarms)

    def _tell(self, raised: list[dict[str, Any]]) -> None:
        for alarm in raised:
            logging.warning("%s", alarm["line"])
        self.alarms += raised
        if self.samples or self.alarms:
            self._write()

    def _write(self) -> None:
        write_json(self.folder.watch, {"every": self.every, "samples": self.samples, "alarms": self.alarms})

    def _write_scalars(self, sample: dict[str, Any], d_pos: np.ndarray, d_neg: np.ndarray, writer: Any) -> None:
        with writer.as_default(step=sample["step"]):
            for name in ("terms", "gradient_norm", "gradient_share"):
                for part, value in sample[name].items():
                    tf.summary.scalar(f"watch/{name}/{part}", value)
            for name in ("variance", "effective_rank", "participation_ratio"):
                tf.summary.scalar(f"watch/{name}", sample[name])
            for name, values in (("d_pos", d_pos), ("d_neg", d_neg)):
                if len(values):
                    tf.summary.histogram(f"watch/{name}", values)
            writer.flush()


def make_watcher(experiment: Experiment, parts: Components, folder: RunFolder) -> Watcher:
    """Return what watches a run; writes nothing.

    Args:
        experiment: The settings.
        parts: The objects of the run.
        folder: Its folder.
    """
    return Watcher(
        parts.learner,
        folder,
        experiment.watch_every,
        sampled_batches(experiment.seed, parts),
        parts.sampler.batch,
        parts.splits.train,
        experiment.stops_on(),
    )


def sampled_batches(seed: int, parts: Components) -> Batches:
    """Return the images of a step that are looked at: one device's share, as much as its memory takes.

    Args:
        seed: Of the run.
        parts: The objects of the run.
    """
    whole, most = parts.sampler.batch_size, parts.learner.gradient_cache or parts.sampler.batch_size
    devices = parts.strategy.num_replicas_in_sync
    count = next(count for count in range(devices, whole + 1) if whole % count == 0 and whole // count <= most)
    share = Share(parts.sampler, 0, count)

    def from_step(first: int, every: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        images, view = parts.splits.train, parts.train_view
        batches = training_batches(images, share, view, seed=seed, first_step=first, every=every)
        yield from own_threads(batches).as_numpy_iterator()

    return from_step
