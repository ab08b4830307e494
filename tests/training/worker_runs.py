"""One tiny run of `tfdml train`: by one process, and by two workers, one of which is killed, then by three.

    python -m tests.training.worker_runs FOLDER

Prints, of each time that it was started, how every worker ended, and what each wrote to its streams.
"""

import json
import os
import pathlib
import signal
import sys

from tests import worker_processes
from tests.training import runs
from tfdml.cli import train
from tfdml.cli.command_line import run
from tfdml.training import build
from tfdml.training.callbacks import TrainingMonitor

SETTINGS = {
    "objectives": "contrastive + 10 * density + 0.1 * gor",
    "batch_norm": "statistics",
    # Every epoch begins with a search over all workers.
    "sampling": "neighbors(anchor_classes=1)",
    "classes_per_batch": 3,
    "images_per_class": 4,
    "steps_per_epoch": 3,
    "checkpoint_steps": 1,
    "watch_every": 2,
    # Adam's first steps are as large for the rounding of a gradient of 0 as for any other.
    "optimizer": "sgd",
}
# How many workers, at which step worker 1 is killed, and whether the run resumes.
STARTS = {"uninterrupted": (1, None, False), "killed": (2, 2, False), "resumed": (3, None, True)}


def _kill_at(step):
    """Kill this process within the step."""
    end_of_step = TrainingMonitor.on_train_batch_end

    def killed(self, batch, logs=None):
        if self.step + 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)
        end_of_step(self, batch, logs)

    TrainingMonitor.on_train_batch_end = killed


def _work(out, flags, killed_at):
    for descriptor, path in ((1, f"{out}.out"), (2, f"{out}.err")):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
    build.load_splits = lambda *_: runs.SPLITS
    if killed_at:
        _kill_at(killed_at)
    run(train.COMMAND, flags)


def main(folder):
    folder, found = pathlib.Path(folder), {}
    for name, (count, killed_at, goes_on) in STARTS.items():
        children = []
        for index, config in enumerate(worker_processes.tf_configs(count)):
            # Only the chief's is written; that of the others need not be there.
            own = "uninterrupted" if count == 1 else f"several {index}" if index else "several"
            settings = folder / f"{name} {index}.txt"
            settings.write_text(runs.experiment(folder / own, **SETTINGS).as_flags())
            flags = [f"--flagfile={settings}", *["--resume"] * goes_on]
            here = killed_at if index == 1 else None
            children.append(worker_processes.fork(_work, folder / f"{name} {index}", flags, here, config=config))
        statuses = worker_processes.wait(children)
        errors = [(folder / f"{name} {index}.err").read_text() for index in range(count)]
        found[name] = {"statuses": statuses, "errors": errors, "saved": _saved(folder / "several")}
    print("ENDED" + json.dumps(found))


def _saved(run):
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


if __name__ == "__main__":
    main(sys.argv[1])
