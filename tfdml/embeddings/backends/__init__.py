"""Models that embed data sets, wherever they are: Keras, SavedModel, LiteRT and ONNX files, serving endpoints."""

from tfdml.embeddings.backends.base import (
    EmbeddingBackend,
    EncodedImagesBackend,
    ImageRefused,
    encoded_batches,
    encoded_image,
)
from tfdml.embeddings.backends.keras_file import KerasEmbedder, load_embedder
from tfdml.embeddings.backends.litert import LiteRTEmbedder
from tfdml.embeddings.backends.load import load_backend, quickest_on_cpu
from tfdml.embeddings.backends.onnx_file import OnnxEmbedder
from tfdml.embeddings.backends.saved_model import SavedModelEmbedder

__all__ = [
    "EmbeddingBackend",
    "EncodedImagesBackend",
    "ImageRefused",
    "KerasEmbedder",
    "LiteRTEmbedder",
    "OnnxEmbedder",
    "SavedModelEmbedder",
    "encoded_batches",
    "encoded_image",
    "load_backend",
    "load_embedder",
    "quickest_on_cpu",
]
