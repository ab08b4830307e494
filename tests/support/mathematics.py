"""Helpers of the mathematical tests: batches, gradients two ways, comparisons."""

import contextlib
import inspect

import keras
import numpy as np
import tensorflow as tf

from tfdml import losses, objectives
from tfdml.mining import GivenPairs

EPSILON = 1e-6
# XLA compiles a graph, so that what a graph refuses is refused.
MODES = ("eager", "xla")
# Base classes among the losses and objectives.
BASES = ("PairLoss", "ClassSimilarityLoss", "Objective")


def public_classes(package):
    """Name -> class of what a package exports, without the base classes."""
    return {
        name: cls for name, cls in inspect.getmembers(package, inspect.isclass) if name not in BASES
    }


# What a class cannot be made without.
_REQUIRED = {
    "num_classes": 3,
    "loss": losses.ContrastiveLoss(),
    "dim": 2,
    "dims": [1, 2],
    "pairs": [(0, 1, 1)],
}


def required_arguments(cls):
    """The arguments without which a loss, objective, layer, kernel or miner cannot be made."""
    parameters = inspect.signature(cls).parameters
    named = {name for name, one in parameters.items() if one.default is one.empty}
    required = {name: value for name, value in _REQUIRED.items() if name in named}
    on_classes = "loss" in named and issubclass(cls, objectives.ProxyLoss)
    return required | ({"loss": losses.AMSoftmaxLoss()} if on_classes else {})


def random_batch(seed=0, size=8, classes=3, dim=5, unit=True):
    """Labels (B,) and float32 vectors (B, dim); every class that fits has an image."""
    generator = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), generator.integers(0, classes, size)])[:size]
    x = generator.normal(size=(size, dim))
    if unit:
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    return generator.permutation(labels), x.astype("float32")


def given_pairs(size):
    """Half of the pairs of images 0 .. size - 1, a third of which are similar; the others are
    unknown."""
    generator, pairs = np.random.default_rng(2), np.argwhere(np.triu(np.ones((size, size)), 1))
    known = generator.permutation(pairs)[::2]
    return GivenPairs(np.column_stack([known, np.arange(len(known)) % 3 == 0]))


def degenerate_batches(dim=4):
    """Name -> (labels, vectors) in which something that a loss divides by, or differentiates at, is
    missing."""
    labels, x = random_batch(seed=7, size=6, classes=3, dim=dim)
    zero = x.copy()
    zero[1] = 0.0
    duplicates = x[[0, 1, 2, 0, 1, 2]]
    two_by_two = np.array([0, 0, 1, 1, 2, 2])
    return {
        "no positive": (np.arange(6), x),
        "no negative": (np.zeros(6, "int64"), x),
        "one image": (labels[:1], x[:1]),
        "two images of two classes": (np.array([0, 1]), x[:2]),
        "duplicates in one class": (np.array([0, 1, 2, 0, 1, 2]), duplicates),
        "duplicates across classes": (two_by_two, duplicates),
        "all identical": (two_by_two, np.repeat(x[:1], 6, axis=0)),
        "a zero vector": (two_by_two, zero),
        "all zero": (two_by_two, np.zeros_like(x)),
    }


DEGENERATE = tuple(degenerate_batches())


def compiled_by(mode, function):
    """The function as it runs in a mode: "eager", "graph" (tf.function) or "xla" (tf.function with
    jit_compile=True)."""
    if mode == "eager":
        # As Keras's steps: AutoGraph would convert what each `map` calls, every time.
        return tf.autograph.experimental.do_not_convert(function)
    return tf.function(function, jit_compile=mode == "xla", autograph=False)


def value_and_gradients(function, *arrays, mode="eager", weights=()):
    """The value of function(*arrays) and its gradient with respect to each, and to each of the
    weights, as NumPy."""
    variables = [weight.value for weight in weights]

    def run(*tensors):
        with tf.GradientTape() as tape:
            for tensor in tensors:
                tape.watch(tensor)
            value = function(*tensors)
        sources = [*tensors, *variables]
        gradients = tape.gradient(
            value, sources, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return value, gradients

    value, gradients = compiled_by(mode, run)(*(tf.constant(array, tf.float32) for array in arrays))
    return value.numpy(), [gradient.numpy() for gradient in gradients]


def finite_differences(function, *arrays):
    """The gradient of a float64 reference with respect to each of its arrays, by central
    differences."""
    arrays = [np.array(array, np.float64) for array in arrays]
    gradients = []
    for array in arrays:
        gradient = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            start = array[index]
            array[index] = start + EPSILON
            above = function(*arrays)
            array[index] = start - EPSILON
            below = function(*arrays)
            array[index] = start
            gradient[index] = (above - below) / (2 * EPSILON)
        gradients.append(gradient)
    return gradients


def related(loss, relation):
    """The same loss, whose pairs a relation decides."""
    return type(loss).from_config({**loss.get_config(), "positives": relation})


def assert_close(actual, expected, relative=1e-5, floor=0.0):
    """Differ by at most `relative` of the largest expected entry (or by `floor`, where all of them
    vanish)."""
    actual, expected = (
        np.asarray(keras.ops.convert_to_numpy(actual), np.float64),
        np.asarray(expected, np.float64),
    )
    assert actual.shape == expected.shape
    assert np.all(np.isfinite(actual)), actual
    error = np.max(np.abs(actual - expected), initial=0.0)
    allowed = max(relative * np.max(np.abs(expected), initial=0.0), floor)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}\n{actual}\n{expected}"


@contextlib.contextmanager
def dtype_policy(name):
    """Enter a block in which this is Keras's dtype policy."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
