r"""Measure what queries of a new model find in the gallery of an old one.

    python -m benchmarks.upgrade --features=features --data=DATA --old_weights=MNV2_035.weights.h5 \
        --new_weights=MNV2_100.weights.h5
    python -m benchmarks.upgrade --features=features --json=docs/numbers/upgrade.json

The first command stores pooled features. The second trains heads on them. It keeps what it has
measured in that folder, and resumes.

The plan, written before the final runs:

- Cars-196, and every third class of Omniglot. Unseen classes are measured, official splits.
- The old model: a head on MobileNetV2 0.35 at 112 px, trained on half of the training classes. The
  new one: a head on MobileNetV2 1.0 at 192 px, trained on all of them. Both have 128 dimensions, a
  whitened start, and 500 steps of proxy anchor.
- Candidates: `plain` is the new model alone. `rotated` is the same behind `Head.align`. `least
  squares` is a linear map with a ridge from the new pooled features to the old vectors. `across
  views` and `class means` are trained with one more term: `SoftmaxAcrossViews(shared="left_out")`
  to the old vectors of the same images, or the softmax over the old vectors' means of all training
  classes, which stay (the influence of the old classifier of Shen et al., CVPR 2020).
- Trials choose the ridge or weight of a candidate for each data set: seed 0, every fourth training
  class held out, the best Recall@1 of new queries in the old gallery on these.
- Final runs: seeds 100, 101 and 102, means over seeds, 95 % intervals over classes of the unseen.
- A candidate meets the criterion of the paper if its difference to the old model in the old gallery
  is above 0 with its whole interval.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdml
from benchmarks.study import part_of_set, store
from tfdml.data import EvaluationTransform
from tfdml.data.sampling import ClassBalancedSampler
from tfdml.evaluation import calibrate, paired_differences, retrieval_per_query
from tfdml.evaluation.identification import Searches
from tfdml.io.files import write_whole
from tfdml.models import Head, MetricLearner
from tfdml.objectives import Objective, SoftmaxAcrossViews
from tfdml.objectives.terms import build_objectives
from tfdml.retrieval.exact import unit_rows
from tfdml.training import build_optimizer
from tools.numbers import Results, command_line

# Of a data set one of how many classes is taken.
SETS = {"cars196": 1, "omniglot": 3}
# Of each model: the network, and the size of its images after and before the crop.
NETWORKS = {"old": ("mobilenetv2(alpha=0.35)", 112, 128), "new": ("mobilenetv2", 192, 192)}
DIM = 128
OBJECTIVE = "proxy_anchor"
STEPS, RATE, PROXY_RATE = 500, 1e-3, 1e-2
TRIAL_SEED, SEEDS = 0, (100, 101, 102)
FPIR = 0.05
PLAIN, ROTATED, MAPPED = "plain", "rotated", "least squares"
VIEWS, MEANS = "across views", "class means"
# What is tried of each candidate: ridges in units of the mean variance, and weights of a term.
WEIGHTS = (0.3, 1.0, 3.0, 10.0, 30.0)
TRIALS = {
    PLAIN: (0.0,),
    ROTATED: (0.0,),
    MAPPED: (0.001, 0.01, 0.1, 1.0),
    VIEWS: WEIGHTS,
    MEANS: WEIGHTS,
}


@dataclasses.dataclass(frozen=True)
class Side:
    """Features of the same images by both networks, and their classes."""

    old: np.ndarray
    new: np.ndarray
    labels: np.ndarray

    def part(self, mask: np.ndarray) -> Side:
        """Return the images of a mask, with classes from 0 on."""
        labels = np.unique(self.labels[mask], return_inverse=True)[1]
        return Side(self.old[mask], self.new[mask], labels)


def sides_of(folder: pathlib.Path, name: str, is_trial: bool) -> tuple[Side, Side]:
    """Return the images that are trained on, and those that are measured."""
    stored = {}
    for model in NETWORKS:
        with np.load(folder / f"{name}_{model}.npz") as file:
            stored[model] = {key: file[key] for key in file.files}
    sides = []
    for split in ("train", "test"):
        vectors = [stored[model][split].astype("float32") for model in ("old", "new")]
        labels = stored["old"][f"{split}_labels"]
        sides.append(Side(*vectors, np.unique(labels, return_inverse=True)[1]))
    if not is_trial:
        return sides[0], sides[1]
    apart = sides[0].labels % 4 == 3
    return sides[0].part(~apart), sides[0].part(apart)


def trained(
    features: np.ndarray,
    labels: np.ndarray,
    seed: int,
    term: Objective | None = None,
    targets: np.ndarray | None = None,
) -> Head:
    """Return a head that was trained on features.

    Args:
        features: (N, D).
        labels: (N,) from 0 on.
        seed: Of the first weights and the batches.
        term: One more objective.
        targets: (N, d) the vectors of another model, which are the second view. None: there is one
            view.
    """
    keras.utils.set_random_seed(seed)
    head = Head(features.shape[1], embedding_dim=DIM)
    head.whiten(features, power=0.5, shrinkage=0.1)
    count = int(labels.max()) + 1
    objectives = build_objectives(OBJECTIVE, num_classes=count)
    if term is not None:
        objectives.append(term)
    towers: Any = head
    inputs: Any = tf.constant(features)
    if targets is not None:
        towers = {"image": head, "old": Head(DIM, embedding_dim=0)}
        inputs = {"image": inputs, "old": tf.constant(targets)}
    learner = MetricLearner(towers, objectives, num_classes=count)
    rates = {"objectives": PROXY_RATE}
    learner.compile(build_optimizer("adam", learner, RATE, rates, weight_decay=1e-4))
    sampler = ClassBalancedSampler(labels, 16, 5, seed=seed)
    batches = np.stack([sampler.batch(step) for step in range(STEPS)])
    classes = tf.constant(labels, "int32")

    def batch_of(rows):
        of_rows = functools.partial(tf.gather, indices=rows)
        return tf.nest.map_structure(of_rows, inputs), of_rows(classes)

    learner.fit(tf.data.Dataset.from_tensor_slices(batches).map(batch_of), verbose=0)
    return head


def vectors_of(head: Head, features: np.ndarray) -> np.ndarray:
    """Return the embeddings of features."""
    return head.predict(features, batch_size=4000, verbose=0)


class ClassMeans(Objective):
    """The softmax of the cosines to vectors of classes that stay.

    Args:
        means: (classes, d) of any length.
        **kwargs: Those of `Objective`.
    """

    per_image = True
    reads = ("embedding",)

    def __init__(self, means: np.ndarray, **kwargs: Any):
        super().__init__(**kwargs)
        self.means = tf.constant(unit_rows(means), "float32")
        self.loss = tfdml.losses.NormSoftmaxLoss(scale=20.0)

    def compute(self, representations, labels):
        """Return one value per image."""
        cosines = tf.matmul(representations["embedding"], self.means, transpose_b=True)
        return self.loss.call(labels, cosines)


class Models:
    """An old and a new model of a seed, and the candidates.

    Args:
        side: The images that are trained on.
        seed: Of the first weights and the batches.
    """

    def __init__(self, side: Side, seed: int):
        self.side = side
        self.seed = seed + 1000
        half = side.labels % 2 == 0
        self.old = trained(side.old[half], side.labels[half] // 2, seed)
        self.targets = vectors_of(self.old, side.old)
        self.plain = trained(side.new, side.labels, self.seed)

    def vectors(self, name: str, value: float, features: np.ndarray) -> np.ndarray:
        """Return the vectors of new features by a candidate with a ridge or weight."""
        if name == MAPPED:
            return mapped(self.side.new, self.targets, value, features)
        if name in (VIEWS, MEANS):
            return vectors_of(self.trained(name, value), features)
        vectors = vectors_of(self.plain, features)
        if name == PLAIN:
            return vectors
        turn = Head(DIM, embedding_dim=DIM)
        turn.align(vectors_of(self.plain, self.side.new), self.targets)
        return vectors_of(turn, vectors)

    def trained(self, name: str, weight: float) -> Head:
        """Return a new model that is trained with a term of the old one."""
        features, labels = self.side.new, self.side.labels
        if name == VIEWS:
            views = ("embedding", "old_embedding")
            term = SoftmaxAcrossViews(views=views, shared="left_out", weight=weight)
            return trained(features, labels, self.seed, term, self.targets)
        sums = np.zeros((labels.max() + 1, DIM))
        np.add.at(sums, labels, self.targets)
        return trained(features, labels, self.seed, ClassMeans(sums, weight=weight))


def mapped(
    source: np.ndarray, targets: np.ndarray, ridge: float, vectors: np.ndarray
) -> np.ndarray:
    """Return vectors of length 1 by the linear map of least squares from sources to targets."""
    mean = source.mean(axis=0, dtype=np.float64)
    offset = targets.mean(axis=0, dtype=np.float64)
    products = (source - mean).T @ (source - mean)
    products += ridge * np.trace(products) / len(products) * np.eye(len(products))
    kernel = np.linalg.solve(products, (source - mean).T @ (targets - offset))
    return unit_rows((vectors - mean) @ kernel + offset).astype(np.float32)


def gallery_of(vectors: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arguments of a search in these images without the query's own."""
    own = np.arange(len(labels))
    return {"gallery": vectors, "gallery_labels": labels, "own_rows": own}


def recall(queries: np.ndarray, gallery: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return Recall@1 of each query in a gallery of the same images."""
    return retrieval_per_query(queries, labels, **gallery_of(gallery, labels), metrics=["recall@1"])


def choose(folder: pathlib.Path, name: str) -> dict[str, Any]:
    """Return the trials of each candidate, and the ridges or weights that they choose."""
    path = folder / f"{name}_trials.json"
    if path.exists():
        return json.loads(path.read_text())
    train, measured = sides_of(folder, name, is_trial=True)
    models = Models(train, TRIAL_SEED)
    old = vectors_of(models.old, measured.old)
    results: dict[str, Any] = {"rows": [], "chosen": {}}
    for candidate, values in TRIALS.items():
        finds = {}
        for value in values:
            new = models.vectors(candidate, value, measured.new)
            finds[value] = recall(new, old, measured.labels)["recall@1"].mean()
            itself = recall(new, new, measured.labels)["recall@1"].mean()
            cells = f"{100 * finds[value]:.1f}", f"{100 * itself:.1f}"
            results["rows"].append((name, candidate, value, *cells))
        results["chosen"][candidate] = max(finds, key=finds.__getitem__)
    write_whole(path, json.dumps(results).encode())
    return results


def runs_of(folder: pathlib.Path, name: str, chosen: dict[str, float]) -> list[dict]:
    """Return the vectors of unseen classes by each model, and the labels, of each seed."""
    runs = []
    for seed in SEEDS:
        path = folder / f"{name}_vectors_{seed}.npz"
        if not path.exists():
            train, measured = sides_of(folder, name, is_trial=False)
            models = Models(train, seed)
            vectors = {"old": vectors_of(models.old, measured.old), "labels": measured.labels}
            for candidate, value in chosen.items():
                vectors[candidate] = models.vectors(candidate, value, measured.new)
            np.savez(path, **vectors)
        with np.load(path) as stored:
            runs.append({key: stored[key] for key in stored.files})
    return runs


def add_rows(name: str, runs: list[dict], add: Any) -> None:
    """Write a row of the old model, and of each candidate, means over the seeds."""
    labels = runs[0]["labels"]
    of_old = [recall(run["old"], run["old"], labels) for run in runs]
    of_plain = [recall(run[PLAIN], run[PLAIN], labels) for run in runs]
    add(f"{name}, the old model", mean(of_old), "", mean(of_old), "", *tpir(runs, "old"))
    for candidate in TRIALS:
        across = [recall(run[candidate], run["old"], labels) for run in runs]
        itself = [recall(run[candidate], run[candidate], labels) for run in runs]
        gain = difference(across, of_old, labels)
        loss = "" if candidate in (PLAIN, ROTATED) else difference(itself, of_plain, labels)
        cells = mean(across), gain, mean(itself), loss, *tpir(runs, candidate)
        add(f"{name}, {candidate}", *cells)


def mean(runs: list[dict]) -> str:
    """Return the mean of Recall@1 of several seeds in percent."""
    return f"{100 * np.mean([values['recall@1'] for values in runs]):.1f}"


def difference(first: list, second: list, labels: np.ndarray) -> str:
    """Return how much better the first runs are, in points, with an interval over classes."""
    interval = paired_differences(first, second, labels)["recall@1"]
    ends = f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"
    return f"{100 * interval.mean:+.1f} ({ends})"


def tpir(runs: list[dict], name: str) -> tuple[str, str]:
    """Return the mean TPIR at the threshold of these two models and at the old one's, in
    percent."""
    rates = []
    for run in runs:
        labels = run["labels"]
        sides = gallery_of(run["old"], labels)
        old = calibrate(run["old"], labels, fpir=FPIR, **sides).threshold
        own = calibrate(run[name], labels, fpir=FPIR, **sides).rates["tpir"].mean
        theirs = Searches(run[name], labels, **sides).rates(old, 0.95, True)["tpir"].mean
        rates.append((own, theirs))
    first, second = 100 * np.mean(rates, axis=0)
    return f"{first:.1f}", f"{second:.1f}"


def features_of(model: str, weights: str) -> tuple[EvaluationTransform, Any]:
    """Return the view of a network, and the function from pixels to pooled features."""
    name, size, resize = NETWORKS[model]
    backbone = tfdml.backbones.resolve(name, size, weights)
    network = tfdml.models.Embedder(backbone, 0, image_size=size, resize=resize)

    def pooled(pixels):
        return network.represent(pixels, training=False)["pooled"].numpy()

    return EvaluationTransform.of(network), pooled


def store_features(flags: argparse.Namespace) -> None:
    """Write the pooled features of each data set by both networks, unless they are there."""
    weights = {"old": flags.old_weights, "new": flags.new_weights}
    for name in SETS:
        splits = functools.partial(part_of_set, name, flags.data / name, every=SETS[name])
        for model in NETWORKS:
            network = features_of(model, weights[model])
            store(flags.features / f"{name}_{model}.npz", splits, *network)


def main() -> None:
    """Store features, or measure."""
    parser = command_line(__doc__)
    parser.add_argument("--features", type=pathlib.Path, required=True, help="their folder")
    parser.add_argument("--data", type=pathlib.Path, help="the folder of the data sets")
    parser.add_argument("--old_weights", default="", help="of MobileNetV2 0.35")
    parser.add_argument("--new_weights", default="", help="of MobileNetV2 1.0")
    flags = parser.parse_args()
    if flags.data:
        store_features(flags)
        return
    trials = {name: choose(flags.features, name) for name in SETS}
    results = Results(flags.json)
    add = results.table("trials", "", "candidate", "ridge or weight", "new-old", "new-new")
    for name in SETS:
        for row in trials[name]["rows"]:
            add(*row)
    columns = ("queries", "new-old", "less old-old", "new-new", "less plain")
    add = results.table("table", *columns, "TPIR", "TPIR at the old threshold")
    for name in SETS:
        add_rows(name, runs_of(flags.features, name, trials[name]["chosen"]), add)


if __name__ == "__main__":
    main()
