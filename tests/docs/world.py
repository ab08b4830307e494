"""The small world of examples and pages: names and files that they take for granted.

docs/api/index.md names them, so that a reader of the examples knows what they stand for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import tempfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from PIL import Image

import tfdml
from tests.cli.conftest import TINY
from tests.data.trees import table, write_tree
from tfdml.data.readers import official_archives
from tfdml.export import exporter
from tfdml.training.trainer import Trainer

# Files that an example makes once, for all that name them.
_KEPT = tempfile.TemporaryDirectory()


@functools.cache
def names() -> dict:
    """Return what examples and pages use without making it, by name."""
    keras.utils.set_random_seed(0)
    train, test = _glyphs("train"), _glyphs("test")
    view = tfdml.data.TrainTransform("random_crop", resize=32, image_size=28)
    embedder = tfdml.models.Embedder("conv4(width=8)", embedding_dim=16, image_size=28, resize=32)
    loss = tfdml.losses.ContrastiveLoss()
    moments = tfdml.objectives.HighOrderMomentLoss(loss, 2, 16)
    learner = tfdml.models.MetricLearner(embedder, [loss, moments])
    learner.build((None, 28, 28, 3))
    return {
        "keras": keras,
        "np": np,
        "os": os,
        "tf": tf,
        "tfdml": tfdml,
        "train": train,
        "test": test,
        "batches": tfdml.data.class_balanced(train, 4, 2, transform=view).take(30),
        "embedder": embedder,
        "learner": learner,
        "model": _model(),
        "experiment": _experiment("runs/tiny"),
        "embeddings": _near_their_classes(test.labels),
        "labels": test.labels // 4,
        "views": tf.zeros((2, 28, 28, 3), tf.uint8),
        "jpeg": tf.io.encode_jpeg(np.full((32, 40, 3), 128, np.uint8)).numpy(),
    }


def _glyphs(split):
    glyphs = tfdml.data.load("glyphs", split=split, images_per_class=4, size=32)
    return glyphs.contiguous().select_classes(range(64))


def _experiment(run_dir):
    """A tiny training of what `embedder` stands for."""
    flags = [*TINY, "--report=false", f"--run_dir={run_dir}"]
    return tfdml.training.Experiment.from_flags("\n".join(flags))


def _model():
    """Any Keras model of embeddings, with a plain loss."""
    model = keras.Sequential([keras.Input((None, None, 3))])
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(8))
    model.compile("adam", loss=tfdml.losses.ContrastiveLoss())
    return model


def _near_their_classes(labels):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(labels.max() + 1, 16))[labels]
    vectors = centers + 0.8 * rng.normal(size=centers.shape)
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
    """Link every path that a text names into the folder where it runs."""
    for path in FILES:
        if re.search(rf"(?<![\w/]){re.escape(path)}\b", text):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).symlink_to(_made(path))


@functools.cache
def _made(path):
    made = pathlib.Path(_KEPT.name, path)
    made.parent.mkdir(parents=True, exist_ok=True)
    FILES[path](made)
    return made


def _write_images(folder, names):
    rng = np.random.default_rng(len(names))
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 48, 3), np.uint8)).save(folder / name)


def _write_photos(path):
    # So many that a tenth of the classes that are trained are two, and more than 8 images.
    classes = ["bus", *(f"car_{number}" for number in range(10, 48)), "coupe"]
    names = [f"{name}/{number}.jpg" for name in classes for number in range(6)]
    _write_images(path, names)
    table(path / "list.csv", ["path,label", *(f"{name},{name.split('/')[0]}" for name in names)])


def _write_photo(path):
    _write_images(path.parent, [path.name])


def _write_run(path):
    tfdml.training.train(_experiment(path))


def _write_models(path):
    known, options = names(), tfdml.export.ExportOptions(formats=["all"])
    with small_world():
        tfdml.export.export_model(known["embedder"], path, known["test"], known["train"], options)


def _write_retriever(path):
    photos = str(_made("photos"))
    images = tfdml.data.load("folder", photos, "all")
    tfdml.export.Retriever.build(names()["embedder"], images, path, directory=photos)


def _write_embeddings(path):
    from tests.embeddings.folders import write_folder

    table = tfdml.embeddings.ImageTable.of([names()["test"]])
    write_folder(path, {"model": "random"}, table, names()["embeddings"])


def _write_weights(path):
    tfdml.backbones.resolve("mobilenetv2", image_size=96, alpha=0.35).model.save_weights(path)


def _tree(name, *sizes):
    return lambda path: write_tree(name, path, *sizes)


FILES = {
    "car.jpg": _write_photo,
    "data/CUB_200_2011": _tree("cub200", 100, 100, 1),
    "data/Stanford_Online_Products": _tree("sop", 1, 11_316, 1),
    "data/cars196": _tree("cars196", 98, 98, 1),
    "data/inshop": _tree("inshop", 1, 3985, 2),
    "data/omniglot": _tree("omniglot", 1, 659, 1),
    "embeddings/cars": _write_embeddings,
    "mnv2_035.weights.h5": _write_weights,
    "models/cars_jrd": _write_models,
    "models/retriever": _write_retriever,
    "photos": _write_photos,
    "queries/car.jpg": _write_photo,
    "runs/cars": _write_run,
    "runs/cars_jrd": _write_run,
}
