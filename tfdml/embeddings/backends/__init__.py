"""Models that embed data sets, wherever they are: Keras, SavedModel, LiteRT and ONNX files, serving endpoints."""

from tfdml.embeddings.backends.base import (
    EmbeddingBackend,
    EncodedImagesBackend,
    ImageRefused,
    embed_readable,
    encoded_image,
)
from tfdml.embeddings.backends.model_card import quickest_on_cpu
from tfdml.embeddings.backends.model_files import (
    KerasEmbedder,
    LiteRTEmbedder,
    OnnxEmbedder,
    SavedModelEmbedder,
    load_backend,
    load_embedder,
)

__all__ = [
    "EmbeddingBackend",
    "EncodedImagesBackend",
    "ImageRefused",
    "KerasEmbedder",
    "LiteRTEmbedder",
    "OnnxEmbedder",
    "SavedModelEmbedder",
    "embed_readable",
    "encoded_image",
    "load_backend",
    "load_embedder",
    "quickest_on_cpu",
]
