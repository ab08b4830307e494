"""What happens around the steps of `fit`: evaluation, records, checkpoints, the halt of a run, and signals to it.

A signal asks a run to stop: it stops at the end of a step, with a checkpoint; a second one ends it at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.errors import UserError
from tfdml.io.files import is_disk_full, unwritable, write_lines
from tfdml.training import checkpoints
from tfdml.training.build import Components
from tfdml.training.optimizers import averaged
from tfdml.training.results import keep_if_selected, publish_selected
from tfdml.training.settings import Experiment
from tfdml.training.watching import Halted, Watcher, flat
from tfdml.training.workers import Processes

# Windows has no SIGHUP.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal has asked the process to end.

    Args:
        number: The signal's number.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class Interrupted(Stopped):
    """A run was asked to stop, and did.

    Args:
        number: The signal.
        left: What of the run is on disk and how to continue it, in words.

    Example:
        >>> str(Interrupted(signal.SIGTERM, "nothing was written"))
        'stopped by SIGTERM: nothing was written'
    """

    def __init__(self, number: int, left: str = ""):
        super().__init__(number)
        self.left = left

    @property
    def status(self) -> int:
        """What the process should exit with: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}" + (f": {self.left}" if self.left else "")


class Interruption:
    """Turns the first signal into `Interrupted`, and lets the second end the process at once.

    `Interrupted` is raised where the signal finds the program, and within `deferred()` at the next `check()`. Signals
    that the process ignores (under nohup, say) stay ignored. Outside the main thread, where Python allows no handlers,
    nothing is handled.

    Example:
        >>> with Interruption() as interruption, interruption.deferred():
        ...     for step in range(3):
        ...         interruption.check()
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._deferred = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                # None: a handler that Python did not set, and could not put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.received is not None:
            raise Interrupted(self.received)

    def agree(self, processes: Processes) -> None:
        """Take a signal that any of the processes has received as received here; each has to call this.

        Args:
            processes: Who trains.
        """
        if not processes.alone:
            self.received = int(processes.gather(np.array([self.received or 0], np.int64)).max()) or None

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Enter a block in which a signal waits for `check()`, or for the end of the block."""
        with self._deferring(True):
            yield
        self.check()

    @contextlib.contextmanager
    def immediate(self) -> Iterator[None]:
        """Enter a block within a deferred one in which a signal does not wait."""
        with self._deferring(False):
            self.check()
            yield

    @contextlib.contextmanager
    def _deferring(self, value: bool) -> Iterator[None]:
        before, self._deferred = self._deferred, value
        try:
            yield
        finally:
            self._deferred = before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = number
        if not self._deferred:
            raise Interrupted(number)


# Unit vectors whose negatives are this close, on average, have collapsed to a point.
_COLLAPSED = 1e-3


class TrainingMonitor(keras.callbacks.Callback):
    """Evaluates, writes metrics.jsonl and TensorBoard, keeps the selected embedder, and checkpoints.

    One callback rather than several, because the order matters: a checkpoint holds the records of its epoch, so that a
    resumed run writes the same history as an uninterrupted one; the embedder that it selects is there before it.

    Args:
        experiment: The settings.
        parts: The objects of the run.
        watcher: Looks at some of the batches, on the chief.
        evaluate: epoch -> dict of split -> metrics; called before training (epoch 0) and after epochs.
        interruption: Asked after each step whether the run is to stop; within `fit` it should be deferred.
        processes: Who trains: the chief alone writes, and a signal to one of them is one to all.
        saved: Called after every checkpoint, in each process.
    """

    def __init__(
        self,
        experiment: Experiment,
        parts: Components,
        watcher: Watcher,
        evaluate: Callable[[int], dict[str, dict]],
        interruption: Interruption,
        processes: Processes,
        saved: Callable[[], None] | None,
    ):
        super().__init__()
        self.folder, self.steps_per_epoch = watcher.folder, parts.steps_per_epoch
        self._experiment, self._batch_size = experiment, parts.sampler.batch_size
        self._watcher, self._evaluate, self._saved = watcher, evaluate, saved
        self._interruption, self._processes = interruption, processes
        self.records: list[dict] = []
        self.step = 0
        self.train_seconds = self._timed_seconds = 0.0
        self._timed_images = 0
        self._metric_state: list[Any] | None = None
        self._writer: Any = None
        self._epoch_started = self._compiled = 0.0
        self._steps_here = 0

    def resume(self, state: checkpoints.TrainingState) -> None:
        """Continue from a checkpoint's state; the model holds the checkpoint's arrays."""
        self.records, self.step, self.train_seconds = state.records, state.step, state.train_seconds
        if self._processes.is_chief:
            write_lines(self.folder.metrics, self.records)
            self._watcher.resume(self.step)
        if self.step % self.steps_per_epoch:
            # fit() resets metrics at the start of an epoch; in the middle of one they must go on.
            self._metric_state = [keras.ops.convert_to_numpy(v) for v in self.model.metrics_variables]

    @property
    def epoch_is_open(self) -> bool:
        """Whether an epoch's last step has been made and the epoch not been measured yet."""
        return self.step > 0 and self.step // self.steps_per_epoch > self.records[-1]["epoch"]

    def close_epoch(self) -> None:
        """Measure and record the epoch that a resumed run had come to the end of, or into which it had come."""
        self._epoch_started = time.perf_counter()
        self.on_train_begin()
        try:
            self.on_epoch_end((self.step - 1) // self.steps_per_epoch, self.model.get_metrics_result())
        finally:
            self.on_train_end()

    # Keras's hooks

    def on_train_begin(self, logs=None):
        """Open TensorBoard's file; before the first step, measure and record the untrained embedder."""
        if self._processes.is_chief:
            with self._disk_for_summaries():
                self._writer = tf.summary.create_file_writer(str(self.folder.tensorboard))
        if not self.records:
            with self.measuring():
                measured = self._evaluate(0)
            self._record({"epoch": 0, "step": 0, **measured})
            self.checkpoint()

    def on_epoch_begin(self, epoch, logs=None):
        """Start the clock."""
        if self._metric_state is not None:
            for variable, value in zip(self.model.metrics_variables, self._metric_state, strict=True):
                variable.assign(value)
            self._metric_state = None
        self._epoch_started = time.perf_counter()
        self._steps_here = 0

    def on_train_batch_begin(self, batch, logs=None):
        """Look at the batch, when it is time."""
        if not self._watcher.is_due(self.step):
            return
        _ = self.model  # on JAX variables are with the learner only once a callback has asked for it

        def look() -> list[str]:
            with self._disk_for_summaries():
                return self._watcher.look(self.step, self._writer)

        ending = self._processes.of_chief(look)
        if ending:
            self.checkpoint()
            raise Halted(
                f"ended by --stop_on={self._experiment.stop_on}: {'; and '.join(ending)}; the checkpoint of step "
                f"{self.step} is saved; continue it anyway with --run_dir={self.folder.path} --resume, or with other "
                "flags by --start_from"
            )

    def on_train_batch_end(self, batch, logs=None):
        """Count the step; stop a run that has diverged; checkpoint when it is time, or when the run is to stop."""
        self.step += 1
        self._steps_here += 1
        if self._steps_here == 1:  # the first one compiles
            self._compiled = time.perf_counter()
        self._check_finite(logs or {})
        in_epoch = self.step % self.steps_per_epoch
        self._interruption.agree(self._processes)
        every = self._experiment.checkpoint_steps
        due = every and in_epoch and self.step % every == 0
        if due or self._interruption.received is not None:
            self.checkpoint()
        self._interruption.check()

    def on_epoch_end(self, epoch, logs=None):
        """Evaluate, record, keep the embedder if it is selected, checkpoint; the callbacks after this one log all."""
        shared = {} if logs is None else logs
        logs = {key: float(value) for key, value in shared.items()}
        now = time.perf_counter()
        seconds = now - self._epoch_started
        images = max(self._steps_here - 1, 0) * self._batch_size
        timed = now - self._compiled if images else 0.0
        pairs = float(keras.ops.convert_to_numpy(self.model.distance_trackers[1].count))
        if pairs and logs["d_neg"] < _COLLAPSED:
            raise UserError(
                f"the embedding collapsed in epoch {epoch + 1}: negatives are {logs['d_neg']:.1e} apart on average; "
                f"lower the learning rate or change --objectives{self._how_to_start_again()}"
            )
        record = {"epoch": epoch + 1, "step": self.step, "seconds": seconds, "train": logs}
        if timed > 0:
            record["images_per_second"] = images / timed
        record["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        try:
            with averaged(self.model), self.measuring():
                record.update(self._evaluate(epoch + 1))
        except Interrupted:
            # The resumed run closes this epoch before it continues.
            self.checkpoint()
            raise
        self.train_seconds += seconds
        self._timed_images += images
        self._timed_seconds += timed
        self._record(record)
        shared.update(flat(record))
        selection, metric = self._experiment.selection, self._experiment.selection_metric
        with averaged(self.model):
            if self._processes.is_chief:
                keep_if_selected(self.folder, self.records, selection, metric, self.model.embedder)
        self.checkpoint()
        if self._processes.is_chief:
            publish_selected(self.folder, self.records, selection, metric, self.steps_per_epoch)
        self._interruption.agree(self._processes)
        self._interruption.check()

    def on_train_end(self, logs=None):
        """Close TensorBoard's file."""
        if self._writer is not None:
            self._writer.close()

    # Steps of those

    def checkpoint(self) -> None:
        """Write a checkpoint of this moment.

        Raises:
            UserError: The weights are not finite, and worth no checkpoint; or it cannot be written.
        """
        part = checkpoints.first_not_finite(self.model)
        if part:
            raise self._diverged(f"the {part}'s weights are not finite")
        state = checkpoints.TrainingState(self.step, self.records, self.train_seconds)
        keep, writes = self._experiment.keep_checkpoints, self._processes.is_chief
        checkpoints.save(self.folder.checkpoints, self.model, state, keep, writes)
        if self._saved is not None:
            self._saved()

    def images_per_second(self) -> float | None:
        """Trained images per second in this process, without evaluation and the steps of an epoch that may compile."""
        return self._timed_images / self._timed_seconds if self._timed_seconds > 0 else None

    def _record(self, record: dict) -> None:
        self.records.append(record)
        if not self._processes.is_chief:
            return
        write_lines(self.folder.metrics, self.records)
        with self._disk_for_summaries(), self._writer.as_default(step=record["epoch"]):
            for name, value in flat(record).items():
                if name not in ("epoch", "step", "seconds"):
                    tf.summary.scalar(name, value)
            self._writer.flush()

    def _check_finite(self, logs: dict) -> None:
        bad = [name for name, value in logs.items() if not math.isfinite(float(value))]
        if bad:
            terms = [name for name in bad if name != "loss"] or bad
            raise self._diverged(f"{', '.join(terms)} is not finite", logs)

    def _diverged(self, what: str, logs: dict | None = None) -> UserError:
        told = ""
        if self._processes.is_chief and self.step:
            # JSON has no NaN.
            self._watcher.diverged(self.step, what, {name: str(float(value)) for name, value in (logs or {}).items()})
            told = f" (its batch: {self.folder.diverged})"
        return UserError(
            f"the run diverged at step {self.step}: {what}{told}; lower the learning rate or add --clip_norm"
            f"{self._how_to_start_again()}"
        )

    def _how_to_start_again(self) -> str:
        last = checkpoints.list_checkpoints(self.folder.checkpoints)[-1:]
        return "".join(f", in a new run from its last weights: --start_from={path} --run_dir=NEW" for path in last)

    def measuring(self) -> contextlib.AbstractContextManager[None]:
        """Return a block that a signal ends at once; of several workers, who measure together, after its end."""
        return self._interruption.immediate() if self._processes.alone else contextlib.nullcontext()

    @contextlib.contextmanager
    def _disk_for_summaries(self) -> Iterator[None]:
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            if not is_disk_full(error):
                raise
            raise unwritable(self.folder.tensorboard, error) from error
