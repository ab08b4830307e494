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
import time

import keras
import numpy as np
import tensorflow as tf

import tfdml
from benchmarks.study import (
    MapEmbedder,
    Row,
    courses,
    interval,
    load_maps,
    paired,
    part_of_set,
    points,
    store_maps,
    with_interval,
    write_results,
)
from tfdml.training.optimizers import build_optimizer, rate_schedule
from tools.numbers import Results, command_line

# The data sets of each recipe.
SETS = {
    "finetune": ("cars196", "grocery", "clothing", "emoji", "icons"),
    "scratch": ("glyphs", "omniglot"),
}
# The trials are on these.
TRIED = ("cars196", "clothing", "icons", "glyphs")
BASES = {"finetune": "am_softmax", "scratch": "contrastive"}
STEPS = {"finetune": 480, "scratch": 600}
# After these shares of the steps a run is measured.
SHARES = (0.25, 0.5, 0.75, 1)
# Of the base of `finetune`: of the adapter and the projection.
RATES = (1e-4, 3e-4, 1e-3)
TERMS = {
    "JRD": ("jrs", "jrs", (0.3, 1, 3)),
    "HORDE": ("horde(loss=contrastive, orders=3, dim=128)", "horde", (0.1, 0.5, 2.5)),
    "ECAML": ("ecaml", "ecaml", (0.003, 0.03, 0.3)),
    "DML-DA": ("density(normalize_reference=true)", "density", (0.1, 0.5, 2.5)),
    "RankMI": ("rank_mi(hidden=64)", "rank_mi", (0.1, 0.5, 2.5)),
}
SEEDS = range(100, 103)
SIDE, CROP, WIDTH = 32, 28, 32


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


def run(arguments, results):
    """Train what is missing of a part, row after row of all data sets of a recipe."""
    recipes = [recipe for recipe in SETS if not arguments.only or recipe in arguments.only]
    for recipe in recipes:
        length = [round(share * STEPS[recipe]) for share in SHARES]
        for name, row in rows(recipe).items():
            for dataset in SETS[recipe]:
                if arguments.part == "trials" and dataset not in TRIED:
                    continue
                maps = load(arguments, recipe, dataset, held_out=arguments.part == "trials")
                entries = results.setdefault(arguments.part, {}).setdefault(dataset, {}).setdefault(name, [])
                if arguments.part == "trials" and not row.base:
                    parameters, seeds = [{"rate": rate} for rate in RATES] if recipe == "finetune" else [], [0]
                else:
                    rate = {"rate": chosen(results, recipe, "default", "rate")} if recipe == "finetune" else {}
                    weights = TERMS[name][2] if row.base else [0]
                    if arguments.part == "finals" and row.base:
                        weights = [chosen(results, recipe, name, "weight")]
                    parameters = [{**rate, **({"weight": weight} if row.base else {})} for weight in weights]
                    seeds = [0] if arguments.part == "trials" else SEEDS
                done = [(entry["parameters"], entry["seed"]) for entry in entries]
                # Weights share the graph of a step, rates do not.
                groups = [parameters] if row.base else [[values] for values in parameters]
                for group in groups:
                    left = [values for values in group if any((values, seed) not in done for seed in seeds)]
                    start = time.process_time()
                    options = {"first": functools.partial(learner_of, recipe), "batch": (min(20, maps[1].max() + 1), 5)}
                    if recipe == "scratch":
                        options["view"] = random_crops
                    for values, seed, course in courses(maps, row, left, seeds, length, **options) if left else ():
                        if (values, seed) in done:
                            continue
                        seconds, start = round(time.process_time() - start, 1), time.process_time()
                        entries.append({"parameters": values, "seed": seed, "course": course, "cpu_seconds": seconds})
                        write_results(results, arguments.results)
                        metrics = " ".join(f"{at['recall@1']:.3f}/{at['map@r']:.3f}" for at in course.values())
                        print(f"{dataset} {name} {values} seed {seed}: {metrics} ({seconds})", flush=True)


def main():
    """Store maps and pixels, train what is missing, or print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=pathlib.Path, help="the JSON file")
    parser.add_argument("--features", type=pathlib.Path, help="the folder of the stored maps")
    parser.add_argument("--sets", type=pathlib.Path, help="the folder of the data sets: stores their maps")
    parser.add_argument("--weights", type=pathlib.Path, help="of MobileNetV2 alpha 0.35")
    parser.add_argument("--part", choices=("trials", "finals"))
    parser.add_argument("--only", nargs="*", choices=SETS, default=[], help="recipes")
    arguments = parser.parse_args()
    if arguments.sets:
        return store(arguments)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    if arguments.part:
        run(arguments, results)


if __name__ == "__main__":
    main()
