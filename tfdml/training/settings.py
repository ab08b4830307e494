"""The settings of a training run, stage by stage and together: every choice with its default,
meaning and bounds."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdml import arguments
from tfdml.backbones.hub import PREFIX
from tfdml.data.transforms import KINDS, as_color
from tfdml.errors import REASON, UserError, redact_text, user_errors
from tfdml.expressions import Call, parse_arguments, parse_call, parse_sum
from tfdml.flags import Effect, both, either, in_vain, needs, shipped
from tfdml.io.files import parse_flags
from tfdml.models.embedder import BATCH_NORM_MODES, POOLINGS
from tfdml.registry import import_modules
from tfdml.training.optimizers import OPTIMIZERS, SCHEDULES, rate_schedule

#: P of a batch of classes where it is not given and the data has as many.
MOST_CLASSES = 20
# Counts and seeds beyond this do not fit the 32-bit integers of TensorFlow and Keras.
LARGEST_INTEGER = 2**31 - 1
_CHECKS: dict[Any, Callable] = {
    **arguments.BY_TYPE,
    int: functools.partial(arguments.integer, at_most=LARGEST_INTEGER),
    Sequence[str]: lambda what, values: tuple(arguments.text(what, value) for value in values),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every stage's settings share: each field is checked by its type, its choices and its
    bounds.

    Attributes:
        stored: Whether a run stores the values, so that they may hold no password.

    Raises:
        UserError: A value is out of range; the message names the flag.
    """

    stored: typing.ClassVar[bool] = True

    def __post_init__(self):
        import_modules(getattr(self, "imports", ""))
        types = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            with user_errors(ValueError, REASON):
                value = _CHECKS[types[field.name]](f"--{field.name}", getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            if self.stored and isinstance(value, str) and redact_text(value) != value:
                shown = f"--{field.name}={redact_text(value)}"
                raise UserError(
                    f"{shown} has a user or password, which a run would store: use the environment"
                )
            choices, check = (field.metadata.get(rule) for rule in ("choices", "check"))
            if choices and value not in choices:
                raise UserError(f"--{field.name}={value}: must be one of {', '.join(choices)}")
            if check and not check(value):
                raise UserError(
                    f"--{field.name}={value}: out of range. {meanings(type(self))[field.name]}"
                )


def choice(default: Any, **rules: Any) -> Any:
    """Return a field of settings, which is also a flag; what it means is in the `Args` of its
    class.

    Args:
        default: Its default.
        **rules: `choices`: the values that there are; `check`: whether a value is in range;
            `effect`: when it has an effect, if not always; `paths`: whether the flag takes paths
            and patterns.
    """
    return dataclasses.field(default=default, metadata=rules)


def meanings(stage: type) -> dict[str, str]:
    """Return what each setting of a class means, by name, from the `Args` of the docstrings.

    Example:
        >>> meanings(RunSettings)["seed"]
        'Seed of weights, batches and augmentation.'
    """
    # Metadata of the fields would say it a second time: the classes were 200 lines longer with it.
    texts: dict[str, str] = {}
    for cls in stage.__mro__:
        arguments = inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", arguments, re.MULTILINE):
            texts[name] = " ".join(text.split())
    return texts


def positive(value) -> bool:
    """Whether a value is above 0."""
    return value > 0


def not_negative(value) -> bool:
    """Whether a value is 0 or above."""
    return value >= 0


def fraction(value) -> bool:
    """Whether a value is a share that leaves something over."""
    return 0 <= value < 1


def integers(text: str, flag: str, required: bool = False) -> tuple[int, ...]:
    """Return positive integers from text, such as `1,2,4`.

    Args:
        text: The integers, with commas.
        flag: The flag's name, for the message.
        required: Whether there must be one.

    Raises:
        UserError: The text is something else.

    Example:
        >>> integers("20,40", "--drop_epochs")
        (20, 40)
    """
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = (0,)
    if (required and not values) or any(not 1 <= value <= LARGEST_INTEGER for value in values):
        raise UserError(
            f"{flag}={text}: write integers of 1 to {LARGEST_INTEGER:,} with commas, e.g. 1,2,4"
        )
    return values


def flag_name(setting: str) -> str:
    """Return the flag of a setting: its name, but for the one that is a word of Python.

    Example:
        >>> flag_name("imports"), flag_name("epochs")
        ('import', 'epochs')
    """
    return "import" if setting == "imports" else setting


def as_text(value: Any) -> str:
    """Return a setting as it stands in a flag file.

    Example:
        >>> as_text(True), as_text(0.5)
        ('true', '0.5')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


#: The names that `augmentation`, `sampling`, `holdout_sampling` and `head` may have, each with its
#: options and their defaults.
AUGMENTATIONS: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS} | {
    "random_resized_crop": {"min_scale": 0.08}
}
SAMPLING: dict[str, dict[str, Any]] = {
    "class_balanced": {"short_classes": "repeat"},
    "hierarchical": {"super_classes": 1, "weights": "proportional", "short_classes": "repeat"},
    "neighbors": {
        "every": 1,
        "anchor_classes": 4,
        "skip_top": 0,
        "relative_margin": None,
        "short_classes": "repeat",
    },
    "whole_classes": {},
    "shuffle": {},
    "pairs": {},
    "texts": {},
}
HOLDOUT_SAMPLING: dict[str, dict[str, Any]] = {"random": {"part": 0}, "stratified": {"part": 0}}
HEADS: dict[str, dict[str, Any]] = {
    "linear": {"bias": True},
    "mlp": {"hidden": 512},
    "whitened": {"power": None, "shrinkage": None},
    "ensemble": {"heads": 8, "cut": None, "bias": True},
}
#: The same of `text_backbone`; `hub` stands for `hub:` and the name of a preset.
TEXT_BACKBONES: dict[str, dict[str, Any]] = {
    "bytes": {"length": 64, "width": 64, "pooling": "max", "rate": -1.0},
    "hub": {"length": 0, "pooling": "avg", "truncate": False, "rate": -1.0},
    "vectors": {"path": ""},
}


def with_options(text: str, flag: str, names: Mapping[str, Mapping[str, Any]]) -> Call:
    """Return a name with its options, those that are not given at their defaults.

    Args:
        text: The name, or the name with options: `neighbors(every=2)`.
        flag: The flag's name, for the message.
        names: The names that there are, each with its options and their defaults.

    Raises:
        UserError: There is no such name, or it has no such option.

    Example:
        >>> with_options("mlp(hidden=64)", "--head", HEADS)
        Call(name='mlp', arguments={'hidden': 64})
    """
    call = parse_call(text, flag)
    if call.name not in names:
        raise UserError(f"{flag}={text}: must be one of {', '.join(names)}")
    if unknown := call.arguments.keys() - names[call.name].keys():
        options = ", ".join(names[call.name]) or "none"
        raise UserError(f"{flag}={text}: there is no option {min(unknown)!r}, only {options}")
    return Call(call.name, {**names[call.name], **call.arguments})


def _samples(*names: str) -> Effect:
    return Effect(
        lambda given: given["sampling"].partition("(")[0].strip() in names,
        f"--sampling={' or '.join(names)}",
    )


_BY_CLASS = _samples("class_balanced", "hierarchical", "neighbors")
_HELD_OUT = either(needs("holdout_classes"), needs("folds"))
_RATES = ("backbone_rate", "projection_rate", "objective_rate")


def _drops(given: Mapping[str, Any]) -> bool:
    return any(epoch < given["epochs"] for epoch in integers(given["drop_epochs"], "--drop_epochs"))


def _names_horde(given: Mapping[str, Any]) -> bool:
    names = [call.name for _, call in parse_sum(given["objectives"], "--objectives")]
    return any(name in ("horde", "high_order_moment") for name in names)


_IMAGES = Effect(lambda given: not given["features"], "images, not --features")
_WITH_FILES = Effect(
    lambda given: given["dataset"] != "glyphs", "another --dataset than glyphs, which has no files"
)
_SHARED_RATE = Effect(
    lambda given: any(given[rate] < 0 for rate in _RATES),
    "a part without a rate of its own (--backbone_rate, --projection_rate or --objective_rate of "
    "-1)",
)
_EPOCHS_OF_PASSES = both(
    needs("epochs"), Effect(lambda given: not given["steps_per_epoch"], "no --steps_per_epoch")
)
_DROPS_IN_TIME = both(
    needs("schedule", "step"), Effect(_drops, "an epoch in it that is below --epochs")
)
_HORDE = Effect(_names_horde, "horde(...) in --objectives")
_NO_LIST = Effect(
    lambda given: "," not in given["seeds"], "--seeds without a list, which names the seeds itself"
)


@dataclasses.dataclass(frozen=True)
class DataSettings(Settings):
    """Which images a run sees, in which views, and which of them form a batch.

    Args:
        dataset: Data set: a name of the catalog, or folder for any tree of class folders.
        data_dir: Folder of the unpacked data set, or of the images that --features name. glyphs
            needs none.
        features: Stored embeddings with labels instead of images, on which a --head is trained: a
            folder of tfdml embed, or a Parquet, .npz or .npy file.
        text_backbone: Train an embedder of texts next to that of images, for objectives such as
            clip and siglip. The texts are those of a list, or else the names of the classes. It
            reads bytes(length=64, width=64, pooling=max), from scratch; or is the text half of a
            preset of KerasHub, hub:NAME(length=0, pooling=avg, truncate=false), where 0 is the
            preset's own length; each with a rate of its own, where 0 freezes it (rate=-1). Or, next
            to --features, vectors(path=...) of the texts.
        dataset_options: Options of the data set, e.g. 'images_per_class=40' or 'test_fraction=0.3'.
        bad_images: What to do with files that are no readable images; skip decodes every image
            first.
        drop: A CSV file of tfdml audit, maybe edited: training images whose action is drop are left
            out.
        final_of: Train the final model of this run: with its settings, and as many steps as it had
            until its selected epoch, on all classes, of which none is left to measure it on.
        holdout_classes: Share of the training classes that is held out, as validation classes.
        holdout_sampling: How --holdout_classes are drawn: all alike (random), or one of each of as
            many groups of classes of about the same size (stratified). --folds sets part=N of
            either: which of the disjoint parts of the training classes is held out, from 1 on
            (part=0: any classes).
        cache: Keep the decoded images in memory; auto: where they are seen again, and take less
            than 4 GiB and half of the free memory.
        image_size: Height and width in pixels of the crops that the network sees.
        resize: Pixels to which images are resized before the crop.
        resize_mode: Whether the shorter side becomes --resize; both sides do (squash); or the
            longer side does and --pad_color fills up the square (pad).
        pad_color: Color around images: black, white, or R,G,B of 0 to 255.
        augmentation: How training crops are taken: random_crop;
            random_resized_crop(min_scale=0.08), of at least this share of the image's area;
            multi_resolution; or none.
        flip: Mirror every second training image.
        policy: What happens to the finished crops, by Keras's layers: e.g.
            'rand_augment(factor=0.4) + 0.2 * grayscale' (the second on a fifth of the images).
        sampling: What a batch is: P classes x K images; the same from hierarchical(super_classes=1,
            weights=proportional), or of classes that the embedder confuses: neighbors(every=1,
            anchor_classes=4, skip_top=0, relative_margin=none), each with short_classes=repeat or
            drop, for those of fewer than K images; whole_classes; a plain shuffle; given pairs; or
            texts, all different.
        classes_per_batch: P; 0: 20, or all where there are fewer.
        images_per_class: K, the images of each class in a batch.
        batch_size: Images per batch, over all replicas, without P and K.

    Raises:
        UserError: A value is out of range, or two do not go together.

    Example:
        >>> DataSettings(dataset="glyphs", dataset_options="size=32", image_size=28,
        ...     resize=32).data_options()
        {'size': 32}
    """

    dataset: str = choice("glyphs", effect=_IMAGES)
    data_dir: str = choice("", effect=either(_WITH_FILES, needs("features")))
    features: str = ""
    text_backbone: str = ""
    dataset_options: str = ""
    bad_images: str = choice("error", choices=("error", "skip"), effect=_IMAGES)
    drop: str = ""
    final_of: str = ""
    holdout_classes: float = choice(0.0, check=fraction)
    holdout_sampling: str = choice("random", effect=_HELD_OUT)
    cache: str = choice("auto", choices=("auto", "true", "false"), effect=_IMAGES)
    # Views
    image_size: int = choice(224, check=positive, effect=_IMAGES)
    resize: int = choice(256, check=positive, effect=_IMAGES)
    resize_mode: str = choice("shorter", choices=("shorter", "squash", "pad"), effect=_IMAGES)
    pad_color: str = choice(
        "black",
        effect=both(
            either(needs("resize_mode", "pad"), needs("augmentation", "multi_resolution")), _IMAGES
        ),
    )
    augmentation: str = choice("random_crop", effect=_IMAGES)
    flip: bool = choice(True, effect=_IMAGES)
    policy: str = choice("", effect=_IMAGES)
    # Batches
    sampling: str = "class_balanced"
    classes_per_batch: int = choice(0, check=not_negative, effect=_BY_CLASS)
    images_per_class: int = choice(5, check=positive, effect=_BY_CLASS)
    batch_size: int = choice(
        100, check=positive, effect=_samples("shuffle", "whole_classes", "pairs", "texts")
    )

    def __post_init__(self):
        super().__post_init__()
        if self.resize < self.image_size and self.augmentation_call().name in (
            "random_crop",
            "none",
        ):
            raise UserError(
                f"--resize={self.resize} is smaller than --image_size={self.image_size}"
            )
        as_color(self.pad_color)
        if self.features and self.policy.strip():
            raise UserError("--policy changes images, and --features are vectors")
        self.data_options(), self.augmentation_call(), self.sampling_call(), self.held_out(0)
        if self.text_backbone and bool(self.features) != (self.text_call().name == "vectors"):
            raise UserError(
                f"--text_backbone={self.text_backbone}: stored vectors of texts go with --features "
                "alone"
            )
        if self.policy.strip():
            parse_sum(self.policy, "--policy")

    @property
    def data_name(self) -> str:
        """What is trained on: the data set, or the stored features."""
        return Path(self.features).stem if self.features else self.dataset

    def data_options(self) -> dict[str, Any]:
        """Return the options of the data set."""
        return parse_arguments(self.dataset_options, "--dataset_options")

    def text_call(self) -> Call:
        """Return the text backbone's name and options."""
        name, opening, options = self.text_backbone.partition("(")
        kind = "hub" if name.startswith(PREFIX) else name
        call = with_options(kind + opening + options, "--text_backbone", TEXT_BACKBONES)
        return Call(name, call.arguments)

    def held_out(self, seed: int) -> tuple[float, int, str, int]:
        """Return the share, seed, sampling and part of `split_training_classes`."""
        call = with_options(self.holdout_sampling, "--holdout_sampling", HOLDOUT_SAMPLING)
        with user_errors(ValueError, REASON):
            part = arguments.integer("--holdout_sampling: part", call.arguments["part"], at_least=0)
        return self.holdout_classes, seed, call.name, part

    def augmentation_call(self) -> Call:
        """Return how training crops are taken, with all options."""
        call = with_options(self.augmentation, "--augmentation", AUGMENTATIONS)
        with user_errors(ValueError, REASON):
            for name, share in call.arguments.items():
                arguments.number(f"--augmentation: {name}", share, above=0, at_most=1)
        return call

    def sampling_call(self) -> Call:
        """Return how batches are composed, with all options."""
        return with_options(self.sampling, "--sampling", SAMPLING)


@dataclasses.dataclass(frozen=True)
class ModelSettings(Settings):
    """The embedder: its backbone and weights, and what stands behind them.

    Args:
        backbone: Backbone, with its options: e.g. 'mobilenetv2(alpha=0.35)'; or a preset of
            KerasHub with its weights, by name or folder: hub:dinov2_small.
        weights: Backbone weights: none, imagenet, or the path of a .weights.h5 file.
        head: What projects the pooled features, or --features, to the embedding: linear(bias=true);
            mlp(hidden=512), with a hidden layer of ReLU; whitened(power, shrinkage), which starts
            as the PCA whitening of the training images; or ensemble(heads=8), an attention ensemble
            (ABE) that shares --embedding_dim.
        embedding_dim: Size of the embedding; 0: that of the pooled features, which it then is.
        pooling: Pooling over the positions of the feature map: avg; max; gem, a trained power mean;
            attention, to a trained query; or cls, a transformer's class token.
        dropout: Share of the pooled features that is left out before the projection, in training.
        batch_norm: BatchNorm of the backbone: frozen; statistics (frozen statistics, trained gamma
            and beta); train.
        mixed_precision: Dtype policy of the network.
        start_from: Start from the weights of an old run, matched by part: a run folder (its newest
            checkpoint), a checkpoint, or a .keras file.

    Raises:
        UserError: A value is out of range, or two do not go together.

    Example:
        >>> ModelSettings(backbone="conv4(width=32)", batch_norm="train",
        ...     embedding_dim=64).backbone_call()
        Call(name='conv4', arguments={'width': 32})
    """

    backbone: str = choice("mobilenetv2", effect=_IMAGES)
    weights: str = choice("none", effect=_IMAGES)
    head: str = "linear"
    embedding_dim: int = choice(128, check=not_negative)
    pooling: str = choice("avg", choices=tuple(POOLINGS), effect=_IMAGES)
    dropout: float = choice(0.0, check=fraction)
    batch_norm: str = choice("frozen", choices=BATCH_NORM_MODES, effect=_IMAGES)
    mixed_precision: str = choice("float32", choices=("float32", "mixed_bfloat16", "mixed_float16"))
    start_from: str = ""

    def __post_init__(self):
        super().__post_init__()
        self.backbone_call(), self.head_call()

    def backbone_call(self) -> Call:
        """Return the backbone's name and options."""
        if self.backbone.startswith(PREFIX):
            return Call(self.backbone, {})  # a folder may have any name
        return parse_call(self.backbone, "--backbone")

    def head_call(self) -> Call:
        """Return the head's name and options."""
        return with_options(self.head, "--head", HEADS)


def _rate(value) -> bool:
    return value == -1 or value >= 0


@dataclasses.dataclass(frozen=True)
class OptimizationSettings(Settings):
    """What is minimized, how, and for how long.

    Args:
        objectives: Terms of the loss: e.g. 'am_softmax(margin=0.05) + 0.4 * jrs'.
        epochs: Number of epochs.
        steps_per_epoch: Steps per epoch; 0: one pass over the training images.
        min_steps: Least steps of the run: where one pass over few images an epoch is less, epochs
            are longer.
        optimizer: Optimizer. pytorch_adam and pytorch_adamw follow PyTorch's formulas, the others
            those of Keras, TensorFlow and Caffe. They differ in where epsilon is added.
        learning_rate: Base learning rate.
        backbone_rate: Learning rate of the backbone; -1: the base rate, 0: it does not train.
        projection_rate: Learning rate of the projection; -1: the base rate.
        objective_rate: Learning rate of the objectives' own weights; -1: the base rate.
        schedule: How the rates fall: in steps, by --drop_epochs, or along half a cosine to 0 at the
            end.
        warm_up_epochs: Epochs, or a part of one, in which the rates rise evenly.
        drop_epochs: Epochs after which every rate drops, e.g. '8' or '20,40'.
        drop_factor: What each drop multiplies the rates by.
        weight_decay: Weight decay: coupled (added to the gradient), decoupled for adamw; not of
            learned scales, offsets, boundaries and targets.
        epsilon: Adam's epsilon; -1: the default of 1e-7, of pytorch_adam and pytorch_adamw 1e-8.
        clip_norm: Largest norm of the gradient; 0: no clipping.
        ema: Which share of its old value the running average of each weight keeps in a step, e.g.
            0.999: the averages are evaluated and kept. 0: none.
        gradient_cache: Keep the activations of this many images of the batch (of each device) at a
            time: batches beyond the memory, for one more pass forward; 0: of all at once.
        steps_per_execution: Run this many steps between two returns to Python, for the same result;
            of an epoch that is no multiple of it, the most below it that divides the epoch. Alarms,
            checkpoints and signals wait for them.

    Raises:
        UserError: A value is out of range, or text cannot be read.

    Example:
        >>> OptimizationSettings(learning_rate=1e-3, backbone_rate=1e-5).learning_rates()
        {'backbone': 1e-05, 'projection': 0.001, 'objectives': 0.001}
    """

    objectives: str = "am_softmax"
    epochs: int = choice(12, check=not_negative)
    steps_per_epoch: int = choice(0, check=not_negative)
    min_steps: int = choice(0, check=not_negative, effect=_EPOCHS_OF_PASSES)
    optimizer: str = choice("adam", choices=OPTIMIZERS)
    learning_rate: float = choice(1e-4, check=positive, effect=_SHARED_RATE)
    backbone_rate: float = choice(-1.0, check=_rate, effect=_IMAGES)
    projection_rate: float = choice(-1.0, check=_rate)
    objective_rate: float = choice(-1.0, check=_rate)
    schedule: str = choice("step", choices=SCHEDULES)
    warm_up_epochs: float = choice(0.0, check=not_negative)
    drop_epochs: str = choice("", effect=_DROPS_IN_TIME)
    drop_factor: float = choice(
        0.1, check=positive, effect=both(needs("schedule", "step"), needs("drop_epochs"))
    )
    weight_decay: float = choice(0.0, check=not_negative)
    epsilon: float = choice(
        -1.0,
        check=lambda value: value == -1 or value > 0,
        effect=needs("optimizer", *(name for name in OPTIMIZERS if name != "sgd")),
    )
    clip_norm: float = choice(0.0, check=not_negative)
    ema: float = choice(0.0, check=fraction)
    gradient_cache: int = choice(0, check=not_negative)
    steps_per_execution: int = choice(1, check=positive)

    def __post_init__(self):
        super().__post_init__()
        self.drop_steps(1)
        if self.warm_up_epochs and self.warm_up_epochs >= self.epochs:
            raise UserError(
                f"--warm_up_epochs={self.warm_up_epochs:g} leaves none of --epochs={self.epochs}"
            )
        parse_sum(self.objectives, "--objectives")

    def epoch_steps(self, one_pass: int) -> int:
        """Return the steps of an epoch.

        Args:
            one_pass: Those of one pass over the training images.

        Example:
            >>> OptimizationSettings(epochs=12, min_steps=480).epoch_steps(11)
            40
        """
        return self.steps_per_epoch or max(one_pass, -(-self.min_steps // max(self.epochs, 1)))

    def execution_steps(self, steps_per_epoch: int) -> int:
        """Return the steps between two returns to Python: the most that divide an epoch.

        Example:
            >>> OptimizationSettings(steps_per_execution=16).execution_steps(12)
            12
        """
        # An execution that went beyond the end of an epoch would train steps that nobody asked for.
        most = min(self.steps_per_execution, steps_per_epoch)
        return next(steps for steps in range(most, 0, -1) if steps_per_epoch % steps == 0)

    def drop_steps(self, steps_per_epoch: int) -> list[int]:
        """Return the steps at which the rates drop."""
        epochs = integers(self.drop_epochs, "--drop_epochs")
        if list(epochs) != sorted(set(epochs)):
            raise UserError(f"--drop_epochs={self.drop_epochs}: the epochs must ascend")
        return [epoch * steps_per_epoch for epoch in epochs]

    def rate_schedule(self, steps_per_epoch: int) -> Any:
        """Return the base rate along the run: a number, or a Keras schedule."""
        return rate_schedule(
            self.schedule,
            self.learning_rate,
            self.epochs * steps_per_epoch,
            round(self.warm_up_epochs * steps_per_epoch),
            self.drop_steps(steps_per_epoch),
            self.drop_factor,
        )

    def learning_rates(self) -> dict[str, float]:
        """Return the rate of each part at the first step."""
        rates = {
            "backbone": self.backbone_rate,
            "projection": self.projection_rate,
            "objectives": self.objective_rate,
        }
        return {part: self.learning_rate if rate < 0 else rate for part, rate in rates.items()}


#: The metrics of images that are measured anyway.
USUAL_METRICS = ("map@r", "r_precision", "recall@1")
#: The metrics of given pairs that may select an epoch.
PAIR_METRICS = ("auc", "triplet_accuracy")


@dataclasses.dataclass(frozen=True)
class EvaluationSettings(Settings):
    """What is measured, when, and what counts and is written in the end.

    Args:
        ks: The K of Recall@K.
        evaluate_every: Evaluate the unseen classes every this many epochs; 0: at the end only.
        selection: Which epoch's embedder is kept: the last; the best on the held-out training
            classes (validation); the best on the test classes (test: the papers' way, which gives
            too high a number).
        selection_metric: The metric that selects the epoch, as in tfdml evaluate --metrics; of
            given pairs auc, of triplets triplet_accuracy; of texts that search images
            text_to_image/map, and the reverse image_to_text/map.
        moment_embedder: Also write and measure moments.keras, which searches with all orders of
            horde, reduced by a PCA.
        report: Write report/index.html at the end.

    Raises:
        UserError: A value is out of range, or two do not go together.

    Example:
        >>> EvaluationSettings(ks="1,10", selection="test").recall_ks()
        (1, 10)
    """

    ks: str = "1,2,4,8"
    evaluate_every: int = choice(1, check=not_negative)
    selection: str = choice("last", choices=("last", "validation", "test"))
    selection_metric: str = choice("map@r", effect=needs("selection", "validation", "test"))
    moment_embedder: bool = choice(False, effect=_HORDE)
    report: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.moment_embedder and self.selection != "last":
            raise UserError(
                "--moment_embedder needs the moments of the last epoch: use --selection=last"
            )
        direction, _, metric = self.selection_metric.rpartition("/")
        if 1 not in self.recall_ks() and self.selection != "last" and metric == "recall@1":
            raise UserError(
                f"--selection={self.selection} goes by recall@1: add 1 to --ks={self.ks}"
            )
        if metric not in USUAL_METRICS + PAIR_METRICS or direction:
            from tfdml.evaluation.metrics import find_metric

            with user_errors(UserError, f"--selection_metric={self.selection_metric}: {REASON}"):
                find_metric(
                    metric
                    if direction in ("", "text_to_image", "image_to_text")
                    else self.selection_metric
                )

    def recall_ks(self) -> tuple[int, ...]:
        """Return the K of Recall@K."""
        return integers(self.ks, "--ks", required=True)


_MOST_SEEDS = 1000


@dataclasses.dataclass(frozen=True)
class RunSettings(Settings):
    """Where a run is written, and what makes it repeatable and resumable.

    Args:
        run_dir: Folder of the run; must not exist yet, unless --resume.
        seed: Seed of weights, batches and augmentation.
        seeds: Train a run for each of several seeds, in seed_N of --run_dir, and report their mean
            with intervals: how many, from --seed on (3), or which (0,1,2).
        folds: Train a run for each of this many parts of the training classes, with that part held
            out, in fold_N of --run_dir, and report their mean, and what their embeddings side by
            side reach.
        deterministic: On a CPU, run one operation at a time (each on all cores), so that the same
            run gives the same bits. Without it training is up to a fifth faster. On JAX a CPU gives
            the same bits either way.
        logical_devices: Split the CPU into this many logical devices and train on all; 0: the GPUs
            there are.
        shard_classes: Divide the proxies of classes, and their optimizer state, among the devices:
            for very many classes. On JAX.
        checkpoint_steps: Checkpoint every this many steps, besides each epoch.
        watch_every: Look at a batch every this many steps: gradients by part and term, how far
            embeddings spread, alarms; 0: never.
        log_to: Log each epoch by a Keras callback too: the import path of what makes it, such as
            my_logging.start.
        imports: Modules of your own, with commas, that register losses, data sets and the like: see
            `tfdml.register`. They must be loaded, or named on the command line or by the variable
            TFDML_IMPORT.

    Raises:
        UserError: A value is out of range, or the folder is not named.

    Example:
        >>> RunSettings(run_dir="runs/first", seed=3).seed
        3
    """

    run_dir: str = ""
    seed: int = choice(0, check=not_negative, effect=_NO_LIST)
    seeds: str = ""
    folds: int = choice(0, check=lambda value: value == 0 or value >= 2)
    deterministic: bool = True
    logical_devices: int = choice(0, check=not_negative)
    shard_classes: bool = False
    checkpoint_steps: int = choice(0, check=not_negative)
    watch_every: int = choice(100, check=not_negative)
    log_to: str = ""
    imports: str = ""

    def __post_init__(self):
        super().__post_init__()
        if not self.run_dir:
            raise UserError(
                "--run_dir is missing: name the folder that the run writes, e.g. "
                "--run_dir=runs/first"
            )
        self.seed_list()
        if self.log_to and not re.fullmatch(r"(\w+\.)+\w+", self.log_to):
            raise UserError(
                f"--log_to={self.log_to}: name what makes a Keras callback, such as "
                "my_logging.start"
            )

    def seed_list(self) -> tuple[int, ...]:
        """Return the seeds of `seeds`; empty where `seed` is the only one.

        Raises:
            UserError: They are no two or more different numbers.

        Example:
            >>> RunSettings(run_dir="runs/first", seeds="3").seed_list()
            (0, 1, 2)
        """
        if not self.seeds.strip():
            return ()
        wrong = f"--seeds={self.seeds}: write how many (2 to {_MOST_SEEDS}), or which (0,1,2)"
        with user_errors(ValueError, wrong):
            seeds = [int(part) for part in self.seeds.split(",")]
        if len(seeds) == 1:
            seeds = list(range(self.seed, self.seed + min(seeds[0], _MOST_SEEDS + 1)))
        if (
            not 2 <= len(set(seeds)) == len(seeds) <= _MOST_SEEDS
            or min(seeds) < 0
            or max(seeds) > LARGEST_INTEGER
        ):
            raise UserError(wrong)
        return tuple(seeds)


# The bases stand from last to first: a dataclass has the fields of its last base first.
@dataclasses.dataclass(frozen=True)
class Experiment(
    RunSettings, EvaluationSettings, OptimizationSettings, ModelSettings, DataSettings
):
    """The settings of a run; each field is also a flag of `tfdml train` with the same name.

    It is the settings of every stage, in whose classes the fields are described.

    Raises:
        UserError: A value is out of range; the message names the flag.

    Example:
        >>> network = {"backbone": "conv4", "batch_norm": "train", "image_size": 28, "resize": 32,
        ...     "embedding_dim": 64}
        >>> experiment = Experiment(run_dir="runs/first", dataset="glyphs", flip=False, epochs=1,
        ...     **network)
        >>> experiment.backbone, experiment.epochs
        ('conv4', 1)
        >>> # and "metrics", "metrics_before", "intervals", ...
        >>> tfdml.training.train(experiment).result["dataset"]
        'glyphs'
    """

    def __post_init__(self):
        super().__post_init__()
        if self.folds and (self.seeds or self.holdout_classes):
            raise UserError(
                "--folds holds out classes itself, with one seed: leave out --holdout_classes and "
                "--seeds"
            )
        if self.selection == "validation" and not (self.holdout_classes or self.folds):
            raise UserError(
                "--selection=validation needs held-out classes: add e.g. --holdout_classes=0.1"
            )
        if "/" in self.selection_metric and not self.text_backbone:
            raise UserError(
                f"--selection_metric={self.selection_metric}: texts need a --text_backbone"
            )

    def learning_rates(self) -> dict[str, float]:
        """Return the rate of each part at the first step; a backbone of texts from scratch has the
        projection's."""
        rates = super().learning_rates()
        if self.text_backbone:
            call = self.text_call()
            rate = call.arguments.get("rate", -1.0)
            usual = rates["backbone" if call.name.startswith(PREFIX) else "projection"]
            rates |= {
                "text backbone": usual if rate < 0 else rate,
                "text projection": rates["projection"],
            }
        return rates

    def as_flags(self) -> str:
        """Return the settings as a flag file that makes the same run."""
        names = [field.name for field in dataclasses.fields(self)]
        lines = [f"--{flag_name(name)}={as_text(getattr(self, name))}" for name in names]
        return "\n".join(lines) + "\n"

    def differences_to(self, other: Experiment) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of each setting that differs in another experiment, with both values."""
        for name, value in dataclasses.asdict(self).items():
            if value != getattr(other, name):
                yield name, value, getattr(other, name)

    @classmethod
    def from_flags(cls, text: str, **changes: Any) -> Experiment:
        """Return the experiment of a flag file, with its `--recipe` as `tfdml train` takes it.

        Raises:
            UserError: A line names no setting or holds no value of its type.
        """
        flags = parse_flags(text)
        recipe = flags.pop("recipe", "auto")
        flags |= {"imports": flags.pop("import")} if "import" in flags else {}
        return cls.of_recipe(recipe, **{**_settings(flags), **changes})

    @classmethod
    def of_recipe(cls, recipe: str = "auto", **given: Any) -> Experiment:
        """Return an experiment with the settings of a recipe, but for those that are given: see
        `with_recipe`.

        Example:
            >>> Experiment.of_recipe("scratch", run_dir="runs/first", schedule="step").schedule
            'step'
        """
        return cls(**with_recipe(recipe, given))


_BOOLEANS = {"true": True, "false": False}


def _settings(flags: Mapping[str, str]) -> dict[str, Any]:
    """Return settings from the text of their flags."""
    kinds = typing.get_type_hints(Experiment)
    values: dict[str, Any] = {}
    for name, value in flags.items():
        if name not in kinds:
            raise UserError(f"flag file: there is no setting --{name}")
        wrong = f"flag file: --{name}={value} is not of type {kinds[name].__name__}"
        with user_errors((KeyError, ValueError), wrong):
            values[name] = _BOOLEANS[value] if kinds[name] is bool else kinds[name](value)
    return values


#: When a setting has an effect, by setting. Those that are not here always have one.
EFFECTS: dict[str, Effect] = {
    field.name: field.metadata["effect"]
    for field in dataclasses.fields(Experiment)
    if "effect" in field.metadata
}

#: How to train where nothing is known but the data: the names of the flag files in
#: `configs/recipes`.
RECIPES = ("finetune", "frozen", "scratch")
# Where one of these is given, the recipe has a say in none of its group.
_GROUPS = (
    frozenset({"epochs", "steps_per_epoch", "min_steps"}),
    frozenset({"schedule", "drop_epochs"}),
)


def recipe_for(given: Mapping[str, Any]) -> str:
    """Return the recipe that suits settings: `frozen` where no backbone trains, `scratch` without
    weights.

    Example:
        >>> recipe_for({}), recipe_for({"weights": "imagenet"}),
        ...     recipe_for({"features": "vectors.npz"})
        ('scratch', 'finetune', 'frozen')
    """
    if given.get("features") or given.get("backbone_rate") == 0:
        return "frozen"
    pretrained = given.get("start_from") or str(given.get("backbone")).startswith(PREFIX)
    return "finetune" if pretrained or given.get("weights", "none") != "none" else "scratch"


def with_recipe(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a recipe, which count where they are not given and have an
    effect.

    Args:
        recipe: One of `RECIPES`; auto: that of `recipe_for`; none: only what is given.
        given: Settings, by name. With `epochs`, `steps_per_epoch` or `min_steps` the length is not
            the recipe's, and with `drop_epochs` the schedule.

    Example:
        >>> with_recipe("none", {"epochs": 1})
        {'epochs': 1}
    """
    if recipe == "none":
        return dict(given)
    file = shipped(f"configs/recipes/{recipe_for(given) if recipe == 'auto' else recipe}.flags")
    if file is None:
        raise UserError(f"--recipe={recipe}: must be one of {', '.join(RECIPES)}, auto, none")
    settings = _settings(parse_flags(file.read_text(encoding="utf-8")))
    left_out = given.keys() | {name for group in _GROUPS if given.keys() & group for name in group}
    settings = {name: value for name, value in settings.items() if name not in left_out}
    together = (
        {field.name: field.default for field in dataclasses.fields(Experiment)}
        | settings
        | dict(given)
    )
    vain = in_vain(EFFECTS, together, settings)
    return {name: value for name, value in settings.items() if name not in vain} | dict(given)
