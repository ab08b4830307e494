"""Deep metric learning on Keras 3 and TensorFlow.

Each part is imported on its first use. Where Keras is imported before, so are the classes that it loads by name; else
`import tfdml.models` registers them.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from tfdml.errors import UserError
from tfdml.version import __version__

if TYPE_CHECKING:  # so that type checkers and editors know what is in them
    from tfdml import (
        audit,
        backbones,
        callbacks,
        cluster,
        data,
        embeddings,
        evaluation,
        explain,
        export,
        kernels,
        layers,
        losses,
        mining,
        models,
        objectives,
        pairs,
        pairwise,
        report,
        retrieval,
        training,
    )
    from tfdml.index import Index
    from tfdml.registry import register


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
    "register",
    "report",
    "retrieval",
    "training",
]


if not TYPE_CHECKING:  # else a type checker takes any name for one of the package

    def __getattr__(name):
        if name == "Index":
            return importlib.import_module("tfdml.index").Index
        if name == "register":
            return importlib.import_module("tfdml.registry").register
        if name in __all__:
            return importlib.import_module(f"tfdml.{name}")
        raise AttributeError(f"module 'tfdml' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if "keras" in sys.modules:  # then `keras.saving.load_model` finds our classes by name
    importlib.import_module("tfdml.models")
    importlib.import_module("tfdml.objectives")
