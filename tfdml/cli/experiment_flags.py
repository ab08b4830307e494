"""One absl flag per setting of an experiment, made from the settings themselves."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable

from absl import flags

from tfdml.training.experiment import Experiment
from tfdml.training.settings import DataSettings, EvaluationSettings, ModelSettings, OptimizationSettings, RunSettings

_STAGES = {
    "Data: images, views and batches": DataSettings,
    "Model": ModelSettings,
    "Objectives and optimisation": OptimizationSettings,
    "Evaluation": EvaluationSettings,
    "Run": RunSettings,
}
_DEFINE: dict[type, Callable] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def define() -> None:
    """Define the flags."""
    kinds = typing.get_type_hints(Experiment)
    for field in dataclasses.fields(Experiment):
        choices = field.metadata.get("choices")
        text = field.metadata["help"] + (f" One of {', '.join(choices)}." if choices else "")
        if field.metadata.get("switch"):
            # Takes a word, but --name alone means true and --noname false.
            parser: flags.ArgumentParser = flags.ArgumentParser()
            flag = flags.Flag(parser, flags.ArgumentSerializer(), field.name, field.default, text, boolean=True)
            flags.DEFINE_flag(flag, module_name=__name__)
        else:
            _DEFINE[kinds[field.name]](field.name, field.default, text, module_name=__name__)


def sections() -> dict[str, list[str]]:
    """The flags of each stage, for `--help`."""
    return {title: [field.name for field in dataclasses.fields(stage)] for title, stage in _STAGES.items()}


def given() -> dict[str, typing.Any]:
    """The settings that the command line or a flag file sets."""
    return {
        field.name: flags.FLAGS[field.name].value
        for field in dataclasses.fields(Experiment)
        if flags.FLAGS[field.name].present
    }
