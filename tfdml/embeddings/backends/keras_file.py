"""A Keras embedder, of a run or in a .keras file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import explain_failure
from tfdml.data.pipeline import evaluation_batches, readable_views
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.backends.base import EmbeddingBackend, checksum_of
from tfdml.embeddings.backends.model_card import compare_with_card
from tfdml.embeddings.compute import embed_batches
from tfdml.errors import UserError, short_message
from tfdml.models import AnyEmbedder


class KerasEmbedder(EmbeddingBackend):
    """A Keras embedder, fed by the evaluation pipeline.

    Args:
        path: A run folder or a .keras file.

    Raises:
        UserError: There is none, or the file is not an embedder.
    """

    kind = "keras"

    def __init__(self, path: str | os.PathLike):
        self.path = _file(path)
        self.address = str(path)
        self.embedder = load_embedder(path)
        self.transform = EvaluationTransform.of(self.embedder)
        self.view = self.transform.get_config()

    def checksum(self) -> str:
        """Of the .keras file."""
        return checksum_of(self.path)

    def stream(self, dataset: ImageDataset, batch_size: int, first: int = 0) -> Iterator[np.ndarray]:
        """See `EmbeddingBackend.stream`."""
        rest = dataset.take(np.arange(first, len(dataset))) if first else dataset
        options = tf.data.Options()
        # The input has threads of its own, where the model's are kept to one operation at a time.
        options.threading.private_threadpool_size = os.cpu_count() or 1
        batches = evaluation_batches(rest, self.transform, batch_size).with_options(options)
        try:
            yield from embed_batches(self.embedder, batches, batch_size=min(batch_size, len(dataset)))
        except tf.errors.OpError as error:
            raise (explain_failure(error, rest, leave_out="`bad_images='skip'`") or error) from None

    def stream_readable(self, dataset: ImageDataset, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `EmbeddingBackend.stream_readable`."""
        for images, rows in readable_views(dataset.images, self.transform, batch_size):
            yield rows, next(embed_batches(self.embedder, [images], batch_size=min(batch_size, len(dataset))))


def _file(path: str | os.PathLike) -> Path:
    path = Path(path)
    return path / "embedder.keras" if path.is_dir() else path


def _check_archive(path: Path) -> None:
    """Refuse what is no .keras archive, such as a legacy HDF5 model, or is damaged, for which Keras does not look."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged:
        raise ValueError(f"{damaged} in it is damaged")


def load_embedder(path: str | os.PathLike) -> AnyEmbedder:
    """The Keras embedder of a run folder or a .keras file.

    Raises:
        UserError: There is none, or the file is not an embedder.
    """
    path = _file(path)
    if not path.is_file():
        of_seeds = sorted(path.parent.glob("seed_*/embedder.keras"))
        ask = f"name the run of one seed, such as {of_seeds[0].parent}" if of_seeds else "has the run finished?"
        raise UserError(f"there is no embedder at {path}; {ask}")
    compare_with_card(path)
    try:
        _check_archive(path)
        # Code in the file, such as that of a Lambda layer, is refused; `safe_mode` is Keras's default.
        embedder = keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:  # unknown layers, and whatever else Keras raises on a foreign file
        raise UserError(f"{path} cannot be loaded: {short_message(error, named=True)}") from error
    if not isinstance(embedder, AnyEmbedder):
        raise UserError(f"{path} holds a {type(embedder).__name__}, not an Embedder")
    return embedder
