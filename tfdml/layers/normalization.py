"""Normalisation at the two ends of an embedder: of its pixels, and of its vectors."""

from __future__ import annotations

import keras
from keras import ops

from tfdml import pairwise
from tfdml.arguments import number, one_of
from tfdml.saving import SavedByArguments

_IMAGENET_MEAN = (123.675, 116.28, 103.53)
_IMAGENET_STD = (58.395, 57.12, 57.375)
# Caffe models: blue, green, red, with these means taken off (keras.applications' own figures, and those of the
# published GoogLeNet and BN-Inception).
_MEANS_BGR = {
    "caffe": (103.939, 116.779, 123.68),
    "googlenet": (104.0, 117.0, 123.0),
    "bn_inception": (104.0, 117.0, 128.0),
}


@keras.saving.register_keras_serializable("tfdml")
class L2Normalize(keras.layers.Layer):
    """x / |x| along the last axis, computed in float32 under every dtype policy.

    A zero vector stays zero and gets a zero gradient (`keras.layers.UnitNormalization` gives it one of 1e12).

    Example:
        >>> np.array(L2Normalize()(keras.ops.array([[3.0, 4.0]])))
        array([[0.6, 0.8]], dtype=float32)
    """

    def __init__(self, **kwargs):
        # float32 always: distances between unit vectors need all of its digits.
        super().__init__(**{**kwargs, "dtype": "float32"})

    def call(self, x):
        """(..., d) -> (..., d) of length 1."""
        return pairwise.l2_normalize(x)


@keras.saving.register_keras_serializable("tfdml")
class InputScaling(SavedByArguments, keras.layers.Layer):
    """Pixels 0-255 in RGB order to what a backbone was trained on.

    Args:
        mode: `"none"`: pixels as they are (backbones with their own preprocessing); `"unit"`: x / 255;
            `"tf"`: x / 127.5 - 1; `"torch"`: ImageNet mean and deviation; `"caffe"`: BGR minus the ImageNet mean;
            `"googlenet"` and `"bn_inception"`: BGR minus (104, 117, 123) and (104, 117, 128), as the Caffe models have
            it; or a mapping with `scale` and `offset`, three numbers each: x * scale + offset.

    Raises:
        ValueError: `mode` is none of these.

    Example:
        >>> np.array(InputScaling("tf")(keras.ops.full((1, 2, 2, 3), 255.0)))[0, 0, 0]
        array([1., 1., 1.], dtype=float32)
    """

    MODES = ("none", "unit", "tf", "torch", "caffe", "googlenet", "bn_inception")

    def __init__(self, mode="tf", **kwargs):
        super().__init__(**{**kwargs, "autocast": False})
        self.mode = _affine(mode) if isinstance(mode, dict) else one_of("mode", mode, self.MODES)

    def call(self, images):
        """(B, H, W, 3) of any dtype -> (B, H, W, 3) of the compute dtype."""
        # Scaled in float32 first: half precision has too few digits for differences of pixels.
        x = ops.cast(images, "float32")
        if isinstance(self.mode, dict):
            x = x * ops.array(self.mode["scale"], "float32") + ops.array(self.mode["offset"], "float32")
        elif self.mode == "unit":
            x = x / 255.0
        elif self.mode == "tf":
            x = x / 127.5 - 1.0
        elif self.mode == "torch":
            x = (x - ops.array(_IMAGENET_MEAN, "float32")) / ops.array(_IMAGENET_STD, "float32")
        elif self.mode in _MEANS_BGR:
            x = ops.flip(x, axis=-1) - ops.array(_MEANS_BGR[self.mode], "float32")
        return ops.cast(x, self.compute_dtype)

    def compute_output_spec(self, images):
        """Same shape, compute dtype."""
        return keras.KerasTensor(images.shape, dtype=self.compute_dtype)


def _affine(mode: dict) -> dict[str, list[float]]:
    if set(mode) != {"scale", "offset"} or any(len(numbers) != 3 for numbers in mode.values()):
        raise ValueError(f"mode must have scale and offset, three numbers each, not {mode!r}")
    return {name: [number(name, part) for part in numbers] for name, numbers in mode.items()}
