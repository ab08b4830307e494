"""What is saved and shown of an object: its configuration."""

from __future__ import annotations

from typing import Any

import keras

# In every configuration of Keras's; a reader of a message looks for the rest.
_KERAS_OWN = {"dtype", "trainable", "autocast"}


def restore(value):
    """The object that a serialised config describes; anything else as it is."""
    if isinstance(value, dict) and "class_name" in value:
        return keras.saving.deserialize_keras_object(value)
    return value


def plain(value):
    """A value as it stands in a configuration: an object or function serialised, anything else as it is.

    Example:
        >>> plain("cosine"), plain(tfdml.kernels.Polynomial(degree=2))["config"]
        ('cosine', {'degree': 2})
    """
    return keras.saving.serialize_keras_object(value) if callable(value) else value


def in_words(owner: Any) -> str:
    """An object by its class and arguments, for `__repr__`: `TripletLoss(margin=0.2, mining='all', ...)`.

    Args:
        owner: Has a `get_config` of plain values and serialised objects.
    """
    arguments = {name: value for name, value in owner.get_config().items() if name not in _KERAS_OWN}
    return f"{type(owner).__name__}({', '.join(f'{name}={_value(value)}' for name, value in arguments.items())})"


def _value(value: Any) -> str:
    if isinstance(value, dict) and "class_name" in value and "config" in value:
        inner = value["config"]
        if isinstance(inner, str):
            return inner  # a function, by its name
        shown = inner.items() if isinstance(inner, dict) else ()
        return f"{value['class_name']}({', '.join(f'{k}={_value(v)}' for k, v in shown if k not in _KERAS_OWN)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_value, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    return repr(value)
