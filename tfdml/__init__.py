"""Deep metric learning on Keras 3 and TensorFlow.

The backend-free part (`losses`, `mining`, `kernels`, `layers`, `objectives`, `backbones`, `models`) is
imported with the package; what needs TensorFlow itself or is heavy (`data`, `training`, `embeddings`, `evaluation`,
`audit`, `callbacks`, `explain`, `report`, `export`, `retrieval`, `cluster`) on first use.
"""

import importlib
from typing import TYPE_CHECKING

from tfdml import backbones, kernels, layers, losses, mining, models, objectives, pairs, pairwise
from tfdml.errors import UserError
from tfdml.version import __version__

if TYPE_CHECKING:  # so that type checkers and editors know what is in them
    from tfdml import (
        audit,
        callbacks,
        cluster,
        data,
        embeddings,
        evaluation,
        explain,
        export,
        report,
        retrieval,
        training,
    )
    from tfdml.index import Index


__all__ = [
    "Index",
    "UserError",
    "__version__",
    "audit",
    "backbones",
    "callbacks",
    "cluster",
    "data",
    "embeddings",
    "evaluation",
    "explain",
    "export",
    "kernels",
    "layers",
    "losses",
    "mining",
    "models",
    "objectives",
    "pairs",
    "pairwise",
    "report",
    "retrieval",
    "training",
]


if not TYPE_CHECKING:  # else a type checker takes any name for one of the package

    def __getattr__(name):
        if name == "Index":
            return importlib.import_module("tfdml.index").Index
        if name in __all__:
            return importlib.import_module(f"tfdml.{name}")
        raise AttributeError(f"module 'tfdml' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
