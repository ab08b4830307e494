"""Deep metric learning on Keras 3 and TensorFlow.

The backend-free part (`losses`, `kernels`, `layers`, `objectives`, `backbones`, `models`) is imported with
the package; what needs TensorFlow itself or is heavy (`data`, `training`, `evaluation`, `export`) on first use.
"""

import importlib

from tfdml import backbones, kernels, layers, losses, models, objectives, pairwise
from tfdml.errors import UserError
from tfdml.version import __version__

_ON_FIRST_USE = ("data", "evaluation", "export", "training")

__all__ = [
    "UserError",
    "__version__",
    "backbones",
    "data",
    "evaluation",
    "export",
    "kernels",
    "layers",
    "losses",
    "models",
    "objectives",
    "pairwise",
    "training",
]


def __getattr__(name):
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"tfdml.{name}")
    raise AttributeError(f"module 'tfdml' has no attribute {name!r}")
