"""Inference: a compiled function of images on every backend, and the representations of batches of
images."""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops


def compiled(model: keras.Model, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Compile `function` of a batch of images, with the weights that `model` has now.

    On JAX the batch is shared out over the devices of this process, each with a copy of the
    weights. So several processes may call it with batches of their own, or one of them alone.

    Args:
        model: What holds the variables that the function reads.
        function: From images to a tensor, or a dict of them, whose rows are those of the images;
            the model itself, or what calls it.

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
    return lambda images: function(
        keras.tree.map_structure(lambda x: ops.convert_to_tensor(np.asarray(x)), images)
    )


def _on_local_devices(model: keras.Model, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    devices = jax.local_devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
    replicated, by_rows = (
        NamedSharding(mesh, PartitionSpec()),
        NamedSharding(mesh, PartitionSpec("batch")),
    )
    variables = list(model.variables)
    # Each process holds all of every weight.
    weights = [
        jax.device_put(variable.value.addressable_data(0), replicated) for variable in variables
    ]
    run = _jitted(model, function, variables)

    def call(images):
        images = keras.tree.map_structure(np.asarray, images)
        count = len(keras.tree.flatten(images)[0])
        missing = -count % len(devices)
        if missing:
            images = keras.tree.map_structure(
                lambda x: np.concatenate([x, np.repeat(x[-1:], missing, axis=0)]), images
            )
        outputs = run(weights, jax.device_put(images, by_rows))
        return keras.tree.map_structure(lambda x: np.asarray(x)[:count], outputs)

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


def represent_batches(
    model, names: list[str], batches: Iterable[Any]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Representations of all images, in inference mode.

    Args:
        model: A `tfdml.models.Embedder`, or what has its `represent`.
        names: Which of its representations; vectors, not maps.
        batches: Batches of (images, labels) that end.

    Returns:
        By name (N, D) float32, and the labels (N,) int64.

    Raises:
        ValueError: There is no batch, one is no pair of images and labels, or they never end.
    """
    if never_ends(batches):
        raise ValueError("the batches never end: give one pass over the training images")

    def vectors_of(images):
        representations = model.represent(images, training=False)
        return {name: ops.cast(representations[name], "float32") for name in names}

    run = compiled(model, vectors_of)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    labels = []
    for batch in batches:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError("each batch must be (images, labels)")
        vectors = run(batch[0])
        for name in names:
            parts[name].append(ops.convert_to_numpy(vectors[name]))
        labels.append(ops.convert_to_numpy(batch[1]).reshape(-1).astype(np.int64))
    if not labels:
        raise ValueError("there is no batch to adapt to")
    joined = {name: np.concatenate(vectors) for name, vectors in parts.items()}
    return joined, np.concatenate(labels)


def never_ends(batches: Any) -> bool:
    """Whether batches are a `tf.data.Dataset` without end."""
    cardinality = getattr(batches, "cardinality", None)
    # -1 is tf.data's INFINITE_CARDINALITY.
    return callable(cardinality) and int(cardinality()) == -1
