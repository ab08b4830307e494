"""Makes steps on Keras's JAX backend, on one device and on four logical ones, and writes what they
give to a file.

KERAS_BACKEND=jax python -m tests.support.jax_steps OUT.npz

OUT holds, per name of a step, the trained variables, "name|trained|index", the others,
"name|state|index", and the logs, "name|log|key"; the bytes of a compiled step's temporary arrays,
"memory|chunk|images"; and the shapes of what a device holds of proxies and of what the optimizer
keeps of them, "name|part|index".
"""

import contextlib
import pathlib
import sys
import tempfile

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.models.networks import SIZE, Taking, colored_batch, jrd, tiny_embedder, values
from tests.models.test_chunks import CHUNK, random_learner
from tests.models.test_text import batch as two_views
from tests.models.test_text import learner as learner_of_two_views
from tests.support.mathematics import dtype_policy
from tfdml import losses, models, objectives
from tfdml.errors import UserError
from tfdml.training import ClassParallel, build_optimizer, checkpoints

DEVICES, CLASSES = 4, 12
# Objectives with proxies.
PROXIES = {
    "am softmax": lambda: jrd(CLASSES),
    "sub-center": lambda: [
        objectives.ProxyLoss(losses.SubCenterArcFaceLoss(8.0, 0.2), CLASSES, drop_highest=0.2)
    ],
    "soft triple": lambda: [objectives.RegularizedSoftTriple(CLASSES, 2)],
    "drawn": lambda: [objectives.ProxyLoss(losses.AMSoftmaxLoss(), CLASSES, sample=0.5)],
}


def every_term():
    """An objective of each kind: of proxies, pairs, moments, and one with a memory."""
    return [
        *jrd(),
        losses.ContrastiveLoss(1.3, "euclidean"),
        objectives.HighOrderMomentLoss(losses.BinomialDevianceLoss(), 2, 8),
        objectives.CrossBatchMemory(losses.ContrastiveLoss(1.3), 24),
    ]


def learner(chunk):
    keras.utils.set_random_seed(3)
    model = models.MetricLearner(
        tiny_embedder(batch_norm="statistics"), every_term(), gradient_cache=chunk
    )
    model.embedder.dense.kernel_regularizer = keras.regularizers.L2(0.1)
    model.build((None, SIZE, SIZE, 3))
    return model


def step(model, batch=None, optimizer=None):
    """What a step leaves, by name."""
    labels, x = batch or colored_batch()
    model.compile(optimizer or Taking())
    logs = model.train_on_batch(x, labels, return_dict=True)
    return {f"log|{name}": np.array(value) for name, value in logs.items()} | values_by_name(model)


def values_by_name(model):
    arrays = {f"trained|{i}": value for i, value in enumerate(values(model.trainable_variables))}
    return arrays | {
        f"state|{i}": value for i, value in enumerate(values(model.non_trainable_variables))
    }


def half(chunk):
    with dtype_policy("mixed_float16"):
        model = learner(chunk)
    return step(
        model, optimizer=keras.optimizers.LossScaleOptimizer(Taking(), initial_scale=1024.0)
    )


def views(chunk):
    model = learner_of_two_views()
    model.gradient_cache = chunk
    model.build(model.view_shape)
    return step(model, two_views())


def through_all_chunks_at_once():
    """The gradient that keeps the activations of all chunks, and the states after them, of a
    learner with draws."""
    model, (labels, x) = random_learner(few=True), colored_batch()
    model.gradient_cache = 0
    states = list(model.non_trainable_variables)

    def loss(weights):
        mapping = zip(model.trainable_variables, weights, strict=True)
        with keras.StatelessScope(list(mapping)) as scope:
            parts = [
                model(x[first : first + CHUNK], training=True) for first in range(0, len(x), CHUNK)
            ]
            whole = {
                name: keras.ops.concatenate([part[name] for part in parts]) for name in parts[0]
            }
            value = model.compute_loss(None, keras.ops.convert_to_tensor(labels), whole)
            return value, [scope.get_current_value(state) for state in states]

    weights = [variable.value for variable in model.trainable_variables]
    gradients, after = jax.jit(jax.grad(loss, has_aux=True))(weights)
    arrays = {f"trained|{i}": np.asarray(value) for i, value in enumerate(gradients)}
    return arrays | {f"state|{i}": np.asarray(value) for i, value in enumerate(after)}


def proxies_step(name):
    """Two steps, of an optimizer with momentum, decay and averages; a checkpoint is loaded between
    them."""
    keras.utils.set_random_seed(3)
    model = models.MetricLearner(tiny_embedder(), PROXIES[name]())
    model.build((None, SIZE, SIZE, 3))
    settings = {"weight_decay": 0.1, "momentum": 0.9, "clip_norm": 0.5, "ema": 0.5}
    optimizer = build_optimizer("sgd", model, 0.3, **settings)
    first = step(model, optimizer=optimizer)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save(pathlib.Path(folder), model, checkpoints.TrainingState(1, []))
        for variable in (*model.variables, *optimizer.variables):
            variable.assign(keras.ops.zeros(variable.shape, variable.dtype))
        checkpoints.restore_latest(pathlib.Path(folder), model)
        for key, value in values_by_name(model).items():
            np.testing.assert_array_equal(first[key], value)
    labels, x = colored_batch(1)
    rows = tf.data.Dataset.from_tensor_slices((x, labels))
    model.fit(rows.batch(len(x)), verbose=0)
    arrays = values_by_name(model)
    with pytest.raises(Exception, match="labels must be classes 0"):
        model.evaluate(rows.map(lambda image, label: (image, label + 10)).batch(len(x)), verbose=0)
    proxies = model.objectives[0].class_proxies.proxies
    kept = [v for v in (proxies, *optimizer.variables) if tuple(v.shape) == tuple(proxies.shape)]
    arrays |= {f"optimizer|{i}": value for i, value in enumerate(values(optimizer.variables))}
    return arrays | {
        f"part|{i}": np.array(v.value.sharding.shard_shape(v.shape)) for i, v in enumerate(kept)
    }


def bytes_of_a_step(chunk, size, side=16):
    """How many bytes of temporary arrays a step takes, of a network whose activations are most of
    them."""
    x = inputs = keras.Input((None, None, 3))
    for _ in range(4):
        x = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    embedder = models.Embedder(keras.Model(inputs, x), embedding_dim=8, image_size=side)
    memory = objectives.CrossBatchMemory(losses.ContrastiveLoss(), 2048)
    model = models.MetricLearner(embedder, memory, gradient_cache=chunk)
    model.build((None, side, side, 3))
    model.compile("sgd")
    model.optimizer.build(model.trainable_variables)
    groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
    state = [[variable.value for variable in group] for group in (*groups, model.metrics_variables)]
    batch = np.zeros((size, side, side, 3), "uint8"), np.arange(size) // 2
    return (
        jax.jit(model.train_step).lower(state, batch).compile().memory_analysis().temp_size_in_bytes
    )


def main(path):
    assert keras.backend.backend() == "jax"
    devices = keras.distribution.list_devices()
    assert len(devices) == DEVICES
    arrays = {}

    def add(name, compute, distribution=None):
        with contextlib.nullcontext() if distribution is None else distribution.scope():
            arrays.update({f"{name}|{key}": value for key, value in compute().items()})

    shared = ClassParallel(devices=devices)
    parallel = keras.distribution.DataParallel(devices=devices)
    add("plain", lambda: step(learner(0)))
    # 2 chunks and 2 images that are left; on each of four devices one chunk and an image.
    add("chunks", lambda: step(learner(5)))
    add("chunks on devices", lambda: step(learner(2)), parallel)
    add("draws", lambda: step(random_learner(few=True)))
    add("draws at once", through_all_chunks_at_once)
    add("half", lambda: half(0))
    add("half in chunks", lambda: half(5))
    add("views", lambda: views(0))
    add("views in chunks", lambda: views(8))
    for name in PROXIES:
        add(name, lambda name=name: proxies_step(name))
        add(f"{name} on devices", lambda name=name: proxies_step(name), shared)
    with (
        shared.scope(),
        pytest.raises(UserError, match="4 devices cannot share 1,001 classes equally; leave out 1"),
    ):
        models.MetricLearner(tiny_embedder(), jrd(1001)).build((None, SIZE, SIZE, 3))
    with (
        shared.scope(),
        pytest.raises(UserError, match="steps_per_execution=2: works on one device"),
    ):
        models.MetricLearner(tiny_embedder(), jrd()).compile("sgd", steps_per_execution=2)
    for chunk, size in ((0, 32), (8, 32), (8, 64)):
        arrays[f"memory|{chunk}|{size}"] = np.array(bytes_of_a_step(chunk, size))
    np.savez(path, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
