"""Augmentation policies for finished crops: Keras's image preprocessing layers by name, any layer
by its import path.

The layers draw from generators that keep a state, so that an image's augmentation would depend on
the order of the threads. Here all of them draw from one stateless generator, keyed by the image's
own draws and numbered in the order in which the graph is built: the same key gives the same bits,
whatever ran before.

MixUp and CutMix are left out: they blend images of different classes and their one-hot labels, and
metric learning compares integer labels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.errors import ERROR_TEXT, UserError, check_choice, user_errors
from tfdml.expressions import Terms
from tfdml.registry import import_allowed

# Layer and defaults by name; a layer's factor is written as in Keras.
_LAYERS: dict[str, tuple[type[keras.layers.Layer], dict[str, Any]]] = {
    "blur": (
        keras.layers.RandomGaussianBlur,
        {"factor": (1.0, 1.0), "kernel_size": 9, "sigma": (0.1, 2.0)},
    ),
    # Factors of 0.6 to 1.4 of the saturation, and a tenth of the color circle at most.
    "color_jitter": (
        keras.layers.RandomColorJitter,
        {
            "brightness_factor": 0.2,
            "contrast_factor": 0.4,
            "saturation_factor": (0.6 / 1.6, 1.4 / 2.4),
            "hue_factor": (0.0, 0.1),
        },
    ),
    "erasing": (keras.layers.RandomErasing, {"factor": (1.0, 1.0), "scale": (0.02, 0.2)}),
    "grayscale": (keras.layers.RandomGrayscale, {"factor": 1.0}),
    "rand_augment": (keras.layers.RandAugment, {}),
    "rotation": (keras.layers.RandomRotation, {"factor": 0.04}),
}
# Where Keras defines the layers that any file may name.
_SAFE = (
    "keras.src.layers.preprocessing.image_preprocessing.",
    "keras.src.layers.regularization.",
)
_TRIAL_SIZE = 64  # pixels of the image with which a policy is tried


def names() -> list[str]:
    """Return the names of policies, sorted.

    Example:
        >>> "rand_augment" in names()
        True
    """
    return sorted(_LAYERS)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a policy.

    Args:
        name: One of `names()`, or the import path of a Keras layer, such as
            `"keras.layers.RandomRotation"`. Modules other than Keras's are those of
            `tfdml.registry.allow_modules`. The layer gets a float32 image (H, W, 3) of 0 to 255
            and keeps its size.
        arguments: Arguments of the layer, as numbers, texts and lists.
        rate: The share of the images to which it happens.

    Raises:
        UserError: The name is unknown, or the rate is no share.

    Example:
        >>> str(Step("keras.layers.RandomRotation", {"factor": 0.1}, rate=0.5))
        '0.5 * keras.layers.RandomRotation(factor=0.1)'
    """

    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    rate: float = 1.0

    def __post_init__(self):
        if "." not in self.name:
            check_choice("policy", self.name, names())
        if not 0 <= self.rate <= 1:
            raise UserError(
                f"the factor of {self.name} is its share of the images, 0 to 1, not {self.rate}",
                policy=...,
            )

    def __str__(self) -> str:
        rate = "" if self.rate == 1 else f"{self.rate:g} * "
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        call = f"{self.name}({arguments})" if arguments else self.name
        return rate + call


@dataclasses.dataclass(frozen=True)
class Policy:
    """Steps that follow one another, each on its share of the images.

    Args:
        steps: The steps, in order.

    Raises:
        UserError: A step's arguments are not those of its layer, or out of their range.

    Example:
        >>> policy = Policy((Step("rand_augment", {"factor": 0.4}), Step("grayscale", rate=0.2)))
        >>> policy(tf.zeros((224, 224, 3), tf.uint8), tf.constant([3, 4], tf.int64)).shape
        TensorShape([224, 224, 3])
    """

    steps: tuple[Step, ...]

    def __post_init__(self):
        object.__setattr__(self, "steps", tuple(self.steps))
        if not self.steps:
            raise UserError("name at least one policy", policy=...)
        # Here and not when the first batch is made, so that a wrong argument shows before anything
        # is written.
        self._function  # noqa: B018

    @classmethod
    def of(cls, terms: str | Terms) -> Policy:
        """Return the policy of a sum, such as `rand_augment(factor=0.4) + 0.2 * grayscale`.

        Example:
            >>> str(Policy.of("rand_augment(factor=0.4) + 0.2 * grayscale"))
            'rand_augment(factor=0.4) + 0.2 * grayscale'
        """
        parsed = Terms.parse(terms, "policy") if isinstance(terms, str) else terms
        return cls(tuple(Step(call.name, call.arguments, share) for share, call in parsed))

    def __call__(self, image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """One image through the policy.

        Args:
            image: (H, W, 3) uint8, of known size.
            key: (2,) int64: determines every random choice.

        Returns:
            (H, W, 3) uint8.
        """
        return tf.ensure_shape(self._function(image, key), image.shape)

    def __str__(self) -> str:
        return " + ".join(map(str, self.steps))

    @functools.cached_property
    def _function(self) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        # Layers that are made within a graph would keep their generators there.
        with tf.init_scope():
            draws = _KeyedDraws(seed=0)
            layers = [_layer(step, draws) for step in self.steps]

            # Draws are numbered in the order in which a graph is built, so that every graph has the
            # same ones.
            @functools.partial(tf.function, autograph=False)
            def apply(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
                draws.begin(key)
                values = tf.cast(image, tf.float32)
                for step, layer in zip(self.steps, layers, strict=True):
                    values = _on_share(layer, values, step.rate, draws)
                return tf.cast(tf.clip_by_value(values, 0, 255) + 0.5, tf.uint8)

            shape, key = (_TRIAL_SIZE, _TRIAL_SIZE, 3), tf.constant([1, 2], tf.int64)
            with user_errors(
                (TypeError, ValueError),
                f"{self} cannot be applied to an image: {ERROR_TEXT}",
                policy=...,
            ):
                apply.get_concrete_function(
                    tf.TensorSpec(shape, tf.uint8), tf.TensorSpec((2,), tf.int64)
                )
            if any("." in step.name for step in self.steps):
                image = tf.constant(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
                if len({apply(image, key).numpy().tobytes() for _ in range(4)}) > 1:
                    text = "policy: %s draws without Keras's seeds: a resumed run gets other images"
                    logging.warning(text, self)
            return apply


class _KeyedDraws(keras.random.SeedGenerator):
    """A generator of seeds that depend on a key and their number alone."""

    def begin(self, key: tf.Tensor) -> None:
        self._key, self._count = key, 0

    def next(self, ordered: bool = True) -> tf.Tensor:
        self._count += 1
        return tf.random.fold_in(self._key, self._count, alg="philox")

    def uniform(self, most: float, dtype: tf.DType) -> tf.Tensor:
        """Return a scalar from 0 to `most`."""
        return tf.random.stateless_uniform((), self.next(), 0, most, dtype, alg="philox")


def _layer(step: Step, draws: _KeyedDraws) -> Callable[[tf.Tensor], tf.Tensor]:
    refused = f"policy: {step.name} does not take {step.arguments}: {ERROR_TEXT}"
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in step.arguments.items()
    }
    if "seed" in values:
        raise UserError(f"{step.name} takes no seed: that of the run decides", policy=...)
    with user_errors((TypeError, ValueError), refused), contextlib.ExitStack() as stack:
        stack.callback(keras.config.set_dtype_policy, keras.config.dtype_policy())
        keras.config.set_dtype_policy("float32")  # of the layers within a layer, too
        kind, defaults = (_imported(step.name), {}) if "." in step.name else _LAYERS[step.name]
        layer = kind(**{**defaults, **values})
    for part in layer._flatten_layers():
        # Where Keras has another backend, its layers have a second generator for TensorFlow's
        # graphs. Past Keras's tracking of attributes, which is closed where a layer has no weights.
        vars(part)["_backend_generators"] = {"tensorflow": draws}
        for name, value in list(vars(part).items()):
            if isinstance(value, keras.random.SeedGenerator):
                vars(part)[name] = draws
    if "." in step.name:
        draws.begin(tf.constant([1, 2], tf.int64))
        with user_errors(
            (TypeError, ValueError), refused
        ):  # outside of the graph, where a layer may make weights
            layer(tf.zeros((_TRIAL_SIZE, _TRIAL_SIZE, 3)))
    if step.name == "rand_augment":
        parts = [part for part in vars(layer).values() if isinstance(part, keras.layers.Layer)]
        return functools.partial(_rand_augment, parts, layer.num_ops, draws)
    return functools.partial(layer, training=True)


def _rand_augment(
    layers: list[keras.layers.Layer], num_ops: int, draws: _KeyedDraws, image: tf.Tensor
) -> tf.Tensor:
    """RandAugment, of which only the layers drawn are applied; Keras's own layer applies all and
    chooses among them."""
    for _ in range(num_ops):
        choice = draws.uniform(len(layers), tf.int32)
        image = tf.switch_case(
            choice, [functools.partial(_applied, layer, image) for layer in layers]
        )
    return image


def _applied(layer: Callable[..., tf.Tensor], image: tf.Tensor) -> tf.Tensor:
    return tf.ensure_shape(tf.cast(layer(image), tf.float32), image.shape)


def _imported(path: str) -> type[keras.layers.Layer]:
    module, _, name = path.rpartition(".")
    if _is_safe(path):
        return getattr(keras.layers, name)
    kind = getattr(import_allowed(module, policy=path), name, None)
    if not (isinstance(kind, type) and issubclass(kind, keras.layers.Layer)):
        raise UserError(f"{path} is no Keras layer", policy=...)
    return kind


def _is_safe(path: str) -> bool:
    """Whether this is the import path of a layer of Keras for images or of noise. Others may run
    code or open files, such as `TFSMLayer`."""
    module, _, name = path.rpartition(".")
    place = getattr(getattr(keras.layers, name, None), "__module__", "")
    return module == "keras.layers" and place.startswith(_SAFE)


def modules_of(policy: str) -> list[str]:
    """Return the modules that a policy imports; Keras's own layers for images need no import.

    Example:
        >>> modules_of("grayscale + 0.5 * shop.Darker + keras.layers.RandomRotation")
        ['shop']
    """
    steps = Terms.parse(policy, "policy") if policy.strip() else Terms()
    paths = [call.name for _, call in steps if "." in call.name]
    return [path.rpartition(".")[0] for path in paths if not _is_safe(path)]


def _on_share(
    layer: Callable[..., tf.Tensor], values: tf.Tensor, rate: float, draws: _KeyedDraws
) -> tf.Tensor:
    if rate == 1:
        return _applied(layer, values)
    return tf.cond(
        draws.uniform(1, tf.float32) < rate, lambda: _applied(layer, values), lambda: values
    )
