"""Measure what interpolated weights return of what fine-tuning forgets.

  python -m benchmarks.forgetting --cars=CARS196 --omniglot=OMNIGLOT --weights=MNV2_035.weights.h5

Plan, written before the runs. MobileNetV2 (alpha 0.35, 96 px, weights of ImageNet) is fine-tuned on
a target, and measured on the unseen classes of the target and on a second data set, before and
after. The pairs: Cars-196 and Omniglot, Omniglot and Cars-196, glyphs and Cars-196. The embedding
is the pooled features behind a projection that starts as the identity, so that the start is a
working embedder. 96 steps of 100 images (20 classes of 5), multi-similarity loss, Adam at a
constant rate of 3e-4, BatchNorm frozen, no flips of characters, three seeds.

Interpolated: shares 0.25, 0.5, 0.75 and 0.875 between start and end. The baselines: the end, and
shorter runs, which are the same run after 6, 12, 24 and 48 steps, as the rate is constant.
All scores are Recall@1. Half of the classes of the target's test split and half of those of the
second data set choose the share, and the shorter run; the other half measure it. Chosen is the
largest mean of the two scores, each as a share of its way: of the target from start to end, of the
second data set from end to start.

The rule: interpolation is added if, in at least two pairs of three and in the mean, the chosen
share's way is longer than that of the chosen shorter run, with the same sign in all seeds of these.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import keras
import numpy as np

import tfdml
from tfdml import backbones
from tfdml.data import EvaluationTransform, ImageDataset, TrainTransform, load
from tfdml.data.pipeline import readable_views, training_batches
from tfdml.data.sampling import ClassBalancedSampler
from tfdml.evaluation import evaluate_retrieval
from tools.numbers import Results, command_line

# Recall@1 of the halves that choose and measure, by data set and state.
Scores = dict[str, dict[str, list[float]]]
SIZE = 96
RESIZE = 112
STEPS = 96
SHORTER = (6, 12, 24, 48)
SHARES = (0.25, 0.5, 0.75, 0.875)
# Of each half of the classes that choose or measure.
CLASSES = {"cars196": 18, "omniglot": 36, "glyphs": 36}
PAIRS = (("cars196", "omniglot"), ("omniglot", "cars196"), ("glyphs", "cars196"))
EVALUATION = EvaluationTransform(RESIZE, SIZE)


def halves(name: str, folder: str) -> list[ImageDataset]:
    """Return the two halves of some of the classes of a test split, decoded."""
    test = load(name, folder, "test")
    classes = np.random.default_rng(0).permutation(test.classes)
    count = CLASSES[name]
    parts = []
    for first in (0, count):
        part = test.select_classes(classes[first : first + count])
        batches = readable_views(part.images, EVALUATION, 100)
        views = np.concatenate([views for _, views in batches])
        parts.append(ImageDataset(name, "test", views, part.labels))
    return parts


class Study:
    """Fine-tunings on one target, and their measures.

    Args:
        flags: Of the command line.
        target: The data set to fine-tune on.
        other: The one to forget.
    """

    def __init__(self, flags: argparse.Namespace, target: str, other: str):
        folders = {"cars196": flags.cars, "omniglot": flags.omniglot, "glyphs": ""}
        self.train = load(target, folders[target], "train").contiguous()
        self.flip = target == "cars196"
        self.parts = {"target": halves(target, folders[target])}
        self.parts["other"] = halves(other, folders[other])
        backbone = backbones.resolve("mobilenetv2", SIZE, flags.weights, alpha=0.35)
        self.embedder = tfdml.models.Embedder(
            backbone,
            embedding_dim=flags.embedding_dim,
            image_size=SIZE,
            resize=RESIZE,
            batch_norm=flags.batch_norm,
        )
        self.embedder(np.zeros((1, SIZE, SIZE, 3), np.float32))
        self.start = self.embedder.get_weights()

    def measure(self) -> dict[str, list[float]]:
        """Return Recall@1 of the halves that choose and measure, by data set."""
        scores = {}
        for name, parts in self.parts.items():
            scores[name] = []
            for part in parts:
                embeddings = self.embedder.predict(part.images.pixels(), batch_size=100, verbose=0)
                result = evaluate_retrieval(embeddings, part.labels, ks=(1,), metrics=("recall",))
                scores[name].append(result["recall@1"])
        return scores

    def batches(self, seed: int):
        """Return the training batches."""
        transform = TrainTransform("random_crop", RESIZE, SIZE, flip=self.flip)
        sampler = ClassBalancedSampler(self.train.labels, 20, 5, seed)
        return training_batches(self.train, sampler, transform, seed=seed, num_steps=STEPS)

    def run(self, seed: int) -> Scores:
        """Return the measures of the start, the shorter runs, the shares and the end, by name."""
        keras.utils.set_random_seed(seed)
        self.embedder.set_weights(self.start)
        loss = tfdml.losses.MultiSimilarityLoss()
        learner = tfdml.models.MetricLearner(self.embedder, loss)
        learner.compile(keras.optimizers.Adam(3e-4))
        scores = {"start": self.measure()}
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs=None: self._note(batch + 1, scores)
        )
        learner.fit(self.batches(seed), epochs=1, callbacks=[callback], verbose=2)
        end = self.embedder.get_weights()
        scores["end"] = self.measure()
        for share in SHARES:
            pairs = zip(self.start, end, strict=True)
            self.embedder.set_weights([(1 - share) * one + share * two for one, two in pairs])
            scores[f"share {share}"] = self.measure()
        return scores

    def _note(self, step: int, scores: dict) -> None:
        if step in SHORTER:
            scores[f"step {step}"] = self.measure()


def ways(scores: Scores, name: str, half: int) -> tuple[float, float]:
    """Return how far a state is on the way of the target, start to end, and back on that of the
    second data set."""
    start, end, state = scores["start"], scores["end"], scores[name]
    learned = end["target"][half] - start["target"][half]
    forgotten = start["other"][half] - end["other"][half]
    first = (state["target"][half] - start["target"][half]) / learned
    return first, (state["other"][half] - end["other"][half]) / forgotten


def chosen(scores: Scores, kind: str) -> str:
    """Return the state of a kind with the longest way on the half that chooses."""
    names = [name for name in scores if name.startswith(kind)]
    return max(names, key=lambda name: sum(ways(scores, name, 0)))


def percent(values: list[float]) -> str:
    """Return the mean of fractions as percent."""
    return f"{100 * np.mean(values):.1f}"


def write_tables(folder: pathlib.Path, results: Results) -> None:
    """Write the tables of the runs that are there."""
    runs: dict[str, list[Scores]] = {}
    for target, other in PAIRS:
        paths = sorted(folder.glob(f"*_{target}.json"))
        runs[f"{target}, {other}"] = [json.loads(path.read_text()) for path in paths]
    names = ["start", *(f"step {n}" for n in SHORTER), *(f"share {s}" for s in SHARES), "end"]
    add = results.table("states", "pair", "state", "target", "second", "mean of both ways")
    for pair, pair_runs in runs.items():
        for name in names:
            cells = []
            for side in ("target", "other"):
                cells.append(percent([run[name][side][1] for run in pair_runs]))
            add(pair, name, *cells, percent([sum(ways(run, name, 1)) / 2 for run in pair_runs]))
    add = results.table("chosen", "pair", "seed", "share", "way", "steps", "its way", "difference")
    for pair, pair_runs in runs.items():
        for seed, run in enumerate(pair_runs):
            cells = []
            means = []
            for kind in ("share", "step"):
                name = chosen(run, kind)
                means.append(sum(ways(run, name, 1)) / 2)
                cells += [name.partition(" ")[2], percent([means[-1]])]
            add(pair, seed, *cells, f"{100 * (means[0] - means[1]):+.1f}")


def main() -> None:
    """Run what is not there yet, and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--cars", required=True)
    parser.add_argument("--omniglot", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--batch_norm", default="frozen")
    parser.add_argument("--embedding_dim", type=int, default=0)
    parser.add_argument("--runs", default="runs/forgetting", help="Where finished runs are kept.")
    parser.add_argument("--only", default="", help="The runs of one target alone.")
    flags = parser.parse_args()
    folder = pathlib.Path(flags.runs)
    folder.mkdir(parents=True, exist_ok=True)
    for target, other in PAIRS:
        study = None
        for seed in range(3):
            path = folder / f"{seed}_{target}.json"
            if path.is_file() or flags.only not in ("", target):
                continue
            study = study or Study(flags, target, other)
            path.write_text(json.dumps(study.run(seed)))
    if not flags.only:
        write_tables(folder, Results(flags.json))


if __name__ == "__main__":
    main()
