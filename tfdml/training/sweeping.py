"""The runs of a sweep: one for each choice of the settings that it varies."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from typing import Any

import numpy as np

from tfdml.effects import in_vain
from tfdml.errors import UserError
from tfdml.training.experiment import EFFECTS, Experiment
from tfdml.training.expressions import with_weight

_FORM = "write e.g. --sweep='objectives.weight=0.1,0.3,1; learning_rate=1e-4..1e-3'"
_FIXED = (
    *("run_dir", "selection", "selection_metric", "dataset", "data_dir", "seed", "seeds", "refit"),
    *("holdout_classes", "holdout_sampling", "ks", "start_from"),
)


@dataclasses.dataclass(frozen=True)
class Axis:
    """A setting that a sweep varies.

    Args:
        name: A setting of `Experiment`; or `objectives.weight`, the factor of the last term of `objectives`, or
            `objectives.NAME`, that of the term of this name.
        values: What it takes, each of these with each of the other axes; or
        low: The range from which it is drawn, evenly in its logarithm.
        high: The end of the range.
    """

    name: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0


def parse_sweep(text: str) -> list[Axis]:
    """The axes of `--sweep`: `name=a,b,c` for values, `name=low..high` for a range, with `;` between them.

    Raises:
        UserError: The text is not of this form, or names no setting that can be varied.

    Example:
        >>> parse_sweep("learning_rate=1e-4..1e-3; embedding_dim=64,128")[1].values
        ('64', '128')
    """
    axes: list[Axis] = []
    known = {field.name for field in dataclasses.fields(Experiment)} - set(_FIXED)
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, values = (word.strip() for word in part.partition("="))
        if not equals or not values:
            raise UserError(f"--sweep: {part!r} is not name=values; {_FORM}")
        if name not in known and not name.startswith("objectives."):
            raise UserError(f"--sweep: {name!r} is no setting that can be varied; {_FORM}")
        if name in (axis.name for axis in axes):
            raise UserError(f"--sweep: {name} is there twice")
        axes.append(_range(name, values) if ".." in values else Axis(name, tuple(v.strip() for v in values.split(","))))
    if not axes:
        raise UserError(f"--sweep varies nothing; {_FORM}")
    return axes


def _range(name: str, text: str) -> Axis:
    try:
        low, high = map(float, text.split(".."))
    except ValueError as error:
        raise UserError(f"--sweep: {name}={text} is no range of two numbers; {_FORM}") from error
    if not 0 < low < high < math.inf:
        raise UserError(f"--sweep: {name}={text}: a range goes from a positive number to a larger one")
    return Axis(name, low=low, high=high)


def trials(experiment: Experiment, axes: list[Axis], samples: int) -> list[tuple[dict[str, str], Experiment]]:
    """The values and the experiment of each run of a sweep, the same whenever it is asked.

    Every combination of the values is run; where there are ranges, `samples` times, each with a draw of its own.

    Args:
        experiment: What all have in common; its folder is that of the sweep.
        axes: What is varied.
        samples: How many draws there are of the ranges.

    Raises:
        UserError: A value does not fit its setting, or the setting has no effect in one of the runs.

    Example:
        >>> axes = parse_sweep("learning_rate=1e-4..1e-3; epochs=1,2")
        >>> len(trials(Experiment(run_dir="runs/sweep", holdout_classes=0.2), axes, samples=3))
        6
    """
    lists = [[(axis.name, value) for value in axis.values] for axis in axes if axis.values]
    ranges = [axis for axis in axes if not axis.values]
    generator = np.random.default_rng(experiment.seed)
    found: list[tuple[dict[str, str], Experiment]] = []
    for chosen in itertools.product(*lists):
        for _ in range(samples if ranges else 1):
            drawn = [(a.name, f"{math.exp(generator.uniform(math.log(a.low), math.log(a.high))):.4g}") for a in ranges]
            values = dict([*chosen, *drawn])
            folder = f"{experiment.run_dir}/trials/{len(found):03d}"
            found.append((values, _changed(experiment, values, folder)))
    return found


def _changed(experiment: Experiment, values: dict[str, str], folder: str) -> Experiment:
    kinds = typing.get_type_hints(Experiment)
    changes: dict[str, Any] = {"run_dir": folder, "report": False}
    for name, text in values.items():
        setting, _, term = name.partition(".")
        try:
            if term:
                before = changes.get("objectives", experiment.objectives)
                changes["objectives"] = with_weight(
                    before, float(text), "--objectives", "" if term == "weight" else term
                )
            elif kinds[setting] is bool:
                changes[setting] = {"true": True, "false": False}[text.lower()]
            else:
                changes[setting] = kinds[setting](text)
        except (ValueError, KeyError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"--sweep: {text!r} is no value of {name}") from error
    changed = dataclasses.replace(experiment, **changes)
    for message in in_vain(EFFECTS, dataclasses.asdict(changed), values).values():
        raise UserError(f"--sweep: {message}")
    return changed
