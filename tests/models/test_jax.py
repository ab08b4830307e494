"""Keras's JAX backend, in processes of their own: the backend-free part against TensorFlow, and
steps by chunks."""

import numpy as np
import pytest

from tests.models.networks import values
from tests.support import jax_values
from tests.support.marks import JAX, QUICK_XLA
from tests.support.mathematics import assert_close, random_batch, value_and_gradients
from tests.support.processes import run_python
from tfdml import losses, objectives

pytest.importorskip("jax")
pytestmark = pytest.mark.slow


CASES = jax_values.cases()


@pytest.fixture(scope="module")
def inputs():
    labels, embedding = random_batch(3, 6, 3, 4)
    classes = np.random.default_rng(5).uniform(-1, 1, (6, 3)).astype("float32")
    return {"labels": labels, "embedding": embedding, "class": classes}


@pytest.fixture(scope="module")
def outputs(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jax")
    weights = {name: values(case.objective.weights) for name, case in CASES.items()}
    weights = {
        f"{name}|{i}": value for name, each in weights.items() for i, value in enumerate(each)
    }
    np.savez(folder / "in.npz", **inputs, **weights)
    run_python(
        "-m", "tests.support.jax_values", folder / "in.npz", folder / "out.npz", environment=JAX
    )
    return dict(np.load(folder / "out.npz"))


def test_values_and_gradients_equal_those_of_tensorflow_and_are_finite_on_degenerate_batches(
    inputs, outputs
):
    for name, case in CASES.items():
        function = jax_values.function_of(case, inputs["labels"])
        value, (gradient,) = value_and_gradients(function, inputs["embedding"])
        assert_close(outputs[f"{name}|value"], value, floor=1e-6)
        # Of a sum of terms that cancel, as one position's in a moment of order 4, rounding is left.
        assert_close(outputs[f"{name}|gradient"], gradient, 2e-5, floor=1e-6)
        for kind in ("identical", "zero"):
            for what in ("value", "gradient"):
                assert np.all(np.isfinite(outputs[f"{kind} {name}|{what}"])), (kind, name)


def test_the_statistics_of_rank_mi_equal_those_of_tensorflow(inputs, outputs):
    objective = CASES["mutual information"].objective
    loss = jax_values.statistics_of(objective, inputs["labels"], inputs["embedding"])
    value, gradients = value_and_gradients(
        lambda *each: loss(each), *values(objective.network.weights)
    )
    assert_close(outputs["rank mi statistics|value"], value)
    for i, expected in enumerate(gradients):
        assert_close(outputs[f"rank mi statistics|gradient {i}"], expected, floor=1e-6)


def test_products_of_pairs_are_of_full_precision_on_any_device(outputs):
    rounded = {key for key, value in outputs.items() if key.endswith("|rounded") and value}
    # The projections of HORDE are as large as a network's layers, and rounded as these are.
    assert rounded == {f"{name}|rounded" for name in CASES if name.startswith("moments")}


def test_labels_that_floats_merge_make_the_loss_nan(inputs, outputs):
    merged = {name: value for name, value in outputs.items() if name.startswith("merged|")}
    assert len(merged) == 6
    assert np.isnan([*merged.values()]).all()
    assert_close(
        outputs["whole floats"], losses.ContrastiveLoss()(inputs["labels"], inputs["embedding"])
    )


def test_large_ids_do_not_collide_although_jax_has_no_64_bit_integers(inputs, outputs):
    labels, x = np.array([0, 1, 0, 2, 3, 2]), inputs["embedding"]
    assert_close(outputs["far|loss"], losses.ContrastiveLoss()(labels, x))
    jrs = objectives.JointRepresentationSimilarity("embedding")
    assert_close(outputs["far|jrs"], jrs({"embedding": x}, labels))


def test_keras_loses_the_weights_of_a_step_that_is_interrupted_and_our_models_keep_them(outputs):
    lost = left_by(outputs, "lost")
    assert lost.pop("plain") > 0, "take tfdml.workarounds.InterruptibleModel out"
    assert len(lost) == 9
    assert not any(lost.values())


def test_a_step_with_drawn_classes_changes_what_it_drew(outputs):
    assert outputs["fit sampled"].sum() == 12
    assert outputs["fit sampled"][[0, 4, 9, 29]].all()


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("jax") / "steps.npz"
    devices = {**JAX, "XLA_FLAGS": f"{QUICK_XLA} --xla_force_host_platform_device_count=4"}
    run_python("-m", "tests.support.jax_steps", path, environment=devices)
    return dict(np.load(path))


def left_by(steps, name):
    """What a step has left, by name."""
    return {
        key.removeprefix(f"{name}|"): value
        for key, value in steps.items()
        if key.startswith(f"{name}|")
    }


@pytest.mark.parametrize(
    ("name", "expected", "tolerance"),
    [
        ("chunks", "plain", 1e-5),
        ("chunks on devices", "plain", 1e-5),
        ("views in chunks", "views", 1e-5),
        ("half in chunks", "half", 1e-2),
        ("draws", "draws at once", 1e-5),
        *(
            (f"{name} on devices", name, 1e-5)
            for name in ("am softmax", "sub-center", "soft triple", "drawn")
        ),
    ],
)
def test_a_step_by_chunks_and_on_devices_that_share_classes_is_the_step_on_the_whole_batch(
    steps, name, expected, tolerance
):
    actual, whole = left_by(steps, name), left_by(steps, expected)
    assert len(whole) >= 10
    largest = max(np.abs(value).max() for key, value in whole.items() if key.startswith("trained"))
    for key, value in whole.items():
        if not key.startswith("part"):
            assert_close(actual[key], value, tolerance, floor=1e-6 * largest)


def test_a_step_by_chunks_takes_the_memory_of_a_chunk(steps):
    assert steps["memory|8|32"] < 0.3 * steps["memory|0|32"]
    assert steps["memory|8|64"] < 1.01 * steps["memory|8|32"]


def test_several_steps_an_execution_change_nothing(outputs):
    one, two = outputs["fit together"]
    np.testing.assert_array_equal(two, one)


@pytest.mark.parametrize(
    ("name", "shape"), [("am softmax", (12, 5)), ("sub-center", (12, 3, 5)), ("drawn", (12, 5))]
)
def test_each_device_holds_its_classes_alone(steps, name, shape):
    for where, classes in ((name, 12), (f"{name} on devices", 3)):
        parts = [
            value.tolist() for key, value in left_by(steps, where).items() if key.startswith("part")
        ]
        # The proxies, their momentum and their averages.
        assert parts == [[classes, *shape[1:]]] * 3
