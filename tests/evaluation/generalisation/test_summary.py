import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.models.networks import coloured_batch, images, tiny_embedder
from tfdml.errors import UserError
from tfdml.evaluation import (
    GENERALISATION_MEASURES,
    class_density,
    embed,
    evaluate_divergence,
    evaluate_generalisation,
    evaluate_overlap,
    evaluate_retrieval,
    evaluate_scattering,
    part_protocol,
    partial_embeddings,
)


@pytest.fixture(scope="module")
def sides():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 9)
    return [(rng.normal(size=(10, 4))[labels] + 0.7 * rng.normal(size=(90, 4)), labels + first) for first in (0, 10)]


def recall(embeddings, labels):
    return evaluate_retrieval(embeddings, labels, ks=(1,), metrics=("recall",))["recall@1"]


def test_all_that_applies_is_there_under_its_name(sides):
    train, test = sides
    figures = evaluate_generalisation(*test, *train, seed=3, repeats=4)
    expected = evaluate_divergence(*train, *test, seed=3, repeats=4)
    for side, (embeddings, labels) in (("seen", train), ("unseen", test)):
        found = {"recall@1": recall(embeddings, labels)}
        found |= evaluate_overlap(embeddings, labels) | class_density(embeddings, labels).summary()
        expected |= {f"{side}_{name}": value for name, value in found.items()}
    assert figures == expected
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


def test_without_training_embeddings_only_the_unseen_are_measured(sides):
    figures = evaluate_generalisation(*sides[1])
    assert all(name.startswith("unseen_") for name in figures)
    assert "unseen_overlap" in figures
    assert "unseen_d_avg_mean" in figures


def test_scattering_comes_with_an_embedder_and_its_images():
    labels, data = coloured_batch(per_class=5)
    embedder = tiny_embedder()
    embeddings = embed(embedder, [data])
    figures = evaluate_generalisation(embeddings, labels, embedder=embedder, test_batches=[data], share=0.5, seed=1)
    expected = evaluate_scattering(embedder, [data], labels, share=0.5, seed=1)
    assert expected.items() <= figures.items()
    assert figures["whole_recall@1"] == figures["unseen_recall@1"]


def test_large_classes_have_recall_by_parts_too():
    rng = np.random.default_rng(1)
    labels = np.repeat([0, 1, 2], 20)
    embeddings = rng.normal(size=(3, 2))[labels] + rng.normal(size=(60, 2))
    figures = evaluate_generalisation(embeddings, labels, measures=["recall"], seed=4)
    interval = part_protocol(embeddings, labels, ks=(1,), seed=4)["recall@1"]
    assert figures["unseen_recall@1_parts"] == interval.mean
    assert figures["unseen_recall@1_parts_ci95"] == pytest.approx(interval.high - interval.mean)
    assert "unseen_recall@1_parts" not in evaluate_generalisation(embeddings[1:], labels[1:], measures=["recall"])


def test_measures_can_be_chosen(sides):
    train, test = sides
    assert set(evaluate_generalisation(*test, *train, measures=["recall"])) == {"unseen_recall@1", "seen_recall@1"}
    assert "lambda" in evaluate_generalisation(*test, *train, measures=["divergence"])
    parts = [evaluate_generalisation(*test, *train, measures=[name]) for name in GENERALISATION_MEASURES]
    assert {key: value for part in parts for key, value in part.items()} == evaluate_generalisation(*test, *train)


def test_what_the_classes_do_not_allow_is_left_out(sides):
    train, _ = sides
    alone = evaluate_generalisation(np.eye(4), [0, 1, 2, 3], *train)
    assert not [name for name in alone if name.startswith("unseen_")]
    assert "lambda" not in alone
    assert "seen_recall@1" in alone
    one_class = evaluate_generalisation(np.eye(4), [0, 0, 0, 0])
    assert one_class == {"unseen_recall@1": 1.0}


def test_bad_input_is_refused(sides):
    embeddings, labels = sides[0]
    with pytest.raises(UserError, match="unknown measures"):
        evaluate_generalisation(embeddings, labels, measures=["recal"])
    with pytest.raises(UserError, match="train_embeddings and train_labels"):
        evaluate_generalisation(embeddings, labels, embeddings)
    with pytest.raises(UserError, match="embedder and test_batches"):
        evaluate_generalisation(embeddings, labels, embedder=tiny_embedder())
    with pytest.raises(UserError, match="train_labels must be one class id"):
        evaluate_generalisation(embeddings, labels, embeddings, labels[1:])


WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = None
from tfdml.evaluation import evaluate_generalisation, partial_embeddings
import numpy as np
from tests.models.networks import images, tiny_embedder
embedder, data = tiny_embedder(), images(size=3)
embedder(data)
embedder.load_weights(sys.argv[1])
np.save(sys.argv[2], partial_embeddings(embedder, [data], seed=5).parts[0])
train, test = ([[0.0], [1.0]], [0, 0]), ([[5.0], [6.0]], [0, 0])
assert evaluate_generalisation(*test, *train)["h_divergence"] == 1
"""


@pytest.mark.slow
def test_no_tensorflow_is_needed(tmp_path):
    pytest.importorskip("jax")
    embedder, data = tiny_embedder(seed=7), images(size=3)
    expected = partial_embeddings(embedder, [data], seed=5).parts[0]
    embedder.save_weights(tmp_path / "tiny.weights.h5")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW, str(tmp_path / "tiny.weights.h5"), str(tmp_path / "parts.npy")],
        cwd=pathlib.Path(__file__).resolve().parents[3],
        env={**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(np.load(tmp_path / "parts.npy"), expected, atol=1e-5)
