"""An index gives the neighbors, classes and files that its embeddings have."""

import keras
import numpy as np
import pytest

import tfdml
from tests.models.networks import tiny_embedder
from tfdml.embeddings import read_embeddings
from tfdml.errors import UserError
from tfdml.evaluation import KNNClassifier
from tfdml.retrieval import About, MemoryGallery, Rows


def images(labels, seed):
    """(N, 4) points near one corner of a cube for each class."""
    noise = np.random.default_rng(seed).normal(scale=0.05, size=(len(labels), 4))
    return (
        np.eye(8)[np.asarray(labels)][:, :4] + np.eye(8)[np.asarray(labels)][:, 4:] * 2 + noise
    ).astype("float32")


LABELS = np.repeat([0, 2, 5], 6)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(8)]
    )


@pytest.fixture
def index(model):
    index = tfdml.Index(model, distance="euclidean", batch_size=4)
    index.add(images(LABELS[:12], 0), LABELS[:12])
    index.add(images(LABELS[12:], 1), LABELS[12:])
    return index


def test_neighbors_are_those_of_all_distances(index, model):
    queries = images([5, 0], 2)
    results = index.search(queries, k=4)
    assert len(index) == 18
    found = results.column("id").reshape(2, 4).astype(int)
    gallery = np.concatenate([images(LABELS[:12], 0), images(LABELS[12:], 1)])
    distances = np.linalg.norm(
        model.predict(queries, verbose=0)[:, None] - model.predict(gallery, verbose=0), axis=2
    )
    np.testing.assert_array_equal(found, np.argsort(distances, axis=1)[:, :4])
    np.testing.assert_allclose(
        results.column("distance").reshape(2, 4), np.sort(distances)[:, :4], atol=1e-5
    )
    np.testing.assert_array_equal(results.column("class").reshape(2, 4), LABELS[found].astype(str))


@pytest.mark.parametrize("names", [False, True])
def test_an_index_is_saved_and_loaded_whole(index, model, tmp_path, names):
    if names:
        index = tfdml.Index(model, distance="euclidean")
        index.add(
            images(LABELS, 0),
            np.array(["ant", "bee", "cat", "dog", "eel", "fox"])[LABELS],
            map("image {}".format, LABELS * 10 + np.arange(18)),
        )
    held_out = np.repeat([1, 3, 4, 6], 8)
    classes = np.array(list("abcdefg"))[held_out] if names else held_out
    index.calibration = index.calibrate(images(held_out, 3), classes, fpir=0.5)
    found = index.search(images(held_out, 3), 1).column("distance")
    assert (
        index.calibration.rates["fpir"].mean == np.mean(found <= index.calibration.threshold) <= 0.5
    )
    # Of classes that the index does not hold; its own images are of known ones.
    assert list(index.calibration.rates) == ["fpir"]
    assert index.calibrate(fpir=0.5).basis.images == 18
    queries = images([0, 2, 5, 7], 4)
    expected = KNNClassifier(
        index.embeddings, index.labels, k=3, distance="euclidean", threshold=index.calibration
    )
    index.save(tmp_path / "new" / "index")
    loaded = tfdml.Index.load(tmp_path / "new" / "index")
    assert loaded.ids == index.ids
    for read in (index, loaded):
        np.testing.assert_array_equal(
            read.classify(queries, k=3).labels, expected.classify(index.embed(queries)).labels
        )
        assert read.search(queries, 3).table.equals(index.search(queries, 3).table)
    stored = read_embeddings(tmp_path / "new" / "index" / "embeddings.parquet")
    np.testing.assert_array_equal(stored.embeddings, index.embeddings)
    with pytest.raises(UserError, match="index exists: choose another folder"):
        index.save(tmp_path / "new" / "index")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["index"]


@pytest.mark.parametrize("rule", ["mean", "max_of_means"])
def test_an_index_keeps_to_its_rule(model, tmp_path, rule):
    index = tfdml.Index(model, per_class=rule)
    index.add(images(LABELS, 0), np.array(["ant", "bee", "cat", "dog", "eel", "fox"])[LABELS])
    queries = images([5, 0, 2], 2)
    gallery, names = index.embeddings, index.labels
    rows = Rows([str(row) for row in range(18)], gallery, {"class": names.tolist()})
    memory = MemoryGallery("index", rows, About("euclidean", 8)).identities(rule)
    expected = memory.search(index.embed(queries), 3)
    index.calibration = index.calibrate(
        images(np.repeat([1, 3, 4, 6], 8), 3), ["nobody"] * 32, fpir=0.5
    )
    assert index.calibration.basis.per_class == rule
    index.save(tmp_path / "index")
    for read in (index, tfdml.Index.load(tmp_path / "index")):
        results = read.search(queries, k=9)
        assert results.column("id").tolist() == expected.ids.ravel().tolist()
        np.testing.assert_allclose(
            results.column("distance"), expected.distances.ravel(), rtol=1e-6
        )
        classes = read.classify(queries).labels
        is_known = classes != "unknown"
        assert is_known.any()
        assert classes[is_known].tolist() == expected.ids[is_known, 0].tolist()
    index.per_class = "nearest"
    with pytest.raises(UserError, match=f"per_class='{rule}'"):
        index.classify(queries)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((images([1], 0), [1, 2]), "one class id"),
        ((images([1], 0), None), "give y"),
        ((images([1], 0), ["bee"]), "labels"),
        ((images([1], 0), [1], ["3"]), "ids"),
    ],
)
def test_what_cannot_be_added_changes_nothing(index, arguments, message):
    with pytest.raises(UserError, match=message):
        index.add(*arguments)
    assert len(index) == len(index.embeddings) == len(index.labels) == 18


def test_classes_of_two_data_sets_go_by_name(model):
    """Both number their classes from 0; `van` is in both."""
    index = tfdml.Index(model, distance="euclidean")
    index.add(images([0, 0, 2, 2], 0), [0, 0, 1, 1], class_names={0: "bus", 1: "van"})
    index.add(images([5, 5, 2, 2], 1), [0, 0, 1, 1], "abcd", class_names={0: "pizza", 1: "van"})
    assert index.labels.tolist() == ["bus", "bus", "van", "van", "pizza", "pizza", "van", "van"]
    queries = images([0, 2, 5], 2)
    assert index.classify(queries, k=2).labels.tolist() == ["bus", "van", "pizza"]
    assert index.search(queries, k=2).column("class").tolist() == [
        "bus",
        "bus",
        "van",
        "van",
        "pizza",
        "pizza",
    ]


def test_an_index_is_loaded_with_its_own_model_alone(index, model, tmp_path):
    index.save(tmp_path / "index")
    other = keras.models.clone_model(model)
    with pytest.raises(UserError, match="are of different models"):
        tfdml.Index.load(tmp_path / "index", other)
    other.set_weights(model.get_weights())
    assert len(tfdml.Index.load(tmp_path / "index", other)) == 18


def test_images_in_the_unit_range_are_warned_of_and_gray_ones_refused():
    index = tfdml.Index(tiny_embedder())
    unit = np.random.default_rng(0).random((4, 12, 12, 3), "float32")
    with pytest.warns(UserWarning, match="255"):
        index.add(unit)
    with pytest.raises(UserError, match=r"\(4, 12, 12, 1\)"):
        index.search(255 * unit[..., :1])
