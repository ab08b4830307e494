"""An experiment: every choice of a training run, with its default, its meaning and its bounds."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

from tfdml import arguments
from tfdml.data.augmentation.evaluation import as_color
from tfdml.data.augmentation.train import KINDS
from tfdml.errors import UserError
from tfdml.models.embedder import BATCH_NORM_MODES
from tfdml.training.expressions import Call, parse_arguments, parse_call, parse_sum
from tfdml.training.optimizers import FORMS, OPTIMIZERS

# Counts and seeds beyond this do not fit the 32-bit integers of TensorFlow and Keras.
_LARGEST_INTEGER = 2**31 - 1
_BOOLEANS = {"true": True, "false": False}
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def _choice(default: Any, help_text: str, **checks: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text, **checks})


def _positive(value) -> bool:
    return value > 0


def _not_negative(value) -> bool:
    return value >= 0


def _fraction(value) -> bool:
    return 0 <= value < 1


def _rate(value) -> bool:
    return value == -1 or value >= 0


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The settings of a run; each field is also a flag of `bin/train` with the same name.

    Raises:
        UserError: A value is out of range; the message names the flag.

    Example:
        >>> network = {"backbone": "conv4", "batch_norm": "train", "image_size": 28, "resize": 32, "embedding_dim": 64}
        >>> experiment = Experiment(run_dir="runs/first", dataset="glyphs", flip=False, epochs=1, **network)
        >>> tfdml.training.train(experiment)["selection"]  # and "metrics", "metrics_before", "intervals", ...
        'the last epoch'
    """

    # Data
    dataset: str = _choice("glyphs", "Data set: a name of the catalogue, or folder for any tree of class folders.")
    data_dir: str = _choice("", "Where the unpacked data set lies. glyphs needs none.")
    dataset_options: str = _choice("", "Options of the data set, e.g. 'images_per_class=40' or 'test_fraction=0.3'.")
    bad_images: str = _choice("error", "What to do with files that are no readable images.", choices=("error", "skip"))
    check_images: str = _choice(
        "headers",
        "How images are checked before training: the header and the end of each file, or all of it (decode), at about "
        "a millisecond an image and core.",
        choices=("headers", "decode"),
    )
    holdout_classes: float = _choice(
        0.0, "Share of the training classes that is held out of training, as validation classes.", check=_fraction
    )
    cache: str = _choice(
        "auto",
        "Keep the decoded images in memory; auto: where they take less than --cache_limit_mb and less than half of the "
        "free memory, and the run sees them more than once.",
        choices=("auto", "true", "false"),
        switch=True,
    )
    cache_limit_mb: int = _choice(4096, "Most memory that --cache may take, in MiB.", check=_positive)
    # Views
    image_size: int = _choice(224, "Height and width in pixels of the crops that the network sees.", check=_positive)
    resize: int = _choice(256, "Pixels to which images are resized before the crop.", check=_positive)
    resize_mode: str = _choice(
        "shorter",
        "Whether the shorter side becomes --resize; both sides do (squash); or the longer side does and --pad_color "
        "fills up the square (pad).",
        choices=("shorter", "squash", "pad"),
    )
    pad_color: str = _choice(
        "black", "Colour around images, for --resize_mode=pad and multi_resolution: black, white, or R,G,B of 0 to 255."
    )
    augmentation: str = _choice("random_crop", "How training crops are taken.", choices=KINDS)
    min_scale: float = _choice(
        0.08, "Smallest share of the image's area that random_resized_crop takes.", check=lambda v: 0 < v <= 1
    )
    min_resolution: float = _choice(
        0.8, "Smallest longer side in multi_resolution, as a multiple of --image_size.", check=_positive
    )
    max_resolution: float = _choice(
        1.8, "Largest longer side in multi_resolution, as a multiple of --image_size.", check=_positive
    )
    flip: bool = _choice(True, "Mirror every second training image.")
    policy: str = _choice(
        "",
        "What happens to the finished crops, through keras-cv: e.g. 'rand_augment(magnitude=0.4) + 0.2 * grayscale' "
        "(the second on a fifth of the images).",
    )
    # Network
    backbone: str = _choice("mobilenetv2", "Backbone, with its options: e.g. 'mobilenetv2(alpha=0.35)'.")
    weights: str = _choice("none", "Backbone weights: none, imagenet, or the path of a .weights.h5 file.")
    embedding_dim: int = _choice(128, "Size of the embedding.", check=_positive)
    projection_bias: bool = _choice(True, "Give the projection to the embedding a bias.")
    pooling: str = _choice("avg", "Pooling over the positions of the feature map.", choices=("avg", "max"))
    dropout: float = _choice(
        0.0, "Share of the pooled features that is left out before the projection, in training.", check=_fraction
    )
    batch_norm: str = _choice(
        "frozen",
        "BatchNorm of the backbone: frozen; statistics (frozen statistics, trained gamma and beta); train.",
        choices=BATCH_NORM_MODES,
    )
    ensemble_heads: int = _choice(
        0, "Heads of an attention ensemble (ABE), which share --embedding_dim; 0: no ensemble.", check=_not_negative
    )
    ensemble_cut: str = _choice(
        "", "Layers of the backbone that begin and end the attention network, as 'a,b'; empty: the backbone's usual."
    )
    start_from: str = _choice(
        "",
        "Start from the weights of an old run, matched by part: a run folder (its newest checkpoint), a checkpoint, or "
        "a .keras file.",
    )
    # Objectives
    objectives: str = _choice("am_softmax", "Terms of the loss: e.g. 'am_softmax(margin=0.05) + 0.4 * jrs'.")
    # Batches
    sampling: str = _choice(
        "class_balanced",
        "P classes x K images; the same from a few super-classes (hierarchical); all images of random classes up to "
        "--batch_size (whole_classes); or a plain shuffle.",
        choices=("class_balanced", "shuffle", "whole_classes", "hierarchical"),
    )
    classes_per_batch: int = _choice(20, "P, for class_balanced and hierarchical.", check=_positive)
    images_per_class: int = _choice(5, "K, for class_balanced and hierarchical.", check=_positive)
    batch_size: int = _choice(
        100, "Images per batch, over all replicas, for shuffle and whole_classes.", check=_positive
    )
    short_classes: str = _choice(
        "repeat", "Classes of fewer than K images: repeat their images, or drop them.", choices=("repeat", "drop")
    )
    super_classes_per_batch: int = _choice(
        1, "S, for hierarchical: a batch has P / S classes of each of S super-classes.", check=_positive
    )
    super_class_weights: str = _choice(
        "proportional",
        "For hierarchical: super-classes in proportion to their classes, or all equally often (uniform).",
        choices=("proportional", "uniform"),
    )
    short_super_classes: str = _choice(
        "merge",
        "Super-classes of fewer than P / S classes: merge them into one, or drop them.",
        choices=("merge", "drop"),
    )
    # Optimisation
    epochs: int = _choice(12, "Number of epochs.", check=_not_negative)
    steps_per_epoch: int = _choice(0, "Steps per epoch; 0 for one pass over the training images.", check=_not_negative)
    optimizer: str = _choice("adam", "Optimiser.", choices=OPTIMIZERS)
    optimizer_form: str = _choice(
        "keras",
        "Whose formulas the optimiser follows: those of Keras, TensorFlow and Caffe, or PyTorch's. They differ in "
        "where epsilon is added (adam, adamw, rmsprop) and, when the rate drops, in momentum (sgd).",
        choices=FORMS,
    )
    learning_rate: float = _choice(1e-4, "Base learning rate.", check=_positive)
    backbone_rate: float = _choice(
        -1.0, "Learning rate of the backbone; -1: the base rate, 0: it does not train.", check=_rate
    )
    projection_rate: float = _choice(-1.0, "Learning rate of the projection; -1: the base rate.", check=_rate)
    objective_rate: float = _choice(
        -1.0, "Learning rate of the objectives' own weights; -1: the base rate.", check=_rate
    )
    drop_epochs: str = _choice("", "Epochs after which every rate drops, e.g. '8' or '20,40'.")
    drop_factor: float = _choice(0.1, "What each drop multiplies the rates by.", check=_positive)
    weight_decay: float = _choice(
        0.0, "Weight decay: coupled (added to the gradient), decoupled for adamw.", check=_not_negative
    )
    epsilon: float = _choice(
        1e-7, "Adam's and RMSprop's epsilon. PyTorch's and Caffe's own default is 1e-8.", check=_positive
    )
    momentum: float = _choice(0.9, "SGD's momentum.", check=_fraction)
    clip_norm: float = _choice(0.0, "Largest norm of the whole gradient; 0: no clipping.", check=_not_negative)
    mixed_precision: str = _choice("float32", "Dtype policy of the network.", choices=POLICIES)
    seed: int = _choice(0, "Seed of weights, batches and augmentation.", check=_not_negative)
    deterministic: bool = _choice(
        True,
        "On a CPU, run one operation at a time (each on all cores), so that the same run gives the same bits. Without "
        "it training is up to a fifth faster, and runs may differ in the last digits.",
    )
    logical_devices: int = _choice(
        0, "Split the CPU into this many logical devices and train on all; 0: the GPUs there are.", check=_not_negative
    )
    # Evaluation and records
    ks: str = _choice("1,2,4,8", "The K of Recall@K.")
    evaluate_every: int = _choice(
        1, "Evaluate the unseen classes every this many epochs; 0: at the end only.", check=_not_negative
    )
    evaluate_train: float = _choice(
        0.0,
        "Measure training classes too, with every evaluation: whole classes, drawn by the seed until they have this "
        "many images or, at most 1, this share of the training images; 0: none.",
        check=_not_negative,
    )
    generalisation_every: int = _choice(
        0,
        "Measure lambda, the H-divergence and the density of classes, between the images of --evaluate_train and the "
        "test images, before training, every this many epochs and at the end; 0: not.",
        check=_not_negative,
    )
    evaluation_batch_size: int = _choice(100, "Images per batch in evaluation.", check=_positive)
    selection: str = _choice(
        "last",
        "Which epoch's embedder is kept: the last; the best on the held-out training classes (validation); the best "
        "on the test classes (test: the papers' way, which flatters the figure).",
        choices=("last", "validation", "test"),
    )
    checkpoint_steps: int = _choice(0, "Checkpoint every this many steps, besides each epoch.", check=_not_negative)
    keep_checkpoints: int = _choice(2, "How many checkpoints stay.", check=_positive)
    moment_embedder: bool = _choice(
        False, "With horde: also write and measure moments.keras, which searches with all orders, reduced by a PCA."
    )
    evaluate_orders: str = _choice(
        "end",
        "With one horde: measure the embedding of each order of moments by itself, and all side by side, on the unseen "
        "classes: at the end; with every evaluation (epochs); or never.",
        choices=("end", "epochs", "never"),
    )
    report: bool = _choice(True, "Write report/index.html at the end.")
    run_dir: str = _choice("", "Folder of the run; must not exist yet, unless --resume.")

    def __post_init__(self):
        object.__setattr__(self, "cache", _text(self.cache))
        types = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            try:
                value = _CHECKS[types[field.name]](f"--{field.name}", getattr(self, field.name))
            except ValueError as error:
                raise UserError(str(error)) from error
            object.__setattr__(self, field.name, value)
            choices = field.metadata.get("choices")
            if choices and value not in choices:
                raise UserError(f"--{field.name}={value}: must be one of {', '.join(choices)}")
            check: Callable | None = field.metadata.get("check")
            if check and not check(value):
                raise UserError(f"--{field.name}={value}: out of range. {field.metadata['help']}")
        if not self.run_dir:
            raise UserError("--run_dir is missing: name the folder that the run shall write, e.g. --run_dir=runs/first")
        if self.resize < self.image_size and self.augmentation not in ("random_resized_crop", "multi_resolution"):
            raise UserError(
                f"--resize={self.resize} is smaller than --image_size={self.image_size}: no such crop can be cut"
            )
        if self.moment_embedder and self.selection != "last":
            raise UserError("--moment_embedder needs the moments of the last epoch: use --selection=last")
        if self.selection == "validation" and not self.holdout_classes:
            raise UserError("--selection=validation needs held-out classes: add e.g. --holdout_classes=0.2")
        if self.generalisation_every and not self.evaluate_train:
            raise UserError(
                "--generalisation_every compares seen with unseen classes: say how many images of training classes are "
                "measured, e.g. --evaluate_train=1 for all"
            )
        as_color(self.pad_color)
        if self.min_resolution > self.max_resolution:
            raise UserError(
                f"--min_resolution={self.min_resolution:g} is above --max_resolution={self.max_resolution:g}"
            )
        ks = self.recall_ks()
        if self.selection != "last" and 1 not in ks:
            raise UserError(f"--selection={self.selection} goes by recall@1: add 1 to --ks={self.ks}")
        self.drop_steps(1)
        if self.ensemble_heads and self.embedding_dim % self.ensemble_heads:
            raise UserError(
                f"--embedding_dim={self.embedding_dim} is no multiple of --ensemble_heads={self.ensemble_heads}"
            )
        if self.ensemble_cut and not self.ensemble_heads:
            raise UserError("--ensemble_cut needs --ensemble_heads, e.g. --ensemble_heads=8")
        parse_call(self.backbone, "--backbone")
        parse_sum(self.objectives, "--objectives")
        self.data_options()
        self.policy_steps()

    def recall_ks(self) -> tuple[int, ...]:
        """The K of Recall@K."""
        return _integers(self.ks, "--ks", at_least=1, required=True)

    def drop_steps(self, steps_per_epoch: int) -> list[int]:
        """The steps at which the rates drop."""
        epochs = _integers(self.drop_epochs, "--drop_epochs", at_least=1)
        if list(epochs) != sorted(set(epochs)):
            raise UserError(f"--drop_epochs={self.drop_epochs}: the epochs must ascend")
        return [epoch * steps_per_epoch for epoch in epochs]

    def learning_rates(self) -> dict[str, float]:
        """The rate of each part at the first step."""
        rates = {"backbone": self.backbone_rate, "projection": self.projection_rate, "objectives": self.objective_rate}
        return {part: self.learning_rate if rate < 0 else rate for part, rate in rates.items()}

    def data_options(self) -> dict[str, Any]:
        """The options of the data set."""
        return parse_arguments(self.dataset_options, "--dataset_options")

    def policy_steps(self) -> list[tuple[float, Call]]:
        """The steps of the augmentation policy: the share of the images, and what happens to them."""
        return parse_sum(self.policy, "--policy") if self.policy.strip() else []

    def as_flags(self) -> str:
        """The settings as a flag file that makes the same run."""
        lines = [f"--{field.name}={_text(getattr(self, field.name))}" for field in dataclasses.fields(self)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_flags(cls, text: str, **changes: Any) -> Experiment:
        """The experiment of a flag file that `as_flags` wrote.

        Raises:
            UserError: A line names no setting or holds no value of its type.
        """
        kinds = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for line in text.splitlines():
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, _, value = line.strip().removeprefix("--").partition("=")
            if name not in kinds:
                raise UserError(f"flag file: there is no setting --{name}")
            try:
                values[name] = _BOOLEANS[value] if kinds[name] is bool else kinds[name](value)
            except (KeyError, ValueError) as error:
                raise UserError(f"flag file: --{name}={value} is not of type {kinds[name].__name__}") from error
        return cls(**{**values, **changes})


_CHECKS: dict[type, Callable[[str, Any], Any]] = {
    bool: arguments.boolean,
    float: arguments.number,
    int: functools.partial(arguments.integer, at_most=_LARGEST_INTEGER),
    str: arguments.text,
}


def _integers(text: str, flag: str, at_least: int, required: bool = False) -> tuple[int, ...]:
    wanted = UserError(f"{flag}={text}: write integers of {at_least} to {_LARGEST_INTEGER:,} with commas, e.g. 1,2,4")
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise wanted from error
    if (required and not values) or any(not at_least <= value <= _LARGEST_INTEGER for value in values):
        raise wanted
    return values


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
