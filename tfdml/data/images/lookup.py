"""Where the images of a batch come from: files, encoded bytes or arrays, looked up by index.

Images are looked up in Python, a batch at a time, because that copies only what the batch needs: data held in memory
is never copied into TensorFlow as a whole, and knows no limit on the size of a graph.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data.images.decoding import decode_image
from tfdml.data.images.partial_decoding import decode_part

# None of our graphs rests on Python's own `if` and loops over tensors: to translate them takes most of the time that
# tracing does, seconds a start.
as_written = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True)
class Source:
    """Where images come from: looked up by index in Python, made into images in the graph."""

    columns: Callable[[np.ndarray], list[np.ndarray]]  # of (n,) indices: arrays of n rows
    dtypes: tuple[tf.DType, ...]  # of these arrays
    read: Callable[..., tf.Tensor]  # one row of each to (H, W, 3) uint8
    size: tuple[int, int] | None = None  # (H, W) where the single column is the (n, H, W, 3) images themselves
    # Of a choice and one row of each: see `partial_decoding.decode_part`; None where images are not encoded.
    decode_part: Callable[..., tuple[tf.Tensor, tf.Tensor, tf.Tensor]] | None = None

    def read_part(
        self, choose: Callable[[tf.Tensor], tf.Tensor], *row: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The part of an image that `choose` names, given its size; what it named; and that size."""
        if self.decode_part is not None:
            return self.decode_part(choose, *row)
        image = self.read(*row)
        size = tf.shape(image)[:2]
        window = choose(size)
        part = tf.slice(image, tf.concat([window[:2], [0]], 0), tf.concat([window[2:], [3]], 0))
        return part, window, size


def source_of_encoded(read: Callable[[np.ndarray], Iterable[bytes]]) -> Source:
    """Encoded images, whose bytes `read` gives for (n,) indices."""
    return Source(
        lambda indices: [strings(read(indices))],
        (tf.string,),
        decode_image,
        decode_part=lambda choose, encoded: decode_part(encoded, choose),
    )


def source_of_decoded(arrays: Sequence[np.ndarray] | np.ndarray) -> Source:
    """Images held decoded, each (H, W, 3) uint8."""
    if isinstance(arrays, np.ndarray) or len({array.shape for array in arrays}) == 1:
        return Source(
            lambda indices: [np.stack([arrays[i] for i in indices])],
            (tf.uint8,),
            lambda image: tf.ensure_shape(image, arrays[0].shape),
            arrays[0].shape[:2],
        )
    # Only strings may differ in length within a batch.
    return Source(
        lambda indices: [
            strings(arrays[i].tobytes() for i in indices),
            np.array([arrays[i].shape for i in indices], np.int32),
        ],
        (tf.string, tf.int32),
        lambda pixels, shape: tf.ensure_shape(tf.reshape(tf.io.decode_raw(pixels, tf.uint8), shape), (None, None, 3)),
    )


def look_up(
    labels: np.ndarray,
    source: Source,
    indices_of: Callable[[int], np.ndarray],
    step: tf.Tensor,
    batch_size: int | None,
) -> tuple[tf.Tensor, ...]:
    """Labels and source columns of one step's images, with what is known of their shapes."""

    def rows(step: np.int64) -> list[np.ndarray]:
        indices = indices_of(int(step))
        return [labels[indices], *source.columns(indices)]

    found = _python_calls().call(rows, [step], [tf.int64, *source.dtypes])
    shapes: list[tuple[int | None, ...]] = [(batch_size,)] * len(found)
    if source.size is not None:
        shapes[1] = (batch_size, *source.size, 3)
    elif len(found) == 3:
        # A box, or the shape of a decoded image.
        shapes[2] = (batch_size, 3 if source.decode_part is None else 4)
    return tuple(tf.ensure_shape(tensor, shape) for tensor, shape in zip(found, shapes, strict=True))


class _PythonCalls:
    """Calls of Python functions from graphs that stop in time before the interpreter shuts down.

    CPython ends any foreign thread that calls into it once shutdown has begun. An iterator that still prefetches then
    waits for its thread for ever, and the process never exits. So at exit a check within the graph, which needs no
    Python, refuses further calls, and the calls that are under way are waited for.
    """

    _PATIENCE = 10.0  # seconds
    # For threads between the check and the call, or between the call and the conversion of its result.
    _GRACE = 0.1  # seconds

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            # Nothing is ever put in: a queue is a flag, open or closed, that no distribution strategy copies.
            self._flag = tf.queue.FIFOQueue(1, [tf.bool])
        self._running = 0
        self._idle = threading.Condition()
        atexit.register(self._close)

    def call(self, function: Callable[..., Any], inputs: list[tf.Tensor], dtypes: list[tf.DType]) -> list[tf.Tensor]:
        def counted(*arguments: Any) -> Any:
            with self._idle:
                self._running += 1
            try:
                return function(*arguments)
            finally:
                with self._idle:
                    self._running -= 1
                    self._idle.notify_all()

        closed = tf.raw_ops.QueueIsClosedV2(handle=self._flag.queue_ref)
        with tf.control_dependencies([tf.debugging.Assert(~closed, ["Python is shutting down"])]):
            return tf.numpy_function(counted, inputs, dtypes)

    def _close(self) -> None:
        self._flag.close()
        with self._idle:
            self._idle.wait_for(lambda: self._running == 0, self._PATIENCE)
        time.sleep(self._GRACE)


@functools.cache
def _python_calls() -> _PythonCalls:
    # Made when first needed: devices can only be configured before TensorFlow has run anything.
    return _PythonCalls()


def strings(values: Iterable[bytes]) -> np.ndarray:
    """An array that TensorFlow takes for a vector of strings."""
    # Not NumPy's own string type, which drops zero bytes at the end.
    return np.array(list(values), object)
