"""Runs that are watched: what they write, faults that are planted in them, and how they end."""

import json
import math
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support import references
from tests.training import runs
from tests.training.runs import EPOCHS, STEPS
from tests.training.stopping import finished, make_quick
from tfdml.errors import UserError
from tfdml.registry import VARIABLE
from tfdml.training import RunFolder, watching
from tfdml.training.watching import (
    GradientProbe,
    Watcher,
    collapse,
    gradient_shares,
    logger_of,
    spread,
)

OBJECTIVES = "am_softmax + jrs"
TOTAL = EPOCHS * STEPS


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    make_quick(monkeypatch)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return finished(
        tmp_path_factory.mktemp("runs") / "watched", objectives=OBJECTIVES, watch_every=2
    )


def told(folder):
    return json.loads((folder / "watch.json").read_text())


@pytest.mark.slow
def test_looks_are_written_for_tensorboard_and_kept(watched):
    found = told(watched)
    assert [sample["step"] for sample in found["samples"]] == [2, 4]
    assert found["alarms"] == []
    sample = found["samples"][-1]
    assert set(sample["gradient_norm"]) == {"backbone", "projection", "objectives"}
    assert sum(sample["gradient_share"].values()) == pytest.approx(1)
    events = EventAccumulator(str(watched / "tensorboard"), {"tensors": 0}).Reload()
    (first, last) = events.Tensors("watch/variance")
    assert (first.step, last.step) == (2, 4)
    assert tf.make_ndarray(last.tensor_proto) == pytest.approx(sample["variance"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"variance": 0.0499}, "variance"),
        ({"variance": 0.0501}, ""),
        ({"rank": 4.99}, "effective rank"),
        # Of 5 classes, each at a point, 4 directions are left.
        ({"rank": 1.01, "classes": 5}, ""),
        ({"rank": 1.0, "classes": 6}, "effective rank"),
    ],
)
def test_collapse_is_measured_by_the_best_so_far(change, words):
    def sample(step, variance=0.5, rank=20.0, classes=25):
        return {"step": step, "variance": variance, "effective_rank": rank, "classes": classes}

    found = collapse(sample(300, **change), [sample(100), sample(200, variance=0.3, rank=12.0)])
    assert bool(found) == bool(words)
    assert words in found


def test_an_alarm_is_raised_when_it_begins(tmp_path, monkeypatch):
    variances = iter((0.5, 0.01, 0.01, 0.5, 0.01))
    monkeypatch.setattr(
        watching, "spread", lambda _: {"variance": next(variances), "effective_rank": 2.0}
    )
    settings, learner = (
        runs.experiment(tmp_path, watch_every=1),
        types.SimpleNamespace(steps_per_execution=1),
    )
    watcher = Watcher(
        types.SimpleNamespace(experiment=settings, learner=learner, folder=RunFolder(tmp_path))
    )
    watcher._stream = iter([(np.zeros((4, 1)), np.arange(4))] * 5)
    watcher._probe = lambda images, labels: ({"terms": {"a": 1.0}}, images)
    writer = tf.summary.create_noop_writer()
    for step in range(1, 6):
        watcher.look(step, writer)
    assert [alarm["step"] for alarm in told(tmp_path)["alarms"]] == [2, 5]
    resumed = Watcher(watcher.components)
    resumed.resume(3)
    assert [sample["step"] for sample in resumed.samples] == [1, 2]
    assert [alarm["step"] for alarm in resumed.alarms] == [2]


def test_a_batch_that_does_not_fit_the_memory_ends_the_watch_and_not_the_run(tmp_path):
    def probe(images, labels):
        raise tf.errors.ResourceExhaustedError(None, None, "no memory")

    watcher = Watcher(
        types.SimpleNamespace(
            experiment=runs.experiment(tmp_path, watch_every=3),
            learner=types.SimpleNamespace(steps_per_execution=2),
            folder=RunFolder(tmp_path),
        )
    )
    watcher._stream = iter([(np.zeros((4, 1)), np.arange(4))])
    watcher._probe = probe
    # Whole executions of two steps.
    assert [step for step in range(10) if watcher.is_due(step)] == [4, 8]
    watcher.look(4, tf.summary.create_noop_writer())
    assert not watcher.is_due(8)
    assert not watcher.samples


CASES = {
    "proxies": {"objectives": "am_softmax + jrs", "dropout": 0.5},
    "memory": {"objectives": "xbm(loss=contrastive, size=32)"},
    "inner problem": {"objectives": "rank_mi"},
    "gradient cache": {
        "objectives": "contrastive + horde(loss=contrastive, orders=2, dim=8)",
        "gradient_cache": 4,
    },
    "drawn classes": {"objectives": "am_softmax(sample=0.5) + jrs", "gradient_cache": 4},
    "moving state": {"objectives": "curricular_face"},
}


@pytest.mark.one_quick_case
@pytest.mark.parametrize("case", CASES)
def test_a_sample_is_the_step_to_come_and_changes_nothing(case, tmp_path):
    plain = {"optimizer": "sgd", "learning_rate": 1.0, "batch_norm": "statistics"}
    settings = runs.experiment(tmp_path, **plain, **CASES[case])
    learner = runs.learner(settings, 20)
    learner.run_eagerly = True
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (8, runs.SIZE, runs.SIZE, 3)).astype(np.uint8)
    labels = np.repeat(np.arange(4), 2)
    before = [np.array(v) for v in learner.variables]
    found, _ = GradientProbe(learner)(images, labels)
    for value, variable in zip(before, learner.variables, strict=True):
        np.testing.assert_array_equal(value, np.array(variable), err_msg=variable.path)
    parts = learner.parts()
    old = {part: [np.array(v, np.float64) for v in members] for part, members in parts.items()}
    logs = learner.train_on_batch(images, labels, return_dict=True)
    for part, members in parts.items():
        if members:
            moved = sum(
                ((np.array(v, np.float64) - w) ** 2).sum()
                for v, w in zip(members, old[part], strict=True)
            )
            assert found["gradient_norm"][part] == pytest.approx(
                np.sqrt(moved), rel=1e-3, abs=1e-6
            ), part
    assert set(found["gradient_norm"]) == {part for part, members in parts.items() if members}
    assert sum(found["gradient_share"].values()) == pytest.approx(1, rel=1e-4)
    for objective in learner.objectives:
        assert found["terms"][objective.name] == pytest.approx(
            objective.weight * float(logs[objective.name]), rel=1e-4
        )


@pytest.mark.parametrize(("size", "dim"), [(12, 5), (4, 9)])
def test_spread_is_that_of_the_covariance(size, dim):
    x = np.random.default_rng(0).normal(size=(size, dim)) * np.arange(1, dim + 1)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    covariance = np.cov(x.T, bias=True)
    shares = [
        value / np.trace(covariance) for value in np.linalg.eigvalsh(covariance) if value > 1e-15
    ]
    found = spread(x)
    assert found["variance"] == pytest.approx(np.trace(covariance), rel=1e-9)
    assert found["effective_rank"] == pytest.approx(
        math.exp(-sum(p * math.log(p) for p in shares)), rel=1e-6
    )
    # Of unit vectors half the mean squared distance.
    assert found["variance"] == pytest.approx(
        references.matrix(references.squared_distance, x).mean() / 2, rel=1e-6
    )


def test_shares_tell_a_conflict_and_gradients_that_cancel_out():
    assert gradient_shares(np.array([[4.0, -2.0], [-2.0, 1.0]])) == pytest.approx([2, -1])
    assert gradient_shares(np.array([[1.0, -1.0], [-1.0, 1.0]])).tolist() == [0, 0]


_LOGGER = """
import keras

class Logger(keras.callbacks.Callback):
    epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))
"""


def test_the_mean_distance_over_no_pair_is_left_out(tmp_path):
    runs.train(tmp_path / "run", objectives="am_softmax", images_per_class=1)
    for record in runs.records(tmp_path / "run")[1:]:
        assert {"loss", "am_softmax", "d_neg"} <= record["train"].keys()
        assert record["train"].keys().isdisjoint({"d_pos", "violations"})


def test_a_callback_of_the_users_own_gets_all_numbers_of_every_epoch(tmp_path, monkeypatch):
    (tmp_path / "my_logging.py").write_text(_LOGGER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(VARIABLE, "my_logging,builtins")
    result = runs.train(tmp_path / "run", log_to="my_logging.Logger")
    epochs = sys.modules.pop("my_logging").Logger.epochs
    assert len(epochs) == runs.EPOCHS
    assert epochs[-1]["test/recall@1"] == result["metrics"]["recall@1"]
    assert {"loss", "train/loss", "learning_rate", "step"} <= set(epochs[-1])
    with pytest.raises(UserError, match="builtins"):
        logger_of("builtins.dict")
