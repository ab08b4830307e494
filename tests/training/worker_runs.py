"""One tiny run of `tfdml train`: by one process; by two workers, one of which is killed, and by
two, one of which falls silent as one whose cable is pulled; then by three.

    python -m tests.training.worker_runs FOLDER

Prints, of each time that it was started, how every worker ended, and what each wrote to its
streams.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import sys

from tests.support import processes
from tests.training import runs
from tfdml.cli import train
from tfdml.cli.command_line import run
from tfdml.training import build
from tfdml.training.callbacks import TrainingMonitor

SETTINGS = {
    "objectives": "contrastive + 10 * density + 0.1 * gor",
    "batch_norm": "statistics",
    # Draws go by the place of an image in the whole batch.
    "augmentation": "random_resized_crop",
    "flip": True,
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
# How many workers, at which step worker 1 gets which signal, and whether the run resumes.
STARTS = {
    "uninterrupted": (1, None, False),
    "killed": (2, (2, signal.SIGKILL), False),
    "silent": (2, (3, signal.SIGSTOP), True),
    "resumed": (3, None, True),
}


def _tf_configs(count):
    """TF_CONFIG of each of several workers; None where there is but one process."""
    if count == 1:
        return [None]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    tasks = [{"type": "worker", "index": index} for index in range(count)]
    return [json.dumps({"cluster": {"worker": addresses}, "task": task}) for task in tasks]


def _signal_at(step, number):
    """Send this process a signal within the step."""
    end_of_step = TrainingMonitor.on_train_batch_end

    def ended(self, batch, logs=None):
        if self.step + 1 == step:
            os.kill(os.getpid(), number)
        end_of_step(self, batch, logs)

    TrainingMonitor.on_train_batch_end = ended


def _work(config, out, flags, signaled):
    if config is not None:
        os.environ["TF_CONFIG"] = config
    for descriptor, path in ((1, f"{out}.out"), (2, f"{out}.err")):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
    build.load_splits = lambda *_: runs.SPLITS
    if signaled:
        _signal_at(*signaled)
    run(train.COMMAND, flags)


def main(folder):
    folder, found = pathlib.Path(folder), {}
    for name, (count, signaled, goes_on) in STARTS.items():
        children = []
        for index, config in enumerate(_tf_configs(count)):
            # Only the chief's is written; that of the others need not be there.
            own = "uninterrupted" if count == 1 else f"several {index}" if index else "several"
            settings = folder / f"{name} {index}.txt"
            settings.write_text(runs.experiment(folder / own, **SETTINGS).as_flags())
            flags = [f"--flagfile={settings}", *["--resume"] * goes_on]
            here = signaled if index == 1 else None
            children.append(processes.fork(_work, config, folder / f"{name} {index}", flags, here))
        statuses = processes.wait(children[:1])
        if name == "silent":
            children[1].kill()
        statuses += processes.wait(children[1:])
        errors = [(folder / f"{name} {index}.err").read_text() for index in range(count)]
        found[name] = {"statuses": statuses, "errors": errors, "saved": _saved(folder / "several")}
    print("ENDED" + json.dumps(found))


def _saved(run):
    return sorted(path.name for path in (run / "checkpoints").glob("step-*"))


if __name__ == "__main__":
    main(sys.argv[1])
