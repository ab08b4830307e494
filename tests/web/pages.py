"""A small gallery of colored pictures with hostile names, and a model that sees their mean
color."""

import io

import numpy as np
import tensorflow as tf
from PIL import Image

from tfdml.data.decoding import decode_image
from tfdml.embeddings.backends import SavedModelEmbedder
from tfdml.web.page import embedder_of
from tfdml.web.pictures import Pictures

EVIL = "<img src=x onerror=alert(1)>&\"'.png"
COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def encoded(color, side=24, kind="PNG"):
    """The bytes of a picture of one color."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), color).save(buffer, kind)
    return buffer.getvalue()


class Colors(SavedModelEmbedder):
    """A model that embeds by the mean color."""

    kind, address = "keras", "colors"

    def __init__(self, name="sha256:1"):
        self.name = name

    def checksum(self):
        return self.name

    fingerprint = checksum

    def request(self, encoded_images):
        vectors, reasons = (
            np.zeros((len(encoded_images), 3), np.float32),
            [""] * len(encoded_images),
        )
        for row, data in enumerate(encoded_images):
            try:
                vectors[row] = (
                    decode_image(tf.constant(data)).numpy().reshape(-1, 3).mean(axis=0) / 255
                )
            except tf.errors.InvalidArgumentError as error:
                reasons[row] = str(error)
        return vectors, reasons


embed = embedder_of(Colors())


def small_gallery(folder, each=4):
    """Pictures of three classes, each a little darker than the one before; the last has a hostile
    name."""
    names, vectors, classes = [], [], []
    for name, color in COLORS.items():
        for number in range(each):
            shade = tuple(int(value * (1 - number / 20)) for value in color)
            file = EVIL if (name, number) == ("red", each - 1) else f"{name}{number}.png"
            (folder / file).write_bytes(encoded(shade))
            names.append(file)
            vectors.append(np.array(shade, np.float32) / 255)
            classes.append(name)
    return Pictures("colors", names, np.array(vectors), classes, str(folder))
