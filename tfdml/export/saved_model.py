"""SavedModel: encoded images in, embeddings out, with the whole preprocessing inside, and its warm-up requests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfdml.data.decoding import SERVING_LIMIT
from tfdml.data.transforms import EvaluationTransform
from tfdml.export.network import check_backend, frozen_module, quiet
from tfdml.export.request import EXAMPLE_FEATURE, RequestPreprocessor, image_of_example
from tfdml.export.versions import new_version
from tfdml.models import AnyEmbedder

SIGNATURES = ("serving_default", "embed_images", "embed_example", "embed_each")
WARM_UP = Path("assets.extra") / "tf_serving_warmup_requests"
# The numbers of images in warm-up requests; a server is quick for the shapes that it has seen.
_WARM_UP_SIZES = (1, 8, 32)


def export_saved_model(embedder: AnyEmbedder, folder: str | os.PathLike, max_pixels: int = SERVING_LIMIT) -> Path:
    """Write the next version of a servable SavedModel atomically, and nothing else.

    `tfdml.export.export_model` writes other formats too, compares each with the embedder, and adds a model card.

    Args:
        embedder: A built `Embedder` or `MomentEmbedder`.
        folder: Where versions lie, as TF Serving's `base_path`; earlier versions stay.
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


def model_files(folder: Path) -> list[Path]:
    """Return the files of a SavedModel that its answers come from."""
    return [folder / "saved_model.pb", *sorted(file for file in (folder / "variables").rglob("*") if file.is_file())]


def write_warm_up(folder: Path, side: int, more: Iterable[bytes] = ()) -> Path:
    """Write requests of every signature, which TF Serving sends itself before it serves a version.

    So no client waits for the first ones. The requests hold a synthetic image, not one of the data set: a model must
    not contain somebody's photograph.

    Args:
        folder: The SavedModel's.
        side: Height and width of the picture, in pixels.
        more: Further requests, see `prediction_log`.

    Returns:
        The path of the file, a TFRecord of `tensorflow.serving.PredictionLog`.

    Example:
        >>> write_warm_up(pathlib.Path("models/cars/1"), side=256)
        PosixPath('models/cars/1/assets.extra/tf_serving_warmup_requests')
    """
    rows = np.arange(side) * 255 // max(1, side - 1)
    picture = np.stack(np.broadcast_arrays(rows[:, None], rows[None], 255 - rows[:, None]), -1).astype(np.uint8)
    jpeg = tf.io.encode_jpeg(picture).numpy()
    feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg]))
    example = tf.train.Example(features=tf.train.Features(feature={EXAMPLE_FEATURE: feature})).SerializeToString()
    path = folder / WARM_UP
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for size in _WARM_UP_SIZES:
            writer.write(prediction_log("serving_default", image_bytes=[jpeg] * size))
            writer.write(prediction_log("embed_example", examples=[example] * size))
            writer.write(prediction_log("embed_each", image_bytes=[jpeg] * size))
            writer.write(prediction_log("embed_images", images=np.stack([picture] * size)))
        for request in more:
            writer.write(request)
    return path


def prediction_log(signature: str, **inputs) -> bytes:
    """Return a serialised `tensorflow.serving.PredictionLog` of one Predict request.

    Written field by field, so that exporting does not need tensorflow-serving-api.

    Args:
        signature: The name of the signature.
        **inputs: The value of each input.
    """
    # The numbers are those of prediction_log.proto, predict.proto and model.proto.
    request = _field(1, _field(3, signature.encode()))
    for name, value in inputs.items():
        tensor = tf.make_tensor_proto(value).SerializeToString()
        request += _field(2, _field(1, name.encode()) + _field(2, tensor))
    return _field(6, _field(1, request))


def _field(number: int, content: bytes) -> bytes:
    """Return a field of Protocol Buffers' wire format that holds bytes: a key, the length, the content."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    digits = []
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
