"""Embeddings of whole data sets: computed, stored, read back, from any backend that embeds.

`load_backend` is imported on first use: embeddings are computed and read without TensorFlow, too.
"""

import importlib
from typing import TYPE_CHECKING

from tfdml.embeddings.compute import embed, embed_batches
from tfdml.embeddings.files import ImageTable, read_embeddings

if TYPE_CHECKING:
    from tfdml.embeddings.backends import load_backend

__all__ = ["ImageTable", "embed", "embed_batches", "load_backend", "read_embeddings"]


def __getattr__(name):
    if name == "load_backend":
        return importlib.import_module("tfdml.embeddings.backends").load_backend
    raise AttributeError(f"module 'tfdml.embeddings' has no attribute {name!r}")
