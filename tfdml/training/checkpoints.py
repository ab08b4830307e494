"""The folder that a run leaves behind, and its checkpoints, which survive a kill at any moment: one
file each."""

import contextlib
import dataclasses
import io
import json
import math
import os
import platform
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import ops

from tfdml.errors import REASON, UserError, differences, short_message, user_errors
from tfdml.io.files import (
    PARTIAL_PREFIX,
    atomic_write,
    is_debris,
    locked,
    read_json,
    require_local,
    sweep,
    write_json,
)
from tfdml.models import Embedder, MetricLearner
from tfdml.options import flag_text, values_of
from tfdml.results import QUERIES_FILE as QUERIES
from tfdml.training.choices import Random
from tfdml.training.settings import Experiment
from tfdml.training.workers import Processes, assign_here
from tfdml.version import __version__, installed

_STATE, _SELECTED = _NOT_CHANGED = ("state", "selected")
# Values of a larger variable that are read at once.
_BLOCK = 2**22
# Characters of a message about the shapes of a checkpoint.
_LONGEST = 200
# Groups of arrays that are no part's weights.
_METRICS, _OPTIMIZER, _OTHERS = NOT_WEIGHTS = ("metrics", "optimizer", "others")


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
    own = {id(weight) for weight in backbone}
    return {
        "backbone": backbone,
        "projection": [weight for weight in embedder.weights if id(weight) not in own],
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
    groups = parts(learner) | {
        _METRICS: learner.metrics_variables,
        _OPTIMIZER: learner.optimizer.variables,
    }
    grouped = {id(variable) for members in groups.values() for variable in members}
    groups[_OTHERS] = [variable for variable in learner.variables if id(variable) not in grouped]
    # By position: paths hold counters that depend on what the process built before.
    return {
        f"{group}/{i:05d}": variable
        for group, members in groups.items()
        for i, variable in enumerate(members)
    }


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
    path = folder / f"step-{state.step:08d}.npz"
    if not write:
        for variable in variables(learner).values():
            ops.convert_to_numpy(variable)
        return path
    about = {"step": state.step, "records": state.records, "neighbors": state.neighbors}
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary, zipfile.ZipFile(temporary, "w") as file:
        for name, variable in variables(learner).items():
            _write_array(file, name, _view(variable))
        for i, weight in enumerate(state.selected):
            _write_array(file, f"{_SELECTED}/{i:05d}", weight)
        _write_array(file, _STATE, np.frombuffer(json.dumps(about).encode(), np.uint8))
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
    (total, *others), _, dtype = np.lib.format.read_array_header_1_0(member)
    row = math.prod(others)
    count = max(1, _BLOCK // row)
    for first in range(0, total, count):
        rows = np.frombuffer(member.read(count * row * dtype.itemsize), dtype).reshape(-1, *others)
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


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return sorted(
        (path for path in folder.glob("step-*.npz") if path.stem[5:].isdecimal()), key=step_of
    )


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(path.stem.removeprefix("step-"))


def read(
    path: Path, of: Callable[[IO[bytes]], Any] = np.lib.format.read_array
) -> tuple[dict[str, Any], TrainingState]:
    """Return the arrays and the state of a checkpoint.

    Args:
        path: Where it lies.
        of: What to return of the file of each array that a step changes, such as its shape.

    Raises:
        ValueError: It is damaged; the message says how.
    """
    try:
        with np.load(path) as file:
            state, names = (
                _state_of(file),
                (name for name in file.files if not name.startswith(_NOT_CHANGED)),
            )
            arrays = {name: of(file.zip.open(f"{name}.npy")) for name in names}
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
            _check_fits(path, read(path, of=_shape)[0], learner)
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

    weights = [weight for members in parts(learner).values() for weight in members]
    with np.load(io.BytesIO(processes.bytes_of_chief(pack))) as file:
        for name, weight in zip(sorted(file.files), weights, strict=True):
            assign_here(weight, file[name])


def _check_fits(path: Path, shapes: dict[str, tuple], learner: MetricLearner) -> None:
    expected = {name: tuple(variable.shape) for name, variable in variables(learner).items()}
    if shapes != expected:
        changed = differences(expected, shapes, str)
        raise ValueError(f"{path.name} belongs to another model: {changed[:_LONGEST]}")


# Of a resumed run: where the folder lies, and where the images, which are compared by their
# checksums.
MAY_DIFFER = ("run_dir", "data_dir", "features")
# What changes nothing of the training.
_WATCHING = ("watch_every", "log_to")
_PACKAGES = ("tensorflow", "keras", "numpy", "faiss-cpu", "scikit-learn", "pillow", "matplotlib")


@dataclasses.dataclass(frozen=True)
class EpochLength:
    """How long an epoch of a run was, and on how much it trained.

    Attributes:
        images: The number of training images.
        classes: The number of their classes.
        steps: The steps of an epoch.
    """

    images: int
    classes: int
    steps: int


class RunFolder:
    """Paths of a run, and the rules of who may write there.

        flags.txt  data.json  environment.json  metrics.jsonl  result.json  queries.npz
    checkpoints/  embedder.keras
         tensorboard/  report/index.html
        and, where they apply, moments.keras  text_embedder.keras  watch.json

    Args:
        path: The folder, a local one.
    """

    def __init__(self, path: str | os.PathLike):
        require_local(path, "run_dir")
        self.path = Path(path)
        self.flags = self.path / "flags.txt"
        self.data = self.path / "data.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.result = self.path / "result.json"
        self.queries = self.path / QUERIES
        self.checkpoints = self.path / "checkpoints"
        self.embedder = self.path / "embedder.keras"
        self.moments = self.path / "moments.keras"
        self.text_embedder = self.path / "text_embedder.keras"
        self.tensorboard = self.path / "tensorboard"
        self.watch = self.path / "watch.json"
        self.report = self.path / "report" / "index.html"

    def save_embedders(self, learner: MetricLearner) -> None:
        """Write the embedder of images and, where there is one, that of texts, each atomically.

        Raises:
            UserError: A file cannot be written.
        """
        if learner.towers:
            save_model(self.text_embedder, learner.towers["text"])
        save_model(self.embedder, learner.embedder)

    # What is there

    def is_untouched(self) -> bool:
        """Whether the folder is there and no run has begun in it, but for one that was killed
        before its first file."""
        return self.path.is_dir() and all(is_debris(entry.name) for entry in self.path.iterdir())

    def how_far(self) -> str:
        """How far the run in this folder has come, and how to continue it, in words."""
        if not self.flags.is_file():
            return "nothing was written"
        steps = [step_of(path) for path in list_checkpoints(self.checkpoints)]
        saved = f"the checkpoint of step {steps[-1]} is saved" if steps else "no step was trained"
        return f"{saved}; continue with --run_dir={self.path} --resume"

    def load_experiment(self) -> Experiment:
        """Return the experiment that a run was started with.

        Raises:
            UserError: This is not the folder of a run, or its flags are damaged.
        """
        if self.is_untouched():
            raise UserError(
                f"--run_dir={self.path}: the run was stopped before it began; leave out --resume"
            )
        with (
            user_errors(
                UnicodeDecodeError,
                f"{self.flags} is damaged: it is no text; start the run again elsewhere",
            ),
            user_errors(
                OSError, f"--run_dir={self.path} holds no run to resume: there is no {self.flags}"
            ),
        ):
            text = self.flags.read_text(encoding="utf-8")
        with user_errors(UserError, f"{self.flags}: {REASON}"):
            return Experiment.from_flags(text, run_dir=str(self.path))

    def final_settings(self) -> dict[str, Any]:
        """Return the settings of the final model of this run, but for its folder: see
        `DataSettings.final_of`.

        Raises:
            UserError: The run has not ended, or is of several seeds or folds.
        """
        result = self.read_result()
        if result is None:
            raise UserError(f"--final_of={self.path}: the run has not ended; end it first")
        if "epoch" not in result:
            raise UserError(
                f"--final_of={self.path} has several runs: name one, such as {self.path}/seed_0"
            )
        own = {
            "epochs": result["epoch"],
            "steps_per_epoch": self.epoch_length().steps,
            "selection": "last",
            "final_of": str(self.path),
        }
        off = {"holdout_classes": 0.0, "holdout_sampling": Random(), "min_steps": 0}
        return {
            **values_of(self.load_experiment()),
            **off,
            **own,
            "report": False,
            "moment_embedder": False,
        }

    def epoch_length(self) -> EpochLength:
        """Return how long an epoch of this run was."""
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        steps = next(record["step"] for record in map(json.loads, lines) if record["epoch"] == 1)
        trained = read_json(self.data)["train"]
        return EpochLength(trained["images"], trained["classes"], steps)

    def check_same(self, asked: Experiment) -> None:
        """Raise a `UserError` where the run that is here was started with other settings than
        `asked`."""
        for name, old, new in self.load_experiment().differences_to(asked):
            if name not in (*MAY_DIFFER, *_WATCHING):
                end = (
                    "; to end it early, add --finish"
                    if name in ("epochs", "steps_per_epoch")
                    else ""
                )
                raise UserError(
                    f"--resume: the run was started with --{name}={flag_text(old)}, not "
                    f"{flag_text(new)}; leave it out{end}"
                )

    def read_result(self) -> dict[str, Any] | None:
        """Return what `result.json` holds; None if it is not there, or damaged."""
        try:
            return read_json(self.result, {"metrics": dict})
        except UserError:
            return None

    # Who may write

    def check_new(self) -> None:
        """Raise a `UserError` if a run could lose something by being written here."""
        with user_errors(
            (OSError, UnicodeEncodeError),
            f"--run_dir={str(self.path)[:100]!r} cannot be used: {REASON}",
        ):
            taken = self.path.exists() and not self.is_untouched()
        if taken:
            raise UserError(
                f"--run_dir={self.path} exists already: continue it with --resume, or name another"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out, and remove what a killed one left half-written.

        Raises:
            UserError: Another run is at work here.
        """
        with locked(self.path, "run_dir"):
            sweep(self.path)
            # What another command writes below the folder is its own; in these nobody else writes.
            for folder in (self.checkpoints, self.report.parent):
                for half_written in folder.glob(f"{PARTIAL_PREFIX}*"):
                    half_written.unlink(missing_ok=True)
            yield

    @contextlib.contextmanager
    def created(self, experiment: Experiment) -> Iterator[None]:
        """Make the folder, with the flags of the run, and keep other runs out.

        Raises:
            UserError: It cannot be made, or has become that of another run.
        """
        with user_errors(OSError, f"--run_dir={self.path} cannot be made: {REASON}"):
            self.path.mkdir(parents=True, exist_ok=True)
        with self.locked():
            self.check_new()
            with atomic_write(self.flags) as temporary:
                temporary.write_text(experiment.as_flags(), encoding="utf-8")
            yield

    def describe(self, data: dict[str, Any], devices: list[str]) -> None:
        """Write what the run's data and environment are; for a run that is continued, see that the
        data is the same.

        Where cores, devices or arithmetic are others than at the start, a line is printed that the
        bits will be, too.

        Args:
            data: By split, what `Splits.describe` returns.
            devices: What the run trains on.

        Raises:
            UserError: The images have changed since the run was started, or the backend has.
        """
        if not self.data.is_file():
            write_json(self.data, data)
        elif changed := differences(read_json(self.data), data):
            raise UserError(
                f"--resume: the images are not those of the start ({changed}): bring them back"
            )
        now = environment(devices)
        if not self.environment.is_file():
            write_json(self.environment, now)
            return
        before = read_json(self.environment, {"backend": str, "packages": dict})
        if before["backend"] != now["backend"]:
            advice = f"set KERAS_BACKEND={before['backend']}"
            raise UserError(
                f"--resume: the run was started on {before['backend']}, not on {now['backend']}: "
                f"{advice}"
            )
        if changed := differences(_arithmetic(before), _arithmetic(now)):
            text = (
                "%s: %s: the run resumes from the same weights with the same batches, but not to "
                "the same bits"
            )
            logging.warning(text, self.path, changed)


def _arithmetic(environment: dict[str, Any]) -> dict[str, Any]:
    """Return what of an environment decides in which order sums are taken."""
    packages = {name: environment["packages"].get(name) for name in ("tensorflow", "keras", "jax")}
    return {"cpus": environment.get("cpus"), "devices": environment.get("devices"), **packages}


def environment(devices: list[str]) -> dict[str, Any]:
    """Return what ran: versions, machine, devices."""
    backend = keras.backend.backend()
    return {
        "tfdml": __version__,
        "backend": backend,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        # As TensorFlow counts them: those that this process may use.
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "devices": devices,
        "packages": installed(_PACKAGES + (("jax",) if backend == "jax" else ())),
    }
