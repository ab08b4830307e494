"""Whole networks on Cars-196 with each method: the tables of runs of `bin/train`.

    python -m benchmarks.whole_runs --results=benchmarks/results/ten_cars196.json --json=docs/numbers/ten_cars196.json

--results has the flags and the metrics of each run. `ten_cars196` has ten paired seeds of short runs. `long_cars196`
has runs at the paper's length, with MobileNetV2 1.0 on a GPU. RankMI trained V and the embedder in turns there, in
twice as many steps: now a step does both.
"""

import json
import pathlib

import numpy as np

from benchmarks.study import METRICS
from tfdml.evaluation import paired_differences, seed_difference, student_interval
from tools.numbers import Results, command_line

LONG = ("row", "base", "Recall@1, by seed", "of the base", "gain", "over classes", "over seeds", "gain in MAP@R")
TEN = ("row", "base", "Recall@1", "of the base", "gain", "over seeds", "better with", "gain in MAP@R")


def sides(study, name):
    """Return the runs of a row and of its base by the seeds that both have."""
    own, base = (study["rows"][of]["seeds"] for of in (name, study["rows"][name]["base"]))
    both = [seed for seed in own if seed in base]
    return [[side[seed] for seed in both] for side in (own, base)]


def text(interval):
    """Return an interval in points."""
    return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


def gains(study, name):
    """Return the cells of a row: intervals over paired seeds, or over classes and over seeds."""
    pair = sides(study, name)
    values = {key: np.array([[run["metrics"][key] for run in side] for side in pair]) for key in METRICS}
    recalls = values["recall@1"]
    if study["study"].startswith("ten_"):
        by_seed = {key: student_interval(own - base) for key, (own, base) in values.items()}
        means = [f"{100 * side.mean():.1f}" for side in recalls]
        better = f"{np.sum(recalls[0] > recalls[1])} of {recalls.shape[1]}"
        gain, after = by_seed["recall@1"], [text(by_seed["recall@1"]), better]
    else:
        # Whole classes are drawn, for which the mean of their queries is all that counts.
        labels = np.repeat(study["classes"], study["queries"])
        each = [
            [{key: np.repeat(run["by_class"][key], study["queries"]) for key in METRICS} for run in side]
            for side in pair
        ]
        by_seed = paired_differences(*each, labels)
        means = [" / ".join(f"{100 * recall:.1f}" for recall in side) for side in recalls]
        over_seeds = text(seed_difference(*recalls)) if recalls.shape[1] > 1 else ""
        gain, after = by_seed["recall@1"], [text(by_seed["recall@1"]), over_seeds]
    precision = by_seed["map@r"]
    return [*means, f"{100 * gain.mean:+.1f}", *after, f"{100 * precision.mean:+.1f} ({text(precision)})"]


def tables(study, add_table):
    """Write the tables of gains, and of what was measured on the way."""
    ten = study["study"].startswith("ten_")
    names = [name for name, row in study["rows"].items() if row["base"]]
    several = {name: len(sides(study, name)[0]) > 1 for name in names}
    for key, which in (("table", True), ("one seed", False)):
        if which in several.values():
            add = add_table(key, *(TEN if ten else LONG))
            for name in names:
                if several[name] == which:
                    add(name, study["rows"][name]["base"], *gains(study, name))
    tests = {name: [run.get("tests", {}) for run in row["seeds"].values()] for name, row in study["rows"].items()}
    epochs = sorted({int(epoch) for runs in tests.values() for run in runs for epoch in run})
    if epochs:
        add = add_table("on the way", "row", *(f"{epoch} epochs" for epoch in epochs))
        for name, runs in tests.items():
            means = [np.mean([[run[str(epoch)][key] for key in METRICS] for run in runs], axis=0) for epoch in epochs]
            add(name, *("{:.1f} ({:.1f})".format(*100 * mean) for mean in means))


def main():
    """Print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=pathlib.Path, required=True, help="the JSON file of the runs")
    arguments = parser.parse_args()
    study = json.loads(arguments.results.read_text())
    tables(study, Results(arguments.json).table)


if __name__ == "__main__":
    main()
