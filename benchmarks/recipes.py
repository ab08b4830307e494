r"""What would make the default recipe of pretrained weights better: trials on images set aside.

    python -m benchmarks.recipes --runs=RUNS --sets=SETS --weights=MNV2_035.weights.h5
    python -m benchmarks.recipes --runs=RUNS --sets=SETS --json=docs/numbers/recipes.json

The first command trains what is missing, the second prints the tables of what there is.

The plan, written before the runs:

- Images set aside, as SETS/birds, SETS/cars and SETS/groceries, with a folder for each class:
  525 species of birds with five images each (`valid` of github.com/Sparcraps/Gob-Game-of-Bird), the
  98 training classes of Cars-196, and the first 40 groceries of docs/results.md. The first half of
  the classes by name trains, the second is measured. None of them is a test class of
  docs/first_examples.md or docs/results.md.
- Each trial is `tfdml train` with its recipe `finetune`, and the flags of the trial: MobileNetV2
  alpha 0.35 from weights of ImageNet on 96 px crops of 112 px, 48,000 images, three sets.
- Six trials: the threshold-consistent margin next to AMSoftmax; one image a class in batches of up
  to 100, with three rates of the backbone (Berton, Musgrave and Masone 2025, arXiv 2503.13045);
  weights between start and end; three times the length, the last epoch or the best of held-out
  classes; that by Recall@1 or by MAP@R; and the last crop: whole images at 96 px behind random
  resized crops, and whole images at 112 px behind the default.
- Added when one image a class had been screened: shuffled batches of 100 and of 32, as controls,
  and one image each of at most 20 classes. Where there are fewer classes than 100, batches of one
  image a class are smaller, and more.
- One seed screens all trials. The three of the largest mean gain in Recall@1 over the default have
  two more seeds.
- The rule: a trial becomes the recipe if it gains at least 0.5 points of Recall@1 over the default
  in the mean of the sets, its 95 % interval over classes is above 0 on two of them, and on none
  below. One whose interval is above 0 on birds alone becomes a rule of `--recipe=auto` for classes
  of few images, if it gains at least a point there and loses at most half a point elsewhere.
- What is chosen is then measured on groceries, clothes and Cars-196 with the seeds of
  docs/first_examples.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import time

import keras
import numpy as np

import tfdml
from benchmarks.first_examples import METRICS, ROOT, measure, points
from tfdml.data import EvaluationTransform
from tfdml.data.pipeline import readable_views
from tools.numbers import Results, command_line

SIZE, RESIZE, IMAGES = 96, 112, 48_000
SEEDS = (200, 201, 202)
SMALL = "one image, 1e-4, 20 classes"
DEFAULT, WHOLE, LONGEST = "default", "whole images at 112 px", "long, best of held out"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A change of the default.

    Args:
        flags: Those of `tfdml train`.
        of_one_image: Whether a batch has one image of each class.
        together: How many classes it then has at most.
    """

    flags: tuple[str, ...] = ()
    of_one_image: bool = False
    together: int = 100


LONG = ("--epochs=36", "--min_images=144000", "--evaluate_every=1")
TRIALS = {
    DEFAULT: Trial(),
    "threshold-consistent": Trial(("--objectives=am_softmax + threshold_consistent_margin",)),
    "one image, 1e-6": Trial(("--backbone_rate=1e-6",), of_one_image=True),
    "one image, 1e-5": Trial(("--backbone_rate=1e-5",), of_one_image=True),
    "one image, 1e-4": Trial(("--backbone_rate=1e-4",), of_one_image=True),
    SMALL: Trial(of_one_image=True, together=20),
    "shuffled batches of 100": Trial(("--sampling=shuffle",)),
    "shuffled batches of 32": Trial(
        ("--sampling=shuffle", "--batch_size=32", "--min_images=48000")
    ),
    "interpolate, 0.5": Trial(("--interpolate=0.5",)),
    "interpolate, 0.75": Trial(("--interpolate=0.75",)),
    "long": Trial((*LONG,)),
    LONGEST: Trial((*LONG, "--holdout_classes=0.2", "--selection=validation")),
    "whole images at 96 px": Trial(
        ("--resize=96", "--augmentation=random_resized_crop(min_scale=0.5)")
    ),
    WHOLE: Trial(),
}


def flags_of(trial, classes):
    """Return the flags of a trial on so many training classes."""
    flags = ["--evaluate_every=0", *trial.flags]
    if "--sampling=shuffle" not in trial.flags:
        # As the recipe had it before the trials.
        flags.append("--images_per_class=5")
    if trial.of_one_image:
        together = min(trial.together, classes)
        flags += ["--images_per_class=1", f"--classes_per_batch={together}"]
        flags += ["--epochs=12", f"--steps_per_epoch={IMAGES // together // 12}"]
    return flags


def folder_of(arguments, name, trial, seed):
    """Return the folder of a run."""
    words = f"{name}_{trial}_{seed}".replace(" ", "").replace(",", "_")
    return (arguments.runs / words).resolve()


def run(arguments, name, trial, seed):
    """Return the metrics of each query of a trial, and its labels; train it where it is missing.
    None: it is missing, and the table is printed without it."""
    # The last one measures the embedder of the default again.
    of_run = DEFAULT if trial == WHOLE else trial
    folder = folder_of(arguments, name, of_run, seed)
    if not (folder / "result.json").exists():
        if arguments.json:
            return None
        begin = time.monotonic()
        train(arguments, name, TRIALS[of_run], seed, folder)
        print(f"{folder.name}: {time.monotonic() - begin:.0f} s", flush=True)
    with np.load(folder / "queries.npz", allow_pickle=False) as stored:
        values = {metric: stored[metric] for metric in (*METRICS, "labels")}
    if trial == WHOLE:
        values |= whole_images(arguments, name, folder)
    return values


def train(arguments, name, trial, seed, folder):
    """Run `tfdml train`."""
    data = (arguments.sets / name).resolve()
    classes = len(tfdml.data.load("folder", str(data), "train").classes)
    flags = ["--dataset=folder", f"--data_dir={data}", "--backbone=mobilenetv2(alpha=0.35)"]
    flags += [f"--weights={arguments.weights.resolve()}", f"--seed={seed}", "--report=false"]
    flags += [f"--image_size={SIZE}", f"--resize={RESIZE}", f"--run_dir={folder}"]
    flags += flags_of(trial, classes)
    # Of two flags of one name, the last counts.
    last = {flag.split("=")[0]: flag for flag in flags}
    if folder.exists():
        last["--resume"] = "--resume"
    command = [sys.executable, "bin/train", *last.values()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def whole_images(arguments, name, folder):
    """Return the metrics of each query by whole images, where the default measures their middle."""
    path = folder / "whole.npz"
    if not path.exists():
        images = tfdml.data.load("folder", str(arguments.sets / name), "test")
        view = EvaluationTransform(RESIZE, RESIZE)
        embedder = keras.models.load_model(folder / "embedder.keras")
        vectors = [
            embedder(part, training=False).numpy()
            for _, part in readable_views(images.images, view, 100)
        ]
        np.savez(path, **measure(np.concatenate(vectors), images.labels))
    with np.load(path) as stored:
        return {metric: stored[metric] for metric in METRICS}


def add_epochs(arguments, add):
    """Add the epochs of long runs that held-out classes choose, and what the test classes have
    then."""
    for name in arguments.only:
        folder = folder_of(arguments, name, LONGEST, SEEDS[0])
        if not (folder / "result.json").exists():
            continue
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [record for record in map(json.loads, lines) if "validation" in record]
        for metric in METRICS:
            best = max(records, key=lambda record: record["validation"][metric])
            cells = [f"{100 * best['test'][of_test]:.1f}" for of_test in METRICS]
            add(name, metric, best["epoch"], *cells)


def gains(of_trial, of_default):
    """Return the cells of a trial on a set: its metrics, and what it gains over the default."""
    labels, cells = of_default[0]["labels"], []
    for metric in METRICS:
        ends, starts = ([run[metric] for run in runs] for runs in (of_trial, of_default))
        cells += [f"{100 * np.nanmean(ends):.1f}", points(ends, starts, labels)]
    return cells


def add_trial(arguments, trial, add_set, add_mean):
    """Add a trial to the tables, by the seeds that it and the default both have."""
    means = []
    for name in arguments.only:
        pairs = [
            (run(arguments, name, trial, seed), run(arguments, name, DEFAULT, seed))
            for seed in SEEDS
        ]
        pairs = [pair for pair in pairs if None not in pair]
        if not pairs:
            continue
        of_trial, of_default = zip(*pairs, strict=True)
        add_set(trial, name, len(pairs), *gains(of_trial, of_default))
        means.append([mean_gain(of_trial, of_default, metric) for metric in METRICS])
    if len(means) == len(arguments.only):
        add_mean(trial, *(f"{gain:+.1f}" for gain in np.mean(means, axis=0)))


def mean_gain(of_trial, of_default, metric):
    """Return the mean of differences in points."""
    ends, starts = ([run[metric] for run in runs] for runs in (of_trial, of_default))
    return 100 * (np.nanmean(ends) - np.nanmean(starts))


def main():
    """Train what is missing; with --json, write the tables of what there is."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="the folder of the runs")
    parser.add_argument("--sets", type=pathlib.Path, default=pathlib.Path("sets"))
    parser.add_argument("--weights", type=pathlib.Path, default=pathlib.Path("weights.h5"))
    parser.add_argument("--only", nargs="*", default=["birds", "cars", "groceries"])
    parser.add_argument("--trials", nargs="*", default=list(TRIALS), choices=list(TRIALS))
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS[:1])
    arguments = parser.parse_args()
    arguments.runs.mkdir(exist_ok=True)
    if not arguments.json:
        for seed, trial, name in itertools.product(
            arguments.seeds, arguments.trials, arguments.only
        ):
            run(arguments, name, trial, seed)
        return
    results, columns = Results(arguments.json), []
    for metric in ("Recall@1", "MAP@R"):
        columns += [metric, f"{metric}, next to default"]
    add_set = results.table("sets", "trial", "set", "seeds", *columns)
    rows = []
    for trial in arguments.trials:
        add_trial(arguments, trial, add_set, lambda *cells: rows.append(cells))
    add_mean = results.table("means", "trial", "Recall@1", "MAP@R")
    for cells in rows:
        add_mean(*cells)
    columns = ("set", "chosen by", "epoch", "Recall@1", "MAP@R")
    add_epochs(arguments, results.table("epochs", *columns))


if __name__ == "__main__":
    main()
