"""A local web page to try a model: search a gallery by images, filter it, and look at the map of its embeddings."""

from tfdml.demo.application import Demo, application, embedder_of, explainer_of, serve
from tfdml.demo.gallery import DatabaseGallery, Gallery, combined_query, folder_gallery, map_of, stored_gallery

__all__ = [
    "DatabaseGallery",
    "Demo",
    "Gallery",
    "application",
    "combined_query",
    "embedder_of",
    "explainer_of",
    "folder_gallery",
    "map_of",
    "serve",
    "stored_gallery",
]
