"""What happens around the steps of `fit`: evaluation, records, checkpoints, and the halt of a run that has diverged."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdml.errors import UserError
from tfdml.io.files import is_disk_full, unwritable, write_lines
from tfdml.memory import return_freed_memory
from tfdml.training import checkpoints
from tfdml.training.build.components import Components
from tfdml.training.checkpoints import TrainingState
from tfdml.training.distributed.processes import Processes
from tfdml.training.optimizers import averaged
from tfdml.training.run.interruption import Interrupted, Interruption
from tfdml.training.run.selection import keep_if_selected, publish_selected
from tfdml.training.settings import Experiment
from tfdml.training.watching import Halted, Watcher, flat

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
        #: Receives each epoch, on the chief, while the run is under way.
        self.log: Callable[[dict], None] | None = None
        self.records: list[dict] = []
        self.step = 0
        self.train_seconds = self._timed_seconds = 0.0
        self._timed_images = 0
        self._metric_state: list[Any] | None = None
        self._writer: Any = None
        self._epoch_started = self._compiled = 0.0
        self._steps_here = 0

    def resume(self, state: TrainingState) -> None:
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
        """Measure and record the epoch that a resumed run had come to the end of."""
        self._epoch_started = time.perf_counter()
        self.on_train_begin()
        try:
            self.on_epoch_end(self.step // self.steps_per_epoch - 1, self.model.get_metrics_result())
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
        if self._steps_here == self._compiling_steps:
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
        """Evaluate, record, keep the embedder if it is selected, checkpoint."""
        logs = {key: float(value) for key, value in (logs or {}).items()}
        now = time.perf_counter()
        seconds = now - self._epoch_started
        images = max(self._steps_here - self._compiling_steps, 0) * self._batch_size
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
        selection, metric = self._experiment.selection, self._experiment.selection_metric
        with averaged(self.model):
            if self._processes.is_chief:
                keep_if_selected(self.folder, self.records, selection, metric, self.model.embedder)
        self.checkpoint()
        if self._processes.is_chief:
            publish_selected(self.folder, self.records, selection, metric, self.steps_per_epoch)
        return_freed_memory()
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
        state = TrainingState(self.step, self.records, self.train_seconds)
        keep, writes = self._experiment.keep_checkpoints, self._processes.is_chief
        checkpoints.save(self.folder.checkpoints, self.model, state, keep, writes)
        if self._saved is not None:
            self._saved()

    def images_per_second(self) -> float | None:
        """Trained images per second in this process, without evaluation and the steps of an epoch that may compile."""
        return self._timed_images / self._timed_seconds if self._timed_seconds > 0 else None

    @property
    def _compiling_steps(self) -> int:
        """The first steps of an epoch that throughput leaves out, as they may compile: one of each phase."""
        return 1 + getattr(self.model, "statistics_steps", 0)

    def _record(self, record: dict) -> None:
        self.records.append(record)
        if not self._processes.is_chief:
            return
        write_lines(self.folder.metrics, self.records)
        if self.log is not None:
            self.log(record)
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
