"""From the encoded images of a request to views for the embedder; a bad image is named."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from tfdml.data.decoding import FOREIGN, FORMATS, SERVING_LIMIT, decode_part, starts_with
from tfdml.data.images import as_written
from tfdml.data.transforms import EvaluationTransform
from tfdml.export.pixel_limit import header_size, size_fault

# The feature of a tf.Example that holds an image's bytes.
EXAMPLE_FEATURE = "image/encoded"
_SIDE_BY_SIDE = 16
_DAMAGED = "cannot be decoded: it is damaged, cut off, or of a kind that is not supported"

Reader = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class RequestPreprocessor:
    """Views of the images of a request, by the functions that evaluation uses.

    An image is refused by its header when it is empty, of no known format, or larger than the limit;
    decoding finds the rest. A bad image is named by its place in the request.

    Args:
        transform: The view.
        max_pixels: See `tfdml.export.pixel_limit.size_fault`.

    Example:
        >>> views = RequestPreprocessor(EvaluationTransform(256, 224)).all_or_error(tf.constant([jpeg]), "image_bytes")
    """

    transform: EvaluationTransform
    max_pixels: int = SERVING_LIMIT

    @property
    def spec(self) -> tf.TensorSpec:
        """Of one view."""
        return tf.TensorSpec((self.transform.image_size, self.transform.image_size, 3), tf.uint8)

    def all_or_error(self, texts: tf.Tensor, name: str, read: Reader | None = None) -> tf.Tensor:
        """The views of all images of a request, or an error that names the first that has none.

        Args:
            texts: (B,) strings, the bytes of images, or of what `read` takes them out of.
            name: What the request calls them.
            read: From one string to the bytes of an image, where they are not that already.

        Returns:
            (B, S, S, 3) uint8.

        Raises:
            tf.errors.InvalidArgumentError: An image cannot be decoded; it is named: `image_bytes[3] of 32: ...`.
        """

        def together() -> tf.Tensor:
            views, faults = self.each(texts, read)
            with tf.control_dependencies([refuse(faults, name)]):
                return tf.identity(views)

        if read is not None:
            return together()
        # The way for several costs two milliseconds, and a single image needs no name. Decoding it outside lets
        # TensorFlow's own words through as well.
        return tf.cond(tf.size(texts) == 1, lambda: self._alone(texts, name), together)

    def each(self, texts: tf.Tensor, read: Reader | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """The view of every image that has one, and what is wrong with the others.

        Args:
            texts: See `all_or_error`.
            read: Likewise.

        Returns:
            (B, S, S, 3) uint8, black where there is no view, and (B,) strings, empty where there is one.
        """
        views, faults, done = self._at_once(texts, read)
        return tf.cond(done, lambda: (views, faults), lambda: self._one_by_one(texts, read))

    def _at_once(self, texts: tf.Tensor, read: Reader | None) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """What `each` returns, and whether it is complete: not where decoding has failed."""

        @as_written
        def everything(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            spec = (self.spec, tf.TensorSpec((), tf.string))
            views, faults = tf.map_fn(lambda text: self._from(text, read), batch, fn_output_signature=spec)
            return views, faults, True

        # A data set is TensorFlow's only way to go on after an operation has failed.
        whole = tf.data.Dataset.from_tensors(texts).map(everything).ignore_errors()
        failed = tf.data.Dataset.from_tensors((self._no_view()[None][:0], tf.fill((0,), ""), False))
        return _only(whole.concatenate(failed).take(1))

    def _one_by_one(self, texts: tf.Tensor, read: Reader | None) -> tuple[tf.Tensor, tf.Tensor]:
        """What `each` returns, at more cost; knows which images failed."""
        count = tf.size(texts, out_type=tf.int64)
        items = tf.data.Dataset.from_tensor_slices(texts).enumerate()
        numbered = as_written(lambda index, text: (index, *self._from(text, read)))
        items = items.map(numbered, num_parallel_calls=_SIDE_BY_SIDE)
        # There must be one element for a single one to be had.
        last = tf.data.Dataset.from_tensors((count, self._no_view(), tf.constant("")))
        found = _only(items.ignore_errors().concatenate(last).batch(count + 1))
        indices, views, faults = (column[:-1] for column in found)
        rows, size = indices[:, None], tf.reshape(count, (1,))
        return (
            tf.ensure_shape(
                tf.scatter_nd(rows, views, tf.concat([size, self.spec.shape], 0)), (None, *self.spec.shape)
            ),
            tf.tensor_scatter_nd_update(tf.fill(size, _DAMAGED), rows, faults),
        )

    def _from(self, text: tf.Tensor, read: Reader | None) -> tuple[tf.Tensor, tf.Tensor]:
        return self._view_or_fault(text if read is None else read(text))

    def of_images(self, images: tf.Tensor, name: str) -> tf.Tensor:
        """The views of decoded images of one size.

        Args:
            images: (B, H, W, 3) uint8.
            name: What the request calls them.

        Returns:
            (B, S, S, 3) uint8.

        Raises:
            tf.errors.InvalidArgumentError: The images have no pixel, or too many.
        """
        fault = self._size_fault(tf.shape(images, out_type=tf.int64)[1:3])
        check = tf.debugging.Assert(fault == "", [tf.strings.join([f"{name}: ", fault])])
        with tf.control_dependencies([check]):
            # No function may see the images before the check has run.
            return self.transform(tf.identity(images))

    def fault(self, encoded: tf.Tensor) -> tf.Tensor:
        """What an image's header says against it, a scalar string; empty for nothing."""
        length = tf.strings.length(encoded)
        foreign = tf.strings.format(FOREIGN + " ({} bytes)", length)
        known = tf.reduce_any([starts_with(encoded, known.start) for known in FORMATS])
        return tf.cond(
            known,
            lambda: self._size_fault(header_size(encoded)),
            lambda: tf.where(length == 0, "no bytes", foreign),
        )

    def view(self, encoded: tf.Tensor) -> tf.Tensor:
        """The view of one image, (S, S, 3) uint8."""
        return self.transform.finish(*decode_part(encoded, self.transform.window))

    @functools.cached_property
    def _view_or_fault(self) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        """The view of one image, black where there is none, and what its header says against it."""

        # A function, so that it is traced once for all its uses.
        @tf.function(input_signature=[tf.TensorSpec((), tf.string)], autograph=False)
        def view_or_fault(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            fault = self.fault(encoded)
            return tf.cond(fault == "", lambda: self.view(encoded), self._no_view), fault

        return view_or_fault

    def _no_view(self) -> tf.Tensor:
        return tf.zeros(self.spec.shape, tf.uint8)

    def _alone(self, texts: tf.Tensor, name: str) -> tf.Tensor:
        view, fault = self._view_or_fault(texts[0])
        check = tf.debugging.Assert(fault == "", [tf.strings.join([f"{name}[0] of 1: ", fault])])
        with tf.control_dependencies([check]):
            return view[None]

    def _size_fault(self, size: tf.Tensor) -> tf.Tensor:
        return size_fault(size, self.transform.resize, self.transform.resize_mode, self.max_pixels)


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


def image_of_example(serialized: tf.Tensor) -> tf.Tensor:
    """The bytes of the image in a serialised tf.Example; empty where it has none.

    Raises:
        tf.errors.InvalidArgumentError: This is no tf.Example.
    """
    feature = tf.io.FixedLenFeature((), tf.string, default_value="")
    return tf.io.parse_single_example(serialized, {EXAMPLE_FEATURE: feature})[EXAMPLE_FEATURE]


def _only(items: tf.data.Dataset) -> tuple[tf.Tensor, ...]:
    """The single element, without the searching for speed that pays over many."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return items.with_options(options).get_single_element()
