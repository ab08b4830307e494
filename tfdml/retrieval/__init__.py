"""Searching embeddings: exactly, re-ranked, or in a gallery: of files, in a database (LanceDB,
PostgreSQL), or in a retriever.

Galleries and re-ranking are imported on first use: the exact search needs NumPy alone.
"""

from typing import TYPE_CHECKING

from tfdml.registry import imported_later
from tfdml.retrieval.confusion import confusable_classes as confusable_classes
from tfdml.retrieval.exact import nearest_neighbors as nearest_neighbors
from tfdml.retrieval.exact import neighbor_blocks as neighbor_blocks
from tfdml.retrieval.identities import Identities as Identities

_PARTS = {
    "tfdml.retrieval.addresses": ("SCHEMES", "is_database", "kind_of_gallery"),
    "tfdml.retrieval.databases": ("AddCounts", "IndexRecall", "WritableGallery"),
    "tfdml.retrieval.galleries": (
        "About",
        "Gallery",
        "MemoryGallery",
        "Neighbors",
        "Rows",
        "open_gallery",
    ),
    "tfdml.retrieval.reranking": (
        "Whitening",
        "expand_queries",
        "fit_whitening",
        "k_reciprocal_neighbors",
    ),
}

if TYPE_CHECKING:
    from tfdml.retrieval.addresses import SCHEMES as SCHEMES
    from tfdml.retrieval.addresses import is_database as is_database
    from tfdml.retrieval.addresses import kind_of_gallery as kind_of_gallery
    from tfdml.retrieval.databases import AddCounts as AddCounts
    from tfdml.retrieval.databases import IndexRecall as IndexRecall
    from tfdml.retrieval.databases import WritableGallery as WritableGallery
    from tfdml.retrieval.galleries import About as About
    from tfdml.retrieval.galleries import Gallery as Gallery
    from tfdml.retrieval.galleries import MemoryGallery as MemoryGallery
    from tfdml.retrieval.galleries import Neighbors as Neighbors
    from tfdml.retrieval.galleries import Rows as Rows
    from tfdml.retrieval.galleries import open_gallery as open_gallery
    from tfdml.retrieval.reranking import Whitening as Whitening
    from tfdml.retrieval.reranking import expand_queries as expand_queries
    from tfdml.retrieval.reranking import fit_whitening as fit_whitening
    from tfdml.retrieval.reranking import k_reciprocal_neighbors as k_reciprocal_neighbors
else:
    __getattr__, __dir__ = imported_later(__name__, _PARTS)
