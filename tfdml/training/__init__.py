"""Experiments: from settings to a run folder."""

from tfdml.training.optimizers import (
    PyTorchAdam,
    PyTorchAdamW,
    PyTorchSGD,
    averaged,
    build_optimizer,
    rate_schedule,
    step_schedule,
)
from tfdml.training.run.trainer import train
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import (
    DataSettings,
    EvaluationSettings,
    Experiment,
    ModelSettings,
    OptimizationSettings,
    RunSettings,
)

__all__ = [
    "DataSettings",
    "EvaluationSettings",
    "Experiment",
    "ModelSettings",
    "OptimizationSettings",
    "PyTorchAdam",
    "PyTorchAdamW",
    "PyTorchSGD",
    "RunFolder",
    "RunSettings",
    "averaged",
    "build_optimizer",
    "rate_schedule",
    "step_schedule",
    "train",
]
