"""What each of the five methods adds to the default recipes: `study_plan.md` is the plan.

    python -m benchmarks.recipe --features=features --sets=sets --weights=MNV2_035.weights.h5    stores maps and pixels
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
import tensorflow as tf

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

# The data sets of each recipe.
SETS = {
    "finetune": ("cars196", "grocery", "clothing", "emoji", "icons"),
    "scratch": ("glyphs", "omniglot"),
}
# The trials are on these.
TRIED = ("cars196", "clothing", "icons")
BASES = {"finetune": "am_softmax", "scratch": "contrastive"}
STEPS = {"finetune": 480, "scratch": 600}
# After these shares of the steps a run is measured.
SHARES = (0.25, 0.5, 0.75, 1)
# Of the base of `finetune`: of the adapter and the projection.
RATES = (1e-4, 3e-4, 1e-3)
TERMS = {
    "JRD": ("jrs", "jrs", (0.3, 1, 3, 10)),
    "HORDE": ("horde(loss=contrastive, orders=3, dim=128)", "horde", (0.1, 0.5, 2.5)),
    "ECAML": ("ecaml", "ecaml", (0.003, 0.03, 0.3)),
    "DML-DA": ("density(normalize_reference=true)", "density", (0.1, 0.5, 2.5, 0.02)),
    "RankMI": ("rank_mi(hidden=64)", "rank_mi", (0.1, 0.5, 2.5)),
}
SEEDS = range(100, 103)
SIDE, CROP = 32, 28


def rows(recipe):
    """Return the rows of a recipe: itself as `default`, and each method added to it."""
    base = BASES[recipe]
    added = {name: Row(f"{base} + {{weight}} * {text}", {}, "default", term) for name, (text, term, _) in TERMS.items()}
    return {"default": Row(base, {})} | added


def store(arguments):
    """Write `<features>/recipe_<data set>.npz`: the maps of MobileNetV2 alpha 0.35, or the pixels of characters."""
    for dataset in SETS["finetune"]:
        kind = dataset if dataset == "cars196" else "folder"
        splits = functools.partial(part_of_set, kind, arguments.sets / dataset)
        path = arguments.features / f"recipe_{dataset}.npz"
        store_maps(path, "mobilenetv2(alpha=0.35)", 96, arguments.weights, splits)
    for dataset, every in zip(SETS["scratch"], (1, 4), strict=True):
        stored, view = {}, tfdml.data.EvaluationTransform(resize=SIDE, image_size=SIDE)
        for split in ("train", "test"):
            images = part_of_set(dataset, arguments.sets / dataset, split, every)
            batches = tfdml.data.evaluation_batches(images, view, 500)
            stored[split] = np.concatenate([np.asarray(pixels)[..., :1] for pixels, _ in batches]).astype("uint8")
            stored[f"{split}_labels"] = images.labels
        np.savez(arguments.features / f"recipe_{dataset}.npz", **stored)


def load(arguments, recipe, dataset, held_out):
    """Return what `load_maps` does; of characters the images, those that are measured as central crops."""
    path = arguments.features / f"recipe_{dataset}.npz"
    if recipe == "finetune":
        return load_maps(path, held_out)
    train, labels, measured, its_labels = load_maps(path, held_out, components=0)
    edge = (SIDE - CROP) // 2
    return train, labels, np.repeat(measured[:, edge:-edge, edge:-edge], 3, -1), its_labels


def random_crops(rows, images):
    """Return a crop of characters at a place of the batch's own, half of them mirrored, from the rows alone."""
    seed = tf.cast(rows[:2], "int32")
    crops = tf.image.stateless_random_crop(images, (tf.shape(images)[0], CROP, CROP, 1), seed)
    return tf.repeat(tf.image.stateless_random_flip_left_right(crops, seed), 3, -1)


def learner_of(recipe, maps, row, parameters, seed):
    """Return a compiled learner with the first weights of a seed, the head and the rates of a recipe."""
    keras.utils.set_random_seed(seed)
    if recipe == "finetune":
        embedder, rates = MapEmbedder(128), {"objectives": 1e-2}
        embedder.whiten(maps[0][:: -(-len(maps[0]) // 4096)].mean((1, 2)), power=0.5, shrinkage=0.1)
    else:
        embedder, rates = tfdml.models.Embedder("conv4(width=32)", 128, image_size=CROP, batch_norm="train"), {}
    objectives = row.objectives.format(**parameters)
    learner = tfdml.models.MetricLearner(embedder, objectives, num_classes=maps[1].max() + 1)
    schedule = rate_schedule("cosine", parameters.get("rate", 1e-3), STEPS[recipe])
    learner.compile(build_optimizer("adam", learner, schedule, rates))
    return learner


def chosen(results, recipe, name, key):
    """Return the value of a parameter with the best MAP@R on held-out classes, on average over the data sets."""
    scores = {}
    for dataset in SETS[recipe]:
        for entry in results["trials"].get(dataset, {}).get(name, ()):
            scores.setdefault(entry["parameters"][key], []).append(list(entry["course"].values())[-1]["map@r"])
    most = max(map(len, scores.values()))
    return max((value for value in scores if len(scores[value]) == most), key=lambda value: np.mean(scores[value]))


def parameters_of(results, recipe, name, part):
    """Return the parameters of the runs of a row in a part."""
    if name == "default" and part == "trials" and recipe == "finetune":
        return [{"rate": rate} for rate in RATES]
    rate = {"rate": chosen(results, recipe, "default", "rate")} if recipe == "finetune" else {}
    if name == "default":
        return [rate]
    weights = TERMS[name][2]
    if part == "finals":
        weights = [chosen(results, recipe, name, "weight")] if recipe == "finetune" else weights[1:2]
    return [{**rate, "weight": weight} for weight in weights]


def run(arguments, results):
    """Train what is missing of a part, row after row of all data sets of a recipe."""
    part = arguments.part
    for recipe in arguments.only or SETS:
        # The recipe keeps the last update.
        shares = SHARES if part == "trials" or recipe == "scratch" else SHARES[-1:]
        checkpoints = [round(share * STEPS[recipe]) for share in shares]
        for name, row in rows(recipe).items():
            if arguments.rows and name not in arguments.rows:
                continue
            for dataset in SETS[recipe]:
                if part == "trials" and dataset not in TRIED:
                    continue
                maps = load(arguments, recipe, dataset, held_out=part == "trials")
                entries = results.setdefault(part, {}).setdefault(dataset, {}).setdefault(name, [])
                options = {"first": functools.partial(learner_of, recipe), "batch": (min(20, maps[1].max() + 1), 5)}
                if recipe == "scratch":
                    options["view"] = random_crops
                seeds = [0] if part == "trials" else SEEDS
                wanted = parameters_of(results, recipe, name, part)
                for entry in missing(entries, maps, row, wanted, seeds, checkpoints, **options):
                    write_results(results, arguments.results)
                    print_entry(dataset, name, entry)


def tables(results, add_table):
    """Write the trials, and gains by data set, their means, and on how many the interval lies above and below 0."""
    trials, finals = results.get("trials", {}), results.get("finals", {})
    add = add_table("trials", "method, rate or weight", *(f"MAP@R, {dataset}" for dataset in TRIED), "mean")
    for name in rows("finetune"):
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
    for recipe, sets in SETS.items():
        sets = [dataset for dataset in sets if dataset in finals]
        if not sets:
            continue
        add = add_table(recipe, "method", "weight", *sets, "mean gain", "in MAP@R", "better", "worse")
        for name, row in rows(recipe).items():
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
    """Store maps and pixels, train what is missing, or print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=pathlib.Path, help="the JSON file")
    parser.add_argument("--features", type=pathlib.Path, help="the folder of the stored maps")
    parser.add_argument("--sets", type=pathlib.Path, help="the folder of the data sets: stores their maps")
    parser.add_argument("--weights", type=pathlib.Path, help="of MobileNetV2 alpha 0.35")
    parser.add_argument("--part", choices=("trials", "finals"))
    parser.add_argument("--only", nargs="*", choices=SETS, default=[], help="recipes")
    parser.add_argument("--rows", nargs="*", choices=rows("scratch"), default=[], help="by default all")
    arguments = parser.parse_args()
    if arguments.sets:
        return store(arguments)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    if arguments.part:
        run(arguments, results)
    tables(results, Results(arguments.json).table)


if __name__ == "__main__":
    main()
