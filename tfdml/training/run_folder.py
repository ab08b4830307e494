"""The folder that a run leaves behind: its files, and who may write there."""

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
from absl import logging

from tfdml.errors import REASON, UserError, differences, user_errors
from tfdml.evaluation.per_query import QUERIES_FILE as QUERIES
from tfdml.io.files import PARTIAL_PREFIX, atomic_write, is_debris, locked, require_local, sweep, write_json
from tfdml.io.manifests import read_json
from tfdml.training.checkpoints import list_checkpoints, step_of
from tfdml.training.distributed import check_same_backend
from tfdml.training.settings import EvaluationSettings, Experiment
from tfdml.version import __version__, installed

# Of a resumed run: where the folder lies, and where the images, which are compared by their checksums.
MAY_DIFFER = ("run_dir", "data_dir", "features")
# What changes nothing of the training.
_WATCHING = ("watch_every", "stop_on", "log_to")
_PACKAGES = ("tensorflow", "keras", "numpy", "faiss-cpu", "scikit-learn", "pillow", "matplotlib")


class RunFolder:
    """Paths of a run, and the rules of who may write there.

        flags.txt  data.json  environment.json  metrics.jsonl  result.json  queries.npz  checkpoints/  embedder.keras
         tensorboard/  report/index.html
        and, where they apply, moments.keras  statistics_network.keras  watch.json  diverged.json
         neighbors/

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
        self.statistics_network = self.path / "statistics_network.keras"
        self.tensorboard = self.path / "tensorboard"
        self.diverged = self.path / "diverged.json"
        self.watch = self.path / "watch.json"
        self.report = self.path / "report" / "index.html"

    def selected(self, epoch: int) -> Path:
        """Where the embedder of an epoch is kept that was the best when the epoch ended."""
        return self.checkpoints / f"selected-epoch-{epoch:04d}.keras"

    def neighbors(self, epoch: int) -> Path:
        """Where the classes are that the embedder confused before an epoch."""
        return self.path / "neighbors" / f"epoch-{epoch:04d}.npy"

    # What is there

    def is_untouched(self) -> bool:
        """Whether the folder is there and no run has begun in it, but for one that was killed before its first file."""
        return self.path.is_dir() and not any(not is_debris(entry.name) for entry in self.path.iterdir())

    def is_finished(self, settings: EvaluationSettings) -> bool:
        """Whether the run has nothing left to do."""
        wanted = [self.embedder]
        wanted += [self.moments] if settings.moment_embedder else []
        wanted += [self.report] if settings.report else []
        return self.read_result() is not None and all(path.is_file() for path in wanted)

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
            raise UserError(f"--run_dir={self.path}: the run was stopped before it began; leave out --resume")
        with (
            user_errors(UnicodeDecodeError, f"{self.flags} is damaged: it is no text; start the run again elsewhere"),
            user_errors(OSError, f"--run_dir={self.path} holds no run to resume: there is no {self.flags}"),
        ):
            text = self.flags.read_text(encoding="utf-8")
        try:
            return Experiment.from_flags(text, run_dir=str(self.path))
        except UserError as error:
            raise UserError(f"{self.flags}: {str(error).removeprefix('flag file: ')}") from error

    def final_settings(self) -> dict[str, Any]:
        """Return the settings of the final model of this run, but for its folder: see `DataSettings.final_of`.

        Raises:
            UserError: The run has not ended, or is of several seeds or folds.
        """
        result = self.read_result()
        if result is None:
            raise UserError(f"--final_of={self.path}: the run has not ended; end it first")
        if "epoch" not in result:
            raise UserError(f"--final_of={self.path} has several runs: name one, such as {self.path}/seed_0")
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        steps = next(record["step"] for record in map(json.loads, lines) if record["epoch"] == 1)
        off = ("holdout_classes", "holdout_part", "min_steps", "evaluate_train", "generalization_every")
        return {
            **dataclasses.asdict(self.load_experiment()),
            **dict.fromkeys(off, 0),
            "epochs": result["epoch"],
            "steps_per_epoch": steps,
            "selection": "last",
            "report": False,
            "evaluate_orders": "never",
            "moment_embedder": False,
            "final_of": str(self.path),
        }

    def check_same(self, asked: Experiment) -> None:
        """Raise a `UserError` where the run that is here was started with other settings than `asked`."""
        stored = self.load_experiment()
        for field in dataclasses.fields(Experiment):
            old, new = getattr(stored, field.name), getattr(asked, field.name)
            if old != new and field.name not in (*MAY_DIFFER, *_WATCHING):
                end = "; to end it early, add --finish" if field.name in ("epochs", "steps_per_epoch") else ""
                raise UserError(
                    f"--resume: the run was started with --{field.name}={old}, not {new}; leave it out{end}"
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
        with user_errors(UnicodeEncodeError, f"--run_dir={str(self.path)!r} is no UTF-8: name another folder"):
            str(self.path).encode()
        with user_errors(OSError, f"--run_dir={str(self.path)[:100]} cannot be used: {REASON}"):
            taken = self.path.exists() and not self.is_untouched()
        if taken:
            raise UserError(f"--run_dir={self.path} exists already: continue it with --resume, or name another")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out, and remove what a killed one left half-written.

        Raises:
            UserError: Another run is at work here.
        """
        with locked(self.path, "run_dir"):
            self._sweep()
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
        """Write what the run's data and environment are; for a run that is continued, see that the data is the same.

        Where cores, devices or arithmetic are others than at the start, a line is printed that the bits will be, too.

        Args:
            data: By split, what `building.Splits.describe` returns.
            devices: What the run trains on.

        Raises:
            UserError: The images have changed since the run was started.
        """
        if self.data.is_file():
            self._compare(data)
        else:
            write_json(self.data, data)
        now = environment(devices)
        if not self.environment.is_file():
            write_json(self.environment, now)
            return
        try:
            before = read_json(self.environment, {"backend": str, "packages": dict})
        except UserError:
            return
        check_same_backend(before["backend"])
        changed = differences(_arithmetic(before), _arithmetic(now))
        if changed:
            text = "%s: %s: the run resumes from the same weights with the same batches, but not to the same bits"
            logging.warning(text, self.path, changed)

    def discard(self) -> None:
        """Remove the folder of a run that has failed before its first step."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _compare(self, data: dict[str, Any]) -> None:
        try:
            before = read_json(self.data)
            known = {split: dict(before.get(split, {})) for split in data}
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{self.data} is damaged; delete it if the images are the same") from error
        if changed := differences(known, data):
            raise UserError(f"--resume: the images are not those of the start ({changed}): bring them back")

    def _sweep(self) -> None:
        """Remove what killed processes left half-written; what another command writes below the folder is its own."""
        sweep(self.path)
        for folder in (self.checkpoints, self.report.parent, self.neighbors(0).parent):  # in which nobody else writes
            for half_written in folder.glob(f"{PARTIAL_PREFIX}*"):
                half_written.unlink(missing_ok=True)


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
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": devices,
        "packages": installed(_PACKAGES + (("jax",) if backend == "jax" else ())),
    }
