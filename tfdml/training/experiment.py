"""An experiment: the settings of all stages of a training run, their flag file, and when each of them has an effect."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from tfdml.effects import Effect, both, either, needs
from tfdml.errors import UserError
from tfdml.io.manifests import parse_flags
from tfdml.training.expressions import parse_terms
from tfdml.training.settings import (
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OptimizationSettings,
    RunSettings,
    Settings,
    as_text,
    integers,
)

_BOOLEANS = {"true": True, "false": False}
_Stage = TypeVar("_Stage", bound=Settings)


# The bases stand from last to first: a dataclass has the fields of its last base first.
@dataclasses.dataclass(frozen=True)
class Experiment(RunSettings, EvaluationSettings, OptimizationSettings, ModelSettings, DataSettings):
    """The settings of a run; each field is also a flag of `bin/train` with the same name.

    `data`, `model`, `optimization`, `evaluation` and `run` are those of one stage each, where the fields are described.

    Raises:
        UserError: A value is out of range; the message names the flag.

    Example:
        >>> network = {"backbone": "conv4", "batch_norm": "train", "image_size": 28, "resize": 32, "embedding_dim": 64}
        >>> experiment = Experiment(run_dir="runs/first", dataset="glyphs", flip=False, epochs=1, **network)
        >>> experiment.model.backbone, experiment.optimization.epochs
        ('conv4', 1)
        >>> tfdml.training.train(experiment)["selection"]  # and "metrics", "metrics_before", "intervals", ...
        'the last epoch'
    """

    def __post_init__(self):
        super().__post_init__()
        if self.selection == "validation" and not self.holdout_classes:
            raise UserError("--selection=validation needs held-out classes: add e.g. --holdout_classes=0.1")

    @property
    def data(self) -> DataSettings:
        """Which images, in which views and batches."""
        return self._stage(DataSettings)

    @property
    def model(self) -> ModelSettings:
        """The embedder."""
        return self._stage(ModelSettings)

    @property
    def optimization(self) -> OptimizationSettings:
        """The objectives and the optimiser."""
        return self._stage(OptimizationSettings)

    @property
    def evaluation(self) -> EvaluationSettings:
        """What is measured, and what counts."""
        return self._stage(EvaluationSettings)

    @property
    def run(self) -> RunSettings:
        """The folder, the seed, the devices and the checkpoints."""
        return self._stage(RunSettings)

    def _stage(self, kind: type[_Stage]) -> _Stage:
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    def as_flags(self) -> str:
        """The settings as a flag file that makes the same run."""
        lines = [f"--{field.name}={as_text(getattr(self, field.name))}" for field in dataclasses.fields(self)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_flags(cls, text: str, **changes: Any) -> Experiment:
        """The experiment of a flag file that `as_flags` wrote.

        Raises:
            UserError: A line names no setting or holds no value of its type.
        """
        kinds = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for name, value in parse_flags(text).items():
            if name not in kinds:
                raise UserError(f"flag file: there is no setting --{name}")
            try:
                values[name] = _BOOLEANS[value] if kinds[name] is bool else kinds[name](value)
            except (KeyError, ValueError) as error:
                raise UserError(f"flag file: --{name}={value} is not of type {kinds[name].__name__}") from error
        return cls(**{**values, **changes})


_BY_CLASS = needs("sampling", "class_balanced", "hierarchical")
_HIERARCHICAL = needs("sampling", "hierarchical")
_MULTI_RESOLUTION = needs("augmentation", "multi_resolution")
_TRAINED_BACKBONE = Effect(lambda given: given["backbone_rate"] != 0, "a --backbone_rate that is not 0")
_RATES = ("backbone_rate", "projection_rate", "objective_rate")


def _batch_size(given: Mapping[str, Any]) -> int:
    by_class = given["classes_per_batch"] * given["images_per_class"]
    return by_class if _BY_CLASS.holds(given) else given["batch_size"]


def _drops(given: Mapping[str, Any]) -> bool:
    return any(epoch < given["epochs"] for epoch in integers(given["drop_epochs"], "--drop_epochs"))


def _names_horde(given: Mapping[str, Any]) -> bool:
    names = [call.name for _, call in parse_terms(given["objectives"], "--objectives")]
    return any(name in ("horde", "high_order_moment") for name in names)


def _have_weights(given: Mapping[str, Any]) -> bool:
    from tfdml.training.terms import have_weights

    return have_weights(given["objectives"])


#: By setting; those that are not here always have an effect: see `ALWAYS`.
EFFECTS: dict[str, Effect] = {
    # Data.
    "data_dir": Effect(lambda given: given["dataset"] != "glyphs", "another --dataset than glyphs, which has no files"),
    "holdout_sampling": needs("holdout_classes"),
    "cache_limit_mb": needs("cache", "auto"),
    "pad_color": either(needs("resize_mode", "pad"), _MULTI_RESOLUTION),
    "min_scale": needs("augmentation", "random_resized_crop"),
    "min_resolution": _MULTI_RESOLUTION,
    "max_resolution": _MULTI_RESOLUTION,
    "classes_per_batch": _BY_CLASS,
    "images_per_class": _BY_CLASS,
    "short_classes": _BY_CLASS,
    "batch_size": needs("sampling", "shuffle", "whole_classes"),
    "super_classes_per_batch": _HIERARCHICAL,
    "super_class_weights": _HIERARCHICAL,
    "short_super_classes": _HIERARCHICAL,
    # Model.
    "ensemble_cut": needs("ensemble_heads"),
    # Objectives and optimisation.
    "learning_rate": Effect(
        lambda given: any(given[rate] < 0 for rate in _RATES),
        "a part without a rate of its own (--backbone_rate, --projection_rate or --objective_rate of -1)",
    ),
    # A flag file may carry it for terms that a command line adds.
    "objective_rate": Effect(_have_weights, "a term with weights in --objectives, such as am_softmax", in_files=False),
    "final_rate": needs("schedule", "cosine", "linear"),
    "drop_epochs": both(needs("schedule", "step"), Effect(_drops, "an epoch in it that is below --epochs")),
    "drop_factor": both(needs("schedule", "step"), needs("drop_epochs")),
    "layer_decay": _TRAINED_BACKBONE,
    "unfreeze_epochs": _TRAINED_BACKBONE,
    "epsilon": needs("optimizer", "adam", "adamw", "rmsprop", "muon"),
    "momentum": needs("optimizer", "sgd"),
    "clip": needs("clip_norm"),
    "xbm_start": needs("cross_batch_memory"),
    "gradient_cache": Effect(
        lambda given: given["gradient_cache"] < _batch_size(given), "a batch of more images than that"
    ),
    # Evaluation.
    "generalisation_every": needs("evaluate_train"),
    "selection_metric": needs("selection", "validation", "test"),
    "refit": needs("selection", "validation"),
    "moment_embedder": Effect(_names_horde, "horde(...) in --objectives"),
    "evaluate_orders": Effect(_names_horde, "horde(...) in --objectives"),
    # Run.
    "seed": Effect(lambda given: "," not in given["seeds"], "--seeds without a list, which names the seeds itself"),
    "watch_triplets": needs("watch_every"),
    "stop_on": needs("watch_every"),
}

#: The settings that always have an effect, whatever the other settings are.
ALWAYS = frozenset(
    {
        # Data.
        *("dataset", "dataset_options", "bad_images", "check_images", "holdout_classes", "cache", "image_size"),
        *("resize", "resize_mode", "augmentation", "flip", "policy", "sampling"),
        # Model.
        *("backbone", "weights", "embedding_dim", "projection_bias", "pooling", "dropout", "batch_norm"),
        *("ensemble_heads", "lora_rank", "mixed_precision", "jit_compile", "start_from"),
        # Objectives and optimisation.
        *("objectives", "epochs", "steps_per_epoch", "optimizer", "optimizer_form", "backbone_rate"),
        *("projection_rate", "schedule", "warm_up_epochs", "weight_decay", "clip_norm", "ema"),
        "cross_batch_memory",
        # Evaluation.
        *("ks", "evaluate_every", "evaluate_train", "evaluation_batch_size", "selection", "report"),
        # Run.
        *("run_dir", "seeds", "deterministic", "logical_devices", "checkpoint_steps", "keep_checkpoints"),
        *("watch_every", "watch_projector", "log_to"),
    }
)
