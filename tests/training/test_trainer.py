"""A run that was killed, stopped or damaged, phase by phase, against one that was not."""

import contextlib
import dataclasses
import json
import os
import signal

import keras
import numpy as np
import pytest

from tests.training import runs
from tests.training.runs import EPOCHS, STEPS, train
from tests.training.stopping import (
    Killed,
    assert_alike,
    finished,
    make_quick,
    signal_at,
    times,
    train_until,
)
from tfdml.cli.model_flags import check_ended
from tfdml.data import NeighborSampler, PairList
from tfdml.embeddings.backends import load_keras_model
from tfdml.errors import UserError
from tfdml.evaluation.views import ViewItems
from tfdml.io.files import write_json
from tfdml.retrieval import confusable_classes
from tfdml.run_folder import EMBEDDER_FILE, RESULT_FILE, START_FILE, RunFolder, list_checkpoints
from tfdml.training import build, callbacks, checkpoints, trainer
from tfdml.training.choices import Interpolation
from tfdml.training.interruption import SIGNALS, Interrupted
from tfdml.training.results import Evaluator
from tfdml.training.run_data import load_splits
from tfdml.training.settings import final_settings
from tfdml.training.trainer import RunState
from tfdml.training.workers import Processes


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    make_quick(monkeypatch)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a run that was never stopped."""
    return finished(
        tmp_path_factory.mktemp("runs") / "uninterrupted", report=True, checkpoint_steps=1
    )


def test_a_run_is_new_resumed_or_finished(tmp_path):
    settings = runs.experiment(tmp_path / "run")
    folder = RunFolder(settings.run_dir)

    def state(resume, **changes):
        with contextlib.ExitStack() as owned:
            experiment = dataclasses.replace(settings, **changes)
            return trainer.open_run(experiment, resume, Processes(), owned)

    assert state(resume=False) is RunState.NEW
    with pytest.raises(UserError, match="no run to resume"):
        state(resume=True)
    folder.path.mkdir()
    (folder.path / ".partial-999999-flags.txt").touch()
    assert state(resume=True) is RunState.NEW  # killed before its flags were written
    with folder.new_run(settings.as_flags()), pytest.raises(UserError, match="another process"):
        state(resume=True)
    with pytest.raises(UserError, match="exists already"):
        state(resume=False)
    assert state(resume=True) is RunState.RESUMED
    with pytest.raises(UserError, match="was started with"):
        state(resume=True, dropout=0.5)
    write_json(folder.result, {"metrics": {}})
    assert state(resume=True) is RunState.RESUMED  # the embedder is missing
    folder.embedder.touch()
    assert state(resume=True, watch_every=7) is RunState.FINISHED


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_a_checkpoint_at_the_end_of_the_step(
    number, status, uninterrupted, tmp_path, monkeypatch
):
    # A step within an epoch, and the last step of one.
    step = {signal.SIGTERM: STEPS + 1, signal.SIGINT: STEPS}[number]
    folder = tmp_path / "run"
    handlers = [signal.getsignal(each) for each in SIGNALS]
    with monkeypatch.context() as patch:
        signal_at(patch, step, number)
        with pytest.raises(Interrupted) as stop:
            train(folder)
    assert stop.value.status == status
    assert list_checkpoints(folder / "checkpoints")[-1].name == f"step-{step:08d}.npz"
    assert [signal.getsignal(each) for each in SIGNALS] == handlers
    train(folder, resume=True)
    assert_alike(folder, uninterrupted)
    before = times(folder)
    train(folder, resume=True)  # a finished run is left as it is
    assert times(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("end", ["signal", "kill"])
def test_a_signal_or_a_kill_in_an_epochs_evaluation_loses_nothing(
    end, uninterrupted, tmp_path, monkeypatch
):
    folder, each_epoch = tmp_path / "run", Evaluator.each_epoch

    def ended(self, learner, epoch, last):
        if epoch == 1 and end == "kill":
            raise Killed
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return each_epoch(self, learner, epoch, last)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "each_epoch", ended)
        with pytest.raises(Killed if end == "kill" else Interrupted):
            train(folder)
    assert list_checkpoints(folder / "checkpoints")[-1].name == f"step-{STEPS:08d}.npz"
    assert [record["epoch"] for record in runs.records(folder)] == (
        [0] if end == "kill" else [0, 1]
    )
    train(folder, resume=True)
    assert_alike(folder, uninterrupted)


@pytest.mark.slow
def test_the_selected_embedder_is_measured_and_the_earlier_of_equals_wins(tmp_path, monkeypatch):
    folder, measure, seen = tmp_path / "run", Evaluator.measure, []

    def measured(self, embeddings, name, *options, **more):
        found = measure(self, embeddings, name, *options, **more)
        if name == "validation":
            seen.append(name)
            found["map@r"] = (0.9, 0.5, 0.5, 0.3)[
                len(seen) - 1
            ]  # before training, and of three epochs
        return found

    monkeypatch.setattr(Evaluator, "measure", measured)
    settings = {"selection": "validation", "holdout_classes": 0.2, "epochs": 3}
    # Killed with the first epoch's embedder, but not its checkpoint: that epoch counts again.
    train_until("embedder.keras", folder, **settings)
    seen.pop()
    result = train(folder, resume=True, **settings)
    assert result["epoch"] == 1
    history = [record["test"] for record in runs.records(folder)]
    for name, value in history[1].items():
        assert result["metrics"][name] == pytest.approx(value)
    assert history[1]["map@r"] != history[3]["map@r"]
    # The embedder is that of the checkpoint, whatever a later epoch has left.
    selected = checkpoints.read(list_checkpoints(folder / "checkpoints")[-1])[1].selected
    for one, other in zip(selected, runs.embedder(folder), strict=True):
        np.testing.assert_array_equal(one, other)


KINDS = {
    "texts": {
        "text_backbone": "bytes(length=8, width=4)",
        "objectives": "clip + contrastive",
        "clip_norm": 1.0,
    },
    "every schedule": {
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "schedule": "cosine",
        "warm_up_epochs": 0.5,
        "clip_norm": 1.0,
        "ema": 0.9,
        "selection": "validation",
        "holdout_classes": 0.2,
        # Whose statistics network and its optimizer are resumed, too, and the draws of half of the
        # classes.
        "objectives": "contrastive + rank_mi(hidden=8, depth=1) + am_softmax(sample=0.5)",
        "classes_per_batch": 2,
    },
    "head": {"head": "whitened", "holdout_classes": 0.3, "selection": "validation", "ks": "1,2"},
    "pairs": {
        "sampling": "pairs",
        "batch_size": 8,
        "objectives": "multi_similarity + xbm(loss=contrastive, size=16)",
        "gradient_cache": 5,
        "selection": "validation",
        "holdout_classes": 0.3,
        "selection_metric": "auc",
        "watch_every": 2,
    },
}


def paired(images):
    """The same images with given pairs: all of one class, and a seventh of the others."""
    rows = np.stack(np.triu_indices(len(images), 1), axis=1)
    same = images.labels[rows[:, 0]] == images.labels[rows[:, 1]]
    chosen = same | (np.arange(len(rows)) % 7 == 0)
    return dataclasses.replace(images, pairs=PairList(rows[chosen], same[chosen].astype(float)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_any_kind_goes_on_where_it_was_killed(kind, tmp_path, monkeypatch):
    settings = {"checkpoint_steps": 1, **KINDS[kind]}
    if kind == "head":
        labels = np.repeat(np.arange(16), 4)
        vectors = np.random.default_rng(0).normal(size=(64, 12)) + np.eye(16, 12)[labels]
        settings["features"] = str(tmp_path / "vectors.npz")
        np.savez(settings["features"], embeddings=vectors.astype(np.float32), labels=labels)
        monkeypatch.setattr(build, "load_splits", load_splits)
    elif kind == "texts":
        named = {
            name: getattr(runs.SPLITS, name).with_class_names()
            for name in ("train", "validation", "test")
        }
        views = {name: ViewItems.of(named[name]) for name in ("validation", "test")}
        monkeypatch.setattr(runs, "SPLITS", runs.Splits(**named, views=views))
    elif kind == "pairs":
        splits = {
            name: paired(getattr(runs.SPLITS, name)) for name in ("train", "validation", "test")
        }
        monkeypatch.setattr(runs, "SPLITS", runs.Splits(**splits))
    whole, folder = tmp_path / "whole", tmp_path / "run"
    result, history = train(whole, **settings), runs.records(whole)
    train_until(f"step-{STEPS + 2:08d}.npz", folder, **settings)
    train(folder, resume=True, **settings)
    assert_alike(folder, whole)
    if kind == "texts":
        texts = [
            keras.saving.load_model(each / "text_embedder.keras").get_weights()
            for each in (folder, whole)
        ]
        for one, other in zip(*texts, strict=True):
            np.testing.assert_array_equal(one, other)
    elif kind == "every schedule":
        # What was measured after the epoch is what is kept of it: the averages, and no trained
        # weight.
        assert history[result["epoch"]]["test"]["map@r"] == pytest.approx(
            result["metrics"]["map@r"]
        )
        trained = runs.arrays(folder / "checkpoints" / f"step-{EPOCHS * STEPS:08d}.npz")
        kept = np.concatenate([weights.ravel() for weights in runs.embedder(folder)])
        last = [kept[-array.size :] for array in trained.values() if array.ndim == 2]
        matrices = [array.ravel() for array in trained.values() if array.ndim == 2]
        assert not any(map(np.array_equal, last, matrices))
    elif kind == "pairs":
        assert {"auc", "accuracy", "eer", "map@r"} <= {*result["metrics"]}
        values = [record["validation"]["auc"] for record in history]
        assert values[result["epoch"]] == max(values[1:])


@pytest.mark.slow
def test_several_steps_an_execution_train_and_resume_as_single_steps(tmp_path, monkeypatch):
    steps = EPOCHS * STEPS
    settings = {
        "epochs": 1,
        "steps_per_epoch": steps,
        "checkpoint_steps": steps // 2,
        "watch_every": 1,
    }
    settings |= {"schedule": "cosine", "ema": 0.9, "dropout": 0.2, "objectives": "am_softmax + jrs"}
    single, together, folder = tmp_path / "single", tmp_path / "together", tmp_path / "run"
    train(single, **settings)
    settings["steps_per_execution"] = steps - 1
    train(together, **settings)
    assert_alike(together, single)
    assert [
        sample["step"] for sample in json.loads((together / "watch.json").read_text())["samples"]
    ] == [3]
    settings["steps_per_execution"] = 2
    ended = callbacks.TrainingMonitor.on_train_batch_end

    def die(self, batch, logs=None):
        if self.step == 4:  # of the last execution nothing is kept
            raise Killed
        ended(self, batch, logs)

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.TrainingMonitor, "on_train_batch_end", die)
        with pytest.raises(Killed):
            train(folder, **settings)
    train(folder, resume=True, **settings)
    assert_alike(folder, single)
    with monkeypatch.context() as patch:
        signal_at(patch, 3)
        with pytest.raises(Interrupted, match="the checkpoint of step 4 is saved"):
            train(tmp_path / "stopped", **settings)
    with pytest.raises(UserError, match="the run diverged at step 2: "):
        train(
            tmp_path / "diverged",
            **settings | {"learning_rate": 1e30, "optimizer": "sgd", "schedule": "step"},
        )


@pytest.mark.slow
@pytest.mark.parametrize("step", [STEPS, STEPS + 1])
def test_a_run_that_is_finished_early_keeps_its_results(step, tmp_path, monkeypatch):
    folder, settings = tmp_path / "run", {"selection": "validation", "holdout_classes": 0.25}
    train_until(f"step-{step:08d}.npz", folder, checkpoint_steps=1, **settings)
    with pytest.raises(UserError, match="has not ended: it has trained"):
        check_ended(str(folder), unfinished=False)
    with pytest.raises(UserError, match="--finish"):
        train(folder, resume=True, checkpoint_steps=1, epochs=1, **settings)
    monkeypatch.setattr(keras.Model, "fit", None)
    result = train(folder, resume=True, finish=True, checkpoint_steps=1, **settings)
    assert result["steps"] == step
    assert f"ended after {step} of {EPOCHS * STEPS} steps" in result["selection"]
    assert [record["step"] for record in runs.records(folder)] == sorted({0, STEPS, step})
    check_ended(str(folder), unfinished=False)
    ended = train(folder, resume=True, checkpoint_steps=1, **settings)
    assert ended == json.loads((folder / "result.json").read_bytes())


@pytest.mark.slow
def test_a_final_model_sees_an_image_as_often_as_the_selected_epoch_had_and_says_so(
    tmp_path, monkeypatch, caplog
):
    measured = train(tmp_path / "measured", selection="validation", holdout_classes=0.25)
    settings = final_settings(tmp_path / "measured")
    # 3 steps on 32 images, of the 76 of all splits.
    assert (settings["epochs"], settings["steps_per_epoch"]) == (measured["epoch"], 7)
    final = trainer.Experiment(**{**settings, "run_dir": str(tmp_path / "final")})
    splits = dataclasses.replace(
        runs.SPLITS,
        train=runs.SPLITS.train.join(runs.SPLITS.test).contiguous(),
        test=None,
        validation=None,
    )
    monkeypatch.setattr(build, "load_splits", lambda *arguments: splits)
    with caplog.at_level("INFO", logger="absl"):
        result = trainer.train(final).result
    assert (result["metrics"], result["steps"]) == ({}, measured["epoch"] * 7)
    message = "\n".join(caplog.messages)
    assert "7 steps on 8 classes, where the measured run had 3 steps an epoch on 8" in message
    # 8 images a step, of 56: this final model has none of the validation split.
    seen = measured["epoch"] * 7 * 8 / 56
    before = measured["epoch"] * 3 * 8 / 32
    assert f"seen {seen:.1f} times, in the measured run {before:.1f} times" in message
    assert "--steps_per_epoch=3 takes as many steps as that run" in message


def test_a_folder_killed_before_its_flags_is_as_good_as_new(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".partial-999999-flags.txt").write_text("--dataset=gl")
    (folder / ".lock").touch()
    train_until("data.json", folder, resume=True)
    assert sorted(path.name for path in folder.iterdir()) == ["data.json", "flags.txt"]


@pytest.mark.slow
def test_a_diverged_run_tells_how_to_start_again_and_that_works(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UserError, match="the run diverged at step") as diverged:
        train(folder, learning_rate=1e30, optimizer="sgd")
    (advised,) = [word for word in str(diverged.value).split() if word.startswith("--start_from=")]
    train_until(
        "step-00000000.npz", tmp_path / "next", start_from=advised.removeprefix("--start_from=")
    )
    old, new = (
        runs.arrays(run / "checkpoints" / "step-00000000.npz")
        for run in (folder, tmp_path / "next")
    )
    taken = [name for name in old if name.startswith(("backbone", "projection"))]
    assert taken
    for name in taken:
        np.testing.assert_array_equal(old[name], new[name])


def test_a_search_for_neighbors_every_few_epochs_makes_no_epoch_more(tmp_path):
    assert train(tmp_path / "run", sampling="neighbors(every=2)", epochs=1)["steps"] == STEPS


NEIGHBORS = {"sampling": "neighbors(anchor_classes=1)", "checkpoint_steps": 1}


@pytest.mark.slow
def test_a_run_by_neighbors_killed_at_any_moment_sees_the_batches_of_one_that_was_not(
    tmp_path, monkeypatch
):
    embed, batch, seen, embeddings = Evaluator.embed, NeighborSampler.batch, {}, []

    def recorded(self, embedder, name, *options, **more):
        found = embed(self, embedder, name, *options, **more)
        embeddings.extend([found] if name == "train" else [])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "embed", recorded)
        patch.setattr(
            NeighborSampler, "batch", lambda self, step: seen.setdefault(step, batch(self, step))
        )
        train(tmp_path / "uninterrupted", **NEIGHBORS)
    labels = runs.SPLITS.train.labels
    assert len(embeddings) == EPOCHS
    assert (embeddings[0] != embeddings[1]).any()
    for epoch in range(EPOCHS):
        table = confusable_classes(embeddings[epoch], labels, most=4)
        for step in range(epoch * STEPS, (epoch + 1) * STEPS):
            anchor, *others = labels[seen[step]][::2]
            assert others == table[anchor, :3].tolist()
    assert all(
        0 <= record["train"]["violations"] <= 1
        for record in runs.records(tmp_path / "uninterrupted")[1:]
    )
    # Before the first search, within its epoch, and before and after the second.
    for phase, step in enumerate((0, 2, STEPS, STEPS + 2)):
        train_until(f"step-{step:08d}.npz", tmp_path / "run", resume=phase > 0, **NEIGHBORS)
    train(tmp_path / "run", resume=True, **NEIGHBORS)
    assert_alike(tmp_path / "run", tmp_path / "uninterrupted")


def test_a_second_data_set_is_measured_before_and_after(tmp_path, monkeypatch):
    also = runs.noise("test", 5, 7)
    monkeypatch.setattr(runs, "SPLITS", dataclasses.replace(runs.SPLITS, also=also))
    result = train(tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, *_, last = map(json.loads, lines)
    assert result["metrics_also_before"] == first["also"]
    assert result["metrics_also_features"] == first["also_features"]
    assert result["metrics_also"]["recall@1"] == pytest.approx(last["also"]["recall@1"])
    assert result["metrics_also"] != result["metrics_also_before"]
    assert result["metrics_features"] == first["features"]


def weights_of(path):
    """The backbone's and the projection's weights of a file."""
    model = load_keras_model(path)
    return model.backbone.get_weights(), model.dense.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize("head", ["linear", "whitened"])
def test_weights_between_start_and_end_are_kept(head, tmp_path):
    train(tmp_path / "end", head=head)
    result = train(tmp_path / "between", head=head, interpolate="0.25")
    start, between = (weights_of(tmp_path / "between" / f) for f in (START_FILE, EMBEDDER_FILE))
    end = weights_of(tmp_path / "end" / EMBEDDER_FILE)
    # A random projection means nothing at the start.
    shares = 0.25, 1 if head == "linear" else 0.25
    for share, *arrays in zip(shares, start, end, between, strict=True):
        for one, other, kept in zip(*arrays, strict=True):
            np.testing.assert_allclose(kept, (1 - share) * one + share * other, atol=1e-6)
    assert result["interpolation"]["share"] == 0.25
    assert "0.25" in result["selection"]


@pytest.mark.slow
def test_the_share_is_chosen_by_held_out_classes_and_a_second_data_set(tmp_path, monkeypatch):
    also = runs.noise("test", 5, 7)
    monkeypatch.setattr(runs, "SPLITS", dataclasses.replace(runs.SPLITS, also=also))
    with pytest.raises(UserError, match="interpolate=auto"):
        runs.experiment(tmp_path / "run", interpolate="auto")
    settings = {"interpolate": "auto", "also_measure": "folder:also", "holdout_classes": 0.4}
    run = tmp_path / "run"
    result = train(run, **settings)
    interpolation = result["interpolation"]
    assert interpolation["metrics"][interpolation["share"]][1] == result["metrics_also"]["map@r"]
    assert json.loads((run / RESULT_FILE).read_text())["interpolation"]["metrics"]
    assert final_settings(run)["interpolate"] == Interpolation(interpolation["share"])
