"""What converters to other formats start from: the network alone, in float32, its weights made constants."""

import contextlib
import logging as python_logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdml import workarounds
from tfdml.backbones.lora import plain_weights
from tfdml.errors import UserError
from tfdml.models import AnyEmbedder

Network = Callable[[tf.Tensor], tf.Tensor]


def check_backend() -> None:
    """Refuse to export on another backend of Keras than TensorFlow, whose graphs exports are.

    Raises:
        UserError: Keras runs on another backend.

    Example:
        >>> check_backend()
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise UserError(
            f"export needs Keras's TensorFlow backend, and KERAS_BACKEND is {backend}: save the embedder with "
            "embedder.save('embedder.keras'), and load and export it in a process with KERAS_BACKEND=tensorflow"
        )


def view_spec(shape: tuple[int, ...]) -> tf.TensorSpec:
    """Return what a network is fed: for (S, S, 3) `images` (B, S, S, 3) uint8, for (D,) `vectors` (B, D) float32.

    Example:
        >>> view_spec((768,))
        TensorSpec(shape=(None, 768), dtype=tf.float32, name='vectors')
    """
    if len(shape) == 1:
        return tf.TensorSpec((None, *shape), tf.float32, name="vectors")
    return tf.TensorSpec((None, *shape), tf.uint8, name="images")


def frozen_module(network: Network, shape: tuple[int, ...], dtype: tf.DType | None = None) -> tf.Module:
    """Return a network as a module whose function `embed` has no variables.

    Args:
        network: From images (B, S, S, 3) to embeddings (B, d), such as an embedder.
        shape: (S, S, 3) of an image, as `Embedder.view_shape`.
        dtype: Of the images, if not that of `view_spec`.

    Returns:
        A module with `embed(images)`, which returns `{"embedding": (B, d)}`.

    Example:
        >>> frozen_module(embedder, (28, 28, 3)).embed(views)["embedding"].shape
        TensorShape([2, 16])
    """
    spec = view_spec(shape)
    spec = tf.TensorSpec(spec.shape, dtype or spec.dtype, name=spec.name)
    traced = tf.function(lambda images: network(images), input_signature=[spec], autograph=False)
    frozen = workarounds.frozen(traced.get_concrete_function())
    module = tf.Module()
    module.embed = tf.function(lambda images: {"embedding": frozen(images)[0]}, input_signature=[spec], autograph=False)
    return module


def in_float32(embedder: AnyEmbedder) -> AnyEmbedder:
    """Return the same embedder computing in float32; itself where it does already.

    Weights are float32 under every mixed policy: nothing is rounded. What is exported must not depend on the
    device's half precision, and LiteRT knows no mixed policy.

    Args:
        embedder: A built embedder.

    Returns:
        An embedder with the same weights.

    Example:
        >>> in_float32(embedder).compute_dtype
        'float32'
    """
    config = keras.saving.serialize_keras_object(embedder)
    plain = _plain(config)
    if plain == config:
        return embedder
    made = keras.saving.deserialize_keras_object(plain)
    made.build((None, *embedder.view_shape))
    made.set_weights(plain_weights(embedder))
    return made


def _plain(config: Any) -> Any:
    """Return a configuration with every mixed policy replaced."""
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            return {**config, "config": {"name": "float32"}}
        return {
            key: "float32" if key == "dtype" and str(value).startswith("mixed_") else _plain(value)
            for key, value in config.items()
        }
    if isinstance(config, (list, tuple)):
        return type(config)(_plain(item) for item in config)
    return config


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what TensorFlow and tf2onnx log of every save and conversion; what fails is raised."""
    verbosity = logging.get_verbosity()
    onnx = python_logging.getLogger("tf2onnx")
    level = onnx.level
    logging.set_verbosity(logging.ERROR)
    onnx.setLevel(python_logging.ERROR)
    try:
        with warnings.catch_warnings():
            # The converter warns of an interpreter that it uses itself.
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        onnx.setLevel(level)
