"""A model's function of images alone, compiled once, on whichever backend and however many devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np


def compiled(model: keras.Model, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function` of a batch of images, compiled, with the weights that `model` has now.

    On JAX the batch is shared out over the devices of this process, each with a copy of the weights. So several
    processes may call it with batches of their own, or one of them alone.

    Args:
        model: What holds the variables that the function reads.
        function: From images to a tensor, or a dict of them, whose rows are those of the images; the model itself, or
            what calls it.

    Example:
        >>> run = compiled(embedder, embedder.represent)
        >>> sorted(run(views))
        ['embedding', 'feature_map', 'pooled', 'projection']
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, reduce_retracing=True, autograph=False)
    if keras.backend.backend() == "jax":
        return _on_local_devices(model, function)
    return lambda images: function(keras.ops.convert_to_tensor(np.asarray(images)))


def _on_local_devices(model: keras.Model, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    devices = jax.local_devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
    whole, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("batch"))
    variables = list(model.variables)
    # Each process holds all of every weight.
    weights = [jax.device_put(variable.value.addressable_data(0), whole) for variable in variables]
    run = _jitted(model, function, variables)

    def call(images):
        images = np.asarray(images)
        missing = -len(images) % len(devices)
        if missing:
            images = np.concatenate([images, np.repeat(images[-1:], missing, axis=0)])
        outputs = run(weights, jax.device_put(images, by_rows))
        return keras.tree.map_structure(lambda x: np.asarray(x)[: len(images) - missing], outputs)

    return call


def _jitted(model: Any, function: Any, variables: list) -> Callable[..., Any]:
    import jax

    def stateless(weights, images):
        with keras.StatelessScope(list(zip(variables, weights, strict=True))):
            return function(images, training=False) if function is model else function(images)

    if function is not model:
        return jax.jit(stateless)
    # Kept with the model, so that the next pass does not compile it again.
    return vars(model).setdefault("_compiled_by_tfdml", jax.jit(stateless))
