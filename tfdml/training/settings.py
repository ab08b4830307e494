"""The settings of a training run, stage by stage and together: every one with its default, meaning
and bounds.

`DataSettings`, `ModelSettings`, `OptimizationSettings`, `EvaluationSettings` and `RunSettings` are
the stages, and `Experiment` has the settings of all. TensorFlow is not imported.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.expressions import HUB, Arguments, Call, Terms
from tfdml.flags import parse_flags, shipped
from tfdml.options import (
    Color,
    Settings,
    condition,
    fields_of,
    flag_file,
    flag_text,
    from_flag_texts,
    option,
    unmet,
    values_of,
)
from tfdml.run_folder import RunFolder
from tfdml.training.choices import (
    Augmentation,
    Centered,
    ClassBalanced,
    Head,
    HoldoutSampling,
    Hub,
    Interpolation,
    Linear,
    Random,
    RandomCrop,
    Sampling,
    TextBackbone,
    Vectors,
)

#: P of a batch of classes where it is not given and the data has as many.
MOST_CLASSES = 20
#: The metrics of images that are measured anyway.
USUAL_METRICS = ("map@r", "r_precision", "recall@1")
#: The metrics of given pairs that may select an epoch.
PAIR_METRICS = ("auc", "triplet_accuracy")
#: See `tfdml.training.optimizers`.
OPTIMIZERS = ("adam", "adamw", "sgd", "pytorch_adam", "pytorch_adamw")
SCHEDULES = ("step", "cosine")
_MOST_SEEDS = 1000
#: Of a resumed run: where the folder lies, and where the images, which are compared by their
#: checksums.
MAY_DIFFER = ("run_dir", "data_dir", "features")
# What changes nothing of the training.
_WATCHING = ("watch_every", "log_to")
# What decides how long a run is.
_LENGTH = ("epochs", "steps_per_epoch")
_Stage = TypeVar("_Stage", bound="Settings")


def of_images(default: Any, *, requires: str = "", **rules: Any) -> Any:
    """Return a field of `option` that has no effect where `--features` are given."""
    both = f"{requires} and no features" if requires else "no features"
    return option(default, requires=both, **rules)


@dataclasses.dataclass(frozen=True)
class DataSettings(Settings):
    """Which images a run sees, in which views, and which of them form a batch.

    Raises:
        UserError: A value is out of range, or two do not go together.

    Example:
        >>> settings = DataSettings(dataset="glyphs", dataset_options="size=32", image_size=28,
        ...     resize=32, sampling="neighbors(every=2)")
        >>> settings.dataset_options, settings.sampling.every
        ({'size': 32}, 2)
    """

    title: ClassVar[str] = "Which images a run sees, in which views, and what forms a batch"

    dataset: str = of_images(
        "glyphs", help="Data set: a name of the catalog, or folder for any tree of class folders."
    )
    data_dir: str = option(
        "",
        requires="reads_files or features",
        help="Folder of the unpacked data set, or of the images that --features name. glyphs needs "
        "none.",
    )
    features: str = option(
        "",
        help="Stored embeddings with labels instead of images, on which a --head is trained: a "
        "folder of tfdml embed, or a Parquet, .npz or .npy file.",
    )
    text_backbone: TextBackbone | None = option(
        None,
        help="Train an embedder of texts next to that of images, for objectives such as clip and "
        "siglip. The texts are those of a list, or else the names of the classes. They are read "
        "by one of these.",
    )
    dataset_options: Arguments = option(
        Arguments(),
        help="Options of the data set, e.g. 'images_per_class=40' or 'test_fraction=0.3'.",
    )
    bad_images: str = of_images(
        "error",
        words=("error", "skip"),
        help="What to do with files that are no readable images; skip decodes every image first.",
    )
    drop: str = option(
        "",
        help="A CSV file of tfdml audit, maybe edited: training images whose action is drop are "
        "left out.",
    )
    final_of: str = option(
        "",
        help="Train the final model of this run: with its settings, on all classes, of which none "
        "is left to measure it on. It sees each image as often as the run did until its selected "
        "epoch.",
    )
    also_measure: str = of_images(
        "",
        requires="no text_backbone",
        help="Measure the test images of a second data set whenever the unseen classes are, to see "
        "what training forgets: its name and its data_dir, such as omniglot:/data/omniglot.",
    )
    holdout_classes: float = option(
        0.0,
        at_least=0,
        below=1,
        help="Share of the training classes that is held out, as validation classes.",
    )
    holdout_sampling: HoldoutSampling = option(
        Random(),
        requires="holdout_classes or folds",
        help="How --holdout_classes are drawn; --folds sets part=N.",
    )
    cache: str = of_images(
        "auto",
        words=("auto", "true", "false"),
        help="Keep the decoded images in memory; auto: where they are seen again, and take less "
        "than 4 GiB and half of the free memory.",
    )
    # Views
    image_size: int = of_images(
        224, at_least=1, help="Height and width in pixels of the crops that the network sees."
    )
    resize: int = of_images(
        256, at_least=1, help="Pixels to which images are resized before the crop."
    )
    resize_mode: str = of_images(
        "shorter",
        words=("shorter", "squash", "pad"),
        help="Whether the shorter side becomes --resize; both sides do (squash); or the longer "
        "side does and --pad_color fills up the square (pad).",
    )
    pad_color: Color = of_images(
        Color.parse("black", "pad_color"),
        requires="resize_mode=pad or augmentation=multi_resolution",
        help="Color around images: black, white, or R,G,B of 0 to 255.",
    )
    augmentation: Augmentation = of_images(RandomCrop(), help="How training crops are taken.")
    flip: bool = of_images(True, help="Mirror every second training image.")
    policy: Terms | None = of_images(
        None,
        help="What happens to the finished crops, by Keras's layers: e.g. "
        "'rand_augment(factor=0.4) + 0.2 * grayscale' (the second on a fifth of the images).",
    )
    # Batches
    sampling: Sampling = option(ClassBalanced(), help="What a batch is.")
    classes_per_batch: int = option(
        0,
        at_least=0,
        requires="sampling.by_class",
        help="P, the classes of a batch; 0: 20, or all where there are fewer.",
    )
    images_per_class: int = option(
        5,
        at_least=1,
        requires="sampling.by_class",
        help="K, the images of each class in a batch.",
    )
    batch_size: int = option(
        100,
        at_least=1,
        requires="sampling.by_size",
        help="Images per batch, over all replicas, without P and K.",
    )

    def __post_init__(self):
        super().__post_init__()
        fits = isinstance(self.augmentation, (RandomCrop, Centered))
        if fits and self.resize < self.image_size:
            raise UserError(f"is smaller than image_size={self.image_size}", resize=self.resize)
        if self.features and self.policy:
            raise UserError("changes images, and features are vectors", policy=str(self.policy))
        of_vectors = isinstance(self.text_backbone, Vectors)
        if self.text_backbone and bool(self.features) != of_vectors:
            raise UserError(
                "stored vectors of texts go with features alone",
                text_backbone=str(self.text_backbone),
            )

    @condition("another --dataset than glyphs, which has no files")
    def reads_files(self) -> bool:
        """Whether the data set has files."""
        return self.dataset != "glyphs"

    @property
    def data_name(self) -> str:
        """What is trained on: the data set, or the stored features."""
        return Path(self.features).stem if self.features else self.dataset


@dataclasses.dataclass(frozen=True)
class ModelSettings(Settings):
    """The embedder: its backbone and weights, and what stands behind them.

    Raises:
        UserError: A value is out of range.

    Example:
        >>> settings = ModelSettings(backbone="conv4(width=32)", head="mlp(hidden=64)")
        >>> settings.backbone.arguments, settings.head.hidden
        ({'width': 32}, 64)
    """

    title: ClassVar[str] = "The embedder: its backbone and weights, and what stands behind them"

    backbone: Call = of_images(
        Call("mobilenetv2"),
        help="Backbone, with its options: e.g. 'mobilenetv2(alpha=0.35)'; or a preset of KerasHub "
        "with its weights, by name or folder: hub:dinov2_small.",
    )
    weights: str = of_images(
        "none", help="Backbone weights: none, imagenet, or the path of a .weights.h5 file."
    )
    head: Head = option(
        Linear(), help="What projects the pooled features, or --features, to the embedding."
    )
    embedding_dim: int = option(
        128,
        at_least=0,
        help="Size of the embedding; 0: that of the pooled features, which it then is.",
    )
    pooling: str = of_images(
        "avg",
        words=("avg", "max", "gem", "attention", "cls"),
        help="Pooling over the positions of the feature map: avg; max; gem, a trained power mean; "
        "attention, to a trained query; or cls, a transformer's class token.",
    )
    dropout: float = option(
        0.0,
        at_least=0,
        below=1,
        help="Share of the pooled features that is left out before the projection, in training.",
    )
    batch_norm: str = of_images(
        "frozen",
        words=("frozen", "statistics", "train"),
        help="BatchNorm of the backbone: frozen; statistics (frozen statistics, trained gamma and "
        "beta); train.",
    )
    mixed_precision: str = option(
        "float32",
        words=("float32", "mixed_bfloat16", "mixed_float16"),
        help="Dtype policy of the network.",
    )
    start_from: str = option(
        "",
        help="Start from the weights of an old run, matched by part: a run folder (its newest "
        "checkpoint), a checkpoint, or a .keras file.",
    )


@dataclasses.dataclass(frozen=True)
class OptimizationSettings(Settings):
    """What is minimized, how, and for how long.

    Raises:
        UserError: A value is out of range, or text cannot be read.

    Example:
        >>> OptimizationSettings(learning_rate=1e-3, backbone_rate=1e-5).learning_rates()
        {'backbone': 1e-05, 'projection': 0.001, 'objectives': 0.001}
    """

    title: ClassVar[str] = "What is minimized, how, and for how long"

    objectives: Terms = option(
        Terms.parse("am_softmax", "objectives"),
        help="Terms of the loss: e.g. 'am_softmax(margin=0.05) + 0.4 * jrs'.",
    )
    epochs: int = option(12, at_least=0, help="Number of epochs.")
    steps_per_epoch: int = option(
        0, at_least=0, help="Steps per epoch; 0: one pass over the training images."
    )
    min_images: int = option(
        0,
        at_least=0,
        requires="epochs and no steps_per_epoch",
        help="How many images the run sees at least, each as often as it is in a batch: where one "
        "pass over few images an epoch is less, epochs are longer.",
    )
    optimizer: str = option(
        "adam",
        words=OPTIMIZERS,
        help="Optimizer. pytorch_adam and pytorch_adamw follow PyTorch's formulas, the others "
        "those of Keras, TensorFlow and Caffe. They differ in where epsilon is added.",
    )
    learning_rate: float = option(
        1e-4,
        above=0,
        requires="backbone_rate=-1.0 or projection_rate=-1.0 or objective_rate=-1.0",
        help="Base learning rate.",
    )
    backbone_rate: float = of_images(
        -1.0,
        at_least=0,
        also=-1,
        help="Learning rate of the backbone; -1: the base rate, 0: it does not train.",
    )
    projection_rate: float = option(
        -1.0, at_least=0, also=-1, help="Learning rate of the projection; -1: the base rate."
    )
    objective_rate: float = option(
        -1.0,
        at_least=0,
        also=-1,
        help="Learning rate of the objectives' own weights; -1: the base rate.",
    )
    schedule: str = option(
        "step",
        words=SCHEDULES,
        help="How the rates fall: in steps, by --drop_epochs, or along half a cosine to 0 at the "
        "end.",
    )
    warm_up_epochs: float = option(
        0.0, at_least=0, help="Epochs, or a part of one, in which the rates rise evenly."
    )
    drop_epochs: tuple[int, ...] = option(
        (),
        at_least=1,
        requires="schedule=step and drops_in_time",
        help="Epochs after which every rate drops, e.g. '8' or '20,40'.",
    )
    drop_factor: float = option(
        0.1,
        above=0,
        requires="schedule=step and drop_epochs",
        help="What each drop multiplies the rates by.",
    )
    weight_decay: float = option(
        0.0,
        at_least=0,
        help="Weight decay: coupled (added to the gradient), decoupled for adamw; not of learned "
        "scales, offsets, boundaries and targets.",
    )
    epsilon: float = option(
        -1.0,
        above=0,
        also=-1,
        requires="optimizer=adam|adamw|pytorch_adam|pytorch_adamw",
        help="Adam's epsilon; -1: the default of 1e-7, of pytorch_adam and pytorch_adamw 1e-8.",
    )
    clip_norm: float = option(0.0, at_least=0, help="Largest norm of the gradient; 0: no clipping.")
    ema: float = option(
        0.0,
        at_least=0,
        below=1,
        help="Which share of its old value the running average of each weight keeps in a step, "
        "e.g. 0.999: the averages are evaluated and kept. 0: none.",
    )
    gradient_cache: int = option(
        0,
        at_least=0,
        help="Keep the activations of this many images of the batch (of each device) at a time: "
        "batches beyond the memory, for one more pass forward; 0: of all at once.",
    )
    steps_per_execution: int = option(
        1,
        at_least=1,
        help="Run this many steps between two returns to Python, for the same result; of an epoch "
        "that is no multiple of it, the most below it that divides the epoch. Alarms, checkpoints "
        "and signals wait for them.",
    )

    def __post_init__(self):
        super().__post_init__()
        if list(self.drop_epochs) != sorted(set(self.drop_epochs)):
            raise UserError("the epochs must ascend", drop_epochs=self.drop_epochs)
        if self.warm_up_epochs and self.warm_up_epochs >= self.epochs:
            raise UserError(
                f"leaves none of epochs={self.epochs}", warm_up_epochs=self.warm_up_epochs
            )

    @condition("an epoch in it that is below --epochs")
    def drops_in_time(self) -> bool:
        """Whether a rate drops before the end."""
        return any(epoch < self.epochs for epoch in self.drop_epochs)

    @condition("horde(...) in --objectives")
    def has_moments(self) -> bool:
        """Whether a term is of high-order moments."""
        names = {call.name for _, call in self.objectives}
        return not names.isdisjoint({"horde", "high_order_moment"})

    def epoch_steps(self, one_pass: int, batch_size: int) -> int:
        """Return the steps of an epoch.

        Args:
            one_pass: Those of one pass over the training images.
            batch_size: The images of a batch.

        Example:
            >>> OptimizationSettings(epochs=12, min_images=48_000).epoch_steps(11, 100)
            40
        """
        least = math.ceil(self.min_images / (batch_size * max(self.epochs, 1)))
        return self.steps_per_epoch or max(one_pass, least)

    def execution_steps(self, steps_per_epoch: int) -> int:
        """Return the steps between two returns to Python: the most that divide an epoch.

        Example:
            >>> OptimizationSettings(steps_per_execution=16).execution_steps(12)
            12
        """
        # An execution that went beyond the end of an epoch would train steps that nobody asked for.
        most = min(self.steps_per_execution, steps_per_epoch)
        return next(steps for steps in range(most, 0, -1) if steps_per_epoch % steps == 0)

    def learning_rates(self, text_backbone: TextBackbone | None = None) -> dict[str, float]:
        """Return the rate of each part at the first step.

        Args:
            text_backbone: That of a run with texts. One from scratch has the projection's rate,
                and a preset the backbone's, but for a rate of its own.
        """
        rates = {
            "backbone": self._rate(self.backbone_rate),
            "projection": self._rate(self.projection_rate),
            "objectives": self._rate(self.objective_rate),
        }
        if text_backbone is not None:
            usual = rates["backbone" if isinstance(text_backbone, Hub) else "projection"]
            rate = getattr(text_backbone, "rate", -1.0)
            rates["text backbone"] = usual if rate < 0 else rate
            rates["text projection"] = rates["projection"]
        return rates

    def _rate(self, rate: float) -> float:
        return self.learning_rate if rate < 0 else rate


@dataclasses.dataclass(frozen=True)
class EvaluationSettings(Settings):
    """What is measured, when, and what counts and is written in the end.

    Raises:
        UserError: A value is out of range, or two do not go together.

    Example:
        >>> EvaluationSettings(ks="1,10", selection="test").ks
        (1, 10)
    """

    title: ClassVar[str] = "What is measured, when, and what counts and is written in the end"

    ks: tuple[int, ...] = option((1, 2, 4, 8), at_least=1, help="The K of Recall@K.")
    evaluate_every: int = option(
        1,
        at_least=0,
        help="Evaluate the unseen classes every this many epochs; 0: at the end only.",
    )
    selection: str = option(
        "last",
        words=("last", "validation", "test"),
        help="Which epoch's embedder is kept: the last; the best on the held-out training classes "
        "(validation); the best on the test classes (test: the papers' way, which gives too high a "
        "number).",
    )
    selection_metric: str = option(
        "map@r",
        requires="selection=validation|test",
        help="The metric that selects the epoch, as in tfdml evaluate --metrics; of given pairs "
        "auc, of triplets triplet_accuracy; of texts that search images text_to_image/map, and the "
        "reverse image_to_text/map.",
    )
    interpolate: Interpolation = of_images(
        Interpolation(),
        requires="no text_backbone and no moment_embedder",
        help="Keep weights between the start of the training (0) and its end (1), which forget "
        "less of what the backbone knew; auto: the share that is best on held-out classes and on "
        "--also_measure. A projection that starts with random weights is that of the end.",
    )
    moment_embedder: bool = option(
        False,
        requires="has_moments",
        help="Also write and measure moments.keras, which searches with all orders of horde, "
        "reduced by a PCA.",
    )
    report: bool = option(True, help="Write report/index.html at the end.")

    def __post_init__(self):
        super().__post_init__()
        if not self.ks:
            raise UserError("name at least one K, e.g. 1,2,4", ks="")
        if self.moment_embedder and self.selection != "last":
            raise UserError(
                "needs the moments of the last epoch: use selection=last", moment_embedder=True
            )
        direction, _, metric = self.selection_metric.rpartition("/")
        if 1 not in self.ks and self.selection != "last" and metric == "recall@1":
            raise UserError("selection_metric=recall@1 goes by the K of 1: add it", ks=self.ks)
        if metric in USUAL_METRICS + PAIR_METRICS and not direction:
            return
        from tfdml.evaluation.metrics import find_metric

        is_direction = direction in ("", "text_to_image", "image_to_text")
        with user_errors(UserError, ERROR_TEXT, selection_metric=self.selection_metric):
            find_metric(metric if is_direction else self.selection_metric)


@dataclasses.dataclass(frozen=True)
class RunSettings(Settings):
    """Where a run is written, and what makes it repeatable and resumable.

    Raises:
        UserError: A value is out of range, or the folder is not named.

    Example:
        >>> RunSettings(run_dir="runs/first", seed=3).seed
        3
    """

    title: ClassVar[str] = "Where a run is written, and what makes it repeatable and resumable"

    run_dir: str = option("", help="Folder of the run; must not exist yet, unless --resume.")
    seed: int = option(
        0,
        at_least=0,
        requires="counts_seeds",
        help="Seed of weights, batches and augmentation.",
    )
    seeds: tuple[int, ...] = option(
        (),
        at_least=0,
        help="Train a run for each of several seeds, in seed_N of --run_dir, and report their mean "
        "with intervals: how many, from --seed on (3), or which (0,1,2).",
    )
    folds: int = option(
        0,
        at_least=2,
        also=0,
        help="Train a run for each of this many parts of the training classes, with that part held "
        "out, in fold_N of --run_dir, and report their mean, and what their embeddings side by "
        "side reach.",
    )
    deterministic: bool = option(
        True,
        help="On a CPU, run one operation at a time (each on all cores), and sum gradients in one "
        "order, so that the same run gives the same bits. Without it training is up to a fifth "
        "faster. On JAX a CPU gives the same bits either way.",
    )
    logical_devices: int = option(
        0,
        at_least=0,
        help="Split the CPU into this many logical devices and train on all; 0: the GPUs there "
        "are.",
    )
    shard_classes: bool = option(
        False,
        help="Divide the proxies of classes, and their optimizer state, among the devices: for "
        "very many classes. On JAX.",
    )
    checkpoint_steps: int = option(
        0, at_least=0, help="Checkpoint every this many steps, besides each epoch."
    )
    watch_every: int = option(
        100,
        at_least=0,
        help="Look at a batch every this many steps: gradients by part and term, how far "
        "embeddings spread, alarms; 0: never.",
    )
    log_to: str = option(
        "",
        help="Log each epoch by a Keras callback too: the import path of what makes it, such as "
        "my_logging.start.",
    )
    imports: str = option(
        "",
        flag="import",
        help="Modules of your own, with commas, that register losses, data sets and the like: see "
        "`tfdml.register`. They must be loaded, or named on the command line or by the variable "
        "TFDML_IMPORT.",
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.run_dir:
            raise UserError(
                "is missing: name the folder that the run writes, e.g. runs/first", run_dir=...
            )
        several = self.seed_list()
        if self.seeds and not 2 <= len(several) == len(set(several)) <= _MOST_SEEDS:
            raise UserError(
                f"write how many (2 to {_MOST_SEEDS}), or which (0,1,2)", seeds=self.seeds
            )
        if self.log_to and not re.fullmatch(r"(\w+\.)+\w+", self.log_to):
            raise UserError(
                "name what makes a Keras callback, such as my_logging.start", log_to=self.log_to
            )

    @condition("--seeds without a list, which names the seeds itself")
    def counts_seeds(self) -> bool:
        """Whether seeds are counted from `seed` on, or there is one."""
        return len(self.seeds) < 2

    def seed_list(self) -> tuple[int, ...]:
        """Return the seeds of `seeds`; empty where `seed` is the only one.

        Example:
            >>> RunSettings(run_dir="runs/first", seeds="3").seed_list()
            (0, 1, 2)
        """
        if len(self.seeds) != 1:
            return self.seeds
        count = min(self.seeds[0], _MOST_SEEDS + 1)
        return tuple(range(self.seed, self.seed + count))


# The bases stand from last to first: a dataclass has the fields of its last base first.
@dataclasses.dataclass(frozen=True)
class Experiment(
    RunSettings, EvaluationSettings, OptimizationSettings, ModelSettings, DataSettings
):
    """The settings of a run: those of every stage; each is also a flag of `tfdml train`.

    Settings that are read from text, such as `sampling`, may be given as it.

    Raises:
        UserError: A value is out of range; the message names it.

    Example:
        >>> network = {"backbone": "conv4", "batch_norm": "train", "image_size": 28, "resize": 32,
        ...     "embedding_dim": 64}
        >>> experiment = Experiment(run_dir="runs/first", dataset="glyphs", flip=False, epochs=1,
        ...     sampling="class_balanced(short_classes=drop)", **network)
        >>> experiment.backbone.name, experiment.sampling.short_classes, experiment.epochs
        ('conv4', 'drop', 1)
        >>> # and "metrics", "metrics_before", "intervals", ...
        >>> tfdml.training.train(experiment).result["dataset"]
        'glyphs'
    """

    def __post_init__(self):
        import_own(self.imports)
        super().__post_init__()
        if self.folds and (self.seeds or self.holdout_classes):
            raise UserError(
                "holds out classes itself, with one seed: leave out holdout_classes and seeds",
                folds=self.folds,
            )
        has_held_out = bool(self.holdout_classes or self.folds)
        if self.selection == "validation" and not has_held_out:
            raise UserError(
                "needs held-out classes: add e.g. holdout_classes=0.1", selection="validation"
            )
        if self.interpolate.share is None and not (self.also_measure and has_held_out):
            raise UserError(
                "chooses by held-out classes and a second data set: add holdout_classes=0.1 and "
                "also_measure=NAME:FOLDER",
                interpolate="auto",
            )
        if "/" in self.selection_metric and not self.text_backbone:
            raise UserError("texts need a text_backbone", selection_metric=self.selection_metric)

    def part(self, stage: type[_Stage]) -> _Stage:
        """Return the settings of one stage.

        Example:
            >>> Experiment(run_dir="runs/first", dropout=0.5).part(ModelSettings).dropout
            0.5
        """
        return stage(**{name: getattr(self, name) for name in fields_of(stage)})

    def as_flags(self) -> str:
        """Return the settings as a flag file that makes the same run."""
        return flag_file(self)

    def differences_to(self, other: Experiment) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of each setting that differs in another experiment, with both values."""
        for name, value in values_of(self).items():
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
        return cls.of_recipe(recipe, **{**from_flag_texts(cls, flags), **changes})

    @classmethod
    def of_run(cls, run_dir: str | os.PathLike) -> Experiment:
        """Return the experiment that a run was started with.

        Args:
            run_dir: The folder of the run.

        Raises:
            UserError: This is not the folder of a run, or its flags are damaged.

        Example:
            >>> Experiment.of_run("runs/first").epochs
            1
        """
        folder = RunFolder(run_dir)
        text = folder.read_flags()
        with user_errors(UserError, f"{folder.flags}: {ERROR_TEXT}"):
            return cls.from_flags(text, run_dir=str(folder.path))

    def check_resumes(self) -> None:
        """Raise a `UserError` where the run in `run_dir` was started with other settings."""
        for name, old, new in Experiment.of_run(self.run_dir).differences_to(self):
            if name in MAY_DIFFER or name in _WATCHING:
                continue
            end = "; to end it early, add --finish" if name in _LENGTH else ""
            raise UserError(
                f"the run was started with {flag_text(old)}: leave it out{end}",
                **{name: flag_text(new)},
            )

    @classmethod
    def of_recipe(cls, recipe: str = "auto", **given: Any) -> Experiment:
        """Return an experiment with the settings of a recipe, but for those that are given: see
        `with_recipe`.

        Example:
            >>> Experiment.of_recipe("scratch", run_dir="runs/first", schedule="step").schedule
            'step'
        """
        return cls(**with_recipe(recipe, given))


def final_settings(run_dir: str | os.PathLike) -> dict[str, Any]:
    """Return the settings of the final model of a run, but for its folder: see
    `DataSettings.final_of`.

    Args:
        run_dir: The folder of the run.

    Raises:
        UserError: The run has not ended, or is of several seeds or folds.
    """
    folder = RunFolder(run_dir)
    result = folder.read_result()
    if result is None:
        raise UserError("the run has not ended; end it first", final_of=folder.path)
    if "epoch" not in result:
        raise UserError(
            f"has several runs: name one, such as {folder.path}/seed_0", final_of=folder.path
        )
    settings = values_of(Experiment.of_run(run_dir))
    length = {
        "epochs": result["epoch"],
        "steps_per_epoch": folder.epoch_length().steps_of_final(),
        "min_images": 0,
    }
    all_classes = {"holdout_classes": 0.0, "holdout_sampling": Random(), "selection": "last"}
    if interpolation := result.get("interpolation"):
        all_classes["interpolate"] = Interpolation(interpolation["share"])
    unmeasured = {"final_of": str(folder.path), "report": False, "moment_embedder": False}
    return settings | length | all_classes | unmeasured


def import_own(modules: str) -> None:
    """Import modules of the user's own, whose choices the settings may name."""
    if modules:
        from tfdml.registry import import_modules

        import_modules(modules)


#: How to train where nothing is known but the data: the names of the flag files in
#: `configs/recipes`.
RECIPES = ("finetune", "frozen", "scratch")
_RUN_LENGTH = ("epochs", "steps_per_epoch", "min_images")
_BATCH = ("classes_per_batch", "images_per_class", "objectives", "sampling")
# Where one of the second is given, the recipe has no say in the first.
_DECIDED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (_RUN_LENGTH, _RUN_LENGTH),
    (("schedule",), ("drop_epochs",)),
    # A loss on pairs finds few positives in shuffled batches.
    (("batch_size", "sampling"), _BATCH),
)


def recipe_for(given: Mapping[str, Any]) -> str:
    """Return the recipe that suits settings: `frozen` where no backbone trains, `scratch` without
    weights.

    Example:
        >>> recipe_for({}), recipe_for({"weights": "imagenet"})
        ('scratch', 'finetune')
        >>> recipe_for({"features": "vectors.npz"})
        'frozen'
    """
    if given.get("features") or given.get("backbone_rate") == 0:
        return "frozen"
    of_hub = str(given.get("backbone")).startswith(HUB)
    if given.get("start_from") or of_hub or given.get("weights", "none") != "none":
        return "finetune"
    return "scratch"


def with_recipe(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a recipe, which count where they are not given and have an
    effect.

    Args:
        recipe: One of `RECIPES`; auto: that of `recipe_for`; none: only what is given.
        given: Settings, by name. With `epochs`, `steps_per_epoch` or `min_images` the length is not
            the recipe's, with `drop_epochs` the schedule, and with `objectives`, `sampling`,
            `classes_per_batch` or `images_per_class` what a batch is.

    Example:
        >>> with_recipe("none", {"epochs": 1})
        {'epochs': 1}
    """
    if recipe == "none":
        return dict(given)
    file = shipped(f"configs/recipes/{recipe_for(given) if recipe == 'auto' else recipe}.flags")
    if file is None:
        raise UserError(f"must be one of {', '.join(RECIPES)}, auto, none", recipe=recipe)
    settings = from_flag_texts(Experiment, parse_flags(file.read_text(encoding="utf-8")))
    decided = set(given)
    for names, others in _DECIDED:
        if not decided.isdisjoint(others):
            decided.update(names)
    settings = {name: value for name, value in settings.items() if name not in decided}
    draft = Experiment.draft({**settings, **given})
    unused = dict(unmet(draft, settings))
    counted = [name for name in settings if name not in unused]
    return {name: getattr(draft, name) for name in (*counted, *given)}
