"""What an experiment is made of: its images, sampler, views and compiled learner."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tfdml import data
from tfdml.data import inspection, preparing
from tfdml.data.batches import hierarchical_sampler
from tfdml.data.dataset import ImageDataset
from tfdml.data.policies import Policy, Step
from tfdml.data.sampling import ClassBalancedSampler, Sampler, ShuffleSampler, WholeClassSampler, check_divides
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import HighOrderMomentLoss
from tfdml.training.experiment import Experiment
from tfdml.training.optimizers import build_optimizer, step_schedule
from tfdml.training.terms import build_objectives


@dataclasses.dataclass(frozen=True)
class Splits:
    """The images of a run.

    Args:
        train: With class ids 0 .. C - 1.
        validation: Held-out training classes, or None.
        test: The unseen classes.
    """

    train: ImageDataset
    validation: ImageDataset | None
    test: ImageDataset


def load_splits(experiment: Experiment) -> Splits:
    """Load and check the images of an experiment.

    Raises:
        UserError: Something about the data is wrong; the message says what and where.
    """
    options = experiment.data_options()
    directory = experiment.data_dir or None
    train, test = (data.load(experiment.dataset, directory, split, **options) for split in ("train", "test"))
    find = preparing.find_faults if experiment.check_images == "decode" else inspection.inspect
    train, test = (inspection.check(split, experiment.bad_images, find) for split in (train, test))
    train, validation = split_training_classes(experiment, train)
    return Splits(train.contiguous(), validation, test)


def split_training_classes(experiment: Experiment, train: ImageDataset) -> tuple[ImageDataset, ImageDataset | None]:
    """The training classes that an experiment trains on, and those that it holds out, if any.

    Raises:
        UserError: No class would be left.
    """
    if not experiment.holdout_classes:
        return train, None
    classes = np.random.default_rng(experiment.seed).permutation(train.classes)
    held_out = max(1, round(experiment.holdout_classes * len(classes)))
    if held_out >= len(classes):
        raise UserError(f"--holdout_classes={experiment.holdout_classes} leaves no class to train on")
    return train.select_classes(classes[held_out:]), train.select_classes(classes[:held_out])


def make_sampler(experiment: Experiment, train: ImageDataset, replicas: int = 1) -> Sampler:
    """The sampler of an experiment.

    Raises:
        UserError: The data has too few images, classes or super-classes for it, or the replicas do not divide a batch.
    """
    sampler: Sampler
    if experiment.sampling == "shuffle":
        sampler = ShuffleSampler(len(train), experiment.batch_size, experiment.seed)
    elif experiment.sampling == "whole_classes":
        sampler = WholeClassSampler(train.labels, experiment.batch_size, experiment.seed)
    elif experiment.sampling == "hierarchical":
        sampler = hierarchical_sampler(
            train,
            experiment.classes_per_batch,
            experiment.images_per_class,
            experiment.super_classes_per_batch,
            experiment.seed,
            experiment.super_class_weights,
            experiment.short_classes,
            experiment.short_super_classes,
        )
    else:
        sampler = ClassBalancedSampler(
            train.labels,
            experiment.classes_per_batch,
            experiment.images_per_class,
            experiment.seed,
            experiment.short_classes,
        )
    check_divides(sampler.batch_size, replicas, "replicas")
    return sampler


def make_transforms(experiment: Experiment) -> tuple[TrainTransform, EvaluationTransform]:
    """The views of an experiment, in training and in evaluation.

    Raises:
        UserError: The policy is not one that can be had.
    """
    resize = max(experiment.resize, experiment.image_size)
    steps = tuple(Step(call.name, call.arguments, share) for share, call in experiment.policy_steps())
    train = TrainTransform(
        kind=experiment.augmentation,
        resize=resize,
        crop=experiment.image_size,
        mode=experiment.resize_mode,
        scale=(experiment.min_scale, 1.0),
        flip=experiment.flip,
        resolutions=(experiment.min_resolution, experiment.max_resolution),
        policy=Policy(steps) if steps else None,
    )
    return train, EvaluationTransform(resize=resize, crop=experiment.image_size, mode=experiment.resize_mode)


def make_learner(experiment: Experiment, num_classes: int, steps_per_epoch: int) -> MetricLearner:
    """The compiled learner of an experiment; call it in the strategy's scope."""
    keras.utils.set_random_seed(experiment.seed)
    keras.config.set_dtype_policy(experiment.mixed_precision)
    try:
        embedder = experiment.make_embedder()
        if experiment.backbone_rate == 0:
            embedder.freeze_backbone()
        learner = _with_objectives(experiment, embedder, num_classes)
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = build_optimizer(
        experiment.optimizer,
        learner,
        step_schedule(experiment.learning_rate, experiment.drop_steps(steps_per_epoch), experiment.drop_factor),
        experiment.rate_factors(),
        weight_decay=experiment.weight_decay,
        epsilon=experiment.epsilon,
        momentum=experiment.momentum,
        clip_norm=experiment.clip_norm,
    )
    # XLA across replicas fails to place the variables; one device decides for itself.
    mirrored = tf.distribute.get_strategy().num_replicas_in_sync > 1
    learner.compile(optimizer=optimizer, jit_compile=False if mirrored else "auto")
    return learner


def _with_objectives(experiment: Experiment, embedder: Embedder, num_classes: int) -> MetricLearner:
    terms = build_objectives(experiment.objectives, num_classes)
    if experiment.moment_embedder and sum(isinstance(term, HighOrderMomentLoss) for term in terms) != 1:
        raise UserError("--moment_embedder needs one horde(...) in --objectives")
    try:
        learner = MetricLearner(embedder, terms)
        learner.build((None, experiment.image_size, experiment.image_size, 3))
    except ValueError as error:
        raise UserError(f"--objectives={experiment.objectives!r}: {error}") from error
    return learner
