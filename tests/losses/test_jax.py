"""Every loss gives on JAX the values and gradients that it gives on TensorFlow."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.mathematics import degenerate_batches, random_batch, value_and_gradients
from tfdml import losses
from tfdml.losses.classification import ClassSimilarityLoss

pytest.importorskip("jax")

LOSSES = [name for name in losses.__all__ if name != "TripletLoss"]
SPECIFICATIONS = {
    **{name: (name, {}) for name in LOSSES},
    **{m: ("TripletLoss", {"mining": m, "margin": 0.5}) for m in ("all", "hard", "semi_hard", "distance_weighted")},
    "soft": ("TripletLoss", {"margin": "soft"}),
}

CHILD = """
    import sys
    import jax
    import numpy as np
    from tfdml import losses
    from tests.losses.test_jax import SPECIFICATIONS, inputs

    found = {}
    for key, (name, arguments) in SPECIFICATIONS.items():
        loss = getattr(losses, name)(**arguments)
        for batch, (labels, x) in inputs(name).items():
            run = jax.value_and_grad(lambda e: loss(labels, e))
            if batch == "random":
                run = jax.jit(run)
            found[f"{key}/{batch}/value"], found[f"{key}/{batch}/gradient"] = run(x)
    np.savez(sys.argv[1], **found)
"""


def inputs(name):
    """The batches on which a loss is compared: similarities for a loss on proxies, embeddings otherwise."""
    labels, x = random_batch(6, 9, 3, 5)
    if issubclass(getattr(losses, name), ClassSimilarityLoss):
        shape = (9, 3, 2) if name == "SoftTripleLoss" else (9, 3)
        return {"random": (labels, np.random.default_rng(0).uniform(-0.9, 0.9, shape).astype("float32"))}
    # Of any length, so that the zero vector is not at the same distance from all: a choice would be arbitrary.
    _, with_zero = random_batch(7, 9, 3, 5, unit=False)
    with_zero[1] = 0.0
    return {"random": (labels, x), "zero": (labels, with_zero), "lonely": degenerate_batches()["one image"]}


@pytest.fixture(scope="module")
def on_jax(tmp_path_factory):
    path = tmp_path_factory.mktemp("jax") / "found.npz"
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(path)],
        env={**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return np.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("key", SPECIFICATIONS)
def test_jax_agrees_with_tensorflow(on_jax, key):
    name, arguments = SPECIFICATIONS[key]
    loss = getattr(losses, name)(**arguments)
    for batch, (labels, x) in inputs(name).items():
        value, (gradient,) = value_and_gradients(lambda e, y=labels: loss(y, e), x)
        np.testing.assert_allclose(on_jax[f"{key}/{batch}/value"], value, rtol=1e-5, atol=1e-6)
        scale = max(np.abs(gradient).max(), 1.0)
        np.testing.assert_allclose(on_jax[f"{key}/{batch}/gradient"], gradient, atol=2e-5 * scale)
