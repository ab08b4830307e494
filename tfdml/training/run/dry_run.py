"""An experiment before it is run: described in words, timed over a few steps, or its first batch as a picture."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import tensorflow as tf

from tfdml.data.faults import explain_failure
from tfdml.data.pipeline import contact_sheet, evaluation_batches, training_batches, whole_images
from tfdml.data.sampling import ShuffleSampler
from tfdml.errors import UserError
from tfdml.io.files import atomic_write, sweep
from tfdml.memory import free_memory
from tfdml.models import MetricLearner
from tfdml.models.auto_weights import AutoWeights
from tfdml.models.inference import compiled
from tfdml.objectives import AutoWeight, Objective
from tfdml.training.build.components import Components, build_components
from tfdml.training.build.images import load_splits, make_sampler, make_transforms
from tfdml.training.build.initial_weights import check_start
from tfdml.training.build.learner import check_memory, model_warnings, step_memory, without_batch_norm_warning
from tfdml.training.distributed.devices import device_names, own_threads
from tfdml.training.experiment import Experiment
from tfdml.training.run.evaluator import is_due
from tfdml.training.run.selection import selection_warnings
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import DataSettings, OptimizationSettings

_GIGABYTE = 2**30


def describe(experiment: Experiment, probed: bool = False) -> str:
    """Return what a run would do: data, network, terms, batches and schedule. Loads the data and builds the model.

    Args:
        experiment: The settings.
        probed: Whether to run a few steps, and say what the whole run will take.

    Raises:
        UserError: The run could not start.
    """
    RunFolder(experiment.run_dir).check_new()
    check_start(experiment.start_from)
    parts = build_components(experiment)
    splits, learner, batch_size = parts.splits, parts.learner, parts.sampler.batch_size
    start = f", then {experiment.start_from}" if experiment.start_from else ""
    every = f"every {experiment.evaluate_every} epochs" if experiment.evaluate_every > 1 else "after each epoch"
    when = f"before training and {every if experiment.evaluate_every else 'at the end'}"
    metric = f" by {experiment.selection_metric}" if experiment.selection != "last" else ""
    chunks = f", in chunks of {experiment.gradient_cache}" if experiment.gradient_cache else ""
    steps = parts.steps_per_epoch * experiment.epochs
    needed, free = step_memory(learner.embedder, parts.train_view, batch_size, learner.gradient_cache), free_memory()
    lines = [
        *model_warnings(experiment, learner.embedder),
        *selection_warnings(experiment.selection, splits.validation),
        f"data         {experiment.dataset} from {experiment.data_dir or 'the library itself'}",
        *(
            f"  {name:<18}{len(split):>9,} images of {split.num_classes:,} classes"
            for name, split in ({"train": splits.train} | splits.evaluated()).items()
        ),
        "views",
        f"  training   {parts.train_view}",
        f"  evaluation {parts.evaluation_view}",
        f"cache        {parts.cache.reason}",
        f"embedder     {experiment.backbone}, weights {experiment.weights}{start}: "
        f"{learner.embedder.count_params():,} parameters, {experiment.embedding_dim}-d, batch norm "
        f"{experiment.batch_norm}, {experiment.mixed_precision}",
        "objectives",
        *(f"  {_weight(term.weight)} * {term.name}  {_arguments(term)}" for term in learner.objectives),
        "trained             parameters   learning rate",
        *_trained(experiment, learner),
        f"optimiser    {experiment.optimizer} in {experiment.optimizer_form} form{''.join(_along_the_run(experiment))}",
        f"batches      {batch_size} images ({_batch(experiment)}){chunks}",
        f"schedule     {parts.steps_per_epoch:,} steps an epoch, {experiment.epochs} epochs: {steps:,} steps, "
        f"{steps * batch_size:,} images, {steps * batch_size / len(splits.train):.1f} times the training images",
        f"evaluation   K = {experiment.ks}, {when}; the embedder kept is that of "
        f"--selection={experiment.selection}{metric}",
        f"memory       at least {needed / _GIGABYTE:,.2f} GB for a step; {free / _GIGABYTE:,.1f} GB are free here",
        f"devices      {', '.join(device_names(parts.strategy))}",
    ]
    if experiment.refit:
        then = "all training classes are then trained for as many"
        lines.append(f"refit        the above finds the number of epochs; {then}")
    if experiment.seeds:
        seeds = ", ".join(map(str, experiment.seed_list()))
        above = f"the above is that of --seed={experiment.seed}"
        lines.append(f"seeds        {seeds}: a run for each, one after another; {above}")
    if probed:
        try:
            check_memory(learner.embedder, parts.train_view, batch_size, experiment.gradient_cache)
            lines += probe(experiment, parts).lines()
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


def _along_the_run(settings: OptimizationSettings) -> Iterator[str]:
    if settings.warm_up_epochs:
        yield f", rates rising for {settings.warm_up_epochs:g} epochs"
    if settings.drop_epochs:
        yield f", times {settings.drop_factor:g} after epoch {settings.drop_epochs}"
    if settings.schedule != "step":
        yield f", along a {settings.schedule} to {settings.final_rate:g} of the rates"
    if settings.layer_decay < 1:
        yield f", times {settings.layer_decay:g} from each group of the backbone's layers to the one below"
    if settings.unfreeze_epochs:
        yield f", the backbone from epoch {settings.unfreeze_epochs} on"
    if settings.ema:
        yield f", averages of the weights with {settings.ema:g}"


def _batch(settings: DataSettings) -> str:
    plain = {"shuffle": "plain shuffle", "whole_classes": "all images of random classes"}
    of_super_classes = f", of super-classes: {settings.super_classes_per_batch}"
    by_class = f"{settings.classes_per_batch} classes x {settings.images_per_class}"
    return plain.get(settings.sampling, by_class + of_super_classes * (settings.sampling == "hierarchical"))


def _weight(weight: float | AutoWeight) -> str:
    if isinstance(weight, AutoWeight):
        return f"auto(share={weight.share:g}, steps={weight.steps})"
    return f"{weight:g}"


def _arguments(term: Objective) -> str:
    config = term.get_config()
    loss = config.pop("loss")["config"] if isinstance(config.get("loss"), dict) else {}
    shown = {**loss, **config}
    if hasattr(term, "kernels"):
        shown["kernels"] = list(term.kernels.values())
    hidden = ("name", "trainable", "dtype", "weight", "reduction")
    return ", ".join(f"{key}={value}" for key, value in shown.items() if key not in hidden)


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
    def evaluation_hours(self) -> float:
        """Of embedding, in one training."""
        return self.evaluations * self.evaluated * self.embedding / 3600

    @property
    def hours(self) -> float:
        """Of one training; --seeds and --refit make several."""
        return self.steps * self.together / 3600 + self.evaluation_hours

    def lines(self) -> Iterator[str]:
        """Yield what was found, in words, and what could be done about it."""
        slow_input = self.input > self.model
        step, model, images, decoding = (
            f"{1000 * seconds:,.0f}" for seconds in (self.together, self.model, self.input, self.decoding)
        )
        yield (
            f"probe        {self.images_per_second:,.0f} images a second: a step takes {step} ms, the model alone "
            f"{model}, its images alone {images} ({decoding} decoded again); "
            f"{'the input' if slow_input else 'the model'} is the bottleneck"
        )
        yield (
            f"  a training {self.hours:,.2f} hours, {self.evaluation_hours:,.2f} of them for embedding "
            f"{self.evaluated:,} images {self.evaluations} times"
        )
        peak, free = self.peak / _GIGABYTE, self.free / _GIGABYTE
        yield f"  memory     {peak:,.1f} GB at the peak so far, {free:,.1f} GB are free"
        if slow_input and self.input >= 0.8 * self.decoding:
            yield ("  advice     keep decoded images (--cache=true), or tfdml prepare them at the size of --resize")
        elif slow_input:
            yield "  advice     more CPU cores, or a simpler --augmentation or --policy"
        if self.free < 0.2 * (self.free + self.peak):
            yield (
                "  advice     little memory is left: --cache=false, --gradient_cache, a smaller batch, --image_size or "
                "--evaluation_batch_size, or --mixed_precision=mixed_bfloat16"
            )


def probe(experiment: Experiment, parts: Components, steps: int = 8) -> Probe:
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

    measuring = AutoWeights.of(learner)

    def seconds_per_step(source: tf.data.Dataset) -> float:
        given = own_threads(source)
        with without_batch_norm_warning():
            learner.fit(given.take(2), steps_per_epoch=2, verbose=0, shuffle=False, callbacks=measuring)
            start = time.perf_counter()
            learner.fit(given.take(steps), steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=measuring)
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


def _seconds_per_embedding(experiment: Experiment, parts: Components) -> float:
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
    try:
        import resource
    except ImportError:  # on Windows
        return float(psutil.Process().memory_info().peak_wset)
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def write_preview(settings: DataSettings, seed: int, path: str) -> str:
    """Write a contact sheet of the first batch as the network will see it, each view under its whole image.

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
    file = Path(path)
    if file.suffix.lower() != ".png":
        raise UserError(f"--preview={path}: name a PNG file, e.g. --preview=batch.png")
    if not file.parent.is_dir():
        raise UserError(f"--preview={path}: there is no folder {file.parent}")
    transform, _ = make_transforms(settings)
    train = load_splits(settings, seed).train
    sampler = make_sampler(settings, train, seed)
    batches = training_batches(train, sampler, transform, seed=seed, num_steps=1)
    try:
        images, labels = next(batches.as_numpy_iterator())
        sheet = contact_sheet(images, labels, train.class_names, whole_images(train, sampler.batch(0)))
    except tf.errors.OpError as error:
        raise (explain_failure(error, train) or error) from None
    sweep(file.parent)
    try:
        with atomic_write(file) as temporary:
            sheet.save(temporary)
    except UserError as error:
        raise UserError(f"--preview={error}") from error
    return f"{path}: {len(labels)} views of {images.shape[2]} x {images.shape[1]} px from {train.name}, {transform}"
