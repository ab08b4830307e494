"""An experiment in words, before it is run."""

from __future__ import annotations

from tfdml.memory import free_memory
from tfdml.training import building, distribution
from tfdml.training.evaluating import check_measurable
from tfdml.training.experiment import Experiment
from tfdml.training.limits import step_memory
from tfdml.training.run_folder import RunFolder


def describe(experiment: Experiment) -> str:
    """What a run would do: data, network, terms, batches and schedule. Loads the data and builds the model.

    Raises:
        UserError: The run could not start.
    """
    RunFolder(experiment.run_dir).check_new()
    strategy = distribution.make_strategy(experiment.logical_devices)
    splits = building.load_splits(experiment)
    check_measurable(splits, experiment.recall_ks())
    sampler = building.make_sampler(experiment, splits.train, distribution.num_replicas(strategy))
    steps = experiment.steps_per_epoch or sampler.steps_per_epoch
    train_transform, evaluation_transform = building.make_transforms(experiment)
    with distribution.scope(strategy):
        learner = building.make_learner(experiment, splits.train.num_classes, steps)
    lines = [f"data         {experiment.dataset} from {experiment.data_dir or 'the library itself'}"]
    for name in ("train", "validation", "test", "seen"):
        split = getattr(splits, name)
        if split is not None:
            lines.append(f"  {name:<11}{len(split):,} images of {split.num_classes:,} classes")
    lines += [
        f"training     {train_transform}",
        f"evaluation   {evaluation_transform}",
        f"embedder     {experiment.backbone}, weights {experiment.weights}: "
        f"{learner.embedder.count_params():,} parameters, {experiment.embedding_dim}-d, "
        f"batch norm {experiment.batch_norm}, {experiment.mixed_precision}",
        "objectives",
    ]
    lines += [f"  {term.weight:g} * {term.name}  {_settings(term)}" for term in learner.objectives]
    rates = ", ".join(f"{part} {rate:g}" for part, rate in experiment.learning_rates().items())
    drops = f", times {experiment.drop_factor:g} after epoch {experiment.drop_epochs}" if experiment.drop_epochs else ""
    lines += [
        f"batches      {sampler.batch_size} images ({_batch(experiment)}), {steps} steps an epoch, "
        f"{experiment.epochs} epochs = {steps * experiment.epochs * sampler.batch_size:,} images",
        f"optimiser    {experiment.optimizer}, rates: {rates}{drops}",
        f"memory       at least {step_memory(experiment, learner.embedder) / 2**30:,.2f} GB for a step; "
        f"{free_memory() / 2**30:,.1f} GB are free here",
        f"devices      {', '.join(distribution.describe(strategy))}",
        f"selection    {experiment.selection}",
        "",
        "as a flag file:",
        experiment.as_flags(),
    ]
    return "\n".join(lines)


def _batch(experiment: Experiment) -> str:
    if experiment.sampling == "shuffle":
        return "plain shuffle"
    if experiment.sampling == "whole_classes":
        return "all images of random classes"
    batch = f"{experiment.classes_per_batch} classes x {experiment.images_per_class}"
    if experiment.sampling == "hierarchical":
        batch += f", of super-classes: {experiment.super_classes_per_batch}"
    return batch


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
