"""Sets of images, in files or in memory: read, measured and looked up by index.

The images of a batch are looked up in Python, because that copies only what the batch needs: data
held in memory is never copied into TensorFlow as a whole, and the size of a graph is no limit.
"""

from __future__ import annotations

import abc
import atexit
import concurrent.futures
import copy
import dataclasses
import functools
import hashlib
import io
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, ClassVar, Self, TypeVar

import numpy as np
import tensorflow as tf
from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from tfdml.data.decoding import (
    Format,
    decode_image,
    encoded_crop,
    narrow_fault,
    shown_size,
)
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.io import files
from tfdml.names import ID, PATH, clean, split_crop_name

_Made = TypeVar("_Made")


# Pillow takes one byte of filling at a time. Headers of photographs take some hundred reads.
_MOST_READS = 20_000
_PLUGINS: Mapping[str, Callable[[Any], Image.Image]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WebP": WebPImagePlugin.WebPImageFile,
}


class _FewReads:
    """A file that fails where a header takes too many reads."""

    def __init__(self, file: BinaryIO):
        self._file, self._reads = file, 0

    def read(self, size: int = -1) -> bytes:
        self._reads += 1
        if self._reads > _MOST_READS:
            raise OSError("too much filling in its header; save it again")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def read_header(file: BinaryIO, kind: Format) -> Image.Image:
    """Return an image of which only the header is read, whatever size it states.

    Raises:
        OSError: It takes too many reads.
    """
    file.seek(0)
    return _PLUGINS[kind.name](_FewReads(file))


class Images(abc.ABC):
    """Images by index. A new kind says how its bytes are read and how a batch of it is looked up;
    the rest follows.

    Attributes:
        names: The name of each image in messages and reports.
        decoded: Whether the images are held as pixels, so that there is nothing to decode and
            nothing to be damaged.
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

    def box(self, index: int) -> tuple[int, ...] | None:
        """Return the part of the file that one image is, see `split_crop_name`; None for all."""
        return None

    @abc.abstractmethod
    def take(self, indices: np.ndarray) -> Images:
        """Return the images at `indices`, in that order."""

    def _with(self, **values: Any) -> Self:
        """Return a copy with other values, which passed the checks when they entered."""
        images = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(images, name, value)
        return images

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
        with user_errors(
            kinds, f"{self.name(index)} cannot be read as an image: {ERROR_TEXT}", keep="last"
        ):
            return decode_image(tf.constant(self.encoded(index))).numpy()

    @abc.abstractmethod
    def lookup(self) -> Source:
        """How the input pipeline reads a batch of them."""

    def pixels(self) -> np.ndarray:
        """Return the images themselves, of a kind whose images are `decoded`."""
        raise TypeError(f"{type(self).__name__} holds no decoded images")

    def open(self, index: int) -> BinaryIO:
        """One image as a file, for those who need only its beginning or its end."""
        return io.BytesIO(self.encoded(index))

    def size(self, index: int) -> tuple[int, int] | None:
        """Height and width of one image as it is shown, without decoding it; None for what is no
        image."""
        try:
            height, width = shown_size(tf.constant(self.encoded(index))).numpy().tolist()
        except Exception:  # a file system's own errors, and TensorFlow's on damaged headers
            return None
        is_image = height > 0 and width > 0
        return (height, width) if is_image else None


def row_numbers(rows: Any) -> np.ndarray:
    """Return rows as int64; a mask, which would name rows 0 and 1, is refused.

    Example:
        >>> row_numbers(range(2))
        array([0, 1])
    """
    array = np.asarray(rows)
    if array.size and array.dtype.kind not in "iu":
        raise UserError(
            f"rows must be integers, not {array.dtype}; those of a mask are np.flatnonzero(mask)"
        )
    return array.astype(np.int64)


def join_images(first: Images, second: Images) -> Images:
    """Return the images of two of one kind, one after the other."""
    assert dataclasses.is_dataclass(first)
    assert type(first) is type(second)
    values: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(first)):
        value, other = getattr(first, name), getattr(second, name)
        values[name] = value + other if isinstance(value, tuple) else value
        if isinstance(value, np.ndarray):
            values[name] = np.concatenate([value, other])
    return dataclasses.replace(first, **values)


# Most of the time goes to waiting for the disk or the network.
_THREADS = 16
# A task of a thread costs about as much as a small file.
_PER_TASK = 256


@dataclasses.dataclass(frozen=True, repr=False)
class FileImages(Images):
    """Images that lie in files, read when they are needed.

    Args:
        paths: One path per image, local or on any file system that `fsspec` knows. That of a part
            of an image ends with its box, see `tfdml.names.crop_name`.

    Raises:
        UserError: A path is no text, or `tfdml.names.clean` refuses it.
    """

    paths: tuple[str, ...]

    def __post_init__(self):
        paths = [os.fspath(path) if isinstance(path, os.PathLike) else path for path in self.paths]
        object.__setattr__(self, "paths", tuple(clean(paths, PATH, "paths")))

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The paths."""
        return self.paths

    def take(self, indices: np.ndarray) -> FileImages:
        """Return the images at `indices`, in that order."""
        return self._with(paths=tuple(self.paths[i] for i in indices))

    def box(self, index: int) -> tuple[int, ...] | None:
        """See `Images.box`."""
        return split_crop_name(self.paths[index])[1]

    def open(self, index: int) -> BinaryIO:
        """Return the file of one image; that of the whole image where it is a part."""
        return files.open_file(split_crop_name(self.paths[index])[0], buffering=0)

    def encoded(self, index: int) -> bytes:
        """Return the bytes of one file; of a part of an image those of a PNG of it."""
        return read_image(self.paths[index])

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        if any(files.is_remote(path) or split_crop_name(path)[1] for path in self.paths):
            return _source_read_here(self)
        return source_of_encoded(
            lambda indices: (os.fsencode(self.paths[i]) for i in indices), tf.io.read_file
        )


def read_image(name: str) -> bytes:
    """Return the bytes of an image, or those of a PNG of the part that its name states.

    Raises:
        OSError: The file cannot be read.
        tf.errors.InvalidArgumentError: The box reaches beyond the image.

    Example:
        >>> image = read_image("photos/bus/0.jpg#xywh=0,0,8,8")
    """
    path, box = split_crop_name(name)
    data = files.read_bytes(path)
    return data if box is None else encoded_crop(data, box).numpy()


def in_threads(
    function: Callable[[int], _Made],
    indices: Sequence[int],
    threads: int = _THREADS,
    per_task: int = _PER_TASK,
) -> Iterator[_Made]:
    """Yield what a function returns for each of (n,) indices, in their order."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        parts = (indices[start : start + per_task] for start in range(0, len(indices), per_task))
        for made in pool.map(lambda part: list(map(function, part)), parts):
            yield from made


def _source_read_here(images: Images) -> Source:
    """Return images that TensorFlow cannot read itself."""

    def bytes_or_nothing(index: int) -> bytes:
        try:
            return images.encoded(index)
        except (
            Exception
        ):  # clients of file systems have their own error types; no decoder takes an empty file
            return b""

    return source_of_encoded(
        lambda indices: in_threads(bytes_or_nothing, indices.tolist(), per_task=1)
    )


@dataclasses.dataclass(frozen=True, repr=False)
class EncodedImages(Images):
    """Encoded images (JPEG, PNG ...) held in memory, such as the members of a small archive.

    Args:
        data: The bytes of each image.
        names: The name of each image in messages and reports.
    """

    data: tuple[bytes, ...]
    names: tuple[str, ...]

    def __post_init__(self):
        object.__setattr__(self, "names", tuple(clean(self.names, ID, "names")))

    def take(self, indices: np.ndarray) -> EncodedImages:
        """Return the images at `indices`, in that order."""
        names = tuple(self.names[i] for i in indices)
        return self._with(data=tuple(self.data[i] for i in indices), names=names)

    def encoded(self, index: int) -> bytes:
        """Return the bytes of one image."""
        return self.data[index]

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        return source_of_encoded(lambda indices: [self.data[i] for i in indices])


@dataclasses.dataclass(frozen=True, repr=False)
class ArrayImages(Images):
    """Decoded images of one size held in memory.

    Args:
        data: (N, H, W, 3) uint8, pixels 0-255. Images in 0..1 are refused: multiply them by 255
            first.
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
            cure = (
                "(255 * images).round().astype('uint8')"
                if in_unit_range
                else "images.round().astype('uint8')"
            )
            raise UserError(
                f"images must be uint8 pixels of 0 to 255, not {data.dtype}; convert them: {cure}"
            )
        object.__setattr__(self, "data", data)
        names = tuple(clean(self.names if len(self.names) else range(len(data)), ID, "names"))
        if len(names) != len(data):
            raise UserError(f"{len(data)} images but {len(names)} names")
        object.__setattr__(self, "names", names)

    def take(self, indices: np.ndarray) -> ArrayImages:
        """Return the images at `indices`, in that order."""
        return self._with(data=self.data[indices], names=tuple(self.names[i] for i in indices))

    def encoded(self, index: int) -> bytes:
        """One image as PNG, which loses nothing."""
        return tf.io.encode_png(self.data[index]).numpy()

    def picture(self, index: int) -> np.ndarray:
        """See `Images.picture`."""
        return self.data[index]

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
class OptionalImages(Images):
    """Images that stored vectors are of: a picture of them is a gray square where the image is not
    there.

    Args:
        names: The name of each image in messages and reports, such as its path.
        folder: Where images lie whose names are relative; empty: in the current folder.

    Example:
        >>> OptionalImages(("bus/0.jpg",), "no/such/folder").picture(0).shape
        (64, 64, 3)
    """

    names: tuple[str, ...]
    folder: str = ""

    def __post_init__(self):
        object.__setattr__(self, "names", tuple(clean(self.names, ID, "names")))

    def name(self, index: int) -> str:
        """Return the path of one image."""
        name = self.names[index]
        return name if self._is_inside(name) else os.path.join(self.folder, name)

    def _is_inside(self, name: str) -> bool:
        return bool(self.folder) and name.startswith(f"{self.folder.rstrip('/')}/")

    def take(self, indices: np.ndarray) -> OptionalImages:
        """Return the images at `indices`, in that order."""
        return self._with(names=tuple(self.names[i] for i in indices))

    def encoded(self, index: int) -> bytes:
        """Return the bytes of one image; of addresses, those below the folder alone."""
        path = self.name(index)
        if files.is_remote(path) and not self._is_inside(path):
            raise OSError(f"{path} is an address, and not below the folder of the images")
        return read_image(path)

    def picture(self, index: int) -> np.ndarray:
        """See `Images.picture`; a gray square where the image is not there."""
        try:
            return super().picture(index)
        except UserError:
            return np.full((64, 64, 3), 160, np.uint8)

    def lookup(self) -> Source:
        """See `Images.lookup`."""
        return _source_read_here(self)


# None of our graphs rests on Python's own `if` and loops over tensors: to translate them takes most
# of the time that tracing does, seconds a start.
as_written = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True)
class Source:
    """Where images come from: looked up by index in Python, made into images in the graph.

    Args:
        columns: Returns of (n,) indices arrays of n rows.
        dtypes: Those of these arrays.
        read: Makes the image (H, W, 3) uint8 of one row of each; None for vectors.
        size: (H, W) where the single column is the (n, H, W, 3) images themselves.
        dimension: D where the single column is (n, D) vectors, of which there are no views.
    """

    columns: Callable[[np.ndarray], list[np.ndarray]]
    dtypes: tuple[tf.DType, ...]
    read: Any = None
    size: tuple[int, int] | None = None
    dimension: int = 0

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of a row of each column."""
        if self.size is not None:
            return [(*self.size, 3)]
        if self.dimension:
            return [(self.dimension,)]
        # The bytes of an image, and its shape where they do not state it.
        return [(), (3,)][: len(self.dtypes)]


def source_of_encoded(
    read: Callable[[np.ndarray], Iterable[bytes]],
    load: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
) -> Source:
    """Return encoded images. `read` returns for (n,) indices their bytes, or the texts that `load`
    reads them from."""
    return Source(
        lambda indices: [strings(read(indices))], (tf.string,), lambda row: decode_image(load(row))
    )


def source_of_vectors(vectors: np.ndarray) -> Source:
    """Return (N, D) vectors, looked up in whole batches of rows."""

    def rows(indices: np.ndarray) -> list[np.ndarray]:
        return [vectors[indices].astype(np.float32, copy=False)]

    return Source(rows, (tf.float32,), dimension=vectors.shape[1])


def source_of_decoded(arrays: Sequence[np.ndarray] | np.ndarray) -> Source:
    """Images held decoded, each (H, W, 3) uint8."""

    def stacked(indices: np.ndarray) -> list[np.ndarray]:
        return [np.stack([arrays[i] for i in indices])]

    def bytes_and_shapes(indices: np.ndarray) -> list[np.ndarray]:
        shapes = [arrays[i].shape for i in indices]
        return [strings(arrays[i].tobytes() for i in indices), np.array(shapes, np.int32)]

    def of_bytes(pixels: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
        image = tf.reshape(tf.io.decode_raw(pixels, tf.uint8), shape)
        return tf.ensure_shape(image, (None, None, 3))

    if isinstance(arrays, np.ndarray) or len({array.shape for array in arrays}) == 1:
        return Source(stacked, (tf.uint8,), tf.identity, arrays[0].shape[:2])
    # Only strings may differ in length within a batch.
    return Source(bytes_and_shapes, (tf.string, tf.int32), of_bytes)


def look_up(
    labels: Any,
    source: Source,
    indices_of: Callable[[int], np.ndarray],
    step: tf.Tensor,
    batch_size: int | None,
) -> tuple[Any, ...]:
    """Labels, an array or a tuple of them, and source columns of one step's images, with the shapes
    that are known."""
    arrays = tf.nest.flatten(labels)

    def rows(step: np.int64) -> list[np.ndarray]:
        indices = indices_of(int(step))
        return [*(array[indices] for array in arrays), *source.columns(indices)]

    dtypes = [tf.as_dtype(array.dtype) for array in arrays]
    columns = _python_calls().call(rows, [step], [*dtypes, *source.dtypes])
    shapes = [*(array.shape[1:] for array in arrays), *source.shapes]
    for number, shape in enumerate(shapes):
        columns[number] = tf.ensure_shape(columns[number], (batch_size, *shape))
    return tf.nest.pack_sequence_as(labels, columns[: len(arrays)]), *columns[len(arrays) :]


class _PythonCalls:
    """Calls of Python functions from graphs that stop in time before the interpreter shuts down.

    CPython ends any foreign thread that calls into it once shutdown has begun. An iterator that
    still prefetches then waits for its thread for ever, and the process never exits. So at exit a
    check within the graph, which needs no Python, refuses further calls, and the calls that are
    under way are waited for.
    """

    _PATIENCE = 10.0  # seconds
    # For threads between the check and the call, or between the call and the conversion of its
    # result.
    _GRACE = 0.1  # seconds

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            # Nothing is ever put in: a queue is a flag, open or closed, that no distribution
            # strategy copies.
            self._flag = tf.queue.FIFOQueue(1, [tf.bool])
        self._running = 0
        self._idle = threading.Condition()
        atexit.register(self._close)

    def call(
        self, function: Callable[..., Any], inputs: list[tf.Tensor], dtypes: list[tf.DType]
    ) -> list[tf.Tensor]:
        # TensorFlow keeps what it calls until the process ends. The function, and the images that
        # it reads, are to live as long as the graph of the dataset that calls it.
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
    """SHA-256 of the length, the first and the last 4 KiB of each image, and its box, in their
    order, as `"sha256:..."`.

    Pixels in memory count in full. Names do not count. An image that cannot be read counts as
    empty.

    Args:
        images: The images.

    Example:
        >>> images_checksum(EncodedImages((b"a",),
        ...     ("a.jpg",))) == images_checksum(EncodedImages((b"b",), ("a.jpg",)))
        False
    """
    digest = hashlib.sha256()
    if images.decoded:
        digest.update(images.pixels().tobytes())
    else:
        # Within the threads, whose results wait in memory.
        for part in in_threads(
            lambda index: hashlib.sha256(_sample(images, index)).digest(), range(len(images))
        ):
            digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def _sample(images: Images, index: int) -> bytes:
    try:
        box = images.box(index)
        with images.open(index) as file:
            head = file.read(_SAMPLE)
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(size - _SAMPLE, 0))
            sample = size.to_bytes(8, "little") + head + file.read(_SAMPLE)
        return sample if box is None else sample + repr(box).encode()
    except (OSError, UserError):
        return b""
