"""The objects that a run consists of, built and checked before anything is trained or written; its
initial weights."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import ops

from tfdml import backbones
from tfdml.arguments import integer
from tfdml.backbones.hub import PREFIX
from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.sampling import Sampler
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.embeddings.backends import load_embedder
from tfdml.errors import REASON, UserError, user_errors
from tfdml.evaluation import evaluate_pairs
from tfdml.expressions import shortened
from tfdml.io.files import local_copy
from tfdml.layers import PrincipalComponents
from tfdml.models import (
    AttentionEnsemble,
    ByteTokenizer,
    Embedder,
    Head,
    MetricLearner,
    TextEmbedder,
    byte_encoder,
)
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
    Experiment,
    ModelSettings,
)

#: Images per batch wherever images are embedded and not trained on.
EVALUATION_BATCH = 100


def check_pairs(settings: DataSettings, objectives: Sequence[Objective]) -> None:
    """Refuse batches in which a term would never find what it learns from.

    Args:
        settings: How batches are composed.
        objectives: The terms.

    Raises:
        UserError: A term needs pairs of images of one class, or of two, and no batch would hold
            one.
    """
    needed = {pair: term.name for term in objectives for pair in term.learns_from}
    classes, images = settings.classes_per_batch or MOST_CLASSES, settings.images_per_class
    if settings.sampling_call().name in ("class_balanced", "hierarchical", "neighbors"):
        flags = {
            "positive": ("images_per_class", images),
            "negative": ("classes_per_batch", classes),
        }
    else:
        flags = dict.fromkeys(("positive", "negative"), ("batch_size", settings.batch_size))
    for pair, name in needed.items():
        if flags[pair][1] == 1:
            raise UserError(
                f"--{flags[pair][0]}=1: {name} learns from {pair} pairs, and no batch would hold "
                "one"
            )


def make_embedder(
    settings: ModelSettings, view: EvaluationTransform, dimension: int = 0
) -> Embedder:
    """Return the embedder, its backbone with its weights.

    Args:
        settings: The network.
        view: How it sees images in evaluation and serving.
        dimension: D, the size of stored features, for a head of its own; 0 for images.

    Raises:
        UserError: The backbone cannot be built, not be made an ensemble of, or not be adapted; or
            the head cannot be.
    """
    head = settings.head_call()
    with user_errors(ValueError, f"--head={settings.head}: {REASON}"):
        arguments: dict[str, Any] = {"dropout": settings.dropout, **projection(settings)}
        PrincipalComponents(
            1, True, **whitening(settings)
        )  # refuses options before the images are read
        if dimension and head.name == "ensemble":
            raise UserError(
                f"--head={settings.head} has heads on a backbone, and --features have none"
            )
        if dimension:
            return Head(dimension, **arguments)
    call = settings.backbone_call()
    backbone = backbones.resolve(
        call.name, view.image_size, local_copy(settings.weights), **call.arguments
    )
    make: Callable[..., Embedder] = Embedder
    if head.name == "ensemble":
        make = functools.partial(
            AttentionEnsemble, cut=head.arguments["cut"], heads=head.arguments["heads"]
        )
    with user_errors(
        ValueError, f"--backbone={settings.backbone} --head={settings.head}: {REASON}"
    ):
        arguments |= {"pooling": settings.pooling, "batch_norm": settings.batch_norm}
        return make(backbone, **dataclasses.asdict(view), **arguments)


def make_text_embedder(settings: DataSettings, embedding_dim: int, train: ImageDataset) -> Embedder:
    """Return the embedder of texts, its backbone frozen where it has the rate 0.

    Args:
        settings: Its backbone.
        embedding_dim: The size of its embeddings, that of the images'.
        train: The images and texts.

    Raises:
        UserError: It cannot be built.
    """
    call = settings.text_call()
    options: dict[str, Any] = {"embedding_dim": embedding_dim, "name": "text_embedder"}
    if train.texts is None and train.tokens is not None:
        return Head(train.tokens.shape[1], **options)
    options["pooling"] = call.arguments["pooling"]
    with user_errors(ValueError, f"--text_backbone={settings.text_backbone}: {REASON}"):
        if call.name == "bytes":
            length, width = call.arguments["length"], call.arguments["width"]
            encoder, tokenizer = byte_encoder(length, width), ByteTokenizer(length)
            embedder = TextEmbedder(encoder, tokenizer, **options)
        else:
            preset = call.name.removeprefix(PREFIX)
            encoder, tokenizer = backbones.load_text_preset(preset, call.arguments["length"])
            options["pad_id"] = getattr(tokenizer.preprocessor.tokenizer, "pad_token_id", 0)
            embedder = TextEmbedder(
                encoder, tokenizer, truncate=call.arguments["truncate"], **options
            )
    if call.arguments["rate"] == 0:
        embedder.freeze_backbone()
    return embedder


def projection(settings: ModelSettings) -> dict[str, Any]:
    """Return the arguments of an `Embedder` that make its head."""
    head, dim = settings.head_call(), settings.embedding_dim
    if head.name != "mlp":
        return {"embedding_dim": dim, "projection_bias": head.arguments.get("bias", True)}
    hidden, size = head.arguments["hidden"], integer("embedding_dim", dim, at_least=1)
    layers = [
        keras.layers.Dense(integer("hidden", hidden, at_least=1), activation="relu"),
        keras.layers.Dense(size),
    ]
    return {"head": keras.Sequential(layers, name="projection")}


def whitening(settings: ModelSettings) -> dict[str, Any]:
    """Return the options of `Embedder.whiten` that the head names."""
    options = settings.head_call().arguments
    return {name: options[name] for name in ("power", "shrinkage") if options.get(name) is not None}


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
        train: The training images, for a head on stored features, and for their pairs, label sets
            or levels.

    Raises:
        UserError: It cannot be built, or does not fit the memory.
    """
    keras.utils.set_random_seed(experiment.seed)
    keras.config.set_dtype_policy(experiment.mixed_precision)
    too_large = (
        "the network does not fit the memory: lower --image_size or --embedding_dim, or a smaller "
        "--backbone"
    )
    with (
        user_errors((tf.errors.ResourceExhaustedError, MemoryError), too_large),
        contextlib.ExitStack() as stack,
    ):
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
        clip_norm=experiment.clip_norm,
        ema=experiment.ema,
    )
    # Across replicas XLA fails to place the variables.
    several = tf.distribute.get_strategy().num_replicas_in_sync > 1
    learner.compile(
        optimizer=optimizer,
        jit_compile=False if several else "auto",
        steps_per_execution=experiment.execution_steps(steps_per_epoch),
    )
    return learner


def _with_objectives(
    embedder: Embedder, experiment: Experiment, num_classes: int, train: ImageDataset | None
) -> MetricLearner:
    towers: Any = embedder
    if experiment.text_backbone and train is not None:
        towers = {
            "image": embedder,
            "text": make_text_embedder(experiment, embedder.embedding_dim, train),
        }
        # The numbers of the texts stand for their ids.
        numbers = train.text_numbers[:, None]
        train = train.with_tokens(lambda texts: numbers)
    objectives, relation = experiment.objectives, None if train is None else relation_of(train)
    labels = np.array([0, 0, 1, 1]) % num_classes
    if train is not None and relation is not None:
        labels = np.resize(train.targets[:4], (4, *train.targets.shape[1:]))
    terms = build_objectives(objectives, num_classes, relation, labels.size // 4)
    kinds = (ValueError, TypeError, tf.errors.InvalidArgumentError)
    with user_errors(kinds, f"--objectives={shortened(objectives)!r}: {REASON}", longest=1000):
        learner = MetricLearner(towers, terms, gradient_cache=experiment.gradient_cache)
        learner.build(learner.view_shape)
        _try_objectives(learner, labels)
    return learner


def _try_objectives(learner: MetricLearner, labels: np.ndarray) -> None:
    """Compute every objective once, of random representations: what does not fit is found before a
    run begins."""
    shapes = learner.representation_shapes(learner.view_shape)
    generator = np.random.default_rng(0)
    representations = {
        name: keras.ops.convert_to_tensor(generator.random((len(labels), *shape[1:]), "float32"))
        for name, shape in shapes.items()
    }
    # The scope keeps what an objective would remember of it, such as a metric, out of the run.
    with keras.StatelessScope():
        for objective in learner.objectives:
            representations.update(objective.represent(representations, training=True))
            representations.update(
                objective.represent_labeled(representations, labels, training=True)
            )
            objective.term(representations, labels)


def has_orders(learner: MetricLearner) -> bool:
    """Whether there is one HORDE, so that it is plain which orders of moments are meant."""
    return sum(isinstance(objective, HighOrderMomentLoss) for objective in learner.objectives) == 1


@dataclasses.dataclass(frozen=True)
class Components:
    """The objects of a run.

    Args:
        experiment: The settings.
        folder: Where the run is written, by the chief.
        processes: Who trains.
        strategy: The strategy over devices; TensorFlow's default one on a single device.
        splits: The images.
        sampler: What chooses the images of each batch.
        steps_per_epoch: Batches of an epoch.
        train_view: How images are seen in training.
        evaluation_view: How they are seen in evaluation and serving.
        learner: The compiled learner.
        cache: What of the images is kept in memory.
    """

    experiment: Experiment
    folder: RunFolder
    processes: workers.Processes
    strategy: Any
    splits: Splits
    sampler: Sampler
    steps_per_epoch: int
    train_view: TrainTransform
    evaluation_view: EvaluationTransform
    learner: MetricLearner
    cache: CachePlan


def build_components(
    experiment: Experiment, processes: workers.Processes | None = None
) -> Components:
    """Build and check the objects of a run; writes nothing.

    Args:
        experiment: The settings.
        processes: Who trains; by default this process alone.

    Raises:
        UserError: The run could not be trained or measured.

    Example:
        >>> images = {"dataset_options": "images_per_class=5, size=32", "image_size": 28,
        ...     "resize": 32}
        >>> experiment = Experiment(run_dir="unused", backbone="conv4(width=4)", batch_norm="train",
        ...     **images)
        >>> build_components(experiment).sampler.batch_size
        100
    """
    call = experiment.backbone_call()
    # Before the images are read.
    backbones.check(call.name, local_copy(experiment.weights), **call.arguments)
    check_objectives(experiment.objectives)
    train_view, evaluation_view = make_transforms(experiment)
    strategy = workers.make_strategy(
        experiment.logical_devices, processes, experiment.shard_classes
    )

    splits = load_splits(experiment, experiment.seed)
    if (
        experiment.selection == "validation"
        and splits.validation is not None
        and splits.validation.num_classes < 2
    ):
        raise UserError(
            "--selection=validation: one held-out class selects nothing; raise --holdout_classes"
        )
    metric, selected_on = experiment.selection_metric, getattr(splits, experiment.selection, None)
    if (
        selected_on is not None
        and "/" not in metric
        and not splits.searched_by_images(experiment.selection)
    ):
        raise UserError(
            f"--selection_metric={metric}: no two images are of one class; take text_to_image/map"
        )
    check_measurable(splits, experiment.recall_ks())
    if metric in PAIR_METRICS and selected_on is not None:
        pairs = selected_on.pairs
        if pairs is None or metric not in evaluate_pairs(np.eye(len(selected_on), 2), pairs):
            raise UserError(f"--selection_metric={metric}: the images have no pairs for it")
    sampler = make_sampler(experiment, splits.train, experiment.seed, strategy.num_replicas_in_sync)
    steps_per_epoch = experiment.epoch_steps(sampler.steps_per_epoch)
    steps = experiment.epochs * steps_per_epoch

    with strategy.scope():
        learner = make_learner(
            experiment, evaluation_view, splits.train.num_classes, steps_per_epoch, splits.train
        )
    if learner.towers:
        tokenize: Any = getattr(
            learner.towers["text"], "tokenize", np.asarray
        )  # stored vectors are there already
        with user_errors(UserError, f"--text_backbone={experiment.text_backbone}: {REASON}"):
            views = {
                name: dataclasses.replace(of, texts=tokenize(of.texts))
                for name, of in splits.views.items()
            }
            splits = dataclasses.replace(
                splits, train=splits.train.with_tokens(tokenize), views=views
            )
    check_pairs(experiment, learner.objectives)
    for term in learner.objectives:
        if 0 < steps <= (start := getattr(term, "start", 0)):
            raise UserError(
                f"{term.name}: its memory starts after {start:,} steps, and the run has {steps:,}"
            )
    if experiment.moment_embedder and not has_orders(learner):
        raise UserError("--moment_embedder needs one horde(...) in --objectives")
    cache = plan_cache(experiment, splits, train_view, steps * sampler.batch_size)
    run = experiment, RunFolder(experiment.run_dir), processes or workers.Processes()
    return Components(
        *run,
        strategy,
        splits,
        sampler,
        steps_per_epoch,
        train_view,
        evaluation_view,
        learner,
        cache,
    )


# Images that show how pooled features vary.
_MOST_WHITENED = 4096


def start_from(path: str, learner: MetricLearner) -> None:
    """Take over weights: the backbone's, and those of the projection and of each objective that are
    alike.

    A part is taken over if it has as many weights of the same shapes; an objective, if it has the
    same name, too. What an optimizer has gathered is left behind.

    Args:
        path: A run folder, whose newest checkpoint is taken, else its embedder; a checkpoint; or a
            .keras file.
        learner: A built learner.

    Raises:
        UserError: The file is none of those, holds weights that are not finite, or has another
            backbone.

    Example:
        >>> start_from("runs/cars_jrd", learner)
    """
    source, found = _read(Path(local_copy(path)).expanduser())
    if not all(np.isfinite(array).all() for arrays in found.values() for array in arrays):
        raise UserError(
            f"--start_from={source} holds weights that are not finite: its run had diverged"
        )
    parts = checkpoints.parts(learner)
    alike = [
        part for part, weights in parts.items() if _shapes(weights) == _shapes(found.get(part, []))
    ]
    if "backbone" not in alike:
        raise UserError(
            f"--start_from={source} has another backbone than this run: use the same --backbone"
        )
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
    """Return where weights are, and the arrays of each part."""
    if path.is_dir():
        run = RunFolder(path)
        *_, path = run.embedder, *checkpoints.list_checkpoints(run.checkpoints)
        if not path.is_file():
            raise UserError(f"--start_from={run.path} holds neither a checkpoint nor an embedder")
    with user_errors(ValueError, f"--start_from={path}: {REASON}"):
        return path, _arrays_of(path)


def _arrays_of(path: Path) -> dict[str, Sequence[np.ndarray]]:
    if path.suffix == ".npz":
        parts: dict[str, Any] = {}
        arrays, _ = checkpoints.read(path)
        for name in sorted(arrays):
            parts.setdefault(name.rpartition("/")[0], []).append(arrays[name])
        return {
            part: weights for part, weights in parts.items() if part not in checkpoints.NOT_WEIGHTS
        }
    embedder = load_embedder(path)
    if not isinstance(embedder, Embedder):
        raise UserError(
            f"--start_from={path} holds a {type(embedder).__name__}: name the run's embedder.keras"
        )
    parts = checkpoints.embedder_parts(embedder)
    return {
        part: [ops.convert_to_numpy(weight) for weight in weights]
        for part, weights in parts.items()
    }


def calibrate(
    learner: MetricLearner,
    train: ImageDataset,
    transform: EvaluationTransform,
    processes: workers.Processes,
    whiten: Mapping[str, Any] | None = None,
) -> None:
    """Start the projection of a whitened head, then calibrate the objectives, by a pass over
    training images each.

    Args:
        learner: A built learner, untrained.
        train: The training images, with class ids 0 .. C - 1.
        transform: The view in which they are measured.
        processes: Who trains: the chief measures for all.
        whiten: Options of `Embedder.whiten`, of at most 4,096 images; None for a projection as it
            is.

    Raises:
        UserError: The projection cannot be whitened.
    """
    calibrated = [o for o in learner.objectives if o.calibrates_on]
    if not calibrated and whiten is None:
        return

    def measure() -> None:
        if whiten is not None:
            _whiten(learner.embedder, train, transform, whiten)
        if calibrated:
            names = ", ".join(objective.name for objective in calibrated)
            logging.info("measuring %d training images for %s", len(train), names)
            learner.calibrate(evaluation_batches(train, transform, EVALUATION_BATCH), calibrated)

    if processes.lockstep:
        measure()
    else:
        processes.of_chief(measure)
    checkpoints.share_weights(processes, learner)


def _whiten(
    embedder: Embedder, train: ImageDataset, view: EvaluationTransform, options: Mapping[str, Any]
) -> None:
    rows = np.unique(np.linspace(0, len(train) - 1, min(len(train), _MOST_WHITENED)).astype(int))
    batches = evaluation_batches(train.take(rows), view, EVALUATION_BATCH)
    pooled, dim = (
        represent_batches(embedder, ["pooled"], batches)[0]["pooled"],
        embedder.embedding_dim,
    )
    if dim >= len(pooled) or dim > pooled.shape[1]:
        text = (
            "--head=whitened: %d pooled features of %d images are too few for %d dimensions: it "
            "starts at random"
        )
        logging.warning(text, pooled.shape[1], len(pooled), dim)
        return
    with user_errors(ValueError, f"--head=whitened: {REASON}"):
        embedder.whiten(pooled, **options)
