import functools
import math

import numpy as np
import pytest

from tests.mathematics import assert_close, random_batch, value_and_gradients
from tests.objectives import references_classes as references
from tests.objectives.checks import (
    check_config,
    check_degenerate,
    check_formula,
    check_gradient,
    check_labels,
    check_large,
    check_nothing_to_learn,
    check_symmetries,
)
from tfdml.objectives import EntropySpread, GlobalOrthogonal
from tfdml.training.terms import build_objectives

CASES = {
    "pairs": (EntropySpread(), references.entropy_of_pairs),
    "pairs sum": (EntropySpread(reduction="sum"), functools.partial(references.entropy_of_pairs, reduction="sum")),
    "pairs at 2.5": (EntropySpread(threshold=2.5), functools.partial(references.entropy_of_pairs, threshold=2.5)),
    "nearest": (EntropySpread("nearest"), references.nearest_entropy),
    "nearest sum": (
        EntropySpread("nearest", reduction="sum"),
        functools.partial(references.nearest_entropy, reduction="sum"),
    ),
    "orthogonal": (GlobalOrthogonal(), references.global_orthogonal),
}
every_case = pytest.mark.parametrize(("objective", "reference"), CASES.values(), ids=CASES)
every_objective = pytest.mark.parametrize(
    "objective", [CASES[name][0] for name in ("pairs", "nearest", "orthogonal")], ids=lambda o: o.name
)


def on_embedding(objective):
    return lambda labels, x: objective({"embedding": x}, labels)


@every_case
def test_equals_the_formula(objective, reference):
    check_formula(on_embedding(objective), reference)


every_mode = pytest.mark.parametrize("mode", ["eager", "xla"])


@every_case
@every_mode
def test_gradient_equals_finite_differences(objective, reference, mode):
    check_gradient(on_embedding(objective), reference, mode)


@every_case
@every_mode
def test_degenerate_batches(objective, reference, mode):
    check_degenerate(on_embedding(objective), reference, mode)


@every_objective
def test_symmetries(objective):
    check_symmetries(on_embedding(objective))


@every_objective
def test_labels(objective):
    check_labels(on_embedding(objective))


@pytest.mark.slow
@every_objective
def test_a_batch_of_four_thousand(objective):
    check_large(on_embedding(objective))


def test_one_class_teaches_no_orthogonality():
    check_nothing_to_learn(on_embedding(GlobalOrthogonal()), "no negative", "one image")


@pytest.mark.parametrize("form", ["pairs", "nearest"])
def test_one_image_has_no_entropy(form):
    check_nothing_to_learn(on_embedding(EntropySpread(form)), "one image")


def test_entropy_of_pairs_is_largest_at_the_threshold():
    x = np.array([[0.0, 0.0], [1.0, 0.0]], "float32")
    assert_close(EntropySpread(threshold=1.0)({"embedding": x}, [0, 1]), -math.log(2), 1e-6)
    far = EntropySpread(threshold=1.0)({"embedding": 100 * x}, [0, 1])
    assert -1e-6 < far <= 0.0


@pytest.mark.parametrize("form", ["pairs", "nearest"])
def test_labels_do_not_count(form):
    labels, x = random_batch(2, 10, 3, 5)
    function = on_embedding(EntropySpread(form))
    np.testing.assert_array_equal(function(labels, x), function(np.zeros_like(labels), x))


@every_objective
def test_descending_spreads_a_bundle(objective):
    labels = np.arange(12) % 3
    x = np.ones((12, 5)) + 0.1 * np.random.default_rng(0).normal(size=(12, 5))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32")
    _, (gradient,) = value_and_gradients(lambda e: on_embedding(objective)(labels, e), x)
    moved = x - 0.01 * gradient / np.abs(gradient).max()
    moved /= np.linalg.norm(moved, axis=1, keepdims=True)

    def near(x):
        cosines = x @ x.T - 2 * np.eye(12)
        return cosines.max(axis=1).mean() if objective.name == "entropy_spread" else cosines.mean()

    assert near(moved) < near(x)


def test_orthogonality_looks_at_angles_alone():
    labels, x = random_batch(2, 10, 3, 5)
    lengths = np.linspace(0.5, 3.0, 10, dtype="float32")[:, None]
    assert_close(on_embedding(GlobalOrthogonal())(labels, lengths * x), references.global_orthogonal(labels, x))


def test_neighbours_at_a_small_distance_keep_their_digits():
    x = np.eye(4, dtype="float32")
    x = np.concatenate([x, x + np.float32(1e-3)])
    expected = references.nearest_entropy(np.arange(8), x.astype("float64"))
    assert_close(on_embedding(EntropySpread("nearest"))(np.arange(8), x), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"form": "kl"}, "form must be .pairs. or .nearest."), ({"reduction": "max"}, "'mean' or 'sum'")],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        EntropySpread(**arguments)


@pytest.mark.parametrize(
    "objective",
    [EntropySpread("nearest", 2.0, "projection", "sum", 0.3, "kl"), GlobalOrthogonal("pooled", 0.5, "gor")],
    ids=lambda o: o.name,
)
def test_configuration(objective):
    check_config(objective)


def test_command_line_names_them():
    entropy, gor = build_objectives("0.1 * entropy(form=nearest) + gor", 3)
    assert isinstance(entropy, EntropySpread)
    assert isinstance(gor, GlobalOrthogonal)
    assert (entropy.form, entropy.weight) == ("nearest", 0.1)
