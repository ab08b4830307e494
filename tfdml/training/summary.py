"""An experiment in words, before it is run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tfdml.errors import UserError
from tfdml.memory import free_memory
from tfdml.models import MetricLearner
from tfdml.objectives import AutoWeight
from tfdml.training import distribution
from tfdml.training.advice import doubts
from tfdml.training.assembly import Assembly, assemble
from tfdml.training.experiment import Experiment
from tfdml.training.limits import check_memory, step_memory
from tfdml.training.probe import probe
from tfdml.training.run_folder import RunFolder
from tfdml.training.selection import few_classes
from tfdml.training.settings import DataSettings, EvaluationSettings, ModelSettings, OptimizationSettings
from tfdml.training.starting import check_start


def describe(experiment: Experiment, probed: bool = False) -> str:
    """What a run would do: data, network, terms, batches and schedule. Loads the data and builds the model.

    Args:
        experiment: The settings.
        probed: Whether to run a few steps, and say what the whole run will take.

    Raises:
        UserError: The run could not start.
    """
    RunFolder(experiment.run_dir).check_new()
    check_start(experiment.start_from)
    parts = assemble(experiment)
    lines = [
        *doubts(experiment.model, parts.learner.embedder),
        *few_classes(experiment.selection, parts.splits.validation),
        *_data(experiment.data, parts),
        *_model(experiment.model, parts.learner),
        *_optimization(experiment.optimization, experiment.data, parts),
        *_evaluation(experiment.evaluation),
        *_machine(parts),
        *_several(experiment),
        *(_probed(experiment, parts) if probed else ()),
        "",
        "as a flag file:",
        experiment.as_flags(),
    ]
    return "\n".join(lines)


def _probed(experiment: Experiment, parts: Assembly) -> Iterator[str]:
    try:
        check_memory(
            parts.learner.embedder, parts.train_view, parts.sampler.batch_size, experiment.optimization.gradient_cache
        )
    except UserError as error:
        yield f"probe        no step was run: {error}"
    else:
        yield from probe(experiment, parts).lines()


def _data(settings: DataSettings, parts: Assembly) -> Iterator[str]:
    yield f"data         {settings.dataset} from {settings.data_dir or 'the library itself'}"
    for name, split in ({"train": parts.splits.train} | parts.splits.evaluated()).items():
        yield f"  {name:<18}{len(split):>9,} images of {split.num_classes:,} classes"
    yield "views"
    yield f"  training   {parts.train_view}"
    yield f"  evaluation {parts.evaluation_view}"
    yield f"cache        {parts.cache.reason}"


def _model(settings: ModelSettings, learner: MetricLearner) -> Iterator[str]:
    weights = f"weights {settings.weights}" + (f", then {settings.start_from}" if settings.start_from else "")
    yield (
        f"embedder     {settings.backbone}, {weights}: {learner.embedder.count_params():,} parameters, "
        f"{settings.embedding_dim}-d, batch norm {settings.batch_norm}, {settings.mixed_precision}"
    )


def _optimization(settings: OptimizationSettings, data: DataSettings, parts: Assembly) -> Iterator[str]:
    learner, batch_size = parts.learner, parts.sampler.batch_size
    yield "objectives"
    for term in learner.objectives:
        yield f"  {_weight(term.weight)} * {term.name}  {_settings(term)}"
    rates = settings.learning_rates()
    yield "trained             parameters   learning rate"
    groups = [(part, part, variables) for part, variables in learner.embedder.parts().items()]
    groups += [("objectives", term.name, term.trainable_variables) for term in learner.objectives]
    for part, name, variables in groups:
        count = sum(math.prod(variable.shape) for variable in variables)
        yield f"  {name:<18}{count:>9,}   {f'{rates[part]:g}' if count else '-'}"
    yield f"optimiser    {settings.optimizer} in {settings.optimizer_form} form{''.join(_along_the_run(settings))}"
    chunks = f", in chunks of {settings.gradient_cache}" if settings.gradient_cache else ""
    yield f"batches      {batch_size} images ({_batch(data)}){chunks}"
    steps = parts.steps_per_epoch * settings.epochs
    passes = steps * batch_size / len(parts.splits.train)
    yield (
        f"schedule     {parts.steps_per_epoch:,} steps an epoch, {settings.epochs} epochs: {steps:,} steps, "
        f"{steps * batch_size:,} images, {passes:.1f} times the training images"
    )


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


def _evaluation(settings: EvaluationSettings) -> Iterator[str]:
    every = f"every {settings.evaluate_every} epochs" if settings.evaluate_every > 1 else "after each epoch"
    when = f"before training and {every if settings.evaluate_every else 'at the end'}"
    chosen = settings.selection + (f" by {settings.selection_metric}" if settings.selection != "last" else "")
    yield f"evaluation   K = {settings.ks}, {when}; the embedder kept is that of --selection={chosen}"


def _machine(parts: Assembly) -> Iterator[str]:
    needed = step_memory(
        parts.learner.embedder, parts.train_view, parts.sampler.batch_size, parts.learner.gradient_cache
    )
    free = free_memory()
    yield f"memory       at least {needed / 2**30:,.2f} GB for a step; {free / 2**30:,.1f} GB are free here"
    yield f"devices      {', '.join(distribution.describe(parts.strategy))}"


def _several(experiment: Experiment) -> Iterator[str]:
    if experiment.refit:
        yield "refit        the above finds the number of epochs; all training classes are then trained for as many"
    if experiment.seeds:
        seeds = ", ".join(map(str, experiment.seed_list()))
        yield f"seeds        {seeds}: a run for each, one after another; the above is that of --seed={experiment.seed}"


def _batch(settings: DataSettings) -> str:
    if settings.sampling == "shuffle":
        return "plain shuffle"
    if settings.sampling == "whole_classes":
        return "all images of random classes"
    batch = f"{settings.classes_per_batch} classes x {settings.images_per_class}"
    if settings.sampling == "hierarchical":
        batch += f", of super-classes: {settings.super_classes_per_batch}"
    return batch


def _weight(weight: float | AutoWeight) -> str:
    if isinstance(weight, AutoWeight):
        return f"auto(share={weight.share:g}, steps={weight.steps})"
    return f"{weight:g}"


def _settings(term) -> str:
    config = term.get_config()
    skip = {"name", "trainable", "dtype", "weight", "reduction"}
    shown = {key: value for key, value in config.items() if key not in skip}
    if isinstance(shown.get("loss"), dict):
        loss = shown.pop("loss")["config"]
        shown = {**{key: value for key, value in loss.items() if key not in skip}, **shown}
    if hasattr(term, "kernels"):
        shown["kernels"] = list(term.kernels.values())
    return ", ".join(f"{key}={value}" for key, value in shown.items())
