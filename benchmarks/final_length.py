r"""How long a final model trains: as many steps as the measured run, or as many epochs.

    python -m benchmarks.final_length --runs=RUNS --data=CARS196 \
        --weights=MNV2_035.weights.h5 --json=docs/numbers/final_length.json

Stores the features of Cars-196, trains the runs of both data sets, and prints the table. What has
ended is not repeated.

The plan, written before the first run:

- The training classes of a data set are halved, by a seed. A measured run trains on one half, of
  which a tenth selects its epoch, and is measured on the other half. So its final model has some
  2.2 times its classes.
- `steps`: the final model takes the steps of the measured run until the selected epoch. `epochs`:
  it takes them times the ratio of the images, so that each is seen as often. Rates drop at the same
  share of the steps.
- Final models are measured on classes that neither run has: the test classes of the data set.
- A network from scratch on the built-in glyphs, and a linear head on features of MobileNetV2 0.35
  of Cars-196, three seeds each, of the halves and of training. Variants are paired by their
  measured run.
- The rates and epochs of the glyphs are those of `configs/quickstart.flags`, with half of its steps
  on half of its classes, and a quarter of its channels.
- The criterion is Recall@1. `epochs`, which costs twice the time, is chosen if its mean gain is
  positive on both data sets, with a 95 % interval over the seeds that is above 0 on one of them at
  least; else `steps`.
"""

from __future__ import annotations

import json
import pathlib

import keras
import numpy as np

import tfdml
from tfdml.data import EvaluationTransform, evaluation_batches
from tfdml.embeddings import embed
from tfdml.evaluation import evaluate_retrieval, student_interval
from tfdml.io.files import write_whole
from tfdml.models import Embedder
from tfdml.training import Experiment, RunFolder, train
from tfdml.training.run_data import load_splits
from tfdml.training.settings import final_settings
from tools.numbers import Results, command_line

METRICS = {"recall@1": "Recall@1", "map@r": "MAP@R"}
VARIANTS = ("steps", "epochs")
SEEDS = range(3)
SETTINGS = {
    "objectives": "multi_similarity",
    "sampling": "class_balanced",
    "classes_per_batch": 20,
    "images_per_class": 5,
    "optimizer": "adam",
    "drop_factor": 0.1,
    "holdout_classes": 0.1,
    "holdout_sampling": "stratified",
    "selection": "validation",
    "embedding_dim": 128,
    "deterministic": False,
}
SETS = {
    "glyphs": {
        "cache": "true",
        "image_size": 28,
        "resize": 32,
        "flip": False,
        "backbone": "conv4(width=16)",
        "batch_norm": "train",
        "learning_rate": 0.003,
        "epochs": 8,
        "steps_per_epoch": 50,
        "drop_epochs": "6",
    },
    "cars196": {"learning_rate": 0.001, "epochs": 20, "steps_per_epoch": 32, "drop_epochs": "15"},
}


def store_features(folder, data_dir, weights, split):
    """Embed a split of Cars-196 by a network that is not trained, if that is not done."""
    path = folder / f"cars196_{split}.npz"
    if path.exists():
        return
    backbone = tfdml.backbones.resolve("mobilenetv2", 112, weights, alpha=0.35)
    network = Embedder(backbone, 0, image_size=112, resize=128)
    images = tfdml.data.load("cars196", data_dir, split)
    vectors = embed(network, evaluation_batches(images, EvaluationTransform(128, 112), 200))
    np.savez(path, embeddings=vectors, labels=images.labels)


@tfdml.register("reader")
def read_halves(data_dir=None, split="train", *, seed=0):
    """The training classes of the glyphs: one half to train, the other one to test."""
    images = tfdml.data.load("glyphs", data_dir, "train")
    is_first = in_first_half(images.labels, seed)
    return images.take(np.flatnonzero(is_first == (split == "train")))


def in_first_half(labels, seed):
    """Whether each label is one of the half of the classes that is drawn."""
    classes = np.random.default_rng(seed).permutation(np.unique(labels))
    return np.isin(labels, classes[: len(classes) // 2])


def source_of(name, folder, seed):
    """The settings of the images, or of the features, of a measured run."""
    if name == "glyphs":
        return {"dataset": "halves", "dataset_options": f"seed={seed}"}
    stored = np.load(folder.parent / "cars196_train.npz")
    roles = np.where(in_first_half(stored["labels"], seed), "train", "test")
    folder.mkdir(exist_ok=True)
    path = folder / "features.npz"
    np.savez(path, embeddings=stored["embeddings"], labels=stored["labels"], roles=roles)
    return {"features": str(path)}


def measure(name, model, folder):
    """Measure a final model on the classes that no run has."""
    if name == "glyphs":
        unseen = tfdml.data.load("glyphs", None, "test")
        embeddings = embed(model, evaluation_batches(unseen, EvaluationTransform(32, 28), 200))
        labels = unseen.labels
    else:
        stored = np.load(folder.parent / "cars196_test.npz")
        embeddings = model.predict(stored["embeddings"], verbose=0)
        labels = stored["labels"]
    return evaluate_retrieval(embeddings, labels, metrics=tuple(METRICS))


def length_of_variants(experiment):
    """The steps of an epoch of the final model by variant."""
    splits = load_splits(experiment, experiment.seed)
    sizes = [len(split) for split in (splits.train, splits.validation, splits.test)]
    steps = experiment.steps_per_epoch
    return {"steps": steps, "epochs": round(steps * sum(sizes) / sizes[0])}


def run(name, folder, seed):
    """Train a measured run and its final models, and write what they reach on unseen classes."""
    missing = [variant for variant in VARIANTS if not (folder / f"{variant}.json").exists()]
    if not missing:
        return
    measured = RunFolder(str(folder / "measured"))
    if not measured.result.is_file():
        source = source_of(name, folder, seed)
        own = {"run_dir": str(measured.path), "seed": seed, **source}
        train(Experiment(**own, **SETTINGS, **SETS[name]), resume=measured.path.exists())
    steps = length_of_variants(Experiment.of_run(measured.path))
    for variant in missing:
        run_dir = folder / variant
        own = {"steps_per_epoch": steps[variant], "run_dir": str(run_dir)}
        final = train(Experiment(**{**final_settings(measured.path), **own}), run_dir.exists())
        values = measure(name, keras.saving.load_model(final.folder.embedder), folder)
        entry = {metric: values[metric] for metric in METRICS}
        entry["steps"] = final.result["steps"]
        print(name, seed, variant, entry, flush=True)
        write_whole(folder / f"{variant}.json", json.dumps(entry).encode())


def seeds_and_gain(entries, metric):
    """Return a metric of each seed in percent by variant, and the gain of `epochs`."""
    percent = {
        variant: 100 * np.array([entry[metric] for entry in entries[variant]])
        for variant in VARIANTS
    }
    gain = student_interval(percent["epochs"] - percent["steps"])
    seeds = [", ".join(f"{value:.1f}" for value in percent[variant]) for variant in VARIANTS]
    return [*seeds, f"{gain.mean:+.1f} ({gain.low:+.1f} to {gain.high:+.1f})"]


def add_rows(name, runs, add):
    """Add a row of each metric: both variants by seed, and their paired difference."""
    entries = {variant: [] for variant in VARIANTS}
    for seed in SEEDS:
        for variant in VARIANTS:
            path = runs / f"{name}_{seed}" / f"{variant}.json"
            entries[variant].append(json.loads(path.read_text()))
    steps = [", ".join(f"{entry['steps']:,}" for entry in entries[v]) for v in VARIANTS]
    for metric in METRICS:
        add(f"{name}, {METRICS[metric]}", *steps, *seeds_and_gain(entries, metric))


def main():
    """Store features, train what is missing, and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="the folder of the runs")
    parser.add_argument("--data", required=True, help="Cars-196, whose features are stored")
    parser.add_argument("--weights", required=True, help="of MobileNetV2 0.35")
    arguments = parser.parse_args()
    arguments.runs.mkdir(exist_ok=True)
    for split in ("train", "test"):
        store_features(arguments.runs, arguments.data, arguments.weights, split)
    for name in SETS:
        for seed in SEEDS:
            run(name, arguments.runs / f"{name}_{seed}", seed)
    add = Results(arguments.json).table(
        "table", "data set and metric", "steps of `steps`", "of `epochs`", *VARIANTS, "gain"
    )
    for name in SETS:
        add_rows(name, arguments.runs, add)


if __name__ == "__main__":
    main()
