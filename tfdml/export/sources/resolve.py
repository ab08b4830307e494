"""From what `--model` says to the source of embeddings that it means."""

from __future__ import annotations

import os
from pathlib import Path

from tfdml.errors import UserError
from tfdml.export.sources.base import EmbeddingSource
from tfdml.export.sources.keras_file import KerasEmbedder
from tfdml.export.sources.litert import LiteRTEmbedder
from tfdml.export.sources.saved_model import SavedModelEmbedder


def load_source(
    model: str | os.PathLike, *, resize: int = 0, resize_mode: str = "", image_size: int = 0, timeout: float = 60.0
) -> EmbeddingSource:
    """The model at a path or address.

    Args:
        model: A run folder, a .keras file, a SavedModel, a folder of versions (the newest that holds a SavedModel is
            taken), a .tflite file, `grpc://host:port/name`, `rest://host:port/name` or
            `http://host:port/v1/models/name`.
        resize: For a .tflite file, see `LiteRTEmbedder`.
        resize_mode: Likewise.
        image_size: Likewise.
        timeout: Seconds that a request to an endpoint may take.

    Returns:
        The source, loaded or reached.

    Raises:
        UserError: There is none of these, it cannot be loaded or reached, or a view is given to a model that has its
            own.

    Example:
        >>> embeddings = load_source("runs/cars").embed(dataset, batch_size=100)  # doctest: +SKIP
    """
    path = Path(model)
    if path.suffix == ".tflite":
        return LiteRTEmbedder(path, resize, resize_mode, image_size)
    if resize or resize_mode or image_size:
        raise UserError(
            f"--model={model} has its view inside: --resize, --resize_mode and --image_size go with a .tflite file"
        )
    if "://" in str(model):
        from tfdml.export.sources.endpoint import open_endpoint

        return open_endpoint(str(model), timeout)
    if (path / "saved_model.pb").is_file():
        return SavedModelEmbedder(path)
    versions = [entry for entry in path.iterdir() if entry.name.isdigit()] if path.is_dir() else []
    served = [entry for entry in versions if (entry / "saved_model.pb").is_file()]
    if served:
        return SavedModelEmbedder(max(served, key=lambda entry: int(entry.name)))
    lite = sorted(str(file.relative_to(path)) for file in path.rglob("*.tflite"))
    if lite:
        raise UserError(f"--model={model} holds no SavedModel: name one of {', '.join(lite)}")
    return KerasEmbedder(path)
