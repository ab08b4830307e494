"""From a decoded image to the crop that the network sees, in training and in evaluation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfdml.errors import UserError

_MODES = ("shorter", "squash")
_KINDS = ("random_crop", "random_resized_crop", "none")
# A random resized crop that has not fitted after this many tries is the largest central one.
_TRIES = 10


@dataclasses.dataclass(frozen=True)
class EvaluationTransform:
    """Resize, then the central crop: the same image gives the same pixels, in training, evaluation and serving.

    Args:
        resize: Pixels of the shorter side (`mode="shorter"`, keeps proportions) or of both (`mode="squash"`).
            Smaller images are enlarged.
        crop: Pixels of the square cut from the centre, at most `resize`.
        mode: `"shorter"` or `"squash"`.

    Raises:
        UserError: A number is out of range, or the mode is unknown.

    Example:
        >>> transform = EvaluationTransform(resize=256, crop=224)
        >>> transform(tf.zeros((480, 640, 3), tf.uint8)).shape
        TensorShape([224, 224, 3])
    """

    resize: int = 256
    crop: int = 224
    mode: str = "shorter"

    def __post_init__(self):
        _check_sizes(self.resize, self.crop, self.mode)

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """Transforms one image or a batch of equally sized ones.

        Args:
            images: (H, W, 3) or (B, H, W, 3) uint8; sizes may be unknown while a graph is traced.

        Returns:
            (crop, crop, 3) or (B, crop, crop, 3) uint8.
        """
        return _central_crop(_resize_to_side(images, self.resize, self.mode), self.crop)

    def get_config(self) -> dict[str, Any]:
        """The arguments, as plain values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> EvaluationTransform:
        """The transform that `get_config` described."""
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class TrainTransform:
    """Augmentation by crop and mirror image.

    All chance comes in from outside, as `draws`: a transform called twice with the same draws gives the same bits.
    The work has two parts. `prepare` is the same for every epoch, so that its result can be kept in memory; `vary`
    uses the draws.

    Args:
        kind: `"random_crop"`: resize to `resize` as in evaluation, then a crop at a random place.
            `"random_resized_crop"`: a random part of the image, of random area and proportions, resized to the crop.
            `"none"`: the evaluation view.
        resize: See `EvaluationTransform`; without effect for `"random_resized_crop"`.
        crop: Pixels of the square output, at most `resize`.
        mode: See `EvaluationTransform`.
        scale: Smallest and largest part of the image's area for `"random_resized_crop"`.
        ratio: Smallest and largest width / height for `"random_resized_crop"`, drawn evenly on a log scale.
        flip: Whether to mirror every second image, at random, left to right.

    Raises:
        UserError: A number is out of range, or the kind or mode is unknown.

    Example:
        >>> transform = TrainTransform(kind="random_resized_crop", crop=224)
        >>> draws = transform.draw(seed=0, step=7, batch_size=32)
        >>> transform(tf.zeros((480, 640, 3), tf.uint8), draws[0]).shape
        TensorShape([224, 224, 3])
    """

    kind: str = "random_crop"
    resize: int = 256
    crop: int = 224
    mode: str = "shorter"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True

    def __post_init__(self):
        object.__setattr__(self, "scale", tuple(self.scale))
        object.__setattr__(self, "ratio", tuple(self.ratio))
        if self.kind not in _KINDS:
            raise UserError(f"a train transform's kind must be one of {', '.join(_KINDS)}, not {self.kind!r}")
        # A random resized crop never passes through `resize`.
        resize = self.crop if self.kind == "random_resized_crop" else self.resize
        _check_sizes(resize, self.crop, self.mode)
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UserError(f"scale must be (low, high) with 0 < low <= high <= 1, not {self.scale}")
        if len(self.ratio) != 2 or not 0 < self.ratio[0] <= self.ratio[1]:
            raise UserError(f"ratio must be (low, high) with 0 < low <= high, not {self.ratio}")

    @property
    def varies_size(self) -> bool:
        """Whether the part that is cut out differs in size from image to image."""
        return self.kind == "random_resized_crop"

    def draw(self, seed: int, step: int | tf.Tensor, batch_size: int) -> tf.Tensor:
        """The draws of a step: the same for the same seed, step and position, whatever ran before.

        Args:
            seed: A non-negative integer.
            step: The training step.
            batch_size: B.

        Returns:
            (B, D) float32, uniform on [0, 1), one row per position of the batch.
        """
        size = 1 + (2 * _TRIES + 2 if self.varies_size else 2)
        key = tf.stack([tf.constant(seed, tf.int64), tf.cast(step, tf.int64)])
        return tf.random.stateless_uniform((batch_size, size), key, alg="philox")

    def prepare(self, images: tf.Tensor) -> tf.Tensor:
        """The part without chance; it leaves its own result as it is.

        Args:
            images: (H, W, 3) or (B, H, W, 3) uint8.

        Returns:
            (H', W', 3) or (B, H', W', 3) uint8: resized to `resize`, or unchanged for `"random_resized_crop"`.
        """
        return images if self.varies_size else _resize_to_side(images, self.resize, self.mode)

    def vary(self, image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """The random part, for one image.

        Args:
            image: (H, W, 3) uint8, what `prepare` returned.
            draws: (D,) float32, a row of `draw`.

        Returns:
            (crop, crop, 3) uint8.
        """
        if self.varies_size:
            image = self._random_part(image, draws)
        else:
            top, left = self._offsets(tf.shape(image)[:2], draws)
            image = tf.slice(image, [top, left, 0], [self.crop, self.crop, 3])
        if self.flip:
            image = tf.raw_ops.Reverse(tensor=image, dims=tf.stack([False, draws[0] < 0.5, False]))
        return tf.ensure_shape(image, (self.crop, self.crop, 3))

    def vary_batch(self, images: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """`vary` for equally sized images at once, bit by bit the same; not for `"random_resized_crop"`.

        Args:
            images: (B, H, W, 3) uint8.
            draws: (B, D) float32.

        Returns:
            (B, crop, crop, 3) uint8.
        """
        if self.varies_size:
            raise ValueError("crops that vary in size are made one by one: use vary")
        size = tf.shape(images)[1:3]
        top, left = self._offsets(size, draws)
        within = tf.range(self.crop)
        rows, columns = top[..., None] + within, left[..., None] + within
        if self.flip:
            columns = tf.where(draws[:, :1] < 0.5, columns[..., ::-1], columns)
        # Rows first: whole rows are copied fast, and the slow copy of single pixels has fewer left to do.
        images = tf.gather(images, tf.broadcast_to(rows, (tf.shape(draws)[0], self.crop)), batch_dims=1, axis=1)
        return tf.gather(images, tf.broadcast_to(columns, (tf.shape(draws)[0], self.crop)), batch_dims=1, axis=2)

    def __call__(self, image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """Transforms one image.

        Args:
            image: (H, W, 3) uint8.
            draws: (D,) float32, a row of `draw`.

        Returns:
            (crop, crop, 3) uint8.
        """
        return self.vary(self.prepare(image), draws)

    def get_config(self) -> dict[str, Any]:
        """The arguments, as plain values that JSON can hold."""
        return {**dataclasses.asdict(self), "scale": list(self.scale), "ratio": list(self.ratio)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TrainTransform:
        """The transform that `get_config` described."""
        return cls(**config)

    def _offsets(self, size: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Top and left edge of the crop: at random, or central for `"none"`."""
        room = size - self.crop
        if self.kind == "none":
            return room[0] // 2, room[1] // 2
        return _place(draws[..., 1], room[0]), _place(draws[..., 2], room[1])

    def _random_part(self, image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        size = tf.shape(image)[:2]
        height, width = tf.cast(size[0], tf.float32), tf.cast(size[1], tf.float32)
        area = height * width * _between(draws[3 : 3 + _TRIES], *self.scale)
        low, high = self.ratio
        ratio = tf.exp(_between(draws[3 + _TRIES :], math.log(low), math.log(high)))
        heights, widths = tf.round(tf.sqrt(area / ratio)), tf.round(tf.sqrt(area * ratio))
        fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
        # Where no try fits: the largest central part with a permitted ratio.
        fallback_height = tf.minimum(height, tf.maximum(1.0, tf.round(width / low)))
        fallback_width = tf.minimum(width, tf.maximum(1.0, tf.round(height * high)))
        found = tf.reduce_any(fits)
        first = tf.argmax(tf.cast(fits, tf.int32))
        part_height = tf.cast(tf.where(found, heights[first], fallback_height), tf.int32)
        part_width = tf.cast(tf.where(found, widths[first], fallback_width), tf.int32)
        room = size - tf.stack([part_height, part_width])
        top = tf.where(found, _place(draws[1], room[0]), room[0] // 2)
        left = tf.where(found, _place(draws[2], room[1]), room[1] // 2)
        part = tf.slice(image, [top, left, 0], tf.stack([part_height, part_width, 3]))
        return _resize(part, [self.crop, self.crop])


def _place(draw: tf.Tensor, room: tf.Tensor) -> tf.Tensor:
    """A whole number from 0 to `room`, evenly, from a uniform draw."""
    # The product can round up to room + 1 itself.
    return tf.minimum(tf.cast(draw * tf.cast(room + 1, tf.float32), tf.int32), room)


def _between(draw: tf.Tensor, low: float, high: float) -> tf.Tensor:
    return low + draw * (high - low)


def _central_crop(images: tf.Tensor, crop: int) -> tf.Tensor:
    size = tf.shape(images)[-3:-1]
    top, left = (size[0] - crop) // 2, (size[1] - crop) // 2
    images = images[..., top : top + crop, left : left + crop, :]
    return tf.ensure_shape(images, (*images.shape[:-3], crop, crop, 3))


def _resize_to_side(images: tf.Tensor, side: int, mode: str) -> tf.Tensor:
    if mode == "squash":
        return _resize(images, [side, side])
    height, width = images.shape[-3:-1]
    if height is None or width is None:
        height, width = tf.unstack(tf.shape(images)[-3:-1])
        shorter = tf.minimum(height, width)
    else:
        shorter = min(height, width)
    # Rounded to the nearest; exact for the shorter side itself.
    return _resize(images, [(2 * edge * side + shorter) // (2 * shorter) for edge in (height, width)])


def _resize(images: tf.Tensor, size: list[int] | list[tf.Tensor]) -> tf.Tensor:
    """Bilinear with antialiasing, as Pillow's; rounded to uint8, untouched where the size is right already."""

    def resized() -> tf.Tensor:
        values = tf.image.resize(images, tf.stack(size), method="bilinear", antialias=True)
        # Weighted means of 0 .. 255 need no clipping, and cutting off after adding a half rounds them.
        return tf.cast(values + 0.5, tf.uint8)

    if images.shape[-3:-1].is_fully_defined() and all(isinstance(edge, int) for edge in size):
        return images if list(images.shape[-3:-1]) == size else resized()
    same = tf.reduce_all(tf.shape(images)[-3:-1] == tf.stack(size))
    return tf.cond(same, lambda: images, resized)


def _check_sizes(resize: int, crop: int, mode: str) -> None:
    if mode not in _MODES:
        raise UserError(f"a transform's mode must be one of {', '.join(_MODES)}, not {mode!r}")
    if crop < 1 or resize < crop:
        raise UserError(f"crop must be from 1 px to resize, but crop is {crop} and resize is {resize}")
