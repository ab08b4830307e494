"""The best epoch is selected, with a warning where the choice is chance, and its embedder survives a resumed run."""

import errno
import os
import pathlib

import keras
import numpy as np
import pytest

from tests.training import runs
from tests.training.run.stopping import make_quick
from tfdml.errors import UserError
from tfdml.io.files import as_size
from tfdml.models import Embedder
from tfdml.training import RunFolder
from tfdml.training.run.results import Evaluator
from tfdml.training.run.selection import (
    keep_if_selected,
    publish_selected,
    saturation_warnings,
    selected_epoch,
    selection_warnings,
    write_embedder,
)


def history(*values):
    return [{"epoch": i, "validation": {} if v is None else {"map@r": v}} for i, v in enumerate(values)]


def test_the_first_of_the_best_wins_and_no_training_does_not():
    assert selected_epoch(history(0.9, 0.2, 0.5, 0.5, 0.4), "validation") == 2
    assert selected_epoch(history(0.9, 0.2, 0.5, 0.5, 0.4), "last") == 4
    assert selected_epoch(history(0.9), "validation") == 0


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1),
        # Warming up is no decay.
        ([0.5, 1.0, 1.0, 1.0], 1),
        ([1.0, 1.0, 0.1, 0.1], 4),
        ([1.0, 0.8, 0.5, 0.2], 4),
    ],
)
def test_of_equal_epochs_the_last_is_selected_once_the_rate_has_decayed(rates, expected):
    records = history(0.1, 0.5, 0.4, 0.5, 0.5)
    for record, rate in zip(records[1:], rates, strict=True):
        record["learning_rate"] = rate
    assert selected_epoch(records, "validation") == expected
    # An epoch that was not measured is never equal to the best.
    del records[4]["validation"]["map@r"]
    assert selected_epoch(records, "validation") == min(expected, 3)


def test_few_held_out_classes_are_warned_of():
    (line,) = selection_warnings("validation", runs.noise("train", 9, 0, images_per_class=2))
    assert line.startswith("WARNING: --selection=validation selects the epoch on 9 held-out classes")
    assert selection_warnings("validation", runs.noise("train", 10, 0, images_per_class=2)) == []
    assert selection_warnings("last", runs.noise("train", 9, 0, images_per_class=2)) == []


@pytest.mark.parametrize(("metric", "advice"), [("map@r", "Use more"), ("recall@1", "--selection_metric=map@r")])
def test_a_saturated_metric_is_warned_of(metric, advice):
    def records(*values):
        return [{"epoch": i, "validation": {metric: value}} for i, value in enumerate(values)]

    (line,) = saturation_warnings(records(0.3, 0.985, 0.99, 0.98), "validation", metric)
    assert line.startswith(f"WARNING: {metric} on the validation classes is saturated: 99.0 % in the selected epoch 2")
    assert advice in line
    assert len(saturation_warnings(records(0.3, 0.98), "validation", metric)) == 1
    assert saturation_warnings(records(0.99, 0.97, 0.96), "validation", metric) == []
    assert saturation_warnings(records(0.99, 0.99), "last", metric) == []


def test_a_run_warns_of_a_saturated_metric_and_of_few_classes(tmp_path, monkeypatch, caplog):
    make_quick(monkeypatch)
    monkeypatch.setattr(Evaluator, "measure", perfect(Evaluator.measure))
    result = runs.train(tmp_path / "run", selection="validation", holdout_classes=0.3)
    assert result["selection"] == "the best epoch on held-out training classes, by map@r"
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("selects the epoch on 5 held-out classes" in line for line in warned)
    assert any("map@r on the validation classes is saturated: 100.0 %" in line for line in warned)


def perfect(measure):
    """Wrap `Evaluator.measure` so that MAP@R is 1."""
    return lambda *arguments, **options: {**measure(*arguments, **options), "map@r": 1.0}


def test_epochs_that_were_not_measured_do_not_win():
    assert selected_epoch(history(0.1, None, 0.3, None), "validation") == 2
    # Until one is, the newest counts.
    assert selected_epoch(history(0.1, None, None), "validation") == 2
    # A rate that has decayed and risen again changes nothing.
    records = history(0.1, None, None, None)
    for record, rate in zip(records[1:], (1.0, 0.1, 1.0), strict=True):
        record["learning_rate"] = rate
    assert selected_epoch(records, "validation") == 3


def test_another_metric_may_choose_another_epoch():
    records = [
        {"epoch": i, "validation": {"recall@1": r, "map@r": m}}
        for i, (r, m) in enumerate([(0.9, 0.9), (0.857, 0.456), (0.848, 0.474), (0.855, 0.506), (0.856, 0.505)])
    ]
    assert selected_epoch(records, "validation", "recall@1") == 1
    assert selected_epoch(records, "validation") == 3


def test_embedders_stay_as_long_as_a_checkpoint_may_need_them(tmp_path):
    folder, embedder = RunFolder(tmp_path), small_embedder()
    recalls, steps = [0.1, 0.5, 0.4, 0.6, 0.3], 10
    kept = []
    for epoch in range(1, 5):
        records = history(*recalls[: epoch + 1])
        keep_if_selected(folder, records, "validation", "map@r", embedder)
        for old in folder.checkpoints.glob("*.npz"):
            if int(old.stem.removeprefix("step-")) < (epoch - 1) * steps:
                old.unlink()
        (folder.checkpoints / f"step-{epoch * steps:08d}.npz").touch()
        publish_selected(folder, records, "validation", "map@r", steps)
        kept.append(sorted(int(path.stem[-4:]) for path in folder.checkpoints.glob("selected-*.keras")))
    # Checkpoints of epochs 1; 1 and 2; 2 and 3; 3 and 4.
    assert kept == [[1], [1], [1, 3], [3]]
    assert folder.embedder.read_bytes() == folder.selected(3).read_bytes()


def small_embedder():
    embedder = Embedder("conv4", embedding_dim=2, image_size=16)
    embedder.build((None, 16, 16, 3))
    embedder.built = True
    return embedder


def test_the_selected_epoch_becomes_the_embedder_of_the_run(tmp_path):
    folder, best, last = RunFolder(tmp_path), small_embedder(), small_embedder()
    records = history(0.1, 0.7, 0.5)
    keep_if_selected(folder, records[:2], "validation", "map@r", best)
    for selection, expected in (("validation", best), ("last", last)):
        written = write_embedder(folder, records, selection, "map@r", last)
        for embedder in (written, keras.saving.load_model(folder.embedder)):
            for actual, wanted in zip(embedder.get_weights(), expected.get_weights(), strict=True):
                np.testing.assert_array_equal(actual, wanted)


def test_a_full_disk_is_told_with_what_an_embedder_needs(tmp_path, monkeypatch):
    def full(path):
        pathlib.Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    embedder = small_embedder()
    monkeypatch.setattr(embedder, "save", full)
    needs = as_size(4 * embedder.count_params())
    message = f"embedder.keras cannot be written: the disk is full, and this file needs about {needs}"
    with pytest.raises(UserError, match=message):
        write_embedder(RunFolder(tmp_path), history(0.1, 0.5), "last", "map@r", embedder)
    with pytest.raises(UserError, match=f"the disk is full, and this file needs about {needs}"):
        keep_if_selected(RunFolder(tmp_path), history(0.1, 0.5), "validation", "map@r", embedder)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints"]


def test_the_last_needs_no_file(tmp_path):
    folder = RunFolder(tmp_path)
    keep_if_selected(folder, history(0.1, 0.5), "last", "map@r", None)
    publish_selected(folder, history(0.1, 0.5), "last", "map@r", 10)
    assert not list(tmp_path.iterdir())
    assert np.isfinite(selected_epoch(history(0.1), "last"))
