"""The folder that a run leaves behind."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from tfdml.errors import UserError
from tfdml.files import atomic_path, write_json
from tfdml.training.experiment import Experiment
from tfdml.version import __version__, installed

_PACKAGES = ("tensorflow", "keras", "numpy", "faiss-cpu", "scikit-learn", "pillow", "matplotlib")


class RunFolder:
    """Paths of a run, and the rules of who may write there.

        flags.txt  environment.json  metrics.jsonl  result.json  calibration/  checkpoints/  embedder.keras
        tensorboard/  report/index.html

    Args:
        path: The folder.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.flags = self.path / "flags.txt"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.result = self.path / "result.json"
        self.checkpoints = self.path / "checkpoints"
        self.calibration = self.path / "calibration"
        self.embedder = self.path / "embedder.keras"
        self.moments = self.path / "moments.keras"
        self.tensorboard = self.path / "tensorboard"
        self.report = self.path / "report" / "index.html"

    def check_new(self) -> None:
        """Raise a `UserError` if a run could lose something by being written here."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(
                f"--run_dir={self.path} exists already: continue that run with --resume, or name another folder"
            )

    def create(self, experiment: Experiment, devices: list[str]) -> None:
        """Make the folder, with the flags and the environment of the run."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--run_dir={self.path} cannot be made: {error.strerror}") from error
        with atomic_path(self.flags) as temporary:
            temporary.write_text(experiment.as_flags(), encoding="utf-8")
        write_json(self.environment, environment(devices))

    def load_experiment(self) -> Experiment:
        """The experiment that a run was started with.

        Raises:
            UserError: This is not the folder of a run.
        """
        try:
            text = self.flags.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"--run_dir={self.path} holds no run to resume: there is no {self.flags}") from error
        return Experiment.from_flags(text, run_dir=str(self.path))


def environment(devices: list[str]) -> dict:
    """What ran: versions, machine, devices."""
    return {
        "tfdml": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "devices": devices,
        "packages": installed(_PACKAGES),
    }
