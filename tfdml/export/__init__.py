"""Embedders that leave training: SavedModel for TensorFlow and TF Serving."""

from tfdml.export.saved_model import compare, export_saved_model

__all__ = ["compare", "export_saved_model"]
