"""From settings to what a run is made of: its images, sampler, views and compiled learner."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml import backbones, data
from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import check
from tfdml.data.images import images_checksum
from tfdml.data.pipeline import hierarchical_sampler
from tfdml.data.policies import Policy, Step
from tfdml.data.sampling import ClassBalancedSampler, Sampler, ShuffleSampler, WholeClassSampler, check_divides
from tfdml.data.transforms import EvaluationTransform, TrainTransform, as_color
from tfdml.embeddings.reader import ImageTable
from tfdml.errors import UserError, short_message
from tfdml.models import AttentionEnsemble, Embedder, MetricLearner
from tfdml.training import limits
from tfdml.training.expressions import shortened
from tfdml.training.optimizers import build_optimizer
from tfdml.training.settings import DataSettings, ModelSettings, OptimizationSettings
from tfdml.training.terms import build_objectives, with_memory


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


def load_splits(settings: DataSettings, seed: int, evaluate_train: float = 0.0) -> Splits:
    """Load and check the images of a run.

    Args:
        settings: Which images.
        seed: Of the choice of the classes that are held out, or measured though they are trained on.
        evaluate_train: How many of the training images are measured; see `sample_seen_classes`.

    Raises:
        UserError: Something about the data is wrong; the message says what and where.
    """
    options = settings.data_options()
    directory = settings.data_dir or None
    train, test = (data.load(settings.dataset, directory, split, **options) for split in ("train", "test"))
    train, test = (check(split, settings.bad_images, settings.check_images) for split in (train, test))
    train, validation = split_training_classes(train, settings.holdout_classes, seed, settings.holdout_sampling)
    train = train.contiguous()
    return Splits(train, validation, test, sample_seen_classes(train, evaluate_train, seed))


def split_training_classes(
    train: ImageDataset, share: float, seed: int, sampling: str = "random"
) -> tuple[ImageDataset, ImageDataset | None]:
    """The training classes that a run trains on, and those that it holds out, if any.

    `stratified` orders the classes by their number of images, those of as many images by chance, cuts that order into
    as many groups as are held out, as equal as they can be, and draws one class of each.

    Args:
        train: The training images.
        share: The share of the classes that is held out.
        seed: Of their choice.
        sampling: `"random"` or `"stratified"`.

    Raises:
        UserError: No class would be left.
    """
    if not share:
        return train, None
    rng = np.random.default_rng(seed)
    classes = rng.permutation(train.classes)
    held_out = max(1, round(share * len(classes)))
    if held_out >= len(classes):
        raise UserError(f"--holdout_classes={share} leaves no class to train on")
    if sampling == "stratified":
        known, counts = np.unique(train.labels, return_counts=True)
        by_size = classes[np.argsort(counts[np.searchsorted(known, classes)], kind="stable")]
        drawn = [rng.choice(group) for group in np.array_split(by_size, held_out)]
        classes = np.concatenate([drawn, np.setdiff1d(classes, drawn)])
    return train.select_classes(classes[held_out:]), train.select_classes(classes[:held_out])


def sample_seen_classes(train: ImageDataset, wanted: float, seed: int) -> ImageDataset | None:
    """The training classes that the embedder is measured on: whole ones, drawn by the seed until they are enough.

    Args:
        train: The training images, with class ids 0 .. C - 1.
        wanted: How many images or, at most 1, which share of them; 0 for none.
        seed: Of the choice.
    """
    if not wanted:
        return None
    wanted = wanted * len(train) if wanted <= 1 else wanted
    classes = np.random.default_rng(seed).permutation(train.num_classes)
    images = np.cumsum(np.bincount(train.labels)[classes])
    return train.select_classes(classes[: np.searchsorted(images, wanted) + 1])


def make_sampler(settings: DataSettings, train: ImageDataset, seed: int, replicas: int = 1) -> Sampler:
    """What chooses the images of each batch.

    Args:
        settings: How batches are composed.
        train: The training images.
        seed: Of the choice.
        replicas: Among how many devices a batch is shared out.

    Raises:
        UserError: The data has too few images, classes or super-classes for it, or the replicas do not divide a batch.
    """
    sampler: Sampler
    if settings.sampling == "shuffle":
        sampler = ShuffleSampler(len(train), settings.batch_size, seed)
    elif settings.sampling == "whole_classes":
        sampler = WholeClassSampler(train.labels, settings.batch_size, seed)
    elif settings.sampling == "hierarchical":
        sampler = hierarchical_sampler(
            train,
            settings.classes_per_batch,
            settings.images_per_class,
            settings.super_classes_per_batch,
            seed,
            settings.super_class_weights,
            settings.short_classes,
            settings.short_super_classes,
        )
    else:
        sampler = ClassBalancedSampler(
            train.labels, settings.classes_per_batch, settings.images_per_class, seed, settings.short_classes
        )
    check_divides(sampler.batch_size, replicas, "replicas")
    return sampler


def make_transforms(settings: DataSettings) -> tuple[TrainTransform, EvaluationTransform]:
    """The views of the images, in training and in evaluation.

    Raises:
        UserError: The policy is not one that can be had.
    """
    resize = max(settings.resize, settings.image_size)
    color = as_color(settings.pad_color)
    steps = tuple(Step(call.name, call.arguments, share) for share, call in settings.policy_steps())
    train = TrainTransform(
        augmentation=settings.augmentation,
        resize=resize,
        image_size=settings.image_size,
        resize_mode=settings.resize_mode,
        scale=(settings.min_scale, 1.0),
        flip=settings.flip,
        resolutions=(settings.min_resolution, settings.max_resolution),
        policy=Policy(steps) if steps else None,
        pad_color=color,
    )
    return train, EvaluationTransform(resize, settings.image_size, settings.resize_mode, color)


def make_embedder(settings: ModelSettings, view: EvaluationTransform) -> Embedder:
    """The embedder, its backbone with its weights.

    Args:
        settings: The network.
        view: How it sees images in evaluation and serving.

    Raises:
        UserError: The backbone cannot be built, not be made an ensemble of, or not be adapted.
    """
    embedder = _make_embedder(settings, view)
    if settings.lora_rank:
        try:
            embedder.enable_lora(settings.lora_rank)
        except ValueError as error:
            raise UserError(f"--lora_rank={settings.lora_rank}: {error}") from error
    return embedder


def _make_embedder(settings: ModelSettings, view: EvaluationTransform) -> Embedder:
    options: dict[str, Any] = {
        "embedding_dim": settings.embedding_dim,
        "image_size": view.image_size,
        "resize": view.resize,
        "resize_mode": view.resize_mode,
        "pad_color": view.pad_color,
        "dropout": settings.dropout,
        "pooling": settings.pooling,
        "batch_norm": settings.batch_norm,
        "projection_bias": settings.projection_bias,
    }
    call = settings.backbone_call()
    backbone = backbones.resolve(call.name, view.image_size, settings.weights, **call.arguments)
    if not settings.ensemble_heads:
        try:
            return Embedder(backbone, **options)
        except ValueError as error:
            raise UserError(f"--backbone={settings.backbone}: {error}") from error
    cut = [name.strip() for name in settings.ensemble_cut.split(",") if name.strip()]
    try:
        return AttentionEnsemble(backbone, cut=cut or None, heads=settings.ensemble_heads, **options)
    except ValueError as error:
        raise UserError(f"--ensemble_cut={settings.ensemble_cut}: {error}") from error


def make_learner(
    model: ModelSettings,
    optimization: OptimizationSettings,
    view: EvaluationTransform,
    num_classes: int,
    steps_per_epoch: int,
    seed: int,
) -> MetricLearner:
    """The compiled learner of a run; call it in the strategy's scope.

    Args:
        model: The network.
        optimization: The objectives, the optimiser and the rates.
        view: How the embedder sees images in evaluation and serving.
        num_classes: How many training classes there are.
        steps_per_epoch: After how many steps an epoch ends, for the drops of the rates.
        seed: Of the weights.

    Raises:
        UserError: It cannot be built, or takes more memory than is free.
    """
    if optimization.gradient_cache and keras.backend.backend() != "tensorflow":
        raise UserError(
            f"--gradient_cache={optimization.gradient_cache} works on TensorFlow, and KERAS_BACKEND is "
            f"{keras.backend.backend()}: leave it out, or unset KERAS_BACKEND"
        )
    if model.lora_rank and optimization.backbone_rate == 0:
        raise UserError(
            f"--lora_rank={model.lora_rank} trains changes of the backbone, and with --backbone_rate=0 nothing of it "
            "trains: leave one of them out"
        )
    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(model.mixed_precision)
    try:
        with limits.weights_within_memory(optimization.optimizer, bool(optimization.ema)):
            embedder = make_embedder(model, view)
            if optimization.backbone_rate == 0:
                embedder.freeze_backbone()
            learner = _with_objectives(embedder, optimization, num_classes)
    finally:
        keras.config.set_dtype_policy("float32")
    if model.mixed_precision == "mixed_float16" and learner.statistics_variables and keras.backend.backend() == "jax":
        raise UserError(
            "--mixed_precision=mixed_float16 does not go with the two phases of rank_mi on JAX: use mixed_bfloat16"
        )
    optimizer = build_optimizer(
        optimization.optimizer,
        learner,
        optimization.rate_schedule(steps_per_epoch),
        optimization.learning_rates(),
        weight_decay=optimization.weight_decay,
        epsilon=None if optimization.epsilon == -1 else optimization.epsilon,
        momentum=optimization.momentum,
        clip_norm=optimization.clip_norm,
        form=optimization.optimizer_form,
        clip=optimization.clip,
        layer_decay=optimization.layer_decay,
        unfreeze_steps=optimization.unfreeze_steps(steps_per_epoch),
        ema=optimization.ema,
    )
    learner.compile(optimizer=optimizer, jit_compile=_compiles(model.jit_compile))
    return learner


def _compiles(setting: str) -> bool | str:
    """Whether XLA compiles the step, as Keras takes it."""
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        # Across replicas it fails to place the variables.
        if setting == "true":
            raise UserError(
                "--jit_compile=true goes with one device: leave it at auto, or train on JAX, which compiles"
            )
        return False
    return "auto" if setting == "auto" else setting == "true"


def _with_objectives(embedder: Embedder, optimization: OptimizationSettings, num_classes: int) -> MetricLearner:
    objectives = optimization.objectives
    terms = build_objectives(objectives, num_classes)
    if optimization.cross_batch_memory:
        terms = with_memory(terms, optimization.cross_batch_memory, optimization.xbm_start, objectives)
    size = embedder.image_size
    try:
        learner = MetricLearner(embedder, terms, gradient_cache=optimization.gradient_cache)
        learner.check_backend()
        learner.build((None, size, size, 3))
        _try_objectives(learner, num_classes)
    except UserError:
        raise
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise UserError(f"--objectives={shortened(objectives)!r}: {short_message(error, longest=1000)}") from error
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
            objective.value_of(objective.select(representations), objective.as_labels(labels))
