"""Embeddings of whole data sets: computed, stored, read back, from any backend that embeds."""

from tfdml.embeddings.backends.load import load_backend
from tfdml.embeddings.compute import embed, embed_batches
from tfdml.embeddings.reader import read_embeddings, read_names

__all__ = ["embed", "embed_batches", "load_backend", "read_embeddings", "read_names"]
