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
from tfdml.training.distributed.devices import make_strategy
from tfdml.training.distributed.processes import Processes
from tfdml.training.experiment import Experiment
from tfdml.training.terms import check_objectives


@dataclasses.dataclass(frozen=True)
class Components:
    """The objects of a run.

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


def build_components(experiment: Experiment, processes: Processes | None = None) -> Components:
    """Build and check the objects of a run; writes nothing.

    Args:
        experiment: The settings.
        processes: Who trains; by default this process alone.

    Raises:
        UserError: The run could not be trained or measured.

    Example:
        >>> images = {"dataset_options": "images_per_class=5, size=32", "image_size": 28, "resize": 32}
        >>> experiment = Experiment(run_dir="unused", backbone="conv4(width=4)", batch_norm="train", **images)
        >>> build_components(experiment).sampler.batch_size
        100
    """
    check_names(experiment)
    train_view, evaluation_view = make_transforms(experiment)
    strategy = make_strategy(experiment.logical_devices, processes)

    splits = load_splits(experiment, experiment.seed, experiment.evaluate_train)
    check_measurable(splits, experiment.recall_ks())
    if experiment.selection == "validation" and splits.validation is not None and splits.validation.num_classes < 2:
        raise UserError(
            f"--selection=validation: --holdout_classes={experiment.holdout_classes} holds out one class, in which "
            "every neighbour is a hit; hold out more classes"
        )
    sampler = make_sampler(experiment, splits.train, experiment.seed, strategy.num_replicas_in_sync)
    steps_per_epoch = experiment.steps_per_epoch or sampler.steps_per_epoch
    steps = experiment.epochs * steps_per_epoch

    with strategy.scope():
        learner = make_learner(experiment, evaluation_view, splits.train.num_classes, steps_per_epoch)
    check_pairs(experiment, learner.objectives)
    check_starts(learner.objectives, steps)
    check_orders(experiment, learner)

    evaluated = list(splits.evaluated().values())
    cache = plan_cache(experiment, splits.train, evaluated, train_view, steps * sampler.batch_size)
    return Components(strategy, splits, sampler, steps_per_epoch, train_view, evaluation_view, learner, cache)


def check_names(experiment: Experiment) -> None:
    """Refuse a network, a file of weights or an objective that does not exist, before the images are read.

    Args:
        experiment: Names them.

    Raises:
        UserError: There is none of that name.

    Example:
        >>> check_names(Experiment(run_dir="unused", backbone="conv4(width=8)", objectives="am_softmax + jrs"))
    """
    backbone = experiment.backbone_call()
    backbones.check(backbone.name, experiment.weights, **backbone.arguments)
    check_objectives(experiment.objectives)
