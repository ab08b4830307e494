"""Exported embedders: SavedModel, LiteRT, ONNX and retrievers, each compared with the embedder first."""

from tfdml.export.exporter import FORMATS, ExportOptions, export_model
from tfdml.export.litert import convert_litert
from tfdml.export.onnx_format import convert_onnx
from tfdml.export.retriever import GalleryItem, Retriever
from tfdml.export.run_export import export_run
from tfdml.export.saved_model import compare, export_saved_model, write_saved_model

__all__ = [
    "FORMATS",
    "ExportOptions",
    "GalleryItem",
    "Retriever",
    "compare",
    "convert_litert",
    "convert_onnx",
    "export_model",
    "export_run",
    "export_saved_model",
    "write_saved_model",
]
