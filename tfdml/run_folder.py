"""The folder that a run leaves behind: what its files are called, and who may write there.

No other module knows the names of the files.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import logging

from tfdml.errors import ERROR_TEXT, UserError, differences, user_errors
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

FLAGS_FILE = "flags.txt"
DATA_FILE = "data.json"
ENVIRONMENT_FILE = "environment.json"
METRICS_FILE = "metrics.jsonl"
RESULT_FILE = "result.json"
QUERIES_FILE = "queries.npz"
EMBEDDER_FILE = "embedder.keras"
START_FILE = "start.keras"
MOMENTS_FILE = "moments.keras"
TEXT_EMBEDDER_FILE = "text_embedder.keras"
WATCH_FILE = "watch.json"
# Of several seeds or folds, each run has a folder of its own.
SEED_PREFIX = "seed_"
FOLD_PREFIX = "fold_"
_CHECKPOINT_PREFIX = "step-"


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
    paths = [path for path in folder.glob(f"{_CHECKPOINT_PREFIX}*.npz") if _step_text(path)]
    return sorted(paths, key=step_of)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step.

    Example:
        >>> checkpoint_path(Path("checkpoints"), 12).name
        'step-00000012.npz'
    """
    return folder / f"{_CHECKPOINT_PREFIX}{step:08d}.npz"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(_step_text(path))


def _step_text(path: Path) -> str:
    """Return the digits of a checkpoint's name; empty of another name."""
    digits = path.stem.removeprefix(_CHECKPOINT_PREFIX)
    return digits if digits.isdecimal() else ""


class RunFolder:
    """Paths of a run, and the rules of who may write there.

        flags.txt  data.json  environment.json  metrics.jsonl  result.json  queries.npz
    checkpoints/  embedder.keras
         tensorboard/  report/index.html
        and, where they apply, moments.keras  text_embedder.keras  start.keras  watch.json

    Args:
        path: The folder, a local one.
    """

    def __init__(self, path: str | os.PathLike):
        require_local(path, "run_dir")
        self.path = Path(path)
        self.flags = self.path / FLAGS_FILE
        self.data = self.path / DATA_FILE
        self.environment = self.path / ENVIRONMENT_FILE
        self.metrics = self.path / METRICS_FILE
        self.result = self.path / RESULT_FILE
        self.queries = self.path / QUERIES_FILE
        self.checkpoints = self.path / "checkpoints"
        self.embedder = self.path / EMBEDDER_FILE
        self.start = self.path / START_FILE
        self.moments = self.path / MOMENTS_FILE
        self.text_embedder = self.path / TEXT_EMBEDDER_FILE
        self.tensorboard = self.path / "tensorboard"
        self.watch = self.path / WATCH_FILE
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

    def read_flags(self) -> str:
        """Return the flags that a run was started with, as text.

        Raises:
            UserError: This is not the folder of a run, or its flags are damaged.
        """
        if self.is_untouched():
            raise UserError(
                "the run was stopped before it began; leave out resume", run_dir=self.path
            )
        damaged = f"{self.flags} is damaged: it is no text; start the run again elsewhere"
        missing = f"holds no run to resume: there is no {self.flags}"
        with (
            user_errors(UnicodeDecodeError, damaged),
            user_errors(OSError, missing, run_dir=self.path),
        ):
            return self.flags.read_text(encoding="utf-8")

    def epoch_length(self) -> EpochLength:
        """Return how long an epoch of this run was."""
        lines = self.metrics.read_text(encoding="utf-8").splitlines()
        steps = next(record["step"] for record in map(json.loads, lines) if record["epoch"] == 1)
        splits = read_json(self.data)
        trained = splits["train"]
        images_of_final = sum(split["images"] for split in splits.values())
        return EpochLength(trained["images"], trained["classes"], steps, images_of_final)

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
            f"cannot be used: {ERROR_TEXT}",
            run_dir=str(self.path)[:100],
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
    def new_run(self, flags_text: str) -> Iterator[None]:
        """Make the folder, write the flags of the run, and keep other runs out for the block.

        Args:
            flags_text: The flags.

        Raises:
            UserError: It cannot be made, or has become that of another run.
        """
        with user_errors(OSError, f"cannot be made: {ERROR_TEXT}", run_dir=self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self.locked():
            self.check_new()
            with atomic_write(self.flags) as temporary:
                temporary.write_text(flags_text, encoding="utf-8")
            yield

    def record(self, data: dict[str, Any], environment: dict[str, Any], weights: str = "") -> None:
        """Write what the run's data and environment are; for a run that is continued, see that the
        data is the same.

        Where cores, devices or arithmetic are others than at the start, a line is printed that the
        bits will be, too.

        Args:
            data: By split, what `Splits.identity` returns.
            environment: What `tfdml.training.workers.environment` returns.
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
        now = environment | _checksum_of(weights)
        if self.environment.is_file():
            self._compare_environment(now, weights)
        else:
            write_json(self.environment, now)

    def _compare_environment(self, now: dict[str, Any], weights: str) -> None:
        """Compare the environment of a resumed run with that of its start; see `record`."""
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


def _checksum_of(weights: str) -> dict[str, str]:
    """Return the checksum of a file of weights as `weights`; nothing where it is no file."""
    path = Path(local_copy(weights)).expanduser()
    if not path.is_file():
        return {}
    checksum = f"sha256:{sha256_of(path)}"
    logging.info("weights %s: %s", weights, checksum)
    return {"weights": checksum}


def _arithmetic(environment: dict[str, Any]) -> dict[str, Any]:
    """Return what of an environment decides in which order sums are taken."""
    packages = {name: environment["packages"].get(name) for name in ("tensorflow", "keras", "jax")}
    return {"cpus": environment.get("cpus"), "devices": environment.get("devices"), **packages}
