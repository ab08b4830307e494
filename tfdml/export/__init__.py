"""Exported embedders: SavedModel, LiteRT, ONNX and retrievers, each compared with the embedder first."""

from tfdml.export.conversion import convert_litert, convert_onnx
from tfdml.export.exporter import FORMATS, ExportOptions, export_model, export_run
from tfdml.export.gallery import Gallery, GalleryItem
from tfdml.export.retriever import Retriever, SearchResult, prune
from tfdml.export.saved_model import export_saved_model, write_saved_model

__all__ = [
    "FORMATS",
    "ExportOptions",
    "Gallery",
    "GalleryItem",
    "Retriever",
    "SearchResult",
    "convert_litert",
    "convert_onnx",
    "export_model",
    "export_run",
    "export_saved_model",
    "prune",
    "write_saved_model",
]
