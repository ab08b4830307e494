r"""What a newcomer gets: the first complete example of each library, on the same images.

    python -m benchmarks.first_examples --runs=RUNS --sets=SETS --weights=MNV2_035.weights.h5
    python -m benchmarks.first_examples --runs=RUNS --json=docs/numbers/first_examples.json

The first command trains what is missing, and stops after --seconds: call it until it says that
nothing is missing. The second prints the tables of what there is. SETS holds folders as in
docs/results.md: cars196 and omniglot in their official layouts, grocery and clothing as class
folders. The rows of a peer need its package next to tfdml; --rows leaves rows out.

The plan, written before the runs:

- Images: groceries, clothes and Cars-196 from weights of ImageNet, Omniglot from random weights.
  One part of the classes trains, the other is measured: the official split, or halves by name.
- Network: MobileNetV2 alpha 0.35 on 96 px crops of 112 px with mirror images; for Omniglot conv4 on
  28 px crops of 32 px. Every row has the same crops and the same evaluator: Recall@1 and MAP@R.
- Rows, with their documented batches, losses, miners, rates and weight decay:
  pytorch-metric-learning's `MetricLossOnly`; the example of OML's README, and OML's recipe for
  Cars; TensorFlow Similarity's first notebook; softmax on the pooled features, as in Keras's guide
  to transfer learning (the head alone for two thirds of the steps, then all at 1e-5); `tfdml train`
  with no flag but those of data, network and weights.
- No training: pooled features, and the same, centered and whitened.
- A head has 128 dimensions. OML's examples and softmax have none.
- PyTorch's BatchNorm has a momentum of 0.1, which is 0.9 in Keras: rows of PyTorch have it.
  The loss, miner and sampler of PyTorch's rows are the peer's own; the network and Adam are
  Keras's. TensorFlow Similarity's loss is `MultiSimilarityLoss(2, 40, 0.5, 0.1)` of tfdml, which
  `make parity-tfsim` compares with it. That of OML's recipe is `TripletLoss("soft")` of tfdml: 340
  thousand triplets a batch took OML's own 5 seconds. On 60 vectors both have the same value to
  1e-7, and gradient to 1e-6 of its largest element.
- BatchNorm trains or is frozen, as rows of their own. From random weights it trains.
- A batch of OML's recipe has as many classes as there are, where these are fewer than 20.
- Length: 12,000 images for each row; and the documented length, where this is at most 50,000.
  OML's recipe for Cars (10 million images) and TensorFlow Similarity's notebook (600,000) are cut.
- Rates: the documented ones times 1/3, 1 and 3, chosen by MAP@R on a quarter of the training
  classes, at 12,000 images, one seed. tfdml's is as it is.
- Three seeds. Gains over each row's own start, with paired intervals over classes.

`docs/first_examples.md` has groceries and clothes. Cars-196 and Omniglot have not run.
"""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import tfdml
from benchmarks.distillation import WHITENED, crops, of_middles
from tfdml import pairwise
from tfdml.data import EvaluationTransform
from tfdml.data.pipeline import readable_views
from tfdml.data.sampling import ClassBalancedSampler, ShuffleSampler
from tfdml.evaluation import paired_differences, retrieval_per_query
from tfdml.models import Embedder, Head
from tfdml.models.normalization import batch_norms
from tools.numbers import Results, command_line

METRICS = ("recall@1", "map@r")
IMAGES, MOST_IMAGES = 12_000, 50_000
FACTORS = (1 / 3, 1.0, 3.0)
TRIAL_SEED, SEEDS = 0, (100, 101, 102)
DIM = 128
BACKBONE = "mobilenetv2(alpha=0.35)"
ROOT = pathlib.Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Set:
    """A data set.

    Args:
        size, resize: Of the crops and of the images, in pixels.
        is_mirrored: Whether images are mirrored.
        layout: Its name for `tfdml.data.load`.
    """

    size: int = 96
    resize: int = 112
    is_mirrored: bool = True
    layout: str = "folder"

    @property
    def is_pretrained(self) -> bool:
        """Whether the network starts from ImageNet."""
        return self.size == 96

    def batch_size(self, labels):
        """Return the images of a batch of tfdml's recipe: five each of 20 classes, or of all where
        there are fewer."""
        return min(20, len(np.unique(labels))) * 5


SETS = {
    "grocery": Set(),
    "clothing": Set(),
    "omniglot": Set(28, 32, False, "omniglot"),
    "cars196": Set(layout="cars196"),
}


def pml(labels, seed):
    """Return the loss of pytorch-metric-learning's MetricLossOnly, and its batches."""
    import torch
    from pytorch_metric_learning import losses, miners, samplers

    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002, as its sampler draws from it
    loss, miner = losses.TripletMarginLoss(margin=0.1), miners.MultiSimilarityMiner(epsilon=0.1)
    sampler = samplers.MPerClassSampler(labels, 4, 32, length_before_new_iter=len(labels))

    def batches():
        while True:
            rows = np.array(list(sampler))
            yield from rows[: len(rows) // 32 * 32].reshape(-1, 32)

    return of_torch(lambda x, y: loss(x, y, miner(x, y))), batches()


def oml(margin, classes, images):
    """Return the same of OML, by the arguments of its loss and sampler."""

    def make(labels, seed):
        import torch
        from oml.losses.triplet import TripletLossWithMiner
        from oml.miners.inbatch_all_tri import AllTripletsMiner
        from oml.samplers.balance import BalanceSampler

        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002, as its sampler draws from it
        if margin is None:
            loss = tfdml.losses.TripletLoss("soft", mining="all")
        else:
            loss = of_torch(TripletLossWithMiner(margin, AllTripletsMiner()))
        together = min(classes, len(np.unique(labels)))
        sampler = BalanceSampler(labels.tolist(), n_labels=together, n_instances=images)

        def batches():
            while True:
                yield from map(np.array, sampler)

        return loss, batches()

    return make


def of_torch(loss):
    """Return a loss of PyTorch as one of TensorFlow, with its gradient."""
    import torch

    def compute(embeddings, labels):
        x = torch.tensor(embeddings, requires_grad=True)
        value = loss(x, torch.tensor(labels))
        if value.requires_grad:
            value.backward()
        gradient = np.zeros_like(embeddings) if x.grad is None else x.grad.numpy()
        return np.float32(value.item()), gradient

    def call(labels, embeddings):
        @tf.custom_gradient
        def bridged(embeddings):
            value, gradient = tf.numpy_function(
                compute, [embeddings, labels], [tf.float32, tf.float32]
            )
            gradient.set_shape(embeddings.shape)
            return value, lambda upstream: upstream * gradient

        return bridged(embeddings)

    return call


def tfsim(labels, seed):
    """Return the same of TensorFlow Similarity's first notebook."""
    loss = tfdml.losses.MultiSimilarityLoss(2, 40, 0.5, 0.1)
    sampler = ClassBalancedSampler(labels, 6, 10, seed=seed)
    return loss, map(sampler.batch, range(10**9))


def softmax(labels, seed):
    """Return the same of a classifier."""
    sampler = ShuffleSampler(len(labels), 32, seed)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loss, map(sampler.batch, range(10**9))


@dataclasses.dataclass(frozen=True)
class Example:
    """The first example of a library.

    Args:
        make: From labels and a seed to the loss and the rows of batches.
        rates: Of the backbone and of the head.
        decay: What is added to gradients, as a share of the weights.
        head: `dense` of 128 dimensions, `unit` for vectors of length 1 behind it, `classes` for a
            classifier, or none.
        momentum: Of BatchNorm; None: the network's own.
        documented: From the training images and classes to the images of the documented length.
    """

    make: Callable
    rates: tuple[float, float]
    head: str
    documented: Callable[[int, int], float]
    decay: float = 0.0
    momentum: float | None = None

    @property
    def of_classes(self) -> bool:
        """Whether it trains a classifier, its head first."""
        return self.head == "classes"


EXAMPLES = {
    "pytorch-metric-learning": Example(
        pml, (1e-5, 1e-4), "dense", lambda images, classes: 4 * images, 1e-4, 0.9
    ),
    "OML, README": Example(
        oml(0.1, 2, 2), (1e-4, 1e-4), "", lambda images, classes: 2 * classes, 0.0, 0.9
    ),
    "OML, cars": Example(
        oml(None, 20, 10), (1e-5, 1e-5), "", lambda images, classes: np.inf, 0.0, 0.9
    ),
    "TensorFlow Similarity": Example(tfsim, (5e-6, 5e-6), "unit", lambda images, classes: np.inf),
    "softmax": Example(softmax, (1e-5, 1e-3), "classes", lambda images, classes: 30 * images),
}


def load(name, arguments, is_trial):
    """Return the images and labels that are trained on, and those that are measured."""
    stored = arguments.runs / f"{name}.npz"
    if not stored.exists():
        store(name, arguments.sets / name, stored)
    with np.load(stored) as arrays:
        x, y = arrays["train_x"], arrays["train_y"]
        if not is_trial:
            return (x, y), (arrays["test_x"], arrays["test_y"])
    apart = y % 4 == 3
    return (x[~apart], np.unique(y[~apart], return_inverse=True)[1]), (x[apart], y[apart])


def store(name, folder, path):
    """Write the resized images of both halves of the classes, and their labels."""
    own, arrays = SETS[name], {}
    view = EvaluationTransform(own.resize, own.resize)
    for split in ("train", "test"):
        images = tfdml.data.load(own.layout, str(folder), split)
        views = [part for _, part in readable_views(images.images, view, 100)]
        arrays[f"{split}_x"] = np.concatenate(views)
        arrays[f"{split}_y"] = np.unique(images.labels, return_inverse=True)[1]
    np.savez(path, **arrays)


class Network:
    """A network with the head of an example, its step, and its start.

    Args:
        own: The data set.
        weights: The file of its weights.
        example: The example; None: the backbone alone.
        classes: The number of training classes.
        trains_norms: Whether BatchNorm trains.
    """

    def __init__(self, own, weights, example, classes, trains_norms):
        self.own, self.example = own, example
        name = BACKBONE if own.is_pretrained else "conv4"
        backbone = tfdml.backbones.resolve(
            name, own.size, str(weights) if own.is_pretrained else None
        )
        norms = "train" if trains_norms else "frozen"
        self.embedder = Embedder(backbone, 0, image_size=own.size, batch_norm=norms)
        if example and example.momentum:
            for layer in batch_norms(self.embedder.backbone):
                layer.momentum = example.momentum
        self.head = None
        if example and example.head:
            self.head = keras.layers.Dense(classes if example.of_classes else DIM)
            self.head.build((None, self.embedder.embedding_dim))
        self.pooled = tf.function(lambda x: self.embedder.represent(x, training=False)["pooled"])

    def represent(self, images):
        """Return the embeddings of the middle of images, of length 1."""
        vectors = of_middles(self.pooled, images, self.own.size)
        if self.head is not None and not self.example.of_classes:
            vectors = self.head(vectors).numpy()
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def train(self, images, labels, seed, factor, count):
        """Train on batches that hold `count` images together."""
        loss, batches = self.example.make(labels, seed)
        parts = [self.embedder.backbone.trainable_variables]
        parts.append(self.head.trainable_variables if self.head is not None else [])
        optimizers = [keras.optimizers.Adam(rate * factor) for rate in self.example.rates]
        for optimizer, part in zip(optimizers, parts, strict=True):
            optimizer.build(part)

        @tf.function(autograph=False)
        def step(views, labels, head_alone):
            with tf.GradientTape() as tape:
                vectors = self.embedder.represent(views, training=True)["pooled"]
                vectors = vectors if self.head is None else self.head(vectors)
                if self.example.head == "unit":
                    vectors = pairwise.l2_normalize(vectors)
                value = loss(labels, vectors)
            gradients = tape.gradient(value, parts)
            for part, of_part, optimizer in zip(parts, gradients, optimizers, strict=True):
                if not part or (head_alone and part is parts[0]):
                    continue
                pairs = zip(of_part, part, strict=True)
                optimizer.apply([g + self.example.decay * w for g, w in pairs], part)
            return value

        rng, seen = np.random.default_rng(seed), 0
        while seen < count:
            rows = next(batches)
            views = crops(images[rows], rng, self.own.is_mirrored, self.own.size)
            head_alone = self.example.of_classes and seen < 2 / 3 * count
            value = step(tf.constant(views), tf.constant(labels[rows]), head_alone)
            if not np.isfinite(value):
                raise SystemExit(f"the loss is {value} after {seen} images")
            seen += len(rows)


def measure(vectors, labels):
    """Return the metrics of each query."""
    return retrieval_per_query(vectors, labels, metrics=METRICS)


class Study:
    """The runs, whose metrics of each query are kept in a file each.

    Args:
        arguments: Of the command line.
    """

    def __init__(self, arguments):
        self.arguments = arguments
        self.end = time.monotonic() + arguments.seconds

    def run(self, name, row, norms, seed, factor, count, is_trial=False):
        """Return the metrics of each query at the start and at the end of a run, by name; train it
        where it is missing. None: it is missing, and the table is printed without it."""
        part = "trial" if is_trial else "final"
        words = (part, name, row, norms, str(seed), f"{factor:.2f}", str(int(count)))
        path = self.arguments.runs / ("_".join(words).replace(" ", "") + ".npz")
        if not path.exists() and self.arguments.json:
            return None
        if not path.exists():
            if time.monotonic() > self.end:
                raise SystemExit("call it again")
            begin = time.monotonic()
            keras.utils.set_random_seed(seed)
            train, test = load(name, self.arguments, is_trial)
            if row == "tfdml":
                steps = count // SETS[name].batch_size(train[1])
                values = self.command(name, norms, seed, steps, test)
            else:
                values = self.example(name, row, norms, seed, factor, count, train, test)
            np.savez(path, labels=test[1], **values)
            recall = 100 * np.nanmean(values["end_recall@1"])
            print(f"{path.stem} {recall:.1f} {time.monotonic() - begin:.0f} s", flush=True)
        with np.load(path) as stored:
            return {name: stored[name] for name in stored.files}

    def example(self, name, row, norms, seed, factor, count, train, test):
        """Train an example, and return the metrics of its start and end."""
        classes = int(train[1].max()) + 1
        network = Network(
            SETS[name], self.arguments.weights, EXAMPLES.get(row), classes, norms == "trained"
        )
        start = network.represent(test[0])
        end = start
        if row in EXAMPLES:
            network.train(*train, seed, factor, count)
            end = network.represent(test[0])
        elif row == "whitened":
            head = Head(start.shape[1], embedding_dim=min(DIM, start.shape[1]))
            head.whiten(network.represent(train[0]), **WHITENED)
            end = head.predict(start, verbose=0)
        states = {"start": start, "end": end}
        return {
            f"{state}_{metric}": values
            for state, vectors in states.items()
            for metric, values in measure(vectors, test[1]).items()
        }

    def command(self, name, norms, seed, steps, test):
        """Run `tfdml train` with no flag but those of data, network and weights; return the metrics
        of the end. Steps take the place of its own length."""
        own, folder = SETS[name], self.arguments.runs / f"{name}_{norms}_{seed}_{steps}"
        backbone = BACKBONE if own.is_pretrained else "conv4"
        flags = [f"--dataset={own.layout}", f"--data_dir={(self.arguments.sets / name).resolve()}"]
        flags += [f"--backbone={backbone}", f"--image_size={own.size}", f"--resize={own.resize}"]
        flags += [f"--seed={seed}", "--report=false", f"--run_dir={folder.resolve()}"]
        if own.is_pretrained:
            flags.append(f"--weights={self.arguments.weights.resolve()}")
        if norms == "trained":
            flags.append("--batch_norm=train")
        if not own.is_mirrored:
            flags.append("--flip=false")
        if steps:
            flags += ["--epochs=1", f"--steps_per_epoch={steps}"]
        if folder.exists():
            flags.append("--resume")
        command = [sys.executable, "bin/train", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        embedder = keras.models.load_model(folder / "embedder.keras")
        edge = (own.resize - own.size) // 2
        vectors = embedder.predict(test[0][:, edge:-edge, edge:-edge], verbose=0)
        return {f"end_{metric}": values for metric, values in measure(vectors, test[1]).items()}


def runs_of(study, name):
    """Return the runs of all seeds of each row of a data set, by the words of the row."""
    rows = {}
    own = SETS[name]
    (_, labels), _ = load(name, study.arguments, False)
    for row in ("pooled", "whitened"):
        rows[row, "", ""] = [study.run(name, row, "frozen", 0, 1.0, 0)]
    for row in study.arguments.rows:
        for norms in ("frozen", "trained") if own.is_pretrained else ("trained",):
            factor = 1.0 if row == "tfdml" else best_factor(study, name, row, norms)
            for length in lengths(row, labels, own):
                count = 0 if row == "tfdml" and length != IMAGES else length
                runs = [study.run(name, row, norms, seed, factor, count) for seed in SEEDS]
                words = f"{length:,}, x {factor:.2g}"
                rows[row, norms, words] = [run for run in runs if run is not None]
    return rows


def lengths(row, labels, own):
    """Return the numbers of images that a row is trained on in a data set."""
    if row == "tfdml":
        batch = own.batch_size(labels)
        # 12 passes, and the least images of the recipe.
        steps = max(
            (48_000 if own.is_pretrained else 120_000) // batch, 12 * (len(labels) // batch)
        )
        return [batch * steps, IMAGES]
    documented = EXAMPLES[row].documented(len(labels), labels.max() + 1)
    return [IMAGES] if documented > MOST_IMAGES else [int(documented), IMAGES]


def best_factor(study, name, row, norms):
    """Return the factor of the rates that is best on held-out training classes."""
    scores = {}
    for factor in FACTORS:
        run = study.run(name, row, norms, TRIAL_SEED, factor, IMAGES, is_trial=True)
        scores[factor] = -1.0 if run is None else np.nanmean(run["end_map@r"])
    return max(scores, key=scores.get)


def add_rows(rows, add):
    """Add the rows of a data set to its table."""
    (pooled,) = rows["pooled", "", ""]
    for (row, norms, words), runs in rows.items():
        if not runs:
            continue
        cells = []
        for metric in METRICS:
            ends = ends_of(runs, metric)
            untrained = ends_of([pooled] * len(runs), metric)
            starts = [run.get(f"start_{metric}", pooled[f"end_{metric}"]) for run in runs]
            cells.append(f"{100 * np.nanmean(starts):.1f} -> {100 * np.nanmean(ends):.1f}")
            cells.append(points(ends, starts, pooled["labels"]))
            cells.append(points(ends, untrained, pooled["labels"]))
        add(row, norms, words, len(runs), *cells)


def ends_of(runs, metric):
    """Return a metric of each query at the end of each run."""
    return [run[f"end_{metric}"] for run in runs]


def points(ends, others, labels):
    """Return the mean of paired differences in points, with its interval over classes."""
    of_seeds = [[{"metric": values} for values in side] for side in (ends, others)]
    gain = paired_differences(*of_seeds, labels)["metric"]
    interval = f"{100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
    return f"{100 * gain.mean:+.1f} ({interval})"


def add_best(name, rows, add):
    """Add what `tfdml train` gains in Recall@1, and the example that ends highest, where both have
    runs."""
    (pooled,) = rows["pooled", "", ""]
    metric, labels = METRICS[0], pooled["labels"]
    examples = {row: runs for row, runs in rows.items() if row[0] in EXAMPLES and runs}
    # The first of its rows is its default.
    own = next((runs for row, runs in rows.items() if row[0] == "tfdml"), [])
    if not (own and examples):
        return
    best = max(examples, key=lambda row: np.nanmean(ends_of(examples[row], metric)))
    untrained = ends_of([pooled] * len(own), metric)
    ends, highest = ends_of(own, metric), ends_of(examples[best], metric)
    cells = [points(ends, untrained, labels), points(highest, untrained, labels)]
    add(name, cells[0], ", ".join(best), cells[1], points(ends, highest, labels))


def main():
    """Train what is missing; with --json, write the table of what there is."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="the folder of the runs")
    parser.add_argument("--sets", type=pathlib.Path, default=pathlib.Path("sets"))
    parser.add_argument("--weights", type=pathlib.Path, default=pathlib.Path("weights.h5"))
    parser.add_argument("--seconds", type=float, default=1e9, help="no run begins after these")
    parser.add_argument("--rows", nargs="*", default=["tfdml", *EXAMPLES])
    parser.add_argument("--only", nargs="*", default=list(SETS), choices=list(SETS))
    study = Study(parser.parse_args())
    study.arguments.runs.mkdir(exist_ok=True)
    columns = ["first example of", "BatchNorm", "images, rates", "seeds"]
    for metric in ("Recall@1", "MAP@R"):
        columns += [metric, f"{metric}, gain", f"{metric}, over pooled"]
    results, tables = Results(study.arguments.json), {}
    for name in study.arguments.only:
        is_begun = (study.arguments.runs / f"{name}.npz").exists()
        if study.arguments.json and not is_begun:
            continue
        tables[name] = runs_of(study, name)
        add_rows(tables[name], results.table(name, *columns))
    add = results.table("best", "data set", "tfdml", "the best example", "its gain", "difference")
    for name, rows in tables.items():
        add_best(name, rows, add)
    if not study.arguments.json:
        print("nothing is missing")


if __name__ == "__main__":
    main()
