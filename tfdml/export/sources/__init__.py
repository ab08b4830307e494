"""Models that embed data sets, wherever they lie: Keras files, SavedModels, LiteRT files, serving endpoints."""

from tfdml.export.sources.base import EmbeddingSource, EncodedImagesSource, ImageRefused, encoded_batches, encoded_image
from tfdml.export.sources.keras_file import KerasEmbedder, load_embedder
from tfdml.export.sources.litert import LiteRTEmbedder
from tfdml.export.sources.resolve import load_source
from tfdml.export.sources.saved_model import SavedModelEmbedder

__all__ = [
    "EmbeddingSource",
    "EncodedImagesSource",
    "ImageRefused",
    "KerasEmbedder",
    "LiteRTEmbedder",
    "SavedModelEmbedder",
    "encoded_batches",
    "encoded_image",
    "load_embedder",
    "load_source",
]
