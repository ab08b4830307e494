"""What happens around the steps of `fit`: evaluation, records, checkpoints, and the halt of a run that has diverged."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdml.errors import UserError
from tfdml.io.files import is_disk_full, unwritable, write_json, write_lines
from tfdml.training import checkpoints
from tfdml.training.checkpoints import TrainingState
from tfdml.training.distributed.tensorflow_workers import Workers
from tfdml.training.optimizers import averaged, part_rates
from tfdml.training.run.interruption import Interrupted, Interruption
from tfdml.training.run.selection import keep_if_selected, publish_selected
from tfdml.training.run_folder import RunFolder
from tfdml.training.watching.alarms import Halted
from tfdml.training.watching.loggers import Logger
from tfdml.training.watching.pictures import Projector
from tfdml.training.watching.watcher import Watcher, blamed

# Unit vectors whose negatives are this close, on average, have collapsed to a point.
_COLLAPSED = 1e-3


class TrainingMonitor(keras.callbacks.Callback):
    """Evaluates, writes metrics.jsonl and TensorBoard, keeps the selected embedder, and checkpoints.

    One callback rather than several, because the order matters: a checkpoint holds the records of its epoch, so that a
    resumed run writes the same history as an unbroken one; the embedder that it selects is there before it.

    Args:
        folder: The run folder.
        batch_size: Images per step.
        steps_per_epoch: Steps per epoch.
        evaluate: epoch -> dict of split -> metrics; called before training (epoch 0) and after epochs.
        selection: `"last"`, `"validation"` or `"test"`.
        selection_metric: By which metric an epoch is selected there.
        checkpoint_steps: Checkpoint every this many steps besides each epoch; 0 for none.
        keep: How many checkpoints stay.
        interruption: Asked after each step whether the run is to stop; within `fit` it should be deferred.
        workers: Who trains: the chief alone writes, and a signal to one of them is one to all.
        saved: Called after every checkpoint, on each worker.
        batch: step -> what is to be told of its batch should the run diverge in it, such as the images' names.
        watcher: Looks at some of the batches, on the chief.
        projector: Writes embeddings for TensorBoard's projector after each epoch, on the chief.
    """

    def __init__(
        self,
        folder: RunFolder,
        batch_size: int,
        steps_per_epoch: int,
        evaluate: Callable[[int], dict[str, dict]],
        selection: str = "last",
        selection_metric: str = "map@r",
        checkpoint_steps: int = 0,
        keep: int = 2,
        interruption: Interruption | None = None,
        workers: Workers | None = None,
        saved: Callable[[], None] | None = None,
        batch: Callable[[int], dict[str, Any]] | None = None,
        watcher: Watcher | None = None,
        projector: Projector | None = None,
    ):
        super().__init__()
        self.folder = folder
        self.batch_size = batch_size
        self.steps_per_epoch = steps_per_epoch
        self.evaluate = evaluate
        self.selection = selection
        self.selection_metric = selection_metric
        self.checkpoint_steps = checkpoint_steps
        self.keep = keep
        self.interruption = interruption or Interruption()
        self.workers = workers or Workers()
        self.saved = saved
        self.batch = batch
        self.watcher = watcher
        self.projector = projector
        #: Told of each epoch, on the chief, while the run is under way.
        self.logger: Logger | None = None
        self.records: list[dict] = []
        self.step = 0
        self.train_seconds = 0.0
        self.timed_images = 0
        self.timed_seconds = 0.0
        self._metric_state: list[Any] | None = None
        self._writer: Any = None
        self._epoch_started = 0.0
        self._compiled = 0.0
        self._steps_here = 0

    def resume(self, state: TrainingState) -> None:
        """Continue from a checkpoint's state; the model holds the checkpoint's arrays."""
        self.records, self.step, self.train_seconds = state.records, state.step, state.train_seconds
        if self.workers.is_chief:
            write_lines(self.folder.metrics, self.records)
            if self.watcher is not None:
                self.watcher.resume(self.step)
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
        with self._summaries():
            self.on_epoch_end(self.step // self.steps_per_epoch - 1, self.model.get_metrics_result())

    # Keras's hooks

    def on_train_begin(self, logs=None):
        """Open TensorBoard's file; before the first step, measure and record the untrained embedder."""
        del logs
        if self.workers.is_chief:
            with self._disk_for_summaries():
                self._writer = tf.summary.create_file_writer(str(self.folder.tensorboard))
        if not self.records:
            with self._measuring():
                measured = self.evaluate(0)
            self._record({"epoch": 0, "step": 0, **measured})
            self.checkpoint()

    def on_epoch_begin(self, epoch, logs=None):
        """Start the clock."""
        del epoch, logs
        if self._metric_state is not None:
            for variable, value in zip(self.model.metrics_variables, self._metric_state, strict=True):
                variable.assign(value)
            self._metric_state = None
        if self.watcher is not None and self.workers.is_chief:
            self._attach()
            self.watcher.begin_epoch(self.step)
        self._epoch_started = time.perf_counter()
        self._steps_here = 0

    def on_train_batch_begin(self, batch, logs=None):
        """Look at the batch, when it is time."""
        del batch, logs
        if self.watcher is not None and self.watcher.is_due(self.step):
            self._watch(self.watcher.look)

    def on_train_batch_end(self, batch, logs=None):
        """Count the step; stop a run that has diverged; checkpoint when it is time, or when the run is to stop."""
        del batch
        self.step += 1
        self._steps_here += 1
        if self._steps_here == self._compiling_steps:
            self._compiled = time.perf_counter()
        self._check_finite(logs or {})
        in_epoch = self.step % self.steps_per_epoch
        self.interruption.agree(self.workers)
        due = self.checkpoint_steps and in_epoch and self.step % self.checkpoint_steps == 0
        if due or self.interruption.received is not None:
            self.checkpoint()
        self.interruption.check()

    def on_epoch_end(self, epoch, logs=None):
        """Evaluate, record, keep the embedder if it is selected, checkpoint."""
        logs = {key: float(value) for key, value in (logs or {}).items()}
        now = time.perf_counter()
        seconds = now - self._epoch_started
        images = max(self._steps_here - self._compiling_steps, 0) * self.batch_size
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
        record["rates"] = part_rates(self.model.optimizer)
        try:
            with averaged(self.model), self._measuring():
                record.update(self.evaluate(epoch + 1))
        except Interrupted:
            # The resumed run closes this epoch before it goes on.
            self.checkpoint()
            raise
        self.train_seconds += seconds
        self.timed_images += images
        self.timed_seconds += timed
        self._record(record)
        if self.workers.is_chief:
            with averaged(self.model):
                keep_if_selected(self.folder, self.records, self.selection, self.model.embedder, self.selection_metric)
                if self.projector is not None:
                    self.projector.write(self.model.embedder)
        self.checkpoint()
        if self.workers.is_chief:
            publish_selected(self.folder, self.records, self.selection, self.steps_per_epoch, self.selection_metric)
        if self.watcher is not None:
            self._watch(self.watcher.end_epoch)
        self.interruption.agree(self.workers)
        self.interruption.check()

    def on_train_end(self, logs=None):
        """Close TensorBoard's file."""
        del logs
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
        checkpoints.save(self.folder.checkpoints, self.model, state, self.keep, self.workers.is_chief)
        if self.saved is not None:
            self.saved()

    def images_per_second(self) -> float | None:
        """Trained images per second in this process, without evaluation and the steps of an epoch that may compile."""
        return self.timed_images / self.timed_seconds if self.timed_seconds > 0 else None

    @property
    def _compiling_steps(self) -> int:
        """The first steps of an epoch that throughput leaves out, as they may compile: one of each phase."""
        return 1 + getattr(self.model, "statistics_steps", 0)

    def _attach(self) -> None:
        # On JAX variables are with the learner only once a callback has asked for it.
        _ = self.model

    def _watch(self, look: Callable[[int, Any], list[dict]]) -> None:
        """Have the chief look, and end the run where what it sees is to end it."""
        watcher = self.watcher
        assert watcher is not None
        self._attach()

        def lines() -> list[str]:
            with self._disk_for_summaries():
                return watcher.stops(look(self.step, self._writer))

        told = self.workers.of_chief(lines)
        if told:
            self.checkpoint()
            kinds = ",".join(sorted(watcher.stop_on))
            raise Halted(
                f"ended by --stop_on={kinds}: {'; and '.join(told)}; the checkpoint of step {self.step} is saved; go "
                f"on all the same with --run_dir={self.folder.path} --resume, or with other flags by --start_from"
            )

    def _record(self, record: dict) -> None:
        self.records.append(record)
        if not self.workers.is_chief:
            return
        write_lines(self.folder.metrics, self.records)
        if self.logger is not None:
            self.logger.record(record)
        with self._disk_for_summaries(), self._writer.as_default(step=record["epoch"]):
            for part in ("train", "rates", "validation", "test", "seen", "generalisation"):
                for name, value in record.get(part, {}).items():
                    tf.summary.scalar(f"{part}/{name}", value)
            for order, metrics in record.get("orders", {}).items():
                for name, value in metrics.items():
                    tf.summary.scalar(f"orders/{order}/{name}", value)
            for name in ("learning_rate", "images_per_second"):
                if name in record:
                    tf.summary.scalar(name, record[name])
            self._writer.flush()

    def _check_finite(self, logs: dict) -> None:
        bad = [name for name, value in logs.items() if not math.isfinite(float(value))]
        if bad:
            terms = [name for name in bad if name != "loss"] or bad
            raise self._diverged(f"{', '.join(terms)} is not finite", logs)

    def _diverged(self, what: str, logs: dict | None = None) -> UserError:
        told = ""
        if self.batch is not None and self.workers.is_chief and self.step:
            # JSON has no NaN.
            values = {name: str(float(value)) for name, value in (logs or {}).items()}
            about = self.batch(self.step - 1)
            write_json(self.folder.diverged, {"step": self.step, "what": what, "terms": values, **about})
            told = f" (its batch: {self.folder.diverged}{blamed(about)})"
            if self.watcher is not None:
                known = checkpoints.list_checkpoints(self.folder.checkpoints)
                well = checkpoints.step_of(known[-1]) if known else None
                self.watcher.not_finite(self.step, well, f"{what}{blamed(about)}")
        return UserError(
            f"the run diverged at step {self.step}: {what}{told}; lower the learning rate or add --clip_norm"
            f"{self._how_to_start_again()}"
        )

    def _how_to_start_again(self) -> str:
        last = checkpoints.list_checkpoints(self.folder.checkpoints)[-1:]
        return "".join(f", in a new run from its last weights: --start_from={path} --run_dir=NEW" for path in last)

    def _measuring(self) -> contextlib.AbstractContextManager[None]:
        # Workers measure together: there a signal waits for the end, as within a step.
        return self.interruption.immediate() if self.workers.alone else contextlib.nullcontext()

    @contextlib.contextmanager
    def _summaries(self) -> Iterator[None]:
        self.on_train_begin()
        try:
            yield
        finally:
            self.on_train_end()

    @contextlib.contextmanager
    def _disk_for_summaries(self) -> Iterator[None]:
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            if not is_disk_full(error):
                raise
            raise unwritable(self.folder.tensorboard, error) from error
