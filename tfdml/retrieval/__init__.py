"""Galleries in databases: one interface to LanceDB, PostgreSQL with pgvector, and Qdrant."""

from tfdml.retrieval.connecting import SCHEMES, connect, is_gallery
from tfdml.retrieval.database import GalleryDatabase, Neighbours
from tfdml.retrieval.evaluating import evaluate_gallery
from tfdml.retrieval.indexing import EmbeddingsToIndex, index_embeddings

__all__ = [
    "SCHEMES",
    "EmbeddingsToIndex",
    "GalleryDatabase",
    "Neighbours",
    "connect",
    "evaluate_gallery",
    "index_embeddings",
    "is_gallery",
]
