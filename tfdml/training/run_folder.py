"""The folder that a run leaves behind: what its files are called, and who may write there."""

import contextlib
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import logging

from tfdml.errors import REASON, UserError, differences, user_errors
from tfdml.io.files import (
    PARTIAL_PREFIX,
    atomic_write,
    is_debris,
    local_copy,
    locked,
    read_json,
    require_local,
    sha256_of,
    sweep,
    write_json,
)
from tfdml.options import flag_text, values_of
from tfdml.training.choices import Random
from tfdml.training.settings import Experiment
from tfdml.version import __version__, installed

QUERIES_FILE = "queries.npz"
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
        images_of_final: The number of images of all splits.
    """

    images: int
    classes: int
    steps: int
    images_of_final: int

    def steps_of_final(self) -> int:
        """Return the steps of an epoch in which a final model sees each image as often.

        Example:
            >>> EpochLength(images=100, classes=10, steps=20, images_of_final=220).steps_of_final()
            44
        """
        return round(self.steps * self.images_of_final / self.images)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return sorted(
        (path for path in folder.glob("step-*.npz") if path.stem[5:].isdecimal()), key=step_of
    )


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(path.stem.removeprefix("step-"))


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
        self.queries = self.path / QUERIES_FILE
        self.checkpoints = self.path / "checkpoints"
        self.embedder = self.path / "embedder.keras"
        self.moments = self.path / "moments.keras"
        self.text_embedder = self.path / "text_embedder.keras"
        self.tensorboard = self.path / "tensorboard"
        self.watch = self.path / "watch.json"
        self.report = self.path / "report" / "index.html"

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
                "the run was stopped before it began; leave out resume", run_dir=self.path
            )
        with (
            user_errors(
                UnicodeDecodeError,
                f"{self.flags} is damaged: it is no text; start the run again elsewhere",
            ),
            user_errors(
                OSError, f"holds no run to resume: there is no {self.flags}", run_dir=self.path
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
            raise UserError("the run has not ended; end it first", final_of=self.path)
        if "epoch" not in result:
            raise UserError(
                f"has several runs: name one, such as {self.path}/seed_0", final_of=self.path
            )
        settings = values_of(self.load_experiment())
        own = {
            "epochs": result["epoch"],
            "steps_per_epoch": self.epoch_length().steps_of_final(),
            "selection": "last",
            "final_of": str(self.path),
        }
        off = {"holdout_classes": 0.0, "holdout_sampling": Random(), "min_steps": 0}
        return {
            **settings,
            **off,
            **own,
            "report": False,
            "moment_embedder": False,
        }

    def epoch_length(self) -> EpochLength:
        """Return how long an epoch of this run was."""
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        steps = next(record["step"] for record in map(json.loads, lines) if record["epoch"] == 1)
        splits = read_json(self.data)
        trained = splits["train"]
        images_of_final = sum(split["images"] for split in splits.values())
        return EpochLength(trained["images"], trained["classes"], steps, images_of_final)

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
                    f"the run was started with {flag_text(old)}: leave it out{end}",
                    **{name: flag_text(new)},
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
            (OSError, UnicodeEncodeError), f"cannot be used: {REASON}", run_dir=str(self.path)[:100]
        ):
            taken = self.path.exists() and not self.is_untouched()
        if taken:
            raise UserError(
                "exists already: continue it with resume, or name another", run_dir=self.path
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
        with user_errors(OSError, f"cannot be made: {REASON}", run_dir=self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self.locked():
            self.check_new()
            with atomic_write(self.flags) as temporary:
                temporary.write_text(experiment.as_flags(), encoding="utf-8")
            yield

    def describe(self, data: dict[str, Any], devices: list[str], weights: str = "") -> None:
        """Write what the run's data and environment are; for a run that is continued, see that the
        data is the same.

        Where cores, devices or arithmetic are others than at the start, a line is printed that the
        bits will be, too.

        Args:
            data: By split, what `Splits.describe` returns.
            devices: What the run trains on.
            weights: The file that the backbone starts from, if any: HDF5 has no checksum.

        Raises:
            UserError: The images or the weights have changed since the run was started, or the
                backend has.
        """
        if not self.data.is_file():
            write_json(self.data, data)
        elif changed := differences(read_json(self.data), data):
            raise UserError(
                f"the images are not those of the start ({changed}): bring them back", resume=True
            )
        now = environment(devices)
        path = Path(local_copy(weights)).expanduser()
        if path.is_file():
            now["weights"] = f"sha256:{sha256_of(path)}"
            logging.info("weights %s: %s", weights, now["weights"])
        if not self.environment.is_file():
            write_json(self.environment, now)
            return
        before = read_json(self.environment, {"backend": str, "packages": dict})
        if before["backend"] != now["backend"]:
            advice = f"set KERAS_BACKEND={before['backend']}"
            raise UserError(
                f"the run was started on {before['backend']}, not on {now['backend']}: {advice}",
                resume=True,
            )
        if "weights" in now and now["weights"] != before.get("weights", now["weights"]):
            raise UserError("the file is not that of the start: bring it back", weights=weights)
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
    import keras  # which trains by then

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
