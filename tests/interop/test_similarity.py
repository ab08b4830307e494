"""Samplers and indexers of TensorFlow Similarity, by doubles; the library itself is in tests/parity."""

import sys
import types

import keras
import numpy as np
import pytest

from tfdml.errors import UserError
from tfdml.interop import build_indexer, read_indexer, sampler_dataset


class Sampler:
    """Batches that tell their epoch and their index."""

    def __init__(self, size=3, labels=(5, 5, 9, 9), dtype="int64"):
        self.size, self.labels, self.epoch = size, np.array(labels, dtype), 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return np.full((4, 2, 2, 3), 10 * self.epoch + index, "float32"), self.labels

    def on_epoch_end(self):
        self.epoch += 1


def test_a_pass_over_the_data_is_an_epoch_of_the_sampler():
    dataset = sampler_dataset(Sampler())
    assert int(dataset.cardinality()) == 3
    passes = [[int(images[0, 0, 0, 0]) for images, _ in dataset] for _ in range(2)]
    assert passes == [[0, 1, 2], [10, 11, 12]]
    images, labels = next(iter(dataset))
    assert images.shape == (4, 2, 2, 3)
    assert labels.numpy().tolist() == [5, 5, 9, 9]


def test_keras_fits_on_it():
    model = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert len(model.fit(sampler_dataset(Sampler()), epochs=2, verbose=0).history["loss"]) == 2


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        ([((np.zeros((2, 3)), np.zeros((2, 3))), np.zeros(2, int))], r"no pairs \(images, class ids\)"),
        ([np.zeros(3)], r"no pairs \(images, class ids\)"),
        (Sampler(labels=(1, 2)), r"images of shape \(4, 2, 2, 3\) with labels of shape \(2,\)"),
        (Sampler(dtype="float32"), "type float32: a class id an image is needed"),
    ],
)
def test_other_batches_are_refused(sampler, message):
    with pytest.raises(UserError, match=message):
        sampler_dataset(sampler)


class Indexer:
    """What is used of an Indexer."""

    def __init__(self, size, distance):
        self.size, self.distance = size, distance
        self.kv_store = types.SimpleNamespace(embeddings=[], labels=[], data=[])

    def batch_add(self, embeddings, labels, data, verbose):
        assert verbose == 0
        self.kv_store.embeddings += list(embeddings)
        self.kv_store.labels += labels
        self.kv_store.data += [None] * len(labels) if data is None else list(data)


@pytest.fixture
def similarity(monkeypatch):
    package, module = types.ModuleType("tensorflow_similarity"), types.ModuleType("tensorflow_similarity.indexer")
    module.Indexer = Indexer
    monkeypatch.setitem(sys.modules, "tensorflow_similarity", package)
    monkeypatch.setitem(sys.modules, "tensorflow_similarity.indexer", module)


@pytest.mark.usefixtures("similarity")
def test_what_goes_into_an_indexer_comes_out_of_it():
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    indexer = build_indexer(x, [3, 3, 1, 2, 2], data=list("abcde"), distance="l2")
    assert (indexer.size, indexer.distance, indexer.kv_store.data) == (4, "l2", list("abcde"))
    embeddings, labels = read_indexer(indexer)
    np.testing.assert_array_equal(embeddings, x)
    assert labels.tolist() == [3, 3, 1, 2, 2]


@pytest.mark.usefixtures("similarity")
def test_rows_that_do_not_go_together_are_refused():
    with pytest.raises(
        UserError, match=r"`embeddings` of shape \(2, 2\) and `labels` of shape \(3,\): one label a row"
    ):
        build_indexer(np.eye(2), [1, 2, 3])
    with pytest.raises(UserError, match="`data` has 1 rows, `labels` 2"):
        build_indexer(np.eye(2), [1, 2], data=["a"])
    indexer = build_indexer(np.eye(2), [1, 2])
    indexer.kv_store.labels[1] = None
    with pytest.raises(UserError, match="1 of the indexer's 2 embeddings have no label"):
        read_indexer(indexer)
    with pytest.raises(UserError, match="holds no embeddings"):
        read_indexer(Indexer(2, "cosine"))
    with pytest.raises(UserError, match="object does not keep its items in memory"):
        read_indexer(object())


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_similarity", None)
    with pytest.raises(UserError, match=r"pip install 'tfdml\[legacy\]'"):
        build_indexer(np.eye(2), [1, 2])
