"""What `tfdml train` gains with no flag but those of data, network and weights, next to alternatives.

    python -m benchmarks.defaults --sets=sets --weights=MNV2_035.weights.h5 --results=runs.json
    python -m benchmarks.defaults --sets=sets --weights=MNV2_035.weights.h5 --results=runs.json --only grocery default
    python -m benchmarks.defaults --results=runs.json --json=docs/numbers/defaults.json     the tables so far
    ... --only omniglot glyphs sample=1.0 sample=0.3 sample=0.1     steps that compare with a share of the classes

--only takes names of data sets, of recipes, or of both. --sets is a folder with a folder (or a link to one) for each
name of `SETS`: docs/defaults.md has the sources. Cars-196 and Omniglot are in their official layouts, and glyphs needs
none. Each run is a process of its own. Its row is written to --results when it ends.
The same command resumes: finished runs are skipped, an interrupted one continues, and one with other flags is repeated.

A gain is Recall@1 on the unseen classes minus that of the untrained network with a random projection. A run that
collapses or diverges has a Recall@1 of 0. One that the data does not suit, such as too few classes for a batch, is
refused: it has no gain, is left out of means, and is the worst.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import resource
import subprocess
import sys

import numpy as np

from benchmarks.study import METRICS, interval, points, with_interval, write_results
from tfdml.training.settings import Experiment, as_text
from tools.numbers import Results, command_line

ROOT = pathlib.Path(__file__).resolve().parents[1]
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
# The share of the classes that a step compares with; the batches are small, as a step draws a class for each image.
SHARES = (1.0, 0.3, 0.1)
SAMPLED = ("--sampling=shuffle", "--batch_size=20", "--epochs=4", "--min_steps=2400")
RECIPES = {
    **CANDIDATES,
    **{f"sample={share}": (f"--objectives=am_softmax(sample={share})", *SAMPLED) for share in SHARES},
    # What the default was: one rate of 1e-4 for all parts, 12 passes over the images.
    "before": ("--recipe=none",),
    "frozen": ("--recipe=frozen",),
    "frozen, whitened": ("--recipe=frozen", "--head=whitened(power=0.5, shrinkage=0.1)"),
    # The rates and batches of configs/small/cars_am_softmax.flags.
    "cars_rates": (
        *("--recipe=none", "--learning_rate=3e-4", "--projection_rate=0.01", "--objective_rate=0.01"),
        *("--sampling=shuffle", "--batch_size=100", "--drop_epochs=8"),
    ),
}
# What begins the message where a data set does not suit a recipe.
_UNSUITED = tuple(f"--{flag}=" for flag in ("classes_per_batch", "images_per_class", "batch_size", "ks"))


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
    """Train a run in a process, or continue it, and return its row."""
    chosen = settings(dataset, recipe, seed, arguments.backbone)
    # Other settings have another folder, so only the same run resumes.
    name = f"{dataset}-{recipe}-{seed}-{hashlib.sha256(chr(10).join(chosen).encode()).hexdigest()[:12]}"
    folder = (arguments.runs / name).resolve()
    resumed, before = (folder / "flags.txt").exists(), _cpu_seconds()
    own = [*flags(dataset, recipe, seed, arguments.backbone), *places(dataset, arguments)]
    command = [sys.executable, "bin/train", *own, "--report=false", f"--run_dir={folder}", *["--resume"] * resumed]
    # On its own sources: a run does not mix two states of the library.
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    seconds = _cpu_seconds() - before
    row = {"dataset": dataset, "recipe": recipe, "seed": seed, "flags": chosen}
    error = done.stderr.splitlines()[-1].partition("error: ")[2] if done.returncode else ""
    if error.startswith(_UNSUITED):
        return row | {"refused": error}
    ended = "collapsed" in error or "diverged" in error
    if done.returncode and not ended:
        raise SystemExit(f"{dataset}, {recipe}, seed {seed}: {error}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    row["before"] = _metrics(records[0]["test"])
    if ended:
        row |= {"ended": error.partition(";")[0], "selected": dict.fromkeys(METRICS, 0.0)}
    else:
        result = json.loads((folder / "result.json").read_text())
        row |= {"selected": _metrics(result["metrics"]), "epoch": result["epoch"], "steps": result["steps"]}
    sizes = json.loads((folder / "data.json").read_text())
    row["sizes"] = {part: {name: sizes[part][name] for name in ("classes", "images")} for part in sizes}
    # Of a run that was continued this is the last part alone.
    return row | ({} if resumed else {"cpu_seconds": round(seconds)})


def _cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _metrics(metrics):
    return {name: metrics[name] for name in METRICS}


def untrained(rows, dataset, metric="recall@1"):
    """The mean metric of untrained networks with a random projection; of all where no run began with one."""
    own = [row for row in rows if row["dataset"] == dataset and "refused" not in row]
    random = [row for row in own if not any(flag.startswith("--head=") for flag in row["flags"])]
    return np.mean([row["before"][metric] for row in random or own])


def recalls(rows, dataset, recipe):
    """Seed to Recall@1 in percent."""
    own = (row for row in rows if (row["dataset"], row["recipe"]) == (dataset, recipe) and "refused" not in row)
    return {row["seed"]: 100 * row["selected"]["recall@1"] for row in own}


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
        "gain": list(means.values()),
        "worst": (worst, means.get(worst)),
        "refused": sorted({row["dataset"] for row in rows if row["recipe"] == recipe and "refused" in row}),
        "over seeds": by_seed,
        "map@r": precision,
        "next to default": list(differences(rows, recipe).values()),
    }


def tables(rows, recipes, results):
    """Print and write the tables: of recipes, of data sets and of gains."""
    recipes = [name for name in recipes if any(row["recipe"] == name for row in rows)]
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
    add = results.table("sampled", "data set", "share", "Recall@1 with all classes", "with the share", "difference")
    for dataset, share in itertools.product(datasets, SHARES[1:]):
        base, own = (recalls(rows, dataset, f"sample={of}") for of in (SHARES[0], share))
        if seeds := sorted(base.keys() & own.keys()):
            means = (f"{np.mean([of[seed] for seed in seeds]):.1f}" for of in (base, own))
            add(dataset, share, *means, with_interval([own[seed] - base[seed] for seed in seeds]))
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
