r"""Train an image embedder and measure it on classes never seen in training.

  tfdml train --flagfile=configs/quickstart.flags --run_dir=runs/quickstart
  tfdml train --flagfile=configs/small/cars_jrd.flags --data_dir=/data/cars196 \
      --weights=mnv2_035.weights.h5 \
              --run_dir=runs/cars_jrd
  tfdml train --dataset=folder --data_dir=photos --backbone=resnet50 --weights=imagenet \
      --run_dir=runs/photos
  tfdml train --features=vectors.parquet --head=mlp --objectives=multi_similarity \
      --run_dir=runs/head
  tfdml train --run_dir=runs/cars_jrd --resume            continue a run that was stopped
  tfdml train --run_dir=runs/cars_jrd --resume --finish   end it here, with all of its results
  tfdml train --final_of=runs/cars_jrd --run_dir=runs/final   the model to ship, of all classes
  tfdml train --flagfile=... --run_dir=... --start_from=runs/cars_jrd    from old weights
  tfdml train --flagfile=... --run_dir=... --seeds=3   a run for each seed; mean and intervals
  tfdml train --flagfile=... --run_dir=... --folds=4   holds out each quarter of the classes
  tfdml train --flagfile=... --run_dir=... --dry_run   print images, parameters, rates and steps

The run folder holds flags.txt, data.json, environment.json, metrics.jsonl, result.json,
checkpoints/, embedder.keras, tensorboard/ and report/index.html.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from absl import logging

from tfdml.cli.command_line import Command, CommandFlags, Flags, load_tensorflow
from tfdml.cluster.settings import ClusterSettings
from tfdml.errors import UserError
from tfdml.io.files import printable
from tfdml.options import Settings, flag_text, option, values_of
from tfdml.training import RunFolder, settings
from tfdml.training.interruption import Interrupted
from tfdml.training.settings import Experiment

if TYPE_CHECKING:
    from tfdml.training import TrainingRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainFlags(CommandFlags):
    """What to do with the run of an experiment."""

    title: ClassVar[str] = "What to do with the run of an experiment"

    recipe: str = option(
        "auto",
        words=("auto", *settings.RECIPES, "none"),
        help="The settings that are not given: auto is frozen with --features or "
        "--backbone_rate=0, scratch without pretrained weights, else finetune. A length in epochs "
        "or steps replaces that of the recipe. none: the defaults listed here.",
    )
    resume: bool = option(False, help="Continue the run in --run_dir from its newest checkpoint.")
    finish: bool = option(
        False,
        requires="resume",
        help="With --resume: train no further; measure and write what has been trained.",
    )
    dry_run: bool = option(
        False, help="Print images, parameters, rates, steps and flags; write nothing."
    )


def _new_settings(values: Flags) -> dict[str, Any]:
    """Return the settings of a new run that are set, and those of its recipe, or of the run that it
    is final to."""
    given = values.given(Experiment)
    if values.final_of:
        return {**settings.final_settings(values.final_of), **given}
    return settings.with_recipe(values.recipe, given)


def _drafts(values: Flags) -> list[Settings]:
    """Return the settings of all flags; of a run that is resumed, those that it was begun with."""
    given = values.given(Experiment)
    folder = RunFolder(values.run_dir)
    if values.resume and folder.flags.is_file():
        given = {**values_of(Experiment.of_run(folder.path)), **given}
    elif not values.final_of or RunFolder(values.final_of).result.is_file():
        given = _new_settings(values)
    # A run that is final to one that has not ended is refused by `_settings`.
    kinds: tuple[type[Settings], ...] = (TrainFlags, ClusterSettings)
    return [Experiment.draft(given), *(kind.draft(values.values(kind)) for kind in kinds)]


def _settings(values: Flags) -> tuple[Experiment, TrainFlags, ClusterSettings]:
    flags, cluster = values.settings(TrainFlags), values.settings(ClusterSettings)
    given = values.given(Experiment)
    folder = RunFolder(str(given.get("run_dir", "")))
    # Of several hosts, those that do not write may not see the folder.
    elsewhere = False
    if flags.resume and not folder.path.exists():
        load_tensorflow()
        from tfdml.training.workers import rank_and_count

        elsewhere = rank_and_count()[0] > 0 or bool(cluster.cluster)
    if flags.resume and not ((folder.is_untouched() or elsewhere) and len(given) > 1):
        return dataclasses.replace(Experiment.of_run(folder.path), **given), flags, cluster
    new = _new_settings(values)
    added = {name: value for name, value in new.items() if name not in given}
    if added and not values.final_of:
        recipe = settings.recipe_for(given) if flags.recipe == "auto" else flags.recipe
        words = (f"--{name}={flag_text(value)}" for name, value in added.items())
        logging.info("recipe %s: %s", recipe, shlex.join(words))
    return Experiment(**new), flags, cluster


def train(experiment: Experiment, flags: TrainFlags, cluster: ClusterSettings) -> None:
    """Run the experiment that the flags describe."""
    from tfdml.cluster.training import train_on_cluster
    from tfdml.report import write_run_report
    from tfdml.training import trainer

    if flags.dry_run:
        print(trainer.describe(experiment))
        return
    if cluster.cluster and (experiment.seeds or experiment.folds):
        raise UserError(
            "--seeds and --folds train run after run in one process: leave out --cluster"
        )
    try:
        if cluster.cluster:
            run: TrainingRun | None = train_on_cluster(experiment, cluster, flags.resume)
        else:
            run = trainer.train(experiment, flags.resume, finish=flags.finish)
    except Interrupted as stop:
        print(f"train: {printable(str(stop))}", file=sys.stderr)
        sys.exit(stop.status)
    if run is None:
        print("\nThis process has done its part; the first one of them writes the run.")
        return
    if experiment.final_of:
        print(f"\nFinal model of {experiment.final_of}: {run.result['protocol']}")
        return
    write_run_report(run)
    protocol, selection = run.result["protocol"], run.result["selection"]
    print(f"\nUnseen classes of {experiment.data_name} ({protocol}); embedder of {selection}:")
    print("\n".join(_rows(run.result)))
    if experiment.also_measure:
        print(f"\nUnseen classes of {experiment.also_measure}, which is not trained on:")
        print("\n".join(_rows(_of_second(run.result))))
    folder = RunFolder(experiment.run_dir)
    for name in ("embedder", "result", "report"):
        path = getattr(folder, name)
        if path.exists():
            print(f"  {name:<12} {printable(path)}")


def _of_second(result: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of the second data set in the form of a result."""
    parts = ("metrics", "metrics_before", "metrics_features")
    named = {part: result[part.replace("metrics", "metrics_also")] for part in parts}
    return {**named, "intervals": {}}


def _rows(result: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each metric of a result: the two starts, the end, and its intervals."""
    chance = result.get("chance", {})
    starts = [result[part] for part in ("metrics_features", "metrics_before")]
    width = max(12, *map(len, result["metrics"]))
    if any(starts):
        yield "  features: without a head; start: with the untrained head; end: trained"
        yield f"  {'':<{width}} features  start       end"
    for name, value in result["metrics"].items():
        if not isinstance(value, float):
            continue
        features, start = (_percent(metrics.get(name)) for metrics in starts)
        line = f"  {name:<{width}} {features:>8}{start:>7}"
        line += " -> " if name in result["metrics_before"] else " " * 4
        line += f"{100 * value:5.1f} %"
        if ends := result["intervals"].get(name):
            line += "   " + _interval(ends, "classes")
        if name in chance:
            line += f"   (chance {100 * chance[name]:.1f} %)"
        yield line
        if ends := result.get("intervals_runs", {}).get(name):
            runs = result["runs"]
            kind, _, _ = runs[0]["run"].partition("_")  # seed_0, or fold_0
            yield " " * (width + 30) + _interval(ends, f"{len(runs)} {kind}s")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _interval(ends: Sequence[float], over: str) -> str:
    """Return the ends of an interval, as `tfdml.evaluation.Interval` has them, in words."""
    _, low, high, *_ = ends
    return f"(95 % interval over {over} {100 * low:.1f} .. {100 * high:.1f})"


COMMAND = Command(
    "train",
    train,
    Flags(Experiment, TrainFlags, ClusterSettings),
    __doc__,
    drafts=_drafts,
    settings=_settings,
)
