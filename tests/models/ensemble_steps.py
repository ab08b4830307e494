"""Trains a small ensemble in a process of its own: on two logical devices, or on Keras's JAX backend.

    python -m tests.models.ensemble_steps FILE.npz

With TensorFlow the file holds the updates of a step on one device and on two, "1|i" and "2|i"; with JAX, the losses of
ten steps, "fit", and "heads" and "embedding" after them.
"""

import sys

import keras
import numpy as np

from tests.models.ensembles import ensemble_learner
from tests.models.networks import SIZE, coloured_batch, values


def make(optimizer):
    keras.utils.set_random_seed(3)
    learner = ensemble_learner(batch_norm="statistics")
    learner.compile(optimizer=optimizer)
    learner.build((None, SIZE, SIZE, 3))
    return learner


def on_devices():
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    labels, x = coloured_batch()
    arrays = {}
    for devices, strategy in ((1, tf.distribute.get_strategy()), (2, two)):
        with strategy.scope():
            learner = make(keras.optimizers.SGD(0.1))
        before = values(learner.trainable_variables)
        learner.fit(x, labels, batch_size=len(x), shuffle=False, verbose=0)
        after = values(learner.trainable_variables)
        updates = [new - old for new, old in zip(after, before, strict=True)]
        arrays.update({f"{devices}|{i}": update for i, update in enumerate(updates)})
    return arrays


def on_jax():
    assert "tensorflow" not in sys.modules
    labels, x = coloured_batch()
    learner = make(keras.optimizers.Adam(0.01))
    losses = learner.fit(x, labels, batch_size=len(x), epochs=10, verbose=0).history["loss"]
    representations = learner.embedder.represent(x)
    return {
        "fit": np.array(losses),
        "embedding": np.asarray(representations["embedding"]),
        "heads": np.asarray(representations["heads"]),
    }


if __name__ == "__main__":
    np.savez(sys.argv[1], **(on_jax() if keras.backend.backend() == "jax" else on_devices()))
