"""SavedModel: encoded images in, embeddings out, with the whole preprocessing inside."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.decoding import decode_image
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import UserError
from tfdml.models import Embedder


def evaluation_transform(embedder: Embedder) -> EvaluationTransform:
    """The view in which an embedder is evaluated and served."""
    return EvaluationTransform(resize=embedder.resize, crop=embedder.image_size, mode=embedder.resize_mode)


def export_saved_model(
    embedder: Embedder, folder: str | os.PathLike, accept: Callable[[Path], None] | None = None
) -> Path:
    """Write the next version of a servable SavedModel, whole or not at all.

    `folder/<n>/` gets two signatures, whose output is `embedding` (B, d) float32 of length 1:

    - `serving_default`: `image_bytes` (B,) strings, JPEG, PNG, GIF, BMP or WebP;
    - `embed_images`: `images` (B, H, W, 3) uint8 of any size.

    Decoding, resizing and cropping happen inside, by the functions that evaluation uses. The SavedModel needs
    TensorFlow only, neither Keras nor tfdml.

    Args:
        embedder: A built `Embedder`.
        folder: Where versions lie, as TF Serving's `base_path`; earlier versions stay.
        accept: Called with the path of the finished SavedModel before it gets its number; what it raises refuses it.

    Returns:
        The path of the new version.

    Raises:
        UserError: The folder cannot be written.

    Example:
        >>> path = export_saved_model(embedder, "models/cars")
        >>> served = tf.saved_model.load(path)
        >>> served.signatures["serving_default"](image_bytes=tf.constant([jpeg]))["embedding"]
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out={folder} cannot be made: {error.strerror}") from error
    transform = evaluation_transform(embedder)
    size = embedder.image_size

    def embed(views):
        # TensorFlow's fused kernels fail on an empty batch; its answer is an empty one.
        none = tf.zeros((0, embedder.embedding_dim))
        return {"embedding": tf.cond(tf.shape(views)[0] > 0, lambda: embedder(views, training=False), lambda: none)}

    def embed_images(images):
        return embed(transform(images))

    def embed_bytes(image_bytes):
        views = tf.map_fn(
            lambda encoded: transform(decode_image(encoded)),
            image_bytes,
            fn_output_signature=tf.TensorSpec((size, size, 3), tf.uint8),
        )
        return embed(views)

    archive = keras.export.ExportArchive()
    archive.track(embedder)
    archive.add_endpoint("serving_default", embed_bytes, [tf.TensorSpec((None,), tf.string, name="image_bytes")])
    images_spec = tf.TensorSpec((None, None, None, 3), tf.uint8, name="images")
    archive.add_endpoint("embed_images", embed_images, [images_spec])

    temporary = folder / f".partial-{os.getpid()}"
    try:
        with _quiet():
            archive.write_out(str(temporary), verbose=False)
        if accept is not None:
            accept(temporary)
        version = folder / str(_next_version(folder))
        os.rename(temporary, version)
    except OSError as error:
        raise UserError(f"--out={folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return version


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what TensorFlow logs of every save; what fails is raised."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _next_version(folder: Path) -> int:
    return 1 + max((int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()), default=0)


def compare(embedder: Embedder, saved_model: str | os.PathLike, encoded: list[bytes]) -> float:
    """The largest difference between an embedder's vectors and a SavedModel's, on the same encoded images.

    Args:
        embedder: The embedder that was exported.
        saved_model: The path of a version.
        encoded: The bytes of images.

    Returns:
        The largest absolute difference of any component.
    """
    transform = evaluation_transform(embedder)
    views = tf.stack([transform(decode_image(tf.constant(image))) for image in encoded])
    expected = keras.ops.convert_to_numpy(embedder(views, training=False))
    served = tf.saved_model.load(str(saved_model))
    found = served.signatures["serving_default"](image_bytes=tf.constant(encoded))["embedding"].numpy()
    return float(np.abs(found - expected).max())
