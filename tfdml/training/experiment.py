"""An experiment: the settings of all stages of a training run, and their flag file."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, TypeVar

from tfdml.errors import UserError
from tfdml.manifests import parse_flags
from tfdml.training.settings import (
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OptimizationSettings,
    RunSettings,
    Settings,
    as_text,
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
