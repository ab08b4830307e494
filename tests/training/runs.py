"""Tiny runs within the test process, on images of noise."""

import json

import keras
import numpy as np

from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages
from tfdml.report import write_run_report
from tfdml.training import Experiment, trainer
from tfdml.training.build import make_learner
from tfdml.training.run_data import Splits, make_transforms
from tfdml.training.settings import ModelSettings, OptimizationSettings

SIZE = 16
EPOCHS, STEPS = 2, 3


def noise(split, classes, seed, images_per_class=4):
    """A split of gray noise around a level for each class."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), images_per_class)
    levels = rng.integers(40, 200, (classes, 1, 1, 3))[labels]
    images = np.clip(levels + rng.normal(0, 30, (len(labels), SIZE, SIZE, 3)), 0, 255).astype(
        np.uint8
    )
    names = tuple(f"{split}/{i}" for i in range(len(labels)))
    return ImageDataset(
        "noise", split, ArrayImages(images, names), labels, {c: str(c) for c in range(classes)}
    )


SPLITS = Splits(noise("train", 8, 0), noise("train", 5, 1), noise("test", 6, 2))


def experiment(run_dir, **changes):
    """The settings of a tiny run."""
    settings = {
        "image_size": SIZE,
        "resize": SIZE,
        "flip": False,
        "backbone": "conv4(width=4)",
        "batch_norm": "train",
        "embedding_dim": 8,
        "objectives": "contrastive",
        "classes_per_batch": 4,
        "images_per_class": 2,
        "epochs": EPOCHS,
        "steps_per_epoch": STEPS,
        "learning_rate": 0.01,
        "report": False,
        "cache": "false",
    }
    return Experiment(run_dir=str(run_dir), **{**settings, **changes})


def learner(settings, num_classes, steps_per_epoch=2, train=None):
    """The learner of an experiment."""
    _, view = make_transforms(settings)
    return make_learner(
        settings.part(ModelSettings),
        settings.part(OptimizationSettings),
        view,
        num_classes,
        steps_per_epoch,
        train,
        settings.text_backbone,
        settings.seed,
    )


def train(run_dir, resume=False, finish=False, **changes):
    """Train a tiny run as `tfdml train` does, and return its result."""
    run = trainer.train(experiment(run_dir, **changes), resume, finish=finish)
    write_run_report(run)
    return run.result


def records(folder):
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = ("epoch", "step", "train", "test", "validation")
    return [{key: line.get(key) for key in measured} for line in lines]


def embedder(folder):
    """The weights of a run's embedder."""
    loaded = keras.saving.load_model(folder / "embedder.keras", compile=False)
    return [keras.ops.convert_to_numpy(weight) for weight in loaded.weights]


def arrays(checkpoint):
    """What a checkpoint holds, without its state."""
    with np.load(checkpoint) as file:
        return {name: file[name] for name in file.files if name != "state"}
