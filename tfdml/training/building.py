"""What an experiment is made of: its images, sampler, views and compiled learner."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml import backbones, data, pairwise
from tfdml.data.augmentation.evaluation import EvaluationTransform, as_color
from tfdml.data.augmentation.policies import Policy, Step
from tfdml.data.augmentation.train import TrainTransform
from tfdml.data.batches import hierarchical_sampler
from tfdml.data.checking import check
from tfdml.data.dataset import ImageDataset
from tfdml.data.images.checksum import images_checksum
from tfdml.data.sampling import ClassBalancedSampler, Sampler, ShuffleSampler, WholeClassSampler, check_divides
from tfdml.embeddings.image_table import ImageTable
from tfdml.errors import UserError
from tfdml.models import AttentionEnsemble, Embedder, MetricLearner
from tfdml.objectives import HighOrderMomentLoss
from tfdml.training import limits
from tfdml.training.experiment import Experiment
from tfdml.training.expressions import parse_call, shortened
from tfdml.training.optimizers import build_optimizer, step_schedule
from tfdml.training.terms import build_objectives


@dataclasses.dataclass(frozen=True)
class Splits:
    """The images of a run.

    Args:
        train: With class ids 0 .. C - 1.
        validation: Held-out training classes, or None.
        test: The unseen classes.
        seen: A sample of `train` that the embedder is measured on, or None.
    """

    train: ImageDataset
    validation: ImageDataset | None
    test: ImageDataset
    seen: ImageDataset | None = None

    def evaluated(self) -> dict[str, ImageDataset]:
        """The splits that the embedder is measured on, by name."""
        splits = {"validation": self.validation, "test": self.test, "seen": self.seen}
        return {name: split for name, split in splits.items() if split is not None}

    def describe(self, directory: str = "") -> dict[str, dict[str, Any]]:
        """What tells the images of a run from others: how many there are, their names and labels, and their content.

        Args:
            directory: Where the data set lies; names count from there.
        """
        return {
            name: {
                "images": len(split),
                "classes": split.num_classes,
                "names and labels": ImageTable.of([split], directory).checksum(),
                "content": images_checksum(split.images),
            }
            for name, split in ({"train": self.train} | self.evaluated()).items()
            if split is not self.seen  # a part of `train`
        }


def load_splits(experiment: Experiment) -> Splits:
    """Load and check the images of an experiment.

    Raises:
        UserError: Something about the data is wrong; the message says what and where.
    """
    options = experiment.data_options()
    directory = experiment.data_dir or None
    train, test = (data.load(experiment.dataset, directory, split, **options) for split in ("train", "test"))
    train, test = (check(split, experiment.bad_images, experiment.check_images) for split in (train, test))
    train, validation = split_training_classes(experiment, train)
    train = train.contiguous()
    return Splits(train, validation, test, sample_seen_classes(experiment, train))


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


def sample_seen_classes(experiment: Experiment, train: ImageDataset) -> ImageDataset | None:
    """The training classes that the embedder is measured on: whole ones, drawn by the seed until they are enough."""
    wanted = experiment.evaluate_train
    if not wanted:
        return None
    wanted = wanted * len(train) if wanted <= 1 else wanted
    classes = np.random.default_rng(experiment.seed).permutation(train.num_classes)
    images = np.cumsum(np.bincount(train.labels)[classes])
    return train.select_classes(classes[: np.searchsorted(images, wanted) + 1])


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
    color = as_color(experiment.pad_color)
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
        pad_color=color,
    )
    return train, EvaluationTransform(resize, experiment.image_size, experiment.resize_mode, color)


def make_embedder(experiment: Experiment) -> Embedder:
    """The embedder of an experiment, its backbone with its weights.

    Raises:
        UserError: The backbone cannot be built, or not be made an ensemble of.
    """
    options: dict[str, Any] = {
        "embedding_dim": experiment.embedding_dim,
        "image_size": experiment.image_size,
        "resize": max(experiment.resize, experiment.image_size),
        "resize_mode": experiment.resize_mode,
        "pad_color": as_color(experiment.pad_color),
        "dropout": experiment.dropout,
        "pooling": experiment.pooling,
        "batch_norm": experiment.batch_norm,
        "projection_bias": experiment.projection_bias,
    }
    call = parse_call(experiment.backbone, "--backbone")
    backbone = backbones.resolve(call.name, experiment.image_size, experiment.weights, **call.arguments)
    if not experiment.ensemble_heads:
        return Embedder(backbone, **options)
    cut = [name.strip() for name in experiment.ensemble_cut.split(",") if name.strip()]
    try:
        return AttentionEnsemble(backbone, cut=cut or None, heads=experiment.ensemble_heads, **options)
    except ValueError as error:
        raise UserError(f"--ensemble_cut={experiment.ensemble_cut}: {error}") from error


def make_learner(experiment: Experiment, num_classes: int, steps_per_epoch: int) -> MetricLearner:
    """The compiled learner of an experiment; call it in the strategy's scope.

    Raises:
        UserError: It cannot be built, would find nothing to learn from in a batch, or takes more memory than is free.
    """
    keras.utils.set_random_seed(experiment.seed)
    keras.config.set_dtype_policy(experiment.mixed_precision)
    try:
        with limits.weights_within_memory(experiment):
            embedder = make_embedder(experiment)
            if experiment.backbone_rate == 0:
                embedder.freeze_backbone()
            learner = _with_objectives(experiment, embedder, num_classes)
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = build_optimizer(
        experiment.optimizer,
        learner,
        step_schedule(experiment.learning_rate, experiment.drop_steps(steps_per_epoch), experiment.drop_factor),
        experiment.learning_rates(),
        weight_decay=experiment.weight_decay,
        epsilon=experiment.epsilon,
        momentum=experiment.momentum,
        clip_norm=experiment.clip_norm,
        form=experiment.optimizer_form,
    )
    # XLA across replicas fails to place the variables; one device decides for itself.
    mirrored = tf.distribute.get_strategy().num_replicas_in_sync > 1
    learner.compile(optimizer=optimizer, jit_compile=False if mirrored else "auto")
    return learner


def _with_objectives(experiment: Experiment, embedder: Embedder, num_classes: int) -> MetricLearner:
    terms = build_objectives(experiment.objectives, num_classes)
    limits.check_pairs(experiment, terms)
    if sum(isinstance(term, HighOrderMomentLoss) for term in terms) != 1:
        for flag, given in (
            ("moment_embedder", experiment.moment_embedder),
            ("evaluate_orders=epochs", experiment.evaluate_orders == "epochs"),
        ):
            if given:
                raise UserError(f"--{flag} needs one horde(...) in --objectives")
    try:
        learner = MetricLearner(embedder, terms)
        learner.build((None, experiment.image_size, experiment.image_size, 3))
        _try_objectives(learner, num_classes)
    except UserError:
        raise
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"--objectives={shortened(experiment.objectives)!r}: {message}") from error
    return learner


def _try_objectives(learner: MetricLearner, num_classes: int) -> None:
    """Compute every objective once, of random representations: what does not fit is found before a run begins."""
    labels = np.array([0, 0, 1, 1]) % num_classes
    size = learner.embedder.image_size
    shapes = learner.embedder.representation_shapes((len(labels), size, size, 3))
    generator = np.random.default_rng(0)
    representations = {
        name: keras.ops.convert_to_tensor(generator.random(shape, "float32")) for name, shape in shapes.items()
    }
    # The scope keeps what an objective would remember of it, such as a metric, out of the run.
    with keras.StatelessScope():
        for objective in learner.objectives:
            representations.update(objective.represent(representations, training=True))
            objective.compute(objective.select(representations), pairwise.as_labels(labels))
