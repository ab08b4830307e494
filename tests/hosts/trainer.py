"""`tfdml train` on one of several hosts, held at a moment of the run until a file says so.

    python -m tests.hosts.trainer MOMENT FOLDER [FLAGS]

MOMENT is `step:K` or `checkpoint:K`, the K-th of this process, or `none`. When it comes, `FOLDER/there`
is made, and nothing else happens until `FOLDER/continue` exists. `version:V` trains as version V of tfdml.
"""

import pathlib
import sys
import time

from tfdml.cli import train
from tfdml.cli.command_line import run
from tfdml.training import checkpoints, trainer
from tfdml.training.callbacks import TrainingMonitor

MOMENTS = {
    "step": (TrainingMonitor, "on_train_batch_end"),
    "checkpoint": (checkpoints, "save"),
}


def hold(owner, name, count, folder):
    """Hold the `count`-th call of a function."""
    function, calls = getattr(owner, name), 0

    def held(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            (folder / "there").touch()
            while not (folder / "continue").exists():
                time.sleep(0.05)
        return function(*args, **kwargs)

    setattr(owner, name, held)


if __name__ == "__main__":
    moment, _, value = sys.argv[1].partition(":")
    if moment == "version":
        trainer.__version__ = value
    elif moment != "none":
        hold(*MOMENTS[moment], int(value), pathlib.Path(sys.argv[2]))
    run(train.COMMAND, sys.argv[3:])
