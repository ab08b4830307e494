"""Which epoch is selected, what is kept for it, and what is measured by whom."""

import dataclasses
import types

import keras
import numpy as np
import pytest

from tests.models.networks import shallow
from tests.training import runs
from tests.training.runs import noise
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import UserError
from tfdml.models import Embedder
from tfdml.run_folder import RunFolder
from tfdml.training.results import Evaluator, _interpolate, selected_epoch
from tfdml.training.run_data import Splits, check_measurable
from tfdml.training.settings import EvaluationSettings
from tfdml.training.workers import Processes


def history(*values):
    return [
        {"epoch": i, "validation": {} if v is None else {"map@r": v}} for i, v in enumerate(values)
    ]


def test_the_first_of_the_best_that_were_measured_wins_and_no_training_does_not():
    assert selected_epoch(history(0.9, 0.2, 0.5, 0.5, 0.4), "validation") == 2
    assert selected_epoch(history(0.1, None, 0.3, None), "validation") == 2
    # Until one is measured, the newest counts.
    assert selected_epoch(history(0.1, None, None), "validation") == 2
    assert selected_epoch(history(0.9, 0.2, 0.5, 0.5, 0.4), "last") == 4
    assert selected_epoch(history(0.9), "validation") == 0


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1),
        # Warming up is no decay.
        ([0.5, 1.0, 1.0, 1.0], 1),
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


def test_queries_are_counted_against_their_gallery():
    split = dataclasses.replace(noise("test", 2, 0), is_query=np.arange(8) % 4 > 0)
    splits = Splits(noise("train", 2, 0), None, split)
    check_measurable(splits, (1, 2))
    with pytest.raises(UserError, match="compared with 2"):
        check_measurable(splits, (4,))


def test_workers_embed_their_parts_and_the_chief_measures(monkeypatch):
    splits = Splits(noise("train", 2, 0), None, noise("test", 5, 1))
    settings = EvaluationSettings(ks="1")
    view = EvaluationTransform(runs.SIZE, runs.SIZE)

    def means(images):
        return keras.ops.mean(keras.ops.cast(images, "float32"), axis=(1, 2))

    expected = Evaluator(settings, splits, view).embed(means, "test")
    given = []
    monkeypatch.setattr(Processes, "gather", lambda self, rows: given.append(rows) or rows)
    workers = [
        Evaluator(settings, splits, view, processes=Processes(i, ("host",) * 3)) for i in range(3)
    ]
    for evaluator in workers:
        evaluator.embed(means, "test")
    assert [len(rows) for rows in given] == [6, 7, 7]
    np.testing.assert_array_equal(np.concatenate(given), expected)
    means.represent = lambda images, training: {"pooled": means(images)}
    learner = types.SimpleNamespace(embedder=means, objectives=())
    monkeypatch.setattr(Processes, "gather", lambda self, rows: expected)
    measured = workers[0].each_epoch(learner, 0, 2)
    assert set(measured) == {"test", "features"}
    assert "features" not in workers[0].each_epoch(learner, 1, 2)
    assert workers[1].each_epoch(learner, 0, 2) == {}
    workers[0].settings = EvaluationSettings(ks="1", evaluate_every=2)
    assert [bool(workers[0].each_epoch(learner, epoch, 5)) for epoch in range(6)] == [
        True,
        False,
        True,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("head", "share"), [("linear", "0.25"), ("whitened", "0.25"), ("whitened", "auto")]
)
def test_the_weights_that_are_kept_lie_between_start_and_end(head, share, tmp_path):
    splits = Splits(*(noise(name, 3, seed) for seed, name in enumerate(("train", "test", "test"))))
    splits = dataclasses.replace(splits, also=noise("test", 3, 7))
    changes = {"holdout_classes": 0.4, "also_measure": "folder:also"} if share == "auto" else {}
    experiment = runs.experiment(tmp_path, head=head, interpolate=share, **changes)
    start, end = (Embedder(shallow(), embedding_dim=8, image_size=runs.SIZE) for _ in range(2))
    for embedder in (start, end):
        embedder.build((None, runs.SIZE, runs.SIZE, 3))
    start.save(RunFolder(tmp_path).start)
    before = end.get_weights()
    evaluator = Evaluator(EvaluationSettings(), splits, EvaluationTransform(runs.SIZE, runs.SIZE))
    result = _interpolate(experiment, types.SimpleNamespace(embedder=end), evaluator)
    kept = result["share"]
    # A random projection means nothing at the start.
    shares = [kept] * len(before)
    if head == "linear":
        shares[len(start.backbone.get_weights()) :] = [1, 1]
    for part, *arrays in zip(shares, start.get_weights(), before, end.get_weights(), strict=True):
        np.testing.assert_allclose(arrays[2], (1 - part) * arrays[0] + part * arrays[1], atol=1e-6)
    if share == "auto":
        of_kept = [
            evaluator.measure(evaluator.embed(end, name), name) for name in ("validation", "also")
        ]
        assert result["metrics"][kept] == tuple(metrics["map@r"] for metrics in of_kept)
        assert "best on held-out classes" in result["chosen"]
    else:
        assert (kept, result["chosen"]) == (0.25, "as was asked for")


def test_nothing_is_kept_but_the_end_where_nothing_is_asked_for(tmp_path):
    assert _interpolate(runs.experiment(tmp_path), None, None) == {}
