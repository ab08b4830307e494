"""Several seeds, and folds of the training classes."""

import json
import signal

import keras
import numpy as np
import pytest
from scipy import stats

import tfdml
from tests.training.runs import EPOCHS, SPLITS, STEPS, experiment, records, train
from tests.training.stopping import finished, make_quick, signal_at, times, train_until
from tfdml.data.pipeline import evaluation_batches
from tfdml.errors import UserError
from tfdml.evaluation import confidence_intervals
from tfdml.report import read_run
from tfdml.results import QueryValues
from tfdml.training import build, results
from tfdml.training.interruption import Interrupted
from tfdml.training.run_data import Splits, make_transforms, split_training_classes
from tfdml.training.trainer import runs_of

RECALL = "recall@1"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    make_quick(monkeypatch)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of two seeds that were never stopped."""
    return finished(tmp_path_factory.mktemp("runs") / "both", seeds="2", report=True)


def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
def test_the_result_of_all_is_made_of_those_of_each(uninterrupted):
    of_all = result(uninterrupted)
    each = [result(uninterrupted / f"seed_{seed}") for seed in range(2)]
    assert [(row["run"], row["metrics"]) for row in of_all["runs"]] == [
        (f"seed_{seed}", one["metrics"]) for seed, one in enumerate(each)
    ]
    assert len({one["metrics"]["map@r"] for one in each}) == 2
    for part in ("metrics", "metrics_before"):
        for name, value in of_all[part].items():
            assert value == pytest.approx(np.mean([one[part][name] for one in each]), rel=1e-12)
    assert of_all["metrics"]["num_queries"] == 24
    mine = [one["metrics"]["map@r"] for one in each]
    ends = stats.t.interval(0.95, 1, np.mean(mine), stats.sem(mine))
    np.testing.assert_allclose(of_all["intervals_runs"]["map@r"][1:3], ends, rtol=1e-9)
    values = [QueryValues.read(uninterrupted / f"seed_{seed}" / "queries.npz") for seed in range(2)]
    per_query = {RECALL: np.mean([of.values[RECALL] for of in values], axis=0)}
    expected = confidence_intervals(per_query, values[0].labels)[RECALL]
    np.testing.assert_allclose(of_all["intervals"][RECALL], expected, rtol=1e-12)
    assert of_all["train_seconds"] == sum(one["train_seconds"] for one in each)


@pytest.mark.slow
def test_stopped_and_killed_it_ends_as_one_that_was_not(uninterrupted, tmp_path, monkeypatch):
    folder = tmp_path / "both"
    with monkeypatch.context() as patch:
        signal_at(patch, 2, signal.SIGTERM)
        with pytest.raises(
            Interrupted, match=r"0 of 2 seeds have ended; continue with --run_dir=\S*both --resume"
        ):
            train(folder, seeds="2")
    # Of the first seed the training has ended, then the second one has begun.
    for name in (f"step-{EPOCHS * STEPS:08d}.npz", "data.json"):
        train_until(name, folder, resume=True, seeds="2")
    assert not (folder / "result.json").exists()
    first = (folder / "seed_0" / "result.json").stat().st_mtime_ns
    train(folder, resume=True, seeds="2")
    assert (folder / "seed_0" / "result.json").stat().st_mtime_ns == first
    for name in ("metrics", "metrics_before", "intervals", "intervals_runs"):
        assert result(folder)[name] == result(uninterrupted)[name]
    for seed in range(2):
        assert records(folder / f"seed_{seed}") == records(uninterrupted / f"seed_{seed}")


@pytest.mark.slow
def test_a_finished_one_is_left_as_it_is(uninterrupted):
    before = times(uninterrupted)
    assert (
        train(uninterrupted, resume=True, seeds="2", report=True)["metrics"]
        == result(uninterrupted)["metrics"]
    )
    assert times(uninterrupted) == before
    with pytest.raises(UserError, match="seeds=0,1: the run was started with 2"):
        train(uninterrupted, resume=True, seeds="0,1", report=True)


@pytest.mark.slow
def test_each_fold_holds_out_classes_of_its_own_and_all_are_measured_together(
    tmp_path, monkeypatch
):
    def load_splits(settings, seed, *_):
        share, sampling = settings.holdout_classes, settings.holdout_sampling
        train, validation = split_training_classes(SPLITS.train, share, seed, sampling)
        return Splits(train.contiguous(), validation, SPLITS.test)

    for module in (build, results):
        monkeypatch.setattr(module, "load_splits", load_splits)
    of_all = train(tmp_path / "two", folds=2, selection="validation", report=True)
    folders = [tmp_path / "two" / f"fold_{part}" for part in (1, 2)]
    assert [row["run"] for row in of_all["runs"]] == ["fold_1", "fold_2"]
    assert [read_run(folder).flags["holdout_sampling"] for folder in folders] == [
        "random(part=1)",
        "random(part=2)",
    ]
    view = make_transforms(experiment(tmp_path / "two", folds=2))[1]
    embedders = [keras.saving.load_model(folder / "embedder.keras") for folder in folders]
    embedded = [
        tfdml.embeddings.embed(each, evaluation_batches(SPLITS.test, view, 8)) for each in embedders
    ]
    similar = sum(one @ one.T for one in embedded)
    np.fill_diagonal(similar, -np.inf)
    hits = SPLITS.test.labels[similar.argmax(axis=1)] == SPLITS.test.labels
    assert of_all["metrics_together"][RECALL] == pytest.approx(hits.mean(), abs=1e-9)
    assert (
        len(
            {
                one["metrics"]["map@r"]
                for one in (*of_all["runs"], {"metrics": of_all["metrics_together"]})
            }
        )
        == 3
    )
    assert (tmp_path / "two" / "report" / "index.html").is_file()


def test_which_seeds():
    def seeds(text, **changes):
        return experiment("unused", seeds=text, **changes).seed_list()

    assert seeds("") == ()
    assert seeds("2", seed=5) == (5, 6)
    assert seeds("7,0, 3") == (7, 0, 3)
    assert (
        runs_of(experiment("runs/a", seeds="2"))[1].as_flags()
        == experiment("runs/a/seed_1", seed=1).as_flags()
    )
    for wrong in ("1", "a", "0,0", "-1,2", "1001", "1,", f"0,{2**31}"):
        with pytest.raises(UserError, match="seeds="):
            seeds(wrong)
