"""What a run measures of its steps: throughput without the steps that compile."""

import dataclasses
import json
import types

import keras
import numpy as np
import pytest

from tests import references
from tests.objectives import references_classes
from tests.training import runs
from tests.training.runs import noise
from tests.training.stopping import make_quick
from tfdml import losses
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import UserError
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import MetricLoss, RankMI
from tfdml.training import RunFolder, callbacks
from tfdml.training.callbacks import TrainingMonitor
from tfdml.training.images import Splits, check_measurable
from tfdml.training.results import (
    Evaluator,
    keep_if_selected,
    publish_selected,
    rank_mi_of,
    saturation_warnings,
    selected_epoch,
    selection_warnings,
    statistics_model,
    write_embedder,
)
from tfdml.training.workers import Processes


def test_throughput_leaves_out_images_and_seconds_of_the_step_that_compiles(tmp_path, monkeypatch):
    make_quick(monkeypatch)
    now = [0.0]
    began, each_epoch = TrainingMonitor.on_train_batch_begin, Evaluator.each_epoch

    def step(self, batch, logs=None):
        # A step takes 2 seconds, one that compiles 100.
        now[0] += 100.0 if self._steps_here < 1 else 2.0
        began(self, batch, logs)

    def evaluate(self, learner, epoch):
        now[0] += 1000.0
        return each_epoch(self, learner, epoch)

    monkeypatch.setattr(callbacks, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(TrainingMonitor, "on_train_batch_begin", step)
    monkeypatch.setattr(Evaluator, "each_epoch", evaluate)
    result = runs.train(tmp_path / "run", objectives="contrastive", epochs=2, steps_per_epoch=4, watch_every=0)
    assert result["images_per_second"] == pytest.approx(8 / 2.0)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("images_per_second") for line in lines] == [None, 4.0, 4.0]


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


@pytest.mark.slow
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


def test_the_last_needs_no_file(tmp_path):
    folder = RunFolder(tmp_path)
    keep_if_selected(folder, history(0.1, 0.5), "last", "map@r", None)
    publish_selected(folder, history(0.1, 0.5), "last", "map@r", 10)
    assert not list(tmp_path.iterdir())
    assert np.isfinite(selected_epoch(history(0.1), "last"))


def check(split, ks, name="test"):
    train = noise("train", 2, 0)
    splits = Splits(train, None, split) if name == "test" else Splits(train, split, noise("test", 6, 0))
    check_measurable(splits, ks)


def test_as_many_gallery_images_as_the_largest_k_are_needed():
    split = noise("test", 2, 0)
    check(split, (1, 7))
    with pytest.raises(UserError, match=r"--ks=1,7,8: of the test images .* with 7; .* e.g. --ks=1,7$"):
        check(split, (1, 7, 8))


def test_queries_are_counted_against_their_gallery():
    split = dataclasses.replace(noise("test", 2, 0), is_query=np.arange(8) % 4 > 0)
    check(split, (1, 2))
    with pytest.raises(UserError, match="compared with 2"):
        check(split, (4,))


def test_someone_must_have_a_match():
    with pytest.raises(UserError, match="the validation images of noise cannot be measured: no query shares"):
        check(noise("train", 5, 0, images_per_class=1), (1,), "validation")


def recall_at_1(labels, x):
    """The share of images whose nearest other image is of their class."""
    hits = []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        nearest = min(others, key=lambda j: references.squared_distance(x[i], x[j]))
        hits.append(labels[i] == labels[nearest])
    return np.mean(hits)


@pytest.mark.parametrize(
    ("settings", "evaluated", "compared"),
    [
        ({"evaluate_every": 2}, [0, 2, 4, 5], []),
        ({"evaluate_every": 0, "generalization_every": 3}, [0, 5], [0, 3, 5]),
        ({"evaluate_every": 2, "generalization_every": 2}, [0, 2, 4, 5], [0, 2, 4, 5]),
    ],
)
def test_seen_classes_are_measured_beside_the_unseen_in_the_epochs_that_are_due(
    settings, evaluated, compared, monkeypatch
):
    train = noise("train", 4, 0)
    splits = Splits(train, None, noise("test", 3, 1), train.select_classes([0, 3]))
    experiment = runs.experiment("runs/any", epochs=5, evaluate_train=0.5, ks="1", **settings)
    evaluator = Evaluator(experiment, splits, EvaluationTransform(runs.SIZE, runs.SIZE))
    generator = np.random.default_rng(0)
    embeddings = {name: generator.normal(size=(len(split), 2)) for name, split in splits.evaluated().items()}
    asked = []
    monkeypatch.setattr(evaluator, "embed", lambda embedder, name: asked.append(name) or embeddings[name])
    learner = types.SimpleNamespace(embedder=None, objectives=[])
    records = {epoch: evaluator.each_epoch(learner, epoch) for epoch in range(6)}
    assert [epoch for epoch, record in records.items() if "seen" in record] == evaluated
    assert [epoch for epoch, record in records.items() if "generalization" in record] == compared
    # Once each, whatever needs them.
    assert len(asked) == 2 * len({*evaluated, *compared})
    for name, x in embeddings.items():
        labels = getattr(splits, name).labels
        for epoch in evaluated:
            assert records[epoch][name]["recall@1"] == pytest.approx(recall_at_1(labels, x))
        densities = [references_classes.density(labels, x, c) for c in references_classes.classes_of(labels)]
        for epoch in compared:
            side = {"test": "unseen", "seen": "seen"}[name]
            assert records[epoch]["generalization"][f"{side}_d_avg_mean"] == pytest.approx(np.mean(densities))
            assert 0 <= records[epoch]["generalization"]["lambda"] <= 2
            assert 0 <= records[epoch]["generalization"]["h_divergence"] <= 1


def test_seen_classes_that_cannot_be_measured_are_refused():
    train = noise("train", 3, 0)
    splits = Splits(train, None, noise("test", 6, 1), train.select_classes([1, 2]))
    check_measurable(splits, (1, 7))
    with pytest.raises(UserError, match=r"of the seen images of noise a query is compared with 7"):
        check_measurable(splits, (1, 8))
    with pytest.raises(
        UserError, match="seen images of noise cannot be measured: retrieval needs images of two classes"
    ):
        check_measurable(dataclasses.replace(splits, seen=train.select_classes([1])), (1, 3))


def test_workers_embed_their_parts_and_the_chief_measures(monkeypatch):
    splits = Splits(noise("train", 2, 0), None, noise("test", 5, 1))
    settings = runs.experiment("runs/any", ks="1")
    view = EvaluationTransform(runs.SIZE, runs.SIZE)

    def means(images):
        return keras.ops.mean(keras.ops.cast(images, "float32"), axis=(1, 2))

    expected = Evaluator(settings, splits, view).embed(means, "test")
    given = []
    monkeypatch.setattr(Processes, "gather", lambda self, rows: given.append(rows) or rows)
    workers = [Evaluator(settings, splits, view, processes=Processes(i, ("host",) * 3)) for i in range(3)]
    for evaluator in workers:
        evaluator.embed_together(means, "test")
    assert [len(rows) for rows in given] == [6, 7, 7]
    np.testing.assert_array_equal(np.concatenate(given), expected)
    learner = types.SimpleNamespace(embedder=means, objectives=())
    monkeypatch.setattr(Processes, "gather", lambda self, rows: expected)
    assert set(workers[0].each_epoch(learner, 0)) == {"test"}
    assert workers[1].each_epoch(learner, 0) == {}


@pytest.fixture(scope="module")
def trained():
    """RankMI whose V has a root within the distances below: at first it is a line through 0."""
    objective = RankMI(margin=0.1, hidden=8, depth=1, initial_beta=0.9, seed=1)
    objective.build_from({})
    generator = np.random.default_rng(4)
    for variable in objective.network.weights:
        variable.assign(variable.numpy() + 0.1 * generator.normal(size=variable.shape))
    # The last bias moves V up and down.
    objective.network.biases[-1].assign([0.0])
    objective.network.biases[-1].assign([-float(objective.network(np.float32(0.8)))])
    return objective


def test_the_network_is_saved_and_loaded(trained, tmp_path):
    statistics_model(trained).save(tmp_path / "network.keras")
    loaded = keras.saving.load_model(tmp_path / "network.keras")
    distances = np.linspace(0, 2, 7, dtype=np.float32)
    expected = trained.network(distances).numpy()
    np.testing.assert_array_equal(loaded(distances), expected)
    np.testing.assert_allclose(loaded.predict(distances, verbose=0), expected, atol=1e-6)


def test_one_network_is_saved_and_no_other_number():
    embedder = Embedder("conv4", embedding_dim=4, image_size=16)
    one, other = RankMI(name="one"), RankMI(name="other")
    assert rank_mi_of(MetricLearner(embedder, [one])) is one
    assert rank_mi_of(MetricLearner(embedder, [one, other])) is None
    assert rank_mi_of(MetricLearner(embedder, [MetricLoss(losses.ContrastiveLoss())])) is None
