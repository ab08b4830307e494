"""What happens around the steps of `fit`: evaluation, records, checkpoints and the halt of a
run."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras import ops

from tfdml.errors import UserError
from tfdml.io.files import flat, write_lines
from tfdml.run_folder import list_checkpoints
from tfdml.training import checkpoints
from tfdml.training.build import Components
from tfdml.training.interruption import Interruption
from tfdml.training.optimizers import averaged
from tfdml.training.results import Evaluator, selected_epoch
from tfdml.training.watching import Watcher

# Seconds from the first step to the first line of progress, and between lines.
_FIRST_LINE, _NEXT_LINE = 10, 30
# Unit vectors whose negatives are this close, on average, have collapsed to a point.
_COLLAPSED = 1e-3


class TrainingMonitor(keras.callbacks.Callback):
    """Evaluates, writes metrics.jsonl and TensorBoard, keeps the selected embedder, and
    checkpoints.

    One callback rather than several, because the order matters: a checkpoint holds the records of
    its epoch, so that a resumed run writes the same history as an uninterrupted one; the embedder
    that it selects is there before it.

    Args:
        components: The objects of the run. Its chief alone writes, and a signal to one process is
            one to all.
        evaluator: Measures the embedder before training and after epochs.
        interruption: Asked after each execution whether the run is to stop; within `fit` it should
            be deferred.
        saved: Called after every checkpoint, in each process.
    """

    def __init__(
        self,
        components: Components,
        evaluator: Evaluator,
        interruption: Interruption,
        saved: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self.folder = components.folder
        self.steps_per_epoch = components.steps_per_epoch
        self.steps_per_execution = components.learner.steps_per_execution
        self._components = components
        self._evaluator = evaluator
        self._interruption = interruption
        self._saved = saved
        self._processes = components.processes
        self._experiment = components.experiment
        self.watcher = Watcher(components)
        self.records: list[dict[str, Any]] = []
        self.step = 0
        #: The classes that are drawn together until the next search: see `NeighborSampler.update`.
        self.neighbors: list[list[int]] | None = None
        #: The embedder's weights in the selected epoch, where that may be an earlier one than the
        #: last.
        self.selected: Sequence[np.ndarray] = ()
        self._metric_state: list[Any] | None = None
        self._writer: Any = None
        self._epoch_started = self._compiled = 0.0
        self._steps_here = 0
        self._next_line = 0.0
        self._closings: list[float] = []  # seconds after the last step of each epoch
        self.set_model(components.learner)

    def resume(self, state: checkpoints.TrainingState) -> None:
        """Continue from a checkpoint's state; the model holds the checkpoint's arrays."""
        self.records, self.step = state.records, state.step
        self.neighbors, self.selected = state.neighbors, state.selected
        if self._processes.is_chief:
            write_lines(self.folder.metrics, self.records)
            self.watcher.resume(self.step)
        if self.step % self.steps_per_epoch:
            # fit() resets metrics at the start of an epoch; in the middle of one they must go on.
            self._metric_state = [
                keras.ops.convert_to_numpy(v) for v in self.model.metrics_variables
            ]

    def state(self) -> checkpoints.TrainingState:
        """Return what a run that continues from here needs besides the model."""
        return checkpoints.TrainingState(self.step, self.records, self.neighbors, self.selected)

    def close_epoch(self, within: bool = False) -> None:
        """Measure and record an epoch whose last step was made before the run was stopped, if there
        is one.

        Args:
            within: Also one within which the run was stopped.
        """
        begun = bool(self.records) and self.step > self.records[-1]["step"]
        if not begun or (self.step % self.steps_per_epoch and not within):
            return
        self._epoch_started = time.perf_counter()
        self.on_train_begin()
        self.on_epoch_end((self.step - 1) // self.steps_per_epoch, self.model.get_metrics_result())
        self.on_train_end()

    def _evaluate(self, epoch: int) -> dict[str, dict]:
        return self._evaluator.each_epoch(self.model, epoch, self._experiment.epochs)

    # Keras's hooks

    def on_train_begin(self, logs=None):
        """Open TensorBoard's file; before the first step, measure and record the untrained
        embedder."""
        if self._processes.is_chief:
            self._writer = tf.summary.create_file_writer(str(self.folder.tensorboard))
        if not self.records:
            now = time.perf_counter()
            self._record({"epoch": 0, "step": 0, **self._evaluate(0)})
            self.checkpoint()
            self._closings.append(time.perf_counter() - now)
            self._stop_if_asked()

    def on_epoch_begin(self, epoch, logs=None):
        """Start the clock."""
        if self._metric_state is not None:
            for variable, value in zip(
                self.model.metrics_variables, self._metric_state, strict=True
            ):
                variable.assign(value)
            self._metric_state = None
        self._epoch_started = time.perf_counter()
        self._steps_here = 0

    def on_train_batch_begin(self, batch, logs=None):
        """Look at the batch, when it is time."""
        if self._processes.is_chief and self.watcher.is_due(self.step):
            # On JAX variables are with the learner only once a callback has asked for it.
            _ = self.model
            self.watcher.look(self.step, self._writer)

    def on_train_batch_end(self, batch, logs=None):
        """Count the steps; stop a run that has diverged; checkpoint when it is time, or when the
        run is to stop."""
        before = self.step
        self.step += self.steps_per_execution
        self._steps_here += self.steps_per_execution
        if self._steps_here == self.steps_per_execution:
            self._compiled = time.perf_counter()
            self._next_line = self._next_line or self._compiled + _FIRST_LINE
        self._check_finite(logs or {})
        self._interruption.agree(self._processes)
        every = self._experiment.checkpoint_steps
        due = every and self.step % self.steps_per_epoch and self.step // every > before // every
        if due or self._interruption.received is not None:
            self.checkpoint()
        self._interruption.check()
        if self._processes.is_chief and time.perf_counter() > self._next_line and self._steps_timed:
            self._show_progress(float((logs or {})["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        """Evaluate, record, keep the embedder if it is selected, checkpoint; the callbacks after
        this one log all."""
        shared = {} if logs is None else logs
        now = time.perf_counter()
        for tracker in self.model.distance_trackers:
            if not float(keras.ops.convert_to_numpy(tracker.count)):
                shared.pop(tracker.name, None)  # Keras makes the mean over no pair 0
        logs = {key: float(value) for key, value in shared.items()}
        if logs.get("d_neg", 1.0) < _COLLAPSED:
            raise UserError(
                f"the embedding collapsed in epoch {epoch + 1}: negatives are {logs['d_neg']:.1e} "
                "apart on average; lower the learning rate or change "
                f"objectives{self._how_to_start_again()}"
            )
        record = {
            "epoch": epoch + 1,
            "step": self.step,
            "seconds": now - self._epoch_started,
            "train": logs,
        }
        if self._steps_timed:
            images = self._steps_timed * self._components.sampler.batch_size
            record["images_per_second"] = images / (now - self._compiled)
        record["learning_rate"] = float(
            keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)
        )
        self.checkpoint()  # a run that is killed while it measures closes this epoch later
        with averaged(self.model):
            record.update(self._evaluate(epoch + 1))
        self._record(record)
        if self._experiment.log_to:  # the line of the epoch would repeat every term
            shared.update(flat(record))
        with averaged(self.model):
            self._keep_embedder()
        self.checkpoint()
        self._closings.append(time.perf_counter() - now)
        self._stop_if_asked()

    def on_train_end(self, logs=None):
        """Close TensorBoard's file."""
        if self._writer is not None:
            self._writer.close()

    # Steps of those

    @property
    def _steps_timed(self) -> int:
        """The steps of this epoch without the first execution, which compiles."""
        return max(self._steps_here - self.steps_per_execution, 0)

    def checkpoint(self) -> None:
        """Write a checkpoint of this moment.

        Raises:
            UserError: The weights are not finite, and worth no checkpoint; or it cannot be written.
        """
        if part := checkpoints.first_not_finite(self.model):
            raise self._diverged(f"the {part}'s weights are not finite")
        checkpoints.save(
            self.folder.checkpoints, self.model, self.state(), write=self._processes.is_chief
        )
        self._saved()

    def _show_progress(self, loss: float) -> None:
        now = time.perf_counter()
        self._next_line = now + _NEXT_LINE
        epochs = self._experiment.epochs
        epoch = -(-self.step // self.steps_per_epoch)
        steps = epochs * self.steps_per_epoch
        seconds_per_step = (now - self._compiled) / self._steps_timed
        seconds_per_closing = sum(self._closings) / max(len(self._closings), 1)
        seconds_left = seconds_per_step * (steps - self.step)
        seconds_left += seconds_per_closing * (epochs - epoch + 1)
        logging.info(
            "step %d of %d, epoch %d of %d: loss %.4g, %.3g s a step, about %s left",
            self.step,
            steps,
            epoch,
            epochs,
            loss,
            seconds_per_step,
            datetime.timedelta(seconds=round(seconds_left)),
        )

    def _keep_embedder(self) -> None:
        """Keep the embedder of the newest epoch if it is the best so far."""
        selection, metric = self._experiment.selection, self._experiment.selection_metric
        if selection == "last":
            return
        epoch = self._processes.of_chief(lambda: selected_epoch(self.records, selection, metric))
        if epoch != self.records[-1]["epoch"]:
            return
        self.selected = [ops.convert_to_numpy(weight) for weight in self.model.embedder_weights]
        if self._processes.is_chief:
            checkpoints.save_embedders(self.folder, self.model)

    def _stop_if_asked(self) -> None:
        self._interruption.agree(self._processes)
        self._interruption.check()

    def _record(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if not self._processes.is_chief:
            return
        write_lines(self.folder.metrics, self.records)
        with self._writer.as_default(step=record["epoch"]):
            for name, value in flat(record).items():
                if name not in ("epoch", "step", "seconds"):
                    tf.summary.scalar(name, value)
            self._writer.flush()

    def _check_finite(self, logs: Mapping[str, Any]) -> None:
        bad = [name for name, value in logs.items() if not math.isfinite(float(value))]
        if bad:
            terms = [name for name in bad if name != "loss"] or bad
            raise self._diverged(f"{', '.join(terms)} is not finite")

    def _diverged(self, reason: str) -> UserError:
        return UserError(
            f"the run diverged at step {self.step}: {reason}; lower the learning rate or add "
            f"clip_norm{self._how_to_start_again()}"
        )

    def _how_to_start_again(self) -> str:
        last = list_checkpoints(self.folder.checkpoints)[-1:]
        return "".join(
            f", in a new run from its last weights: --start_from={path} --run_dir=NEW"
            for path in last
        )
