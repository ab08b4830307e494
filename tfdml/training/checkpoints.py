"""Checkpoints that survive a kill at any moment: each is one file, written atomically."""

import dataclasses
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from absl import logging
from keras import ops

from tfdml.errors import UserError, short_message
from tfdml.io.files import atomic_write
from tfdml.models import Embedder, MetricLearner
from tfdml.training.distributed import Processes, assign_here

_NAME = re.compile(r"step-(\d+)\.npz")
_STATE = "state"
# Groups of arrays that are no part's weights.
_METRICS, _OPTIMIZER, _OTHERS = NOT_WEIGHTS = ("metrics", "optimizer", "others")
# Before the names of files that cannot be used and are in the way.
_DAMAGED = "damaged-"


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """What a resumed run needs besides the arrays.

    Args:
        step: How many steps have been trained.
        records: One mapping per epoch that has been closed, that before training included.
        train_seconds: How long the steps of those epochs took.
    """

    step: int
    records: list[dict[str, Any]]
    train_seconds: float = 0.0


def parts(learner: MetricLearner) -> dict[str, list]:
    """Return the weights of a learner by part: `backbone`, `projection`, and each objective by its name.

    Within a part, weights are in the order in which they were made, which the part's settings alone decide.
    """
    objectives = {f"objective {objective.name}": list(objective.weights) for objective in learner.objectives}
    return embedder_parts(learner.embedder) | objectives


def embedder_parts(embedder: Embedder) -> dict[str, list]:
    """Return the weights of the `backbone`, and as `projection` all others of the embedder."""
    backbone = list(embedder.backbone.weights)
    own = {id(weight) for weight in backbone}
    return {"backbone": backbone, "projection": [weight for weight in embedder.weights if id(weight) not in own]}


def first_not_finite(learner: MetricLearner) -> str | None:
    """Return the part of a learner whose weights have become NaN or infinite; None if all are finite."""
    for part, weights in parts(learner).items():
        if not all(np.isfinite(ops.convert_to_numpy(weight)).all() for weight in weights):
            return part
    return None


def variables(learner: MetricLearner) -> dict[str, Any]:
    """Return what a step changes: weights, BatchNorm statistics, random states, metrics and the optimizer's slots."""
    groups = parts(learner) | {_METRICS: learner.metrics_variables, _OPTIMIZER: learner.optimizer.variables}
    grouped = {id(variable) for members in groups.values() for variable in members}
    groups[_OTHERS] = [variable for variable in learner.variables if id(variable) not in grouped]
    # By position: paths hold counters that depend on what the process built before.
    return {f"{group}/{i:05d}": variable for group, members in groups.items() for i, variable in enumerate(members)}


def save(folder: Path, learner: MetricLearner, state: TrainingState, keep: int = 2, write: bool = True) -> Path:
    """Write `folder/step-<step>.npz` and remove all but the newest `keep`.

    Several processes all have to call this, as metrics are added up over them where they are read.

    Args:
        folder: The checkpoint folder; made when missing.
        learner: A compiled learner.
        state: How far it has been trained.
        keep: How many checkpoints stay.
        write: Whether this is the worker that writes.

    Raises:
        UserError: The file cannot be written.
    """
    path = folder / f"step-{state.step:08d}.npz"
    arrays = {name: np.asarray(ops.convert_to_numpy(variable)) for name, variable in variables(learner).items()}
    if not write:
        return path
    arrays[_STATE] = np.frombuffer(json.dumps(dataclasses.asdict(state)).encode(), np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    _set_aside([path] if path.is_dir() else [])
    size = sum(array.nbytes for array in arrays.values())
    with atomic_write(path, size) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def save_model(path: Path, model: keras.Model) -> None:
    """Write a model as a `.keras` file, atomically.

    Raises:
        UserError: The file cannot be written.
    """
    with atomic_write(path, 4 * model.count_params()) as temporary:  # its weights in float32
        model.save(temporary)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("step-*.npz") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(path.stem.removeprefix("step-"))


def read(path: Path, data: bytes | None = None) -> tuple[dict[str, np.ndarray], TrainingState]:
    """Return the arrays and the state of a checkpoint.

    Args:
        path: Where it lies.
        data: What it holds, where it lies on another host.

    Raises:
        ValueError: It is damaged; the message says how.
    """
    try:
        with np.load(path if data is None else io.BytesIO(data)) as file:
            arrays = {name: file[name] for name in file.files}
        state = TrainingState(**json.loads(arrays.pop(_STATE).tobytes()))
    except Exception as error:  # damaged bytes raise a dozen types
        raise ValueError(f"{path.name} is damaged ({short_message(error, 'first', named=True)})") from error
    return arrays, state


def restore_latest(folder: Path, learner: MetricLearner, processes: Processes | None = None) -> TrainingState | None:
    """Load the newest checkpoint that can be used into the learner and its optimizer; None if there is none.

    Newer ones, which cannot, are renamed, so that they are not taken for the newest when the run continues.

    Args:
        folder: The checkpoint folder, that of the chief.
        learner: A compiled learner.
        processes: Who trains; each has to call this.

    Raises:
        UserError: There are checkpoints, but none can be used.
    """
    processes = processes or Processes()
    path = Path(processes.of_chief(lambda: _newest(folder, learner)))
    if not path.name:
        return None
    arrays, state = read(path, processes.bytes_of_chief(path.read_bytes))
    # All together: what each replica has of a metric adds up to what was saved.
    for name, variable in variables(learner).items():
        assign_here(variable, arrays[name])
    return state


def _newest(folder: Path, learner: MetricLearner) -> str:
    """Return the newest checkpoint that fits the learner; empty if there is none."""
    unusable, reasons = [], []
    for path in reversed(list_checkpoints(folder)):
        try:
            arrays, state = read(path)
            if state.step != step_of(path):
                raise ValueError(f"{path.name} is of step {state.step}")
            _check_fits(path, arrays, learner)
        except ValueError as error:
            logging.warning("%s; trying the one before", error)
            unusable.append(path)
            reasons.append(str(error))
            continue
        _set_aside(unusable)
        return str(path)
    if unusable:
        raise UserError(f"no checkpoint in {folder} can be used: {'; '.join(reasons)}; delete it to train again")
    return ""


def share_weights(processes: Processes, learner: MetricLearner) -> None:
    """Give every process the weights that the chief has.

    Args:
        processes: Who trains.
        learner: A built learner.
    """
    if processes.alone:
        return

    def pack() -> bytes:
        packed = io.BytesIO()
        arrays = {f"{i:05d}": np.asarray(ops.convert_to_numpy(weight)) for i, weight in enumerate(weights)}
        np.savez(packed, **arrays)  # type: ignore[arg-type]
        return packed.getvalue()

    weights = [weight for members in parts(learner).values() for weight in members]
    with np.load(io.BytesIO(processes.bytes_of_chief(pack))) as file:
        for name, weight in zip(sorted(file.files), weights, strict=True):
            assign_here(weight, file[name])


def _check_fits(path: Path, arrays: dict[str, np.ndarray], learner: MetricLearner) -> None:
    changed = variables(learner)
    for name in sorted(set(changed) ^ set(arrays)):
        where = "missing from" if name in changed else "only in"
        raise ValueError(f"{path.name} belongs to another model: {name} is {where} the checkpoint")
    for name, variable in changed.items():
        shape = tuple(variable.shape)
        if shape != arrays[name].shape:
            raise ValueError(f"{path.name} belongs to another model: {name} is {arrays[name].shape}, not {shape}")


def _set_aside(paths: Sequence[Path]) -> None:
    for path in paths:
        free = path.with_name(_DAMAGED + path.name)
        number = 1
        while free.exists():
            number += 1
            free = path.with_name(f"{_DAMAGED}{number}-{path.name}")
        path.rename(free)
        logging.warning("%s cannot be used and is now called %s", path, free.name)
