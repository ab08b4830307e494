"""From the arrays of a checkpoint to the weights of a backbone: every one by name, all or nothing."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator

import keras
import numpy as np

from tfdml.backbones.bn_inception import bn_inception
from tfdml.backbones.conversion import layers
from tfdml.backbones.conversion.readers import read_checkpoint
from tfdml.backbones.googlenet import googlenet
from tfdml.backbones.resnet import resnet50_v1_5
from tfdml.errors import UserError

# What comes after the feature map, and counters: left out without complaint.
_TOP = re.compile(r"(last_linear|fc|fc1000|classifier|aux\d?|loss\d)\b.*|loss\d_.*|.*\.num_batches_tracked")
_TORCH_NORM = ("weight", "bias", "running_mean", "running_var")


@dataclasses.dataclass(frozen=True)
class _Architecture:
    make: Callable[..., keras.Model]
    epsilon: float
    torch: Callable[[str], str] | None
    caffe: Callable[[str], str] | None


def _keras_resnet50(input_shape=(None, None, 3)) -> keras.Model:
    return keras.applications.ResNet50(include_top=False, weights=None, input_shape=input_shape)


_ARCHITECTURES = {
    "bn_inception": _Architecture(bn_inception, 1e-5, layers.same_name, layers.same_name),
    "googlenet": _Architecture(googlenet, 0.0, layers.same_name, layers.same_name),
    "googlenet_bn": _Architecture(lambda: googlenet(variant="batch_norm"), 1e-3, layers.torchvision_googlenet, None),
    "resnet50": _Architecture(_keras_resnet50, 1e-5, layers.torchvision_resnet, layers.caffe_resnet),
    "resnet50_v1_5": _Architecture(resnet50_v1_5, 1e-5, layers.torchvision_resnet, None),
}
ARCHITECTURES = tuple(_ARCHITECTURES)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A backbone with the weights of a checkpoint.

    Args:
        model: The backbone.
        left_out: The checkpoint's arrays that are not in it: the classifier, counters, and what was allowed.
    """

    model: keras.Model
    left_out: tuple[str, ...]


def convert(
    path: str | os.PathLike, architecture: str, stride_in_1x1: bool = False, allow_extra: bool = False
) -> Conversion:
    """Build a backbone with the weights of a PyTorch or Caffe checkpoint.

    Names may have a prefix in common (`module.`, `backbone.`). The outputs are those of the original network:
    batch normalisation with another epsilon than Keras's layer is made up for in its variances.

    Args:
        path: A file that `read_checkpoint` reads.
        architecture: One of `ARCHITECTURES`. `resnet50` is `keras.applications.ResNet50`, whose blocks have their
            stride in the first 1 x 1 convolution, as Caffe's; torchvision's checkpoints are of `resnet50_v1_5`.
        stride_in_1x1: For `resnet50` from a PyTorch checkpoint: it is of a network with the stride there (a port
            of Caffe's). Nothing in the file tells.
        allow_extra: Leave out arrays that the backbone has no place for, instead of refusing them.

    Raises:
        UserError: The file cannot be read, or its arrays are not those of the architecture; they are named.

    Example:
        >>> converted = convert("bn_inception-52deb4733.pth", "bn_inception")
        >>> converted.model.save_weights("bn_inception.weights.h5")
    """
    if architecture not in _ARCHITECTURES:
        raise UserError(f"`architecture={architecture}`: must be one of {', '.join(ARCHITECTURES)}")
    entry = _ARCHITECTURES[architecture]
    arrays = {_tidy(name): array for name, array in read_checkpoint(path).items()}
    caffe = _is_caffe(path, arrays)
    rename = entry.caffe if caffe else entry.torch
    if rename is None:
        other = {"googlenet_bn": "googlenet", "resnet50_v1_5": "resnet50"}[architecture]
        raise UserError(f"`path={path}` is a Caffe checkpoint; there are none of {architecture}, but of {other}")
    if architecture == "resnet50" and not caffe and not stride_in_1x1:
        raise UserError(
            f"`path={path}`: PyTorch's ResNet-50 (torchvision) has the stride of a block in its 3x3 convolution, "
            "keras.applications.ResNet50 in the 1x1 before it, so the weights would fit and the features be wrong. Use "
            "`architecture='resnet50_v1_5'`; or `stride_in_1x1=True` if the checkpoint is of a network ported from "
            "Caffe"
        )
    model = entry.make()
    source = _Source(path, arrays, caffe, rename, entry.epsilon)
    source.strip_prefix(next(layer.name for layer in model.layers if isinstance(layer, keras.layers.Conv2D)))
    values = [(layer, source.weights_of(layer)) for layer in _layers_with_weights(model)]
    source.check(architecture, allow_extra)
    for layer, weights in values:
        layer.set_weights(weights)
    return Conversion(model, source.left_out())


def _is_caffe(path: str | os.PathLike, arrays: dict[str, np.ndarray]) -> bool:
    """Whether arrays are called as Caffe's layers (`conv1.0`), not as PyTorch's (`conv1.weight`)."""
    if any(name.endswith(".weight") for name in arrays):
        return False
    if any(re.search(r"\.\d+$", name) for name in arrays):
        return True
    named = ", ".join(sorted(arrays)[:3]) + (" ..." if len(arrays) > 3 else "")
    raise UserError(
        f"`path={path}` is no checkpoint of a network: its arrays ({named}) are not called as PyTorch or Caffe call "
        "the weights of layers (conv1.weight, conv1.0)"
    )


def _tidy(name: str) -> str:
    """Caffe's `conv1/7x7_s2.0` -> `conv1_7x7_s2.0`: a Keras layer's name has no slash."""
    return name.replace("/", "_")


def _layers_with_weights(model: keras.Model) -> Iterator[keras.layers.Layer]:
    kinds = (keras.layers.Conv2D, keras.layers.BatchNormalization)
    for layer in model.layers:
        if layer.weights and not isinstance(layer, kinds):
            raise TypeError(f"{layer.name} is of a kind that no checkpoint has weights for")
        if layer.weights:
            yield layer


class _Source:
    """The arrays of a checkpoint, and what is wrong with them."""

    def __init__(self, path, arrays: dict[str, np.ndarray], caffe: bool, rename: Callable[[str], str], epsilon: float):
        self.path = path
        self.arrays = arrays
        self.caffe = caffe
        self.rename = rename
        self.epsilon = epsilon
        self.used: set[str] = set()
        self.problems: list[str] = []

    def strip_prefix(self, layer: str) -> None:
        """Take off what all names have before the first layer's."""
        first = f"{self.rename(layer)}.{'0' if self.caffe else 'weight'}"
        prefixes = [name.removesuffix(first) for name in self.arrays if name.endswith(f".{first}")]
        if first not in self.arrays and prefixes:
            prefix = min(prefixes, key=len)
            self.arrays = {name.removeprefix(prefix): array for name, array in self.arrays.items()}

    def weights_of(self, layer) -> list[np.ndarray]:
        """The weights of a Keras layer, in its order; zeros where something is wrong."""
        shapes = [tuple(weight.shape) for weight in layer.weights]
        if isinstance(layer, keras.layers.Conv2D):
            found = self._convolution(self.rename(layer.name), layer.use_bias, shapes)
        else:
            found = self._normalisation(self.rename(layer.name), shapes[0], layer.epsilon)
        return [np.zeros(shape) if array is None else array for shape, array in zip(shapes, found, strict=True)]

    def _convolution(self, name: str, use_bias: bool, shapes) -> list[np.ndarray | None]:
        kernel, bias = (f"{name}.0", f"{name}.1") if self.caffe else (f"{name}.weight", f"{name}.bias")
        height, width, channels, filters = shapes[0]
        # PyTorch and Caffe: (out, in, height, width).
        array = self._take(kernel, (filters, channels, height, width))
        found = [None if array is None else array.transpose(2, 3, 1, 0)]
        if use_bias:
            # A convolution before batch normalisation may have none, which is one of 0.
            optional = self.epsilon > 0 and bias not in self.arrays
            found.append(np.zeros(shapes[1]) if optional else self._take(bias, shapes[1]))
        return found

    def _normalisation(self, name: str, shape, epsilon: float) -> list[np.ndarray | None]:
        if not self.caffe:
            gamma, beta, mean, variance = (self._take(f"{name}.{slot}", shape) for slot in _TORCH_NORM)
        elif f"{name}.3" in self.arrays:
            # The "BN" layer of the Caffe branch that BN-Inception was trained in.
            gamma, beta, mean, variance = (self._take(f"{name}.{slot}", shape) for slot in range(4))
        else:
            mean, variance = (self._take(f"{name}.{slot}", shape) for slot in range(2))
            factor = self._take(f"{name}.2", (1,))
            if mean is not None and variance is not None and factor is not None:
                # Caffe keeps sums over a decaying count of batches.
                count = float(factor[0])
                mean, variance = (array / count if count else 0.0 * array for array in (mean, variance))
            names = layers.caffe_scales(name)
            scale = next((candidate for candidate in names if f"{candidate}.0" in self.arrays), names[0])
            gamma, beta = (self._take(f"{scale}.{slot}", shape) for slot in range(2))
        if variance is not None:
            variance = variance + (self.epsilon - epsilon)
        return [gamma, beta, mean, variance]

    def _take(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        if name not in self.arrays:
            self.problems.append(f"{name} {shape} is missing")
            return None
        self.used.add(name)
        array = self.arrays[name]
        if len(shape) == 1 and array.size == shape[0] == max(array.shape, default=1):
            # Caffe's vectors, and some of their ports, have axes of length 1.
            array = array.reshape(shape)
        if array.shape != shape:
            self.problems.append(f"{name} has shape {array.shape}, not {shape}")
            return None
        if not np.all(np.isfinite(array)):
            self.problems.append(f"{name} holds numbers that are not finite")
            return None
        return array.astype(np.float32)

    def check(self, architecture: str, allow_extra: bool) -> None:
        """Raise a UserError that names what does not fit."""
        extra = [name for name in self.arrays if name not in self.used and not _TOP.fullmatch(name)]
        if not allow_extra and not self.problems:
            self.problems += [f"{name} is not part of it" for name in extra]
            hint = "; `allow_extra=True` leaves such arrays out" if extra else ""
        else:
            hint = f"; it has {', '.join(extra[:3])} ..." if extra else ""
        if self.problems:
            more = f" and {len(self.problems) - 5} more" if len(self.problems) > 5 else ""
            named = "; ".join(self.problems[:5])
            raise UserError(f"`path={self.path}` does not fit {architecture}: {named}{more}{hint}")

    def left_out(self) -> tuple[str, ...]:
        """The arrays that were not used."""
        return tuple(sorted(set(self.arrays) - self.used))
