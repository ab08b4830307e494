"""A retriever that the tests of searching and of serving share."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.export.networks import picture, small_embedder
from tfdml.data import EncodedImages, ImageDataset
from tfdml.embeddings.model_card import CARD, view_of
from tfdml.evaluation import Basis, Calibration
from tfdml.evaluation.intervals import Interval
from tfdml.export import Retriever, write_saved_model

# Images that promise more pixels are refused: what the pictures have is far below.
LIMIT = 500_000
_RATE = Interval(0.5, 0.4, 0.6, 0.05)
# What the retriever has, between the distances of the pictures.
_BASIS = Basis(12, 4, known=12, unknown=12, known_classes=4, unknown_classes=4, left_out=True)
SEARCHED = Calibration(
    0.12, "euclidean", "fpir", 0.01, {"fpir": _RATE, "tpir": _RATE}, 0.95, _BASIS, {}
)


@dataclasses.dataclass(frozen=True)
class Shop:
    """An exported embedder and a retriever around it.

    `images` are the gallery's, three to a class; `embeddings` are what the exported embedder makes
    of them.
    """

    embedder: pathlib.Path
    retriever: pathlib.Path
    images: tuple[bytes, ...]
    embeddings: np.ndarray
    ids: tuple[str, ...]


def shop_dataset(images):
    """A data set of images: three to a class."""
    labels = np.arange(len(images)) // 3
    names = tuple(f"item {row}" for row in range(len(images)))
    class_names = {label: f"class {label}" for label in labels.tolist()}
    return ImageDataset("shop", "all", EncodedImages(tuple(images), names), labels, class_names)


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    embedder = small_embedder()
    write_saved_model(embedder, folder / "embedder" / "1", LIMIT)
    artifacts = {"litert": {"files": {}}}
    card = {"run": "of the shop", "view": view_of(embedder), "artifacts": artifacts}
    (folder / "embedder" / "1" / CARD).write_text(json.dumps(card))
    images = tuple(
        picture(seed, 40 + seed, 80 - seed, "PNG" if seed % 4 == 0 else "JPEG")
        for seed in range(12)
    )
    Retriever.build(
        folder / "embedder", shop_dataset(images), folder / "retriever", calibration=SEARCHED
    )
    served = tf.saved_model.load(str(folder / "embedder" / "1"))
    embeddings = served.signatures["serving_default"](image_bytes=tf.constant(images))[
        "embedding"
    ].numpy()
    return Shop(
        folder / "embedder", folder / "retriever", images, embeddings, shop_dataset(images).names
    )
