"""Deep metric learning on Keras 3 and TensorFlow.

Each part is imported on its first use. Where Keras is imported before, so are the classes that it
loads by name; else `import tfdml.models` registers them.
"""

import importlib
import sys
from typing import TYPE_CHECKING

from tfdml.errors import UserError as UserError
from tfdml.registry import imported_later
from tfdml.version import __version__ as __version__

if TYPE_CHECKING:  # so that type checkers and editors know what is in them
    from tfdml import audit as audit
    from tfdml import backbones as backbones
    from tfdml import callbacks as callbacks
    from tfdml import cluster as cluster
    from tfdml import data as data
    from tfdml import embeddings as embeddings
    from tfdml import evaluation as evaluation
    from tfdml import explain as explain
    from tfdml import export as export
    from tfdml import kernels as kernels
    from tfdml import layers as layers
    from tfdml import losses as losses
    from tfdml import mining as mining
    from tfdml import models as models
    from tfdml import objectives as objectives
    from tfdml import pairs as pairs
    from tfdml import pairwise as pairwise
    from tfdml import report as report
    from tfdml import results as results
    from tfdml import retrieval as retrieval
    from tfdml import training as training
    from tfdml.index import Index as Index
    from tfdml.registry import register as register
else:  # where a type checker would take any name for one of the package
    __getattr__, __dir__ = imported_later(
        __name__, {"tfdml.index": ["Index"], "tfdml.registry": ["register"]}
    )

if "keras" in sys.modules:  # then `keras.saving.load_model` finds our classes by name
    importlib.import_module("tfdml.models")
    importlib.import_module("tfdml.objectives")
