"""The study of docs/results.md: every method and its base, with several seeds.

    python -m benchmarks.study --study=ten_cars196 --data_dir=CARS196 --weights=MNV2_035.weights.h5 --results=study.json
    python -m benchmarks.study --results=study.json        what has been measured so far

Runs every row of `benchmarks.study_rows` with each seed, and keeps of each what the table is made of: its metrics on
the unseen classes, by class, in one JSON file that is written after every run. The same command resumes where it
stopped, and resumes an interrupted run. With --rows only some are run. Without --study nothing is trained.
"""

import hashlib
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np

from benchmarks.study_rows import STUDIES
from benchmarks.study_table import KEPT, pairs_seeds, tables
from tfdml.evaluation import QueryValues
from tfdml.io.files import write_whole
from tools.numbers import Results, command_line

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run_folder(place, row, seed, flags):
    """Return the folder of a run below `place`; other flags have another folder, so only the same run is resumed."""
    settings = "\n".join([*row.command(), *flags, str(seed)])
    return place.resolve() / hashlib.sha256(settings.encode()).hexdigest()[:12]


def train(row, seed, study, folder, flags):
    """Train or resume a run, and return its entry; of a run that collapsed or diverged, the message."""
    resume = ["--resume"] if (folder / "flags.txt").exists() else []
    command = [sys.executable, "bin/train", *row.command(), f"--seed={seed}", f"--run_dir={folder}", "--report=false"]
    # On its own sources: a run does not mix two states of the library.
    done = subprocess.run([*command, *flags, *resume], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode:
        last = done.stderr.splitlines()[-1].partition("error: ")[2]
        if "collapsed" in last or "diverged" in last:
            return {"ended": last.partition(";")[0]}
        raise SystemExit(f"{row.name}, seed {seed}: {last}")
    result = json.loads((folder / "result.json").read_text())
    queries = QueryValues.read(folder / "queries.npz")
    classes, counts = np.unique(queries.labels, return_counts=True)
    known = {"classes": classes.tolist(), "queries": counts.tolist()}
    for name, value in known.items():
        if study.setdefault(name, value) != value:
            raise SystemExit(f"{folder}: other test images than those of the runs before it")
    if pairs_seeds(study):
        # Few enough numbers to be kept in the repository, so that any machine can go on.
        return {"metrics": {name: result["metrics"][name] for name in KEPT}, "train_seconds": result["train_seconds"]}
    by_class = {name: class_means(queries.values[name], queries.labels) for name in KEPT}
    entry = ("epoch", "metrics", "metrics_before", "train_seconds")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # What the epoch was chosen by.
    chosen = next((record.get("validation") for record in records if record["epoch"] == result["epoch"]), None)
    validation = {name: chosen[name] for name in KEPT} if chosen else None
    found = {**{name: result.get(name) for name in entry}, "validation": validation, "by_class": by_class}
    return {**found, "tests": tests_of(records)}


def tests_of(records):
    """The metrics on the unseen classes after each epoch that was followed by such a test."""
    return {str(r["epoch"]): {name: r["test"][name] for name in KEPT} for r in records if "test" in r}


def class_means(values, labels):
    """The mean of a metric over the queries of each class, in the order of the class ids."""
    return [round(float(values[labels == label].mean()), 6) for label in np.unique(labels)]


def write_results(found, path):
    """Write the results so far atomically."""
    write_whole(str(path), (json.dumps(found, separators=(",", ":")) + "\n").encode())


def main():
    """Train what is missing, then print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--results", type=pathlib.Path, required=True, help="the JSON file")
    parser.add_argument("--study", choices=sorted(STUDIES))
    parser.add_argument("--data_dir")
    parser.add_argument("--weights", default="", help="of the backbone, where the study starts from some")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--rows", nargs="*", default=[], help="to train and to print; by default all")
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/study"), help="where they train")
    arguments = parser.parse_args()
    study = json.loads(arguments.results.read_text()) if arguments.results.exists() else {"rows": {}}
    if arguments.study:
        unknown = set(arguments.rows) - {row.name for row in STUDIES[arguments.study]}
        if unknown or study.setdefault("study", arguments.study) != arguments.study:
            parser.error(f"--rows: unknown {sorted(unknown)}" if unknown else f"{arguments.results}: of another study")
        if not arguments.data_dir:
            parser.error("--data_dir: name the folder of the images")
        flags = [f"--data_dir={pathlib.Path(arguments.data_dir).resolve()}"]
        flags += [f"--weights={pathlib.Path(arguments.weights).resolve()}"] if arguments.weights else []
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for row in STUDIES[arguments.study]:
                runs = study["rows"].setdefault(row.name, {"base": row.base, "flags": row.command(), "seeds": {}})
                if str(seed) in runs["seeds"] or (arguments.rows and row.name not in arguments.rows):
                    continue
                folder = run_folder(arguments.runs, row, seed, flags)
                runs["seeds"][str(seed)] = train(row, seed, study, folder, flags)
                write_results(study, arguments.results)
                shutil.rmtree(folder)
                entry = runs["seeds"][str(seed)]
                found = entry.get("ended") or f"{entry['metrics']['recall@1']:.2%}"
                print(f"{row.name}, seed {seed}: {found}", flush=True)
    results = Results(arguments.json)
    for key, (columns, rows) in tables(study).items():
        chosen = [row for row in rows if not arguments.rows or row[0] in arguments.rows]
        add = results.table(key, *columns) if chosen else None
        for row in chosen:
            add(*row)


if __name__ == "__main__":
    main()
