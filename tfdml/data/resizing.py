"""Bilinear resizing with antialiasing, as Pillow's, of whole images or of the part that a crop needs.

TensorFlow's kernel spends most of its time on single pixels in its horizontal pass. Both passes are therefore run as
vertical ones over long rows, the image transposed in between: the same sums in the same order, and so the same bits,
in a quarter of the time.
"""

from __future__ import annotations

from typing import TypeAlias

import tensorflow as tf

Edge: TypeAlias = "int | tf.Tensor"
Color: TypeAlias = "tuple[int, int, int]"
MODES = ("pad", "shorter", "squash")
BLACK = (0, 0, 0)


def resize(images: tf.Tensor, size: tuple[Edge, Edge]) -> tf.Tensor:
    """Images resized to `size`, rounded to uint8; returned as they are where the size is right already.

    Args:
        images: (H, W, 3) or (B, H, W, 3) uint8; sizes may be unknown while a graph is traced.
        size: Height and width of the result.

    Returns:
        (*size, 3) or (B, *size, 3) uint8.

    Example:
        >>> resize(tf.zeros((480, 640, 3), tf.uint8), (120, 160)).shape
        TensorShape([120, 160, 3])
    """

    def resized() -> tf.Tensor:
        return _resampled(images, _edges(images), (0, 0), (0, 0, *size), size)

    if images.shape[-3:-1].is_fully_defined() and all(isinstance(edge, int) for edge in size):
        return images if tuple(images.shape[-3:-1]) == tuple(size) else resized()
    same = tf.reduce_all(tf.shape(images)[-3:-1] == tf.stack(size))
    return _static(tf.cond(same, lambda: images, resized), size)


def resize_crop(crop: tf.Tensor, side: int) -> tf.Tensor:
    """A crop of any size resized to a square, as `resize` but for the last bit, faster where the crop is enlarged.

    Antialiasing changes nothing where no edge shrinks, and TensorFlow's plain bilinear kernel has the same weights.

    Args:
        crop: (h, w, 3) uint8.
        side: Height and width of the result.

    Returns:
        (side, side, 3) uint8.
    """

    def enlarged() -> tf.Tensor:
        resized = tf.raw_ops.ResizeBilinear(images=crop[None], size=(side, side), half_pixel_centers=True)
        return tf.cast(resized[0] + 0.5, tf.uint8)

    def shrunk() -> tf.Tensor:
        return _resampled(crop, _edges(crop), (0, 0), (0, 0, side, side), (side, side))

    return _static(tf.cond(tf.reduce_all(tf.shape(crop)[:2] <= side), enlarged, shrunk), (side, side))


def target_size(size: tuple[Edge, Edge], side: int, mode: str) -> tuple[Edge, Edge]:
    """Height and width to which an image of `size` is resized.

    Args:
        size: Its height and width.
        side: Pixels of the result's shorter side (`mode="shorter"`), of both sides (`"squash"`) or of the longer side
            (`"pad"`).
        mode: One of `MODES`.

    Example:
        >>> target_size((480, 640), 256, "shorter")
        (256, 341)
    """
    if mode == "squash":
        return side, side
    height, width = size
    if isinstance(height, int) and isinstance(width, int):
        reference = min(size) if mode == "shorter" else max(size)
        return max(1, _scaled(height, side, reference)), max(1, _scaled(width, side, reference))
    reference = tf.minimum(*size) if mode == "shorter" else tf.maximum(*size)
    return tf.maximum(1, _scaled(height, side, reference)), tf.maximum(1, _scaled(width, side, reference))


def resize_to_side(images: tf.Tensor, side: int, mode: str, color: Color = BLACK) -> tf.Tensor:
    """Images resized as `target_size` says; with `mode="pad"` then laid on the centre of a square of one colour.

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
    """Images of at most `side` pixels a side on the centre of a square of one colour.

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
    # Padding is of zeros: exchanging the colour's bits before and after makes them the colour, and leaves the image.
    color = tf.constant(color, tf.uint8)
    padded = tf.bitwise.bitwise_xor(tf.pad(tf.bitwise.bitwise_xor(images, color), around), color)
    return _static(padded, (side, side))


def source_window(size: tuple[tf.Tensor, tf.Tensor], target: tuple[Edge, Edge], window: tuple[Edge, ...]) -> tf.Tensor:
    """The part of an image that a window of its resized version is computed from.

    It begins at the image's first row: rows above the window are cheaper decoded than passed over.

    Args:
        size: Height and width of the image.
        target: Height and width to which the image is resized.
        window: Top, left, height and width of the part wanted of the resized image.

    Returns:
        (4,) int32: top, left, height and width of the part needed of the image.
    """
    # A long panorama enlarged overflows 32 bits.
    height, width, *_ = edges = [tf.cast(edge, tf.int64) for edge in (*size, *target, *window)]
    goals, (top, left, rows, columns) = edges[2:4], edges[4:]
    # The kernel reaches max(1, scale) pixels to either side of a sampling position; the rest is for rounding.
    down, across = (edge // goal + 4 for edge, goal in zip((height, width), goals, strict=True))
    bottom = tf.minimum(height, (top + rows) * height // goals[0] + down)
    right = tf.minimum(width, (left + columns) * width // goals[1] + across)
    first = tf.maximum(tf.constant(0, tf.int64), left * width // goals[1] - across)
    return tf.cast(tf.stack([tf.zeros_like(first), first, bottom, right - first]), tf.int32)


def resize_window(
    part: tf.Tensor,
    origin: tuple[Edge, Edge],
    size: tuple[Edge, Edge],
    target: tuple[Edge, Edge],
    window: tuple[Edge, ...],
) -> tf.Tensor:
    """A window of a resized image from the part of the image that it needs, bit-equal to resizing the whole.

    Args:
        part: (h, w, 3) uint8, at least what `source_window` asks for.
        origin: Row and column of the image at which the part begins.
        size: Height and width of the image.
        target: Height and width to which the image is resized.
        window: Top, left, height and width of the part wanted of the resized image.

    Returns:
        (height, width, 3) uint8.
    """
    top, left, height, width = window
    same = (size[0] == target[0]) & (size[1] == target[1])
    return tf.cond(
        same,
        lambda: tf.slice(part, tf.stack([top - origin[0], left - origin[1], 0]), tf.stack([height, width, 3])),
        lambda: _resampled(part, size, origin, window, target),
    )


def _resampled(
    images: tf.Tensor,
    size: tuple[Edge, Edge],
    origin: tuple[Edge, Edge],
    window: tuple[Edge, ...],
    target: tuple[Edge, Edge],
) -> tf.Tensor:
    """The window of the images resized from `size` to `target`, of which the images are the part at `origin`."""
    top, left, height, width = window
    batch = tf.shape(images)[:-3]
    part_height, part_width = _edges(images)
    # Within a row, columns and channels are alike to the vertical pass; the same holds for the transposed image, where
    # channels and rows are. So each transposition is one of a matrix, the kind that TensorFlow is fastest at.
    rows = tf.reshape(images, tf.stack([-1, part_height, part_width * 3]))
    rows = _from(_shrunk_rows(_behind(rows, origin[0]), size[0], target[0], top + height), top)
    columns = tf.reshape(tf.linalg.matrix_transpose(rows), tf.stack([-1, part_width, 3 * height]))
    columns = _from(_shrunk_rows(_behind(columns, origin[1]), size[1], target[1], left + width), left)
    # Weighted means of 0 .. 255 need no clipping, and cutting off after adding a half rounds them.
    values = tf.reshape(tf.cast(columns + 0.5, tf.uint8), tf.stack([-1, width * 3, height]))
    values = tf.linalg.matrix_transpose(values)
    return _static(tf.reshape(values, tf.concat([batch, tf.stack([height, width, 3])], 0)), (height, width))


def _shrunk_rows(rows: tf.Tensor, length: Edge, target: Edge, count: Edge) -> tf.Tensor:
    """(B, n, m) to (B, count, m) float32: the first rows of `length` rows resized to `target`.

    The rows beyond the n given are not needed for them.
    """
    scale = tf.cast(target, tf.float32) / tf.cast(length, tf.float32)
    resized = tf.raw_ops.ScaleAndTranslate(
        images=rows[:, :, None, :],
        size=tf.stack([count, 1]),
        scale=tf.stack([scale, 1.0]),
        translation=[0.0, 0.0],
        kernel_type="triangle",
        antialias=True,
    )
    return resized[:, :, 0, :]


def _behind(rows: tf.Tensor, offset: Edge) -> tf.Tensor:
    """(B, n, m) to (B, offset + n, m), zeros first: positions must be those in the whole image to the last bit."""
    if isinstance(offset, int) and offset == 0:
        return rows
    return tf.pad(rows, tf.stack([[0, 0], tf.stack([offset, 0]), [0, 0]]))


def _from(rows: tf.Tensor, start: Edge) -> tf.Tensor:
    return rows if isinstance(start, int) and start == 0 else rows[:, start:]


def _edges(images: tf.Tensor) -> tuple[Edge, Edge]:
    """Height and width, as numbers where they are known."""
    shape = tf.shape(images)
    rank = images.shape.rank
    return tuple(shape[axis] if images.shape[axis] is None else images.shape[axis] for axis in (rank - 3, rank - 2))


def _static(images: tf.Tensor, size: tuple[Edge, Edge]) -> tf.Tensor:
    """The same images, with what is known of their size."""
    known = [edge if isinstance(edge, int) else None for edge in size]
    return tf.ensure_shape(images, (*images.shape[:-3], *known, 3))


def _scaled(edge: Edge, side: int, reference: Edge) -> Edge:
    # Rounded to the nearest; exact for the reference itself.
    return (2 * edge * side + reference) // (2 * reference)
