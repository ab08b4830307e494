r"""Does the threshold-consistent margin loss narrow the spread of classes? `study_plan.md` has the
plan.

    python -m benchmarks.spread --features=features --data=DATA --weights=MNV2_035.weights.h5 \
        --results=benchmarks/results/spread.json --json=docs/numbers/spread.json

The same command resumes: it skips the features and the runs that are there. Without `--data` it
writes the table of the runs so far.
"""

from __future__ import annotations

import functools
import json
import pathlib

import numpy as np

import tfdml
from benchmarks.study import (
    Row,
    load_maps,
    mean_metrics,
    part_of_set,
    store,
    train_missing,
)
from tfdml.data import EvaluationTransform
from tfdml.evaluation import student_interval, verification
from tfdml.evaluation.identification import Searches, largest_threshold
from tools.numbers import Results, command_line

# Of a data set one of how many classes is taken.
SETS = {"cars196": 1, "omniglot": 2}
BASES = ("multi_similarity", "proxy_anchor")
TERM = "threshold_consistent_margin"
WEIGHTS, PAPER_WEIGHT = (0.1, 0.3, 1.0, 3.0), 1.0
TRIAL_SEEDS, SEEDS = (0,), range(100, 105)
CHECKPOINTS = (250, 500)
# One of how many images is measured.
EVERY = {"trials": 1, "finals": 2}
# The most of Recall@1 that a weight may cost on held-out classes.
COST = 0.005
FAR, FPIR = 0.01, 0.05
# Of the inconsistency score.
RANGE, THRESHOLDS = (0.01, 0.1), 101
# A measure in print, its key, and what it is multiplied by.
MEASURES = {
    "Recall@1": ("recall@1", 100),
    "TAR": ("tar", 100),
    "TAR, worst tenth": ("worst_tar", 100),
    "FAR, worst tenth": ("worst_far", 100),
    "TPIR": ("tpir", 100),
    "TPIR, worst tenth": ("worst_tpir", 100),
    "FPIR, worst tenth": ("worst_fpir", 100),
    "OPIS, thousandths": ("opis", 1000),
}


def features_of(weights):
    """Return the view of the network, and the function from pixels to maps of one position."""
    backbone = tfdml.backbones.resolve("mobilenetv2(alpha=0.35)", 112, weights)
    network = tfdml.models.Embedder(backbone, 0, image_size=112, resize=128)

    def pooled(pixels):
        return network.predict_on_batch(pixels)[:, None, None]

    return EvaluationTransform.of(network), pooled


def row_of(base, regularized):
    """Return a base, or the base with the loss as a term."""
    if not regularized:
        return Row(base, {})
    return Row(f"{base} + {{weight}} * {TERM}", {"weight": WEIGHTS}, base, TERM)


def inconsistency(vectors, labels, nearest, furthest):
    """Return the operating point inconsistency score of Zhang et al.

    Args:
        vectors: (N, d) of length 1.
        labels: (N,).
        nearest: The first of the Euclidean thresholds.
        furthest: The last.
    """
    thresholds = np.linspace(nearest, furthest, THRESHOLDS)
    utilities = []
    for name in np.unique(labels):
        same = labels == name
        cosines = vectors[same] @ vectors.T
        distances = np.sqrt(np.maximum(2 - 2 * cosines, 0))
        # An image and itself are no pair.
        positives = np.sort(distances[:, same], axis=1)[:, 1:]
        sensitivity = accepted_shares(positives, thresholds)
        specificity = 1 - accepted_shares(distances[:, ~same], thresholds)
        utilities.append(2 * sensitivity * specificity / (sensitivity + specificity))
    return float(np.var(utilities, axis=0).mean())


def accepted_shares(distances, thresholds):
    """Return the share of distances up to each of ascending thresholds."""
    bins = np.searchsorted(thresholds, distances.ravel())
    counts = np.bincount(bins, minlength=len(thresholds) + 1)
    return np.cumsum(counts)[:-1] / distances.size


def measure(vectors, labels):
    """Return what is reported of embeddings, by key."""
    pairs = verification(vectors, labels, fars=RANGE)
    point = pairs.points[FAR]
    searches = Searches(vectors, labels)
    threshold = largest_threshold(searches.unknown, FPIR, "euclidean")
    worst = searches.worst(threshold)
    found = searches.right & (searches.nearest <= threshold)
    ends = (pairs.points[far].threshold for far in RANGE)
    return {
        **mean_metrics(vectors, labels),
        "tar": point.tar.mean,
        "worst_tar": point.worst["tar"],
        "worst_far": point.worst["far"],
        "tpir": float(found.mean()),
        "worst_tpir": worst["tpir"],
        "worst_fpir": worst["fpir"],
        "opis": inconsistency(vectors, labels, *ends),
    }


def mean_of(entries, updates, key):
    """Return the mean of a measure over runs, after so many updates."""
    return np.mean([entry["course"][str(updates)][key] for entry in entries])


def chosen(trials, base):
    """Return the length of a base and the weight of the term, of the trials on a data set."""
    runs = trials[base]
    length = max(CHECKPOINTS, key=lambda updates: mean_of(runs, updates, "map@r"))
    floor = mean_of(runs, length, "recall@1") - COST
    scores = {}
    for weight in WEIGHTS:
        of_weight = [
            entry for entry in trials[f"{base} + {TERM}"] if entry["parameters"]["weight"] == weight
        ]
        if mean_of(of_weight, length, "recall@1") >= floor:
            scores[weight] = mean_of(of_weight, length, "opis")
    return length, min(scores, key=scores.get) if scores else WEIGHTS[0]


def run(arguments, results, dataset):
    """Train what is missing of the trials and of the final runs on a data set, base after base."""
    path = arguments.features / f"{dataset}.npz"
    for base in BASES:
        for part in ("trials", "finals"):
            weights, seeds, checkpoints = WEIGHTS, TRIAL_SEEDS, CHECKPOINTS
            if part == "finals":
                length, weight = chosen(results["trials"][dataset], base)
                weights, seeds, checkpoints = [PAPER_WEIGHT], SEEDS, (length,)
                weights += [weight] if weight != PAPER_WEIGHT else []
            train, labels, measured, its_labels = load_maps(path, held_out=part == "trials")
            step = EVERY[part]
            maps = train, labels, measured[::step], its_labels[::step]
            parameters = {base: [{}], f"{base} + {TERM}": [{"weight": w} for w in weights]}
            for name, wanted in parameters.items():
                place, row = (part, dataset, name), row_of(base, name != base)
                options = (maps, row, wanted, seeds, checkpoints, measure)
                train_missing(results, arguments.results, place, *options)


def by_seed(entries, key):
    """Return a measure of the final runs, by seed."""
    return {entry["seed"]: [*entry["course"].values()][-1][key] for entry in entries}


def columns(results):
    """Return the final runs of each base, and those with the term that are paired with them."""
    sides = {}
    for dataset, finals in results.get("finals", {}).items():
        for base in BASES:
            for entry in finals.get(f"{base} + {TERM}", ()):
                key = f"{base}, {dataset}, weight {entry['parameters']['weight']:g}"
                sides.setdefault(key, (finals[base], []))[1].append(entry)
    return {key: side for key, side in sides.items() if len(side[1]) > 1}


def table(results, add_table):
    """Write each measure of a base and its gain by the term."""
    sides = columns(results)
    add = add_table("spread", "measure", *sides)
    for name, (key, scale) in MEASURES.items():
        cells = []
        for alone, regularized in sides.values():
            without, with_term = by_seed(alone, key), by_seed(regularized, key)
            gains = [scale * (with_term[seed] - without[seed]) for seed in with_term]
            interval = student_interval(np.asarray(gains))
            level = scale * np.mean([*without.values()])
            cells.append(
                f"{level:.1f} {interval.mean:+.1f} ({interval.low:+.1f} to {interval.high:+.1f})"
            )
        add(name, *cells)
    add("paired seeds", *(len(regularized) for _, regularized in sides.values()))


def trials_table(results, add_table):
    """Write the measures of each trial after its last update."""
    add = add_table("trials", "on held-out classes", "weight", *MEASURES)
    for dataset, trials in results.get("trials", {}).items():
        for name, entries in trials.items():
            for entry in entries:
                values = entry["course"][str(CHECKPOINTS[-1])]
                cells = [f"{scale * values[key]:.1f}" for key, scale in MEASURES.values()]
                add(f"{name}, {dataset}", entry["parameters"].get("weight", ""), *cells)


def main():
    """Store features, train what is missing, and write the table."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=pathlib.Path, required=True, help="the JSON file")
    parser.add_argument("--features", type=pathlib.Path, help="the folder of the stored features")
    parser.add_argument("--data", type=pathlib.Path, help="the folder of the data sets")
    parser.add_argument("--weights", default="", help="of MobileNetV2 alpha 0.35")
    arguments = parser.parse_args()
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    if arguments.data:
        network = features_of(arguments.weights)
        for name, every in SETS.items():
            splits = functools.partial(part_of_set, name, arguments.data / name, every=every)
            store(arguments.features / f"{name}.npz", splits, *network)
            run(arguments, results, name)
    add_table = Results(arguments.json).table
    trials_table(results, add_table)
    table(results, add_table)


if __name__ == "__main__":
    main()
