"""What is saved and shown of an object: its configuration."""

import inspect
from typing import Any

import keras
import numpy as np

from tfdml import workarounds
from tfdml.errors import UserError

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _ConstructorSignature:
    """What `inspect.signature` shows of a class; an object of it has the signature of its
    `__call__`."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        return _signature(owner)


class SavedByArguments:
    """Gives a Keras object `get_config`: the arguments of its constructor, each kept in the
    attribute of its name.

    A constructor may take those of its base class as `**kwargs`: `inspect.signature` shows them
    too, save those that the class names in `fixed`, as it gives them itself. A class that keeps an
    argument otherwise adds it in a `get_config` of its own.

    Example:
        >>> @keras.saving.register_keras_serializable("shop")
        ... class Scale(tfdml.saving.SavedByArguments, keras.layers.Layer):
        ...     def __init__(self, factor=2.0, **kwargs):
        ...         super().__init__(**kwargs)
        ...         self.factor = factor
        >>> Scale(3.0).get_config()["factor"]
        3.0
    """

    __signature__ = _ConstructorSignature()
    #: Arguments of the base class that this one gives itself.
    fixed: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs):
        """Register the classes of tfdml with Keras, which loads them by name."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("tfdml."):
            keras.saving.register_keras_serializable("tfdml")(cls)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, as values that JSON can hold."""
        config: dict[str, Any] = getattr(super(), "get_config", dict)()
        return {**config, **{key: _plain(value) for key, value in self._arguments().items()}}

    def _arguments(self) -> dict[str, Any]:
        named = [
            key
            for key, parameter in type(self).__signature__.parameters.items()
            if parameter.kind not in _REST
        ]
        return {key: getattr(self, key) for key in named if hasattr(self, key)}

    def __repr__(self):
        shown = {key: value for key, value in self._arguments().items() if value is not None}
        written = [f"{key}={_in_words(value)}" for key, value in shown.items()]
        return f"{type(self).__name__}({', '.join(written)})"


def _signature(cls: type) -> inspect.Signature:
    """Return the constructor's arguments, those that it hands to the next class as `**kwargs` among
    them."""
    found: dict[str, inspect.Parameter] = {}
    rest, given = None, set()
    for owner in (owner for owner in cls.__mro__ if issubclass(owner, SavedByArguments)):
        given.update(vars(owner).get("fixed", ()))
        if "__init__" in vars(owner):
            _, *own = inspect.signature(owner.__init__).parameters.values()
            for parameter in own:
                if parameter.kind not in _REST and parameter.name not in (found.keys() | given):
                    kind = parameter.kind if rest is None else parameter.KEYWORD_ONLY
                    found[parameter.name] = parameter.replace(kind=kind)
            rest = next(
                (parameter for parameter in own if parameter.kind is parameter.VAR_KEYWORD), None
            )
            if rest is None:
                break
    return inspect.Signature([*found.values(), *([rest] if rest else [])])


class SavedAsFile:
    """Mixed into a `keras.Model`: saves to `.keras` files, which can be loaded again, and refuses
    other formats.

    Keras keeps what is frozen of the layers that have a config. Here each weight that is frozen is
    frozen again, once the weights are created.
    """

    #: The places of frozen weights, of a model that is loaded.
    frozen: list[int] | None = None

    def get_config(self) -> dict[str, Any]:
        """Return Keras's config, and which weights are frozen."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        return {**config, "frozen": workarounds.frozen_weights(self)}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Return the model that `get_config` describes."""
        config = dict(config)
        frozen = config.pop("frozen", None)
        model = super().from_config(config, custom_objects)  # type: ignore[misc]
        model.frozen = frozen
        return model

    def build_from_config(self, config):
        """Create the weights of a model that is loaded."""
        super().build_from_config(config)  # type: ignore[misc]
        if self.built and self.frozen is not None:  # type: ignore[attr-defined]
            workarounds.set_frozen_weights(self, self.frozen)

    def save(self, filepath, *args, **kwargs):
        """As in Keras, to a path that ends in `.keras`.

        Raises:
            UserError: It ends otherwise.
        """
        if not str(filepath).endswith(".keras"):
            stem = str(filepath).removesuffix(".h5").removesuffix(".hdf5")
            raise UserError(
                f"{filepath}: a {type(self).__name__} is saved to a .keras file: write {stem}.keras"
            )
        return super().save(filepath, *args, **kwargs)  # type: ignore[misc]


class Composed(SavedByArguments):
    """Base of what is saved with a loss or objective and is no Keras object: made of its arguments
    alone."""

    @classmethod
    def from_config(cls, config):
        """Return the object that `get_config` describes."""
        return cls(**config)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    saved = hasattr(value, "get_config") or inspect.isfunction(value)
    return keras.saving.serialize_keras_object(value) if saved else value


def restore(value):
    """Return the object that a serialized config describes; anything else as it is."""
    if isinstance(value, dict) and "class_name" in value:
        return keras.saving.deserialize_keras_object(value)
    return value


def _in_words(value: Any) -> str:
    return value.__name__ if inspect.isfunction(value) else " ".join(repr(value).split())
