"""What `tfdml train` gains with no flag but those of data, network and weights, next to alternatives.

    python -m benchmarks.defaults --sets=sets --weights=MNV2_035.weights.h5 --results=runs.json
    python -m benchmarks.defaults --sets=sets --weights=MNV2_035.weights.h5 --results=runs.json --only grocery default
    python -m benchmarks.defaults --results=runs.json --json=docs/numbers/defaults.json     the tables so far

--only takes names of data sets, of recipes, or of both. --sets is a folder with a folder (or a link to one) for each
name of `SETS`: docs/defaults.md has the sources. Cars-196 and Omniglot are in their official layouts, and glyphs needs
none. Each run is a process of its own. Its row is written to --results when it ends.
The same command resumes: finished runs are skipped, an interrupted one continues, and one with other flags is repeated.

A gain is Recall@1 on the unseen classes minus that of the untrained network with a random projection. A run that
collapses or diverges has a Recall@1 of 0. One that the data does not suit, such as too few classes for a batch, is
refused: it has no gain, is left out of means, and is the worst.
"""

import dataclasses
import itertools
import json
import pathlib
import resource

import numpy as np

from benchmarks.study import METRICS, WHITENED, ended, folder_of, interval, points, with_interval, write_results
from benchmarks.study import train as train_run
from tfdml.training.settings import Experiment, as_text
from tools.numbers import Results, command_line

# The network that a data set asks for: a pretrained one at a size for one core, or the one for characters.
BACKBONE = "mobilenetv2(alpha=0.35)"
PRETRAINED = (f"--backbone={BACKBONE}", "--image_size=96", "--resize=112")
CHARACTERS = ("--backbone=conv4", "--batch_norm=train", "--image_size=28", "--resize=32")
SETS = {
    "cars196": ("--dataset=cars196", *PRETRAINED),
    "grocery": ("--dataset=folder", *PRETRAINED),
    "clothing": ("--dataset=folder", *PRETRAINED),
    "emoji": ("--dataset=folder", *PRETRAINED),
    "icons": ("--dataset=folder", *PRETRAINED),
    "omniglot": ("--dataset=omniglot", *CHARACTERS),
    "glyphs": ("--dataset=glyphs", *CHARACTERS),
}
# What the weights of a run begin with, and the flag that its data sets have.
KINDS = {"ImageNet": PRETRAINED[0], "random": CHARACTERS[0]}
# What the default had before: a projection that learned ten times as fast, and before that one from random weights.
FAST = "--projection_rate=1e-3"
# Those that the default is chosen among.
CANDIDATES = {
    "default": (),
    "jrs": ("--objectives=am_softmax + jrs",),
    "am_softmax": ("--objectives=am_softmax",),
    "contrastive": ("--objectives=contrastive",),
    "short": ("--epochs=6", "--min_steps=240"),
    "long": ("--epochs=24", "--min_steps=960"),
    "more_steps": ("--min_steps=960",),
    "wide": ("--embedding_dim=512",),
    "gem": ("--pooling=gem",),
    "decay": ("--weight_decay=5e-4",),
    "shuffled": ("--sampling=shuffle",),
    "crops": ("--augmentation=random_resized_crop",),
    "slow_objective": ("--objective_rate=1e-3",),
    "fast_backbone": ("--learning_rate=3e-4",),
    "fast_projection": (FAST,),
    "linear": ("--head=linear", FAST),
}
RECIPES = {
    **CANDIDATES,
    # What the default was: one rate of 1e-4 for all parts, 12 passes over the images.
    "before": ("--recipe=none",),
    "frozen": ("--recipe=frozen",),
    "frozen, whitened": ("--recipe=frozen", WHITENED),
    # The rates and batches of configs/small/cars_am_softmax.flags.
    "cars_rates": (
        *("--recipe=none", "--learning_rate=3e-4", "--projection_rate=0.01", "--objective_rate=0.01"),
        *("--sampling=shuffle", "--batch_size=100", "--drop_epochs=8"),
    ),
}
# Which embedder is kept. Averages change no step, so theirs are the steps of the default.
SELECTIONS = {
    "ema": ("--ema=0.99",),
    "selection": (
        *("--holdout_classes=0.1", "--holdout_sampling=stratified"),
        *("--selection=validation", "--evaluate_every=1"),
    ),
    "folds": ("--folds=4",),
}
RECIPES |= SELECTIONS
_COLLAPSED = dict.fromkeys(METRICS, 0.0)
# What begins the message where a data set does not suit a recipe.
_UNSUITED = tuple(
    f"--{flag}="
    for flag in ("classes_per_batch", "images_per_class", "batch_size", "holdout_classes", "selection", "ks")
)


def flags(dataset, recipe, seed, backbone=BACKBONE):
    """The flags of a run, without those of places. `backbone` takes the place of the pretrained one."""
    own = [f"--backbone={backbone}" if flag == PRETRAINED[0] else flag for flag in SETS[dataset]]
    # The unseen classes are measured before the first step and after the last alone, unless the recipe asks for more.
    return [*own, "--evaluate_every=0", *RECIPES[recipe], f"--seed={seed}"]


def settings(dataset, recipe, seed, backbone=BACKBONE):
    """The settings of a run that are not the defaults of all runs, as flags; those of its recipe are among them."""
    weights = ["--weights=pretrained"] if PRETRAINED[0] in SETS[dataset] else []
    text = "\n".join([*flags(dataset, recipe, seed, backbone), *weights, "--data_dir=sets", "--run_dir=runs"])
    experiment, places_alone = Experiment.from_flags(text), ("weights", "data_dir", "run_dir")
    chosen = {
        field.name: getattr(experiment, field.name)
        for field in dataclasses.fields(experiment)
        if getattr(experiment, field.name) != field.default and field.name not in places_alone
    }
    return [f"--{name}={as_text(value)}" for name, value in chosen.items()]


def places(dataset, arguments):
    """The flags that say where the images and the weights are."""
    data = [] if dataset == "glyphs" else [f"--data_dir={(arguments.sets / dataset).resolve()}"]
    weights = [f"--weights={arguments.weights.resolve()}"] if PRETRAINED[0] in SETS[dataset] else []
    return [*data, *weights]


def train(dataset, recipe, seed, arguments):
    """Train a run, or continue it, and return its row."""
    chosen = settings(dataset, recipe, seed, arguments.backbone)
    folder = folder_of(arguments.runs, f"{dataset}-{recipe}-{seed}-", chosen)
    resumed, before = (folder / "flags.txt").exists(), _cpu_seconds()
    error = train_run([*flags(dataset, recipe, seed, arguments.backbone), *places(dataset, arguments)], folder)
    seconds = _cpu_seconds() - before
    row = {"dataset": dataset, "recipe": recipe, "seed": seed, "flags": chosen}
    if error.startswith(_UNSUITED):
        return row | {"refused": error}
    if error:
        row |= {"ended": ended(error, f"{dataset}, {recipe}, seed {seed}")}
        row |= {"selected": _COLLAPSED, "last": _COLLAPSED}
    # Of folds the first stands for all where they differ.
    one = folder / "fold_1" if (folder / "fold_1").exists() else folder
    records = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    row["before"] = _kept(records[0]["test"])
    if "ended" not in row:
        result = json.loads((folder / "result.json").read_text())
        ends = [record["test"] for record in records if "test" in record]
        row |= {"selected": _kept(result["metrics"]), "last": _kept(ends[-1])}
        row |= {name: result.get("runs", [result])[0][name] for name in ("epoch", "steps")}
        if "metrics_together" in result:
            row |= {"before": _kept(result["metrics_before"]), "together": _kept(result["metrics_together"])}
        elif "validation" in records[-1]:
            row["epochs"] = [{part: _kept(record[part]) for part in ("validation", "test")} for record in records[1:]]
    sizes = json.loads((one / "data.json").read_text())
    row["sizes"] = {part: {name: sizes[part][name] for name in ("classes", "images")} for part in sizes}
    # Of a run that was continued this is the last part alone.
    return row | ({} if resumed else {"cpu_seconds": round(seconds)})


def _cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _kept(metrics):
    return {name: metrics[name] for name in METRICS}


def untrained(rows, dataset, metric="recall@1"):
    """The mean metric of untrained networks with a random projection; of all where no run began with one."""
    own = [row for row in rows if row["dataset"] == dataset and "refused" not in row]
    random = [row for row in own if not any(flag.startswith("--head=") for flag in row["flags"])]
    return np.mean([row["before"][metric] for row in random or own])


def gains(rows, recipe, metric="recall@1"):
    """Data set to seed to gain, of a recipe, over the untrained networks, in points."""
    found = {}
    for row in rows:
        if row["recipe"] == recipe and "refused" not in row:
            gained = 100 * (row["selected"][metric] - untrained(rows, row["dataset"], metric))
            found.setdefault(row["dataset"], {})[row["seed"]] = gained
    return found


def differences(rows, recipe):
    """Data set to the mean difference in gain of a recipe from `default`, in points, over the seeds that both have."""
    base, found = gains(rows, "default"), {}
    for dataset, seeds in gains(rows, recipe).items():
        both = set(seeds) & set(base.get(dataset, {}))
        if both:
            found[dataset] = float(np.mean([seeds[seed] - base[dataset][seed] for seed in both]))
    return found


def summary(rows, recipe):
    """What is reported of a recipe, in points.

    Returns:
        `gain` and `map@r`: of each data set the mean over its seeds. `over seeds`: the mean over data sets of each seed
        that all of them have. `next to default`: the difference from `default` of each data set, over the seeds that
        both have. `worst`: the data set with the least gain, and this gain. `refused`: the data sets without any.
    """
    found = gains(rows, recipe)
    means = {dataset: float(np.mean(list(seeds.values()))) for dataset, seeds in found.items()}
    everywhere = sorted(set.intersection(*(set(seeds) for seeds in found.values()))) if found else []
    by_seed = [np.mean([seeds[seed] for seeds in found.values()]) for seed in everywhere]
    worst = min(means, key=means.get, default="")
    precision = [np.mean(list(seeds.values())) for seeds in gains(rows, recipe, "map@r").values()]
    return {
        "sets": len(means),
        "runs": sum(len(seeds) for seeds in found.values()),
        "seeds": len(everywhere),
        "gain": list(means.values()),
        "worst": (worst, means.get(worst)),
        "refused": sorted({row["dataset"] for row in rows if row["recipe"] == recipe and "refused" in row}),
        "over seeds": by_seed,
        "map@r": precision,
        "next to default": list(differences(rows, recipe).values()),
    }


def selections(rows):
    """What each choice of an embedder gains in Recall@1, in points: its name to data set to seed to gain.

    The epochs of a run that holds classes out are one run for three choices: its last epoch, and the best by a metric
    on the held-out classes.
    """
    found = {}

    def add(name, row, metrics):
        gained = 100 * (metrics["recall@1"] - untrained(rows, row["dataset"]))
        found.setdefault(name, {}).setdefault(row["dataset"], {})[row["seed"]] = gained

    for row in (row for recipe in RECIPES for row in rows if row["recipe"] == recipe):
        if row["recipe"] in ("default", "ema") and "refused" not in row:
            add("all classes, " + {"default": "last", "ema": "average"}[row["recipe"]], row, row["selected"])
        if "epochs" in row:
            add("held out, last", row, row["epochs"][-1]["test"])
            for metric in METRICS:
                # The last of the best, as a run keeps it where the rate falls.
                best = max(reversed(row["epochs"]), key=lambda epoch: epoch["validation"][metric])
                add(f"held out, best {metric.replace('recall', 'Recall').replace('map@r', 'MAP@R')}", row, best["test"])
        if "together" in row:
            add("4 folds, mean", row, row["selected"])
            add("4 folds, together", row, row["together"])
    return found


def tables(rows, recipes, results):
    """Print and write the tables: of recipes, of data sets and of selections."""
    recipes = [name for name in recipes if name not in SELECTIONS and any(row["recipe"] == name for row in rows)]
    columns = ("from", "recipe", "mean gain", "worst data set", "95 %, data sets", "95 %, seeds", "gain in MAP@R")
    add = results.table("recipes", *columns, "next to default", "data sets, runs")
    for kind, recipe in itertools.product(KINDS, recipes):
        found = summary([row for row in rows if KINDS[kind] in SETS[row["dataset"]]], recipe)
        if not found["sets"] and not found["refused"]:
            continue
        name, least = found["worst"]
        worst = [f"{name} {least:+.1f}"] if name else []
        worst = ", ".join([f"{dataset} refused" for dataset in found["refused"]] or worst)
        paired = "" if recipe == "default" else with_interval(found["next to default"])
        parts = [points(found["gain"]), worst, interval(found["gain"]), interval(found["over seeds"])]
        add(kind, recipe, *parts, points(found["map@r"]), paired, f"{found['sets']}, {found['runs']}")
    datasets = [dataset for dataset in SETS if any(row["dataset"] == dataset for row in rows)]
    add = results.table("sets", "data set", "training classes, images", "test classes, images", "steps", "untrained")
    for dataset in datasets:
        trained = [row for row in rows if row["dataset"] == dataset and "refused" not in row]
        about = [""] * 4
        if trained:
            sizes = [trained[0]["sizes"][part] for part in ("train", "test")]
            about = [f"{size['classes']:,}, {size['images']:,}" for size in sizes]
            steps = [row["steps"] for row in trained if row["recipe"] == "default" and "steps" in row]
            about += [f"{steps[0]:,}" if steps else "", f"{100 * untrained(rows, dataset):.1f}"]
        add(dataset, *about)
    add = results.table("gains", "gain in Recall@1", *datasets)
    for recipe in recipes:
        refused = {row["dataset"] for row in rows if row["recipe"] == recipe and "refused" in row}
        by_set = gains(rows, recipe)
        add(recipe, *("refused" if of in refused else with_interval([*by_set.get(of, {}).values()]) for of in datasets))
    found = selections(rows)
    if len(found) > 1:
        add = results.table("selections", "data set", *found)
        for dataset in SETS:
            own = [by_set.get(dataset, {}) for by_set in found.values()]
            # Means over the seeds that all choices have.
            seeds = set.intersection(*(set(gained) for gained in own if gained)) if any(own) else set()
            if seeds and sum(map(bool, own)) > 1:
                add(dataset, *(points([gained[seed] for seed in seeds if gained]) for gained in own))
    for row in rows:
        if "ended" in row or "refused" in row:
            print(f"{row['dataset']}, {row['recipe']}, seed {row['seed']}: {row.get('ended') or row['refused']}")


def main():
    """Train what is missing, then print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=pathlib.Path, required=True, help="the JSON file of the runs")
    parser.add_argument("--sets", type=pathlib.Path, help="the folder of the data sets; without it nothing is trained")
    parser.add_argument("--weights", type=pathlib.Path, help="of the backbone: a .weights.h5 file")
    parser.add_argument("--backbone", default=BACKBONE, help="the pretrained one")
    parser.add_argument("--only", nargs="*", default=[], help="names of data sets, of recipes, or of both")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/defaults"), help="where they train")
    arguments = parser.parse_args()
    unknown = set(arguments.only) - {*SETS, *RECIPES}
    if unknown:
        parser.error(f"--only: unknown {sorted(unknown)}")
    rows = json.loads(arguments.results.read_text())["runs"] if arguments.results.exists() else []
    datasets, recipes = ([name for name in names if name in arguments.only] or list(names) for names in (SETS, RECIPES))
    if arguments.sets:
        if not arguments.weights and any(PRETRAINED[0] in SETS[dataset] for dataset in datasets):
            parser.error("--weights: name those of the backbone")
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for recipe in recipes:
                for dataset in datasets:
                    same = [
                        row for row in rows if (row["dataset"], row["recipe"], row["seed"]) == (dataset, recipe, seed)
                    ]
                    if same and same[0]["flags"] == settings(dataset, recipe, seed, arguments.backbone):
                        continue
                    row = train(dataset, recipe, seed, arguments)
                    rows = [*(other for other in rows if other not in same), row]
                    write_results({"runs": rows}, arguments.results)
                    found = row.get("refused") or f"{row['selected']['recall@1']:.2%}"
                    print(f"{dataset}, {recipe}, seed {seed}: {found}", flush=True)
    tables([row for row in rows if row["dataset"] in datasets], recipes, Results(arguments.json))


if __name__ == "__main__":
    main()
