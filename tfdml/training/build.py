"""The objects that a run consists of, built and checked before anything is trained or written; its
initial weights."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import ops

from tfdml import backbones
from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.sampling import Sampler
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.embeddings.backends import load_embedder
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.evaluation import evaluate_pairs
from tfdml.expressions import shortened
from tfdml.io.files import local_copy
from tfdml.models import (
    AttentionEnsemble,
    ByteTokenizer,
    Embedder,
    MetricLearner,
    TextEmbedder,
    byte_encoder,
)
from tfdml.models import Head as ModelHead
from tfdml.models.inference import represent_batches
from tfdml.objectives import HighOrderMomentLoss, Objective
from tfdml.objectives.terms import build_objectives, check_objectives
from tfdml.run_folder import RunFolder, list_checkpoints
from tfdml.training import checkpoints, workers
from tfdml.training.choices import (
    MLP,
    Bytes,
    Ensemble,
    Head,
    Hub,
    Linear,
    TextBackbone,
    Whitened,
)
from tfdml.training.optimizers import build_optimizer, rate_schedule
from tfdml.training.run_data import (
    CachePlan,
    Splits,
    check_measurable,
    load_splits,
    make_sampler,
    make_transforms,
    plan_cache,
)
from tfdml.training.settings import (
    MOST_CLASSES,
    PAIR_METRICS,
    DataSettings,
    Experiment,
    ModelSettings,
    OptimizationSettings,
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
    needed: dict[str, Any] = {}
    for term in objectives:
        needed.update(dict.fromkeys(term.learns_from, term.name))
    classes, images = settings.classes_per_batch or MOST_CLASSES, settings.images_per_class
    if settings.sampling.by_class:
        flags = {
            "positive": ("images_per_class", images),
            "negative": ("classes_per_batch", classes),
        }
    else:
        flags = dict.fromkeys(("positive", "negative"), ("batch_size", settings.batch_size))
    for pair, name in needed.items():
        flag, count = flags[pair]
        if count == 1:
            raise UserError(
                f"{name} learns from {pair} pairs, and no batch would hold one", **{flag: 1}
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
    head = settings.head
    arguments = {"dropout": settings.dropout, **projection(head, settings.embedding_dim)}
    with user_errors(ValueError, ERROR_TEXT, head=str(head)):
        if dimension and isinstance(head, Ensemble):
            raise UserError("has heads on a backbone, and features have none")
        if dimension:
            return ModelHead(dimension, **arguments)
    name, options = settings.backbone.name, settings.backbone.arguments
    backbone = backbones.resolve(name, view.image_size, local_copy(settings.weights), **options)
    make = AttentionEnsemble if isinstance(head, Ensemble) else Embedder
    arguments["pooling"] = settings.pooling
    arguments["batch_norm"] = settings.batch_norm
    with user_errors(ValueError, ERROR_TEXT, backbone=str(settings.backbone), head=str(head)):
        return make(backbone, **dataclasses.asdict(view), **arguments)


@functools.singledispatch
def projection(head: Head, embedding_dim: int) -> dict[str, Any]:
    """Return the arguments of an `Embedder` that make its head; registered by the choice of it.

    Args:
        head: The choice.
        embedding_dim: The size of the embedding; 0: that of the pooled features.

    Raises:
        UserError: The head cannot be made.
    """
    raise UserError("nothing is registered to make it", head=head.name)


@projection.register
def _(head: Linear, embedding_dim: int):
    return {"embedding_dim": embedding_dim, "projection_bias": head.bias}


@projection.register
def _(head: Whitened, embedding_dim: int):
    return {"embedding_dim": embedding_dim, "projection_bias": True}


@projection.register
def _(head: Ensemble, embedding_dim: int):
    return {
        "embedding_dim": embedding_dim,
        "projection_bias": head.bias,
        "heads": head.heads,
        "cut": head.cut,
    }


@projection.register
def _(head: MLP, embedding_dim: int):
    if not embedding_dim:
        raise UserError("must be positive with head=mlp", embedding_dim=0)
    layers = [
        keras.layers.Dense(head.hidden, activation="relu"),
        keras.layers.Dense(embedding_dim),
    ]
    return {"head": keras.Sequential(layers, name="projection")}


def whitening(head: Head) -> dict[str, float]:
    """Return the options of `Embedder.whiten` that a head names."""
    options = {"power": getattr(head, "power", None), "shrinkage": getattr(head, "shrinkage", None)}
    return {name: value for name, value in options.items() if value is not None}


def make_text_embedder(backbone: TextBackbone, embedding_dim: int, train: ImageDataset) -> Embedder:
    """Return the embedder of texts, its backbone frozen where it has the rate 0.

    Args:
        backbone: What reads texts.
        embedding_dim: The size of its embeddings, that of the images'.
        train: The images and texts.

    Raises:
        UserError: It cannot be built.
    """
    if train.texts is None and train.tokens is not None:
        return ModelHead(train.tokens.shape[1], embedding_dim=embedding_dim, name="text_embedder")
    with user_errors(ValueError, ERROR_TEXT, text_backbone=str(backbone)):
        embedder = build_text_embedder(backbone, embedding_dim)
    if getattr(backbone, "rate", -1) == 0:
        embedder.freeze_backbone()
    return embedder


@functools.singledispatch
def build_text_embedder(backbone: TextBackbone, embedding_dim: int) -> TextEmbedder:
    """Return the embedder of texts, named `text_embedder`; registered by the choice of its
    backbone.

    Args:
        backbone: The choice.
        embedding_dim: The size of its embeddings.

    Raises:
        ValueError: It cannot be built.
    """
    raise UserError("nothing is registered to make it of texts")


@build_text_embedder.register
def _(backbone: Bytes, embedding_dim: int):
    return TextEmbedder(
        byte_encoder(backbone.length, backbone.width),
        ByteTokenizer(backbone.length),
        embedding_dim=embedding_dim,
        pooling=backbone.pooling,
        name="text_embedder",
    )


@build_text_embedder.register
def _(backbone: Hub, embedding_dim: int):
    encoder, tokenizer = backbones.load_text_preset(backbone.preset, backbone.length)
    return TextEmbedder(
        encoder,
        tokenizer,
        embedding_dim=embedding_dim,
        pooling=backbone.pooling,
        pad_id=getattr(tokenizer.preprocessor.tokenizer, "pad_token_id", 0),
        truncate=backbone.truncate,
        name="text_embedder",
    )


def make_learner(
    model: ModelSettings,
    optimization: OptimizationSettings,
    view: EvaluationTransform,
    num_classes: int,
    steps_per_epoch: int,
    train: ImageDataset | None = None,
    text_backbone: TextBackbone | None = None,
    seed: int = 0,
) -> MetricLearner:
    """Return the compiled learner of a run; call it in the strategy's scope.

    Args:
        model: The network.
        optimization: The objectives, the optimizer and the rates.
        view: How the embedder sees images in evaluation and serving.
        num_classes: How many training classes there are.
        steps_per_epoch: After how many steps an epoch ends, for the drops of the rates.
        train: The training images, for a head on stored features, and for their pairs, label sets
            or levels.
        text_backbone: What reads the texts of `train`, where there is an embedder of them.
        seed: Of the initial weights.

    Raises:
        UserError: It cannot be built, or does not fit the memory.
    """
    keras.utils.set_random_seed(seed)
    learner = _uncompiled_learner(model, optimization, view, num_classes, train, text_backbone)
    # Across replicas XLA fails to place the variables.
    several = tf.distribute.get_strategy().num_replicas_in_sync > 1
    learner.compile(
        optimizer=_optimizer(optimization, learner, steps_per_epoch, text_backbone),
        jit_compile=False if several else "auto",
        steps_per_execution=optimization.execution_steps(steps_per_epoch),
    )
    return learner


def _uncompiled_learner(
    model: ModelSettings,
    optimization: OptimizationSettings,
    view: EvaluationTransform,
    num_classes: int,
    train: ImageDataset | None,
    text_backbone: TextBackbone | None,
) -> MetricLearner:
    keras.config.set_dtype_policy(model.mixed_precision)
    too_large = (
        "the network does not fit the memory: lower --image_size or --embedding_dim, or a smaller "
        "--backbone"
    )
    with (
        user_errors((tf.errors.ResourceExhaustedError, MemoryError), too_large),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(keras.config.set_dtype_policy, "float32")
        embedder = make_embedder(model, view, 0 if train is None else train.dimension)
        if optimization.backbone_rate == 0:
            embedder.freeze_backbone()
        towers: Any = embedder
        if text_backbone is not None and train is not None:
            text_embedder = make_text_embedder(text_backbone, embedder.embedding_dim, train)
            towers = {"image": embedder, "text": text_embedder}
        return _with_objectives(towers, optimization, num_classes, train)


def _optimizer(
    settings: OptimizationSettings,
    learner: MetricLearner,
    steps_per_epoch: int,
    text_backbone: TextBackbone | None,
) -> keras.optimizers.Optimizer:
    drop_steps = [epoch * steps_per_epoch for epoch in settings.drop_epochs]
    schedule = rate_schedule(
        settings.schedule,
        settings.learning_rate,
        settings.epochs * steps_per_epoch,
        round(settings.warm_up_epochs * steps_per_epoch),
        drop_steps,
        settings.drop_factor,
    )
    rates = settings.learning_rates(text_backbone)
    epsilon = None if settings.epsilon == -1 else settings.epsilon
    return build_optimizer(
        settings.optimizer,
        learner,
        schedule,
        rates,
        weight_decay=settings.weight_decay,
        epsilon=epsilon,
        clip_norm=settings.clip_norm,
        ema=settings.ema,
    )


def _with_objectives(
    towers: Embedder | dict[str, Embedder],
    optimization: OptimizationSettings,
    num_classes: int,
    train: ImageDataset | None,
) -> MetricLearner:
    if isinstance(towers, dict) and train is not None:
        # The numbers of the texts stand for their ids.
        numbers = train.text_numbers[:, None]
        train = train.with_tokens(lambda texts: numbers)
    objectives = optimization.objectives
    relation = None if train is None else train.relation
    labels = np.array([0, 0, 1, 1]) % num_classes
    if train is not None and relation is not None:
        labels = np.resize(train.targets[:4], (4, *train.targets.shape[1:]))
    terms = build_objectives(objectives, num_classes, relation, labels.size // 4)
    kinds = (ValueError, TypeError, tf.errors.InvalidArgumentError)
    text = shortened(str(objectives))
    with user_errors(kinds, ERROR_TEXT, longest=1000, objectives=text):
        learner = MetricLearner(towers, terms, gradient_cache=optimization.gradient_cache)
        learner.build(learner.view_shape)
        _try_objectives(learner, labels)
    return learner


def _try_objectives(learner: MetricLearner, labels: np.ndarray) -> None:
    """Compute every objective once, of random representations: what does not fit is found before a
    run begins."""
    shapes = learner.representation_shapes(learner.view_shape)
    generator = np.random.default_rng(0)
    representations = {}
    for name, shape in shapes.items():
        values = generator.random((len(labels), *shape[1:]), "float32")
        representations[name] = ops.convert_to_tensor(values)
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


def check_selection(selection: str, metric: str, splits: Splits) -> None:
    """Refuse a selection of the epoch that the images cannot make.

    Args:
        selection: On which split: `validation`, `test`, or none of them.
        metric: By which metric.
        splits: The images.

    Raises:
        UserError: The split has one class, or nothing that the metric measures.
    """
    images = getattr(splits, selection, None)
    if images is None:
        return
    if selection == "validation" and images.num_classes < 2:
        raise UserError(
            "one held-out class selects nothing; raise holdout_classes", selection=selection
        )
    if "/" not in metric and not splits.searched_by_images(selection):
        raise UserError(
            "no two images are of one class; take text_to_image/map", selection_metric=metric
        )
    if metric in PAIR_METRICS:
        pairs = images.pairs
        if pairs is None or metric not in evaluate_pairs(np.eye(len(images), 2), pairs):
            raise UserError("the images have no pairs for it", selection_metric=metric)


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
    data, model = experiment.part(DataSettings), experiment.part(ModelSettings)
    optimization = experiment.part(OptimizationSettings)
    # Before the images are read.
    backbones.check(model.backbone.name, local_copy(model.weights), **model.backbone.arguments)
    check_objectives(optimization.objectives)
    train_view, evaluation_view = make_transforms(data)
    strategy = workers.make_strategy(
        experiment.logical_devices, processes, experiment.shard_classes
    )

    splits = load_splits(data, experiment.seed)
    check_selection(experiment.selection, experiment.selection_metric, splits)
    check_measurable(splits, experiment.ks)
    sampler = make_sampler(data, splits.train, experiment.seed, strategy.num_replicas_in_sync)
    steps_per_epoch = optimization.epoch_steps(sampler.steps_per_epoch, sampler.batch_size)
    steps = optimization.epochs * steps_per_epoch

    with strategy.scope():
        learner = make_learner(
            model,
            optimization,
            evaluation_view,
            splits.train.num_classes,
            steps_per_epoch,
            splits.train,
            data.text_backbone,
            experiment.seed,
        )
    if learner.towers:
        with user_errors(UserError, ERROR_TEXT, text_backbone=str(data.text_backbone)):
            splits = _with_tokens(splits, learner)
    check_pairs(data, learner.objectives)
    _check_starts(learner, steps)
    if experiment.moment_embedder and not has_orders(learner):
        raise UserError("needs one horde(...) in objectives", moment_embedder=True)
    cache = plan_cache(data, splits, train_view, steps * sampler.batch_size)
    folder = RunFolder(experiment.run_dir)
    return Components(
        experiment,
        folder,
        processes or workers.Processes(),
        strategy,
        splits,
        sampler,
        steps_per_epoch,
        train_view,
        evaluation_view,
        learner,
        cache,
    )


def _with_tokens(splits: Splits, learner: MetricLearner) -> Splits:
    """Return splits whose texts are what the learner's embedder of texts reads."""
    # Stored vectors are there already.
    tokenize: Any = getattr(learner.towers["text"], "tokenize", np.asarray)
    views = {}
    for name, items in splits.views.items():
        views[name] = dataclasses.replace(items, texts=tokenize(items.texts))
    return dataclasses.replace(splits, train=splits.train.with_tokens(tokenize), views=views)


def _check_starts(learner: MetricLearner, steps: int) -> None:
    """Refuse a memory that starts after the last step."""
    for term in learner.objectives:
        start = getattr(term, "start", 0)
        if 0 < steps <= start:
            raise UserError(
                f"{term.name}: its memory starts after {start:,} steps, and the run has {steps:,}"
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
    source, stored = _read(Path(local_copy(path)).expanduser())
    for arrays in stored.values():
        if not all(np.isfinite(array).all() for array in arrays):
            raise UserError(
                "holds weights that are not finite: its run had diverged", start_from=source
            )
    parts = checkpoints.parts(learner)
    alike = []
    for part, weights in parts.items():
        if _shapes(weights) == _shapes(stored.get(part, [])):
            alike.append(part)
    if "backbone" not in alike:
        raise UserError(
            "has another backbone than this run: use the same backbone", start_from=source
        )
    for part in alike:
        for weight, array in zip(parts[part], stored.get(part, []), strict=True):
            workers.assign_here(weight, array)
    for objective in learner.objectives:
        objective.forget()  # of the images of the old run
    copied = [part for part in alike if parts[part]]
    fresh = "".join(f", {part} as new" for part in parts if part not in alike)
    logging.info("starting from %s: %s taken over%s", source, ", ".join(copied), fresh)


def check_start(path: str) -> None:
    """Refuse a `--start_from` that is not there, before the images are read.

    Raises:
        UserError: There is no such file or folder.
    """
    if path and not Path(local_copy(path)).expanduser().exists():
        raise UserError("there is no such file or folder", start_from=path)


def _shapes(arrays: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(array.shape) for array in arrays]


def _read(path: Path) -> tuple[Path, dict[str, Sequence[np.ndarray]]]:
    """Return where weights are, and the arrays of each part."""
    if path.is_dir():
        run = RunFolder(path)
        *_, path = run.embedder, *list_checkpoints(run.checkpoints)
        if not path.is_file():
            raise UserError("holds neither a checkpoint nor an embedder", start_from=run.path)
    with user_errors(ValueError, ERROR_TEXT, start_from=path):
        return path, _arrays_of(path)


def _arrays_of(path: Path) -> dict[str, Sequence[np.ndarray]]:
    if path.suffix == ".npz":
        return _arrays_of_checkpoint(path)
    embedder = load_embedder(path)
    if not isinstance(embedder, Embedder):
        raise UserError(
            f"holds a {type(embedder).__name__}: name the run's embedder.keras", start_from=path
        )
    parts: dict[str, Sequence[np.ndarray]] = {}
    for part, weights in checkpoints.embedder_parts(embedder).items():
        parts[part] = [ops.convert_to_numpy(weight) for weight in weights]
    return parts


def _arrays_of_checkpoint(path: Path) -> dict[str, Sequence[np.ndarray]]:
    parts: dict[str, Any] = {}
    arrays, _ = checkpoints.read(path)
    for name in sorted(arrays):
        part = name.rpartition("/")[0]
        if part not in checkpoints.NOT_WEIGHTS:
            parts.setdefault(part, []).append(arrays[name])
    return parts


def adapt(
    learner: MetricLearner,
    train: ImageDataset,
    transform: EvaluationTransform,
    processes: workers.Processes,
    whiten: Mapping[str, Any] | None = None,
) -> None:
    """Start the projection of a whitened head, then adapt the objectives, by a pass over
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
    adapting = [objective for objective in learner.objectives if objective.adapts_to]
    if not adapting and whiten is None:
        return

    def measure() -> None:
        if whiten is not None:
            _whiten(learner.embedder, train, transform, whiten)
        if adapting:
            names = ", ".join(objective.name for objective in adapting)
            logging.info("measuring %d training images for %s", len(train), names)
            learner.adapt(evaluation_batches(train, transform, EVALUATION_BATCH), adapting)

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
    pooled = represent_batches(embedder, ["pooled"], batches)[0]["pooled"]
    dim = embedder.embedding_dim
    if dim >= len(pooled) or dim > pooled.shape[1]:
        text = (
            "head=whitened: %d pooled features of %d images are too few for %d dimensions: it "
            "starts at random"
        )
        logging.warning(text, pooled.shape[1], len(pooled), dim)
        return
    with user_errors(ValueError, ERROR_TEXT, head="whitened"):
        embedder.whiten(pooled, **options)
