"""What examples and pages use without making it, each as small as it may be: names, and files.

docs/api/index.md names them, so that a reader of the pages knows what they stand for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import os
import pathlib
import pkgutil
import re
import shutil
import tarfile
import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

import tfdml
from tests.data.trees import write_tree
from tfdml.data.readers import official_archives
from tfdml.export import exporter
from tfdml.training.trainer import Trainer

PACKAGES = "backbones data embeddings evaluation export layers losses mining models objectives"
SIDE = 28


def names() -> dict:
    """Return the stand-ins by name, and the public names of tfdml's packages."""
    found = {"keras": keras, "np": np, "os": os, "pathlib": pathlib, "tf": tf, "tfdml": tfdml}
    for package in (*PACKAGES.split(), "report", "retrieval", "training"):
        module = importlib.import_module(f"tfdml.{package}")
        modules = {part.name for part in pkgutil.iter_modules(module.__path__)}
        for name in {*dir(module)} - modules - {"map"}:
            if not name.startswith("_"):
                found[name] = getattr(module, name)
    train, test = _glyphs("train"), _glyphs("test")
    view = tfdml.data.TrainTransform("random_crop", resize=32, image_size=SIDE)
    embedder = _embedder()
    sampling = {"classes_per_batch": 4, "images_per_class": 2, "transform": view}
    return found | {
        "dataset": train,
        "train": train,
        "test": test,
        "labels": test.labels,
        "embeddings": _near_their_classes(test.labels),
        "batches": tfdml.data.class_balanced(train, **sampling),
        "embedder": embedder,
        "experiment": experiment("runs/tiny"),
        "learner": _learner(embedder, tfdml.losses.ContrastiveLoss()),
        "model": _model(),
        "views": tf.zeros((2, SIDE, SIDE, 3), tf.uint8),
        "jpeg": tf.io.encode_jpeg(np.full((32, 40, 3), 128, np.uint8)).numpy(),
    }


def names_of_pages(names: dict) -> dict:
    """Return arrays, views and learners that pages speak of as the reader's own."""
    train, test, embedder = names["train"], names["test"], names["embedder"]
    view = tfdml.data.EvaluationTransform.of(embedder)
    test_batches = tfdml.data.evaluation_batches(test, view, 100)
    train_batches = tfdml.data.evaluation_batches(train, view, 100)
    vectors = tfdml.embeddings.embed(embedder, test_batches)
    first = np.arange(len(test)) % 2 == 0
    metrics = {"recall@1": 0.5, "recall@2": 0.75}
    moments = tfdml.objectives.HighOrderMomentLoss(tfdml.losses.ContrastiveLoss(), 2, 16)
    return names | {
        "before": metrics,
        "after": metrics,
        "dataset": test,
        "embeddings": vectors,
        "new_embeddings": names["embeddings"],
        "held_out_embeddings": names["embeddings"],
        "held_out_labels": names["labels"],
        "other_embeddings": vectors[:, :8],
        "labels": test.labels // 4,  # 16 images of each class, for ten disjoint parts
        "train_embeddings": tfdml.embeddings.embed(embedder, train_batches),
        "train_labels": train.labels,
        "test_embeddings": vectors,
        "test_labels": test.labels,
        "queries": vectors[first],
        "query_labels": test.labels[first],
        "gallery": np.tile(vectors[~first], (30, 1)),
        "gallery_labels": np.tile(test.labels[~first], 30),
        "batches": test_batches,
        "evaluation_batches": test_batches,
        "training_batches": train_batches,
        "learner": _learner(embedder, moments),
        "images": names["views"],
    }


def experiment(run_dir: str) -> tfdml.training.Experiment:
    """Return the settings of a tiny training of what `embedder` stands for."""
    images = {"dataset_options": "images_per_class=4, size=32", "image_size": SIDE, "resize": 32}
    network = {"backbone": "conv4(width=8)", "batch_norm": "train", "embedding_dim": 16}
    training = {"classes_per_batch": 8, "images_per_class": 2, "epochs": 1, "steps_per_epoch": 2}
    return tfdml.training.Experiment(
        run_dir=run_dir, flip=False, report=False, **images, **network, **training
    )


def _glyphs(split):
    glyphs = tfdml.data.load("glyphs", split=split, images_per_class=4, size=32).contiguous()
    some = glyphs.select_classes(range(64))
    return dataclasses.replace(some, super_labels=some.labels // 20)


def _embedder():
    keras.utils.set_random_seed(0)
    backbone = tfdml.backbones.resolve("conv4", image_size=SIDE, width=8)
    embedder = tfdml.models.Embedder(backbone, embedding_dim=16, image_size=SIDE, resize=32)
    embedder.build((None, SIDE, SIDE, 3))
    return embedder


def _learner(embedder, terms):
    learner = tfdml.models.MetricLearner(embedder, terms)
    learner.build((None, SIDE, SIDE, 3))
    return learner


def _model():
    """Any Keras model of embeddings, with a plain loss."""
    pooled, dense = keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(8)
    unit = keras.layers.UnitNormalization()
    model = keras.Sequential([keras.Input((None, None, 3)), pooled, dense, unit])
    model.compile("adam", loss=tfdml.losses.ContrastiveLoss())
    return model


def _near_their_classes(labels, dim=8):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(labels.max() + 1, dim))[labels]
    vectors = centers + 0.6 * rng.normal(size=(len(labels), dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@contextlib.contextmanager
def small_world(names: dict | None = None):
    """Within it `fit` takes one step, no export is refused for the Recall@1 of its untrained
    network, and a published data set has an image of each class.

    Args:
        names: Data sets of published images are its `train` and `test`. None: they are read.
    """
    fit, tolerance_of, load = keras.Model.fit, exporter.tolerance_of, tfdml.data.load

    @functools.wraps(fit)
    def one_step(self, *args, **kwargs):
        return fit(self, *args, **{**kwargs, "epochs": 1, "steps_per_epoch": 1, "verbose": 0})

    def one_span(self):  # a run calls `fit` until it has made all of its steps
        return iter([(0, 1)])

    def any_recall(options, name):
        return dataclasses.replace(tolerance_of(options, name), max_recall_drop=1.0)

    def stood_in(name, data_dir=None, split="train", **options):
        if names is None or name in ("glyphs", "folder", "list"):
            return load(name, data_dir, split, **options)
        return names["train"] if split == "train" else names["test"]

    with (
        mock.patch.object(keras.Model, "fit", one_step),
        mock.patch.object(Trainer, "_spans", one_span),
        mock.patch.object(exporter, "tolerance_of", any_recall),
        mock.patch.object(tfdml.data, "load", stood_in),
        mock.patch.dict(official_archives.NUM_IMAGES, official_archives.NUM_CLASSES),
    ):
        yield


def write_named(text: str, folder: pathlib.Path, names: dict, kept: pathlib.Path) -> None:
    """Write every path that a text names: each is made once, and copied.

    Args:
        text: The examples.
        folder: Where they run.
        names: The stand-ins.
        kept: A folder for what is copied.
    """
    for path, make in FILES.items():
        if re.search(rf"(?<![\w/]){re.escape(path)}\b", text) is None:
            continue
        for parent in ((kept / path).parent, (folder / path).parent):
            parent.mkdir(parents=True, exist_ok=True)
        if not (kept / path).exists():
            make(kept / path, names)
        copy = shutil.copytree if (kept / path).is_dir() else shutil.copy
        copy(kept / path, folder / path)


def write_photos(path, names=None, classes=("bus", "coupe", "truck", "van"), images=3) -> None:
    """Write `photos/<class>/<n>.jpg` of the classes, and a list of them, `photos/list.csv`."""
    rng, rows = np.random.default_rng(0), ["path,label"]
    for name in classes:
        (path / name).mkdir(parents=True)
        for number in range(images):
            write_photo(path / name / f"{number}.jpg", rng=rng)
            rows.append(f"{name}/{number}.jpg,{name}")
    (path / "list.csv").write_text("\n".join(rows) + "\n")


def write_photo(path: pathlib.Path, names: dict | None = None, rng=None) -> None:
    """Write an image of noise."""
    rng = rng or np.random.default_rng(1)
    Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)


def _write_run(path, names):
    tfdml.training.train(experiment(str(path)))


def _write_models(path, names):
    options = tfdml.export.ExportOptions(formats=["all"])
    with small_world():
        tfdml.export.export_model(names["embedder"], path, names["test"], names["train"], options)


def _write_versions(path, names):
    """Five of a retriever whose items are called coupe/0.jpg, coupe/1.jpg ..."""
    with tempfile.TemporaryDirectory() as photos:
        write_photos(pathlib.Path(photos))
        images = tfdml.data.load("folder", photos, "all")
        tfdml.export.Retriever.build(names["embedder"], images, path, directory=photos)
    for version in range(2, 6):
        shutil.copytree(path / "1", path / str(version))


def _write_retriever(path, names):
    """One with an item called car-3."""
    items = tuple(f"car-{row}" for row in range(12))
    images = tfdml.data.EncodedImages((names["jpeg"],) * len(items), items)
    dataset = tfdml.data.ImageDataset("cars", "all", images, np.arange(len(items)) // 3)
    tfdml.export.Retriever.build(names["embedder"], dataset, path)


def _write_embeddings(path, names):
    from tests.embeddings.folders import write_folder
    from tfdml.embeddings.files import ImageTable

    write_folder(path, {"model": "random"}, ImageTable.of([names["test"]]), names["embeddings"])


def _write_archive(path, names):
    with tarfile.open(path, "w:gz") as archive:
        for name in ("attributes.txt", "CUB_200_2011/images.txt", "CUB_200_2011/classes.txt"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())


def _weights(backbone, **options):
    """Writes weights of a random network under a name that pages give pretrained ones."""
    return lambda path, names: tfdml.backbones.resolve(backbone, **options).model.save_weights(path)


def _tree(name, *sizes):
    return lambda path, names: write_tree(name, path, *sizes)


FILES = {
    "CUB_200_2011.tgz": _write_archive,
    "car.jpg": write_photo,
    "data/CUB_200_2011": _tree("cub200", 100, 100, 1),
    "data/Stanford_Online_Products": _tree("sop", 1, 11_316, 1),
    "data/cars196": _tree("cars196", 98, 98, 1),
    "data/inshop": _tree("inshop", 1, 3985, 2),
    "data/omniglot": _tree("omniglot", 1, 659, 1),
    "embeddings/cars": _write_embeddings,
    "googlenet.weights.h5": _weights("googlenet", image_size=224),
    "mnv2_035.weights.h5": _weights("mobilenetv2", image_size=96, alpha=0.35),
    "models/cars_jrd": _write_models,
    "models/cars_retriever": _write_versions,
    "models/retriever": _write_retriever,
    "photos": write_photos,
    "runs/cars": _write_run,
    "runs/cars_am": _write_run,
    "runs/cars_jrd": _write_run,
}
