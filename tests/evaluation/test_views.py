"""Retrieval across two views against slow definitions, with ties and several right answers, and
zero-shot classes."""

import functools
import math

import numpy as np
import pytest

from tests.evaluation.rankings import METRICS, slow
from tfdml.errors import UserError
from tfdml.evaluation import (
    KNNClassifier,
    class_embeddings,
    evaluate_views,
    evaluate_zero_shot,
)
from tfdml.evaluation.intervals import confidence_intervals


def made(several):
    """Points of a coarse grid, so that most distances are tied, and their labels; class 9 has
    images alone."""
    rng = np.random.default_rng(several)
    images, texts = rng.integers(0, 3, size=(60, 3)), rng.integers(0, 3, size=(25, 3))
    image_labels, text_labels = rng.integers(0, 10, 60).tolist(), rng.integers(0, 9, 25).tolist()
    if several:  # some texts are of images of two classes, and some images have two labels
        text_labels = [[label, label + 1] if label % 4 == 1 else label for label in text_labels]
        image_labels[:3] = [[1, 2], [3, 7], [5, 6]]
    return images, texts, image_labels, text_labels


@pytest.mark.parametrize("several", [False, True])
def test_both_directions_are_those_of_the_definition(several):
    images, texts, image_labels, text_labels = made(several)
    sets = [[set(np.atleast_1d(label)) for label in side] for side in (image_labels, text_labels)]
    ks = (1, 4)
    result = evaluate_views(
        images,
        texts,
        image_labels,
        text_labels,
        ks=ks,
        metrics=METRICS,
        distance="euclidean",
        intervals="queries",
    )
    sides = {
        "text_to_image": (texts, images, sets[1], sets[0]),
        "image_to_text": (images, texts, sets[0], sets[1]),
    }
    for name, (queries, gallery, of_query, of_row) in sides.items():
        expected = slow(queries, gallery, lambda q, row, a=of_query, b=of_row: bool(a[q] & b[row]))
        for metric in METRICS:
            assert result[name][metric] == pytest.approx(np.nanmean(expected[metric]), abs=1e-9), (
                name,
                metric,
            )
        unanswered = np.count_nonzero(np.isnan(expected["map"]))
        assert result[name]["queries_without_match"] == unanswered
        intervals = confidence_intervals(
            {"map": expected["map"]}, np.arange(len(queries)), over="queries"
        )
        assert result[name]["intervals"]["map"] == pytest.approx(intervals["map"], abs=1e-9)
    assert result["image_to_text"]["queries_without_match"] > 0


def test_chance_is_that_of_a_random_order():
    images, texts, image_labels, text_labels = made(False)
    result = evaluate_views(images, texts, image_labels, text_labels, ks=(1, 4), intervals=None)
    right = np.equal.outer(image_labels, text_labels)
    for name, table in (("image_to_text", right), ("text_to_image", right.T)):
        counts, size = table.sum(axis=1)[table.any(axis=1)], table.shape[1]
        for k in (1, 4):
            expected = np.mean(
                [1 - math.comb(size - count, k) / math.comb(size, k) for count in counts.tolist()]
            )
            assert result[name]["chance"][f"recall@{k}"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: evaluate_views(np.eye(3), np.eye(3), [1, 1, 1], [1, 1, 1]), "every text"),
        (lambda: evaluate_views(np.eye(3), np.eye(3), [1, 2, 3], [1, 2, []]), "text_labels"),
        (lambda: evaluate_views(np.eye(3), np.eye(3), [1, 2, 3], [4, 5, 6]), "no class in common"),
        (lambda: class_embeddings(np.eye, ["cat", " "], ["a {}"]), "empty"),
        (lambda: class_embeddings(np.eye, ["cat"], ["a cat"]), "{}"),
        (lambda: evaluate_zero_shot(np.eye(2), [0, 2], np.eye(2)), "labels"),
    ],
)
def test_what_cannot_be_measured_is_refused(act, message):
    with pytest.raises(UserError, match=message):
        act()


def test_a_class_is_the_mean_of_its_templates():
    """As in CLIP's notebook: each text's embedding is normalized before the mean, and the mean
    afterwards."""
    vectors = {
        "a cat": [3.0, 4.0],
        "one cat": [0.0, 2.0],
        "a dog": [-5.0, 0.0],
        "one dog": [0.0, -0.1],
    }
    classes = class_embeddings(
        lambda texts: [vectors[text] for text in texts], ["cat", "dog"], ["a {}", "one {}"]
    )
    means = np.array([[0.3, 0.9], [-0.5, -0.5]])
    np.testing.assert_allclose(
        classes, means / np.linalg.norm(means, axis=1, keepdims=True), rtol=1e-6
    )


def test_zero_shot_accuracy_is_that_of_the_largest_cosines():
    rng = np.random.default_rng(0)
    images, labels, classes = (
        rng.normal(size=(300, 5)),
        rng.integers(0, 20, 300),
        rng.normal(size=(20, 5)),
    )
    result = evaluate_zero_shot(images, labels, classes)
    cosines = images @ classes.T / np.linalg.norm(classes, axis=1)
    order = np.argsort(-cosines, axis=1)
    for k in (1, 5):
        hits = (order[:, :k] == labels[:, None]).any(axis=1)
        assert result[f"accuracy@{k}"] == pytest.approx(hits.mean())
        assert result["intervals"][f"accuracy@{k}"].mean == pytest.approx(hits.mean())


def warnings_of(function, caplog):
    caplog.clear()
    function()
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_classes_with_one_vector_or_none_are_named(caplog):
    """As of a name that is there twice, of capitals that a tokenizer drops, and of templates that
    cancel."""
    vectors = {"cat": [1.0, 0.0], "dog": [0.0, 1.0], "not dog": [0.0, -1.0]}

    def embed_texts(texts):
        return [vectors[text.lower()] for text in texts]

    names = ["Cat", "cat", "dog"]
    classes = class_embeddings(embed_texts, names)

    def measure():
        return evaluate_zero_shot(np.eye(2), [1, 2], classes, class_names=names, intervals=None)

    (message,) = warnings_of(measure, caplog)
    assert message.startswith("1 of 3 vectors equal one of another class")
    assert "'cat (row 1)', which equals 'Cat (row 0)'" in message
    assert measure()["accuracy@1"] == 0.5  # the second cat is never answered
    vectors["not cat"] = [1.0, 1e-9]
    canceled = class_embeddings(embed_texts, ["cat", "dog"], ["{}", "not {}"])
    (message,) = warnings_of(lambda: evaluate_zero_shot(np.eye(2), [0, 1], canceled), caplog)
    assert message.startswith("1 of 2 vectors have length 0, the first is of class 1")
    distinct = class_embeddings(embed_texts, ["cat", "dog"])
    assert not warnings_of(lambda: evaluate_zero_shot(np.eye(2), [0, 1], distinct), caplog)


def test_every_classifier_names_what_it_cannot_tell_apart(caplog):
    x, names = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0]]), ["a", "b", "c"]
    for per_class in ("nearest", "mean"):
        make = functools.partial(KNNClassifier, per_class=per_class)
        twin, zero = warnings_of(lambda make=make: make(x, names, distance="cosine"), caplog)
        assert "'b', which equals 'a'" in twin
        assert "length 0, the first is of class 'c'" in zero
        assert not warnings_of(lambda make=make: make(x, names, distance="euclidean"), caplog)
    classifier = KNNClassifier(x[:1], names[:1], distance="cosine")
    assert len(warnings_of(lambda: classifier.add(x[1:2], names[1:2]), caplog)) == 1
    # Those that were there are not said again, nor are images of one class.
    assert not warnings_of(lambda: classifier.add([[0.0, 1.0]] * 2, ["d", "d"]), caplog)
