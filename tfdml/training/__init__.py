"""Experiments: from settings to a run folder."""

from tfdml.training.experiment import Experiment
from tfdml.training.optimizers import build_optimizer, step_schedule
from tfdml.training.run_folder import RunFolder
from tfdml.training.settings import (
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    OptimizationSettings,
    RunSettings,
)
from tfdml.training.trainer import train

__all__ = [
    "DataSettings",
    "EvaluationSettings",
    "Experiment",
    "ModelSettings",
    "OptimizationSettings",
    "RunFolder",
    "RunSettings",
    "build_optimizer",
    "step_schedule",
    "train",
]
