"""Exported embedders: SavedModel, LiteRT, ONNX and retrievers, each compared with the embedder
first.

Each part is imported on first use: options are read without TensorFlow.
"""

from typing import TYPE_CHECKING

from tfdml.registry import imported_later

_PARTS = {
    "tfdml.export.conversion": (
        "convert_litert",
        "convert_onnx",
    ),
    "tfdml.export.exporter": (
        "export_model",
        "export_run",
    ),
    "tfdml.export.options": ("ExportOptions",),
    "tfdml.export.retriever": (
        "Retriever",
        "RetrieverItems",
    ),
    "tfdml.export.saved_model": (
        "export_saved_model",
        "write_saved_model",
    ),
}

if TYPE_CHECKING:
    from tfdml.export.conversion import convert_litert as convert_litert
    from tfdml.export.conversion import convert_onnx as convert_onnx
    from tfdml.export.exporter import export_model as export_model
    from tfdml.export.exporter import export_run as export_run
    from tfdml.export.options import ExportOptions as ExportOptions
    from tfdml.export.retriever import Retriever as Retriever
    from tfdml.export.retriever import RetrieverItems as RetrieverItems
    from tfdml.export.saved_model import export_saved_model as export_saved_model
    from tfdml.export.saved_model import write_saved_model as write_saved_model
else:
    __getattr__, __dir__ = imported_later(__name__, _PARTS)
