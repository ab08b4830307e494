"""What the pages of the documentation suppose beside `stand_ins`: files that they name, results of earlier steps."""

from __future__ import annotations

import contextlib
import pathlib
import shutil

import numpy as np
from PIL import Image

import tfdml
from tests.docs.stand_ins import SIDE

# Read without a file; the others are stood in for.
_REAL = ("glyphs", "folder", "list", "records")
_TINY = {"image_size": SIDE, "resize": 32, "flip": False, "backbone": "conv4(width=8)", "batch_norm": "train"}


@contextlib.contextmanager
def data_sets(train, test):
    """Within it data sets of published images are those of `train` and `test`."""
    load = tfdml.data.load

    def stood_in(name, data_dir=None, split="train", **options):
        if name in _REAL:
            return load(name, data_dir, split, **options)
        return train if split == "train" else test

    tfdml.data.load = stood_in
    try:
        yield
    finally:
        tfdml.data.load = load


def write_photos(folder: pathlib.Path) -> None:
    """`photos/<class>/<n>.jpg`, `car.jpg`."""
    rng = np.random.default_rng(0)
    for name in ("coupe", "van", "bus", "truck"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.jpg")
    shutil.copy(folder / "photos" / "van" / "0.jpg", folder / "car.jpg")


def write_weights(folder: pathlib.Path) -> None:
    """Weights files of random networks under the names that the pages give pretrained ones."""
    mobile = tfdml.backbones.resolve("mobilenetv2", image_size=96, alpha=0.35)
    mobile.model.save_weights(folder / "mnv2_035.weights.h5")
    tfdml.backbones.resolve("googlenet", image_size=224).model.save_weights(folder / "googlenet.weights.h5")


def write_runs(folder: pathlib.Path) -> None:
    """`runs/cars`, `runs/cars_jrd` and `runs/cars_am`, of one tiny training."""
    experiment = tfdml.training.Experiment(
        run_dir=str(folder / "runs" / "cars"),
        dataset_options="images_per_class=4, size=32",
        classes_per_batch=8,
        images_per_class=2,
        embedding_dim=16,
        epochs=1,
        steps_per_epoch=2,
        report=False,
        **_TINY,
    )
    tfdml.training.train(experiment)
    for name in ("cars_jrd", "cars_am"):
        shutil.copytree(folder / "runs" / "cars", folder / "runs" / name)


def write_retriever(folder: pathlib.Path, embedder) -> None:
    """`models/retriever`, with an item called car-3."""
    from tfdml.export.retriever import GalleryItem, Retriever

    photos = sorted((folder / "photos").rglob("*.jpg"))
    items = [GalleryItem(f"car-{row}", image=path.read_bytes(), label=row // 3) for row, path in enumerate(photos)]
    Retriever.build(embedder, items, folder / "models" / "retriever")


def write_embeddings(folder: pathlib.Path, dataset) -> None:
    """`embeddings/cars` and `embeddings/sop`, as bin/embed writes them."""
    from tfdml.embeddings.image_table import ImageTable
    from tfdml.embeddings.writer import EmbeddingWriter

    table = ImageTable.of([dataset], "")
    vectors = np.random.default_rng(0).normal(size=(len(dataset), 8)).astype(np.float32)
    for name in ("cars", "sop"):
        with EmbeddingWriter(str(folder / "embeddings" / name), {"model": "random"}, table) as writer:
            writer.append(vectors)
            writer.finish({}, "npy")


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
        embedder, tfdml.objectives.HighOrderMomentLoss(tfdml.losses.ContrastiveLoss(), orders=2, dim=16)
    )
    learner.build((None, SIDE, SIDE, 3))
    return {
        "before": metrics,
        "after": metrics,
        "dataset": test,
        "runs": ["runs/cars_jrd", "runs/cars_am"],
        "embeddings": vectors["test"],
        "embeddings_of_jrd": vectors["test"],
        "embeddings_of_am": vectors["test"][:, :8],
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
        "pooled_features": vectors["train"],
        "learner": learner,
        "images": names["views"],
        "evaluate_retrieval": tfdml.evaluation.evaluate_retrieval,
    }
