"""Which property of a data set predicts which method helps: the methods on data sets that differ in one property each.

    python -m benchmarks.second_level --omniglot=OMNIGLOT --lists=second_level --results=second_level.json
    python -m benchmarks.second_level --results=second_level.json --plot=second_level.png

Trains every method and its base (`SECOND_LEVEL` in `benchmarks.study_rows`) on each data set of
`benchmarks.second_level_data`. Measures on the contrastive base the overlap of the distances of pairs of unseen
classes, lambda, and the H-divergence between seen and unseen classes. Prints both, and the rank correlation of each
property with the gain of each method. The same command resumes where it stopped.
"""

import itertools
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
from scipy import stats

from benchmarks.second_level_data import VARIANTS, write
from benchmarks.study import ROOT, run_folder, train, write_results
from benchmarks.study_rows import SECOND_LEVEL
from benchmarks.study_table import gains
from tools.numbers import Results, command_line

MEASURED_ON = "contrastive"
PROPERTIES = {"unseen_overlap": "overlap of d+ and d-", "lambda": "lambda", "h_divergence": "H-divergence"}
MARKERS = "osD^vP"
COUNTED = {"classes": "training classes", "images": "images a class"}


def measure(folder):
    """Return the properties of a run's data set."""
    path = folder / "generalization.json"
    command = [sys.executable, "bin/evaluate", f"--model={folder}", "--generalization", f"--json={path}"]
    subprocess.run(command, cwd=ROOT, check=True)
    figures = json.loads(path.read_text())["generalization"]
    data = json.loads((folder / "data.json").read_text())["train"]
    counts = {"classes": data["classes"], "images": data["images"] / data["classes"]}
    return {name: figures[name] for name in PROPERTIES} | counts


def run(variant, seed, rows, omniglot, lists, place, measurements, results):
    """Train the missing runs of a data set with a seed; write the results after every run."""
    flags = [f"--data_dir={write(variant, omniglot, lists).resolve()}"]
    study = measurements.setdefault(variant.name, {"rows": {}})
    for row in rows:
        runs = study["rows"].setdefault(row.name, {"base": row.base, "flags": row.command(), "seeds": {}})
        if str(seed) in runs["seeds"]:
            continue
        folder = run_folder(place, row, seed, flags)
        runs["seeds"][str(seed)] = train(row, seed, study, folder, flags)
        if row.name == MEASURED_ON:
            study.setdefault("properties", {})[str(seed)] = measure(folder)
        shutil.rmtree(folder)
        write_results(measurements, results)


def table(measurements):
    """Return each data set's properties, means over seeds, and each method's gain as (mean, low, high), in points."""
    rows = {}
    for name, study in measurements.items():
        by_method = {}
        for row in gains(study):
            gain = row["gain"]["recall@1"]
            by_method[row["name"].removeprefix("+ ")] = tuple(100 * v for v in (gain.mean, gain.low, gain.high))
        measured = study["properties"].values()
        properties = {column: np.mean([one[column] for one in measured]) for column in [*COUNTED, *PROPERTIES]}
        rows[name] = (properties, by_method)
    return rows


def show(rows, results):
    """Add both tables."""
    methods = list(next(iter(rows.values()))[1])
    columns = {**COUNTED, **PROPERTIES}
    add = results.table("table", "data set", *columns.values(), *methods)
    for name, (properties, by_method) in rows.items():
        gained = [
            "{:+.1f} ({:+.1f} to {:+.1f})".format(*by_method[method]) if method in by_method else ""
            for method in methods
        ]
        add(name, *(f"{properties[column]:.3g}" for column in columns), *gained)
    add = results.table("correlations", "rank correlation of the gain with", *methods)
    for column, words in columns.items():
        cells = []
        for method in methods:
            pairs = [
                (properties[column], by_method[method][0])
                for properties, by_method in rows.values()
                if method in by_method
            ]
            differ = len({value for value, _ in pairs}) > 1
            cells.append(f"{stats.spearmanr(*zip(*pairs, strict=True)).statistic:+.2f}" if differ else "")
        add(words, *cells)


def draw(rows, path):
    """Draw the gain of each method over each property as a PNG, with its interval over classes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    methods = list(next(iter(rows.values()))[1])
    figure, panels = pyplot.subplots(
        len(methods), len(PROPERTIES), figsize=(11, 2.1 * len(methods)), sharey="row", sharex="col"
    )
    for line, method in zip(panels, methods, strict=True):
        for panel, column in zip(line, PROPERTIES, strict=True):
            for (name, (properties, by_method)), marker in zip(rows.items(), itertools.cycle(MARKERS), strict=False):
                mean, low, high = by_method.get(method, [np.nan] * 3)
                (drawn,) = panel.plot(properties[column], mean, marker, ms=7, label=name)
                panel.plot([properties[column]] * 2, [low, high], color=drawn.get_color(), lw=1.5)
            panel.axhline(0, color="gray", lw=1)
            panel.margins(x=0.1)
        line[0].set_ylabel(f"{method}\ngain, points")
    for panel, words in zip(panels[-1], PROPERTIES.values(), strict=True):
        panel.set_xlabel(f"{words}, of the contrastive base")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncols=len(names), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=110)


def main():
    """Train what is missing, then print the tables."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=pathlib.Path, required=True, help="the JSON file")
    parser.add_argument("--omniglot", help="the folder of Omniglot; without it nothing is trained")
    parser.add_argument("--seeds", type=int, default=3)
    names = [row.name for row in SECOND_LEVEL]
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help="these and the base")
    parser.add_argument("--lists", type=pathlib.Path, default=pathlib.Path("second_level"), help="where images are put")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/second_level"), help="where runs train")
    parser.add_argument("--plot", type=pathlib.Path, help="a PNG")
    arguments = parser.parse_args()
    measurements = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    if arguments.omniglot:
        # Of the base are the properties, which the tables need.
        chosen = [row for row in SECOND_LEVEL if row.name in {MEASURED_ON, *arguments.rows}]
        places = (arguments.omniglot, arguments.lists, arguments.runs)
        for seed in range(arguments.seeds):
            for variant in VARIANTS:
                run(variant, seed, chosen, *places, measurements, arguments.results)
    rows = table(measurements)
    show(rows, Results(arguments.json))
    if arguments.plot:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
