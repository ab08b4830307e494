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
# Settings of a tiny training of what `embedder` stands for.
EXPERIMENT = {
    "dataset_options": "images_per_class=4, size=32",
    "image_size": SIDE,
    "resize": 32,
    "flip": False,
    "backbone": "conv4(width=8)",
    "batch_norm": "train",
    "embedding_dim": 16,
    "classes_per_batch": 8,
    "images_per_class": 2,
    "epochs": 1,
    "steps_per_epoch": 2,
    "report": False,
}
# Files that an example makes once, for all that name them.
_KEPT = tempfile.TemporaryDirectory()


def _public() -> dict:
    """Return the public names of tfdml's packages."""
    found = {}
    for package in (*PACKAGES.split(), "report", "retrieval", "training"):
        module = importlib.import_module(f"tfdml.{package}")
        modules = {part.name for part in pkgutil.iter_modules(module.__path__)}
        for name in {*dir(module)} - modules - {"map"}:
            if not name.startswith("_"):
                found[name] = getattr(module, name)
    return found


@functools.cache
def names() -> dict:
    """Return the stand-ins by name, and the public names of tfdml's packages."""
    modules = {"keras": keras, "np": np, "os": os, "pathlib": pathlib, "tf": tf, "tfdml": tfdml}
    train, test = _glyphs("train"), _glyphs("test")
    view = tfdml.data.TrainTransform("random_crop", resize=32, image_size=SIDE)
    batches = tfdml.data.class_balanced(train, 4, 2, transform=view).take(30)
    embedder = _embedder()
    vectors, labels = _near_their_classes(test.labels), test.labels // 4
    of_parts = {}
    for part in ("new", "held_out", "other", "train", "test"):
        of_parts[f"{part}_embeddings"] = vectors
        of_parts[f"{part}_labels"] = labels
    return {
        **_public(),
        **modules,
        "dataset": train,
        "train": train,
        "test": test,
        "embeddings": vectors,
        "labels": labels,
        **of_parts,
        "queries": vectors[::2],
        "query_labels": labels[::2],
        "gallery": vectors[1::2],
        "gallery_labels": labels[1::2],
        "batches": batches,
        "embedder": embedder,
        "experiment": tfdml.training.Experiment(run_dir="runs/tiny", **EXPERIMENT),
        "learner": _learner(embedder),
        "model": _model(),
        "views": tf.zeros((2, SIDE, SIDE, 3), tf.uint8),
        "jpeg": tf.io.encode_jpeg(np.full((32, 40, 3), 128, np.uint8)).numpy(),
    }


def _glyphs(split):
    glyphs = tfdml.data.load("glyphs", split=split, images_per_class=4, size=32).contiguous()
    some = glyphs.select_classes(range(64))
    return dataclasses.replace(some, super_labels=some.labels // 20)


def _embedder():
    keras.utils.set_random_seed(0)
    backbone = tfdml.backbones.resolve("conv4", image_size=SIDE, width=8)
    return tfdml.models.Embedder(backbone, embedding_dim=16, image_size=SIDE, resize=32)


def _learner(embedder):
    loss = tfdml.losses.ContrastiveLoss()
    moments = tfdml.objectives.HighOrderMomentLoss(loss, 2, 16)
    learner = tfdml.models.MetricLearner(embedder, [loss, moments])
    learner.build((None, SIDE, SIDE, 3))
    return learner


def _model():
    """Any Keras model of embeddings, with a plain loss."""
    pooled, dense = keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(8)
    unit = keras.layers.UnitNormalization()
    model = keras.Sequential([keras.Input((None, None, 3)), pooled, dense, unit])
    model.compile("adam", loss=tfdml.losses.ContrastiveLoss())
    return model


def _near_their_classes(labels, dim=16):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(labels.max() + 1, dim))[labels]
    vectors = centers + 0.8 * rng.normal(size=(len(labels), dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@contextlib.contextmanager
def small_world():
    """Within it `fit` takes one step, no export is refused for the Recall@1 of its untrained
    network, and a published data set has an image of each class."""
    fit, tolerance_of = keras.Model.fit, exporter.tolerance_of

    @functools.wraps(fit)
    def one_step(self, *args, **kwargs):
        return fit(self, *args, **{**kwargs, "epochs": 1, "steps_per_epoch": 1, "verbose": 0})

    def one_span(self):  # a run calls `fit` until it has made all of its steps
        return iter([(0, 1)])

    def any_recall(options, name):
        return dataclasses.replace(tolerance_of(options, name), max_recall_drop=1.0)

    with (
        mock.patch.object(keras.Model, "fit", one_step),
        mock.patch.object(Trainer, "_spans", one_span),
        mock.patch.object(exporter, "tolerance_of", any_recall),
        mock.patch.dict(official_archives.NUM_IMAGES, official_archives.NUM_CLASSES),
    ):
        yield


def write_named(text: str, folder: pathlib.Path) -> None:
    """Copy every path that a text names into the folder where it runs."""
    for path, write in FILES.items():
        if re.search(rf"(?<![\w/]){re.escape(path)}\b", text):
            made = _made(write, "".join(pathlib.Path(path).suffixes))
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if made.is_dir() else shutil.copy
            copy(made, folder / path)


@functools.cache
def _made(write, suffix):
    path = pathlib.Path(tempfile.mkdtemp(dir=_KEPT.name), f"made{suffix}")
    write(path)
    return path


def write_photos(path, classes=("bus", "coupe", "truck", "van"), images=3) -> None:
    """Write `photos/<class>/<n>.jpg` of the classes, and a list of them, `photos/list.csv`."""
    rng, rows = np.random.default_rng(0), ["path,label"]
    for name in classes:
        (path / name).mkdir(parents=True)
        for number in range(images):
            write_photo(path / name / f"{number}.jpg", rng)
            rows.append(f"{name}/{number}.jpg,{name}")
    (path / "list.csv").write_text("\n".join(rows) + "\n")


def write_photo(path: pathlib.Path, rng=None) -> None:
    """Write an image of noise."""
    rng = rng or np.random.default_rng(1)
    Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(path)


def _write_run(path):
    tfdml.training.train(tfdml.training.Experiment(run_dir=str(path), **EXPERIMENT))


def _write_models(path):
    found, options = names(), tfdml.export.ExportOptions(formats=["all"])
    with small_world():
        tfdml.export.export_model(found["embedder"], path, found["test"], found["train"], options)


def _write_versions(path):
    """Five of a retriever whose items are called coupe/0.jpg, coupe/1.jpg ..."""
    with tempfile.TemporaryDirectory() as photos:
        write_photos(pathlib.Path(photos))
        images = tfdml.data.load("folder", photos, "all")
        tfdml.export.Retriever.build(names()["embedder"], images, path, directory=photos)
    for version in range(2, 6):
        shutil.copytree(path / "1", path / str(version))


def _write_embeddings(path):
    from tests.embeddings.folders import write_folder
    from tfdml.embeddings.files import ImageTable

    table = ImageTable.of([names()["test"]])
    write_folder(path, {"model": "random"}, table, names()["embeddings"])


def _write_archive(path):
    with tarfile.open(path, "w:gz") as archive:
        for name in ("attributes.txt", "CUB_200_2011/images.txt", "CUB_200_2011/classes.txt"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())


def _weights(backbone, **options):
    """Writes weights of a random network under a name that pages give pretrained ones."""
    return lambda path: tfdml.backbones.resolve(backbone, **options).model.save_weights(path)


def _tree(name, *sizes):
    return lambda path: write_tree(name, path, *sizes)


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
    "models/retriever": _write_versions,
    "photos": write_photos,
    "runs/cars": _write_run,
    "runs/cars_jrd": _write_run,
}
