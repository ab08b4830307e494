"""A few steps of a run, to say what all of them will take."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdml.data.pipeline import evaluation_batches, training_batches
from tfdml.data.sampling import ShuffleSampler
from tfdml.memory import free_memory
from tfdml.models.inference import compiled
from tfdml.training import distribution
from tfdml.training.advice import warned_of_batch_norm
from tfdml.training.assembly import Assembly
from tfdml.training.evaluating import is_due
from tfdml.training.experiment import Experiment

_GIGABYTE = 2**30


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a few steps took, in seconds and bytes.

    Args:
        batch_size: Images of a step.
        steps: Steps of the run.
        together: A step as the run makes it: input and model side by side.
        input: A batch of images alone, as most steps get it: decoded, or from memory where the cache keeps it.
        decoding: A batch of images alone, decoded from the source.
        model: A step alone, on a batch in memory.
        evaluations: How often the run embeds images of evaluation.
        evaluated: How many images it embeds each time.
        embedding: An image's share of embedding a batch, decoding included.
        peak: The most memory that this process has had so far, bytes.
        free: Bytes of memory that are free.
    """

    batch_size: int
    steps: int
    together: float
    input: float
    decoding: float
    model: float
    evaluations: int
    evaluated: int
    embedding: float
    peak: float
    free: float

    @property
    def images_per_second(self) -> float:
        """Training images a second."""
        return self.batch_size / self.together

    @property
    def hours(self) -> float:
        """Of one training; --seeds and --refit make several."""
        return (self.steps * self.together + self.evaluations * self.evaluated * self.embedding) / 3600

    def lines(self) -> Iterator[str]:
        """What was found, in words, and what could be done about it."""
        slower = "the input" if self.input > self.model else "the model"
        yield (
            f"probe        {self.images_per_second:,.0f} images a second: a step takes {1000 * self.together:,.0f} ms, "
            f"the model alone {1000 * self.model:,.0f}, its images alone {1000 * self.input:,.0f} "
            f"({1000 * self.decoding:,.0f} decoded anew); {slower} is the bottleneck"
        )
        evaluation = self.evaluations * self.evaluated * self.embedding / 3600
        yield (
            f"  a training {self.hours:,.2f} hours, {evaluation:,.2f} of them for embedding {self.evaluated:,} images "
            f"{self.evaluations} times"
        )
        gigabytes = [f"{size / _GIGABYTE:,.1f} GB" for size in (self.peak, self.free)]
        yield f"  memory     {gigabytes[0]} at the peak so far, {gigabytes[1]} are free"
        if self.input > self.model:
            yield (
                "  advice     keep decoded images (--cache=true), or prepare them at the size of --resize (bin/prepare)"
                if self.input >= 0.8 * self.decoding
                else "  advice     more CPU cores, or a simpler --augmentation or --policy"
            )
        if self.free < 0.2 * (self.free + self.peak):
            yield (
                "  advice     little memory is left: --cache=false, --gradient_cache, a smaller batch, --image_size or "
                "--evaluation_batch_size, or --mixed_precision=mixed_bfloat16"
            )


def probe(experiment: Experiment, parts: Assembly, steps: int = 8) -> Probe:
    """Run a few steps, whose weights are thrown away, and measure them. Writes nothing.

    Timed are steps after the first two, which compile, as steps may be of two kinds. Of a data set that the run keeps
    in memory only the images of the probe are decoded.

    Args:
        experiment: The settings.
        parts: What the run is made of; its learner is changed.
        steps: How many steps are timed; an even number has both phases of an objective with statistics.
    """
    batch_size, learner = parts.sampler.batch_size, parts.learner
    drawn = np.unique(np.concatenate([parts.sampler.batch(step) for step in range(steps)]))
    few = parts.splits.train.take(np.resize(drawn, max(len(drawn), batch_size)))
    few_sampler = ShuffleSampler(len(few), batch_size, experiment.seed)

    def batches(cached: bool) -> tf.data.Dataset:
        limit = experiment.cache_limit_mb
        return training_batches(few, few_sampler, parts.train_view, cache=cached, cache_limit_mb=limit)

    decoding = _seconds_per_batch(batches(cached=False), steps)
    kept = _seconds_per_batch(batches(cached=True), steps) if parts.cache.training else decoding

    def seconds_per_step(source: tf.data.Dataset) -> float:
        given = distribution.own_threads(source)
        with warned_of_batch_norm():
            learner.fit(given.take(2), steps_per_epoch=2, verbose=0, shuffle=False)
            start = time.perf_counter()
            learner.fit(given.take(steps), steps_per_epoch=steps, verbose=0, shuffle=False)
        return (time.perf_counter() - start) / steps

    one = next(iter(batches(cached=False)))
    model = seconds_per_step(tf.data.Dataset.from_tensors(one).repeat(steps + 2))
    together = seconds_per_step(batches(cached=parts.cache.training))
    evaluated = sum(len(split) for split in parts.splits.evaluated().values())
    return Probe(
        batch_size,
        experiment.epochs * parts.steps_per_epoch,
        together,
        kept,
        decoding,
        model,
        sum(is_due(epoch, experiment.evaluate_every, experiment.epochs) for epoch in range(experiment.epochs + 1)),
        evaluated,
        _seconds_per_embedding(experiment, parts),
        _peak_memory(),
        free_memory(),
    )


def _seconds_per_batch(batches: tf.data.Dataset, steps: int) -> float:
    iterator = iter(batches)
    next(iterator)
    start = time.perf_counter()
    for _ in range(steps):
        next(iterator)
    return (time.perf_counter() - start) / steps


def _seconds_per_embedding(experiment: Experiment, parts: Assembly) -> float:
    size, test = experiment.evaluation_batch_size, parts.splits.test
    images = test.take(np.arange(min(3 * size, len(test))))
    embed = compiled(parts.learner.embedder, parts.learner.embedder)
    ended, sizes = [time.perf_counter()], []
    for batch, _ in evaluation_batches(images, parts.evaluation_view, size):
        np.asarray(embed(batch))
        ended.append(time.perf_counter())
        sizes.append(len(batch))
    # The first batch compiles; where it is the only one it has to do.
    first = 1 if len(sizes) > 1 else 0
    return (ended[-1] - ended[first]) / sum(sizes[first:])


def _peak_memory() -> float:
    """Bytes, of a GPU's memory where the run trains on one."""
    gpus = range(len(tf.config.list_logical_devices("GPU")))
    if gpus:
        return float(max(tf.config.experimental.get_memory_info(f"GPU:{i}")["peak"] for i in gpus))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
