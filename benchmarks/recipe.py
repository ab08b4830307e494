"""What each of the five methods adds to the recipe `finetune`: `study_plan.md` is the plan.

    python -m benchmarks.recipe --features=features --sets=sets --weights=MNV2_035.weights.h5    stores maps
    python -m benchmarks.recipe --features=features --results=recipe.json --part=trials          chooses the weights
    python -m benchmarks.recipe --features=features --results=recipe.json --part=finals          paired seeds
    python -m benchmarks.recipe --results=recipe.json --json=docs/numbers/recipe.json            the tables so far

--sets is that of `benchmarks.defaults`. Each run adds its entry to --results when it ends. The same command resumes.
"""

import functools
import json
import pathlib

import keras
import numpy as np

import tfdml
from benchmarks.study import (
    METRICS,
    MapEmbedder,
    Row,
    load_maps,
    missing,
    paired,
    part_of_set,
    print_entry,
    store_maps,
    with_interval,
    write_results,
)
from tfdml.evaluation import student_interval
from tfdml.training.optimizers import build_optimizer, rate_schedule
from tools.numbers import Results, command_line

SETS = ("cars196", "grocery", "clothing", "emoji", "icons")
# The trials are on these.
TRIED = ("cars196", "clothing", "icons")
STEPS = 480
# After these steps a trial is measured.
CHECKPOINTS = [120, 240, 360, STEPS]
# Of the adapter and the projection.
RATES = (1e-4, 3e-4, 1e-3)
TERMS = {
    "JRD": ("jrs", "jrs", (0.3, 1, 3, 10)),
    "HORDE": ("horde(loss=contrastive, orders=3, dim=128)", "horde", (0.1, 0.5, 2.5)),
    "ECAML": ("ecaml", "ecaml", (0.003, 0.03, 0.3)),
    "DML-DA": ("density(normalize_reference=true)", "density", (0.1, 0.5, 2.5, 0.02)),
    "RankMI": ("rank_mi(hidden=64)", "rank_mi", (0.1, 0.5, 2.5)),
}
SEEDS = range(100, 103)


def rows():
    """Return the rows: the recipe's loss as `default`, and each method added to it."""
    added = {name: Row(f"am_softmax + {{weight}} * {text}", {}, "default", of) for name, (text, of, _) in TERMS.items()}
    return {"default": Row("am_softmax", {})} | added


def store(arguments):
    """Write `<features>/recipe_<data set>.npz`, the maps of MobileNetV2 alpha 0.35."""
    for dataset in SETS:
        kind = dataset if dataset == "cars196" else "folder"
        splits = functools.partial(part_of_set, kind, arguments.sets / dataset)
        path = arguments.features / f"recipe_{dataset}.npz"
        store_maps(path, "mobilenetv2(alpha=0.35)", 96, arguments.weights, splits)


def learner_of(maps, row, parameters, seed):
    """Return a compiled learner with the first weights of a seed, the head and the rates of the recipe."""
    keras.utils.set_random_seed(seed)
    embedder = MapEmbedder(128)
    embedder.whiten(maps[0][:: -(-len(maps[0]) // 4096)].mean((1, 2)), power=0.5, shrinkage=0.1)
    objectives = row.objectives.format(**parameters)
    learner = tfdml.models.MetricLearner(embedder, objectives, num_classes=maps[1].max() + 1)
    schedule = rate_schedule("cosine", parameters["rate"], STEPS)
    learner.compile(build_optimizer("adam", learner, schedule, {"objectives": 1e-2}))
    return learner


def chosen(results, name, key):
    """Return the value of a parameter with the best MAP@R on held-out classes, on average over the data sets."""
    scores = {}
    for dataset in TRIED:
        for entry in results["trials"].get(dataset, {}).get(name, ()):
            scores.setdefault(entry["parameters"][key], []).append(list(entry["course"].values())[-1]["map@r"])
    most = max(map(len, scores.values()))
    return max((value for value in scores if len(scores[value]) == most), key=lambda value: np.mean(scores[value]))


def parameters_of(results, name, part):
    """Return the parameters of the runs of a row in a part."""
    if name == "default" and part == "trials":
        return [{"rate": rate} for rate in RATES]
    rate = {"rate": chosen(results, "default", "rate")}
    if name == "default":
        return [rate]
    weights = TERMS[name][2] if part == "trials" else [chosen(results, name, "weight")]
    return [{**rate, "weight": weight} for weight in weights]


def run(arguments, results):
    """Train what is missing of a part, row after row of all data sets."""
    part = arguments.part
    # The recipe keeps the last update.
    checkpoints, seeds = (CHECKPOINTS, [0]) if part == "trials" else ([STEPS], SEEDS)
    for name, row in rows().items():
        if arguments.rows and name not in arguments.rows:
            continue
        for dataset in TRIED if part == "trials" else SETS:
            maps = load_maps(arguments.features / f"recipe_{dataset}.npz", part == "trials")
            entries = results.setdefault(part, {}).setdefault(dataset, {}).setdefault(name, [])
            options = {"first": learner_of, "batch": (min(20, maps[1].max() + 1), 5)}
            parameters = parameters_of(results, name, part)
            for entry in missing(entries, maps, row, parameters, seeds, checkpoints, **options):
                write_results(results, arguments.results)
                print_entry(dataset, name, entry)


def tables(results, add_table):
    """Write the trials, and gains by data set, their means, and on how many the interval lies above and below 0."""
    trials, finals = results.get("trials", {}), results.get("finals", {})
    add = add_table("trials", "method, rate or weight", *(f"MAP@R, {dataset}" for dataset in TRIED), "mean")
    for name in rows():
        values = {}
        for entry in (entry for dataset in TRIED for entry in trials.get(dataset, {}).get(name, ())):
            value = entry["parameters"].get("weight", entry["parameters"]["rate"])
            values.setdefault(value, []).append(100 * list(entry["course"].values())[-1]["map@r"])
        for value in sorted(value for value in values if len(values[value]) == len(TRIED)):
            add(
                f"{name}, {value:g}",
                *(f"{precision:.1f}" for precision in values[value]),
                f"{np.mean(values[value]):.2f}",
            )
    sets = [dataset for dataset in SETS if dataset in finals]
    add = add_table("finetune", "method", "weight", *sets, "mean gain", "in MAP@R", "better", "worse")
    for name, row in rows().items():
        runs = [[finals[dataset].get(of, []) for of in (name, "default")] for dataset in sets]
        recalls, precisions = ([paired(*sides, metric, True) for sides in runs] for metric in METRICS)
        if not row.base:
            add(name, "", *(f"{own.mean():.1f}" for own, _ in recalls), *[""] * 4)
        elif all(len(own) > 1 for own, _ in recalls):
            weight = runs[0][0][0]["parameters"]["weight"]
            gains = [own - base for own, base in recalls]
            means = [with_interval([np.mean(own - base) for own, base in of]) for of in (recalls, precisions)]
            intervals = [student_interval(gain) for gain in gains]
            counts = sum(of.low > 0 for of in intervals), sum(of.high < 0 for of in intervals)
            add(name, f"{weight:g}", *map(with_interval, gains), *means, *counts)


def main():
    """Store maps, train what is missing, or print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=pathlib.Path, help="the JSON file")
    parser.add_argument("--features", type=pathlib.Path, help="the folder of the stored maps")
    parser.add_argument("--sets", type=pathlib.Path, help="the folder of the data sets: stores their maps")
    parser.add_argument("--weights", type=pathlib.Path, help="of MobileNetV2 alpha 0.35")
    parser.add_argument("--part", choices=("trials", "finals"))
    parser.add_argument("--rows", nargs="*", choices=rows(), default=[], help="by default all")
    arguments = parser.parse_args()
    if arguments.sets:
        return store(arguments)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    if arguments.part:
        run(arguments, results)
    tables(results, Results(arguments.json).table)


if __name__ == "__main__":
    main()
