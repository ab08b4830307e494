"""Searching embeddings: exactly, by an index, by codes, re-ranked, or in a database (LanceDB, PostgreSQL, Qdrant)."""

from tfdml.retrieval.confusable import confusable_classes as confusable_classes
from tfdml.retrieval.database import SCHEMES as SCHEMES
from tfdml.retrieval.database import GalleryDatabase as GalleryDatabase
from tfdml.retrieval.database import Neighbours as Neighbours
from tfdml.retrieval.database import connect as connect
from tfdml.retrieval.database import is_gallery as is_gallery
from tfdml.retrieval.exact import nearest_neighbours as nearest_neighbours
from tfdml.retrieval.exact import neighbour_blocks as neighbour_blocks
from tfdml.retrieval.faiss_index import GalleryIndex as GalleryIndex
from tfdml.retrieval.faiss_index import IndexRecall as IndexRecall
from tfdml.retrieval.faiss_index import build_index as build_index
from tfdml.retrieval.faiss_index import index_recall as index_recall
from tfdml.retrieval.faiss_index import load_index as load_index
from tfdml.retrieval.faiss_index import rescore as rescore
from tfdml.retrieval.indexing import EmbeddingsToIndex as EmbeddingsToIndex
from tfdml.retrieval.indexing import index_embeddings as index_embeddings
from tfdml.retrieval.reranking import Whitening as Whitening
from tfdml.retrieval.reranking import expand_queries as expand_queries
from tfdml.retrieval.reranking import fit_whitening as fit_whitening
from tfdml.retrieval.reranking import k_reciprocal_neighbours as k_reciprocal_neighbours
