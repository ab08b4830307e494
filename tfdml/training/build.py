"""The objects that a run consists of, built and checked before anything is trained or written; its initial weights.

These are those of an old run, and what objectives measure on the training images.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import ops

from tfdml import backbones
from tfdml.arguments import integer
from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.sampling import Sampler
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.embeddings.backends import load_embedder
from tfdml.errors import REASON, UserError, user_errors
from tfdml.evaluation import evaluate_pairs
from tfdml.expressions import Call, shortened
from tfdml.io.files import local_copy
from tfdml.layers import PrincipalComponents
from tfdml.memory import require_memory
from tfdml.models import AttentionEnsemble, Embedder, Head, MetricLearner
from tfdml.models.inference import represent_batches
from tfdml.objectives import HighOrderMomentLoss, Objective
from tfdml.objectives.terms import build_objectives, check_objectives
from tfdml.training import checkpoints, workers
from tfdml.training.checkpoints import RunFolder
from tfdml.training.images import (
    CachePlan,
    Splits,
    check_measurable,
    load_splits,
    make_sampler,
    make_transforms,
    plan_cache,
    relation_of,
)
from tfdml.training.optimizers import build_optimizer
from tfdml.training.settings import (
    MOST_CLASSES,
    PAIR_METRICS,
    DataSettings,
    EvaluationSettings,
    Experiment,
    ModelSettings,
    OptimizationSettings,
)

_FLOAT32 = 4


def check_pairs(settings: DataSettings, objectives: Sequence[Objective]) -> None:
    """Refuse batches in which a term would never find what it learns from.

    Args:
        settings: How batches are composed.
        objectives: The terms.

    Raises:
        UserError: A term needs pairs of images of one class, or of two, and no batch would hold one.
    """
    needed = {pair: term.name for term in objectives for pair in term.learns_from}
    classes, images = settings.classes_per_batch or MOST_CLASSES, settings.images_per_class
    by_class = settings.sampling in ("class_balanced", "hierarchical", "neighbors")
    one = f"--classes_per_batch={classes} --images_per_class={images}" if by_class else "--batch_size=1"
    if needed and (classes * images if by_class else settings.batch_size) == 1:
        name = next(iter(needed.values()))
        raise UserError(f"{one}: {name} learns from pairs of images, and no batch would hold one")
    for pair, flag, count, of in (
        ("positive", "images_per_class", images, "one class"),
        ("negative", "classes_per_batch", classes, "different classes"),
    ):
        if by_class and pair in needed and count == 1:
            raise UserError(f"--{flag}=1: {needed[pair]} learns from pairs of images of {of}; use 2 or more")


def check_starts(objectives: Sequence[Objective], steps: int) -> None:
    """Refuse a memory that would be empty to the end of the run.

    Args:
        objectives: The terms.
        steps: How many steps the run has.

    Raises:
        UserError: A term's memory starts after them.
    """
    for term in objectives:
        start = getattr(term, "start", 0)
        if 0 < steps <= start:
            raise UserError(f"{term.name}: its memory starts after {start:,} steps, and the run has {steps:,}")


def step_memory(embedder: Embedder, view: TrainTransform, batch_size: int, chunk: int = 0) -> float:
    """Bytes that a training step takes at least, besides the weights: the images, and what the backbone keeps.

    Counted are the outputs of the layers with weights, which their neighbors' gradients need; of a backbone that does
    not train, the largest output and its input.

    Args:
        embedder: The built embedder.
        view: The view of training.
        batch_size: Images per step.
        chunk: How many of them the backbone sees at a time; 0 for all.
    """
    outputs = [_size(layer) for layer in embedder.backbone.layers if layer.weights]
    kept = sum(outputs) if embedder.backbone.trainable else 2 * max(outputs, default=0)
    width = _FLOAT32 if embedder.compute_dtype == "float32" else 2
    floats = 3 * view.image_size**2 * _FLOAT32
    return images_memory(view, batch_size) + min(batch_size, chunk or batch_size) * (floats + kept * width)


def images_memory(view: TrainTransform, batch_size: int) -> float:
    """Bytes that the images of a step take at least in the host's memory: the batch, and one that is being resized.

    Args:
        view: The view of training.
        batch_size: Images per step.
    """
    side: float = view.resize
    if view.augmentation == "multi_resolution":
        side = max(side, view.resolutions[1] * view.image_size)
    return _FLOAT32 * 3 * side**2 + batch_size * 3 * view.image_size**2


def check_memory(embedder: Embedder, view: TrainTransform, batch_size: int, chunk: int = 0) -> None:
    """Refuse a run whose steps need more memory than is free; a GPU raises an error itself.

    Args:
        embedder: The built embedder.
        view: The view of training.
        batch_size: Images per step.
        chunk: How many of them the backbone sees at a time; 0 for all.

    Raises:
        UserError: It does not fit.
    """
    what = f"a step on {batch_size:,} images of --image_size={view.image_size}"
    advice = "lower --image_size, --resize or the batch"
    if workers.on_gpu():
        require_memory(images_memory(view, batch_size), what, advice)
    else:
        advice += ", choose a smaller --backbone, or add --gradient_cache"
        require_memory(step_memory(embedder, view, batch_size, chunk), what, advice)


def _size(layer: keras.layers.Layer) -> int:
    """Numbers in a layer's output for one image; 0 for a layer that stands in several places."""
    try:
        shapes = [tensor.shape[1:] for tensor in keras.tree.flatten(layer.output)]
    except (AttributeError, ValueError):
        return 0
    return sum(math.prod(shape) for shape in shapes if None not in shape)


def make_embedder(settings: ModelSettings, view: EvaluationTransform, dimension: int = 0) -> Embedder:
    """Return the embedder, its backbone with its weights.

    Args:
        settings: The network.
        view: How it sees images in evaluation and serving.
        dimension: D, the size of stored features, for a head of its own; 0 for images.

    Raises:
        UserError: The backbone cannot be built, not be made an ensemble of, or not be adapted; or the head cannot be.
    """
    head = settings.head_call()
    with user_errors(ValueError, f"--head={settings.head}: {REASON}"):
        given: dict[str, Any] = {"dropout": settings.dropout, "projection_bias": settings.projection_bias}
        given |= _projection(head, settings.embedding_dim)
        if head.name == "whitened":
            PrincipalComponents(1, True, **head.arguments)  # refuses options before the images are read
        if dimension:
            return Head(dimension, **given)
    call = settings.backbone_call()
    backbone = backbones.resolve(call.name, view.image_size, settings.weights, **call.arguments)
    cut = [name.strip() for name in settings.ensemble_cut.split(",") if name.strip()]
    heads = settings.ensemble_heads
    make = functools.partial(AttentionEnsemble, cut=cut or None, heads=heads) if heads else Embedder
    flag = f"--ensemble_cut={settings.ensemble_cut}" if heads else f"--backbone={settings.backbone}"
    with user_errors(ValueError, f"{flag}: {REASON}"):
        given |= {"pooling": settings.pooling, "batch_norm": settings.batch_norm}
        embedder = make(backbone, **dataclasses.asdict(view), **given)
    if settings.lora_rank:
        with user_errors(ValueError, f"--lora_rank={settings.lora_rank}: {REASON}"):
            embedder.enable_lora(settings.lora_rank)
    return embedder


def _projection(head: Call, dim: int) -> dict[str, Any]:
    """Return the arguments of an `Embedder` that make its head."""
    if head.name != "mlp":
        return {"embedding_dim": dim}
    if not dim:
        raise ValueError("it needs an --embedding_dim")
    hidden = keras.layers.Dense(integer("hidden", head.arguments.get("hidden", 512), at_least=1), activation="relu")
    return {"head": keras.Sequential([hidden, keras.layers.Dense(dim)], name="projection")}


def make_learner(
    experiment: Experiment,
    view: EvaluationTransform,
    num_classes: int,
    steps_per_epoch: int,
    train: ImageDataset | None = None,
) -> MetricLearner:
    """Return the compiled learner of a run; call it in the strategy's scope.

    Args:
        experiment: The network, the objectives, the optimizer and the rates.
        view: How the embedder sees images in evaluation and serving.
        num_classes: How many training classes there are.
        steps_per_epoch: After how many steps an epoch ends, for the drops of the rates.
        train: The training images, for a head on stored features, and for their pairs, label sets or levels.

    Raises:
        UserError: It cannot be built, or takes more memory than is free.
    """
    if experiment.gradient_cache and keras.backend.backend() != "tensorflow":
        raise UserError(f"--gradient_cache works on TensorFlow, and KERAS_BACKEND is {keras.backend.backend()}")
    if experiment.lora_rank and experiment.backbone_rate == 0:
        raise UserError(f"--lora_rank={experiment.lora_rank} trains the backbone, and --backbone_rate=0 nothing of it")
    keras.utils.set_random_seed(experiment.seed)
    keras.config.set_dtype_policy(experiment.mixed_precision)
    too_large = "the network does not fit the device's memory: lower --embedding_dim and the like"
    with user_errors(tf.errors.ResourceExhaustedError, too_large), contextlib.ExitStack() as stack:
        stack.callback(keras.config.set_dtype_policy, "float32")
        stored = train.images.pixels().shape[1] if experiment.features and train is not None else 0
        embedder = make_embedder(experiment, view, stored)
        if experiment.backbone_rate == 0:
            embedder.freeze_backbone()
        learner = _with_objectives(embedder, experiment, num_classes, train)
    optimizer = build_optimizer(
        experiment.optimizer,
        learner,
        experiment.rate_schedule(steps_per_epoch),
        experiment.learning_rates(),
        weight_decay=experiment.weight_decay,
        epsilon=None if experiment.epsilon == -1 else experiment.epsilon,
        momentum=experiment.momentum,
        clip_norm=experiment.clip_norm,
        form=experiment.optimizer_form,
        layer_decay=experiment.layer_decay,
        ema=experiment.ema,
    )
    learner.compile(optimizer=optimizer, jit_compile=_compiles(experiment.jit_compile))
    return learner


def _compiles(setting: str) -> bool | str:
    """Whether XLA compiles the step, as Keras takes it."""
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        # Across replicas it fails to place the variables.
        if setting == "true":
            raise UserError("--jit_compile=true goes with one device: leave it at auto")
        return False
    return "auto" if setting == "auto" else setting == "true"


def _with_objectives(
    embedder: Embedder, optimization: OptimizationSettings, num_classes: int, train: ImageDataset | None
) -> MetricLearner:
    objectives, relation = optimization.objectives, None if train is None else relation_of(train)
    labels = np.array([0, 0, 1, 1]) % num_classes
    if train is not None and relation is not None:
        labels = np.resize(train.targets[:4], (4, *train.targets.shape[1:]))
    terms = build_objectives(objectives, num_classes, relation, labels.size // 4)
    kinds = (ValueError, TypeError, tf.errors.InvalidArgumentError)
    with user_errors(kinds, f"--objectives={shortened(objectives)!r}: {REASON}", longest=1000):
        learner = MetricLearner(embedder, terms, gradient_cache=optimization.gradient_cache)
        learner.build((None, *embedder.view_shape))
        _try_objectives(learner, labels)
    return learner


def _try_objectives(learner: MetricLearner, labels: np.ndarray) -> None:
    """Compute every objective once, of random representations: what does not fit is found before a run begins."""
    shapes = learner.embedder.representation_shapes((len(labels), *learner.embedder.view_shape))
    what = f"a step on {len(labels)} images of --image_size={learner.embedder.image_size}"
    require_memory(
        _FLOAT32 * sum(map(math.prod, shapes.values())), what, "lower --image_size, or choose a smaller --backbone"
    )
    generator = np.random.default_rng(0)
    representations = {
        name: keras.ops.convert_to_tensor(generator.random(shape, "float32")) for name, shape in shapes.items()
    }
    # The scope keeps what an objective would remember of it, such as a metric, out of the run.
    with keras.StatelessScope():
        for objective in learner.objectives:
            representations.update(objective.represent(representations, training=True))
            objective.term(representations, labels)


def has_orders(learner: MetricLearner) -> bool:
    """Whether there is one HORDE, so that it is plain which orders of moments are meant."""
    return sum(isinstance(objective, HighOrderMomentLoss) for objective in learner.objectives) == 1


def check_orders(settings: EvaluationSettings, learner: MetricLearner) -> None:
    """Refuse settings that ask for orders of moments where there are none.

    Args:
        settings: What is to be measured and written.
        learner: The learner.

    Raises:
        UserError: There is not one HORDE among its objectives.
    """
    orders = settings.evaluate_orders == "epochs"
    for flag, given in {"moment_embedder": settings.moment_embedder, "evaluate_orders=epochs": orders}.items():
        if given and not has_orders(learner):
            raise UserError(f"--{flag} needs one horde(...) in --objectives")


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


def build_components(experiment: Experiment, processes: workers.Processes | None = None) -> Components:
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
    strategy = workers.make_strategy(experiment.logical_devices, processes)

    splits = load_splits(experiment, experiment.seed, experiment.evaluate_train)
    if experiment.selection == "validation" and splits.validation is not None and splits.validation.num_classes < 2:
        raise UserError("--selection=validation: one held-out class selects nothing; raise --holdout_classes")
    check_measurable(splits, experiment.recall_ks())
    selected_on = getattr(splits, experiment.selection, None)
    if experiment.selection_metric in PAIR_METRICS and selected_on is not None:
        pairs = selected_on.pairs
        if pairs is None or experiment.selection_metric not in evaluate_pairs(np.eye(len(selected_on), 2), pairs):
            raise UserError(f"--selection_metric={experiment.selection_metric}: the images have no pairs for it")
    sampler = make_sampler(experiment, splits.train, experiment.seed, strategy.num_replicas_in_sync)
    steps_per_epoch = experiment.epoch_steps(sampler.steps_per_epoch)
    steps = experiment.epochs * steps_per_epoch

    with strategy.scope():
        learner = make_learner(experiment, evaluation_view, splits.train.num_classes, steps_per_epoch, splits.train)
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


# Images that show how pooled features vary.
_MOST_WHITENED = 4096


def start_from(path: str, learner: MetricLearner) -> None:
    """Take over weights: the backbone's, and those of the projection and of each objective that are alike.

    A part is taken over if it has as many weights of the same shapes; an objective, if it has the same name, too. What
    an optimizer has gathered is left behind.

    Args:
        path: A run folder, whose newest checkpoint is taken, else its embedder; a checkpoint; or a .keras file.
        learner: A built learner.

    Raises:
        UserError: The file is none of those, holds weights that are not finite, or has another backbone.

    Example:
        >>> start_from("runs/cars_jrd", learner)
    """
    source, found = _read(Path(local_copy(path)).expanduser())
    if not all(np.isfinite(array).all() for arrays in found.values() for array in arrays):
        raise UserError(f"--start_from={source} holds weights that are not finite: its run had diverged")
    parts = checkpoints.parts(learner)
    alike = [part for part, weights in parts.items() if _shapes(weights) == _shapes(found.get(part, []))]
    if "backbone" not in alike:
        raise UserError(f"--start_from={source} has another backbone than this run: use the same --backbone")
    for part in alike:
        for weight, array in zip(parts[part], found.get(part, []), strict=True):
            workers.assign_here(weight, array)
    for objective in learner.objectives:
        objective.forget()  # of the images of the old run
    taken = [part for part in alike if parts[part]]
    fresh = "".join(f", {part} as new" for part in parts if part not in alike)
    logging.info("starting from %s: %s taken over%s", source, ", ".join(taken), fresh)


def check_start(path: str) -> None:
    """Refuse a `--start_from` that is not there, before the images are read.

    Raises:
        UserError: There is no such file or folder.
    """
    if path and not Path(local_copy(path)).expanduser().exists():
        raise UserError(f"--start_from={path}: there is no such file or folder")


def _shapes(arrays: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(array.shape) for array in arrays]


def _read(path: Path) -> tuple[Path, dict[str, Sequence[np.ndarray]]]:
    """Where weights were found, and the arrays of each part."""
    if path.is_dir():
        return _of_run(RunFolder(path))
    if path.suffix == ".npz":
        with user_errors(ValueError, f"--start_from={path}: {REASON}"):
            return path, _of_checkpoint(path)
    return path, _of_embedder(path)


def _of_run(run: RunFolder) -> tuple[Path, dict[str, Sequence[np.ndarray]]]:
    for path in reversed(checkpoints.list_checkpoints(run.checkpoints)):
        try:
            return path, _of_checkpoint(path)
        except ValueError as error:
            logging.warning("%s; trying the one before", error)
    if run.embedder.is_file():
        return run.embedder, _of_embedder(run.embedder)
    raise UserError(f"--start_from={run.path} holds neither a checkpoint nor an embedder")


def _of_checkpoint(path: Path) -> dict[str, Sequence[np.ndarray]]:
    arrays, _ = checkpoints.read(path)
    found: dict[str, list[np.ndarray]] = {}
    for name in sorted(arrays):
        found.setdefault(name.rpartition("/")[0], []).append(arrays[name])
    return {part: members for part, members in found.items() if part not in checkpoints.NOT_WEIGHTS}


def _of_embedder(path: Path) -> dict[str, Sequence[np.ndarray]]:
    embedder = load_embedder(path)
    if not isinstance(embedder, Embedder):
        raise UserError(f"--start_from={path} holds a {type(embedder).__name__}: name the run's embedder.keras")
    parts = checkpoints.embedder_parts(embedder)
    return {part: [ops.convert_to_numpy(weight) for weight in weights] for part, weights in parts.items()}


def calibrate(
    learner: MetricLearner,
    train: ImageDataset,
    transform: EvaluationTransform,
    batch_size: int,
    processes: workers.Processes | None = None,
    whitening: Mapping[str, Any] | None = None,
) -> None:
    """Start the projection of a whitened head, then calibrate the objectives, by a pass over training images each.

    Args:
        learner: A built learner, untrained.
        train: The training images, with class ids 0 .. C - 1.
        transform: The view in which they are measured.
        batch_size: Images per batch.
        processes: Who trains: the chief measures for all.
        whitening: Options of `Embedder.whiten`, of at most 4,096 images; None for a projection as it is.

    Raises:
        UserError: The projection cannot be whitened.
    """
    calibrated = [o for o in learner.objectives if o.calibrates_on]
    if not calibrated and whitening is None:
        return
    processes = processes or workers.Processes()

    def measure() -> None:
        if whitening is not None:
            _whiten(learner.embedder, train, transform, batch_size, whitening)
        if not calibrated:
            return
        wanted = ", ".join(sorted({str(objective.calibrates_on) for objective in calibrated}))
        names = ", ".join(objective.name for objective in calibrated)
        logging.info("measuring %s of %d training images for %s", wanted, len(train), names)
        learner.calibrate(evaluation_batches(train, transform, batch_size), calibrated)

    if processes.lockstep:
        measure()
    else:
        processes.of_chief(measure)
    checkpoints.share_weights(processes, learner)


def _whiten(embedder: Embedder, train: ImageDataset, transform: EvaluationTransform, size: int, options: Any) -> None:
    rows = np.unique(np.linspace(0, len(train) - 1, min(len(train), _MOST_WHITENED)).astype(int))
    features, _ = represent_batches(embedder, ["pooled"], evaluation_batches(train.take(rows), transform, size))
    pooled, dim = features["pooled"], embedder.embedding_dim
    if dim >= len(pooled) or dim > pooled.shape[1]:
        of = f"{pooled.shape[1]} pooled features of {len(pooled)} images"
        logging.warning(
            "--head=whitened: %s are too few for %d dimensions, so the projection starts at random", of, dim
        )
        return
    with user_errors(ValueError, f"--head=whitened: {REASON}"):
        embedder.whiten(pooled, **options)
