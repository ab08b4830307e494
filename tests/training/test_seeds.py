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
from tfdml.run_folder import RunFolder
from tfdml.training import build, results, trainer
from tfdml.training.interruption import Interrupted
from tfdml.training.results import TrainingRun
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


SCORES = {"seed_0": (1.0, 0.5, 0.25, 0.5), "seed_1": (0.5, 0.25, 0.25, 0.0)}


@pytest.fixture
def trained(monkeypatch):
    """Train without a network: each seed has its scores. Yields the name of each that is trained
    and whether it resumes, and a dictionary of what a seed raises."""
    calls, raises, train_all = [], {}, trainer.train

    def train_one(run, resume=False, saved=None):
        if run.seeds:
            return train_all(run, resume, saved)
        folder = RunFolder(run.run_dir)
        calls.append((folder.path.name, resume))
        if folder.path.name in raises:
            raise raises[folder.path.name]
        folder.path.mkdir(exist_ok=True)
        values = {RECALL: np.float32(SCORES[folder.path.name])}
        QueryValues(np.arange(4, dtype=np.uint64), np.array([0, 0, 1, 1]), "x", values).write(
            folder.queries
        )
        metrics = {RECALL: float(values[RECALL].mean()), "num_queries": 4}
        seconds = {"train_seconds": 2.0, "seconds": 3.0}
        result = {"dataset": "noise", "metrics": metrics, "steps": run.seed, **seconds}
        return TrainingRun(run, result)

    monkeypatch.setattr(trainer, "train", train_one)
    return calls, raises


def test_seeds_are_trained_one_after_another_and_combined(trained, tmp_path):
    calls, _ = trained
    run = trainer.train(experiment(tmp_path / "both", seeds="2"))
    assert calls == [("seed_0", False), ("seed_1", False)]
    assert [one.experiment.seed for one in run.runs] == [0, 1]
    assert json.loads(json.dumps(run.result)) == result(tmp_path / "both")
    mean, low, high, _ = run.result["intervals_runs"][RECALL]
    assert run.result["metrics"] == {RECALL: mean, "num_queries": 4}
    assert (mean, run.result["seconds"], run.result["train_seconds"]) == (0.40625, 6, 4)
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 1, 0.40625, 0.15625))
    assert [(row["run"], row["steps"]) for row in run.result["runs"]] == [
        ("seed_0", 0),
        ("seed_1", 1),
    ]
    assert run.result["intervals"][RECALL][0] == mean


def test_seeds_that_end_early_say_what_is_left_and_resume(trained, tmp_path):
    calls, raises = trained
    raises["seed_1"] = Interrupted(signal.SIGTERM)
    settings = experiment(tmp_path / "both", seeds="2")
    with pytest.raises(
        Interrupted, match=r"1 of 2 seeds have ended; continue with --run_dir=\S*both"
    ):
        trainer.train(settings)
    raises["seed_1"] = UserError("too few images")
    with pytest.raises(UserError, match=r"^seed 1: too few images"):
        trainer.train(settings, resume=True)
    raises.clear()
    assert len(trainer.train(settings, resume=True).runs) == 2
    assert calls[-2:] == [("seed_0", True), ("seed_1", False)]
    raises["seed_0"] = UserError("too few images")
    with pytest.raises(UserError, match=r"^seed 0: too few images"):
        trainer.train(experiment(tmp_path / "none", seeds="2"))
    assert not (tmp_path / "none").exists()


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
