"""Runs on noise that are quick, and what ends them in the midst."""

import os
import signal

from tests.training import runs
from tfdml.training import assembly
from tfdml.training.monitor import TrainingMonitor


class Killed(BaseException):
    """In place of SIGKILL."""


def make_quick(patch):
    """Train on noise, and without compiling, which takes longer than the few steps of these runs."""
    make_learner = assembly.make_learner

    def eager(*arguments):
        learner = make_learner(*arguments)
        learner.run_eagerly = True
        return learner

    patch.setattr(assembly, "make_learner", eager)
    patch.setattr(assembly, "load_splits", lambda *arguments: runs.SPLITS)


def kill_after(monkeypatch, name):
    """End the run once a file of this name is there."""
    replace = os.replace

    def replace_and_die(source, target):
        replace(source, target)
        if os.path.basename(target) == name:
            monkeypatch.setattr(os, "replace", replace)
            raise Killed

    monkeypatch.setattr(os, "replace", replace_and_die)


def signal_at(monkeypatch, step, number=signal.SIGTERM):
    """Send this process a signal in the midst of a step."""
    ended = TrainingMonitor.on_train_batch_end

    def hook(self, batch, logs=None):
        if self.step + 1 == step:
            os.kill(os.getpid(), number)
        ended(self, batch, logs)

    monkeypatch.setattr(TrainingMonitor, "on_train_batch_end", hook)
