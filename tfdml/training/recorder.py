"""What happens around the steps of `fit`: evaluation, records, checkpoints, and the halt of a run that has diverged."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdml.errors import UserError
from tfdml.files import atomic_path, write_lines
from tfdml.training import checkpoints
from tfdml.training.run_folder import RunFolder

# Unit vectors whose negatives are this close, on average, have collapsed to a point.
_COLLAPSED = 1e-3


class Recorder(keras.callbacks.Callback):
    """Evaluates, writes metrics.jsonl and TensorBoard, keeps the selected embedder, and checkpoints.

    One callback rather than several, because the order matters: a checkpoint holds the records of its epoch, so that a
    resumed run writes the same history as an unbroken one.

    Args:
        folder: The run folder.
        batch_size: Images per step.
        steps_per_epoch: Steps per epoch.
        evaluate: epoch -> dict of split -> metrics; called before training (epoch 0) and after epochs.
        selection: `"last"`, `"validation"` or `"test"`.
        checkpoint_steps: Checkpoint every this many steps besides each epoch; 0 for none.
        keep: How many checkpoints stay.
    """

    def __init__(
        self,
        folder: RunFolder,
        batch_size: int,
        steps_per_epoch: int,
        evaluate: Callable[[int], dict[str, dict]],
        selection: str = "last",
        checkpoint_steps: int = 0,
        keep: int = 2,
    ):
        super().__init__()
        self.folder = folder
        self.batch_size = batch_size
        self.steps_per_epoch = steps_per_epoch
        self.evaluate = evaluate
        self.selection = selection
        self.checkpoint_steps = checkpoint_steps
        self.keep = keep
        self.records: list[dict] = []
        self.step = 0
        self.best: dict[str, Any] = {"epoch": None, "recall@1": -1.0}
        self.train_seconds = 0.0
        self.timed_images = 0
        self.timed_seconds = 0.0
        self._metric_state: list[Any] | None = None
        self._writer: Any = None
        self._epoch_started = 0.0
        self._first_step_ended = 0.0
        self._steps_here = 0
        self._seconds_before = 0.0

    # State that a checkpoint carries

    def state(self) -> dict:
        """What a resumed run needs besides the arrays."""
        return {"records": self.records, "best": self.best, "train_seconds": self.train_seconds}

    def resume(self, state: dict, learner) -> None:
        """Continue from a checkpoint's state; the learner holds the checkpoint's arrays."""
        self.records = state["records"]
        self.best = state["best"]
        self.train_seconds = state["train_seconds"]
        self.step = state["step"]
        if self.step % self.steps_per_epoch:
            # fit() resets metrics at the start of an epoch; in the middle of one they must go on.
            self._metric_state = [keras.ops.convert_to_numpy(variable) for variable in learner.metrics_variables]
        write_lines(self.folder.metrics, self.records)

    # Keras's hooks

    def on_train_begin(self, logs=None):
        """Open TensorBoard's file; before the first step, measure and record the untrained embedder."""
        del logs
        self._writer = tf.summary.create_file_writer(str(self.folder.tensorboard))
        if not self.records:
            self._record({"epoch": 0, "step": 0, **self.evaluate(0)})
            self.checkpoint()

    def on_epoch_begin(self, epoch, logs=None):
        """Start the clock."""
        del epoch, logs
        if self._metric_state is not None:
            for variable, value in zip(self.model.metrics_variables, self._metric_state, strict=True):
                variable.assign(value)
            self._metric_state = None
        self._epoch_started = time.perf_counter()
        self._steps_here = 0

    def on_train_batch_end(self, batch, logs=None):
        """Count the step; stop a run that has diverged; checkpoint when it is time."""
        del batch
        self.step += 1
        self._steps_here += 1
        if self._steps_here == 1:
            # The first step of a process compiles: throughput is measured after it.
            self._first_step_ended = time.perf_counter()
        self._check_finite(logs or {})
        in_epoch = self.step % self.steps_per_epoch
        if self.checkpoint_steps and in_epoch and self.step % self.checkpoint_steps == 0:
            self.checkpoint()

    def on_epoch_end(self, epoch, logs=None):
        """Evaluate, record, keep the embedder if it is selected, checkpoint."""
        logs = {key: float(value) for key, value in (logs or {}).items()}
        now = time.perf_counter()
        seconds = now - self._epoch_started
        self.train_seconds += seconds
        images, timed = (self._steps_here - 1) * self.batch_size, now - self._first_step_ended
        self.timed_images += images
        self.timed_seconds += timed
        pairs = float(keras.ops.convert_to_numpy(self.model.distance_trackers[1].count))
        if pairs and logs["d_neg"] < _COLLAPSED:
            raise UserError(
                f"the embedding collapsed in epoch {epoch + 1}: negatives are {logs['d_neg']:.1e} apart on average; "
                "lower the learning rate or change --objectives"
            )
        record = {"epoch": epoch + 1, "step": self.step, "seconds": seconds, "train": logs}
        if images and timed > 0:
            record["images_per_second"] = images / timed
        record["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        record.update(self.evaluate(epoch + 1))
        self._record(record)
        self._select(record)
        self.checkpoint()

    def on_train_end(self, logs=None):
        """Close TensorBoard's file."""
        del logs
        if self._writer is not None:
            self._writer.close()

    # Steps of those

    def checkpoint(self) -> None:
        """Write a checkpoint of this moment."""
        checkpoints.save(self.folder.checkpoints, self.model, self.step, self.state(), self.keep)

    def images_per_second(self) -> float | None:
        """Trained images per second in this process, without evaluation and without the first step of each epoch."""
        return self.timed_images / self.timed_seconds if self.timed_images and self.timed_seconds > 0 else None

    def save_embedder(self) -> None:
        """Write the embedder as it is now."""
        with atomic_path(self.folder.embedder) as temporary:
            self.model.embedder.save(temporary)

    def _record(self, record: dict) -> None:
        self.records.append(record)
        write_lines(self.folder.metrics, self.records)
        with self._writer.as_default(step=record["epoch"]):
            for part in ("train", "validation", "test"):
                for name, value in record.get(part, {}).items():
                    tf.summary.scalar(f"{part}/{name}", value)
            for name in ("learning_rate", "images_per_second"):
                if name in record:
                    tf.summary.scalar(name, record[name])
        self._writer.flush()

    def _select(self, record: dict) -> None:
        if self.selection == "last":
            self.best = {"epoch": record["epoch"]}
            return
        recall = record.get(self.selection, {}).get("recall@1")
        if recall is not None and recall > self.best["recall@1"]:
            self.best = {"epoch": record["epoch"], "recall@1": recall}
            self.save_embedder()

    def _check_finite(self, logs: dict) -> None:
        bad = [name for name, value in logs.items() if not math.isfinite(float(value))]
        if bad:
            terms = [name for name in bad if name != "loss"] or bad
            raise UserError(
                f"the run diverged at step {self.step}: {', '.join(terms)} is not finite; lower the learning rate, add "
                f"--clip_norm, or resume from {self.folder.checkpoints} with other flags in a new run"
            )
