"""Why two images are similar: heat maps of what they have in common, and pictures of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from tfdml.arguments import integer, one_of
from tfdml.errors import UserError
from tfdml.layers import AttentionPooling2D
from tfdml.models import Embedder

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["METHODS", "draw", "overlay", "similarity"]

METHODS = ("local", "gradient")
# Images whose gradient is computed at once.
_BATCH = 8
# The share of the colors in an overlay, and the side of an image over the deviation of the blur of gradients.
_OPACITY = 0.6
_BLUR = 24


def similarity(
    embedder: keras.Model, first: Any, second: Any, method: str = "gradient", steps: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    """Return a heat map for each of two images: how much each pixel adds to their cosine similarity s.

    `"local"` divides s among the positions of the feature map. With features x_i, pooled to f = sum_i w_i x_i, and an
    embedding e = (W f + b) / |W f + b|:

        s = <e, e'> = sum_i <W w_i x_i + b / n, e'> / |W f + b|

    Each term is a position's contribution. The division is exact for the poolings `"avg"`, `"max"`, `"gem"` (by Euler's
    theorem) and `"attention"` (with the weights that it has) and a dense layer. A `head` of several layers is replaced
    by its derivative at f, and what that leaves of s is divided equally. A class token, or a network's own pooling, is
    no sum of positions: the patches' features take its place, with equal weights.

    `"gradient"` works for every model from images to unit vectors. It integrates the gradient of s along the line from
    an image of one color, the mean of the image, to the image (integrated gradients), and blurs the result. So the map
    divides the difference of s between both ends among the pixels. The length |W f + b| is kept at that of the image;
    a model of another kind is taken as it is. The map has more detail than the other, and is negative where a pixel
    makes the images less similar. It takes `steps` forward and backward passes for each image.

    `"local"` takes one pass, but is coarse for small feature maps. In a transformer it may point elsewhere: attention
    mixes the patches, so that the features of one position are not of its pixels alone.

    Args:
        embedder: A `tfdml.models.Embedder`; for `"gradient"` any model from images to unit vectors.
        first: (H, W, 3) pixels 0-255, in the view that the embedder is fed; see `tfdml.data.EvaluationTransform.of`.
        second: Likewise.
        method: `"local"` or `"gradient"`.
        steps: Points of the line for `"gradient"`.

    Returns:
        The maps of the first and of the second image, (H, W) float32. The mean of a map is the similarity for
        `"local"`. For `"gradient"` it is the similarity minus that of the plain image, which 16 steps miss by a few
        hundredths.

    Raises:
        UserError: An image has another shape than the embedder takes, or `"local"` finds no feature map.
        ValueError: `method` or `steps` is out of range.

    Example:
        >>> first, second = np.array(views, "float32") + np.random.default_rng(0).uniform(0, 255, (2, 28, 28, 3))
        >>> maps = tfdml.explain.similarity(embedder, first, second, "local")
        >>> cosine = np.sum(embedder.predict(np.stack([first, second]), verbose=0).prod(axis=0))
        >>> maps[0].shape, bool(abs(maps[0].mean() - cosine) < 1e-5)
        ((28, 28), True)

    Source: Stylianou, Souvenir and Pless, "Visualizing Deep Similarity Networks", WACV 2019; Zhu, Yang and Chen,
    "Visual Explanation for Deep Metric Learning", TIP 2021; Sundararajan, Taly and Yan, "Axiomatic Attribution for
    Deep Networks", ICML 2017.
    """
    one_of("method", method, METHODS)
    integer("steps", steps, at_least=1)
    shape = tuple(getattr(embedder, "view_shape", np.shape(first)))
    images = [np.asarray(image, "float32") for image in (first, second)]
    for name, image in zip(("first", "second"), images, strict=True):
        if image.shape != shape or len(shape) != 3:
            raise UserError(f"{name} has the shape {image.shape}; the embedder takes images of the shape {shape}")
    if method == "local":
        return _local(embedder, np.stack(images))
    vectors = ops.cast(embedder(np.stack(images), training=False), "float32")
    one, other = (_integrated(embedder, images[place], vectors[1 - place], steps) for place in (0, 1))
    return one, other


def _is_plain(embedder: Any) -> bool:
    """Whether a model embeds as `Embedder` does: one projection, scaled to length 1."""
    return getattr(type(embedder), "represent", None) is Embedder.represent


def _local(embedder: Any, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the maps of contributions of the positions, enlarged to the size of the images."""
    if not _is_plain(embedder) or not embedder.gives_maps:
        raise UserError(f"{embedder.name}: its vectors are not pooled from one feature map; use method='gradient'")
    found = embedder.represent(images, training=False)
    features, pooled, projection, embeddings = (ops.cast(x, "float32") for x in found.values())
    lengths = ops.maximum(ops.norm(projection, axis=-1, keepdims=True), 1e-12)
    targets = ops.flip(embeddings, axis=0) / lengths
    slope = _gradient(lambda f: ops.sum(ops.cast(embedder.project(f)["projection"], "float32") * targets), pooled)
    if embedder.pool is None:
        slopes = slope[:, None, None] / (features.shape[1] * features.shape[2])
    elif isinstance(embedder.pool, AttentionPooling2D):
        slopes = slope[:, None, None] * embedder.pool.weights_of(features)[..., None]
    else:
        slopes = _gradient(lambda x: ops.sum(ops.cast(embedder.pool(x), "float32") * slope), features)
    parts = ops.sum(features * slopes, axis=-1)
    # Contributions times n: their mean is the similarity.
    parts = parts * (parts.shape[1] * parts.shape[2])
    large = ops.image.resize(parts[..., None], images.shape[1:3], "bilinear", data_format="channels_last")[..., 0]
    maps = ops.convert_to_numpy(large).astype("float64")
    cosine = float(ops.sum(embeddings[0] * embeddings[1]))
    maps += cosine - maps.mean(axis=(1, 2), keepdims=True)
    return maps[0].astype("float32"), maps[1].astype("float32")


def _integrated(embedder: Any, image: np.ndarray, other: Any, steps: int) -> np.ndarray:
    """Return the integrated gradients of <embedder(x), other> from the mean color to the image, times H W."""
    from scipy.ndimage import gaussian_filter

    plain = image.mean(axis=(0, 1), keepdims=True)
    # Points t = u^2, as s changes fastest near the plain image.
    places = (np.arange(steps) + 0.5) / steps
    total = np.zeros_like(image)

    def project(x: Any) -> Any:
        vectors = embedder.represent(x, training=False)["projection"] if _is_plain(embedder) else embedder(x)
        return ops.cast(vectors, "float32")

    if _is_plain(embedder):
        other = other / ops.maximum(ops.norm(project(image[None])), 1e-12)
    for first in range(0, steps, _BATCH):
        u = places[first : first + _BATCH].reshape(-1, 1, 1, 1).astype("float32")
        points = ops.convert_to_tensor(plain + u**2 * (image - plain))
        gradient = _gradient(lambda x: ops.sum(project(x) * other), points)
        total += np.sum(2 * u / steps * ops.convert_to_numpy(gradient), axis=0)
    parts = np.sum(total * (image - plain), axis=-1) * total[..., 0].size
    return gaussian_filter(parts, max(image.shape[:2]) / _BLUR).astype("float32")


def _gradient(function: Callable[[Any], Any], x: Any) -> Any:
    """Return the gradient of a function at x, of a scalar, on the backend in use."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return jax.grad(function)(x)
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(x)
            value = function(x)
        return tape.gradient(value, x)
    x = x.detach().requires_grad_()
    function(x).backward()
    return x.grad


def overlay(image: Any, heat: np.ndarray) -> np.ndarray:
    """Return an image with a heat map over it: brightest at its highest value, dark where it is 0 or negative.

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


def draw(embedder: keras.Model, first: Any, second: Any, method: str = "gradient") -> Image:
    """Draw two images next to one another, each with its heat map over it.

    A notebook displays the picture; `picture.save("pair.png")` writes it.

    Args:
        embedder: As `similarity`.
        first: Likewise.
        second: Likewise.
        method: Likewise.

    Raises:
        UserError: As `similarity`.

    Example:
        >>> tfdml.explain.draw(embedder, views[0], views[1]).size
        (56, 28)
    """
    from PIL import Image

    maps = similarity(embedder, first, second, method)
    shown = [overlay(image, heat) for image, heat in zip((first, second), maps, strict=True)]
    return Image.fromarray(np.concatenate(shown, axis=1))
