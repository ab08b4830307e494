"""One small embedder in every form, and images to embed with it."""

import dataclasses
import json
import pathlib

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from tests.export.networks import picture
from tfdml import backbones
from tfdml.data import EncodedImages, ImageDataset
from tfdml.embeddings.model_card import fingerprint
from tfdml.export import export_saved_model
from tfdml.models import Embedder

VIEW = {"resize": 40, "image_size": 32, "resize_mode": "shorter"}


@dataclasses.dataclass(frozen=True)
class Models:
    """Where the forms of the embedder lie."""

    keras: pathlib.Path
    saved_model: pathlib.Path
    litert: pathlib.Path
    embedder: Embedder


def make(folder, seed=0):
    """The embedder as .keras, SavedModel and .tflite, the latter with a model card two folders
    up."""
    keras.utils.set_random_seed(seed)
    embedder = Embedder(
        backbones.resolve("conv4", 32, width=8), embedding_dim=6, image_size=32, resize=40
    )
    embedder(np.zeros((1, 32, 32, 3), np.uint8))
    embedder.save(folder / "embedder.keras")
    version = export_saved_model(embedder, folder / "versions")
    litert = version / "litert" / "float32.tflite"
    litert.parent.mkdir(exist_ok=True)
    litert.write_bytes(tflite(embedder))
    (version / "model_card.json").write_text(
        json.dumps({"view": VIEW, "fingerprint": fingerprint(embedder)})
    )
    return Models(folder / "embedder.keras", version, litert, embedder)


def tflite(embedder, batch=None):
    """The bytes of a float32 .tflite from (batch, crop, crop, 3) uint8 to embeddings."""
    size = embedder.image_size
    function = tf.function(
        lambda images: {"embedding": embedder(images, training=False)},
        input_signature=[tf.TensorSpec((batch, size, size, 3), tf.uint8, name="images")],
    )
    # Without the constants frozen here, the converter would leave the weights out.
    frozen = convert_variables_to_constants_v2(function.get_concrete_function())
    return tf.lite.TFLiteConverter.from_concrete_functions([frozen]).convert()


def pictures(count=11, broken=()):
    """A data set of JPEGs and PNGs of several sizes; those at the places `broken` are cut in
    half."""
    data = [picture(i, 40 + 7 * i, 90 - 3 * i, "JPEG" if i % 3 else "PNG") for i in range(count)]
    data = [image[: len(image) // 2] if i in broken else image for i, image in enumerate(data)]
    names = tuple(f"image{i}.jpg" for i in range(count))
    labels = np.arange(count) // 2
    return ImageDataset(
        "pictures",
        "test",
        EncodedImages(tuple(data), names),
        labels,
        {int(c): str(c) for c in labels},
    )
