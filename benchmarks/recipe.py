"""What each of the five methods adds to the recipes `finetune` and `scratch`: `study_plan.md` is the plan.

    python -m benchmarks.recipe --features=features --sets=sets --weights=MNV2_035.weights.h5    stores maps and images
    python -m benchmarks.recipe --features=features --results=recipe.json --part=trials          chooses the weights
    python -m benchmarks.recipe --features=features --results=recipe.json --part=length          where a base overfits
    python -m benchmarks.recipe --features=features --results=recipe.json --part=finals          paired seeds
    python -m benchmarks.recipe --results=recipe.json --json=docs/numbers/recipe.json            the tables so far

--sets is that of `benchmarks.defaults`. Each run adds its entry to --results when it ends. The same command resumes.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable

import keras
import numpy as np

import tfdml
from benchmarks.study import (
    METRIC_COLUMNS,
    METRICS,
    MapEmbedder,
    Row,
    load,
    load_maps,
    paired,
    part_of_set,
    quadrants_of,
    store,
    train_missing,
    with_interval,
)
from tfdml.data import EvaluationTransform, TrainTransform
from tfdml.evaluation import student_interval
from tfdml.training import Experiment
from tfdml.training.build import make_learner
from tfdml.training.optimizers import build_optimizer, rate_schedule
from tools.numbers import Results, command_line

VIEW = TrainTransform(resize=24, image_size=20)
# Of each method: its term, and the weights of the trials.
TERMS = {
    "JRD": ("jrs", (0.3, 1, 3, 10)),
    "HORDE": ("horde(loss=contrastive, orders=3, dim=128)", (0.1, 0.5, 2.5)),
    "ECAML": ("ecaml", (0.003, 0.03, 0.3)),
    "DML-DA": ("density(normalize_reference=true)", (0.1, 0.5, 2.5, 0.02)),
    "RankMI": ("rank_mi(hidden=64)", (0.1, 0.5, 2.5)),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained of a recipe.

    Args:
        loss: Its loss.
        terms: The methods.
        sets: The data sets, and of how many classes one is taken.
        tried: Those of the trials.
        rates: Of the base in the trials.
        steps: Updates.
        learner: Returns the learner of maps, a row, parameters and a seed.
        view: How a step sees images; None for maps.
    """

    loss: str
    terms: dict[str, tuple]
    sets: dict[str, int]
    tried: tuple[str, ...]
    rates: tuple[float, ...]
    steps: int
    learner: Callable
    view: TrainTransform | None = None

    def rows(self):
        """Return the rows: the loss as `default`, and each method added to it."""
        added = {
            name: Row(f"{self.loss} + {{weight}} * {term}", {}, "default", term.partition("(")[0])
            for name, (term, _) in self.terms.items()
        }
        return {"default": Row(self.loss, {})} | added


def head_of_maps(maps, row, parameters, seed):
    """Return a compiled learner with the first weights of a seed, the head and the rates of `finetune`."""
    keras.utils.set_random_seed(seed)
    embedder = MapEmbedder(128)
    embedder.whiten(maps[0][:: -(-len(maps[0]) // 4096)].mean((1, 2)), power=0.5, shrinkage=0.1)
    objectives = row.objectives.format(**parameters)
    learner = tfdml.models.MetricLearner(embedder, objectives, num_classes=maps[1].max() + 1)
    schedule = rate_schedule("cosine", parameters["rate"], RECIPES["finetune"].steps)
    learner.compile(build_optimizer("adam", learner, schedule, {"objectives": 1e-2}))
    return learner


def network_from_scratch(maps, row, parameters, seed):
    """Return the compiled learner of `scratch`, a whole network."""
    steps = parameters.get("steps", RECIPES["scratch"].steps)
    network = {"backbone": "conv4(width=32)", "image_size": VIEW.image_size, "resize": VIEW.resize}
    terms, rate = row.objectives.format(**parameters), parameters["rate"]
    experiment = Experiment.of_recipe(
        "scratch", run_dir="none", seed=seed, objectives=terms, epochs=1, learning_rate=rate, **network
    )
    return make_learner(experiment, EvaluationTransform(VIEW.resize, VIEW.image_size), maps[1].max() + 1, steps)


RECIPES = {
    "finetune": Recipe(
        loss="am_softmax",
        terms=TERMS,
        sets=dict.fromkeys(("cars196", "grocery", "clothing", "emoji", "icons"), 1),
        tried=("cars196", "clothing", "icons"),
        rates=(1e-4, 3e-4, 1e-3),
        steps=480,
        learner=head_of_maps,
    ),
    "scratch": Recipe(
        loss="contrastive",
        terms=TERMS
        | {"JRD": ("jrs(levels=[pooled, embedding])", (0.3, 1, 3)), "DML-DA": (TERMS["DML-DA"][0], (0.1, 0.5, 2.5))},
        sets={"glyphs": 1, "omniglot": 4},
        tried=("glyphs", "omniglot"),
        rates=(3e-4, 1e-3, 3e-3),
        steps=1200,
        learner=network_from_scratch,
        view=VIEW,
    ),
}


def store_sets(arguments):
    """Write the maps of MobileNetV2 alpha 0.35 as `<features>/recipe_<data set>.npz`, and the images of characters."""
    for name, recipe in RECIPES.items():
        view = (EvaluationTransform(VIEW.resize, VIEW.resize),)
        if not recipe.view:
            view = quadrants_of("mobilenetv2(alpha=0.35)", 96, arguments.weights)
        for dataset, every in recipe.sets.items():
            kind = "folder" if name == "finetune" and dataset != "cars196" else dataset
            splits = functools.partial(part_of_set, kind, arguments.sets / dataset, every=every)
            store(arguments.features / f"recipe_{dataset}.npz", splits, *view)


def load_data(path, recipe, held_out):
    """Return what `load_maps` does; or what `load` does, with the centers of the measured images."""
    if not recipe.view:
        return load_maps(path, held_out)
    train, labels, measured, its_labels = load(path, held_out)
    edge = (VIEW.resize - VIEW.image_size) // 2
    return train, labels, measured[:, edge:-edge, edge:-edge], its_labels


def chosen(results, recipe, name, key):
    """Return the value of a parameter with the best MAP@R on held-out classes, on average over the data sets."""
    scores = {}
    for dataset in recipe.tried:
        for entry in results["trials"].get(dataset, {}).get(name, ()):
            scores.setdefault(entry["parameters"][key], []).append(list(entry["course"].values())[-1]["map@r"])
    most = max(map(len, scores.values()))
    return max((value for value in scores if len(scores[value]) == most), key=lambda value: np.mean(scores[value]))


def parameters_of(results, recipe, name, part):
    """Return the parameters of the runs of a row in a part."""
    if name == "default" and part == "trials":
        return [{"rate": rate} for rate in recipe.rates]
    rate = {"rate": chosen(results, recipe, "default", "rate")}
    if part == "length":
        return [{**rate, "steps": 2 * recipe.steps}]
    if name == "default":
        return [rate]
    if part == "trials":
        # Half as long as the final runs, for want of time.
        length = {"steps": recipe.steps // 2} if recipe.view else {}
        return [{**rate, "weight": weight, **length} for weight in recipe.terms[name][1]]
    return [{**rate, "weight": chosen(results, recipe, name, "weight")}]


def run(arguments, results):
    """Train what is missing of a part, row after row of all data sets."""
    part, recipe = arguments.part, RECIPES[arguments.recipe]
    seeds = range(100, 100 + arguments.seeds) if part == "finals" else [0]
    for name, row in recipe.rows().items():
        if name not in (arguments.rows or recipe.rows()) or (part == "length" and row.base):
            continue
        for dataset in arguments.only or (recipe.sets if part == "finals" else recipe.tried):
            maps = load_data(arguments.features / f"recipe_{dataset}.npz", recipe, part != "finals")
            parameters = parameters_of(results, recipe, name, part)
            steps = parameters[0].get("steps", recipe.steps)
            # A recipe keeps the last update.
            checkpoints = [steps] if part == "finals" else range(steps // 4, steps + 1, steps // 4)
            options = {"first": recipe.learner, "batch": (min(20, maps[1].max() + 1), 5), "view": recipe.view}
            runs = row, parameters, seeds, checkpoints
            train_missing(results, arguments.results, (part, dataset, name), maps, *runs, **options)


def tables(results, add_table):
    """Write the tables of each recipe."""
    for recipe in RECIPES:
        trial_table(results["trials"], recipe, add_table)
        gain_table(results.get("finals", {}), recipe, add_table)
    add = add_table("length", "data set, updates of the base in all", *METRIC_COLUMNS, "by quarters")
    for part, dataset in ((part, dataset) for part in ("trials", "length") for dataset in RECIPES["scratch"].sets):
        for entry in results.get(part, {}).get(dataset, {}).get("default", ()):
            (*_, (steps, last)), rate = entry["course"].items(), entry["parameters"]["rate"]
            course = " ".join(f"{100 * at['recall@1']:.1f}" for at in entry["course"].values())
            add(f"{dataset}, {steps}, rate {rate:g}", *(f"{100 * last[metric]:.1f}" for metric in METRICS), course)


def trial_table(trials, recipe, add_table):
    """Write the MAP@R of the trials on held-out classes, and its mean over the data sets."""
    tried = RECIPES[recipe].tried
    key = "trials" if recipe == "finetune" else f"trials, {recipe}"
    add = add_table(key, "method, rate or weight", *(f"MAP@R, {dataset}" for dataset in tried), "mean")
    for name in RECIPES[recipe].rows():
        values = {}
        for entry in (entry for dataset in tried for entry in trials.get(dataset, {}).get(name, ())):
            value = entry["parameters"].get("weight", entry["parameters"]["rate"])
            values.setdefault(value, []).append(100 * list(entry["course"].values())[-1]["map@r"])
        for value in sorted(value for value in values if len(values[value]) == len(tried)):
            precisions = (f"{precision:.1f}" for precision in values[value])
            add(f"{name}, {value:g}", *precisions, f"{np.mean(values[value]):.2f}")


def gain_table(finals, recipe, add_table):
    """Write the gains by data set, their means, and on how many data sets the interval lies above and below 0."""
    sets = [dataset for dataset in RECIPES[recipe].sets if dataset in finals]
    if not sets:
        return
    add = add_table(recipe, "method", "weight", *sets, "mean gain", "in MAP@R", "better", "worse", "seeds")
    for name, row in RECIPES[recipe].rows().items():
        runs = [[finals[dataset].get(of, []) for of in (name, "default")] for dataset in sets]
        recalls, precisions = ([paired(*sides, metric, True) for sides in runs] for metric in METRICS)
        if not row.base:
            add(name, "", *(f"{own.mean():.1f}" for own, _ in recalls), *[""] * 5)
        elif all(len(own) > 1 for own, _ in recalls):
            weight = runs[0][0][0]["parameters"]["weight"]
            gains = [own - base for own, base in recalls]
            means = [with_interval([np.mean(own - base) for own, base in of]) for of in (recalls, precisions)]
            intervals = [student_interval(gain) for gain in gains]
            counts = sum(of.low > 0 for of in intervals), sum(of.high < 0 for of in intervals)
            add(name, f"{weight:g}", *map(with_interval, gains), *means, *counts, len(gains[0]))


def main():
    """Store maps, train what is missing, or print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=pathlib.Path, help="the JSON file")
    parser.add_argument("--features", type=pathlib.Path, help="the folder of the stored maps")
    parser.add_argument("--sets", type=pathlib.Path, help="the folder of the data sets: stores their maps")
    parser.add_argument("--weights", type=pathlib.Path, help="of MobileNetV2 alpha 0.35")
    parser.add_argument("--recipe", choices=RECIPES, default="finetune")
    parser.add_argument("--part", choices=("trials", "length", "finals"))
    parser.add_argument("--seeds", type=int, default=3, help="of the finals")
    parser.add_argument("--only", nargs="*", default=[], help="data sets; by default all")
    parser.add_argument("--rows", nargs="*", choices=["default", *TERMS], default=[], help="by default all")
    arguments = parser.parse_args()
    if arguments.sets:
        return store_sets(arguments)
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    if arguments.part:
        run(arguments, results)
    tables(results, Results(arguments.json).table)


if __name__ == "__main__":
    main()
