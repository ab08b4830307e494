"""What is saved and shown of an object: its configuration."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np

# In every configuration of Keras's; a reader of a message looks for the rest.
_KERAS_OWN = {"dtype", "trainable", "autocast"}


_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class SavedByArguments:
    """Gives a Keras object `get_config`: the arguments of its constructor, each kept in the attribute of its name.

    A class that keeps an argument otherwise adds it in a `get_config` of its own.

    Example:
        >>> @keras.saving.register_keras_serializable("shop")
        ... class Scale(tfdml.saving.SavedByArguments, keras.layers.Layer):
        ...     def __init__(self, factor=2.0, **kwargs):
        ...         super().__init__(**kwargs)
        ...         self.factor = factor
        >>> Scale(3.0).get_config()["factor"]
        3.0
    """

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, as values that JSON can hold."""
        kept: dict[str, Any] = getattr(super(), "get_config", dict)()
        parameters = inspect.signature(type(self).__init__).parameters.values()
        named = [parameter.name for parameter in parameters if parameter.kind not in _REST]
        return {**kept, **{name: _plain(getattr(self, name)) for name in named[1:] if hasattr(self, name)}}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    saved = hasattr(value, "get_config") or inspect.isfunction(value)
    return keras.saving.serialize_keras_object(value) if saved else value


def saved_size(model: keras.Model) -> int:
    """About how many bytes a built model's `.keras` file has: those of its weights, in float32.

    Example:
        >>> saved_size(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]))
        32
    """
    return 4 * sum(int(np.prod(variable.shape)) for variable in model.weights)


def restore(value):
    """Return the object that a serialised config describes; anything else as it is."""
    if isinstance(value, dict) and "class_name" in value:
        return keras.saving.deserialize_keras_object(value)
    return value


def in_words(owner: Any) -> str:
    """Return an object by its class and arguments, for `__repr__`: `TripletLoss(margin=0.2, mining='all', ...)`.

    Args:
        owner: Has a `get_config` of plain values and serialised objects.
    """
    arguments = {name: value for name, value in owner.get_config().items() if name not in _KERAS_OWN}
    return f"{type(owner).__name__}({', '.join(f'{name}={_value(value)}' for name, value in arguments.items())})"


def _value(value: Any) -> str:
    if isinstance(value, dict) and "class_name" in value and "config" in value:
        inner = value["config"]
        if isinstance(inner, str):
            return inner.rpartition(">")[2]  # a function, by its name
        shown = inner.items() if isinstance(inner, dict) else ()
        return f"{value['class_name']}({', '.join(f'{k}={_value(v)}' for k, v in shown if k not in _KERAS_OWN)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_value, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    return repr(value)
