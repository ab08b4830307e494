"""What the pages of the documentation suppose besides `stand_ins` and `files`: results of earlier
steps."""

from __future__ import annotations

import contextlib
import pathlib
from unittest import mock

import numpy as np

import tfdml
from tests.docs.stand_ins import SIDE

# Read without a file; the others are stood in for.
_REAL = ("glyphs", "folder", "list")


@contextlib.contextmanager
def data_sets(train, test):
    """Within it data sets of published images are those of `train` and `test`."""
    load = tfdml.data.load

    def stood_in(name, data_dir=None, split="train", **options):
        if name in _REAL:
            return load(name, data_dir, split, **options)
        return train if split == "train" else test

    with mock.patch.object(tfdml.data, "load", stood_in):
        yield


def write_weights(folder: pathlib.Path) -> None:
    """Weights files of random networks under the names that the pages give pretrained ones."""
    mobile = tfdml.backbones.resolve("mobilenetv2", image_size=96, alpha=0.35)
    mobile.model.save_weights(folder / "mnv2_035.weights.h5")
    tfdml.backbones.resolve("googlenet", image_size=224).model.save_weights(
        folder / "googlenet.weights.h5"
    )


def write_retriever(folder: pathlib.Path, embedder) -> None:
    """`models/retriever`, with an item called car-3."""
    photos = sorted((folder / "photos").rglob("*.jpg"))
    images = tfdml.data.EncodedImages(
        tuple(path.read_bytes() for path in photos),
        tuple(f"car-{row}" for row in range(len(photos))),
    )
    dataset = tfdml.data.ImageDataset("cars", "all", images, np.arange(len(photos)) // 3)
    tfdml.export.Retriever.build(embedder, dataset, folder / "models" / "retriever")


def names_of_pages(names: dict) -> dict:
    """Arrays, views and learners that pages speak of as the reader's own."""
    train, test, embedder = names["train"], names["test"], names["embedder"]
    view = tfdml.data.EvaluationTransform.of(embedder)
    test_batches = tfdml.data.evaluation_batches(test, view, 100)
    vectors = {
        split: tfdml.embeddings.embed(embedder, tfdml.data.evaluation_batches(images, view, 100))
        for split, images in (("train", train), ("test", test))
    }
    first = np.arange(len(test)) % 2 == 0
    metrics = {"recall@1": 0.5, "recall@2": 0.75}
    learner = tfdml.models.MetricLearner(
        embedder,
        tfdml.objectives.HighOrderMomentLoss(tfdml.losses.ContrastiveLoss(), orders=2, dim=16),
    )
    learner.build((None, SIDE, SIDE, 3))
    return {
        "before": metrics,
        "after": metrics,
        "dataset": test,
        "runs": ["runs/cars_jrd", "runs/cars_am"],
        "embeddings": vectors["test"],
        "other_embeddings": vectors["test"][:, :8],
        "labels": test.labels // 4,  # 16 images of each class, for ten disjoint parts
        "train_embeddings": vectors["train"],
        "train_labels": train.labels,
        "test_embeddings": vectors["test"],
        "test_labels": test.labels,
        "queries": vectors["test"][first],
        "query_labels": test.labels[first],
        "gallery": np.tile(vectors["test"][~first], (30, 1)),
        "gallery_labels": np.tile(test.labels[~first], 30),
        "batches": test_batches,
        "evaluation_batches": test_batches,
        "training_batches": tfdml.data.evaluation_batches(train, view, 100),
        "learner": learner,
        "images": names["views"],
        "evaluate_retrieval": tfdml.evaluation.evaluate_retrieval,
    }
