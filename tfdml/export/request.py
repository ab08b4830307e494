"""From the encoded images of a request to views for the embedder: a bad image is named, a huge one is not decoded.

A few hundred bytes can state gigabytes of pixels. The graph reads the size in the header first.
"""

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from tfdml.data.decoding import (
    FOREIGN,
    FORMATS,
    NARROWEST,
    SERVING_LIMIT,
    decode_part,
    header_size,
    only,
    starts_with,
)
from tfdml.data.images import as_written
from tfdml.data.transforms import EvaluationTransform

_SIDE_BY_SIDE = 16
# Resizing holds four bytes where a decoded image has one.
_RESIZED_SHARE = 4
_DAMAGED = "cannot be decoded: it is damaged, cut off, or of a kind that is not supported"


@dataclasses.dataclass(frozen=True)
class RequestPreprocessor:
    """Views of the images of a request, by the functions that evaluation uses.

    An image is refused by its header when it is empty, of no known format, or larger than the limit;
    decoding finds the rest. A bad image is named by its place in the request.

    Args:
        transform: The view.
        max_pixels: Most pixels of an image. A quarter of it is what the resized image may have, and no side may be
            more than 100 times the other: a line of pixels, small as it is, becomes huge when it is enlarged.

    Example:
        >>> views = RequestPreprocessor(EvaluationTransform(256, 224)).all_or_error(tf.constant([jpeg]), "image_bytes")
    """

    transform: EvaluationTransform
    max_pixels: int = SERVING_LIMIT

    @property
    def spec(self) -> tf.TensorSpec:
        """Of one view."""
        return tf.TensorSpec((self.transform.image_size, self.transform.image_size, 3), tf.uint8)

    def all_or_error(self, texts: tf.Tensor, name: str) -> tf.Tensor:
        """Return the views of all images of a request, or an error that names the first that has none.

        Args:
            texts: (B,) strings, the bytes of images.
            name: What the request calls them.

        Returns:
            (B, S, S, 3) uint8.

        Raises:
            tf.errors.InvalidArgumentError: An image cannot be decoded; it is named: `image_bytes[3] of 32: ...`.
        """

        def together() -> tf.Tensor:
            views, faults = self.each(texts)
            with tf.control_dependencies([refuse(faults, name)]):
                return tf.identity(views)

        def alone() -> tf.Tensor:
            view, fault = self._view_or_fault(texts[0])
            check = tf.debugging.Assert(fault == "", [tf.strings.join([f"{name}[0] of 1: ", fault])])
            with tf.control_dependencies([check]):
                return view[None]

        # The way for several costs two milliseconds, and a single image needs no name. Decoding it outside lets
        # TensorFlow's own words through as well.
        return tf.cond(tf.size(texts) == 1, alone, together)

    def each(self, texts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the view of every image that has one, and what is wrong with the others.

        Args:
            texts: See `all_or_error`.

        Returns:
            (B, S, S, 3) uint8, black where there is no view, and (B,) strings, empty where there is one.
        """
        views, faults, done = self._at_once(texts)
        return tf.cond(done, lambda: (views, faults), lambda: self._one_by_one(texts))

    def _at_once(self, texts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return what `each` returns, and whether it is complete: not where decoding has failed."""

        @as_written
        def everything(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            spec = (self.spec, tf.TensorSpec((), tf.string))
            views, faults = tf.map_fn(self._view_or_fault, batch, fn_output_signature=spec)
            return views, faults, True

        # A data set is TensorFlow's only way to go on after an operation has failed.
        whole = tf.data.Dataset.from_tensors(texts).map(everything).ignore_errors()
        failed = tf.data.Dataset.from_tensors((self._no_view()[None][:0], tf.fill((0,), ""), False))
        return only(whole.concatenate(failed).take(1))

    def _one_by_one(self, texts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what `each` returns, at more cost; knows which images failed."""
        count = tf.size(texts, out_type=tf.int64)
        items = tf.data.Dataset.from_tensor_slices(texts).enumerate()
        numbered = as_written(lambda index, text: (index, *self._view_or_fault(text)))
        items = items.map(numbered, num_parallel_calls=_SIDE_BY_SIDE)
        # There must be one element for a single one to be had.
        last = tf.data.Dataset.from_tensors((count, self._no_view(), tf.constant("")))
        outcomes = only(items.ignore_errors().concatenate(last).batch(count + 1))
        indices, views, faults = (column[:-1] for column in outcomes)
        rows, size = indices[:, None], tf.reshape(count, (1,))
        return (
            tf.ensure_shape(
                tf.scatter_nd(rows, views, tf.concat([size, self.spec.shape], 0)), (None, *self.spec.shape)
            ),
            tf.tensor_scatter_nd_update(tf.fill(size, _DAMAGED), rows, faults),
        )

    def of_images(self, images: tf.Tensor, name: str) -> tf.Tensor:
        """Return the views of decoded images of one size.

        Args:
            images: (B, H, W, 3) uint8.
            name: What the request calls them.

        Returns:
            (B, S, S, 3) uint8.

        Raises:
            tf.errors.InvalidArgumentError: The images have no pixel, or too many.
        """
        fault = self.size_fault(tf.shape(images, out_type=tf.int64)[1:3])
        check = tf.debugging.Assert(fault == "", [tf.strings.join([f"{name}: ", fault])])
        with tf.control_dependencies([check]):
            # No function may see the images before the check has run.
            return self.transform(tf.identity(images))

    def fault(self, encoded: tf.Tensor) -> tf.Tensor:
        """Return what an image's header says against it, a scalar string; empty for nothing."""
        length = tf.strings.length(encoded)
        foreign = tf.strings.format(FOREIGN + " ({} bytes)", length)
        known = tf.reduce_any([starts_with(encoded, known.start) for known in FORMATS])
        return tf.cond(
            known,
            lambda: self.size_fault(header_size(encoded)),
            lambda: tf.where(length == 0, "no bytes", foreign),
        )

    def size_fault(self, size: tf.Tensor) -> tf.Tensor:
        """Return what forbids an image of this size to be decoded and resized, a scalar string; empty for nothing.

        Args:
            size: (2,) int64, height and width.

        Example:
            >>> views = RequestPreprocessor(EvaluationTransform(256, 224))
            >>> views.size_fault(tf.constant([30000, 30000], tf.int64)).numpy()
            b'30000 x 30000 pixels, more than the limit of 100000000'
        """
        height, width = tf.unstack(size)
        most, narrowest = self.max_pixels, NARROWEST
        if self.transform.resize_mode == "shorter":
            narrowest = max(min(NARROWEST, most // _RESIZED_SHARE // self.transform.resize**2), 1)
        stated = tf.strings.format("{} x {} pixels", (width, height))
        narrow = tf.strings.join([stated, f", so narrow that one side is more than {narrowest} times the other"])
        message = tf.where(tf.maximum(height, width) > narrowest * tf.minimum(height, width), narrow, "")
        # Divided, as the product of such sides may overflow.
        large = height > most // tf.maximum(width, 1)
        message = tf.where(large, tf.strings.join([stated, f", more than the limit of {most}"]), message)
        return tf.where((height < 1) | (width < 1), "its header states no size: it is damaged or cut off", message)

    @functools.cached_property
    def _view_or_fault(self) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        """The view of one image, black where there is none, and what its header says against it."""

        # A function, so that it is traced once for all its uses.
        @tf.function(input_signature=[tf.TensorSpec((), tf.string)], autograph=False)
        def view_or_fault(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            fault = self.fault(encoded)

            def view() -> tf.Tensor:
                return self.transform.finish(*decode_part(encoded, self.transform.window))

            return tf.cond(fault == "", view, self._no_view), fault

        return view_or_fault

    def _no_view(self) -> tf.Tensor:
        return tf.zeros(self.spec.shape, tf.uint8)


def refuse(faults: tf.Tensor, name: str) -> tf.Operation:
    """Fail on the first fault: `embedding[2] of 5: has length 0; bad in all: 1`.

    Args:
        faults: (B,) strings, what is wrong with each item; empty for nothing.
        name: Of the input that holds the items.
    """
    bad = tf.where(faults != "")[:, 0]

    def message() -> tf.Tensor:
        of = tf.strings.format("] of {}: ", tf.size(faults))
        rest = tf.strings.format("; bad in all: {}", tf.size(bad))
        return tf.strings.join([f"{name}[", tf.strings.as_string(bad[0]), of, faults[bad[0]], rest])

    text = tf.cond(tf.size(bad) > 0, message, lambda: tf.constant(""))
    return tf.debugging.Assert(tf.size(bad) == 0, [text])
