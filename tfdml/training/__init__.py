"""Experiments: from settings to a run folder.

Each part is imported on first use: settings are read without TensorFlow.
"""

from typing import TYPE_CHECKING

from tfdml.registry import imported_later

_PARTS = {
    "tfdml.run_folder": ("RunFolder",),
    "tfdml.training.optimizers": (
        "PyTorchAdam",
        "PyTorchAdamW",
        "averaged",
        "build_optimizer",
        "rate_schedule",
        "step_schedule",
    ),
    "tfdml.training.results": ("TrainingRun",),
    "tfdml.training.settings": ("Experiment",),
    "tfdml.training.trainer": ("train",),
    "tfdml.training.workers": ("ClassParallel",),
}

if TYPE_CHECKING:
    from tfdml.run_folder import RunFolder as RunFolder
    from tfdml.training.optimizers import PyTorchAdam as PyTorchAdam
    from tfdml.training.optimizers import PyTorchAdamW as PyTorchAdamW
    from tfdml.training.optimizers import averaged as averaged
    from tfdml.training.optimizers import build_optimizer as build_optimizer
    from tfdml.training.optimizers import rate_schedule as rate_schedule
    from tfdml.training.optimizers import step_schedule as step_schedule
    from tfdml.training.results import TrainingRun as TrainingRun
    from tfdml.training.settings import Experiment as Experiment
    from tfdml.training.trainer import train as train
    from tfdml.training.workers import ClassParallel as ClassParallel
else:
    __getattr__, __dir__ = imported_later(__name__, _PARTS)
