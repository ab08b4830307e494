"""Augmentation policies by name: what happens to the finished crops, through keras-cv's layers.

keras-cv draws from generators that keep a state, so that an image's augmentation would depend on the order of the
threads. Here every draw of a layer is replaced by a stateless one, keyed by the image's own draws and numbered in the
order in which the graph is built: the same key gives the same bits, whatever ran before.

Left out are the layers for which this cannot be done or that make no sense here: MixUp, CutMix, FourierMix and Mosaic
blend images of different classes and their one-hot labels, but metric learning compares integer labels; AugMix draws
from gamma distributions by TensorFlow's own state; RandomJpegQuality turns pixels of 0-255 black in keras-cv 0.9.0.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdml.errors import UserError

_RANGE = (0, 255)
# Layer and defaults by name; what the layer calls a factor is written as in keras-cv.
_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "auto_contrast": ("AutoContrast", {"value_range": _RANGE}),
    "blur": ("RandomGaussianBlur", {"kernel_size": 9, "factor": (0.1, 2.0)}),
    "channel_shift": ("RandomChannelShift", {"value_range": _RANGE, "factor": 0.2}),
    "cutout": ("RandomCutout", {"height_factor": (0.1, 0.4), "width_factor": (0.1, 0.4)}),
    "equalize": ("Equalization", {"value_range": _RANGE}),
    "grayscale": ("Grayscale", {"output_channels": 3}),
    "grid_mask": ("GridMask", {"ratio_factor": (0.2, 0.5), "rotation_factor": 0.15}),
    "posterize": ("Posterization", {"value_range": _RANGE, "bits": 4}),
    "rand_augment": ("RandAugment", {"value_range": _RANGE}),
    "rotation": ("RandomRotation", {"factor": 0.04, "fill_mode": "reflect"}),
    "sharpness": ("RandomSharpness", {"value_range": _RANGE, "factor": 0.5}),
    "shear": ("RandomShear", {"x_factor": 0.2, "y_factor": 0.2, "fill_mode": "reflect"}),
    "solarize": ("Solarization", {"value_range": _RANGE, "threshold_factor": (128, 255)}),
    "translation": ("RandomTranslation", {"height_factor": 0.1, "width_factor": 0.1, "fill_mode": "reflect"}),
    "zoom": ("RandomZoom", {"height_factor": 0.2, "fill_mode": "reflect"}),
}
_ALIASES = {"random_cutout": "cutout", "colour_jitter": "color_jitter", "greyscale": "grayscale"}
_COLOR_JITTER = {"brightness": 0.2, "contrast": 0.4, "saturation": 0.4, "hue": 0.05}
# Arguments of keras-cv's that have no place here: the pipeline's seed and dtype hold, and pixels are 0-255.
_RESERVED = ("seed", "kwargs", "value_range", "output_channels", "name", "dtype")


def names() -> list[str]:
    """The names of policies, sorted.

    Example:
        >>> "rand_augment" in names()
        True
    """
    return sorted([*_LAYERS, "color_jitter"])


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a policy.

    Args:
        name: One of `names()`.
        arguments: Arguments of keras-cv's layer, as numbers, texts and lists. `color_jitter` takes `brightness` (at
            most so large a share of 255 is added or taken away), `contrast` and `saturation` (a factor of 1 - value
            to 1 + value) and `hue` (turned by at most this share of the colour circle).
        rate: The share of the images to which it happens.

    Raises:
        UserError: The name is unknown, or the rate is no share.
    """

    name: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    rate: float = 1.0

    def __post_init__(self):
        object.__setattr__(self, "name", _ALIASES.get(self.name, self.name))
        if self.name not in names():
            raise UserError(f"`policy`: there is no policy {self.name!r}; choose from: {', '.join(names())}")
        if not 0 <= self.rate <= 1:
            raise UserError(f"`policy`: the factor of {self.name} is its share of the images, 0 to 1, not {self.rate}")

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return ("" if self.rate == 1 else f"{self.rate:g} * ") + self.name + (f"({arguments})" if arguments else "")


@dataclasses.dataclass(frozen=True)
class Policy:
    """Steps that follow one another, each on its share of the images.

    Args:
        steps: The steps, in order.

    Raises:
        UserError: A step's arguments are not those of its layer, it cannot be made repeatable, or keras-cv is not
            installed.

    Example:
        >>> policy = Policy((Step("rand_augment", {"magnitude": 0.4}), Step("grayscale", rate=0.2)))
        >>> policy(tf.zeros((224, 224, 3), tf.uint8), tf.constant([3, 4], tf.int64)).shape
        TensorShape([224, 224, 3])
    """

    steps: tuple[Step, ...]

    def __post_init__(self):
        object.__setattr__(self, "steps", tuple(self.steps))
        if not self.steps:
            raise UserError("`policy`: name at least one policy")
        # Here and not when the first batch is made, so that a wrong argument shows before anything is written.
        self._function  # noqa: B018

    def __call__(self, image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """One image through the policy.

        Args:
            image: (H, W, 3) uint8.
            key: (2,) int64: determines every random choice.

        Returns:
            (H, W, 3) uint8.
        """
        return tf.ensure_shape(self._function(image, key), image.shape)

    def __str__(self) -> str:
        return " + ".join(map(str, self.steps))

    def get_config(self) -> dict[str, Any]:
        """The arguments, as plain values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Policy:
        """The policy that `get_config` described."""
        return cls(tuple(Step(**step) for step in config["steps"]))

    @functools.cached_property
    def _function(self) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        # Layers that are made within a graph would keep their generators there.
        with tf.init_scope():
            chance = _Chance()
            layers = [_repeatable(_layer(step), chance) for step in self.steps]

            # One graph for every caller: draws are numbered in the order in which it is built.
            @tf.function(input_signature=[tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((2,), tf.int64)])
            def apply(image: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
                chance.begin(key)
                values = tf.cast(image, tf.float32)
                for step, layer in zip(self.steps, layers, strict=True):
                    values = _on_share(layer, values, step.rate, chance)
                return tf.cast(tf.clip_by_value(values, 0, 255) + 0.5, tf.uint8)

            _refuse_state(apply.get_concrete_function(), self.steps)
            return apply


class _Chance:
    """Stateless draws with the interface of `tf.random.Generator`, as far as keras-cv uses it."""

    def __init__(self) -> None:
        self._key: tf.Tensor | None = None
        self._count = 0

    def begin(self, key: tf.Tensor) -> None:
        self._key, self._count = key, 0

    def uniform(self, shape, minval=0, maxval=None, dtype=tf.float32, name=None) -> tf.Tensor:
        maxval = 1.0 if maxval is None else maxval
        return tf.random.stateless_uniform(shape, self._next(), minval, maxval, dtype, alg="philox")

    def normal(self, shape, mean=0.0, stddev=1.0, dtype=tf.float32, name=None) -> tf.Tensor:
        return tf.random.stateless_normal(shape, self._next(), mean, stddev, dtype, alg="philox")

    def _next(self) -> tf.Tensor:
        self._count += 1
        return tf.random.fold_in(self._key, self._count, alg="philox")


def _layer(step: Step) -> keras.layers.Layer:
    try:
        import keras_cv  # heavy, and only needed here
    except ImportError as error:
        raise UserError("`policy` needs keras-cv: pip install keras-cv==0.9.0") from error
    if step.name == "color_jitter":
        name, given = "RandomColorJitter", _color_jitter(step)
    else:
        name, defaults = _LAYERS[step.name]
        parameters = inspect.signature(getattr(keras_cv.layers, name).__init__).parameters
        _check_arguments(step, [key for key in list(parameters)[1:] if key not in _RESERVED])
        plain = {key: tuple(value) if isinstance(value, list) else value for key, value in step.arguments.items()}
        given = {**defaults, **plain}
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        return getattr(keras_cv.layers, name)(**given)
    except (TypeError, ValueError) as error:
        raise UserError(f"`policy`: {step.name} does not take {step.arguments}: {error}") from error
    finally:
        keras.config.set_dtype_policy(policy)


def _color_jitter(step: Step) -> dict[str, Any]:
    _check_arguments(step, list(_COLOR_JITTER))
    values = {**_COLOR_JITTER, **step.arguments}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise UserError(f"`policy`: {name} of color_jitter must be a number from 0 to 1, not {value!r}")
    # keras-cv's saturation s multiplies by s / (1 - s), and half its hue is a share of the circle.
    saturation = tuple(factor / (1 + factor) for factor in (1 - values["saturation"], 1 + values["saturation"]))
    return {
        "value_range": _RANGE,
        "brightness_factor": float(values["brightness"]),
        "contrast_factor": float(values["contrast"]),
        "saturation_factor": saturation,
        "hue_factor": (0.0, min(2.0 * values["hue"], 1.0)),
    }


def _check_arguments(step: Step, known: list[str]) -> None:
    for argument in step.arguments:
        if argument not in known:
            raise UserError(f"`policy`: {step.name} has no argument {argument!r}; it takes: {', '.join(known)}")


def _repeatable(layer: keras.layers.Layer, chance: _Chance) -> keras.layers.Layer:
    """The layer, and those within it, with every source of randomness replaced."""
    from keras_cv import core

    for part in layer._flatten_layers():
        part._random_generator = chance
        for name, value in list(vars(part).items()):
            if isinstance(value, (core.UniformFactorSampler, core.NormalFactorSampler)):
                setattr(part, name, _Factor(value, chance))
    return layer


class _Factor:
    """A keras-cv factor sampler that draws from `_Chance`."""

    def __init__(self, sampler: Any, chance: _Chance):
        self._sampler, self._chance = sampler, chance

    def __call__(self, shape=(), dtype="float32") -> tf.Tensor:
        sampler = self._sampler
        if hasattr(sampler, "stddev"):
            values = self._chance.normal(shape, sampler.mean, sampler.stddev, tf.as_dtype(dtype))
            return tf.clip_by_value(values, sampler.min_value, sampler.max_value)
        return self._chance.uniform(shape, sampler.lower, sampler.upper, tf.as_dtype(dtype))


def _on_share(layer: keras.layers.Layer, values: tf.Tensor, rate: float, chance: _Chance) -> tf.Tensor:
    def applied() -> tf.Tensor:
        return tf.ensure_shape(tf.cast(layer(values), tf.float32), (None, None, 3))

    return applied() if rate == 1 else tf.cond(chance.uniform(()) < rate, applied, lambda: values)


def _refuse_state(function: Any, steps: tuple[Step, ...]) -> None:
    """Raises an error if a draw is left whose bits depend on what ran before."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for part in graph.library.function for node in part.node_def)]
    left = {node.op for node in nodes if node.op.startswith(("Random", "Rng", "Truncated", "Multinomial"))}
    left |= {node.op for node in nodes if node.op.startswith("Stateful") and "Call" not in node.op}
    if left:
        raise UserError(
            f"`policy`: {', '.join(step.name for step in steps)} with these arguments draws numbers that a resumed run "
            f"could not repeat ({', '.join(sorted(left))}); leave out options such as fill_mode=gaussian_noise"
        )
