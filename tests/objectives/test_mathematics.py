"""The mathematics of every objective: its formula, its gradient, degenerate batches, half
precision, replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import values
from tests.objectives.cases import CASES, DIM, FIRST, PATHS, by_mode, moments
from tests.support.marks import first_quick
from tests.support.mathematics import (
    assert_close,
    degenerate_batches,
    finite_differences,
    public_classes,
    random_batch,
    value_and_gradients,
)
from tests.support.played_replicas import sum_and_gradient
from tfdml import objectives, replicas
from tfdml.pairs import Scope

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_path = pytest.mark.parametrize("case", [CASES[name] for name in PATHS], ids=PATHS)


def read(case, x):
    """The arrays that an objective reads, by name."""
    return {name: np.ascontiguousarray(array) for name, array in case.inputs(x).items()}


def value_of(case, labels, arrays):
    return case.objective(
        dict(zip(case.inputs(np.zeros((1, DIM), "float32")), arrays, strict=True)), labels
    )


def expected(case, labels, x):
    return case.reference(labels, *read(case, np.float64(x)).values(), *values(case.weights))


def test_no_objective_is_left_out():
    seen = {type(case.objective).__name__ for case in CASES.values()}
    # In test_memory.py, test_across_views.py and test_base.py.
    others = {"CrossBatchMemory", "Prism", "AcrossViews", "MatryoshkaProxyLoss"}
    assert public_classes(objectives).keys() - seen == others


BATCHES = {
    "two images, and long vectors": [(2, 2, True), (10, 3, False)],
    "others": [(8, 3, True), (12, 2, True), (13, 6, True), (9, 9, True), (6, 1, True)],
}


@every_case
@pytest.mark.parametrize("batches", first_quick(BATCHES))
def test_equals_the_formula(case, batches):
    for seed, (size, classes, unit) in enumerate(BATCHES[batches]):
        labels, x = random_batch(seed, size, classes, DIM, unit=unit)
        value = value_of(case, labels, read(case, x).values())
        # The floor is for values next to 0, such as a logarithm's next to 1.
        assert_close(value, expected(case, labels, x), floor=1e-6)


@every_path
@pytest.mark.parametrize("dtype", first_quick(["bfloat16", "float16"]))
def test_half_precision_is_computed_in_float32(case, dtype):
    labels, x = random_batch(6, 10, 3, DIM, unit=False)
    half = [tf.cast(array, dtype) for array in read(case, x).values()]
    value = value_of(case, labels, half)
    assert value.dtype == tf.float32
    full = [tf.cast(array, "float32") for array in half]
    np.testing.assert_array_equal(value, value_of(case, labels, full))


@by_mode(quick=PATHS, compiled=FIRST)
def test_gradient_equals_finite_differences(case, mode):
    labels, x = random_batch(11, 7, 3, DIM, unit=case.unit)
    arrays, weights = list(read(case, x).values()), values(case.weights)
    constants = case.frozen(labels, *arrays, *weights) if case.frozen else {}
    slopes = finite_differences(
        lambda *a: case.reference(labels, *a, **constants), *arrays, *weights
    )
    value, gradients = value_and_gradients(
        lambda *a: value_of(case, labels, a), *arrays, mode=mode, weights=case.weights
    )
    assert_close(value, expected(case, labels, x), floor=1e-6)
    assert all(np.any(slope) for slope in slopes[: len(arrays)])
    largest = max(np.abs(slope).max() for slope in slopes)
    for gradient, slope in zip(gradients, slopes, strict=True):
        # By a weight, the gradient of a mean of as many pulls as pushes may vanish.
        assert_close(gradient, slope, case.relative, floor=1e-6 * largest)


# By XLA, degenerate batches are in tests/models/test_jax.py.
@by_mode(quick=FIRST, among=PATHS)
def test_degenerate_batches_have_the_formula_s_value_and_a_finite_gradient(case, mode):
    for name, (labels, x) in degenerate_batches(DIM).items():
        value, gradients = value_and_gradients(
            lambda *arrays, y=labels: value_of(case, y, arrays),
            *read(case, x).values(),
            mode=mode,
            weights=case.weights,
        )
        assert_close(value, expected(case, labels, x), floor=case.floor)
        assert all(np.all(np.isfinite(gradient)) for gradient in gradients), name


@by_mode(quick=FIRST, among=PATHS)
def test_replicas_make_the_value_and_the_gradient_of_one_device(case, mode):
    labels, x = random_batch(4, 10, 4, DIM, unit=case.unit)
    arrays = read(case, x)
    flat = np.concatenate([array.reshape(10, -1) for array in arrays.values()], axis=1)
    ends = np.cumsum([array[0].size for array in arrays.values()])

    def share(own_labels, own):
        own = own if case.objective.per_image else replicas.gather(own)
        labels = own_labels if case.objective.per_image else replicas.gather(own_labels)
        parts = tf.split(own, np.diff([0, *ends]), axis=1)
        named = {
            name: tf.reshape(part, (-1, *array.shape[1:]))
            for (name, array), part in zip(arrays.items(), parts, strict=True)
        }
        available = {**named, **case.objective.represent(named)}
        return case.objective.term(available, labels, Scope.of_replica(len(own_labels))).share

    one, several = (sum_and_gradient(share, (labels, flat), sizes) for sizes in ([10], [6, 4]))
    assert np.any(one[1])
    assert_close(several[0], one[0])
    assert_close(several[1], one[1], 2e-5, floor=1e-6)


@every_case
def test_a_configuration_restores_the_objective(case):
    objective = case.objective
    for again in (
        type(objective).from_config(objective.get_config()),
        keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(objective)),
    ):
        assert type(again) is type(objective)
        assert again.get_config() == objective.get_config()
        assert (again.name, again.weight, again.reads) == (
            objective.name,
            objective.weight,
            objective.reads,
        )
        assert getattr(again, "adapts_to", None) == getattr(objective, "adapts_to", None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_maps_do_not_overflow(dtype):
    labels, x = random_batch(0, 6, 3, 4, unit=False)
    case = moments("pairs", orders=6)
    features = tf.cast(500 * x.reshape(6, 2, 1, 2), dtype)
    expected = case.reference(labels, tf.cast(features, "float32").numpy(), *values(case.weights))
    assert_close(case.objective({"feature_map": features}, labels), expected)
