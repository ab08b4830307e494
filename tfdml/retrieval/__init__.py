"""Searching embeddings: exactly, re-ranked, or in a database (LanceDB, PostgreSQL).

Galleries and re-ranking are imported on first use: the exact search needs NumPy alone.
"""

from typing import TYPE_CHECKING

from tfdml.registry import imported_later
from tfdml.retrieval.exact import confusable_classes as confusable_classes
from tfdml.retrieval.exact import nearest_neighbors as nearest_neighbors
from tfdml.retrieval.exact import neighbor_blocks as neighbor_blocks

_PARTS = {
    "tfdml.retrieval.galleries": (
        "SCHEMES",
        "GalleryDatabase",
        "Neighbors",
        "connect",
        "index_embeddings",
        "is_gallery",
    ),
    "tfdml.retrieval.reranking": (
        "Whitening",
        "expand_queries",
        "fit_whitening",
        "k_reciprocal_neighbors",
    ),
}

if TYPE_CHECKING:
    from tfdml.retrieval.galleries import SCHEMES as SCHEMES
    from tfdml.retrieval.galleries import GalleryDatabase as GalleryDatabase
    from tfdml.retrieval.galleries import Neighbors as Neighbors
    from tfdml.retrieval.galleries import connect as connect
    from tfdml.retrieval.galleries import index_embeddings as index_embeddings
    from tfdml.retrieval.galleries import is_gallery as is_gallery
    from tfdml.retrieval.reranking import Whitening as Whitening
    from tfdml.retrieval.reranking import expand_queries as expand_queries
    from tfdml.retrieval.reranking import fit_whitening as fit_whitening
    from tfdml.retrieval.reranking import k_reciprocal_neighbors as k_reciprocal_neighbors
else:
    __getattr__, __dir__ = imported_later(__name__, _PARTS)
