"""Embedders whose weights lie between those of two others."""

import keras
import numpy as np
from keras import ops

from tfdml.arguments import number
from tfdml.models.embedder import Embedder, build_once


def interpolate(
    one: Embedder, other: Embedder, share: float, backbone_alone: bool = False
) -> Embedder:
    """Return an embedder whose weights lie between those of two, such as the start and the end of
    fine-tuning.

    Each is (1 - share) * one + share * other, computed in float64. So are the moving means and
    variances of BatchNorm, which are the same in both where it is frozen. Integer variables are
    those of `other`.

    Args:
        one: A built embedder: the start.
        other: A built embedder of the same network: the end. Its settings are the result's.
        share: 0 .. 1, the weight of `other`.
        backbone_alone: Take the projection of `other` as it is: where that of `one` is random, or
            has another size.

    Raises:
        ValueError: The share is out of range, an embedder is not built, or their weights differ in
            number or shape.

    Example:
        >>> start, end = (Embedder("conv4(width=4)", 8, image_size=16) for _ in range(2))
        >>> for model in (start, end):
        ...     model.build((None, 16, 16, 3))
        >>> merged = interpolate(start, end, 0.75)

    Source: Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022, eq. 1.
    """
    share = number("share", share, at_least=0, at_most=1)
    if not (one.built and other.built):
        raise ValueError("one and other must be built: call each once on images")
    merged = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(other))
    build_once(merged, (None, *other.view_shape))
    merged.set_weights(other.get_weights())
    start, target = (one.backbone, merged.backbone) if backbone_alone else (one, merged)
    if _shapes(start) != _shapes(target):
        raise ValueError(
            "one and other must have as many weights of the same shapes; of two projections "
            "backbone_alone takes that of other"
        )
    for weight, first in zip(target.weights, start.weights, strict=True):
        if "float" in str(weight.dtype):
            begin = ops.convert_to_numpy(first).astype(np.float64)
            end = ops.convert_to_numpy(weight).astype(np.float64)
            weight.assign((1 - share) * begin + share * end)
    return merged


def _shapes(model: keras.Model) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in model.weights]
