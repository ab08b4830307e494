r"""What a teacher adds: MobileNetV2 alpha 0.35 at 96 px from alpha 1.0 at 192 px.

    python -m benchmarks.distillation --runs=RUNS --data=DATA --weights=WEIGHTS --seconds=280 \
        --json=docs/numbers/distillation.json

DATA holds the folders cars196 and omniglot, WEIGHTS the files mnv2_035_notop.weights.h5 and
mnv2_100_notop_folded.weights.h5. What has ended is not repeated: call it until it prints the table.

The plan, written before the final runs:

- Cars-196, and every third class of Omniglot. Official splits; the test classes are not trained on.
- The teacher: pooled features of the large network, without its training, of whole images at
  192 px, stored once. Behind them is a whitened projection to 128 numbers, trained by AMSoftmax on
  the images that have a label, 400 steps.
- The student: the whole small network is trained, BatchNorm frozen, on 96 px crops of 112 px, with
  a whitened projection to 128 numbers. AMSoftmax, batches of 20 classes of 3 images, Adam, 1e-4,
  1e-2 for proxies, a cosine schedule: the recipe `finetune`, at 300 steps.
- The baseline: AMSoftmax alone over 300 steps. In a first run of three seeds on Omniglot, labels
  alone had not ended learning after 100 steps, and 200 of them brought most of what a teacher did:
  both sides now have the same, longer time.
- `all`: each training image has a label. With the teacher: 300 steps of AMSoftmax and the weight
  times distillation.
- `tenth`: a tenth of each class, at least two images, has a label. With the teacher: 100 steps of
  distillation alone on all images, then 200 steps of AMSoftmax and the weight times distillation,
  each with a schedule of its own length.
- Proxies and batches of a seed are the same on both sides.
- Trials choose form and weight for each data set and kind of labels: seed 0, on three of every four
  training classes, the best MAP@R on the fourth. WEIGHTS are what is tried.
- Final runs: all training classes, paired seeds 100 to 104, Recall@1 and MAP@R on the test classes,
  Student's 95 % interval of the paired gains.
- The teacher gains for a kind of labels if the interval of Recall@1 is above 0 on both data sets.
"""

from __future__ import annotations

import json
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tfdml import pairwise
from tfdml.data import EvaluationTransform, evaluation_batches
from tfdml.data.sampling import ClassBalancedSampler, ShuffleSampler
from tfdml.evaluation import retrieval_per_query, student_interval
from tfdml.io.files import write_whole
from tfdml.models import Embedder, Head, MetricLearner
from tfdml.objectives import ProxyLoss
from tfdml.pairs import Pairs
from tfdml.training.optimizers import build_optimizer
from tools.numbers import Results, command_line

# One of how many classes is taken, and whether images are mirrored.
SETS = {"cars196": (1, True), "omniglot": (3, False)}
SIZE, RESIZED, LARGE = 96, 112, 192
DIM, BATCH, RATE = 128, (20, 3), 1e-4
STEPS, STEPS_ALONE = 300, 100
KINDS = ("all", "tenth")
# What is tried of each form.
WEIGHTS = {"cosine": (3.0,), "distances": (30.0, 100.0)}
METRICS = {"recall@1": "Recall@1", "map@r": "MAP@R"}
TRIAL_SEED, SEEDS = 0, (100, 101, 102, 103, 104)
WHITENED = {"power": 0.5, "shrinkage": 0.1}


def store(name, data, weights, path):
    """Write images of 112 px, pooled features of the large network at 192 px, and labels."""
    backbone = tfdml.backbones.resolve("mobilenetv2", LARGE, weights, alpha=1.0)
    network = Embedder(backbone, 0, image_size=LARGE)
    pooled = tf.function(lambda x: network.represent(x, training=False)["pooled"])
    arrays = {}
    for split in ("train", "test"):
        images = tfdml.data.load(name, str(data / name), split)
        images = images.select_classes(images.classes[:: SETS[name][0]])
        small, features = [], []
        for batch, _ in evaluation_batches(images, EvaluationTransform(LARGE, LARGE), 50):
            features.append(pooled(batch).numpy())
            resized = tf.image.resize(batch, (RESIZED, RESIZED), antialias=True)
            small.append(np.clip(np.round(resized), 0, 255).astype("uint8"))
        arrays[f"{split}_x"] = np.concatenate(small)
        arrays[f"{split}_z"] = np.concatenate(features)
        arrays[f"{split}_y"] = images.labels
    np.savez(path, **arrays)


def load(path, is_trial):
    """Return images, features and labels that are trained on, and those that are measured."""
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    x, z = arrays["train_x"], arrays["train_z"]
    y = np.unique(arrays["train_y"], return_inverse=True)[1]
    if not is_trial:
        return (x, z, y), (arrays["test_x"], arrays["test_z"], arrays["test_y"])
    apart = y % 4 == 3
    train = x[~apart], z[~apart], np.unique(y[~apart], return_inverse=True)[1]
    return train, (x[apart], z[apart], y[apart])


def labeled_rows(labels, kind):
    """Return the rows of the images that have a label."""
    if kind == "all":
        return np.arange(len(labels))
    rng, rows = np.random.default_rng(0), []
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        count = max(2, round(len(of_class) / 10))
        rows.append(rng.choice(of_class, count, replace=False))
    return np.sort(np.concatenate(rows))


def taught(features, labels, rows, measured):
    """Return the embeddings by the teacher of all training images, and of those measured."""
    keras.utils.set_random_seed(0)
    head = Head(features.shape[1], embedding_dim=DIM)
    head.whiten(features, **WHITENED)
    classes, own = np.unique(labels[rows], return_inverse=True)
    learner = MetricLearner(head, ProxyLoss(tfdml.losses.AMSoftmaxLoss(), len(classes)))
    learner.compile(build_optimizer("adam", learner, 1e-3, {"objectives": 1e-2}))
    sampler = ClassBalancedSampler(own, 20, 5, seed=0)
    for step in range(400):
        batch = sampler.batch(step)
        learner.train_on_batch(features[rows[batch]], own[batch])
    return head.predict(features, verbose=0), head.predict(measured, verbose=0)


def metrics_of(embeddings, labels):
    """Return the metrics of embeddings, by name."""
    values = retrieval_per_query(embeddings, labels, metrics=tuple(METRICS))
    return {name: float(of_queries.mean()) for name, of_queries in values.items()}


def crops(images, rng, is_mirrored, size=SIZE):
    """Return a random crop of each square image, `size` pixels wide and high."""
    count = len(images)
    corners = rng.integers(0, images.shape[1] - size + 1, (count, 2))
    mirrored = (rng.random(count) < 0.5) & is_mirrored
    views = np.empty((count, size, size, 3), "uint8")
    for row, (top, left) in enumerate(corners):
        crop = images[row, top : top + size, left : left + size]
        views[row] = crop[:, ::-1] if mirrored[row] else crop
    return views


def of_middles(represent, images, size):
    """Return what a function makes of the middle of images, 256 at a time."""
    edge, parts = (images.shape[1] - size) // 2, []
    for first in range(0, len(images), 256):
        views = images[first : first + 256, edge:-edge, edge:-edge]
        parts.append(represent(views).numpy())
    return np.concatenate(parts)


def cosine(student, teacher):
    """Return the mean of 1 - cos of each image's two embeddings."""
    products = pairwise.l2_normalize(student) * pairwise.l2_normalize(teacher)
    return tf.reduce_mean(1.0 - tf.reduce_sum(products, axis=1))


def distances(student, teacher):
    """Return how much the distances of pairs differ, each by its mean over the batch, as the mean
    of Huber's function: Park et al., "Relational Knowledge Distillation", CVPR 2019, eq. 5 to 7."""
    relative = []
    for vectors in (student, teacher):
        pairs = Pairs.of_batch(pairwise.l2_normalize(vectors), tf.range(vectors.shape[0]))
        of_pairs = pairs.distances("euclidean")
        relative.append(of_pairs / pairs.mean(of_pairs, pairs.others))
    differences = tf.abs(relative[0] - relative[1])
    values = tf.where(differences < 1, 0.5 * differences**2, differences - 0.5)
    return pairs.mean(values, pairs.others)


FORMS = {"cosine": cosine, "distances": distances}


class Student:
    """A student whose step is compiled once for all runs of a data set and form.

    Args:
        weights: The file of the small network's weights.
        train: Images, features and labels.
        form: One of `FORMS`.
        is_mirrored: Whether images are mirrored.
    """

    def __init__(self, weights, train, form, is_mirrored):
        keras.utils.set_random_seed(0)
        self.images, _, self.labels = train
        self.is_mirrored = is_mirrored
        backbone = tfdml.backbones.resolve("mobilenetv2", SIZE, weights, alpha=0.35)
        self.embedder = Embedder(backbone, DIM, image_size=SIZE)
        self.run = tf.function(lambda x: self.embedder.represent(x, training=False))
        rows = np.unique(np.linspace(0, len(self.images) - 1, 2048).astype(int))
        self.embedder.whiten(self.represent(self.images[rows], "pooled"), **WHITENED)
        self.term = ProxyLoss(tfdml.losses.AMSoftmaxLoss(), self.labels.max() + 1)
        self.form = FORMS[form]
        self.learner = MetricLearner(self.embedder, self.term)
        optimizer = build_optimizer("adam", self.learner, RATE, {"objectives": 1e-2})
        self.learner.compile(optimizer)
        self.start = [variable.numpy() for variable in self.learner.variables]
        self.step = tf.function(self.train_step, autograph=False)

    def train_step(self, images, teacher, labels, weights):
        """Make a step on both terms, with their weights."""
        variables = self.learner.trainable_variables
        with tf.GradientTape() as tape:
            representations = self.learner(images, training=True)
            from_labels = self.learner.compute_loss(images, labels, representations, training=True)
            from_teacher = self.form(representations["embedding"], teacher)
            loss = weights[0] * from_labels + weights[1] * from_teacher
        gradients = tape.gradient(loss, variables)
        self.learner.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def represent(self, images, name="embedding"):
        """Return a representation of the middle of images."""
        return of_middles(lambda views: self.run(views)[name], images, SIZE)

    def reset(self, seed):
        """Start from the first weights, with the proxies of a seed."""
        for variable, value in zip(self.learner.variables, self.start, strict=True):
            variable.assign(value)
        proxies = self.term.class_proxies.proxies
        proxies.assign(np.random.default_rng(seed).normal(0, 0.05, proxies.shape))

    def train(self, teacher, rows, seed, weights, steps):
        """Train on some rows with the weights of both terms, from a new state of Adam."""
        optimizer = self.learner.optimizer
        for variable in optimizer.variables:
            if "learning_rate" not in variable.path:
                variable.assign(tf.zeros_like(variable))
        rng = np.random.default_rng([seed, len(rows)])
        sampler = ClassBalancedSampler(self.labels[rows], *BATCH, seed=seed)
        if not weights[0]:
            sampler = ShuffleSampler(len(rows), BATCH[0] * BATCH[1], seed)
        for step in range(steps):
            batch = rows[sampler.batch(step)]
            views = crops(self.images[batch], rng, self.is_mirrored)
            arrays = views, teacher[batch], self.labels[batch], np.float32(weights)
            optimizer.learning_rate = RATE * (1 + np.cos(np.pi * step / steps)) / 2
            self.step(*map(tf.constant, arrays))


def run(student, teacher, kind, seed, weight):
    """Train a student: steps by the teacher alone come before those on a tenth of the labels."""
    rows, every = labeled_rows(student.labels, kind), np.arange(len(student.labels))
    student.reset(seed)
    steps = STEPS
    if weight and kind == "tenth":
        student.train(teacher, every, seed, (0.0, 1.0), STEPS_ALONE)
        steps -= STEPS_ALONE
    student.train(teacher, rows, seed, (1.0, weight), steps)


class Unfinished(Exception):
    """The time has ended before the runs."""


class Study:
    """The runs of a data set, whose results are kept in a file each.

    Args:
        arguments: Of the command line.
        name: The data set.
        is_trial: Whether held-out training classes are measured.
    """

    def __init__(self, arguments, name, is_trial):
        self.arguments, self.name, self.is_trial = arguments, name, is_trial
        self.students, self.teachers = {}, {}
        self.arrays = None

    def path(self, *words):
        """Return the file of a result."""
        part = "trial" if self.is_trial else "final"
        return self.arguments.runs / "_".join([part, self.name, *words, "result.json"])

    def result(self, kind, form, weight, seed):
        """Return the metrics of a run, which is trained if that is not done."""
        path = self.path(kind, form, f"{weight:g}", str(seed))
        if not path.exists():
            self.measure(path, kind, form, weight, seed)
        return json.loads(path.read_text())

    def measure(self, path, kind, form, weight, seed):
        """Train a run, and write its metrics."""
        if time.monotonic() > self.arguments.end:
            raise Unfinished("not complete, call it again")
        if self.arrays is None:
            stored = self.arguments.runs / f"{self.name}.npz"
            if not stored.exists():
                large = str(self.arguments.weights / "mnv2_100_notop_folded.weights.h5")
                store(self.name, self.arguments.data, large, stored)
            self.arrays = load(stored, self.is_trial)
        (_, features, labels), measured = train, _ = self.arrays
        if kind not in self.teachers:
            vectors = self.path(kind, "teacher").with_suffix(".npy")
            if not vectors.exists():
                rows = labeled_rows(labels, kind)
                embeddings, of_measured = taught(features, labels, rows, measured[1])
                values = metrics_of(of_measured, measured[2])
                write_whole(self.path(kind, "teacher"), json.dumps(values).encode())
                np.save(vectors, embeddings)
            self.teachers[kind] = np.load(vectors)
        if form not in self.students:
            small = str(self.arguments.weights / "mnv2_035_notop.weights.h5")
            self.students[form] = Student(small, train, form, SETS[self.name][1])
            if not self.path("start").exists():
                values = metrics_of(self.students[form].represent(measured[0]), measured[2])
                write_whole(self.path("start"), json.dumps(values).encode())
        student = self.students[form]
        begin = time.monotonic()
        run(student, self.teachers[kind], kind, seed, weight)
        values = metrics_of(student.represent(measured[0]), measured[2])
        print(path.name, values, f"{time.monotonic() - begin:.0f} s", flush=True)
        write_whole(path, json.dumps(values).encode())


def chosen(arguments, name, kind):
    """Return the form and the weight of the best trial, after all trials."""
    study = Study(arguments, name, True)
    trials = {}
    for form, weights in WEIGHTS.items():
        for weight in weights:
            trials[form, weight] = study.result(kind, form, weight, TRIAL_SEED)["map@r"]
    return max(trials, key=trials.get)


def rows_of(arguments, name, kind):
    """Run the final runs of a data set and kind of labels, and return a row of each metric."""
    form, weight = chosen(arguments, name, kind)
    study = Study(arguments, name, False)
    sides = {"labels": [], "teacher": []}
    for seed in SEEDS:
        sides["labels"].append(study.result(kind, form, 0.0, seed))
        sides["teacher"].append(study.result(kind, form, weight, seed))
    teacher = json.loads(study.path(kind, "teacher").read_text())
    start = json.loads(study.path("start").read_text())
    rows = []
    for metric, name_of_metric in METRICS.items():
        cells = [f"{100 * teacher[metric]:.1f}", f"{100 * start[metric]:.1f}"]
        cells.append(f"{form}, {weight:g}")
        percent = {}
        for side, results in sides.items():
            percent[side] = 100 * np.array([values[metric] for values in results])
            cells.append(f"{percent[side].mean():.1f}")
        gain = student_interval(percent["teacher"] - percent["labels"])
        cells.append(f"{gain.mean:+.1f} ({gain.low:+.1f} to {gain.high:+.1f})")
        rows.append((f"{name}, {kind}, {name_of_metric}", *cells))
    return rows


def main():
    """Train what is missing, and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="the folder of the runs")
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--weights", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="no run begins after these")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    arguments = parser.parse_args()
    arguments.end = time.monotonic() + arguments.seconds
    arguments.runs.mkdir(exist_ok=True)
    columns = ("teacher", "start", "form, weight", "labels", "labels and teacher", "gain")
    rows = []
    for kind in arguments.kinds:
        for name in arguments.sets:
            try:
                rows += rows_of(arguments, name, kind)
            except Unfinished as error:
                print(f"{name}, {kind}: {error}")
    add = Results(arguments.json).table("table", "", *columns)
    for row in rows:
        add(*row)


if __name__ == "__main__":
    main()
