"""What is measured in which epoch; the statistics network of a run with RankMI."""

import dataclasses
import types

import keras
import numpy as np
import pytest

from tests import references
from tests.objectives import references_classes
from tests.training import runs
from tests.training.runs import noise
from tfdml import losses
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import UserError
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import MetricLoss, RankMI
from tfdml.training.build.images import Splits, check_measurable
from tfdml.training.distributed.processes import Processes
from tfdml.training.run.results import Evaluator, rank_mi_of, statistics_model


def check(split, ks, name="test"):
    train = noise("train", 2, 0)
    splits = Splits(train, None, split) if name == "test" else Splits(train, split, noise("test", 6, 0))
    check_measurable(splits, ks)


def test_as_many_gallery_images_as_the_largest_k_are_needed():
    split = noise("test", 2, 0)
    check(split, (1, 7))
    with pytest.raises(UserError, match=r"--ks=1,7,8: recall@8 of the test images .* there are 7; .* e.g. --ks=1,7$"):
        check(split, (1, 7, 8))


def test_queries_are_counted_against_their_gallery():
    split = dataclasses.replace(noise("test", 2, 0), is_query=np.arange(8) % 4 > 0)
    check(split, (1, 2))
    with pytest.raises(UserError, match="there are 2"):
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
        ({"evaluate_every": 0, "generalisation_every": 3}, [0, 5], [0, 3, 5]),
        ({"evaluate_every": 2, "generalisation_every": 2}, [0, 2, 4, 5], [0, 2, 4, 5]),
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
    assert [epoch for epoch, record in records.items() if "generalisation" in record] == compared
    # Once each, whatever needs them.
    assert len(asked) == 2 * len({*evaluated, *compared})
    for name, x in embeddings.items():
        labels = getattr(splits, name).labels
        for epoch in evaluated:
            assert records[epoch][name]["recall@1"] == pytest.approx(recall_at_1(labels, x))
        densities = [references_classes.density(labels, x, c) for c in references_classes.classes_of(labels)]
        for epoch in compared:
            side = {"test": "unseen", "seen": "seen"}[name]
            assert records[epoch]["generalisation"][f"{side}_d_avg_mean"] == pytest.approx(np.mean(densities))
            assert 0 <= records[epoch]["generalisation"]["lambda"] <= 2
            assert 0 <= records[epoch]["generalisation"]["h_divergence"] <= 1


def test_seen_classes_that_cannot_be_measured_are_refused():
    train = noise("train", 3, 0)
    splits = Splits(train, None, noise("test", 6, 1), train.select_classes([1]))
    check_measurable(splits, (1, 3))
    with pytest.raises(UserError, match=r"recall@4 of the seen images of noise needs 4 gallery images"):
        check_measurable(splits, (1, 4))


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
    for variable in objective.statistics_variables:
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
