"""Checkpoints that survive a kill at any moment: each is one file, there whole or not at all."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import numpy as np
from absl import logging
from keras import ops

from tfdml.errors import UserError
from tfdml.files import atomic_path

_NAME = re.compile(r"step-(\d+)\.npz")


def _variables(learner) -> dict[str, object]:
    """What a step changes: weights, BatchNorm statistics, random states, metrics and the optimiser's slots."""
    groups = {
        "model": learner.variables,
        "metrics": learner.metrics_variables,
        "optimizer": learner.optimizer.variables,
    }
    # By position: paths hold counters that depend on what the process built before.
    named = {f"{group}/{i:05d}": variable for group, members in groups.items() for i, variable in enumerate(members)}
    return named


def save(folder: Path, learner, step: int, state: dict, keep: int = 2) -> Path:
    """Write `folder/step-<step>.npz` and remove all but the newest `keep`.

    Args:
        folder: The checkpoint folder; made when missing.
        learner: A compiled `MetricLearner`.
        step: How many steps it has been trained.
        state: What else a resumed run needs; must be JSON.
        keep: How many checkpoints stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.npz"
    arrays = {name: np.asarray(ops.convert_to_numpy(variable)) for name, variable in _variables(learner).items()}
    arrays["state"] = np.frombuffer(json.dumps({**state, "step": step}).encode(), np.uint8)
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("step-*.npz") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(_NAME.fullmatch(path.name).group(1)))  # type: ignore[union-attr]


def restore_latest(folder: Path, learner) -> dict | None:
    """Load the newest readable checkpoint into the learner and its optimiser; None if there is none.

    Returns:
        The `state` that was saved, with `step`.

    Raises:
        UserError: The checkpoint belongs to another model.
    """
    for path in reversed(list_checkpoints(folder)):
        try:
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
            logging.warning("%s cannot be read (%s); trying the one before", path, error)
            continue
        state = json.loads(arrays.pop("state").tobytes().decode())
        _assign(path, arrays, learner)
        return state
    return None


def _assign(path: Path, arrays: dict[str, np.ndarray], learner) -> None:
    variables = _variables(learner)
    for name in sorted(set(variables) ^ set(arrays)):
        where = "missing from" if name in variables else "only in"
        raise UserError(f"{path} belongs to another model: {name} is {where} the checkpoint")
    for name, variable in variables.items():
        if tuple(variable.shape) != arrays[name].shape:  # type: ignore[attr-defined]
            shape = tuple(variable.shape)  # type: ignore[attr-defined]
            raise UserError(f"{path} belongs to another model: {name} has shape {arrays[name].shape}, not {shape}")
    for name, variable in variables.items():
        variable.assign(arrays[name])  # type: ignore[attr-defined]
