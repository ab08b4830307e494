"""Embedders whose weights lie between those of two others, and how far."""

from collections.abc import Callable, Iterable

import keras
import numpy as np
from keras import ops

from tfdml.arguments import number
from tfdml.models.embedder import Embedder, build_once
from tfdml.models.normalization import batch_norms

#: The shares among which one is chosen.
SHARES = (0.25, 0.5, 0.75, 0.875)


def interpolate(
    one: Embedder,
    other: Embedder,
    share: float,
    backbone_alone: bool = False,
    batches: Iterable | None = None,
) -> Embedder:
    """Return an embedder whose weights lie between those of two, such as the start and the end of
    fine-tuning.

    Each is (1 - share) * one + share * other, computed in float64. So are the moving means and
    variances of BatchNorm, which are the same in both where it is frozen, unless `batches` estimate
    them. Integer variables are those of `other`.

    Args:
        one: A built embedder: the start.
        other: A built embedder of the same network: the end. Its settings are the result's.
        share: 0 .. 1, the weight of `other`.
        backbone_alone: Take the projection of `other` as it is: where that of `one` is random, or
            has another size.
        batches: Batches of images, as for training. The moving means and variances of BatchNorm
            become the means of those of these batches. None: they are interpolated.

    Raises:
        ValueError: The share is out of range, an embedder is not built, their weights differ in
            number or shape, or there are batches and the statistics of BatchNorm do not train.

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
    if batches is not None:
        _estimate_statistics(merged, batches)
    return merged


def choose_share(
    one: Embedder,
    other: Embedder,
    measure: Callable[[Embedder], tuple[float, float]],
    backbone_alone: bool = False,
) -> tuple[float, dict[float, tuple[float, float]]]:
    """Return the share that keeps most of what was learned and returns most of what was forgotten,
    and what was measured for it.

    Of both, each share has a part of the way from start to end: of the target's metric from share 0
    to 1, of the second data set's from share 1 to 0. The share with the highest sum is chosen. It
    is 1 where nothing was learned or nothing was forgotten.

    Args:
        one: The start.
        other: The end.
        measure: Returns a metric of an embedder on held-out classes of the target, and on a second
            data set.
        backbone_alone: As in `interpolate`.

    Returns:
        The share, and both metrics by share.
    """
    metrics = {}
    for share in (0.0, *SHARES, 1.0):
        metrics[share] = measure(interpolate(one, other, share, backbone_alone))
    learned = metrics[1.0][0] - metrics[0.0][0]
    forgotten = metrics[0.0][1] - metrics[1.0][1]
    if learned <= 0 or forgotten <= 0:
        return 1.0, metrics
    ways = {}
    for share, (target, second) in metrics.items():
        kept = (target - metrics[0.0][0]) / learned
        ways[share] = kept + (second - metrics[1.0][1]) / forgotten
    return max(ways, key=ways.__getitem__), metrics


def _estimate_statistics(model: Embedder, batches: Iterable) -> None:
    if model.batch_norm != "train":
        raise ValueError(f"batch_norm={model.batch_norm!r} keeps its statistics: leave out batches")
    layers = batch_norms(model)
    usual = [layer.momentum for layer in layers]
    for count, images in enumerate(batches):
        # A mean of all batches: each has the weight of those before it.
        for layer in layers:
            layer.momentum = count / (count + 1)
        model(images, training=True)
    for layer, momentum in zip(layers, usual, strict=True):
        layer.momentum = momentum


def _shapes(model: keras.Model) -> list[tuple[int, ...]]:
    return [tuple(weight.shape) for weight in model.weights]
