"""What examples may use without making it: `dataset`, `embedder`, `batches` ..., each as small as
it may be.

docs/api/index.md names them, so that a reader of the pages knows what they stand for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import pathlib
import pkgutil
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tfdml.export import exporter
from tfdml.training.trainer import Trainer

PACKAGES = (
    "backbones",
    "data",
    "embeddings",
    "evaluation",
    "export",
    "layers",
    "losses",
    "mining",
    "models",
)
SIDE = 28


def names() -> dict:
    """The stand-ins by name, and the public names of tfdml's packages."""
    found = {"keras": keras, "np": np, "os": os, "pathlib": pathlib, "tf": tf, "tfdml": tfdml}
    for package in (*PACKAGES, "objectives", "report", "retrieval", "training"):
        module = importlib.import_module(f"tfdml.{package}")
        modules = {part.name for part in pkgutil.iter_modules(module.__path__)}
        for name in dir(module):
            if not name.startswith("_") and name not in modules and name != "map":
                found[name] = getattr(module, name)
    train, test = (_glyphs(split) for split in ("train", "test"))
    view = tfdml.data.TrainTransform("random_crop", resize=32, image_size=SIDE)
    embedder = _embedder()
    learner = tfdml.models.MetricLearner(embedder, tfdml.losses.ContrastiveLoss())
    learner.build((None, SIDE, SIDE, 3))
    jpeg = tf.io.encode_jpeg(np.full((32, 40, 3), 128, np.uint8)).numpy()
    return found | {
        "dataset": train,
        "train": train,
        "test": test,
        "labels": test.labels,
        "embeddings": _near_their_classes(test.labels),
        "batches": tfdml.data.class_balanced(
            train, classes_per_batch=4, images_per_class=2, transform=view
        ),
        "embedder": embedder,
        "experiment": experiment("runs/tiny"),
        "learner": learner,
        "model": _model(),
        "views": tf.zeros((2, SIDE, SIDE, 3), tf.uint8),
        "jpeg": jpeg,
    }


def experiment(run_dir: str, **changes: object) -> tfdml.training.Experiment:
    """The settings of a tiny training of what `embedder` stands for."""
    images = {
        "dataset_options": "images_per_class=4, size=32",
        "image_size": SIDE,
        "resize": 32,
        "flip": False,
    }
    network = {"backbone": "conv4(width=8)", "batch_norm": "train", "embedding_dim": 16}
    training = {
        "classes_per_batch": 8,
        "images_per_class": 2,
        "epochs": 1,
        "steps_per_epoch": 2,
        "report": False,
    }
    return tfdml.training.Experiment(
        run_dir=run_dir, **{**images, **network, **training, **changes}
    )


@contextlib.contextmanager
def short_training():
    """Within it `fit` takes one step, whatever number of steps and epochs an example asks for."""
    fit = keras.Model.fit

    @functools.wraps(fit)
    def one_step(self, *args, **kwargs):
        kwargs.update(epochs=1, steps_per_epoch=1, verbose=0)
        return fit(self, *args, **kwargs)

    def one_span(self):  # a run calls `fit` until it has made all of its steps
        return iter([(0, 1)])

    with (
        mock.patch.object(keras.Model, "fit", one_step),
        mock.patch.object(Trainer, "_spans", one_span),
    ):
        yield


@contextlib.contextmanager
def untrained_exports():
    """Within it no export is refused for its Recall@1: that of an untrained network is chance."""
    tolerance_of = exporter.tolerance_of

    def any_recall(options, name):
        return dataclasses.replace(tolerance_of(options, name), max_recall_drop=1.0)

    with mock.patch.object(exporter, "tolerance_of", any_recall):
        yield


def _glyphs(split, num_classes=64):
    glyphs = tfdml.data.load("glyphs", split=split, images_per_class=4, size=32).contiguous()
    some = glyphs.select_classes(range(num_classes))
    return dataclasses.replace(some, super_labels=some.labels // 20)


def _embedder():
    keras.utils.set_random_seed(0)
    backbone = tfdml.backbones.resolve("conv4", image_size=SIDE, width=8)
    embedder = tfdml.models.Embedder(backbone, embedding_dim=16, image_size=SIDE, resize=32)
    embedder.build((None, SIDE, SIDE, 3))
    return embedder


def _model():
    """Any Keras model of embeddings, with a plain loss."""
    layers = [
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(8),
        keras.layers.UnitNormalization(),
    ]
    model = keras.Sequential([keras.Input((None, None, 3)), *layers])
    model.compile("adam", loss=tfdml.losses.ContrastiveLoss())
    return model


def _near_their_classes(labels, dim=8):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(labels.max() + 1, dim))[labels] + 0.6 * rng.normal(
        size=(len(labels), dim)
    )
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
