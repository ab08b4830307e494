"""An embedder that was trained in half precision, made anew in float32 for export."""

from __future__ import annotations

from typing import Any

import keras

from tfdml.models import Embedder, MomentEmbedder


def in_float32(embedder: Embedder | MomentEmbedder) -> Embedder | MomentEmbedder:
    """The same embedder computing in float32; itself where it does already.

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
    made.build((None, embedder.image_size, embedder.image_size, 3))
    made.set_weights(embedder.get_weights())
    return made


def _plain(config: Any) -> Any:
    """A configuration with every mixed policy replaced."""
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            return {**config, "config": {"name": "float32"}}
        return {
            key: "float32" if key == "dtype" and _is_mixed(value) else _plain(value) for key, value in config.items()
        }
    if isinstance(config, (list, tuple)):
        return type(config)(_plain(item) for item in config)
    return config


def _is_mixed(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("mixed_")
