"""An embedder from wherever it lies: a run folder, a .keras file, or a SavedModel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import keras
import numpy as np
import tensorflow as tf

from tfdml.data import encoded
from tfdml.data.dataset import ImageDataset, Images
from tfdml.data.pipeline import evaluation_batches
from tfdml.errors import UserError
from tfdml.evaluation import embed
from tfdml.export.saved_model import evaluation_transform
from tfdml.models import Embedder, MomentEmbedder


class DatasetEmbedder(Protocol):
    """Anything that embeds a data set."""

    def embed(self, dataset: ImageDataset, batch_size: int) -> np.ndarray:
        """(N, d) float32, in the data set's order."""


class KerasEmbedder:
    """A Keras embedder, fed by the evaluation pipeline.

    Args:
        embedder: The embedder.
    """

    def __init__(self, embedder: Embedder | MomentEmbedder):
        self.embedder = embedder

    def embed(self, dataset: ImageDataset, batch_size: int) -> np.ndarray:
        """(N, d) float32, in the data set's order."""
        return embed(self.embedder, evaluation_batches(dataset, evaluation_transform(self.embedder), batch_size))


class SavedModelEmbedder:
    """An exported SavedModel, fed with encoded images as a client would.

    Args:
        path: The path of a version.
    """

    def __init__(self, path: str | os.PathLike):
        self.loaded = tf.saved_model.load(str(path))
        if "serving_default" not in self.loaded.signatures:
            raise UserError(f"--model={path}: the SavedModel has no signature serving_default")

    def embed(self, dataset: ImageDataset, batch_size: int) -> np.ndarray:
        """(N, d) float32, in the data set's order."""
        serve = self.loaded.signatures["serving_default"]
        batches = encoded_batches(dataset.images, batch_size)
        return np.concatenate([serve(image_bytes=tf.constant(batch))["embedding"].numpy() for batch in batches])


def encoded_batches(images: Images, batch_size: int) -> Iterator[list[bytes]]:
    """The encoded bytes of images, in order; arrays are encoded as PNG, which loses nothing."""
    for first in range(0, len(images), batch_size):
        yield [encoded_image(images, index) for index in range(first, min(first + batch_size, len(images)))]


def encoded_image(images: Images, index: int) -> bytes:
    """The encoded bytes of one image.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return encoded.encoded_image(images, index)
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "message", None) or error
        raise UserError(f"{images.name(index)} cannot be read: {reason}") from error


def load_embedder(path: str | os.PathLike) -> Embedder | MomentEmbedder:
    """The Keras embedder of a run folder or a .keras file.

    Raises:
        UserError: There is none, or the file is not an embedder.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "embedder.keras"
    if not path.is_file():
        raise UserError(f"there is no embedder at {path}; has the run finished?")
    try:
        embedder = keras.saving.load_model(path, compile=False)
    except (ValueError, OSError, TypeError) as error:
        raise UserError(f"{path} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(embedder, (Embedder, MomentEmbedder)):
        raise UserError(f"{path} holds a {type(embedder).__name__}, not an Embedder")
    return embedder


def load_model(path: str | os.PathLike) -> DatasetEmbedder:
    """The model at a path: a run folder, a .keras file, a SavedModel, or the newest version below a folder of them.

    Raises:
        UserError: There is none of these.
    """
    path = Path(path)
    if (path / "saved_model.pb").is_file():
        return SavedModelEmbedder(path)
    versions = [entry for entry in path.iterdir() if entry.name.isdigit()] if path.is_dir() else []
    if versions:
        return SavedModelEmbedder(max(versions, key=lambda entry: int(entry.name)))
    return KerasEmbedder(load_embedder(path))
