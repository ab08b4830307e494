"""bin/train: run an experiment."""

from __future__ import annotations

import dataclasses
import sys

from absl import flags

from tfdml.cli import experiment_flags
from tfdml.cli import main as command_line
from tfdml.errors import UserError

USAGE = """
Train an image embedder and measure it on classes never seen in training.

  bin/train --flagfile=configs/quickstart.flags --run_dir=runs/quickstart
  bin/train --flagfile=configs/cars_jrd_small.flags --data_dir=/data/cars196 --weights=mnv2_035.weights.h5 \\
            --run_dir=runs/cars_jrd
  bin/train --dataset=folder --data_dir=photos --backbone=resnet50 --weights=imagenet --run_dir=runs/photos
  bin/train --run_dir=runs/cars_jrd --resume          continue a run that was stopped
  bin/train --flagfile=... --run_dir=... --start_from=runs/cars_jrd    a new run from old weights
  bin/train --flagfile=... --run_dir=... --dry_run    print the resolved experiment, write nothing
  bin/train --flagfile=... --preview=batch.png        picture the first batch as the network will see it, train nothing

The run folder holds flags.txt, data.json, environment.json, metrics.jsonl, result.json, checkpoints/, embedder.keras,
tensorboard/ and report/index.html; with rank_mi statistics_network.keras and statistics.json too.
"""

experiment_flags.define()
flags.DEFINE_bool("resume", False, "Continue the run in --run_dir from its newest checkpoint.", module_name=__name__)
flags.DEFINE_bool(
    "restart",
    False,
    "With --resume: where no checkpoint can be used, train the run again from its first step.",
    module_name=__name__,
)
flags.DEFINE_bool(
    "dry_run",
    False,
    "Print what would run and write nothing: images and classes, trained parameters and rates, steps, memory, flags.",
    module_name=__name__,
)
flags.DEFINE_string(
    "preview", "", "Write a contact sheet of the first batch to this PNG file and train nothing.", module_name=__name__
)


def train() -> None:
    """Run the experiment that the flags describe."""
    from tfdml.training import Experiment, RunFolder, trainer
    from tfdml.training.interruption import Interrupted
    from tfdml.training.preview import write_preview
    from tfdml.training.summary import describe

    given = experiment_flags.given()
    if flags.FLAGS.restart and not flags.FLAGS.resume:
        raise UserError("--restart goes with --resume")
    folder = RunFolder(str(given.get("run_dir", "")))
    if flags.FLAGS.resume and not (folder.is_untouched() and len(given) > 1):
        experiment = dataclasses.replace(folder.load_experiment(), **given)
    elif flags.FLAGS.preview:
        # Nothing is written there.
        experiment = Experiment(**{"run_dir": "unused", **given})
    else:
        experiment = Experiment(**given)
    if flags.FLAGS.preview:
        print(write_preview(experiment.data, experiment.seed, flags.FLAGS.preview))
        return
    if flags.FLAGS.dry_run:
        print(describe(experiment))
        return
    try:
        result = trainer.train(experiment, resume=flags.FLAGS.resume, restart=flags.FLAGS.restart)
    except Interrupted as stop:
        print(f"train: {stop}", file=sys.stderr)
        sys.exit(stop.status)
    if not result:
        print("\nThis process has done its part; the first one of them writes the run.")
        return
    before, after = result["metrics_before"], result["metrics"]
    print(f"\nUnseen classes of {experiment.dataset} ({result['protocol']}); embedder of {result['selection']}:")
    for name, value in after.items():
        if isinstance(value, float):
            start = f"{100 * before[name]:5.1f} -> " if name in before else " " * 9
            print(f"  {name:<12} {start}{100 * value:5.1f} %{_interval(result['intervals'].get(name))}")
    for name, value in result.get("metrics_moments", {}).items():
        if isinstance(value, float):
            print(f"  {name:<12} {100 * value:14.1f} % with all moments")
    if "recall@1" in result.get("metrics_seen", {}):
        print(f"  {'recall@1':<12} {100 * result['metrics_seen']['recall@1']:14.1f} % on seen classes")
    for order, metrics in result.get("metrics_orders", {}).items():
        print(f"  {'recall@1':<12} {100 * metrics['recall@1']:14.1f} % {_order(order)}")
    for name, path in trainer.run_paths(experiment.run_dir).items():
        if path.exists():
            print(f"  {name:<12} {path}")


def _order(name: str) -> str:
    return "with the orders side by side" if name == "all" else f"by order {name} alone"


def _interval(ends) -> str:
    return f"   (95 % interval over classes {100 * ends[1]:.1f} .. {100 * ends[2]:.1f})" if ends else ""


def main() -> None:
    """Entry point."""
    command_line.run(train, "train", USAGE, sections=experiment_flags.sections())


if __name__ == "__main__":
    main()
