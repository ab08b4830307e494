"""From an image to the crop that the network is trained on; the evaluation view beside it."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdml.data.augmentation.crops import TRIES, multi_resolution, place, random_part
from tfdml.data.augmentation.evaluation import EvaluationTransform, as_color, check_sizes
from tfdml.data.augmentation.policies import Policy
from tfdml.data.augmentation.resizing import (
    BLACK,
    Color,
    pad_to_square,
    resize_crop,
    resize_to_side,
    resize_window,
    source_window,
    target_size,
)
from tfdml.data.images.partial_decoding import whole
from tfdml.errors import UserError

__all__ = ["KINDS", "EvaluationTransform", "TrainTransform"]

KINDS = ("multi_resolution", "random_crop", "random_resized_crop", "none")
# Random bits in a float32 draw, and how many draws make the key of a policy.
_DRAW_BITS, _KEY_DRAWS = 23, 4


@dataclasses.dataclass(frozen=True)
class TrainTransform:
    """Augmentation by crop, mirror image and, if asked for, a policy.

    All randomness comes from outside, as `draws`: a transform called twice with the same draws gives the same bits.
    There are two ways through. `prepare` is the same for every epoch, so that its result can be kept in memory, and
    `vary` uses the draws. `window` says which part of an image the view needs, so that only that part is decoded, and
    `finish` makes the view from it. Both ways lead to the same bits.

    Args:
        kind: `"random_crop"`: resize to `resize` as in evaluation, then a crop at a random place.
            `"random_resized_crop"`: a random part of the image, of random area and proportions, resized to the crop.
            `"multi_resolution"`: resize to a random resolution, keeping proportions, then a crop at a random place;
            where the image is smaller than the crop it lies on the centre of `pad_color` (HORDE: Jacob et al., 2019).
            `"none"`: the evaluation view.
        resize: See `EvaluationTransform`; without effect for `"random_resized_crop"` and `"multi_resolution"`.
        crop: Pixels of the square output, at most `resize`.
        mode: See `EvaluationTransform`.
        scale: Smallest and largest part of the image's area for `"random_resized_crop"`.
        ratio: Smallest and largest width / height for `"random_resized_crop"`, drawn evenly on a log scale.
        flip: Whether to mirror every second image, at random, left to right.
        resolutions: Smallest and largest longer side for `"multi_resolution"`, as multiples of `crop`.
        policy: What happens to the finished crops, such as colour jitter; None for nothing.
        pad_color: Of what lies around an image with `mode="pad"` or `"multi_resolution"`; see `EvaluationTransform`.

    The papers' views: `("random_crop", 256, 224)` and `("random_resized_crop", crop=224)` (JRD and its authors' code),
    `("random_crop", 256, 227, "squash")` (ECAML on Cars-196) and `("random_crop", 256, 227, "pad", pad_color="white")`
    (elsewhere), `("multi_resolution", crop=256)` (HORDE).

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
    resolutions: tuple[float, float] = (0.8, 1.8)
    policy: Policy | None = None
    pad_color: Color = BLACK

    def __post_init__(self):
        object.__setattr__(self, "pad_color", as_color(self.pad_color))
        for name in ("scale", "ratio", "resolutions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.kind not in KINDS:
            raise UserError(f"a train transform's kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        # A crop that varies in size never passes through `resize`.
        check_sizes(self.crop if self.varies_size else self.resize, self.crop, self.mode)
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UserError(f"scale must be (low, high) with 0 < low <= high <= 1, not {self.scale}")
        for name in ("ratio", "resolutions"):
            bounds = getattr(self, name)
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
                raise UserError(f"{name} must be (low, high) with 0 < low <= high, not {bounds}")

    @property
    def varies_size(self) -> bool:
        """Whether the part that is cut out differs in size from image to image."""
        return self.kind in ("random_resized_crop", "multi_resolution")

    @property
    def works_on_batches(self) -> bool:
        """Whether `vary_batch` will do; else images are varied one by one."""
        return not self.varies_size and self.policy is None

    def draw(self, seed: int, step: int | tf.Tensor, batch_size: int) -> tf.Tensor:
        """The draws of a step: the same for the same seed, step and position, whatever ran before.

        Args:
            seed: A non-negative integer.
            step: The training step.
            batch_size: B.

        Returns:
            (B, D) float32, uniform on [0, 1), one row per position of the batch.
        """
        size = {"random_resized_crop": 3 + 2 * TRIES, "multi_resolution": 4}.get(self.kind, 3)
        key = tf.stack([tf.constant(seed, tf.int64), tf.cast(step, tf.int64)])
        draws = tf.random.stateless_uniform((batch_size, size), key, alg="philox")
        if self.policy is None:
            return draws
        # Of another stream, so that a policy leaves the crops where they are.
        key = tf.random.fold_in(key, 1, alg="philox")
        return tf.concat([draws, tf.random.stateless_uniform((batch_size, _KEY_DRAWS), key, alg="philox")], 1)

    def prepare(self, images: tf.Tensor) -> tf.Tensor:
        """The deterministic part; it is idempotent.

        Args:
            images: (H, W, 3) or (B, H, W, 3) uint8.

        Returns:
            (H', W', 3) or (B, H', W', 3) uint8: resized to `resize`, or unchanged where the crop varies in size.
        """
        return images if self.varies_size else resize_to_side(images, self.resize, self.mode, self.pad_color)

    def prepared_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what `prepare` makes of an image of this size."""
        if self.varies_size:
            return height, width
        return (self.resize,) * 2 if self.mode == "pad" else target_size((height, width), self.resize, self.mode)

    def vary(self, image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """The random part, for one image.

        Args:
            image: (H, W, 3) uint8, what `prepare` returned.
            draws: (D,) float32, a row of `draw`.

        Returns:
            (crop, crop, 3) uint8.
        """
        if self.varies_size:
            size = tf.shape(image)[:2]
            window = self.window(size, draws)
            return self.finish(_cut(image, window), window, size, draws)
        top, left = self._offsets(tf.shape(image)[:2], draws)
        return self._flip_and_augment(tf.slice(image, [top, left, 0], [self.crop, self.crop, 3]), draws)

    def vary_batch(self, images: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """`vary` for equally sized images at once, bit by bit the same; only where `works_on_batches`.

        Args:
            images: (B, H, W, 3) uint8.
            draws: (B, D) float32.

        Returns:
            (B, crop, crop, 3) uint8.
        """
        if not self.works_on_batches:
            raise ValueError("crops that vary in size, and policies, are made one by one: use vary")
        size = tf.shape(images)[1:3]
        top, left = self._offsets(size, draws)
        within = tf.range(self.crop)
        rows, columns = top[..., None] + within, left[..., None] + within
        if self.flip:
            columns = tf.where(draws[:, :1] < 0.5, columns[..., ::-1], columns)
        # Rows first: whole rows are copied fast, and the slow copy of single pixels has fewer left to do.
        images = tf.gather(images, tf.broadcast_to(rows, (tf.shape(draws)[0], self.crop)), batch_dims=1, axis=1)
        return tf.gather(images, tf.broadcast_to(columns, (tf.shape(draws)[0], self.crop)), batch_dims=1, axis=2)

    def window(self, size: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """The part of an image that the view is made from; the rest need not be decoded.

        Args:
            size: (2,) int32, height and width of the image.
            draws: (D,) float32, a row of `draw`.

        Returns:
            (4,) int32: top, left, height and width.
        """
        if self.kind == "random_resized_crop":
            return random_part(size, draws[1:], self.scale, self.ratio)
        if self.mode == "pad" and self.kind != "multi_resolution":
            return whole(size)
        target, window = self._geometry(size, draws)
        return source_window(tf.unstack(size), target, window)

    def finish(self, part: tf.Tensor, window: tf.Tensor, size: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """The view, from the part of an image that `window` named; bit by bit that of the whole image.

        Args:
            part: (h, w, 3) uint8.
            window: (4,) int32, what `window` returned.
            size: (2,) int32, height and width of the whole image.
            draws: (D,) float32, a row of `draw`.

        Returns:
            (crop, crop, 3) uint8.
        """
        if self.kind == "random_resized_crop":
            return self._flip_and_augment(resize_crop(part, self.crop), draws)
        if self.mode == "pad" and self.kind != "multi_resolution":
            return self.vary(self.prepare(part), draws)
        target, wanted = self._geometry(size, draws)
        view = resize_window(part, tf.unstack(window[:2]), tf.unstack(size), target, wanted)
        if self.kind == "multi_resolution":
            view = pad_to_square(view, self.crop, self.pad_color)
        return self._flip_and_augment(view, draws)

    def __call__(self, image: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """Transforms one image.

        Args:
            image: (H, W, 3) uint8.
            draws: (D,) float32, a row of `draw`.

        Returns:
            (crop, crop, 3) uint8.
        """
        return self.vary(self.prepare(image), draws)

    def __str__(self) -> str:
        names = {
            "random_resized_crop": ("crop", "scale", "ratio"),
            "multi_resolution": ("crop", "resolutions"),
        }.get(self.kind, ("resize", "crop", "mode"))
        if self.pad_color != BLACK:
            names = (*names, "pad_color")
        values = ", ".join(f"{name}={getattr(self, name)}" for name in (*names, "flip"))
        return f"{self.kind}({values})" + (f", then {self.policy}" if self.policy else "")

    def get_config(self) -> dict[str, Any]:
        """The arguments, as plain values that JSON can hold."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        config.update({name: list(config[name]) for name in ("scale", "ratio", "resolutions", "pad_color")})
        return {**config, "policy": self.policy and self.policy.get_config()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TrainTransform:
        """The transform that `get_config` described."""
        policy = config.get("policy")
        return cls(**{**config, "policy": policy and Policy.from_config(policy)})

    def _geometry(self, size: tf.Tensor, draws: tf.Tensor) -> tuple[tuple, tuple]:
        """The size to which an image is resized, and the window of the result that the view shows."""
        if self.kind == "multi_resolution":
            target = multi_resolution(tf.unstack(size), draws[3], self.crop, self.resolutions)
            shown = [tf.minimum(edge, self.crop) for edge in target]
            top_left = (place(draws[1 + axis], target[axis] - shown[axis]) for axis in (0, 1))
            return target, (*top_left, *shown)
        target = target_size(tf.unstack(size), self.resize, self.mode)
        return target, (*self._offsets(tf.stack(target), draws), self.crop, self.crop)

    def _offsets(self, size: tf.Tensor, draws: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Top and left edge of the crop: at random, or central for `"none"`."""
        room = size - self.crop
        if self.kind == "none":
            return room[0] // 2, room[1] // 2
        return place(draws[..., 1], room[0]), place(draws[..., 2], room[1])

    def _flip_and_augment(self, view: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
        """A crop mirrored or not, then through the policy."""
        if self.flip:
            view = tf.raw_ops.Reverse(tensor=view, dims=tf.stack([False, draws[0] < 0.5, False]))
        view = tf.ensure_shape(view, (self.crop, self.crop, 3))
        if self.policy is None:
            return view
        digits = tf.cast(draws[-_KEY_DRAWS:] * 2.0**_DRAW_BITS, tf.int64)
        return self.policy(view, digits[::2] * 2**_DRAW_BITS + digits[1::2])


def _cut(image: tf.Tensor, window: tf.Tensor) -> tf.Tensor:
    return tf.slice(image, tf.concat([window[:2], [0]], 0), tf.concat([window[2:], [3]], 0))
