"""Looks at a batch every so many steps: writes what it sees for TensorBoard and `watch.json`, and raises alarms.

The thresholds of the alarms are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import Experiment
from tfdml.training.watching import measures
from tfdml.training.watching.measures import GradientSampler, ProxyWatch

# A batch whose variance has fallen to this share of its highest, or its effective rank to that one's, has collapsed.
VARIANCE_SHARE, RANK_SHARE = 0.1, 0.25
# Unit vectors with this variance are a thousandth apart.
POINT = 5e-7
# A gradient norm this many times the running median of so many samples, once so many are known, has exploded.
EXPLOSION, MEDIAN_OF, MEDIAN_FROM = 10.0, 20, 3

ADVICE = {
    "collapse": "lower --learning_rate, add a --clip_norm, or change --objectives (a larger margin, another mining)",
    "explosion": "lower --learning_rate, add --clip_norm or --warm_up_epochs",
    "nan": "lower --learning_rate or add --clip_norm",
    "dead_proxies": "raise --objective_rate, lower the number of proxies per class, or see that every class is drawn",
}

#: The exit status of a run that an alarm has ended.
HALTED = 3

Samples = Sequence[Mapping[str, Any]]


class Halted(UserError):
    """An alarm has ended the run, as `stop_on` asked for; a command that is ended by it exits with `status`."""

    status = HALTED


def alarm(kind: str, step: int, well: int | None, seen: str) -> dict[str, Any]:
    """Return an alarm as `watch.json` keeps it.

    Args:
        kind: One of the settings' `ALARMS`.
        step: The step at which it was raised.
        well: The last step at which the same was measured and well; None: it never was.
        seen: What was measured, in words.

    Example:
        >>> alarm("nan", 400, 300, "triplet is not finite")["line"]
        'nan at step 400 (well at step 300): triplet is not finite; lower --learning_rate or add --clip_norm'
    """
    since = "at the first look" if well is None else f"well at step {well}"
    line = f"{kind} at step {step} ({since}): {seen}; {ADVICE[kind]}"
    return {"kind": kind, "step": step, "well": well, "seen": seen, "advice": ADVICE[kind], "line": line}


def collapse(sample: Mapping[str, Any], earlier: Samples) -> str:
    """Return what in a sample shows a collapsed embedding, against the best of earlier ones; empty: nothing.

    The variance is below a tenth of its highest so far, or is that of a point; or the effective rank is below a quarter
    of its highest so far, or of C - 1 where that is less: images of C classes, each drawn together to a point, as
    training wants them, still span C - 1 directions.

    Args:
        sample: With `variance`, `effective_rank` and `classes`, the number of classes in the batch.
        earlier: The samples before.
    """
    variance, rank = sample["variance"], sample["effective_rank"]
    if variance < POINT:
        return f"the embeddings of a batch have a variance of {variance:.1e}: they are one point"
    if not earlier:
        return ""
    widest = max(earlier, key=lambda other: other["variance"])
    if variance < VARIANCE_SHARE * widest["variance"]:
        return (
            f"the embeddings of a batch have a variance of {variance:.2g}, after {widest['variance']:.2g} at step "
            f"{widest['step']}"
        )
    fullest = max(earlier, key=lambda other: other["effective_rank"])
    if rank < RANK_SHARE * min(fullest["effective_rank"], sample["classes"] - 1):
        return (
            f"the embeddings of a batch fill {rank:.1f} directions (effective rank), after "
            f"{fullest['effective_rank']:.1f} at step {fullest['step']}"
        )
    return ""


def explosion(sample: Mapping[str, Any], earlier: Samples) -> str:
    """Return what of a sample says that a gradient has exploded; empty: nothing.

    The norm of a part's gradient is above ten times the median of the last 20 samples, and higher than in any of them:
    where a loss is often 0, and its median with it, a batch that is not is no explosion.

    Args:
        sample: With `gradient_norm`, by part.
        earlier: The samples before; fewer than three tell nothing.
    """
    last = earlier[-MEDIAN_OF:]
    if len(last) < MEDIAN_FROM:
        return ""
    found = []
    for part, norm in sample["gradient_norm"].items():
        norms = [other["gradient_norm"].get(part, norm) for other in last]
        median = float(np.median(norms))
        if norm > EXPLOSION * median and norm > max(norms):
            found.append(f"the gradient norm of the {part} is {norm:.3g}, {median:.3g} in the median of {len(norms)}")
    return " and ".join(found)


def new_alarms(sample: dict[str, Any], earlier: Samples) -> list[dict[str, Any]]:
    """Return the alarms that a sample raises; notes in the sample under `alarms` which kinds hold.

    What held at the sample before is not raised again.

    Args:
        sample: What `collapse` and `explosion` read, with its `step`.
        earlier: The samples before, each with `alarms`.
    """
    seen = {"collapse": collapse(sample, earlier), "explosion": explosion(sample, earlier)}
    sample["alarms"] = [kind for kind, words in seen.items() if words]
    before = earlier[-1] if earlier else {"alarms": [], "step": None}
    new = [kind for kind in sample["alarms"] if kind not in before["alarms"]]
    return [alarm(kind, sample["step"], before["step"], seen[kind]) for kind in new]


# (first step, every) -> (images, labels) of that step and of every so-manieth after it.
Batches = Callable[[int, int], Iterator[tuple[np.ndarray, np.ndarray]]]


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
        if self._sampler is None:
            self._sampler = GradientSampler(self._learner)
        images, labels = next(self._stream)
        try:
            found = self._sampler(images, labels)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, tf.errors.ResourceExhaustedError):
                raise
            logging.warning("a look at a batch does not fit the memory beside the training: the run goes on unwatched")
            self._too_large = True
            return []
        embeddings = found.embeddings
        if not np.isfinite(embeddings).all():
            return []  # the step itself will tell, with all of its batch
        d_pos, d_neg = measures.pair_distances(embeddings, labels, self._learner.positives)
        sample: dict[str, Any] = {
            "step": step,
            "terms": found.terms,
            "gradient_norm": found.norms,
            "gradient_share": dict(zip(found.terms, measures.gradient_shares(found.gram).tolist(), strict=True)),
            **measures.spread(embeddings),
            "classes": len(np.unique(labels, axis=0)),
            "images": len(labels),
            "d_pos": float(d_pos.mean()) if len(d_pos) else None,
            "d_neg": float(d_neg.mean()) if len(d_neg) else None,
        }
        raised = new_alarms(sample, self.samples)
        self.samples.append(sample)
        self._write_scalars(sample, d_pos, d_neg, writer)
        self._tell(raised)
        return raised

    def forget_batches(self) -> None:
        """Drop the batches that were made ahead."""
        self._stream = None

    def begin_epoch(self, step: int) -> None:
        """Note where proxies point.

        Args:
            step: How many steps have been made.
        """
        self._epoch_began = step
        for watch in self._proxies:
            watch.begin_epoch()

    def end_epoch(self, step: int) -> list[dict[str, Any]]:
        """Return the alarms that the epoch raises.

        Args:
            step: How many steps have been made.
        """
        raised = []
        for watch in self._proxies:
            # Once is enough of an objective.
            own = f" of {watch.objective.name}"
            known = any(one["kind"] == "dead_proxies" and one["seen"].endswith(own) for one in self.alarms)
            if not known and (seen := watch.dead()):
                raised.append(alarm("dead_proxies", step, self._epoch_began, seen))
        self._tell(raised)
        return raised

    def diverged(self, step: int, what: str, terms: dict[str, str]) -> None:
        """Write `diverged.json`, and note that the run ends because something stopped being finite.

        A gradient that is not finite shows in the loss one step later. So the file has the `indices` and `images` of
        the step's batch, those of the batch before as `before`, and as `last_good` the newest checkpoint.

        Args:
            step: How many steps have been made.
            what: What is not finite.
            terms: The values of the step.
        """
        about: dict[str, Any] = {"step": step, "what": what, "terms": terms, **self._named(step - 1)}
        if step > 1:
            about["before"] = {"step": step - 1, **self._named(step - 2)}
        known = checkpoints.list_checkpoints(self.folder.checkpoints)
        if known:
            about["last_good"] = str(known[-1])
        write_json(self.folder.diverged, about)
        if self.every:
            well = checkpoints.step_of(known[-1]) if known else None
            self.alarms.append(alarm("nan", step, well, what))
            self._write()

    def _named(self, step: int) -> dict[str, Any]:
        indices = [int(index) for index in self._indices(step)]
        return {"indices": indices, "images": [self._images.images.name(index) for index in indices]}

    def stops(self, raised: list[dict[str, Any]]) -> list[str]:
        """Return the lines of those alarms that end the run."""
        return [alarm["line"] for alarm in raised if alarm["kind"] in self.stop_on]

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
