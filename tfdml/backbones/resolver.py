"""From a backbone's name to a network, the pixel scaling that it expects, and its weights."""

import dataclasses
import functools
import hashlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras

from tfdml.arguments import integer, number
from tfdml.backbones.hub import check_preset, load_preset
from tfdml.backbones.networks import bn_inception, conv4, googlenet, resnet50_v1_5
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.expressions import HUB, Call
from tfdml.registry import find, register, registered


@dataclasses.dataclass(frozen=True)
class Backbone:
    """A network from scaled images to a feature map.

    Args:
        model: (B, H, W, 3) -> (B, h, w, c).
        scaling: The mode of `tfdml.layers.InputScaling` that turns pixels 0-255 into what `model`
            expects.
        ensemble_cut: The layers between which an attention ensemble's attention network lies, where
            it is known; one layer where there is none, and the masks come from the map itself.
    """

    model: keras.Model
    scaling: str | dict[str, list[float]]
    ensemble_cut: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class _Entry:
    """How a backbone is built: by a function `(input_shape, **options)`, or one of
    `keras.applications` by its name."""

    build: str | Callable[..., Any]
    scaling: str
    options: tuple[str, ...] = ()
    ensemble_cut: tuple[str, str] | None = None

    def make(self, shape: tuple, weights: str | None, options: dict[str, Any]) -> Backbone:
        """Return the backbone, with weights of ImageNet or none."""
        if isinstance(self.build, str):
            build = getattr(keras.applications, self.build)
            made = build(include_top=False, input_shape=shape, weights=weights, **options)
        else:
            made = self.build(shape, **options)
        return (
            made if isinstance(made, Backbone) else Backbone(made, self.scaling, self.ensemble_cut)
        )


_NO_WEIGHTS = (None, "", "none")
_RESNET_CUT = ("conv4_block1_out", "conv4_block6_out")
_GOOGLENET_CUT = ("pool3_3x3_s2", "inception_4e")

_BACKBONES = {
    "conv4": _Entry(conv4, "tf", ("width",)),
    "googlenet": _Entry(googlenet, "googlenet", ensemble_cut=_GOOGLENET_CUT),
    # torchvision feeds these weights with pixels of -1 to 1 (its transform_input), not with
    # ImageNet's deviations.
    "googlenet_bn": _Entry(
        functools.partial(googlenet, variant="batch_norm"), "tf", ensemble_cut=_GOOGLENET_CUT
    ),
    "bn_inception": _Entry(
        bn_inception, "bn_inception", ensemble_cut=("inception_3c", "inception_4d")
    ),
    "resnet50": _Entry("ResNet50", "caffe", ensemble_cut=_RESNET_CUT),
    "resnet50_v1_5": _Entry(resnet50_v1_5, "torch", ensemble_cut=_RESNET_CUT),
    "resnet101": _Entry("ResNet101", "caffe"),
    "resnet50v2": _Entry("ResNet50V2", "tf"),
    "inceptionv3": _Entry("InceptionV3", "tf"),
    "mobilenetv2": _Entry("MobileNetV2", "tf", ("alpha",)),
    "mobilenetv3small": _Entry("MobileNetV3Small", "none", ("alpha",)),
    "mobilenetv3large": _Entry("MobileNetV3Large", "none", ("alpha",)),
    "efficientnetb0": _Entry("EfficientNetB0", "none"),
    "efficientnetv2b0": _Entry("EfficientNetV2B0", "none"),
    "efficientnetv2s": _Entry("EfficientNetV2S", "none"),
    "convnexttiny": _Entry("ConvNeXtTiny", "none"),
    "convnextsmall": _Entry("ConvNeXtSmall", "none"),
    "convnextbase": _Entry("ConvNeXtBase", "none"),
    "convnextlarge": _Entry("ConvNeXtLarge", "none"),
    "densenet121": _Entry("DenseNet121", "torch"),
}


for _name, _entry in _BACKBONES.items():
    register("backbone", name=_name)(_entry)


def names() -> tuple[str, ...]:
    """Return the backbones that `resolve` knows, besides the presets of KerasHub."""
    return tuple(registered("backbone"))


def check(name: str, weights: str | None = None, **options) -> None:
    """Refuse what `resolve` would refuse by the names alone: nothing is built, and no weights are
    read.

    Args:
        name: As in `resolve`.
        weights: As in `resolve`.
        **options: As in `resolve`.

    Raises:
        UserError: Unknown name or option, or weights that do not exist.

    Example:
        >>> check("mobilenetv2", alpha=0.35)
        >>> check("mobilenetv4")
        Traceback (most recent call last):
        tfdml.errors.UserError: backbone=mobilenetv4: unknown; did you mean 'mobilenetv2'? ...
    """
    if name.startswith(HUB):
        _refuse_arguments_of_preset(name, weights, options)
        check_preset(name.removeprefix(HUB))
    else:
        _find(name, weights, options)


def resolve(name: str, image_size: int, weights: str | None = None, **options) -> Backbone:
    """Build a backbone by name, with its weights.

    Args:
        name: One of `names()`, with options of its own or without: `mobilenetv2(alpha=0.35)`; case,
            `-` and `_` do not matter. To add one, register a function `(input_shape, **options)`
            that returns a network, for pixels from -1 to 1, or a `Backbone`. Or `hub:` and a preset
            of KerasHub (the extra `hub`): its name, such as `hub:dinov2_small`, or the folder that
            `save_to_preset` wrote. It comes with its weights.
        image_size: Height and width of the images in pixels.
        weights: `None` or `"none"` (random), `"imagenet"` (fetched by keras.applications), or the
            path of a `.weights.h5` file of the same architecture without its top.
        **options: The architecture's own, e.g. `alpha=0.35` for MobileNetV2, `width=64` for conv4.

    Raises:
        UserError: Unknown name or option, an image size the network cannot take, or weights that
            are missing or belong to another architecture.

    Example:
        >>> backbone = resolve("mobilenetv2(alpha=0.35)", image_size=96)
        >>> backbone.model.output_shape, backbone.scaling
        ((None, 3, 3, 1280), 'tf')
    """
    if name.startswith(HUB):
        _refuse_arguments_of_preset(name, weights, options)
        return Backbone(*load_preset(name.removeprefix(HUB), image_size))
    entry, options = _find(name, weights, options)
    weights = None if weights in _NO_WEIGHTS else weights
    hint = " (offline? pass the path of a weights file instead)" if weights == "imagenet" else ""
    with user_errors(
        Exception, f"cannot build backbone {name!r} at {image_size} px: {ERROR_TEXT}{hint}"
    ):
        shape = (image_size, image_size, 3)
        backbone = entry.make(shape, "imagenet" if weights == "imagenet" else None, options)
    if weights not in (None, "imagenet"):
        load_weights(backbone.model, weights)
    return backbone


def _refuse_arguments_of_preset(name: str, weights: str | None, options: dict[str, Any]) -> None:
    """Raise a `UserError` where a preset of KerasHub is given weights or options."""
    if options or weights not in _NO_WEIGHTS:
        raise UserError(
            f"backbone {name!r} comes with its weights and has no options: leave out weights and "
            "options"
        )


def _find(name: str, weights: str | None, options: dict[str, Any]) -> tuple[_Entry, dict[str, Any]]:
    """Return the entry of a name, and the options given with it or in it."""
    if "(" in name:
        call = Call.parse(name, "backbone")
        name, options = call.name, {**call.arguments, **options}
    spelled = {_plain(known): known for known in registered("backbone")}
    entry = find("backbone", spelled.get(_plain(name), name))
    if not isinstance(entry, _Entry):
        # A function of a user's module.
        entry = _Entry(entry, "tf", tuple(inspect.signature(entry).parameters)[1:])
    for option, value in options.items():
        if option not in entry.options:
            known = f"its options: {', '.join(entry.options)}" if entry.options else "it has none"
            raise UserError(f"backbone {name!r} has no option {option!r} ({known})")
        # MobileNet would build its narrowest network from a negative alpha without a word.
        if option in ("width", "alpha"):
            with user_errors(ValueError, f"cannot build backbone {name!r}: {ERROR_TEXT}"):
                integer(option, value, at_least=1) if option == "width" else number(
                    option, value, above=0
                )
    if weights in _NO_WEIGHTS:
        return entry, options
    if weights == "imagenet" and not isinstance(entry.build, str):
        raise UserError(f"there are no ImageNet weights for {name!r}; use weights=none or a file")
    if weights != "imagenet" and not os.path.isfile(weights):
        raise UserError(f"there is no file {weights}", weights=...)
    return entry, options


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(".", "")


def load_weights(model: keras.Model, path: str) -> None:
    """Load a `.weights.h5` file into a model, all of it or nothing.

    Keras passes over what a file has beyond the model; here a file must fit exactly. HDF5 has no
    checksum of its own: the SHA-256 is compared with `<path>.sha256` where that is there.

    Raises:
        UserError: The file is not one of Keras weights, belongs to another architecture, or is not
            the one of its checksum.
    """
    _check_sum(path)
    # h5py raises whatever the damaged place of a file brings about.
    damaged = user_errors(
        Exception, f"{path} is not an HDF5 file of Keras weights ({ERROR_TEXT})", weights=...
    )
    with damaged, h5py.File(path, "r") as file:
        arrays: list[tuple] = []
        file.visititems(
            lambda key, item: arrays.append(item.shape) if _is_weight(key, item) else None
        )
    wanted = [tuple(weight.shape) for weight in model.weights]
    # Normalization layers and the like keep nothing else in the file, so the multisets of shapes
    # must agree.
    if sorted(arrays) != sorted(wanted):
        raise UserError(f"{path} does not fit {model.name} (another width, or a top?)", weights=...)
    with user_errors(Exception, f"{path} does not fit {model.name}: {ERROR_TEXT}", weights=...):
        model.load_weights(path)


def _check_sum(path: str) -> None:
    """Compare a file with the checksum next to it, as `sha256sum` writes it."""
    beside = Path(f"{path}.sha256")
    if not beside.is_file():
        return
    with user_errors(OSError, f"{path} cannot be read: {ERROR_TEXT}", weights=...):
        expected = beside.read_text("utf-8", "replace").split()
        with open(path, "rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
    if checksum not in expected[:1]:
        raise UserError(
            f"{path} has another SHA-256, {checksum[:12]}..., than {beside} states: it is damaged "
            "or was changed; fetch it again, or remove that file",
            weights=...,
        )


def _is_weight(key: str, item) -> bool:
    # A compiled model's file also holds the state of its optimizer.
    return isinstance(item, h5py.Dataset) and not key.startswith("optimizer/")
