"""The backend-free part on Keras's JAX backend, in a process of its own, against the same references."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import references
from tests.mathematics import assert_close, finite_differences, random_batch

pytest.importorskip("jax")
pytestmark = pytest.mark.slow


def kernel_mean(gram):
    return lambda labels, x, tau: float(np.mean(gram(x, tau)))


def similarity(gram):
    return lambda labels, x, tau: references.joint_representation_similarity(labels, [gram(x, tau)])


GRAMS = {
    "gaussian": (lambda x, tau: references.gaussian(x, tau=tau), references.squared_distance),
    "laplace": (lambda x, tau: references.laplace(x, tau=tau), references.absolute_distance),
    "polynomial": (lambda x, tau: references.polynomial(x, degree=3), None),
    "exponential": (lambda x, tau: references.exponential(x), None),
}
# Name -> (input, reference(labels, x, tau), distance whose mean is tau).
CASES = {
    "contrastive": ("embedding", lambda y, x, t: references.contrastive(y, x, 1.3, "euclidean"), None),
    "contrastive sum": ("embedding", lambda y, x, t: references.contrastive(y, x, reduction="sum"), None),
    "binomial": ("embedding", lambda y, x, t: references.binomial(y, x), None),
    "am": ("class", lambda y, x, t: references.am_softmax(y, x), None),
    "norm": ("class", lambda y, x, t: references.norm_softmax(y, x), None),
    "metric": ("pooled", lambda y, x, t: references.contrastive(y, x), None),
    **{name: ("embedding", kernel_mean(gram), spread) for name, (gram, spread) in GRAMS.items()},
    **{f"jrs {name}": ("pooled", similarity(gram), spread) for name, (gram, spread) in GRAMS.items()},
}


@pytest.fixture(scope="module")
def inputs():
    labels, embedding = random_batch(3, 6, 3, 4)
    pooled = random_batch(4, 6, 1, 5, unit=False)[1] / 2
    classes = np.random.default_rng(5).uniform(-1, 1, (6, 3)).astype("float32")
    return {"labels": labels, "embedding": embedding, "pooled": pooled, "class": classes}


@pytest.fixture(scope="module")
def outputs(inputs, tmp_path_factory):
    folder, root = tmp_path_factory.mktemp("jax"), pathlib.Path(__file__).resolve().parents[1]
    np.savez(folder / "in.npz", **inputs)
    command = [sys.executable, "-m", "tests.jax_values", str(folder / "in.npz"), str(folder / "out.npz")]
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(np.load(folder / "out.npz"))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_references(inputs, outputs, name):
    by, reference, spread = CASES[name]
    labels, x = inputs["labels"], inputs[by]
    tau = references.bandwidth(x, kind=spread) if spread else None
    assert_close(outputs[f"{name}|value"], reference(labels, x, tau))
    (expected,) = finite_differences(lambda e: reference(labels, e, tau), x)
    assert_close(outputs[f"{name}|gradient"], expected)


def test_degenerate_batches_are_finite(outputs):
    degenerate = {key: value for key, value in outputs.items() if key.startswith(("identical", "zero"))}
    assert len(degenerate) == 16
    for key, value in degenerate.items():
        assert np.all(np.isfinite(value)), key


def test_large_ids_do_not_collide_although_jax_has_no_64_bit_integers(inputs, outputs):
    labels, x = np.array([0, 1, 0, 2, 3, 2]), inputs["embedding"]
    assert_close(outputs["far|loss"], references.contrastive(labels, x))
    assert_close(outputs["far|jrs"], references.joint_representation_similarity(labels, [references.gaussian(x)]))


def test_learner_trains(outputs):
    assert np.all(np.isfinite(outputs["fit"]))
    assert outputs["fit"][-1] < 0.9 * outputs["fit"][0]
