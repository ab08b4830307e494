"""A retriever that the tests of searching and of serving share."""

import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.export.networks import picture, small_embedder
from tfdml.evaluation import Calibration
from tfdml.evaluation.intervals import Interval
from tfdml.export import GalleryItem, Retriever, write_saved_model

# Images that promise more pixels are refused: what the pictures have is far below.
LIMIT = 500_000
_RATE = Interval(0.5, 0.4, 0.6, 0.05)
# What the retriever has, between the distances of the pictures.
SEARCHED = Calibration(0.12, "euclidean", "fpir", 0.01, {"fpir": _RATE, "tpir": _RATE}, 0.95, 12, 4)


@dataclasses.dataclass(frozen=True)
class Shop:
    """An exported embedder and a retriever around it.

    `images` are the gallery's, three to a class; `embeddings` are what the exported embedder makes of them.
    """

    embedder: pathlib.Path
    retriever: pathlib.Path
    images: tuple[bytes, ...]
    embeddings: np.ndarray
    ids: tuple[str, ...]


def shop_items(images):
    """Gallery items of images: three to a class."""
    return [
        GalleryItem(f"item {row}", image, label=row // 3, metadata={"class": f"class {row // 3}", "path": f"{row}.jpg"})
        for row, image in enumerate(images)
    ]


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    write_saved_model(small_embedder(), folder / "embedder" / "1", LIMIT)
    images = tuple(picture(seed, 40 + seed, 80 - seed, "PNG" if seed % 4 == 0 else "JPEG") for seed in range(12))
    Retriever.build(folder / "embedder", shop_items(images), folder / "retriever", calibration=SEARCHED)
    served = tf.saved_model.load(str(folder / "embedder" / "1"))
    embeddings = served.signatures["serving_default"](image_bytes=tf.constant(images))["embedding"].numpy()
    ids = tuple(item.id for item in shop_items(images))
    return Shop(folder / "embedder", folder / "retriever", images, embeddings, ids)
