"""SavedModel: encoded images in, embeddings out, with the whole preprocessing inside."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdml.data.decoding import SERVING_LIMIT, decode_image
from tfdml.data.transforms import EvaluationTransform
from tfdml.export.network import check_backend, frozen_module, quiet
from tfdml.export.request import RequestPreprocessor, image_of_example
from tfdml.export.versions import new_version
from tfdml.models import AnyEmbedder

SIGNATURES = ("serving_default", "embed_images", "embed_example", "embed_each")


def export_saved_model(
    embedder: AnyEmbedder,
    folder: str | os.PathLike,
    accept: Callable[[Path], None] | None = None,
    max_pixels: int = SERVING_LIMIT,
) -> Path:
    """Write the next version of a servable SavedModel atomically, and nothing else.

    `tfdml.export.export_model` writes other formats too, compares each with the embedder, and adds a model card.

    Args:
        embedder: A built `Embedder` or `MomentEmbedder`.
        folder: Where versions lie, as TF Serving's `base_path`; earlier versions stay.
        accept: Called with the path of the finished SavedModel before it gets its number; what it raises refuses it.
        max_pixels: See `write_saved_model`.

    Returns:
        The path of the new version.

    Raises:
        UserError: Keras runs on another backend than TensorFlow, or the folder cannot be written.

    Example:
        >>> path = export_saved_model(embedder, "models/cars")
        >>> served = tf.saved_model.load(path)
        >>> served.signatures["serving_default"](image_bytes=tf.constant([jpeg]))["embedding"].shape
        TensorShape([1, 16])
    """
    check_backend()
    with new_version(folder) as version:
        write_saved_model(embedder, version.folder, max_pixels)
        if accept is not None:
            accept(version.folder)
    assert version.path is not None
    return version.path


def write_saved_model(embedder: AnyEmbedder, folder: str | os.PathLike, max_pixels: int = SERVING_LIMIT) -> None:
    """Write a SavedModel with these signatures; each takes a batch of any size, none included.

    - `serving_default`: `image_bytes` (B,) strings, JPEG, PNG or WebP -> `embedding` (B, d) float32 of
      length 1;
    - `embed_images`: `images` (B, H, W, 3) uint8 of any size -> `embedding`;
    - `embed_example`: `examples` (B,) serialised tf.Examples with the feature `image/encoded` -> `embedding`;
    - `embed_each`: `image_bytes` -> `embedding`, and `error` (B,) strings: what is wrong with an image, whose row is
      then zero, or empty. For a server that puts the images of several clients into one batch.

    The first three fail on the first image that cannot be decoded, and name it. Decoding, resizing and cropping happen
    inside, by the functions that evaluation uses. The SavedModel needs TensorFlow only, neither Keras nor tfdml.

    Args:
        embedder: A built `Embedder` or `MomentEmbedder`.
        folder: Where to write; an empty folder or none.
        max_pixels: Images whose header states more pixels are refused before they are decoded.
    """
    size = embedder.image_size
    views = RequestPreprocessor(EvaluationTransform.of(embedder), max_pixels)

    # Constants, which TensorFlow can fold into one another, run a third faster than variables; and the signatures share
    # them.
    network = frozen_module(embedder, size)

    @tf.function(input_signature=[tf.TensorSpec((None, size, size, 3), tf.uint8)], autograph=False)
    def embed(images: tf.Tensor) -> tf.Tensor:
        # TensorFlow's fused kernels fail on an empty batch; its answer is an empty one.
        none = tf.zeros((0, embedder.embedding_dim))
        return tf.cond(tf.shape(images)[0] > 0, lambda: network.embed(images)["embedding"], lambda: none)

    def embed_bytes(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"embedding": embed(views.all_or_error(image_bytes, "image_bytes"))}

    def embed_images(images: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"embedding": embed(views.of_images(images, "images"))}

    def embed_example(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"embedding": embed(views.all_or_error(examples, "examples", image_of_example))}

    def embed_each(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        images, errors = views.each(image_bytes)
        return {"embedding": tf.where((errors == "")[:, None], embed(images), 0.0), "error": errors}

    text = tf.TensorSpec((None,), tf.string)
    endpoints = {
        "serving_default": (embed_bytes, text),
        "embed_images": (embed_images, tf.TensorSpec((None, None, None, 3), tf.uint8)),
        "embed_example": (embed_example, text),
        "embed_each": (embed_each, text),
    }
    module = tf.Module()
    module.endpoints = {
        name: tf.function(function, input_signature=[spec], autograph=False)
        for name, (function, spec) in endpoints.items()
    }
    # Nothing is trained any more, and gradients of constants cannot be saved.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    with quiet():
        tf.saved_model.save(module, str(folder), signatures=dict(module.endpoints), options=options)


def compare(embedder: AnyEmbedder, saved_model: str | os.PathLike, encoded: list[bytes]) -> float:
    """The largest difference between an embedder's vectors and a SavedModel's, on the same encoded images.

    Args:
        embedder: The embedder that was exported.
        saved_model: The path of a version.
        encoded: The bytes of images.

    Returns:
        The largest absolute difference of any component.
    """
    transform = EvaluationTransform.of(embedder)
    views = tf.stack([transform(decode_image(tf.constant(image))) for image in encoded])
    expected = keras.ops.convert_to_numpy(embedder(views, training=False))
    served = tf.saved_model.load(str(saved_model))
    found = served.signatures["serving_default"](image_bytes=tf.constant(encoded))["embedding"].numpy()
    return float(np.abs(found - expected).max())
