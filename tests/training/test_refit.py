"""A run that finds its epochs on held-out classes and is trained anew on all: what it is, stopped and continued."""

import json
import signal

import numpy as np
import pytest

from tests.training import runs
from tests.training.runs import STEPS, experiment, records, train
from tests.training.stopping import Killed, finished, kill_after, make_quick, signal_at
from tfdml.errors import UserError
from tfdml.training import Experiment, assembly
from tfdml.training.evaluating import Evaluator
from tfdml.training.interruption import Interrupted
from tfdml.training.refit import WORDS, epochs_to_train, final_run, selection_run, trained_on

CHOSEN = {"selection": "validation", "holdout_classes": 0.3, "refit": True}
CHOSEN |= {"epochs": 3, "drop_epochs": "1,2"}
ALL = runs.Splits(runs.noise("train", 12, 4), None, runs.SPLITS.test)


def make_refit_quick(patch):
    """Of three epochs the second is the best on held-out classes, by MAP@R; all training classes are more images."""
    make_quick(patch)
    patch.setattr(assembly, "load_splits", lambda data, *rest: runs.SPLITS if data.holdout_classes else ALL)
    each_epoch = Evaluator.each_epoch

    def measured(self, learner, epoch):
        found = each_epoch(self, learner, epoch)
        if "validation" in found:
            found["validation"]["map@r"] = (0.9, 0.4, 0.6, 0.5)[epoch]
        return found

    patch.setattr(Evaluator, "each_epoch", measured)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    make_refit_quick(monkeypatch)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The folder of a run that was never stopped."""
    return finished(tmp_path_factory.mktemp("runs") / "refit", make_refit_quick, **CHOSEN)


def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
def test_it_is_the_run_of_all_classes_for_the_epochs_that_were_found(unbroken, tmp_path):
    assert result(unbroken / "selection")["epoch"] == 2
    by_hand = tmp_path / "by_hand"
    train(by_hand, epochs=2, drop_epochs="1,2")
    assert records(unbroken) == records(by_hand)
    for one, other in zip(runs.embedder(unbroken), runs.embedder(by_hand), strict=True):
        np.testing.assert_array_equal(one, other)
    found, expected = result(unbroken), result(by_hand)
    assert found["selection"] == WORDS
    for name in ("metrics", "metrics_before", "epoch", "steps", "protocol"):
        assert found[name] == expected[name]
    assert "trained on 12 classes" in found["protocol"]
    assert "trained on 8 classes" in result(unbroken / "selection")["protocol"]
    assert "--refit=true" in (unbroken / "flags.txt").read_text().splitlines()


@pytest.mark.slow
def test_stopped_and_killed_it_ends_as_one_that_was_not(unbroken, tmp_path, monkeypatch):
    folder = tmp_path / "refit"
    kill_after(monkeypatch, "flags.txt")
    with pytest.raises(Killed):
        train(folder, **CHOSEN)
    with monkeypatch.context() as patch:
        signal_at(patch, STEPS + 1, signal.SIGTERM)
        with pytest.raises(Interrupted, match=r"not found yet; continue with --run_dir=\S*refit --resume"):
            train(folder, resume=True, **CHOSEN)
    # Before the figures of the first training, and twice in the second one.
    for name in ("queries.npz", "data.json", f"step-{STEPS:08d}.npz"):
        kill_after(monkeypatch, name)
        with pytest.raises(Killed):
            train(folder, resume=True, **CHOSEN)
    assert (folder / "selection" / "result.json").is_file()
    assert not (folder / "result.json").exists()
    train(folder, resume=True, **CHOSEN)
    assert records(folder) == records(unbroken)
    for one, other in zip(runs.embedder(unbroken), runs.embedder(folder), strict=True):
        np.testing.assert_array_equal(one, other)
    assert result(folder)["metrics"] == result(unbroken)["metrics"]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert train(folder, resume=True, **CHOSEN)["metrics"] == result(unbroken)["metrics"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_of_several_seeds_each_finds_its_own(tmp_path):
    folder = tmp_path / "two"
    train(folder, **{**CHOSEN, "seeds": "2", "epochs": 1, "steps_per_epoch": 1})
    assert [row["epoch"] for row in result(folder)["seeds"]] == [1, 1]
    assert (folder / "seed_1" / "selection" / "result.json").is_file()
    assert result(folder)["selection"] == WORDS


def test_what_makes_it_fail_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="recall@99"):
        train(tmp_path / "refit", **CHOSEN, ks="1,99")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"selection/result\.json"):
        epochs_to_train(experiment(tmp_path / "refit", **CHOSEN))


def test_the_two_trainings_differ_in_what_they_say():
    asked = Experiment(run_dir="runs/a", **CHOSEN, moment_embedder=True)
    first = selection_run(asked)
    assert (first.run_dir, first.refit, first.moment_embedder, first.report) == (
        "runs/a/selection",
        False,
        False,
        False,
    )
    assert (first.selection, first.holdout_classes, first.epochs) == ("validation", 0.3, 3)
    assert final_run(first) is first
    # The rates follow the same schedule, however early it ends.
    assert final_run(asked).rate_schedule(10).get_config() == asked.rate_schedule(10).get_config()
    assert trained_on(asked).holdout_classes == 0.0
    assert trained_on(first).holdout_classes == 0.3
