"""An experiment: the settings of all stages of a training run, their flag file, and when each of them has an effect."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from tfdml.effects import Effect
from tfdml.errors import UserError
from tfdml.io.manifests import parse_flags
from tfdml.training.settings import (
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OptimizationSettings,
    RunSettings,
    as_text,
)

_BOOLEANS = {"true": True, "false": False}


# The bases stand from last to first: a dataclass has the fields of its last base first.
@dataclasses.dataclass(frozen=True)
class Experiment(RunSettings, EvaluationSettings, OptimizationSettings, ModelSettings, DataSettings):
    """The settings of a run; each field is also a flag of `tfdml train` with the same name.

    It is the settings of every stage, in whose classes the fields are described.

    Raises:
        UserError: A value is out of range; the message names the flag.

    Example:
        >>> network = {"backbone": "conv4", "batch_norm": "train", "image_size": 28, "resize": 32, "embedding_dim": 64}
        >>> experiment = Experiment(run_dir="runs/first", dataset="glyphs", flip=False, epochs=1, **network)
        >>> experiment.backbone, experiment.epochs
        ('conv4', 1)
        >>> tfdml.training.train(experiment)["selection"]  # and "metrics", "metrics_before", "intervals", ...
        'the last epoch'
    """

    def __post_init__(self):
        super().__post_init__()
        if self.selection == "validation" and not self.holdout_classes:
            raise UserError("--selection=validation needs held-out classes: add e.g. --holdout_classes=0.1")

    def as_flags(self) -> str:
        """Return the settings as a flag file that makes the same run."""
        lines = [f"--{field.name}={as_text(getattr(self, field.name))}" for field in dataclasses.fields(self)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_flags(cls, text: str, **changes: Any) -> Experiment:
        """Return the experiment of a flag file that `as_flags` wrote.

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


#: When a setting has an effect, by setting. Those that are not here always have one: see `ALWAYS`.
EFFECTS: dict[str, Effect] = {
    field.name: field.metadata["effect"] for field in dataclasses.fields(Experiment) if "effect" in field.metadata
}
#: The settings that always have an effect, whatever the other settings are.
ALWAYS = frozenset(field.name for field in dataclasses.fields(Experiment)) - EFFECTS.keys()
