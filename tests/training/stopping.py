"""Runs on noise that are quick, what ends them in the midst, and whether they end alike."""

import json
import os
import signal

import numpy as np
import pytest

from tests.models.networks import shallow
from tests.training import runs
from tests.training.runs import EPOCHS, STEPS
from tfdml.backbones import resolver
from tfdml.results import QueryValues
from tfdml.training import build
from tfdml.training.callbacks import TrainingMonitor


class Killed(BaseException):
    """In place of SIGKILL."""


def run_eagerly(patch):
    """Train without compiling, which takes longer than the few steps of these runs."""
    make_learner = build.make_learner

    def eager(*arguments):
        learner = make_learner(*arguments)
        learner.run_eagerly = True
        return learner

    patch.setattr(build, "make_learner", eager)


def make_quick(patch):
    """Train a shallow network on noise, eagerly."""
    run_eagerly(patch)
    patch.setitem(resolver._BACKBONES, "conv4", resolver._Entry(shallow, "tf", ("width",)))
    patch.setattr(build, "load_splits", lambda *arguments: runs.SPLITS)


def times(folder):
    """When each file of a folder was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def finished(folder, prepare=make_quick, **settings):
    """Train a run to its end where no test has made it quick, and return its folder."""
    with pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        runs.train(folder, **settings)
    return folder


def train_until(name, folder, resume=False, **settings):
    """Train a run, and kill it once a file of this name is there."""
    replace = os.replace
    with pytest.MonkeyPatch.context() as patch:

        def replace_and_die(source, target):
            replace(source, target)
            if os.path.basename(target) == name:
                patch.undo()
                raise Killed

        patch.setattr(os, "replace", replace_and_die)
        with pytest.raises(Killed):
            runs.train(folder, resume, **settings)


def signal_at(monkeypatch, step, number=signal.SIGTERM):
    """Send this process a signal in the midst of a step."""
    ended = TrainingMonitor.on_train_batch_end

    def hook(self, batch, logs=None):
        if self.step + 1 == step:
            os.kill(os.getpid(), number)
        ended(self, batch, logs)

    monkeypatch.setattr(TrainingMonitor, "on_train_batch_end", hook)


def assert_alike(folder, uninterrupted):
    """Both ended with the same checkpoint, history, embedder and metrics."""
    last = f"checkpoints/step-{EPOCHS * STEPS:08d}.npz"
    one, other = runs.arrays(uninterrupted / last), runs.arrays(folder / last)
    assert sorted(one) == sorted(other)
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)
    assert runs.records(folder) == runs.records(uninterrupted)
    for one, other in zip(runs.embedder(uninterrupted), runs.embedder(folder), strict=True):
        np.testing.assert_array_equal(one, other)
    one, other = (json.loads((run / "result.json").read_text()) for run in (uninterrupted, folder))
    for name in ("metrics", "metrics_before", "epoch", "steps", "protocol"):
        assert one[name] == other[name]
    stored = [QueryValues.read(run / "queries.npz") for run in (uninterrupted, folder)]
    assert stored[0].difference_to(stored[1]) == ""
    for name, values in stored[0].values.items():
        np.testing.assert_array_equal(values, stored[1].values[name])
        assert np.nanmean(values) == pytest.approx(other["metrics"][name], abs=1e-7)
