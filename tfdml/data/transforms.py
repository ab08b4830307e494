"""The views of images: augmentation in training, the one view of evaluation and serving, and their
resizing.

Resizing is bilinear with antialiasing, as Pillow's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

import tensorflow as tf

from tfdml.data.policies import Policy
from tfdml.errors import UserError, check_choice, user_errors
from tfdml.options import Color

Edge: TypeAlias = "int | tf.Tensor"
Size: TypeAlias = "tuple[Edge, Edge]"  # height and width
MODES = ("pad", "shorter", "squash")
BLACK = Color((0, 0, 0))


def resize(images: tf.Tensor, size: Size) -> tf.Tensor:
    """Images resized to `size`, rounded to uint8; returned as they are where the size is right
    already.

    Args:
        images: (H, W, 3) or (B, H, W, 3) uint8; sizes may be unknown while a graph is traced.
        size: Height and width of the result.

    Returns:
        (*size, 3) or (B, *size, 3) uint8.

    Example:
        >>> resize(tf.zeros((480, 640, 3), tf.uint8), (120, 160)).shape
        TensorShape([120, 160, 3])
    """

    if images.shape[-3:-1].is_fully_defined() and all(isinstance(edge, int) for edge in size):
        return images if tuple(images.shape[-3:-1]) == tuple(size) else _resampled(images, size)
    same = tf.reduce_all(tf.shape(images)[-3:-1] == tf.stack(size))
    return _static(tf.cond(same, lambda: images, lambda: _resampled(images, size)), size)


def _resampled(images: tf.Tensor, size: Size) -> tf.Tensor:
    # The bits of tf.image.resize(antialias=True), which takes 1.7 times as long from 500 x 375 to
    # 256 pixels: its horizontal pass works on single pixels. Here both passes are vertical, the
    # image transposed in between.
    height, width = size
    part_height, part_width = _edges(images)
    rows = tf.reshape(images, tf.stack([-1, part_height, part_width * 3]))
    rows = _resampled_rows(rows, height)
    columns = tf.reshape(tf.linalg.matrix_transpose(rows), tf.stack([-1, part_width, 3 * height]))
    columns = _resampled_rows(columns, width)
    # Weighted means of 0 .. 255 need no clipping, and cutting off after adding a half rounds them.
    values = tf.cast(columns + 0.5, tf.uint8)
    values = tf.reshape(values, tf.stack([-1, width * 3, height]))
    shape = tf.concat([tf.shape(images)[:-3], tf.stack([height, width, 3])], 0)
    return _static(tf.reshape(tf.linalg.matrix_transpose(values), shape), size)


def _resampled_rows(rows: tf.Tensor, count: Edge) -> tf.Tensor:
    """(B, n, m) to (B, count, m) float32."""
    scale = tf.cast(count, tf.float32) / tf.cast(tf.shape(rows)[1], tf.float32)
    scales = tf.stack([scale, 1.0])
    size = tf.stack([count, 1])
    resized = tf.raw_ops.ScaleAndTranslate(
        images=tf.expand_dims(rows, 2),
        size=size,
        scale=scales,
        translation=[0.0, 0.0],
        kernel_type="triangle",
        antialias=True,
    )
    return tf.squeeze(resized, 2)


def target_size(size: Size, side: int, mode: str) -> Size:
    """Height and width to which an image of `size` is resized.

    Args:
        size: Its height and width.
        side: Pixels of the result's shorter side (`mode="shorter"`), of both sides (`"squash"`) or
            of the longer side (`"pad"`).
        mode: One of `MODES`.

    Example:
        >>> target_size((480, 640), 256, "shorter")
        (256, 341)
    """
    if mode == "squash":
        return side, side
    is_static = all(isinstance(edge, int) for edge in size)
    smaller, larger = (min, max) if is_static else (tf.minimum, tf.maximum)
    reference = smaller(*size) if mode == "shorter" else larger(*size)
    height, width = (larger(1, _scaled(edge, side, reference)) for edge in size)
    return height, width


def resize_to_side(images: tf.Tensor, side: int, mode: str, color: Color = BLACK) -> tf.Tensor:
    """Images resized as `target_size` says; with `mode="pad"` then laid on the center of a square
    of one color.

    Args:
        images: (H, W, 3) or (B, H, W, 3) uint8.
        side: See `target_size`.
        mode: See `target_size`.
        color: Red, green and blue of the square.

    Returns:
        (H', W', 3) or (B, H', W', 3) uint8.

    Example:
        >>> resize_to_side(tf.zeros((480, 640, 3), tf.uint8), 256, "pad").shape
        TensorShape([256, 256, 3])
    """
    images = resize(images, target_size(_edges(images), side, mode))
    return pad_to_square(images, side, color) if mode == "pad" else images


def pad_to_square(images: tf.Tensor, side: int, color: Color = BLACK) -> tf.Tensor:
    """Images of at most `side` pixels a side on the center of a square of one color.

    Args:
        images: (H, W, 3) or (B, H, W, 3) uint8.
        side: Height and width of the result.
        color: Red, green and blue of the square, 0-255.

    Returns:
        (side, side, 3) or (B, side, side, 3) uint8.

    Example:
        >>> pad_to_square(tf.zeros((1, 2, 3), tf.uint8), 2, (255, 128, 0))[:, 0].numpy().tolist()
        [[0, 0, 0], [255, 128, 0]]
    """
    lacking = [side - edge for edge in _edges(images)]
    paddings = [(edge // 2, edge - edge // 2) for edge in lacking]
    around = [(0, 0)] * (images.shape.rank - 3) + [*paddings, (0, 0)]
    around = tf.stack([tf.stack(pair) for pair in around])
    if tuple(color) == BLACK:
        return _static(tf.pad(images, around), (side, side))
    # Padding is of zeros: exchanging the color's bits before and after makes them the color, and
    # leaves the image.
    color = tf.constant(color, tf.uint8)
    padded = tf.bitwise.bitwise_xor(tf.pad(tf.bitwise.bitwise_xor(images, color), around), color)
    return _static(padded, (side, side))


def _edges(images: tf.Tensor) -> Size:
    """Height and width, as numbers where they are known."""
    sizes = tf.unstack(tf.shape(images))[-3:-1]
    static_sizes = images.shape.as_list()[-3:-1]
    height, width = (
        size if static is None else static for size, static in zip(sizes, static_sizes, strict=True)
    )
    return height, width


def _static(images: tf.Tensor, size: Size) -> tf.Tensor:
    """Return the same images, with what is known of their size."""
    static_size = [edge if isinstance(edge, int) else None for edge in size]
    return tf.ensure_shape(images, (*images.shape[:-3], *static_size, 3))


def _scaled(edge: Edge, side: int, reference: Edge) -> Edge:
    # Rounded to the nearest; exact for the reference itself.
    return (2 * edge * side + reference) // (2 * reference)


@dataclasses.dataclass(frozen=True)
class EvaluationTransform:
    """Resize, then the central crop: the same image gives the same pixels, in training, evaluation
    and serving.

    Args:
        resize: Pixels of the shorter side (`resize_mode="shorter"`, keeps proportions), of both
            (`resize_mode="squash"`), or of the longer side (`resize_mode="pad"`, keeps proportions;
            the image then lies on the center of a square).
            Smaller images are enlarged.
        image_size: Pixels of the side S of the square cut from the center, at most `resize`.
        resize_mode: `"shorter"`, `"squash"` or `"pad"`.
        pad_color: Of that square: `"black"`, `"white"`, `"R,G,B"` or three whole numbers of 0 to
            255.

    The test-time forms of the papers: `(256, 224)` (JRD), `(256, 256, "squash")` (HORDE),
    `(293, 256, "squash")` (its authors' code), `(256, 227, "squash")` (ECAML on Cars-196) and
    `(256, 227, "pad", "white")` (elsewhere); `(224, 224, "pad")` shows the whole image undistorted.

    Raises:
        UserError: A number is out of range, or the mode or color is unknown.

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
        """Return the view in which an embedder is evaluated and served.

        Args:
            embedder: What has `resize`, `image_size`, `resize_mode` and `pad_color`, as every model
                that embeds has.
        """
        return cls(embedder.resize, embedder.image_size, embedder.resize_mode, embedder.pad_color)

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        """Transform one image or a batch of equally sized ones.

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

    def batch(self, images: tf.Tensor) -> tf.Tensor:
        """Transform equally sized images at once."""
        return self(images)

    def place(self, size: tuple) -> list:
        """Return the top and left edge of the crop in a resized image of this height and width."""
        return [(edge - self.image_size) // 2 for edge in size]

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, as plain values that JSON can hold; `pad_color` where it is not
        black."""
        config = dataclasses.asdict(self)
        color = config.pop("pad_color")
        return config if color == BLACK else {**config, "pad_color": list(color)}


def as_color(value: Any) -> Color:
    """Red, green and blue of a color.

    Args:
        value: `"black"`, `"white"`, `"R,G,B"`, or three whole numbers of 0 to 255.

    Raises:
        UserError: It is none of these.

    Example:
        >>> as_color("white"), as_color("255, 128, 0")
        ((255, 255, 255), (255, 128, 0))
    """
    text = value
    if not isinstance(value, str):
        with user_errors(TypeError, "write three whole numbers of 0 to 255", pad_color=value):
            text = ",".join(map(str, value))
    return Color.parse(text, "pad_color")


def check_sizes(resize: int, image_size: int, resize_mode: str) -> None:
    """Raise an error where no view could be taken."""
    check_choice("resize_mode", resize_mode, MODES)
    if not 1 <= image_size <= resize:
        raise UserError(
            f"image_size must be from 1 px to resize, but is {image_size}, and resize is {resize}"
        )


KINDS = ("multi_resolution", "random_crop", "random_resized_crop", "none")
# Random bits in a float32 draw, and how many draws make the key of a policy.
_DRAW_BITS, _KEY_DRAWS = 23, 4


@dataclasses.dataclass(frozen=True)
class TrainTransform:
    """Augmentation by crop, mirror image and, if asked for, a policy.

    All randomness comes from outside, as `draws`: a transform called twice with the same draws
    gives the same bits. `prepare` is the same for every epoch, so that its result can be kept in
    memory, and `vary` uses the draws.

    Args:
        augmentation: `"random_crop"`: resize to `resize` as in evaluation, then a crop at a random
            place. `"random_resized_crop"`: a random part of the image, of random area and
            proportions, resized to the crop. `"multi_resolution"`: resize to a random resolution,
            keeping proportions, then a crop at a random place; where the image is smaller than the
            crop it lies on the center of `pad_color` (HORDE: Jacob et al., 2019). `"none"`: the
            evaluation view.
        resize: See `EvaluationTransform`; without effect for `"random_resized_crop"` and
            `"multi_resolution"`.
        image_size: Pixels of the side S of the square output, at most `resize`.
        resize_mode: See `EvaluationTransform`.
        scale: Smallest and largest part of the image's area for `"random_resized_crop"`.
        ratio: Smallest and largest width / height for `"random_resized_crop"`, drawn evenly on a
            log scale.
        flip: Whether to mirror every second image, at random, left to right.
        resolutions: Smallest and largest longer side for `"multi_resolution"`, as multiples of
            `image_size`.
        policy: What happens to the finished crops: a `Policy`, or its sum, such as
            `0.5 * color_jitter`; None: nothing.
        pad_color: Of the area around an image with `resize_mode="pad"` or `"multi_resolution"`; see
            `EvaluationTransform`.

    The papers' views: `("random_crop", 256, 224)` and `("random_resized_crop", image_size=224)`
    (JRD and its authors' code), `("random_crop", 256, 227, "squash")` (ECAML on Cars-196) and
    `("random_crop", 256, 227, "pad", pad_color="white")` (elsewhere),
    `("multi_resolution", image_size=256)` (HORDE).

    Raises:
        UserError: A number is out of range, or the augmentation or resize_mode is unknown.

    Example:
        >>> transform = TrainTransform(augmentation="random_resized_crop", image_size=224)
        >>> draws = transform.draw(seed=0, step=7, batch_size=32)
        >>> transform(tf.zeros((480, 640, 3), tf.uint8), draws[0]).shape
        TensorShape([224, 224, 3])
    """

    augmentation: str = "random_crop"
    resize: int = 256
    image_size: int = 224
    resize_mode: str = "shorter"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    resolutions: tuple[float, float] = (0.8, 1.8)
    policy: Policy | str | None = None
    pad_color: Color = BLACK

    def __post_init__(self):
        object.__setattr__(self, "pad_color", as_color(self.pad_color))
        check_choice("augmentation", self.augmentation, KINDS)
        if isinstance(self.policy, str):
            object.__setattr__(self, "policy", Policy.of(self.policy))
        # A crop that varies in size never passes through `resize`, which may then be anything.
        resize = self.image_size if self.varies_size else self.resize
        check_sizes(resize, self.image_size, self.resize_mode)
        for name, highest in (("scale", 1), ("ratio", math.inf), ("resolutions", math.inf)):
            bounds = tuple(getattr(self, name))
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] <= highest:
                end = "" if highest == math.inf else f" <= {highest}"
                raise UserError(
                    f"{name} must be (low, high) with 0 < low <= high{end}, not {bounds}"
                )
            object.__setattr__(self, name, bounds)

    @property
    def varies_size(self) -> bool:
        """Whether the part that is cut out differs in size from image to image."""
        return self.augmentation in ("random_resized_crop", "multi_resolution")

    @property
    def works_on_batches(self) -> bool:
        """Whether `batch` will do; else images are varied one by one."""
        return not self.varies_size and self.policy is None

    def draw(self, seed: int, step: int | tf.Tensor, batch_size: int) -> tf.Tensor:
        """Return the draws of a step: the same for the same seed, step and position, whatever ran
        before.

        Args:
            seed: A non-negative integer.
            step: The training step.
            batch_size: B.

        Returns:
            (B, D) float32, uniform on [0, 1), one row per position of the batch.
        """
        sizes = {"random_resized_crop": 3 + 2 * TRIES, "multi_resolution": 4}
        size = sizes.get(self.augmentation, 3)
        key = tf.stack([tf.constant(seed, tf.int64), tf.cast(step, tf.int64)])
        draws = tf.random.stateless_uniform((batch_size, size), key, alg="philox")
        if self.policy is None:
            return draws
        # Of another stream, so that a policy leaves the crops where they are.
        key = tf.random.fold_in(key, 1, alg="philox")
        key_draws = tf.random.stateless_uniform((batch_size, _KEY_DRAWS), key, alg="philox")
        return tf.concat([draws, key_draws], 1)

    def prepare(self, images: tf.Tensor) -> tf.Tensor:
        """Return the deterministic part; it is idempotent.

        Args:
            images: (H, W, 3) or (B, H, W, 3) uint8.

        Returns:
            (H', W', 3) or (B, H', W', 3) uint8: resized to `resize`, or unchanged where the crop
            varies in size.
        """
        if self.varies_size:
            return images
        return resize_to_side(images, self.resize, self.resize_mode, self.pad_color)

    def prepared_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what `prepare` makes of an image of this size."""
        if self.varies_size:
            return height, width
        if self.resize_mode == "pad":
            return self.resize, self.resize
        return target_size((height, width), self.resize, self.resize_mode)

    def vary(self, image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """Return the random part, for one image.

        Args:
            image: (H, W, 3) uint8, what `prepare` returned.
            draws: (D,) float32, a row of `draw`.

        Returns:
            (S, S, 3) uint8.
        """
        if self.augmentation == "random_resized_crop":
            view = self._resized_part(image, draws)
        elif self.augmentation == "multi_resolution":
            view = self._part_of_resized(image, draws)
        else:
            top, left = self._offsets(tf.shape(image)[:2], draws)
            view = image[top : top + self.image_size, left : left + self.image_size]
        if self.flip:
            view = tf.raw_ops.Reverse(tensor=view, dims=tf.stack([False, draws[0] < 0.5, False]))
        view = tf.ensure_shape(view, (self.image_size, self.image_size, 3))
        if self.policy is None:
            return view
        assert isinstance(self.policy, Policy)
        digits = tf.cast(draws[-_KEY_DRAWS:] * 2.0**_DRAW_BITS, tf.int64)
        return self.policy(view, digits[::2] * 2**_DRAW_BITS + digits[1::2])

    def _resized_part(self, image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """Return the view of `"random_resized_crop"`."""
        part = random_part(tf.shape(image)[:2], draws[1:], self.scale, self.ratio)
        top, left, height, width = tf.unstack(part)
        view = image[top : top + height, left : left + width]
        return resize(view, (self.image_size, self.image_size))

    def _part_of_resized(self, image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """Return the view of `"multi_resolution"`."""
        size = tf.unstack(tf.shape(image)[:2])
        size = multi_resolution(size, draws[3], self.image_size, self.resolutions)
        height, width = (tf.minimum(edge, self.image_size) for edge in size)
        top = random_offset(draws[1], size[0] - height)
        left = random_offset(draws[2], size[1] - width)
        view = resize(image, size)[top : top + height, left : left + width]
        return pad_to_square(view, self.image_size, self.pad_color)

    def batch(self, images: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """Transform equally sized images at once, bit by bit the same; only where
        `works_on_batches`.

        Args:
            images: (B, H, W, 3) uint8.
            draws: (B, D) float32.

        Returns:
            (B, S, S, 3) uint8.
        """
        assert self.works_on_batches
        images = self.prepare(images)
        top, left = self._offsets(tf.shape(images)[1:3], draws)
        within = tf.range(self.image_size)
        rows = top[..., None] + within
        columns = left[..., None] + within
        if self.flip:
            columns = tf.where(draws[:, :1] < 0.5, columns[..., ::-1], columns)
        shape = (tf.shape(draws)[0], self.image_size)
        # Rows first: whole rows are copied fast, and the slow copy of single pixels has fewer left
        # to do.
        images = tf.gather(images, tf.broadcast_to(rows, shape), batch_dims=1, axis=1)
        return tf.gather(images, tf.broadcast_to(columns, shape), batch_dims=1, axis=2)

    def __call__(self, image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """Transform one image.

        Args:
            image: (H, W, 3) uint8.
            draws: (D,) float32, a row of `draw`.

        Returns:
            (S, S, 3) uint8.
        """
        return self.vary(self.prepare(image), draws)

    def __str__(self) -> str:
        names = {
            "random_resized_crop": ("image_size", "scale", "ratio"),
            "multi_resolution": ("image_size", "resolutions"),
        }.get(self.augmentation, ("resize", "image_size", "resize_mode"))
        if self.pad_color != BLACK:
            names = (*names, "pad_color")
        values = ", ".join(f"{name}={getattr(self, name)}" for name in (*names, "flip"))
        return f"{self.augmentation}({values})" + (f", then {self.policy}" if self.policy else "")

    def _offsets(self, size: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Top and left edge of the crop: at random, or central for `"none"`."""
        room = size - self.image_size
        if self.augmentation == "none":
            return room[0] // 2, room[1] // 2
        return random_offset(draws[..., 1], room[0]), random_offset(draws[..., 2], room[1])


# A random resized crop that has not fitted after this many tries is the largest central one.
TRIES = 10


def random_part(
    size: tf.Tensor, draws: tf.Tensor, scale: tuple[float, float], ratio: tuple[float, float]
) -> tf.Tensor:
    """Return a part of random area and proportions: the first of ten tries that fits, else the
    largest central one.

    Args:
        size: (2,) int32, height and width of the image.
        draws: (2 + 2 * `TRIES`,) float32, uniform on [0, 1); any that follow are not used.
        scale: Smallest and largest share of the image's area.
        ratio: Smallest and largest width / height, drawn evenly on a log scale.

    Returns:
        (4,) int32: top, left, height and width.
    """
    height, width = tf.unstack(tf.cast(size, tf.float32))
    place_draws, area_draws = draws[:2], draws[2 : 2 + TRIES]
    ratio_draws = draws[2 + TRIES : 2 + 2 * TRIES]
    area = height * width * between(area_draws, *scale)
    low, high = ratio
    ratios = tf.exp(between(ratio_draws, math.log(low), math.log(high)))
    heights = tf.round(tf.sqrt(area / ratios))
    widths = tf.round(tf.sqrt(area * ratios))
    is_high_enough = (heights >= 1) & (heights <= height)
    fits = is_high_enough & (widths >= 1) & (widths <= width)
    # Where no try fits: the largest central part with a permitted ratio.
    fallback_height = tf.minimum(height, tf.maximum(1.0, tf.round(width / low)))
    fallback_width = tf.minimum(width, tf.maximum(1.0, tf.round(height * high)))
    any_fits = tf.reduce_any(fits)
    first = tf.argmax(tf.cast(fits, tf.int32))
    part_height = tf.where(any_fits, heights[first], fallback_height)
    part_width = tf.where(any_fits, widths[first], fallback_width)
    part = tf.cast(tf.stack([part_height, part_width]), tf.int32)
    room = size - part
    place = tf.where(any_fits, random_offset(place_draws, room), room // 2)
    return tf.concat([place, part], 0)


def multi_resolution(
    size: tuple[tf.Tensor, tf.Tensor], draw: tf.Tensor, crop: int, resolutions: tuple[float, float]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Height and width of the image when its longer side is a random multiple of the crop (HORDE:
    Jacob et al., 2019).

    Args:
        size: Height and width of the image.
        draw: Uniform on [0, 1).
        crop: Pixels of the crop.
        resolutions: Smallest and largest longer side, as multiples of `crop`.

    Returns:
        Two int32; proportions are kept to the nearest pixel.
    """
    longer = tf.maximum(1, tf.cast(tf.round(crop * between(draw, *resolutions)), tf.int32))
    reference = tf.maximum(*size)
    height, width = (tf.maximum(1, _scaled(edge, longer, reference)) for edge in size)
    return height, width


def random_offset(draws: tf.Tensor, room: tf.Tensor) -> tf.Tensor:
    """Whole numbers from 0 to `room`, evenly, from uniform draws."""
    # The product can round up to room + 1 itself.
    return tf.minimum(tf.cast(draws * tf.cast(room + 1, tf.float32), tf.int32), room)


def between(draw: tf.Tensor, low: float, high: float) -> tf.Tensor:
    """Return a uniform draw from [0, 1) stretched to [low, high)."""
    return low + draw * (high - low)
