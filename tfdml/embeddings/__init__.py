"""Embeddings of whole data sets: computed, stored, read back, from any backend that embeds.

What computes is imported on first use: embeddings are read and compared without Keras.
"""

from typing import TYPE_CHECKING

from tfdml.embeddings.files import ImageTable as ImageTable
from tfdml.embeddings.files import read_embeddings as read_embeddings
from tfdml.registry import imported_later

_PARTS = {
    "tfdml.embeddings.backends": ("load_backend",),
    "tfdml.embeddings.compute": (
        "embed",
        "embed_batches",
    ),
}

if TYPE_CHECKING:
    from tfdml.embeddings.backends import load_backend as load_backend
    from tfdml.embeddings.compute import embed as embed
    from tfdml.embeddings.compute import embed_batches as embed_batches
else:
    __getattr__, __dir__ = imported_later(__name__, _PARTS)
