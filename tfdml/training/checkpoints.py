"""The checkpoints of a run, which survive a kill at any moment: one file each."""

import dataclasses
import io
import itertools
import json
import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import ops

from tfdml.errors import UserError, differences, short_message
from tfdml.io.files import (
    atomic_write,
)
from tfdml.models import Embedder, MetricLearner
from tfdml.run_folder import RunFolder, checkpoint_path, list_checkpoints
from tfdml.training.workers import Processes, assign_here

_STATE = "state"
_SELECTED = "selected"
# Values of a larger variable that are read at once.
_BLOCK = 2**22
# Characters of a message about the shapes of a checkpoint.
_LONGEST = 200
# Groups of arrays that are no part's weights.
_METRICS = "metrics"
_OPTIMIZER = "optimizer"
_OTHERS = "others"
NOT_WEIGHTS = (_METRICS, _OPTIMIZER, _OTHERS)


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """What a resumed run needs besides the arrays.

    Args:
        step: How many steps have been trained.
        records: One mapping per epoch that has been closed, that before training included.
        neighbors: The classes that the embedder confused at the last search for them, if there was
            one.
        selected: The weights of the embedder in the epoch that is the best so far; none for the
            last epoch's.
    """

    step: int
    records: list[dict[str, Any]]
    neighbors: list[list[int]] | None = None
    selected: Sequence[np.ndarray] = ()


def parts(learner: MetricLearner) -> dict[str, list]:
    """Return the weights of a learner by part: `backbone`, `projection`, each objective by its
    name.

    Those of a second embedder are `text backbone` and `text projection`.

    Within a part, weights are in the order in which they were made, which the part's settings alone
    decide.
    """
    objectives = {
        f"objective {objective.name}": list(objective.weights) for objective in learner.objectives
    }
    return learner.named_by_view(lambda _, tower: embedder_parts(tower)) | objectives


def embedder_parts(embedder: Embedder) -> dict[str, list]:
    """Return the weights of the `backbone`, and as `projection` all others of the embedder."""
    backbone = list(embedder.backbone.weights)
    backbone_ids = {id(weight) for weight in backbone}
    return {
        "backbone": backbone,
        "projection": [weight for weight in embedder.weights if id(weight) not in backbone_ids],
    }


def first_not_finite(learner: MetricLearner) -> str | None:
    """Return the part of a learner whose weights have become NaN or infinite; None if all are
    finite."""
    for part, weights in parts(learner).items():
        if not all(np.isfinite(_view(weight)).all() for weight in weights):
            return part
    return None


def variables(learner: MetricLearner) -> dict[str, Any]:
    """Return what a step changes: weights, BatchNorm statistics, random states, metrics and the
    optimizer's slots."""
    groups = parts(learner)
    groups[_METRICS] = learner.metrics_variables
    groups[_OPTIMIZER] = learner.optimizer.variables
    grouped = {id(variable) for variable in itertools.chain(*groups.values())}
    groups[_OTHERS] = [variable for variable in learner.variables if id(variable) not in grouped]
    named = {}
    for group, members in groups.items():
        # By position: paths hold counters that depend on what the process built before.
        for position, variable in enumerate(members):
            named[f"{group}/{position:05d}"] = variable
    return named


def save(
    folder: Path, learner: MetricLearner, state: TrainingState, keep: int = 2, write: bool = True
) -> Path:
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
    path = checkpoint_path(folder, state.step)
    if not write:
        for variable in variables(learner).values():
            ops.convert_to_numpy(variable)
        return path
    fields = {"step": state.step, "records": state.records, "neighbors": state.neighbors}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary, zipfile.ZipFile(temporary, "w") as file:
        for name, variable in variables(learner).items():
            _write_array(file, name, _view(variable))
        for i, weight in enumerate(state.selected):
            _write_array(file, f"{_SELECTED}/{i:05d}", weight)
        _write_array(file, _STATE, np.frombuffer(json.dumps(fields).encode(), np.uint8))
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def _write_array(file: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    with file.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array)


def _in_place(variable: Any) -> bool:
    """Whether a variable is read and changed where it is: proxies of a million classes are not in
    memory twice."""
    value = variable.value
    return isinstance(value, tf.Variable) and not isinstance(value, tf.distribute.DistributedValues)


def _view(variable: Any) -> np.ndarray:
    """Return what a variable holds, not to be changed."""
    if not _in_place(variable):
        return np.asarray(ops.convert_to_numpy(variable))
    # Once rows of it were changed, TensorFlow reads a copy.
    tf.raw_ops.DisableCopyOnRead(resource=variable.value.handle)
    return np.asarray(memoryview(variable.value.read_value()))


def _load(variable: Any, member: IO[bytes]) -> None:
    """Assign a variable the array of a file."""
    if math.prod(variable.shape) <= _BLOCK or not _in_place(variable):
        assign_here(variable, np.lib.format.read_array(member))
        return
    np.lib.format.read_magic(member)
    (total, *shape), _, dtype = np.lib.format.read_array_header_1_0(member)
    row = math.prod(shape)
    count = max(1, _BLOCK // row)
    for first in range(0, total, count):
        rows = np.frombuffer(member.read(count * row * dtype.itemsize), dtype).reshape(-1, *shape)
        variable.value.scatter_update(tf.IndexedSlices(rows, tf.range(first, first + len(rows))))
    tf.raw_ops.DisableCopyOnRead(resource=variable.value.handle)


def _shape(member: IO[bytes]) -> tuple[int, ...]:
    """Return the shape of the array of a file; reads all of it, as only its end shows damage."""
    np.lib.format.read_magic(member)
    shape, *_ = np.lib.format.read_array_header_1_0(member)
    while member.read(_BLOCK):
        pass
    return shape


def save_model(path: Path, model: keras.Model) -> None:
    """Write a model as a `.keras` file, atomically.

    Raises:
        UserError: The file cannot be written.
    """
    with atomic_write(path) as temporary:
        model.save(temporary)


def save_embedders(folder: RunFolder, learner: MetricLearner) -> None:
    """Write the embedder of images and, where there is one, that of texts, each atomically.

    Raises:
        UserError: A file cannot be written.
    """
    if learner.towers:
        save_model(folder.text_embedder, learner.towers["text"])
    save_model(folder.embedder, learner.embedder)


def read(
    path: Path, read_member: Callable[[IO[bytes]], Any] = np.lib.format.read_array
) -> tuple[dict[str, Any], TrainingState]:
    """Return the arrays and the state of a checkpoint.

    Args:
        path: Where it lies.
        read_member: Returns what is wanted of the file of each array that a step changes, such as
            its shape.

    Raises:
        ValueError: It is damaged; the message says how.
    """
    try:
        with np.load(path) as file:
            state = _state_of(file)
            names = [name for name in file.files if not name.startswith((_STATE, _SELECTED))]
            arrays = {name: read_member(file.zip.open(f"{name}.npy")) for name in names}
    except Exception as error:  # damaged bytes raise a dozen types
        raise ValueError(
            f"{path.name} is damaged ({short_message(error, 'first', named=True)})"
        ) from error
    return arrays, state


def _state_of(file: Any) -> TrainingState:
    selected = tuple(file[name] for name in sorted(file.files) if name.startswith(f"{_SELECTED}/"))
    return TrainingState(**json.loads(file[_STATE].tobytes()), selected=selected)


def restore_latest(
    folder: Path, learner: MetricLearner, processes: Processes | None = None
) -> TrainingState | None:
    """Load the newest checkpoint that can be used into the learner and its optimizer; None if there
    is none.

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
    data = None if processes.alone else processes.bytes_of_chief(path.read_bytes)
    with np.load(path if data is None else io.BytesIO(data)) as file:
        # All together: what each replica has of a metric adds up to what was saved.
        for name, variable in variables(learner).items():
            _load(variable, file.zip.open(f"{name}.npy"))
        return _state_of(file)


def _newest(folder: Path, learner: MetricLearner) -> str:
    """Return the newest checkpoint that fits the learner; empty if there is none."""
    reasons = []
    for path in reversed(list_checkpoints(folder)):
        try:
            _check_fits(path, read(path, _shape)[0], learner)
        except ValueError as error:
            logging.warning("%s; trying the one before", error)
            reasons.append(str(error))
            continue
        return str(path)
    if reasons:
        raise UserError(
            f"no checkpoint in {folder} can be used: {'; '.join(reasons)}; delete it to train again"
        )
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
        arrays = {
            f"{i:05d}": np.asarray(ops.convert_to_numpy(weight)) for i, weight in enumerate(weights)
        }
        np.savez(packed, **arrays)  # type: ignore[arg-type]
        return packed.getvalue()

    weights = list(itertools.chain(*parts(learner).values()))
    with np.load(io.BytesIO(processes.bytes_of_chief(pack))) as file:
        for name, weight in zip(sorted(file.files), weights, strict=True):
            assign_here(weight, file[name])


def _check_fits(path: Path, shapes: dict[str, tuple], learner: MetricLearner) -> None:
    expected = {name: tuple(variable.shape) for name, variable in variables(learner).items()}
    if shapes != expected:
        changed = differences(expected, shapes, str)
        raise ValueError(f"{path.name} belongs to another model: {changed[:_LONGEST]}")
