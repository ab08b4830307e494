"""The settings of a training run, stage by stage: every choice with its default, its meaning and its bounds."""

from tfdml.training.settings.data import DataSettings
from tfdml.training.settings.evaluation import EvaluationSettings
from tfdml.training.settings.fields import Settings, as_text
from tfdml.training.settings.model import ModelSettings
from tfdml.training.settings.optimization import OptimizationSettings
from tfdml.training.settings.run import RunSettings

__all__ = [
    "DataSettings",
    "EvaluationSettings",
    "ModelSettings",
    "OptimizationSettings",
    "RunSettings",
    "Settings",
    "as_text",
]
