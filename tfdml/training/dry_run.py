"""An experiment before it is run: described in words, timed over a few steps, or its first batch as a picture."""

import math
import os
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import keras
import matplotlib
import numpy as np
import psutil
import tensorflow as tf

from tfdml.data.dataset import explain_failure
from tfdml.data.pipeline import own_threads, training_batches
from tfdml.data.sampling import ShuffleSampler
from tfdml.errors import UserError
from tfdml.io.files import atomic_write, require_writable, sweep
from tfdml.memory import free_memory
from tfdml.models import MetricLearner
from tfdml.models.embedder import untrained_batch_norm
from tfdml.training import build
from tfdml.training.checkpoints import RunFolder
from tfdml.training.images import load_splits, make_sampler, make_transforms
from tfdml.training.results import selection_warnings
from tfdml.training.settings import DataSettings, Experiment
from tfdml.training.workers import device_names

_GIGABYTE = 2**30
# Images on a side of a preview.
_SIDE = 10


def describe(experiment: Experiment, probed: bool = False) -> str:
    """Return what a run would do: images, network, terms and steps. Loads the data and builds the model.

    Args:
        experiment: The settings.
        probed: Whether to run a few steps, and say what the whole run will take.

    Raises:
        UserError: The run could not start.
    """
    RunFolder(experiment.run_dir).check_new()
    build.check_start(experiment.start_from)
    parts = build.build_components(experiment)
    splits, learner, batch_size = parts.splits, parts.learner, parts.sampler.batch_size
    steps = parts.steps_per_epoch * experiment.epochs
    needed = build.step_memory(learner.embedder, parts.train_view, batch_size, learner.gradient_cache)
    free = free_memory()
    message = untrained_batch_norm(learner.embedder)
    lines = [
        *([f"WARNING: {message}"] if message and not experiment.start_from else []),
        *selection_warnings(experiment.selection, splits.validation),
        f"data         {experiment.data_name}",
        *(
            f"  {name:<18}{len(split):>9,} images of {split.num_classes:,} classes"
            for name, split in ({"train": splits.train} | splits.evaluated()).items()
        ),
        *([] if experiment.features else ["views", f"  training   {parts.train_view}"]),
        *([] if experiment.features else [f"  evaluation {parts.evaluation_view}"]),
        f"cache        {parts.cache.reason}",
        f"embedder     {experiment.head if experiment.features else experiment.backbone}: "
        f"{learner.embedder.count_params():,} parameters, "
        f"{learner.embedder.embedding_dim}-d",
        "objectives",
        *(f"  {term!r}" for term in learner.objectives),
        "trained             parameters   learning rate",
        *_trained(experiment, learner),
        f"batches      {batch_size} images",
        f"schedule     {parts.steps_per_epoch:,} steps an epoch, {experiment.epochs} epochs: {steps:,} steps, "
        f"{steps * batch_size:,} images, {steps * batch_size / len(splits.train):.1f} times the training images",
        f"memory       at least {needed / _GIGABYTE:,.2f} GB for a step; {free / _GIGABYTE:,.1f} GB are free here",
        f"devices      {', '.join(device_names(parts.strategy))}",
    ]
    if probed:
        try:
            build.check_memory(learner.embedder, parts.train_view, batch_size, experiment.gradient_cache)
            lines += probe_lines(experiment, parts, probe(experiment, parts))
        except UserError as error:
            lines.append(f"probe        no step was run: {error}")
    return "\n".join([*lines, "", "as a flag file:", experiment.as_flags()])


def _trained(experiment: Experiment, learner: MetricLearner) -> Iterator[str]:
    rates = experiment.learning_rates()
    groups = [(part, part, variables) for part, variables in learner.embedder.parts().items()]
    groups += [("objectives", term.name, term.trainable_variables) for term in learner.objectives]
    for part, name, variables in groups:
        count = sum(math.prod(variable.shape) for variable in variables)
        yield f"  {name:<18}{count:>9,}   {f'{rates[part]:g}' if count else '-'}"


class Probe(NamedTuple):
    """Seconds that were measured.

    Args:
        step: Of a step as the run makes it, with input and model at the same time.
        input: Of a batch of images alone, as most steps get it: decoded, or from memory where the cache keeps it.
        model: Of a step alone, on a batch in memory.
    """

    step: float
    input: float
    model: float


def probe_lines(experiment: Experiment, parts: build.Components, measured: Probe) -> list[str]:
    """Return what a training takes, in words: images a second, bottleneck, hours and memory.

    Args:
        experiment: The settings; --seeds makes several trainings.
        parts: What the run is made of.
        measured: Seconds of its steps.
    """
    hours = experiment.epochs * parts.steps_per_epoch * measured.step / 3600
    gpus = range(len(tf.config.list_logical_devices("GPU")))
    peaks = [tf.config.experimental.get_memory_info(f"GPU:{i}")["peak"] for i in gpus]
    memory = max(peaks, default=psutil.Process().memory_info().rss)
    rate = parts.sampler.batch_size / measured.step
    step, model, batch = (f"{1000 * seconds:,.0f}" for seconds in (measured.step, measured.model, measured.input))
    slower = "the input" if measured.input > measured.model else "the model"
    return [
        f"probe        {rate:,.0f} images a second: a step takes {step} ms, the model alone {model}, its images alone "
        f"{batch}; {slower} is the bottleneck",
        f"  a training {hours:,.2f} hours, and the time of its evaluations",
        f"  memory     {memory / _GIGABYTE:,.1f} GB are used, {free_memory() / _GIGABYTE:,.1f} GB are free",
    ]


def probe(experiment: Experiment, parts: build.Components, steps: int = 8) -> Probe:
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
    sampler, limit = ShuffleSampler(len(few), batch_size, experiment.seed), experiment.cache_limit_mb
    batches = training_batches(few, sampler, parts.train_view, cache=parts.cache.training, cache_limit_mb=limit)

    def seconds_per_step(source: tf.data.Dataset) -> float:
        batches = own_threads(source)
        learner.fit(batches.take(2), steps_per_epoch=2, verbose=0, shuffle=False)
        start = time.perf_counter()
        learner.fit(batches.take(steps), steps_per_epoch=steps, verbose=0, shuffle=False)
        return (time.perf_counter() - start) / steps

    one = tf.data.Dataset.from_tensors(next(iter(batches))).repeat(steps + 2)
    return Probe(model=seconds_per_step(one), step=seconds_per_step(batches), input=_seconds_per_batch(batches, steps))


def _seconds_per_batch(batches: Iterable, steps: int) -> float:
    iterator = iter(batches)
    next(iterator)
    start = time.perf_counter()
    for _ in range(steps):
        next(iterator)
    return (time.perf_counter() - start) / steps


def write_preview(settings: DataSettings, seed: int, path: str) -> str:
    """Write a picture of the first batch as the network will see it, at most 100 images with their classes.

    Args:
        settings: The images, their views and batches.
        seed: Of what is drawn.
        path: A PNG file to write.

    Returns:
        What was written, in words.

    Raises:
        UserError: The data cannot be loaded, or the file cannot be written.

    Example:
        >>> write_preview(DataSettings(image_size=56, resize=64), 0, "batch.png")
        'batch.png: 100 views of 56 x 56 px from glyphs, ...'
    """
    if settings.features:
        raise UserError("--preview shows images, and --features are vectors: leave one of them out")
    if not path.lower().endswith(".png"):
        raise UserError(f"--preview={path}: name a PNG file, e.g. --preview=batch.png")
    require_writable(path, "preview")
    transform, _ = make_transforms(settings)
    train = load_splits(settings, seed).train
    sampler = make_sampler(settings, train, seed)
    batches = training_batches(train, sampler, transform, seed=seed, num_steps=1)
    try:
        images, _ = next(batches.as_numpy_iterator())
    except tf.errors.OpError as error:
        raise (explain_failure(error, train) or error) from None
    sweep(os.path.dirname(path) or ".")
    columns = min(len(images), _SIDE)
    rows = min(len(images) // columns, _SIDE)
    # In which matplotlib is to see no formula.
    names = {label: name.replace("$", r"\$") for label, name in train.class_names.items()}
    labels = {"y_true": train.labels[sampler.batch(0)], "label_map": names, "transparent": False}
    try:
        with atomic_write(path) as temporary, matplotlib.rc_context({"backend": "agg"}):
            keras.visualization.plot_image_gallery(images, **labels, rows=rows, cols=columns, path=temporary)
    except UserError as error:
        raise UserError(f"--preview={error}") from error
    return f"{path}: {len(images)} views of {images.shape[2]} x {images.shape[1]} px from {train.name}, {transform}"
