"""Experiments: from settings to a run folder."""

from tfdml.training.checkpoints import RunFolder as RunFolder
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
