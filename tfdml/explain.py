"""Why two images are similar: heat maps of what they have in common, and pictures of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from tfdml import workarounds
from tfdml.arguments import integer
from tfdml.errors import UserError
from tfdml.models import Embedder

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["draw", "overlay", "similarity"]

# Images whose gradient is computed at once.
_BATCH = 8
# The share of the colors in an overlay, and the side of an image over the deviation of the blur of
# gradients.
_OPACITY = 0.6
_BLUR = 24


def similarity(
    embedder: keras.Model, first: Any, second: Any, steps: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    """Return a heat map for each of two images: how much each pixel adds to their cosine similarity
    s.

    The gradient of s is integrated along the line from an image of one color, the mean of the
    image, to the image (integrated gradients), and the result is blurred. So the map divides the
    difference of s between both ends among the pixels. It is negative where a pixel makes the
    images less similar. The length of an `Embedder`'s projection is kept at that of the image; a
    model of another kind is taken as it is. It takes `steps` forward and backward passes for each
    image.

    Args:
        embedder: Any model from images to unit vectors.
        first: (H, W, 3) pixels 0-255, in the view that the embedder is fed; see
            `tfdml.data.EvaluationTransform.of`.
        second: Likewise.
        steps: Points of the line.

    Returns:
        The maps of the first and of the second image, (H, W) float32. The mean of a map is the
        similarity minus that of the plain image, which 16 steps miss by a few hundredths.

    Raises:
        UserError: An image has another shape than the embedder takes.
        ValueError: `steps` is out of range.

    Example:
        >>> first, second = np.array(views, "float32") + np.random.default_rng(0).uniform(0, 255,
        ...     (2, 28, 28, 3))
        >>> maps = tfdml.explain.similarity(embedder, first, second)
        >>> maps[0].shape
        (28, 28)

    Source: Zhu, Yang and Chen, "Visual Explanation for Deep Metric Learning", TIP 2021;
    Sundararajan, Taly and Yan, "Axiomatic Attribution for Deep Networks", ICML 2017.
    """
    integer("steps", steps, at_least=1)
    shape = tuple(getattr(embedder, "view_shape", np.shape(first)))
    images = [np.asarray(image, "float32") for image in (first, second)]
    for name, image in zip(("first", "second"), images, strict=True):
        if image.shape != shape or len(shape) != 3:
            raise UserError(
                f"{name} has the shape {image.shape}; the embedder takes images of the shape "
                f"{shape}"
            )
    vectors = ops.cast(embedder(np.stack(images), training=False), "float32")
    one, other = (
        _integrated(embedder, images[place], vectors[1 - place], steps) for place in (0, 1)
    )
    return one, other


def _integrated(embedder: Any, image: np.ndarray, other: Any, steps: int) -> np.ndarray:
    """Return the integrated gradients of <embedder(x), other> from the mean color to the image,
    times H W."""
    from scipy.ndimage import gaussian_filter

    plain = image.mean(axis=(0, 1), keepdims=True)
    # Points t = u^2, as s changes fastest near the plain image.
    places = (np.arange(steps) + 0.5) / steps
    total = np.zeros_like(image)

    # One projection, scaled to length 1.
    plain_embedder = getattr(type(embedder), "represent", None) is Embedder.represent

    def project(x: Any) -> Any:
        vectors = (
            embedder.represent(x, training=False)["projection"] if plain_embedder else embedder(x)
        )
        return ops.cast(vectors, "float32")

    if plain_embedder:
        other = other / ops.maximum(ops.norm(project(image[None])), 1e-12)
    for first in range(0, steps, _BATCH):
        u = places[first : first + _BATCH].reshape(-1, 1, 1, 1).astype("float32")
        points = ops.convert_to_tensor(plain + u**2 * (image - plain))
        gradient = workarounds.gradient(lambda x: ops.sum(project(x) * other), points)
        total += np.sum(2 * u / steps * ops.convert_to_numpy(gradient), axis=0)
    parts = np.sum(total * (image - plain), axis=-1) * total[..., 0].size
    return gaussian_filter(parts, max(image.shape[:2]) / _BLUR).astype("float32")


def overlay(image: Any, heat: np.ndarray) -> np.ndarray:
    """Return an image with a heat map over it: brightest at its highest value, dark where it is 0
    or negative.

    Args:
        image: (H, W, 3) pixels 0-255.
        heat: (H, W), a map of `similarity`.

    Returns:
        (H, W, 3) uint8.

    Example:
        >>> overlay(np.zeros((2, 2, 3)), np.array([[0.0, -1.0], [0.5, 1.0]])).max(axis=-1)
        array([[  2,   2],
               [113, 153]], dtype=uint8)
    """
    import matplotlib

    highest = max(float(heat.max()), 1e-12)
    colors = matplotlib.colormaps["inferno"](np.clip(heat / highest, 0, 1))[..., :3] * 255
    mixed = _OPACITY * colors + (1 - _OPACITY) * np.asarray(image, "float64")
    return np.clip(np.rint(mixed), 0, 255).astype(np.uint8)


def draw(embedder: keras.Model, first: Any, second: Any) -> Image:
    """Draw two images next to one another, each with its heat map over it.

    A notebook displays the picture; `picture.save("pair.png")` writes it.

    Args:
        embedder: As `similarity`.
        first: Likewise.
        second: Likewise.

    Raises:
        UserError: As `similarity`.

    Example:
        >>> tfdml.explain.draw(embedder, views[0], views[1]).size
        (56, 28)
    """
    from PIL import Image

    maps = similarity(embedder, first, second)
    pictures = [overlay(image, heat) for image, heat in zip((first, second), maps, strict=True)]
    return Image.fromarray(np.concatenate(pictures, axis=1))
