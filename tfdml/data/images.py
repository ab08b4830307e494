"""Sets of images, in files or in memory: read, measured and looked up by index.

The images of a batch are looked up in Python, because that copies only what the batch needs: data held in memory is
never copied into TensorFlow as a whole, and the size of a graph is no limit.
"""

from __future__ import annotations

import abc
import atexit
import concurrent.futures
import dataclasses
import functools
import hashlib
import io
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, ClassVar, TypeVar

import numpy as np
import tensorflow as tf
from PIL import ExifTags, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from tfdml.data.decoding import (
    DECODER_LIMIT,
    JPEG,
    PNG,
    WEBP,
    Format,
    chosen_part,
    decode_image,
    decode_part,
    format_of,
    kind_of,
    narrow_fault,
)
from tfdml.errors import REASON, UserError, user_errors
from tfdml.io import files

_Made = TypeVar("_Made")
_HEADERS: dict[Format, Callable] = {
    JPEG: JpegImagePlugin.JpegImageFile,
    PNG: PngImagePlugin.PngImageFile,
    WEBP: WebPImagePlugin.WebPImageFile,
}


def read_header(file: BinaryIO, kind: Format) -> Image.Image:
    """Return an image of which only the header is read, without Pillow's own limit of pixels."""
    file.seek(0)
    return _HEADERS[kind](file)


class Images(abc.ABC):
    """Images by index. A new kind says how its bytes are read and how a batch of it is looked up; the rest follows.

    Attributes:
        names: The name of each image in messages and reports.
        decoded: Whether the images are held as pixels, so that there is nothing to decode and nothing to be damaged.
    """

    decoded: ClassVar[bool] = False
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        # The names of a million images say nothing.
        return f"<{type(self).__name__} of {len(self)} images>"

    def name(self, index: int) -> str:
        """Return the name of one image in messages and reports."""
        return self.names[index]

    def place(self, index: int) -> str:
        """Where one image lies, for messages on what is wrong with it."""
        return self.name(index)

    @abc.abstractmethod
    def take(self, indices: np.ndarray) -> Images:
        """Return the images at `indices`, in that order."""

    @abc.abstractmethod
    def encoded(self, index: int) -> bytes:
        """Return the encoded bytes of one image.

        Raises:
            OSError: A local file cannot be read.
        """

    def picture(self, index: int) -> np.ndarray:
        """One image as a person sees it: (H, W, 3) uint8, upright, transparency laid over white.

        Raises:
            UserError: It cannot be read as an image.

        Example:
            >>> ArrayImages(np.zeros((1, 4, 6, 3), np.uint8)).picture(0).shape
            (4, 6, 3)
        """
        kinds = (OSError, ValueError, tf.errors.OpError)
        with user_errors(kinds, f"{self.name(index)} cannot be read as an image: {REASON}", keep="last"):
            return decode_image(tf.constant(self.encoded(index))).numpy()

    @abc.abstractmethod
    def lookup(self) -> Source:
        """How the input pipeline reads a batch of them."""

    def pixels(self) -> np.ndarray:
        """Return the images themselves, of a kind whose images are `decoded`."""
        raise TypeError(f"{type(self).__name__} holds no decoded images")

    def stamps(self) -> list[tuple[int, int]]:
        """Size in bytes and time of change in nanoseconds of every image, as far as they have such; else 0."""
        return [(self.pixels()[0].nbytes, 0)] * len(self)

    def open(self, index: int) -> BinaryIO:
        """One image as a file, for those who need only its beginning or its end."""
        return io.BytesIO(self.encoded(index))

    def size(self, index: int) -> tuple[int, int] | None:
        """Height and width of one image as it is shown, from its header alone; None for what is no image."""
        try:
            with self.open(index) as file:
                kind = format_of(file.read(16))
                if kind is None:
                    return None
                image = read_header(file, kind)
                width, height = image.size
                if (
                    width * height > DECODER_LIMIT
                ):  # refused by its header; of some PNGs Pillow decodes all for the EXIF
                    return height, width
                turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
                return (width, height) if turned else (height, width)
        except Exception:  # a file system's own errors, and a dozen types that Pillow raises on damaged headers
            return None


def join_images(first: Images, second: Images) -> Images:
    """Return the images of two of one kind, one after the other."""
    assert dataclasses.is_dataclass(first)
    assert type(first) is type(second)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(first):
        one, other = getattr(first, field.name), getattr(second, field.name)
        values[field.name] = np.concatenate([one, other]) if isinstance(one, np.ndarray) else one
        if isinstance(one, tuple):
            values[field.name] = one + other
    return dataclasses.replace(first, **values)


# Most of the time goes to waiting for the disk or the network.
_THREADS = 16
# A task of a thread costs about as much as a small file.
_PER_TASK = 256


@dataclasses.dataclass(frozen=True, repr=False)
class FileImages(Images):
    """Images that lie in files, read when they are needed.

    Args:
        paths: One path per image, local or on any file system that `fsspec` knows.
    """

    paths: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The paths."""
        return self.paths

    def take(self, indices: np.ndarray) -> FileImages:
        """Return the images at `indices`, in that order."""
        return FileImages(tuple(self.paths[i] for i in indices))

    def open(self, index: int) -> BinaryIO:
        """Return the file of one image."""
        return files.open_file(self.paths[index], buffering=0)

    def encoded(self, index: int) -> bytes:
        """Return the bytes of one file."""
        return files.read_bytes(self.paths[index])

    def stamps(self) -> list[tuple[int, int]]:
        """See `Images.stamps`; (0, 0) for a file that is not there."""
        return list(reading_threads().map(files.stamp_of, self.paths))

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        if any(map(files.is_remote, self.paths)):
            return _source_read_here(self)
        return source_of_encoded(lambda indices: (os.fsencode(self.paths[i]) for i in indices), tf.io.read_file)


@functools.cache
def reading_threads() -> concurrent.futures.ThreadPoolExecutor:
    """Return threads that mostly wait for a disk or the network."""
    return concurrent.futures.ThreadPoolExecutor(_THREADS, "images")


def in_threads(function: Callable[[int], _Made], indices: Sequence[int], threads: int = _THREADS) -> Iterator[_Made]:
    """Yield what a function returns for each of (n,) indices, in their order."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        parts = (indices[start : start + _PER_TASK] for start in range(0, len(indices), _PER_TASK))
        for made in pool.map(lambda part: list(map(function, part)), parts):
            yield from made


def kinds_of(paths: Sequence[str]) -> list[str]:
    """Return what kind of image each file is by its content, see `tfdml.data.decoding.kind_of`; empty for no image.

    Reads the first 32 bytes of every file, in threads: 100,000 local files take seconds, remote ones a request each.
    Where most names have one of `tfdml.data.decoding.EXTENSIONS`, ask for the others alone: a wrong extension is found
    when the images are checked.

    Args:
        paths: Files, local or on any file system that `fsspec` knows.

    Returns:
        (N,) `"JPEG"`, `"PNG"` or `"WebP"`, which are read; another name, such as `"GIF"`, of an image that is not; or
        `""` for any other file, and for one that cannot be read.

    Example:
        >>> kinds_of(["photos/bus/0.jpg", "README.md"])
        ['JPEG', '']
    """

    def kind(index: int) -> str:
        try:
            with files.open_file(paths[index], buffering=0) as file:
                return kind_of(file.read(32))
        except Exception:  # a file system's own errors
            return ""

    return list(in_threads(kind, range(len(paths))))


def _source_read_here(images: Images) -> Source:
    """Return images that TensorFlow cannot read itself: most of them at once, as the time goes to waiting."""

    def bytes_or_none(index: int) -> bytes:
        try:
            return images.encoded(index)
        except UserError:
            raise  # it names the image
        except Exception:  # clients of file systems have their own error types; no decoder takes an empty file
            return b""

    return source_of_encoded(lambda indices: reading_threads().map(bytes_or_none, indices))


@dataclasses.dataclass(frozen=True, repr=False)
class EncodedImages(Images):
    """Encoded images (JPEG, PNG ...) held in memory, such as the members of a small archive.

    Args:
        data: The bytes of each image.
        names: The name of each image in messages and reports.
    """

    data: tuple[bytes, ...]
    names: tuple[str, ...]

    def take(self, indices: np.ndarray) -> EncodedImages:
        """Return the images at `indices`, in that order."""
        return EncodedImages(tuple(self.data[i] for i in indices), tuple(self.names[i] for i in indices))

    def encoded(self, index: int) -> bytes:
        """Return the bytes of one image."""
        return self.data[index]

    def stamps(self) -> list[tuple[int, int]]:
        """See `Images.stamps`."""
        return [(len(data), 0) for data in self.data]

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        return source_of_encoded(lambda indices: [self.data[i] for i in indices])


@dataclasses.dataclass(frozen=True, repr=False)
class ArrayImages(Images):
    """Decoded images of one size held in memory.

    Args:
        data: (N, H, W, 3) uint8, pixels 0-255. Images in 0..1 are refused: multiply them by 255 first.
        names: The name of each image in messages and reports; by default its row, "0", "1" ...

    Raises:
        UserError: `data` has another shape, or is not uint8.

    Example:
        >>> ArrayImages(np.zeros((2, 32, 32, 3), np.uint8)).name(1)
        '1'
    """

    decoded: ClassVar[bool] = True

    data: np.ndarray
    names: tuple[str, ...] = ()

    def __post_init__(self):
        data = np.asarray(self.data)
        if data.ndim != 4 or data.shape[-1] != 3:
            raise UserError(f"images must be an array (N, H, W, 3), not of shape {data.shape}")
        if fault := narrow_fault(*data.shape[1:3]):
            raise UserError(f"images: {fault}")
        if data.dtype != np.uint8:
            in_unit_range = data.dtype.kind == "f" and data.size and data.max() <= 1
            cure = "(255 * images).round().astype('uint8')" if in_unit_range else "images.round().astype('uint8')"
            raise UserError(f"images must be uint8 pixels of 0 to 255, not {data.dtype}; convert them: {cure}")
        object.__setattr__(self, "data", data)
        names = tuple(self.names) if len(self.names) else tuple(map(str, range(len(data))))
        if len(names) != len(data):
            raise UserError(f"{len(data)} images but {len(names)} names")
        object.__setattr__(self, "names", names)

    def take(self, indices: np.ndarray) -> ArrayImages:
        """Return the images at `indices`, in that order."""
        return ArrayImages(self.data[indices], tuple(self.names[i] for i in indices))

    def encoded(self, index: int) -> bytes:
        """One image as PNG, which loses nothing."""
        return tf.io.encode_png(self.data[index]).numpy()

    def pixels(self) -> np.ndarray:
        """See `Images.pixels`."""
        return self.data

    def size(self, index: int) -> tuple[int, int]:
        """Height and width."""
        return self.data.shape[1], self.data.shape[2]

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        return source_of_decoded(self.data)


@dataclasses.dataclass(frozen=True, repr=False)
class VectorImages(Images):
    """Stored vectors in the place of images, for heads: no view changes them.

    Args:
        vectors: (N, D) floats; may be memory-mapped.
        names: The name of each image in messages and reports, such as its path; by default its row.
        folder: Where images lie whose names are relative; empty: in the current folder.

    Raises:
        UserError: There are no vectors, or not as many as names.

    Example:
        >>> VectorImages(np.ones((2, 8), np.float32)).name(1)
        '1'
    """

    decoded: ClassVar[bool] = True

    vectors: np.ndarray
    names: tuple[str, ...] = ()
    folder: str = ""

    def __post_init__(self):
        if self.vectors.ndim != 2 or self.vectors.dtype.kind not in "fiu":
            raise UserError(f"vectors must be numbers (N, D), not {self.vectors.dtype} of shape {self.vectors.shape}")
        if self.names and len(self.names) != len(self.vectors):
            raise UserError(f"{len(self.vectors)} vectors but {len(self.names)} names")

    def __len__(self) -> int:
        return len(self.vectors)

    def name(self, index: int) -> str:
        """Return the name of one image; of one that is there, its path."""
        if not self.names:
            return str(index)
        name = self.names[index]
        return (
            name if self.folder and name.startswith(f"{self.folder.rstrip('/')}/") else os.path.join(self.folder, name)
        )

    def take(self, indices: np.ndarray) -> VectorImages:
        """Return the vectors at `indices`, in that order."""
        return VectorImages(self.vectors[indices], tuple(self.names[i] for i in indices if self.names), self.folder)

    def encoded(self, index: int) -> bytes:
        """Return the bytes of the image that a vector is of; of addresses, those below the folder alone."""
        path = self.name(index)
        if files.is_remote(path) and not path.startswith(f"{self.folder.rstrip('/')}/" if self.folder else "\0"):
            raise OSError(f"{path} is an address, and not below the folder of the images")
        return files.read_bytes(path)

    def picture(self, index: int) -> np.ndarray:
        """See `Images.picture`; where the image is not there, the vector as a square of gray levels."""
        try:
            return super().picture(index)
        except UserError:
            vector = np.asarray(self.vectors[index], np.float32)
            side = math.ceil(math.sqrt(len(vector)))
            gray = 255 * (vector - vector.min()) / max(float(np.ptp(vector)), 1e-12)
            square = np.resize(gray.astype(np.uint8), side * side).reshape(side, side)
            return np.kron(np.repeat(square[..., None], 3, axis=2), np.ones((4, 4, 1), np.uint8))

    def pixels(self) -> np.ndarray:
        """Return the vectors."""
        return self.vectors

    def lookup(self) -> Source:
        """See `Images.lookup`; whole batches of rows."""
        return Source(
            lambda indices: [self.vectors[indices].astype(np.float32, copy=False)],
            (tf.float32,),
            dimension=self.vectors.shape[1],
        )


# None of our graphs rests on Python's own `if` and loops over tensors: to translate them takes most of the time that
# tracing does, seconds a start.
as_written = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True)
class Source:
    """Where images come from: looked up by index in Python, made into images in the graph."""

    columns: Callable[[np.ndarray], list[np.ndarray]]  # of (n,) indices: arrays of n rows
    dtypes: tuple[tf.DType, ...]  # of these arrays
    # Of a choice and one row of each: see `decode_part`; None for vectors.
    read_part: Any = None
    size: tuple[int, int] | None = None  # (H, W) where the single column is the (n, H, W, 3) images themselves
    dimension: int = 0  # D where the single column is (n, D) vectors, of which there are no views


def source_of_encoded(
    read: Callable[[np.ndarray], Iterable[bytes]], load: Callable[[tf.Tensor], tf.Tensor] = lambda encoded: encoded
) -> Source:
    """Return encoded images. `read` returns for (n,) indices their bytes, or the texts that `load` reads them from."""
    return Source(
        lambda indices: [strings(read(indices))], (tf.string,), lambda choose, row: decode_part(load(row), choose)
    )


def source_of_decoded(arrays: Sequence[np.ndarray] | np.ndarray) -> Source:
    """Images held decoded, each (H, W, 3) uint8."""
    if isinstance(arrays, np.ndarray) or len({array.shape for array in arrays}) == 1:
        return Source(
            lambda indices: [np.stack([arrays[i] for i in indices])],
            (tf.uint8,),
            lambda choose, image: chosen_part(tf.ensure_shape(image, arrays[0].shape), choose),
            arrays[0].shape[:2],
        )
    # Only strings may differ in length within a batch.
    return Source(
        lambda indices: [
            strings(arrays[i].tobytes() for i in indices),
            np.array([arrays[i].shape for i in indices], np.int32),
        ],
        (tf.string, tf.int32),
        lambda choose, pixels, shape: chosen_part(tf.reshape(tf.io.decode_raw(pixels, tf.uint8), shape), choose),
    )


def look_up(
    labels: np.ndarray, source: Source, indices_of: Callable[[int], np.ndarray], step: tf.Tensor, batch_size: int | None
) -> tuple[tf.Tensor, ...]:
    """Labels and source columns of one step's images, with what is known of their shapes."""

    def rows(step: np.int64) -> list[np.ndarray]:
        indices = indices_of(int(step))
        return [labels[indices], *source.columns(indices)]

    found = _python_calls().call(rows, [step], [tf.int64, *source.dtypes])
    shapes: list[tuple[int | None, ...]] = [(batch_size, *labels.shape[1:]), *[(batch_size,)] * (len(found) - 1)]
    if source.size is not None:
        shapes[1] = (batch_size, *source.size, 3)
    elif source.dimension:
        shapes[1] = (batch_size, source.dimension)
    elif len(found) == 3:
        shapes[2] = (batch_size, 3)  # the shape of a decoded image
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
        # TensorFlow keeps what it calls until the process ends. The function, and the images that it reads, are to live
        # as long as the graph of the dataset that calls it.
        graph = tf.compat.v1.get_default_graph()
        while hasattr(outer := getattr(graph, "outer_graph", None), "outer_graph"):
            graph = outer
        if hasattr(graph, "outer_graph"):  # no function without a graph outlives this call
            graph.called = [*getattr(graph, "called", ()), function]
        weak: Callable[[], Any] = weakref.ref(function)

        def counted(*arguments: Any) -> Any:
            with self._idle:
                self._running += 1
            try:
                return weak()(*arguments)
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
    """Return an array that TensorFlow takes for a vector of strings."""
    # Not NumPy's own string type, which drops zero bytes at the end.
    return np.array(list(values), object)


_SAMPLE = 4096


def images_checksum(images: Images) -> str:
    """SHA-256 of the length, the first and the last 4 KiB of each image, in their order, as `"sha256:..."`.

    Pixels in memory count in full.
    Names do not count. An image that cannot be read counts as empty.

    Args:
        images: The images.

    Example:
        >>> images_checksum(EncodedImages((b"a",), ("a.jpg",))) == images_checksum(EncodedImages((b"b",), ("a.jpg",)))
        False
    """
    digest = hashlib.sha256()
    if images.decoded:
        digest.update(images.pixels().tobytes())
    else:
        for sample in in_threads(lambda index: _sample(images, index), range(len(images))):
            digest.update(hashlib.sha256(sample).digest())
    return f"sha256:{digest.hexdigest()}"


def _sample(images: Images, index: int) -> bytes:
    try:
        with images.open(index) as file:
            head = file.read(_SAMPLE)
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(size - _SAMPLE, 0))
            return size.to_bytes(8, "little") + head + file.read(_SAMPLE)
    except (OSError, UserError):
        return b""
