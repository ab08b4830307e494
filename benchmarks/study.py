"""What a method gains over its base: runs of every row of a study with each seed, and the table of their gains.

    python -m benchmarks.study --study=ten_cars196 --data_dir=CARS196 --weights=MNV2_035.weights.h5 --results=study.json
    python -m benchmarks.study --results=study.json        what has been measured so far

Keeps the metrics of each run on the unseen classes in --results. The same command skips what is there, as after it was
stopped, and resumes an interrupted run. With --rows only some are run. Without --study nothing is trained.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np

from tfdml.evaluation import student_interval
from tfdml.io.files import write_whole
from tools.numbers import Results, command_line

ROOT = pathlib.Path(__file__).resolve().parents[1]
METRICS = ("recall@1", "map@r")
COLUMNS = ("row", "base", "Recall@1", "of the base", "gain", "over seeds", "better with", "gain in MAP@R")
CONTRASTIVE = "contrastive(margin=1, distance=sqeuclidean, reduction=sum)"
AM_SOFTMAX = "am_softmax(scale=20, margin=0.1)"
WHITENED = "--head=whitened(power=0.5, shrinkage=0.1)"


@dataclasses.dataclass(frozen=True)
class Row:
    """A run of a study.

    Args:
        name: As in tables.
        flagfile: Its settings, below `configs/small`.
        base: The row it is compared with: the same without the method. Empty: it is a base itself.
        flags: What differs from the flag file.
    """

    name: str
    flagfile: str
    base: str = ""
    flags: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The flags of its run, without those of place and seed."""
        return [f"--flagfile=configs/small/{self.flagfile}.flags", *self.flags]


def _with(base: str, *terms: str) -> tuple[str]:
    return (f"--objectives={' + '.join([base, *terms])}",)


OMNIGLOT_CONTRASTIVE = ("omniglot_contrastive", "contrastive")
# The weights on Omniglot.
TERMS = {
    "HORDE": "42 * horde(loss=contrastive, orders=3, dim=256)",
    "ECAML": "3.3 * ecaml(form=log_of_mean, representation=projection)",
    "DML-DA": "89 * density(normalize_reference=true)",
}

# The methods and their bases: docs/results.md. Nothing is held out, and the last epoch counts.
_LAST = ("--selection=last", "--holdout_classes=0", "--evaluate_every=0")
TEN_CARS196 = tuple(
    Row(name, f"cars_{flagfile}", base, ("--epochs=6", "--drop_epochs=4", *_LAST, *flags))
    for name, flagfile, base, *flags in (
        ("AMSoftmax", "am_softmax", ""),
        ("+ JRS", "jrd", "AMSoftmax"),
        ("contrastive", "contrastive", ""),
        ("+ HORDE", "horde", "contrastive"),
        ("+ ECAML", "ecaml", "contrastive"),
        ("+ DML-DA", "dmlda", "contrastive"),
        # From the projection that RankMI begins with the boundary of its authors fits.
        ("margin", "margin", "", WHITENED, *_with("margin")),
        ("RankMI", "rankmi", "margin"),
    )
)
_NINE = ("--epochs=9", "--drop_epochs=6", *_LAST)
TEN_OMNIGLOT = (
    Row("AMSoftmax", "omniglot_contrastive", "", (*_with(AM_SOFTMAX), *_NINE)),
    Row("+ JRS", "omniglot_contrastive", "AMSoftmax", (*_with(f"{AM_SOFTMAX} + jrs"), *_NINE)),
    Row("contrastive", "omniglot_contrastive", "", _NINE),
    *(Row(f"+ {name}", *OMNIGLOT_CONTRASTIVE, (*_with(CONTRASTIVE, term), *_NINE)) for name, term in TERMS.items()),
    Row("margin", "omniglot_contrastive", "", (*_with("margin(beta=0.6)"), *_NINE)),
    Row("RankMI", "omniglot_contrastive", "margin", (*_with("rank_mi(negatives=all)"), *_NINE)),
)

# As many images as in the paper of JRD, with a larger network and larger images, for a GPU: docs/results.md.
_LONGER = (
    *("--backbone=mobilenetv2", "--image_size=192", "--resize=220", "--epochs=50", "--drop_epochs=33"),
    *("--steps_per_epoch=80", "--evaluate_every=10", "--deterministic=true"),
)
LONG_CARS196 = tuple(dataclasses.replace(row, flags=(*row.flags, *_LONGER)) for row in TEN_CARS196)

STUDIES = {"ten_cars196": TEN_CARS196, "ten_omniglot": TEN_OMNIGLOT, "long_cars196": LONG_CARS196}


def folder_of(place, name, settings):
    """Return the folder of a run below `place`; other settings have another folder, so only the same run resumes."""
    return (place / f"{name}{hashlib.sha256(chr(10).join(settings).encode()).hexdigest()[:12]}").resolve()


def train(flags, folder):
    """Train or resume a run in its folder, in a process; return what its error is, empty if it ended well."""
    resume = ["--resume"] if (folder / "flags.txt").exists() else []
    command = [sys.executable, "bin/train", *flags, "--report=false", f"--run_dir={folder}", *resume]
    # On its own sources: a run does not mix two states of the library.
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    return done.stderr.splitlines()[-1].partition("error: ")[2] if done.returncode else ""


def ended(error, name):
    """Return how a run ended that collapsed or diverged; any other error ends the study."""
    if "collapsed" not in error and "diverged" not in error:
        raise SystemExit(f"{name}: {error}")
    return error.partition(";")[0]


def write_results(values, path):
    """Write the results so far atomically."""
    write_whole(str(path), (json.dumps(values, separators=(",", ":")) + "\n").encode())


def entry_of(name, flags, folder):
    """Train or resume a run, and return its entry: few enough numbers to be kept in the repository."""
    if error := train(flags, folder):
        return {"ended": ended(error, name)}
    result = json.loads((folder / "result.json").read_text())
    return {"metrics": {name: result["metrics"][name] for name in METRICS}, "train_seconds": result["train_seconds"]}


def table(study):
    """Return the rows of the table: means over seeds, in percent, and intervals of the gains of paired seeds."""
    rows = []
    for name, row in study["rows"].items():
        base = study["rows"].get(row["base"], {"seeds": {}})["seeds"]
        # Both sides of a pair have the same seed, so the same batches and the same first weights.
        pairs = [
            (run["metrics"], base[seed]["metrics"])
            for seed, run in row["seeds"].items()
            if "metrics" in run and "metrics" in base.get(seed, {})
        ]
        if not pairs:
            continue
        own, others = ([100 * side[METRICS[0]] for side in sides] for sides in zip(*pairs, strict=True))
        gains = {key: [100 * (first[key] - second[key]) for first, second in pairs] for key in METRICS}
        better = f"{sum(gain > 0 for gain in gains['recall@1'])} of {len(pairs)}"
        cells = (name, row["base"], f"{np.mean(own):.1f}", f"{np.mean(others):.1f}", points(gains["recall@1"]))
        rows.append((*cells, interval(gains["recall@1"]), better, with_interval(gains["map@r"])))
    return rows


def points(values):
    """Return the mean of gains in points, in print; empty without any."""
    return f"{np.mean(values):+.1f}" if len(values) else ""


def interval(values):
    """Return Student's interval of gains in points, in print; empty without several."""
    if len(values) < 2:
        return ""
    ends = student_interval(np.asarray(values))
    return f"{ends.low:+.1f} to {ends.high:+.1f}"


def with_interval(values):
    """Return the mean of gains in points, with Student's interval where there are several; empty without any."""
    return f"{points(values)} ({interval(values)})" if len(values) > 1 else points(values)


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
        places = [f"--data_dir={pathlib.Path(arguments.data_dir).resolve()}"]
        places += [f"--weights={pathlib.Path(arguments.weights).resolve()}"] if arguments.weights else []
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            for row in STUDIES[arguments.study]:
                runs = study["rows"].setdefault(row.name, {"base": row.base, "flags": row.command(), "seeds": {}})
                if str(seed) in runs["seeds"] or (arguments.rows and row.name not in arguments.rows):
                    continue
                flags = [*row.command(), *places, f"--seed={seed}"]
                folder = folder_of(arguments.runs, "", flags)
                entry = runs["seeds"][str(seed)] = entry_of(f"{row.name}, seed {seed}", flags, folder)
                write_results(study, arguments.results)
                shutil.rmtree(folder)
                outcome = entry.get("ended") or f"{entry['metrics']['recall@1']:.2%}"
                print(f"{row.name}, seed {seed}: {outcome}", flush=True)
    add = Results(arguments.json).table("table", *COLUMNS)
    for row in table(study):
        if not arguments.rows or row[0] in arguments.rows:
            add(*row)


if __name__ == "__main__":
    main()
