"""Runs an experiment: `fit`, evaluation, and the run folder."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.pipeline import evaluation_batches, explain_failure, training_batches
from tfdml.data.sampling import Sampler
from tfdml.data.transforms import EvaluationTransform, TrainTransform
from tfdml.errors import UserError
from tfdml.evaluation import embed, evaluate_dataset, write_report
from tfdml.files import atomic_path, write_json
from tfdml.models import Embedder, MetricLearner
from tfdml.training import checkpoints, distribution
from tfdml.training.building import Splits, load_splits, make_learner, make_sampler, make_transforms
from tfdml.training.calibration import calibrate
from tfdml.training.experiment import Experiment
from tfdml.training.memory import plan_cache
from tfdml.training.moments import moment_embedder
from tfdml.training.recorder import Recorder
from tfdml.training.run_folder import RunFolder

RETRIEVAL = ("recall", "map@r", "r_precision")
CLUSTERING = ("nmi", "ami", "f1")
_PROTOCOL = "zero-shot: trained on {train} classes, evaluated {how} on {test} classes never seen in training"


class Evaluator:
    """Embeds splits and measures them.

    Args:
        experiment: The experiment.
        splits: Its images.
        transform: The view of evaluation.
        cache: Whether to keep the views in memory.
    """

    def __init__(self, experiment: Experiment, splits: Splits, transform: EvaluationTransform, cache: bool = False):
        self.experiment = experiment
        self.splits = splits
        self.transform = transform
        self.batches: dict[str, tf.data.Dataset] = {}
        for name, split in (("validation", splits.validation), ("test", splits.test)):
            if split is not None:
                batches = evaluation_batches(split, transform, experiment.evaluation_batch_size)
                self.batches[name] = distribution.own_threads(batches.cache() if cache else batches)

    def embed(self, embedder: Embedder, name: str) -> np.ndarray:
        """The embeddings of a split, (N, d) float32."""
        return embed(embedder, self.batches[name])

    def measure(self, embeddings: np.ndarray, name: str, metrics=RETRIEVAL, intervals=None) -> dict[str, Any]:
        """The metrics of a split's embeddings; see `evaluate_retrieval` for `intervals`."""
        ks, images = self.experiment.recall_ks(), getattr(self.splits, name)
        return evaluate_dataset(embeddings, images, ks=ks, metrics=metrics, intervals=intervals)

    def each_epoch(self, embedder: Embedder, epoch: int) -> dict[str, dict]:
        """The metrics of every split, in the epochs that the experiment evaluates."""
        every, last = self.experiment.evaluate_every, self.experiment.epochs
        if epoch not in (0, last) and (every == 0 or epoch % every):
            return {}
        measured = {name: self.measure(self.embed(embedder, name), name) for name in self.batches}
        for name, metrics in measured.items():
            logging.info("epoch %d, %s: %s", epoch, name, format_metrics(metrics))
        return measured


def format_metrics(metrics: dict[str, float]) -> str:
    """Metrics for people: percent, one decimal."""
    shown = [(name, value) for name, value in metrics.items() if isinstance(value, float)]
    return "  ".join(f"{name} {100 * value:.1f}" for name, value in shown)


def train(experiment: Experiment, resume: bool = False) -> dict[str, Any]:
    """Run an experiment to its end and return what `result.json` holds.

    Args:
        experiment: The settings.
        resume: Continue the run in `experiment.run_dir` from its newest checkpoint.

    Raises:
        UserError: Something that the user can mend, before training where it can be known then.
    """
    started = time.perf_counter()
    folder = RunFolder(experiment.run_dir)
    if resume:
        _check_same(experiment, folder.load_experiment())
    else:
        folder.check_new()
    if experiment.deterministic and experiment.logical_devices < 2:
        distribution.one_operation_at_a_time()
    strategy = distribution.make_strategy(experiment.logical_devices)
    splits = load_splits(experiment)
    sampler = make_sampler(experiment, splits.train, distribution.num_replicas(strategy))
    steps_per_epoch = experiment.steps_per_epoch or sampler.steps_per_epoch
    train_transform, evaluation_transform = make_transforms(experiment)
    with distribution.scope(strategy):
        learner = make_learner(experiment, splits.train.num_classes, steps_per_epoch)
    if not resume:
        folder.create(experiment, distribution.describe(strategy))

    drawn = experiment.epochs * steps_per_epoch * sampler.batch_size
    evaluated = [split for split in (splits.validation, splits.test) if split is not None]
    kept = plan_cache(experiment, splits.train, evaluated, train_transform, drawn)
    evaluator = Evaluator(experiment, splits, evaluation_transform, kept.evaluation)
    recorder = Recorder(
        folder,
        sampler.batch_size,
        steps_per_epoch,
        lambda epoch: evaluator.each_epoch(learner.embedder, epoch),
        experiment.selection,
        experiment.checkpoint_steps,
        experiment.keep_checkpoints,
    )
    state = checkpoints.restore_latest(folder.checkpoints, learner) if resume else None
    if state is not None:
        recorder.resume(state, learner)
        logging.info("resuming %s at step %d", folder.path, recorder.step)
    try:
        if state is None:
            batch_size = experiment.evaluation_batch_size
            calibrate(learner, splits.train, evaluation_transform, batch_size, folder.calibration)
        _fit(experiment, learner, splits, sampler, train_transform, recorder, kept.training)
    except UserError:
        raise
    except tf.errors.OpError as error:
        explained = explain_failure(error, splits.train) or explain_failure(error, splits.test)
        if explained is None:
            raise
        raise explained from error
    return _finish(experiment, learner, evaluator, recorder, folder, time.perf_counter() - started)


def _fit(
    experiment: Experiment,
    learner: MetricLearner,
    splits: Splits,
    sampler: Sampler,
    transform: TrainTransform,
    recorder: Recorder,
    cache: bool,
) -> None:
    steps = recorder.steps_per_epoch
    epoch, within = divmod(recorder.step, steps)
    if epoch >= experiment.epochs and recorder.records:
        return
    batches = training_batches(
        splits.train,
        sampler,
        transform,
        seed=experiment.seed,
        first_step=recorder.step,
        cache=cache,
        cache_limit_mb=experiment.cache_limit_mb,
    )
    batches = distribution.own_threads(batches)
    verbose = 1 if sys.stdout.isatty() else 2
    fit_arguments = {"callbacks": [recorder], "verbose": verbose, "shuffle": False}
    if within:
        # The rest of the epoch in which the run was stopped; the same stream of batches then goes on.
        learner.fit(
            batches.take(steps - within),
            initial_epoch=epoch,
            epochs=epoch + 1,
            steps_per_epoch=steps - within,
            **fit_arguments,
        )
        batches, epoch = batches.skip(steps - within), epoch + 1
    learner.fit(batches, initial_epoch=epoch, epochs=experiment.epochs, steps_per_epoch=steps, **fit_arguments)


def _finish(experiment, learner, evaluator, recorder, folder, seconds) -> dict[str, Any]:
    if experiment.selection == "last":
        recorder.save_embedder()
        embedder = learner.embedder
    else:
        embedder = keras.saving.load_model(folder.embedder)
    embeddings = evaluator.embed(embedder, "test")
    metrics = evaluator.measure(embeddings, "test", RETRIEVAL + CLUSTERING, intervals="classes")
    intervals = metrics.pop("intervals")
    splits = evaluator.splits
    selection = {
        "last": "the last epoch",
        "validation": "the best epoch on held-out training classes",
        "test": "the best epoch on the test classes themselves: the figure is flattered by that choice",
    }[experiment.selection]
    result = {
        "dataset": experiment.dataset,
        "metrics": metrics,
        "intervals": intervals,
        "metrics_before": recorder.records[0].get("test", {}),
        "protocol": _protocol(splits),
        "selection": selection,
        "epoch": recorder.best["epoch"],
        "steps": recorder.step,
        "seconds": seconds,
        "train_seconds": recorder.train_seconds,
        "images_per_second": recorder.images_per_second(),
    }
    if experiment.moment_embedder:
        train = evaluation_batches(evaluator.splits.train, evaluator.transform, experiment.evaluation_batch_size)
        model = moment_embedder(learner, train)
        with atomic_path(folder.moments) as temporary:
            model.save(temporary)
        result["metrics_moments"] = evaluator.measure(evaluator.embed(model, "test"), "test", RETRIEVAL + CLUSTERING)
    write_json(folder.result, result)
    if experiment.report:
        _write_report(experiment, splits.test, embeddings, result, recorder, folder)
    return result


def _protocol(splits: Splits) -> str:
    how = "all-to-all" if splits.test.is_query is None else "queries against gallery"
    return _PROTOCOL.format(train=splits.train.num_classes, test=splits.test.num_classes, how=how)


def _write_report(experiment, test, embeddings, result, recorder, folder) -> None:
    flags = {field.name: getattr(experiment, field.name) for field in dataclasses.fields(experiment)}
    gallery = {}
    if test.is_query is not None:
        gallery = {"gallery": test.gallery, "gallery_embeddings": embeddings[~test.is_query]}
        test, embeddings = test.queries, embeddings[test.is_query]
    moments = {"moments": result["metrics_moments"]} if "metrics_moments" in result else {}
    write_report(
        folder.report,
        f"{folder.path.name}: {experiment.dataset}",
        result["metrics_before"],
        {**result["metrics"], **moments},
        [{"epoch": record["epoch"], **record.get("test", {})} for record in recorder.records],
        test,
        embeddings,
        summary=f"{result['protocol'].capitalize()}. The embedder is that of {result['selection']}.",
        flags=flags,
        environment=json.loads(folder.environment.read_text(encoding="utf-8")),
        intervals=result["intervals"],
        interval_name="95% interval over classes",
        **gallery,
    )


def _check_same(asked: Experiment, stored: Experiment) -> None:
    for field in dataclasses.fields(Experiment):
        old, new = getattr(stored, field.name), getattr(asked, field.name)
        if old != new and field.name != "run_dir":
            raise UserError(
                f"--resume: the run was started with --{field.name}={old}, not {new}; leave the flag out, or start anew"
            )


def run_paths(run_dir: str) -> dict[str, Path]:
    """Where a run's results lie."""
    folder = RunFolder(run_dir)
    return {"embedder": folder.embedder, "result": folder.result, "report": folder.report}
