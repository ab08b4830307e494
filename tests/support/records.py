"""Records what the package computes on seeded inputs, so that a change that means to change nothing
is seen to: `python -m tests.support.records` writes `tests/records.json`.

Integers, names and bytes are recorded as a hash. Floats depend on the processor in their last
digits: of an array four sums are recorded, which `test_records.py` compares with a tolerance.
"""

import contextlib
import hashlib
import itertools
import json
import pathlib
import sys
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.export import networks
from tests.losses.cases import GROUPS as LOSS_GROUPS
from tests.objectives.cases import CASES as OBJECTIVE_CASES
from tests.support.mathematics import random_batch
from tests.training import runs, stopping
from tfdml import evaluation, mining
from tfdml.data import EvaluationTransform, decode_image, sampling
from tfdml.data.transforms import TrainTransform
from tfdml.export.saved_model import export_saved_model
from tfdml.pairs import Pairs
from tfdml.retrieval import nearest_neighbors

PATH = pathlib.Path(__file__).with_suffix(".json")
DISTANCES = ("euclidean", "sqeuclidean", "cosine", "dot")


def digest(value):
    """Return what is recorded of a value: a hash, or the sums of an array of floats."""
    array = np.asarray(value)
    if array.dtype.kind != "f":
        data = array.tobytes() if array.dtype.kind in "iub" else json.dumps(array.tolist()).encode()
        return hashlib.sha256(f"{array.shape}".encode() + data).hexdigest()[:16]
    flat = np.where(np.isfinite(array), array, 0).astype(np.float64).ravel()
    weights = np.cos(np.arange(flat.size))
    sums = flat.sum(), np.abs(flat).sum(), flat @ weights, flat @ flat
    return [flat.size, *(float(f"{value:.6g}") for value in sums)]


@tf.autograph.experimental.do_not_convert
def value_and_gradient(function, x):
    """Return the digests of a function's value and gradient."""
    keras.utils.set_random_seed(0)
    variable = tf.Variable(x)
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(function(tf.convert_to_tensor(variable)))
    gradient = tape.gradient(value, variable)
    return [digest(np.float32(value)), digest(np.zeros(1) if gradient is None else gradient)]


def of_losses():
    """Values and gradients of the losses."""
    labels, x = random_batch(seed=11, size=24, classes=5, dim=6)
    for group in LOSS_GROUPS:
        for name, case in group.items():
            yield name, value_and_gradient(lambda e, loss=case.loss: loss(labels, e), x)


@contextlib.contextmanager
def seeded_weights(objective):
    """Give matrices of weights, which begin at random, the same values in each process."""
    rng = np.random.default_rng(17)
    matrices = [weight for weight in objective.weights if len(weight.shape) > 1]
    before = [weight.numpy() for weight in matrices]
    for weight in matrices:
        weight.assign(rng.normal(size=weight.shape).astype(weight.dtype))
    yield
    for weight, value in zip(matrices, before, strict=True):
        weight.assign(value)


def of_objectives():
    """Values and gradients of the objectives."""
    labels, x = random_batch(seed=12, size=24, classes=5, dim=4)
    for name, case in OBJECTIVE_CASES.items():

        def value(e, case=case):
            return case.objective(case.inputs(e), labels)

        with seeded_weights(case.objective):
            result = value_and_gradient(value, x)
        yield name, result


def of_miners():
    """What the miners choose, as the loss of what they leave."""
    labels, x = random_batch(seed=13, size=24, classes=5, dim=6)
    pairs = Pairs.of_batch(x, labels)
    yield "semi_hard_negatives", digest(np.asarray(mining.semi_hard_negatives(pairs)))
    informative = mining.multi_similarity_pairs(pairs)
    yield "multi_similarity_pairs, positives", digest(np.asarray(informative.positives))
    yield "multi_similarity_pairs, negatives", digest(np.asarray(informative.negatives))
    probabilities = np.asarray(mining.negative_probabilities(pairs), np.float32)
    yield "negative_probabilities", digest(probabilities)
    yield "sample_negatives", digest(np.asarray(mining.sample_negatives(probabilities, 2, seed=3)))


def of_evaluation():
    """Metrics, verification, identification and thresholds."""
    rng = np.random.default_rng(14)
    labels = np.repeat(np.arange(12), 8)
    centers = rng.normal(size=(12, 10))
    noise = rng.normal(size=(len(labels), 10))
    x = (centers[labels] + 0.6 * noise).astype(np.float32)
    for distance in DISTANCES:
        metrics = evaluation.evaluate_retrieval(x, labels, distance=distance)
        for name, value in metrics.items():
            yield f"{distance} {name}", digest(value)
        queries, gallery = slice(0, None, 3), slice(1, None, 3)
        metrics = evaluation.evaluate_retrieval(
            x[queries], labels[queries], x[gallery], labels[gallery], distance=distance
        )
        for name, value in metrics.items():
            yield f"{distance} {name} in a gallery", digest(value)
        result = evaluation.verification(x, labels, distance=distance)
        yield f"{distance} verification", digest([result.auc, result.eer, result.eer_threshold])
        for rate in ("fpir", "far", "precision"):
            level = 0.8 if rate == "precision" else 0.05
            calibration = evaluation.calibrate(x, labels, **{rate: level}, distance=distance)
            yield f"{distance} threshold of {rate}", digest(calibration.threshold)
            rates = [value.mean for value in calibration.rates.values()]
            yield f"{distance} rates of {rate}", digest(rates)


def of_searches():
    """Rows and distances of searches."""
    rng = np.random.default_rng(15)
    gallery = rng.normal(size=(700, 16)).astype(np.float32)
    gallery[100:110] = gallery[0]
    queries = np.concatenate([gallery[:20], rng.normal(size=(80, 16)).astype(np.float32)])
    far = 1000 + gallery
    for distance in DISTANCES:
        sides = {"gallery": (queries, gallery), "all": (gallery, None), "far": (far[:50], far)}
        for name, (left, right) in sides.items():
            rows, distances = nearest_neighbors(left, right, k=9, distance=distance)
            yield f"{distance} {name} rows", digest(rows)
            yield f"{distance} {name} distances", digest(distances)


def of_samplers():
    """The first batches of each sampler."""
    labels = np.repeat(np.arange(14), [3, 9, 5, 5, 8, 4, 6, 7, 2, 5, 5, 5, 9, 6])
    samplers = {
        "shuffle": sampling.ShuffleSampler(79, 10, seed=5),
        "pairs": sampling.PairSampler(np.arange(40).reshape(20, 2), 8, seed=5),
        "class_balanced": sampling.ClassBalancedSampler(labels, 4, 3, seed=5),
        "whole_classes": sampling.WholeClassSampler(labels, 20, seed=5),
        "hierarchical": sampling.HierarchicalSampler(labels, labels // 5, 4, 2, seed=5),
    }
    for name, sampler in samplers.items():
        batches = [sampler.batch(step).tolist() for step in range(40)]
        yield name, digest(np.concatenate(batches))


def of_transforms():
    """Views of training and evaluation."""
    images = np.random.default_rng(16).integers(0, 256, (2, 50, 70, 3)).astype(np.uint8)
    for mode in ("shorter", "squash", "pad"):
        view = EvaluationTransform(resize=40, image_size=32, resize_mode=mode)
        yield f"evaluation {mode}", digest(np.asarray(view(tf.constant(images[0])), np.float32))
    for kind in ("random_crop", "random_resized_crop", "multi_resolution", "none"):
        view = TrainTransform(augmentation=kind, resize=40, image_size=32)
        draws = view.draw(seed=3, step=7, batch_size=2)
        for image, draw in zip(images, draws, strict=True):
            made = np.asarray(view(tf.constant(image), draw), np.float32)
            yield f"training {kind} of {image[0, 0, 0]}", digest(made)


def made_files():
    """Name -> bytes of an image file, in the formats that are read."""
    files = {}
    for mode, form in itertools.product(("RGB", "L"), ("JPEG", "PNG", "WEBP")):
        files[f"{mode} {form}"] = networks.picture(3, form=form, mode=mode)
    files["CMYK JPEG"] = networks.picture(3, mode="CMYK")
    files["RGBA PNG"] = networks.picture(3, form="PNG", mode="RGBA")
    files["progressive JPEG"] = networks.picture(3, progressive=True)
    for orientation in range(1, 9):
        exif = networks.Image.Exif()
        exif[0x0112] = orientation
        files[f"turned JPEG {orientation}"] = networks.picture(3, exif=exif)
        files[f"turned PNG {orientation}"] = networks.picture(3, form="PNG", exif=exif)
    return files


def of_decodes():
    """Pixels by the pipeline, and embeddings by an exported SavedModel."""
    embedder = networks.small_embedder()
    with tempfile.TemporaryDirectory() as folder:
        version = export_saved_model(embedder, folder)
        served = tf.saved_model.load(str(version))
        embed = served.signatures["serving_default"]
        for name, data in made_files().items():
            pixels = np.asarray(decode_image(tf.constant(data)), np.float32)
            yield f"{name} pixels", digest(pixels)
            yield f"{name} embedding", digest(embed(image_bytes=tf.constant([data]))["embedding"])


def of_runs():
    """The last checkpoint of a run that is killed and resumed."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        stopping.make_quick(patch)
        path = pathlib.Path(folder, "run")
        stopping.train_until("step-00000003.npz", path)
        runs.train(path, resume=True)
        last = max(path.glob("checkpoints/step-*.npz"))
        for name, array in sorted(runs.arrays(last).items()):
            yield name, digest(array)


PARTS = {
    "losses": of_losses,
    "objectives": of_objectives,
    "miners": of_miners,
    "evaluation": of_evaluation,
    "searches": of_searches,
    "samplers": of_samplers,
    "transforms": of_transforms,
    "decodes": of_decodes,
    "runs": of_runs,
}


def main():
    """Write the records."""
    records = {part: dict(make()) for part, make in PARTS.items()}
    lines = json.dumps(records, indent=0).replace("\n", " ").replace("}, ", "},\n")
    text = lines.replace('", "', '",\n"').replace('], "', '],\n"')
    json.loads(text)
    PATH.write_text(text + "\n", encoding="utf-8")
    print({part: len(values) for part, values in records.items()})


if __name__ == "__main__":
    sys.exit(main())
