"""An embedder from wherever it lies: the names that other parts import."""

from tfdml.export.sources import (
    EmbeddingSource,
    KerasEmbedder,
    LiteRTEmbedder,
    SavedModelEmbedder,
    encoded_batches,
    encoded_image,
    load_embedder,
    load_source,
)

load_model = load_source

__all__ = [
    "EmbeddingSource",
    "KerasEmbedder",
    "LiteRTEmbedder",
    "SavedModelEmbedder",
    "encoded_batches",
    "encoded_image",
    "load_embedder",
    "load_model",
    "load_source",
]
