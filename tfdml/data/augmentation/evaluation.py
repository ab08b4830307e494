"""From an image to the view of it in evaluation and serving."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdml.data.augmentation.resizing import (
    BLACK,
    MODES,
    Color,
    resize_to_side,
    resize_window,
    source_window,
    target_size,
)
from tfdml.data.images.partial_decoding import whole
from tfdml.errors import UserError

# Of the arguments in configs that releases up to 0.1 wrote.
_EARLIER_NAMES = {"crop": "image_size", "mode": "resize_mode"}
_COLORS = {"black": BLACK, "white": (255, 255, 255)}


@dataclasses.dataclass(frozen=True)
class EvaluationTransform:
    """Resize, then the central crop: the same image gives the same pixels, in training, evaluation and serving.

    Args:
        resize: Pixels of the shorter side (`resize_mode="shorter"`, keeps proportions), of both
            (`resize_mode="squash"`), or of the longer side (`resize_mode="pad"`, keeps proportions; the image then
            lies on the centre of a square).
            Smaller images are enlarged.
        image_size: Pixels of the side S of the square cut from the centre, at most `resize`.
        resize_mode: `"shorter"`, `"squash"` or `"pad"`.
        pad_color: Of that square: `"black"`, `"white"`, `"R,G,B"` or three whole numbers of 0 to 255.

    The test-time forms of the papers: `(256, 224)` (JRD), `(256, 256, "squash")` (HORDE), `(293, 256, "squash")` (its
    authors' code), `(256, 227, "squash")` (ECAML on Cars-196) and `(256, 227, "pad", "white")` (elsewhere); `(224, 224,
    "pad")` shows the whole image undistorted.

    Raises:
        UserError: A number is out of range, or the mode or colour is unknown.

    Example:
        >>> transform = EvaluationTransform(resize=256, image_size=224)
        >>> transform(tf.zeros((480, 640, 3), tf.uint8)).shape
        TensorShape([224, 224, 3])
    """

    resize: int = 256
    image_size: int = 224
    resize_mode: str = "shorter"
    pad_color: Color = BLACK

    def __post_init__(self):
        check_sizes(self.resize, self.image_size, self.resize_mode)
        object.__setattr__(self, "pad_color", as_color(self.pad_color))

    @classmethod
    def of(cls, embedder: Any) -> EvaluationTransform:
        """The view in which an embedder is evaluated and served.

        Args:
            embedder: What has `resize`, `image_size`, `resize_mode` and `pad_color`, as every model that embeds has.
        """
        return cls(embedder.resize, embedder.image_size, embedder.resize_mode, embedder.pad_color)

    def window(self, size: tf.Tensor) -> tf.Tensor:
        """The part of an image that the view is made from; the rest need not be decoded.

        Args:
            size: (2,) int32, height and width of the image.

        Returns:
            (4,) int32: top, left, height and width.
        """
        if self.resize_mode == "pad":
            return whole(size)
        target, top_left = self._geometry(size)
        return source_window(tf.unstack(size), target, (*top_left, self.image_size, self.image_size))

    def finish(self, part: tf.Tensor, window: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        """The view, from the part of an image that `window` named; bit by bit that of the whole image.

        Args:
            part: (h, w, 3) uint8.
            window: (4,) int32, what `window` returned.
            size: (2,) int32, height and width of the whole image.

        Returns:
            (S, S, 3) uint8.
        """
        if self.resize_mode == "pad":
            return self(part)
        target, top_left = self._geometry(size)
        origin, size = tf.unstack(window[:2]), tf.unstack(size)
        view = resize_window(part, origin, size, target, (*top_left, self.image_size, self.image_size))
        return tf.ensure_shape(view, (self.image_size, self.image_size, 3))

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """Transforms one image or a batch of equally sized ones.

        Args:
            images: (H, W, 3) or (B, H, W, 3) uint8; sizes may be unknown while a graph is traced.

        Returns:
            (S, S, 3) or (B, S, S, 3) uint8.
        """
        resized = resize_to_side(images, self.resize, self.resize_mode, self.pad_color)
        size = tf.shape(resized)[-3:-1]
        top, left = self.place((size[0], size[1]))
        views = resized[..., top : top + self.image_size, left : left + self.image_size, :]
        return tf.ensure_shape(views, (*resized.shape[:-3], self.image_size, self.image_size, 3))

    def place(self, size: tuple) -> list:
        """The top and left edge of the crop in a resized image of this height and width."""
        return [(edge - self.image_size) // 2 for edge in size]

    def get_config(self) -> dict[str, Any]:
        """The arguments, as plain values that JSON can hold; `pad_color` where it is not black."""
        config = {**dataclasses.asdict(self), "pad_color": list(self.pad_color)}
        if self.pad_color == BLACK:
            # As before there were colours: what was made then is still known to be of the same view.
            del config["pad_color"]
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EvaluationTransform:
        """The transform that `get_config` described, also in releases up to 0.1."""
        return cls(**{_EARLIER_NAMES.get(name, name): value for name, value in config.items()})

    def _geometry(self, size: tf.Tensor) -> tuple[tuple, list]:
        """The size to which an image is resized, and the top and left edge of the crop."""
        target = target_size(tf.unstack(size), self.resize, self.resize_mode)
        return target, self.place(target)


def as_color(value: Any) -> Color:
    """Red, green and blue of a colour.

    Args:
        value: `"black"`, `"white"`, `"R,G,B"`, or three whole numbers of 0 to 255.

    Raises:
        UserError: It is none of these.

    Example:
        >>> as_color("white"), as_color("255, 128, 0")
        ((255, 255, 255), (255, 128, 0))
    """
    parts = _COLORS.get(value.strip().lower(), value.split(",")) if isinstance(value, str) else value
    try:
        red, green, blue = (int(part) for part in parts)
        if all(0 <= part <= 255 for part in (red, green, blue)):
            return red, green, blue
    except (OverflowError, TypeError, ValueError):
        pass
    raise UserError(f"`pad_color={value!r}`: write black, white, or red, green and blue of 0 to 255, e.g. 255,255,255")


def check_sizes(resize: int, image_size: int, resize_mode: str) -> None:
    """Raises an error where no view could be taken."""
    if resize_mode not in MODES:
        raise UserError(f"resize_mode must be one of {', '.join(MODES)}, not {resize_mode!r}")
    if not 1 <= image_size <= resize:
        raise UserError(f"image_size must be from 1 px to resize, but is {image_size}, and resize is {resize}")
