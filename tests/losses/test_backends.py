"""Losses, miners and layers give on JAX and on PyTorch the values and gradients that they give on
TensorFlow."""

import keras
import numpy as np
import pytest

from tests.support.marks import JAX
from tests.support.mathematics import (
    degenerate_batches,
    given_pairs,
    public_classes,
    random_batch,
    related,
    value_and_gradients,
)
from tests.support.processes import run_python
from tfdml import layers, losses
from tfdml.losses.classification import ClassSimilarityLoss
from tfdml.registry import registered

LOSSES = [name for name in public_classes(losses) if name != "TripletLoss"]
SPECIFICATIONS = {
    **{name: (name, {}) for name in LOSSES},
    **{
        m: ("TripletLoss", {"mining": m, "margin": 0.5})
        for m in ("all", "hard", "semi_hard", "distance_weighted")
    },
    "soft": ("TripletLoss", {"margin": "soft"}),
    **{f"{miner} miner": ("ContrastiveLoss", {"mining": miner}) for miner in registered("miner")},
    **{
        f"given {name}": (name, {})
        for name in ("ContrastiveLoss", "CosineSimilarityLoss", "MultiSimilarityLoss")
    },
}
MAPS, VECTORS = (3, 5, 6, 4), (7, 4)
LAYERS = {
    "InputScaling": ((2, 4, 4, 3), {"mode": "torch"}),
    "CeilMaxPooling2D": (MAPS, {}),
    "LocalResponseNormalization": (MAPS, {}),
    "GeneralizedMeanPooling2D": (MAPS, {}),
    "AttentionPooling2D": (MAPS, {}),
    "AttentionHeads": (MAPS, {"heads": 2}),
    "HighOrderMoments": (MAPS, {"orders": 3, "dim": 5, "seed": 0}),
    "MomentEmbeddings": (MAPS, {"orders": 3, "dim": 5, "embedding_dim": 4, "seed": 0}),
    "StatisticsNetwork": ((9,), {"hidden": 5, "depth": 1}),
    "CosineProxies": (VECTORS, {"num_classes": 3, "proxies_per_class": 2}),
    "L2Normalize": (VECTORS, {}),
    "PrincipalComponents": (VECTORS, {"dim": 2}),
}


def make(key):
    """The loss of a specification; of given pairs where its key says so."""
    name, arguments = SPECIFICATIONS[key]
    loss = getattr(losses, name)(**arguments)
    return related(loss, given_pairs(9)) if key.startswith("given") else loss


def inputs(key):
    """The batches on which a loss is compared: similarities for a loss on proxies, embeddings
    otherwise."""
    name, _ = SPECIFICATIONS[key]
    labels, x = random_batch(6, 9, 3, 5)
    if key.startswith("given"):
        return {"random": (np.arange(9), x)}
    if issubclass(getattr(losses, name), ClassSimilarityLoss):
        shape = (9, 3, 2) if name == "SoftTripleLoss" else (9, 3)
        return {
            "random": (labels, np.random.default_rng(0).uniform(-0.9, 0.9, shape).astype("float32"))
        }
    # Of any length, so that the zero vector is not at the same distance from all: a choice would be
    # arbitrary.
    _, with_zero = random_batch(7, 9, 3, 5, unit=False)
    with_zero[1] = 0.0
    return {
        "random": (labels, x),
        "zero": (labels, with_zero),
        "lonely": degenerate_batches()["one image"],
    }


def gradient_function(loss):
    """From labels and embeddings to the loss and its gradient, on the backend of this process."""
    if keras.backend.backend() == "jax":
        import jax

        # Operation by operation takes twice as long, as each is compiled for each shape.
        return jax.jit(jax.value_and_grad(loss, argnums=1))

    import torch

    def run(labels, x):
        embeddings = torch.tensor(x, requires_grad=True)
        value = loss(labels, embeddings)
        value.backward()
        return value.detach().numpy(), embeddings.grad.numpy()

    return run


def layer_function(name):
    """A weighted sum of what a layer with drawn weights returns, as a function of its input; and an
    input."""
    shape, arguments = LAYERS[name]
    generator = np.random.default_rng(0)
    layer, x = getattr(layers, name)(**arguments), generator.normal(size=shape).astype("float32")

    def outputs(x):
        return keras.tree.flatten(layer([x, x] if name == "AttentionHeads" else x))

    if name == "PrincipalComponents":
        layer.adapt(x)
    found = outputs(keras.ops.convert_to_tensor(x))
    weights = [
        keras.ops.array(generator.normal(size=tuple(y.shape)).astype("float32")) for y in found
    ]
    for weight in layer.weights if name != "PrincipalComponents" else ():
        weight.assign(0.5 + 0.5 * generator.random(weight.shape))

    def total(labels, x):
        products = (
            w * keras.ops.cast(y, "float32") for w, y in zip(weights, outputs(x), strict=True)
        )
        return sum(keras.ops.sum(product) for product in products)

    return total, x


def write_values(path):
    """Write value and gradient of every loss and layer on the backend of this process."""
    arrays = {}
    for name in LAYERS:
        total, x = layer_function(name)
        value, gradient = gradient_function(total)(None, x)
        arrays[f"{name}/value"], arrays[f"{name}/gradient"] = value, gradient
    for key in SPECIFICATIONS:
        run = gradient_function(make(key))
        for batch, (labels, x) in inputs(key).items():
            arrays[f"{key}/{batch}/value"], arrays[f"{key}/{batch}/gradient"] = run(labels, x)
    np.savez(path, **arrays)


@pytest.fixture(scope="module", params=["jax", "torch"])
def on_backend(request, tmp_path_factory):
    pytest.importorskip(request.param)
    path = tmp_path_factory.mktemp(request.param) / "values.npz"
    child = f"from tests.losses.test_backends import write_values; write_values({str(path)!r})"
    run_python("-c", child, environment={**JAX, "KERAS_BACKEND": request.param})
    return np.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("key", SPECIFICATIONS)
def test_other_backends_agree_with_tensorflow(on_backend, key):
    loss = make(key)
    for batch, (labels, x) in inputs(key).items():
        value, (gradient,) = value_and_gradients(lambda e, y=labels: loss(y, e), x)
        np.testing.assert_allclose(on_backend[f"{key}/{batch}/value"], value, rtol=1e-5, atol=1e-6)
        scale = max(np.abs(gradient).max(), 1.0)
        np.testing.assert_allclose(
            on_backend[f"{key}/{batch}/gradient"], gradient, atol=2e-5 * scale
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", public_classes(layers))
def test_layers_agree_with_tensorflow(on_backend, name):
    total, x = layer_function(name)
    value, (gradient,) = value_and_gradients(lambda x: total(None, x), x)
    np.testing.assert_allclose(on_backend[f"{name}/value"], value, rtol=1e-5, atol=1e-5)
    scale = max(np.abs(gradient).max(), 1.0)
    np.testing.assert_allclose(on_backend[f"{name}/gradient"], gradient, atol=1e-5 * scale)
