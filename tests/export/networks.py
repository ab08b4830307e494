"""A small embedder, and small data sets with classes that it can separate."""

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

from tests.data.preparations import encoded
from tfdml import backbones
from tfdml.data import EncodedImages, EvaluationTransform, ImageDataset, decode_image
from tfdml.models import Embedder


def small_embedder(seed=0, name="embedder", **options):
    """A conv4 of 32 px images and 8 dimensions, with random weights and BatchNorm statistics of its
    own."""
    keras.utils.set_random_seed(seed)
    settings = {"embedding_dim": 8, "image_size": 32, "resize": 40, **options}
    embedder = Embedder(backbones.resolve("conv4", 32, width=8), name=name, **settings)
    embedder.build((None, 32, 32, 3))
    return embedder


def picture(seed, height=50, width=70, form="JPEG", mode="RGB", **options):
    """The bytes of a smooth random image."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    small = np.random.default_rng(seed).integers(0, 255, (6, 6, bands)).astype(np.uint8)
    image = Image.fromarray(small.squeeze(), mode).resize((width, height), Image.Resampling.BICUBIC)
    return encoded(image, form, **options)


def difference(embedder, version, images):
    """The largest difference of a component between an embedder's vectors and a SavedModel's, of
    encoded images."""
    transform = EvaluationTransform.of(embedder)
    expected = embedder(
        tf.stack([transform(decode_image(tf.constant(image))) for image in images]), training=False
    )
    served = tf.saved_model.load(str(version)).signatures["serving_default"]
    return float(np.abs(served(image_bytes=tf.constant(images))["embedding"] - expected).max())


def small_dataset(split, classes=6, per_class=4):
    """JPEGs of which those of a class look alike: the same picture at several sizes."""
    data, names, labels = [], [], []
    first = 100 if split == "test" else 0
    for label in range(first, first + classes):
        for number in range(per_class):
            data.append(picture(label, 40 + 6 * number, 60 - 4 * number))
            names.append(f"{label}_{number}.jpg")
            labels.append(label)
    class_names = {label: str(label) for label in set(labels)}
    return ImageDataset(
        "small", split, EncodedImages(tuple(data), tuple(names)), np.array(labels), class_names
    )
