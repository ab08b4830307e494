"""The objects that a run consists of, built and checked before anything is trained or written."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdml import backbones
from tfdml.data.sampling import Sampler
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError
from tfdml.models import MetricLearner
from tfdml.training.build.images import (
    CachePlan,
    Splits,
    check_measurable,
    load_splits,
    make_sampler,
    make_transforms,
    plan_cache,
)
from tfdml.training.build.learner import check_orders, check_pairs, check_starts, make_learner
from tfdml.training.distributed import devices
from tfdml.training.distributed.tensorflow_workers import Workers
from tfdml.training.experiment import Experiment
from tfdml.training.settings import ModelSettings, OptimizationSettings
from tfdml.training.terms import check_objectives


@dataclasses.dataclass(frozen=True)
class Assembly:
    """What a run is made of.

    Args:
        strategy: The strategy over devices; TensorFlow's default one on a single device.
        splits: The images.
        sampler: What chooses the images of each batch.
        steps_per_epoch: Batches of an epoch.
        train_view: How images are seen in training.
        evaluation_view: How they are seen in evaluation and serving.
        learner: The compiled learner.
        cache: What of the images is kept in memory.
    """

    strategy: Any
    splits: Splits
    sampler: Sampler
    steps_per_epoch: int
    train_view: TrainTransform
    evaluation_view: EvaluationTransform
    learner: MetricLearner
    cache: CachePlan


def assemble(experiment: Experiment, workers: Workers | None = None) -> Assembly:
    """Put together what an experiment is made of; writes nothing.

    Args:
        experiment: The settings.
        workers: Who trains; by default this process alone.

    Raises:
        UserError: The run could not be trained or measured.

    Example:
        >>> images = {"dataset_options": "images_per_class=5, size=32", "image_size": 28, "resize": 32}
        >>> experiment = Experiment(run_dir="unused", backbone="conv4(width=4)", batch_norm="train", **images)
        >>> assemble(experiment).sampler.batch_size
        100
    """
    data, optimization, evaluation, run = (
        experiment.data,
        experiment.optimization,
        experiment.evaluation,
        experiment.run,
    )
    check_names(experiment.model, optimization)
    train_view, evaluation_view = make_transforms(data)
    strategy = devices.make_strategy(run.logical_devices, workers)

    splits = load_splits(data, run.seed, evaluation.evaluate_train)
    check_measurable(splits, evaluation.recall_ks())
    if evaluation.selection == "validation" and splits.validation is not None and splits.validation.num_classes < 2:
        raise UserError(
            f"--selection=validation: --holdout_classes={data.holdout_classes} holds out one class, in which every "
            "neighbour is a hit; hold out more classes"
        )
    sampler = make_sampler(data, splits.train, run.seed, strategy.num_replicas_in_sync)
    steps_per_epoch = optimization.steps_per_epoch or sampler.steps_per_epoch

    with strategy.scope():
        learner = make_learner(
            experiment.model, optimization, evaluation_view, splits.train.num_classes, steps_per_epoch, run.seed
        )
    check_pairs(data, learner.objectives)
    check_starts(learner.objectives, optimization.epochs * steps_per_epoch)
    check_orders(evaluation, learner)

    drawn = optimization.epochs * steps_per_epoch * sampler.batch_size
    cache = plan_cache(data, splits.train, list(splits.evaluated().values()), train_view, drawn)
    return Assembly(strategy, splits, sampler, steps_per_epoch, train_view, evaluation_view, learner, cache)


def check_names(model: ModelSettings, optimization: OptimizationSettings) -> None:
    """Refuse a network, a file of weights or an objective that does not exist, before the images are read.

    Args:
        model: Names the network and its weights.
        optimization: Names the objectives.

    Raises:
        UserError: There is none of that name.

    Example:
        >>> check_names(ModelSettings(backbone="conv4(width=8)"), OptimizationSettings(objectives="am_softmax + jrs"))
    """
    backbone = model.backbone_call()
    backbones.check(backbone.name, model.weights, **backbone.arguments)
    check_objectives(optimization.objectives, optimization.cross_batch_memory)
