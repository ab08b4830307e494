"""Retrievers: an exported embedder with a gallery that it searches, as numbered versions."""

from tfdml.export.retriever.endpoints import MAX_NEIGHBOURS, MAX_RESULTS
from tfdml.export.retriever.gallery import Gallery, GalleryItem, UnreadableItem
from tfdml.export.retriever.items import items_of_dataset, items_of_folder
from tfdml.export.retriever.loaded import Neighbours
from tfdml.export.retriever.retriever import Retriever
from tfdml.export.retriever.version import EXACT_LIMIT, prune

__all__ = [
    "EXACT_LIMIT",
    "MAX_NEIGHBOURS",
    "MAX_RESULTS",
    "Gallery",
    "GalleryItem",
    "Neighbours",
    "Retriever",
    "UnreadableItem",
    "items_of_dataset",
    "items_of_folder",
    "prune",
]
