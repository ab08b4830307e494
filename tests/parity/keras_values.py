"""Runs in the environment of TensorFlow Similarity or TensorFlow Addons: values and gradients of
the cases of a file.

    python keras_values.py MODULE CASES.json BATCHES.npz VALUES.npz

Imports neither tfdml nor the tests.
"""

import importlib
import sys

import numpy as np
import tensorflow as tf
from there import run_cases


def halves(x):
    """The two views of a batch that is anchors first, then their positives."""
    return tf.split(x, 2)


def value_of(loss, form, labels, x):
    """What a loss makes of a batch, in the form in which it is called."""
    if form == "labels":
        return loss(labels, x)
    first, second = halves(x)
    if form == "views":
        return loss(first, second)
    half = labels[: len(labels) // 2]
    if form == "similarities":
        return loss(half, tf.matmul(first, second, transpose_b=True))
    distances = tf.norm(first - second, axis=1)
    return loss(tf.cast(half == labels[len(half) :], "int32"), distances)


def run(module, case, labels, x):
    """The value of one case, averaged as Keras 2 does, and its gradient with respect to the
    embeddings."""
    loss = getattr(importlib.import_module(f"{module}.losses"), case["name"])(**case["arguments"])
    x = tf.constant(x, tf.float32)
    labels = tf.constant(labels, tf.int32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_mean(value_of(loss, case["form"], labels, x))
    gradient = tape.gradient(value, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return {"value": value.numpy(), "gradient": gradient.numpy()}


def main(module, *paths):
    version = np.array(importlib.import_module(module).__version__)
    run_cases(
        *paths,
        lambda case, batch, batches: run(
            module, case, batches[f"{batch}|labels"], batches[f"{batch}|x"]
        ),
        version=version,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
