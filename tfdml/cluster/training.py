"""Training over Ray: a run by the workers of Ray Train, which starts them again where one is lost; and a sweep.

A sweep is many runs side by side, proposed and pruned by Optuna, and compared on held-out classes.
"""

import csv
import dataclasses
import itertools
import json
import logging as python_logging
import math
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from tfdml.cluster.ray_session import LOCAL, ToOutbox, first_ready, lost_hosts, outbox_shown, ray_session
from tfdml.effects import in_vain
from tfdml.errors import UserError, check_not_negative, check_positive, short_message, user_errors
from tfdml.io.copies import require_no_store
from tfdml.io.files import PARTIAL_PREFIX, atomic_write, is_folder
from tfdml.report import write_run_report
from tfdml.training import Experiment, RunFolder
from tfdml.training.distributed import WorkerLost, rank_and_count
from tfdml.training.expressions import with_weight
from tfdml.training.run import trainer
from tfdml.training.settings import EFFECTS


@dataclasses.dataclass(frozen=True)
class ClusterSettings:
    """Where a run is trained.

    Args:
        cluster: Train on a Ray cluster: its address, such as ray://host:10001, or local.
        workers: With --cluster: how many processes train.
        gpus_per_worker: With --cluster: GPUs of each worker; 0: they train on CPUs.
        max_failures: With --cluster: how often lost workers are started again.
        storage: With --cluster: a folder or URL that all hosts see, where the run is kept until it has ended, such as
            s3://bucket/runs; empty: next to --run_dir.

    Raises:
        UserError: A number is out of range.
    """

    cluster: str = ""
    workers: int = 1
    gpus_per_worker: int = 0
    max_failures: int = 3
    storage: str = ""

    def __post_init__(self):
        check_positive(workers=self.workers)
        check_not_negative(gpus_per_worker=self.gpus_per_worker, max_failures=self.max_failures)


def train_on_cluster(experiment: Experiment, settings: ClusterSettings, resume: bool = False) -> dict[str, Any]:
    """Run an experiment on a Ray cluster, and bring its folder here; returns what `result.json` holds.

    Args:
        experiment: The settings; `run_dir` is where the run's folder lies in the end.
        settings: Where it is trained.
        resume: Resume a run that was stopped, from the last checkpoint in the storage.

    Raises:
        UserError: Something that the user can mend; or workers were lost more often than they may be.

    Example:
        >>> train_on_cluster(experiment, ClusterSettings(workers=2))["protocol"]
        'zero-shot: trained on 213 classes, evaluated all-to-all on 107 classes never seen in training'
    """
    require_no_store(experiment.run_dir, "run_dir", "Ray keeps the run in --storage, which may be s3://")
    folder = RunFolder(experiment.run_dir)
    finished = folder.read_result() if resume else None
    if finished is not None:
        logging.info("%s is finished already: there is nothing left to do", folder.path)
        return finished
    folder.check_new()
    beside = folder.path.absolute().with_name(folder.path.name + ".ray")
    storage, name = settings.storage or str(beside), folder.path.name
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    cpus = max(settings.workers, os.cpu_count() or 1)
    with ray_session(settings.cluster or LOCAL, cpus=cpus) as ray:
        begun = is_folder(f"{storage}/{name}")
        if resume and not begun:
            raise UserError(f"--resume: there is no run in {storage}/{name}")
        if begun and not resume:
            raise UserError(f"{storage}/{name} holds a run already: continue with --resume, or name another --run_dir")
        with outbox_shown(ray) as outbox:
            checkpoint = _fit(experiment, settings, storage, name, outbox, ray)
            result = ray.get(outbox.read.remote("result"))
        _bring(checkpoint, folder.path)
    if not settings.storage:
        shutil.rmtree(beside, ignore_errors=True)
    return result


def _fit(experiment: Experiment, settings: ClusterSettings, storage: str, name: str, outbox: Any, ray: Any) -> Any:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.tensorflow import TensorflowTrainer

    python_logging.getLogger("ray.train").setLevel(python_logging.ERROR)
    gpus = settings.gpus_per_worker
    scaling = ScalingConfig(
        num_workers=settings.workers,
        use_gpu=gpus > 0,
        resources_per_worker={"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1},
    )
    run = RunConfig(
        name=name,
        storage_path=storage,
        # The second: how often it is waited a minute for hosts with room for all workers.
        failure_config=FailureConfig(settings.max_failures, controller_failure_limit=settings.max_failures),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    work = {"flags": experiment.as_flags(), "name": name, "outbox": outbox}
    ray_trainer = TensorflowTrainer(_work, train_loop_config=work, scaling_config=scaling, run_config=run)
    try:
        return ray_trainer.fit().checkpoint
    except Exception as error:
        told = ray.get(outbox.read.remote("error"))
        if told is not None:
            raise UserError(told) from error
        why = "; ".join(filter(None, [lost_hosts(ray), short_message(error, "last", longest=150)]))
        count = f"more than --max_failures={settings.max_failures} times"
        saved = f"what it has saved is in {storage}/{name}: continue it with --resume"
        raise UserError(f"the run failed, and {count}; {saved} ({why})") from error


def _work(config: dict[str, Any]) -> None:
    """Do what every worker does."""
    import ray
    from ray import train as ray_train

    os.environ.pop("TF_USE_LEGACY_KERAS", None)  # set by Ray, of no use to Keras 3
    outbox, before = config["outbox"], ray_train.get_checkpoint()
    error = ray.get(outbox.read.remote("error"))
    if error is not None:
        raise UserError(error)
    is_chief = rank_and_count()[0] == 0  # by the TF_CONFIG that Ray has set
    if is_chief:
        ToOutbox.install(outbox)
    with tempfile.TemporaryDirectory(prefix="tfdml-run-") as scratch:
        path = Path(scratch) / config["name"]
        if is_chief and before is not None:
            before.to_directory(path)
            logging.info("resuming from the last checkpoint in the storage")

        def saved() -> None:
            ray_train.report({}, checkpoint=ray_train.Checkpoint.from_directory(path) if is_chief else None)

        experiment = Experiment.from_flags(config["flags"], run_dir=str(path))
        try:
            result = trainer.train(experiment, before is not None, saved=saved, write_report=write_run_report)
        except WorkerLost as lost:
            raise RuntimeError(str(lost)) from lost
        except UserError as refused:
            ray.get(outbox.tell.remote("error", str(refused)))
            raise
        if is_chief:
            ray.get(outbox.tell.remote("result", result))
        saved()


def _bring(checkpoint: Any, path: Path) -> None:
    """Put a run's folder, as a checkpoint holds it, to where it belongs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PARTIAL_PREFIX, dir=path.parent) as scratch:
        checkpoint.to_directory(f"{scratch}/run")
        if path.is_dir():
            path.rmdir()  # empty, as was checked
        os.replace(f"{scratch}/run", path)


_FORM = "write e.g. --sweep='objectives.weight=0.1,0.3,1; learning_rate=1e-4..1e-3'"
_FIXED = (
    *("run_dir", "selection", "selection_metric", "dataset", "data_dir", "features", "seed", "seeds", "folds"),
    *("holdout_classes", "holdout_sampling", "holdout_part", "ks", "start_from"),
)
# The values of a setting, or the two ends of the range from which it is drawn.
Axis = tuple[str, ...] | tuple[float, float]


def parse_sweep(text: str) -> dict[str, Axis]:
    """Return what `--sweep` varies, by name: `name=a,b,c` for values, `name=low..high` for a range, `;` between them.

    A name is a setting of `Experiment`; or `objectives.weight`, the factor of the last term of `objectives`, or
    `objectives.NAME`, that of the term of this name.

    Raises:
        UserError: The text is not of this form, or names no setting that can be varied.

    Example:
        >>> parse_sweep("learning_rate=1e-4..1e-3; embedding_dim=64,128")
        {'learning_rate': (0.0001, 0.001), 'embedding_dim': ('64', '128')}
    """
    axes: dict[str, Axis] = {}
    known = {field.name for field in dataclasses.fields(Experiment)} - set(_FIXED)
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, values = (word.strip() for word in part.partition("="))
        if not equals or not values:
            raise UserError(f"--sweep: {part!r} is not name=values; {_FORM}")
        if name not in known and not name.startswith("objectives."):
            raise UserError(f"--sweep: {name!r} is no setting that can be varied; {_FORM}")
        if name in axes:
            raise UserError(f"--sweep: {name} is there twice")
        axes[name] = tuple(value.strip() for value in values.split(","))
        if ".." in values:
            try:
                low, high = map(float, values.split(".."))
            except ValueError:
                low = high = 0.0
            if not 0 < low < high < math.inf:
                raise UserError(f"--sweep: {part!r}: a range goes from a positive number to a larger one")
            axes[name] = (low, high)
    if not axes:
        raise UserError(f"--sweep varies nothing; {_FORM}")
    return axes


def run_of(experiment: Experiment, trial: int, values: dict[str, Any]) -> Experiment:
    """Return the run of a trial, in a folder of its own in that of the sweep.

    Args:
        experiment: What all have in common.
        trial: Its number.
        values: What it changes, by the names of `parse_sweep`.

    Raises:
        UserError: A value does not fit its setting, or the setting has no effect in this run.

    Example:
        >>> run_of(Experiment(run_dir="runs/sweep"), 3, {"epochs": "2"}).run_dir
        'runs/sweep/trials/003'
    """
    lines, objectives = [experiment.as_flags()], experiment.objectives
    for name, value in values.items():
        setting, _, term = name.partition(".")
        if not term:
            lines.append(f"--{setting}={value}")
            continue
        with user_errors(ValueError, f"--sweep: {value!r} is no value of {name}"):
            weight = float(value)
        objectives = with_weight(objectives, weight, "--objectives", "" if term == "weight" else term)
    folder = f"{experiment.run_dir}/trials/{trial:03d}"
    changed = Experiment.from_flags("\n".join(lines), run_dir=folder, report=False, objectives=objectives)
    for message in in_vain(EFFECTS, dataclasses.asdict(changed), values).values():
        raise UserError(f"--sweep: {message}")
    return changed


def combinations(experiment: Experiment, axes: dict[str, Axis]) -> list[dict[str, str]]:
    """Return every combination of the listed values; each is tried, with both ends of the ranges.

    Args:
        experiment: What all runs have in common.
        axes: What is varied.

    Raises:
        UserError: A value does not fit its setting, or has no effect in one of the runs.
    """
    lists = {name: axis for name, axis in axes.items() if isinstance(axis[0], str)}
    found = [dict(zip(lists, chosen, strict=True)) for chosen in itertools.product(*lists.values())]
    for values, end in itertools.product(found, (0, 1)):
        run_of(experiment, 0, {name: values.get(name, axis[end % len(axis)]) for name, axis in axes.items()})
    return found


def sweep(
    experiment: Experiment, text: str, settings: ClusterSettings, samples: int = 8, resume: bool = False
) -> list[dict[str, Any]]:
    """Run every trial of a sweep, and write what came of it to `sweep.csv` and `sweep.png`.

    Every combination of the values is run; where there are ranges, `samples` times, with values that Optuna's TPE
    sampler proposes. `settings.workers` train at the same time. They are compared by `selection_metric` on the held-out
    classes, at the epoch that counts; Optuna's median pruner ends a run that is below the median of the others after
    the first third of the epochs. The study is kept in `optuna.journal`.

    Args:
        experiment: What the runs have in common; `run_dir`, the folder of the sweep, is seen by every host.
        text: What is varied: see `parse_sweep`.
        settings: Where they are trained.
        samples: How many draws there are of ranges.
        resume: Resume a sweep that was stopped: runs that have ended are kept, others resume.

    Returns:
        Of each run, the best first: `trial`, the metric, `state` (complete, pruned or fail), `error` and the values.

    Raises:
        UserError: Optuna is not installed, nothing is held out, or the sweep is not the one that was begun in this
            folder.
    """
    axes = parse_sweep(text)
    chosen = combinations(experiment, axes)
    if not experiment.holdout_classes:
        raise UserError("--sweep compares runs on held-out classes: add e.g. --holdout_classes=0.1")
    if experiment.seeds:
        raise UserError("--sweep and --seeds cannot be combined: sweep first, then train the best run with --seeds")
    require_no_store(experiment.run_dir, "run_dir", "--sweep keeps a database in it")
    experiment = dataclasses.replace(experiment, run_dir=str(Path(experiment.run_dir).absolute()))
    folder, metric = Path(experiment.run_dir), experiment.selection_metric
    if not resume:
        RunFolder(folder).check_new()
        folder.mkdir(parents=True, exist_ok=True)
    study = open_study(experiment)
    begun = {"sweep": text, "samples": samples, "flags": experiment.as_flags()}
    for name, value in begun.items():
        if study.user_attrs.get(name, value) != value:
            raise UserError(f"--resume: the sweep in {folder} was begun with other {name}; name another --run_dir")
        study.set_user_attr(name, value)
    draws = samples if any(isinstance(axis[0], float) for axis in axes.values()) else 1
    for values in chosen[len(study.trials) // draws :]:
        for _ in range(draws):
            study.enqueue_trial(values)
    _train(study, axes, experiment, settings)
    rows = []
    for trial in study.trials:
        result = {"trial": trial.number, metric: trial.value, "state": trial.state.name.lower()}
        rows.append(result | trial.user_attrs | trial.params)
    rows.sort(key=lambda row: (row["state"] != "complete", -(row[metric] or 0.0)))
    with atomic_write(folder / "sweep.csv") as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ["trial", metric, "state", *axes, "error"])
        table.writeheader()
        table.writerows(rows)
    _write_plot(study, metric, folder / "sweep.png")
    return rows


def open_study(experiment: Experiment) -> Any:
    """Return the Optuna study of a sweep, from the journal in its folder.

    Args:
        experiment: The settings of the sweep.

    Raises:
        UserError: Optuna is not installed.
    """
    with user_errors(ImportError, "--sweep needs Optuna: pip install 'tfdml[sweep]'"):
        import optuna
        from optuna.storages.journal import JournalFileBackend
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(JournalFileBackend(f"{experiment.run_dir}/optuna.journal"))
    pruner = optuna.pruners.MedianPruner(n_warmup_steps=experiment.epochs // 3)
    study = optuna.create_study(
        study_name="sweep", storage=storage, pruner=pruner, direction="maximize", load_if_exists=True
    )
    # A sweep that resumes continues with other draws than those that it began with.
    asked = sum(trial.state != optuna.trial.TrialState.WAITING for trial in study.trials)
    study.sampler = optuna.samplers.TPESampler(seed=experiment.seed + asked)
    return study


def _train(study: Any, axes: dict[str, Axis], experiment: Experiment, settings: ClusterSettings) -> None:
    """Train what is left of a study, `settings.workers` runs at a time."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    space = {
        name: CategoricalDistribution(axis) if isinstance(axis[0], str) else FloatDistribution(*axis, log=True)
        for name, axis in axes.items()
    }
    # Those that were stopped, and None for each that has not begun.
    left = [trial if trial.params else None for trial in study.trials if not trial.state.is_finished()]
    logging.info("%d runs, %d of them still to be trained", len(study.trials), len(left))
    with ray_session(settings.cluster or LOCAL, cpus=max(settings.workers, os.cpu_count() or 1)) as ray:
        # A process of its own for each run; one that is lost is started again, and resumes.
        train = ray.remote(
            num_cpus=1,
            num_gpus=settings.gpus_per_worker,
            max_calls=1,
            max_retries=settings.max_failures,
            retry_exceptions=True,
        )(_trial)
        running: dict[Any, int] = {}
        with outbox_shown(ray) as outbox:
            while left or running:
                while left and len(running) < settings.workers:
                    trial = left.pop(0) or study.ask(space)
                    run = run_of(experiment, trial.number, trial.params)
                    running[train.remote(trial.number, run.as_flags(), outbox)] = trial.number
                ready = first_ready(ray, running)
                number = running.pop(ready)
                try:
                    value, state = ray.get(ready)
                except ray.exceptions.RayError as lost:  # --resume continues its run
                    logging.warning("trial %d: its process was lost: %s", number, short_message(lost, "last"))
                else:
                    study.tell(number, value, state)


def _trial(number: int, flags: str, outbox: Any) -> tuple[float | None, Any]:
    """Train one run, or resume it; its score, and its state."""
    import optuna
    from optuna.trial import TrialState

    ToOutbox.install(outbox, f"trial {number}: ")
    run = Experiment.from_flags(flags)
    study = open_study(dataclasses.replace(run, run_dir=str(Path(run.run_dir).parents[1])))
    trial = optuna.Trial(study, study.trials[number]._trial_id)

    def report() -> None:
        epoch, value = _measured(run)[-1]
        trial.report(value, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned

    try:
        trainer.train(run, resume=Path(run.run_dir).exists(), saved=report)
    except optuna.TrialPruned:
        return None, TrialState.PRUNED
    except UserError as refused:
        trial.set_user_attr("error", str(refused))
        return None, TrialState.FAIL
    return score_of(run), TrialState.COMPLETE


def _measured(run: Experiment) -> list[tuple[int, float]]:
    """Return the epochs after which a run was measured on held-out classes, each with its metric."""
    lines = RunFolder(run.run_dir).metrics.read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "validation" in record]
    return [(record["epoch"], float(record["validation"][run.selection_metric])) for record in records]


def score_of(run: Experiment) -> float:
    """Return the `selection_metric` of a finished run on the held-out classes, at or last before the epoch that counts.

    Args:
        run: Its settings, with its folder.
    """
    last = (RunFolder(run.run_dir).read_result() or {})["epoch"]
    return [value for epoch, value in _measured(run) if epoch <= last][-1]


def _write_plot(study: Any, metric: str, path: Path) -> None:
    """Write the metric over each setting."""
    from optuna.exceptions import ExperimentalWarning
    from optuna.visualization.matplotlib import plot_slice

    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        axes: Any = plot_slice(study, target_name=f"{metric} on held-out classes")
    with atomic_write(path) as temporary:
        np.ravel(axes)[0].figure.savefig(temporary, format="png", dpi=120, bbox_inches="tight")
