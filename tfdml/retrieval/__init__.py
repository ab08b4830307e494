"""Searching embeddings: exactly, by an index, by codes, re-ranked, or in a database (LanceDB, PostgreSQL, Qdrant)."""

from tfdml.retrieval.address import SCHEMES, is_gallery
from tfdml.retrieval.confusable import confusable_classes
from tfdml.retrieval.database import GalleryDatabase, Neighbours, connect
from tfdml.retrieval.exact import nearest_neighbours, neighbour_blocks
from tfdml.retrieval.faiss_index import (
    GalleryIndex,
    IndexRecall,
    build_index,
    index_recall,
    load_index,
    rescore,
)
from tfdml.retrieval.indexing import EmbeddingsToIndex, index_embeddings
from tfdml.retrieval.reranking import (
    Augmented,
    Whitening,
    augment_gallery,
    csls_densities,
    expand_queries,
    fit_whitening,
    k_reciprocal_neighbours,
)

__all__ = [
    "SCHEMES",
    "Augmented",
    "EmbeddingsToIndex",
    "GalleryDatabase",
    "GalleryIndex",
    "IndexRecall",
    "Neighbours",
    "Whitening",
    "augment_gallery",
    "build_index",
    "confusable_classes",
    "connect",
    "csls_densities",
    "expand_queries",
    "fit_whitening",
    "index_embeddings",
    "index_recall",
    "is_gallery",
    "k_reciprocal_neighbours",
    "load_index",
    "nearest_neighbours",
    "neighbour_blocks",
    "rescore",
]
