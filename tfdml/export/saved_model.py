"""SavedModel: encoded images in, embeddings out, with the whole preprocessing inside, and its
warm-up requests.

And what all formats share: the network alone, in float32, its weights made constants, and the
numbered versions that they are published in, each written atomically.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdml import workarounds
from tfdml.data.decoding import (
    FOREIGN,
    FORMATS,
    decode_image,
    header_size,
    only,
    scan_fault,
    starts_with,
)
from tfdml.data.images import as_written
from tfdml.data.limits import NARROWEST, SERVING_LIMIT
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.io.files import locked, partial_folder, require_local, sweep
from tfdml.models import AnyEmbedder, TextEmbedder

SIGNATURES = ("serving_default", "embed_images", "embed_each")
WARM_UP = Path("assets.extra") / "tf_serving_warmup_requests"
# The numbers of images in warm-up requests; a server is quick for the shapes that it has seen.
_WARM_UP_SIZES = (1, 8, 32)
# Height and width of their image, which every limit on pixels allows.
_WARM_UP_SIDE = 16
# Images of a request that are decoded at once.
_SIDE_BY_SIDE = 16
# Resizing holds four bytes where a decoded image has one.
_RESIZED_SHARE = 4
_DAMAGED = "cannot be decoded: it is damaged, cut off, or of a kind that is not supported"

# Versions


@contextlib.contextmanager
def new_version(versions: str | os.PathLike) -> Iterator[tuple[Path, Path]]:
    """Make the next version: `versions/<n>`, one more than the highest number there.

    What the block writes appears under the number when the block ends well, in one step, and
    disappears when it does not. Earlier versions stay as they are. A process that exports into the
    same folder waits. What exports left that were killed is removed.

    Args:
        versions: Where versions lie, as TF Serving's `base_path`; made if it is not there.

    Yields:
        A hidden folder to write the files to, and the path that it gets when it is finished.

    Raises:
        UserError: The folder cannot be written.

    Example:
        >>> with new_version("models/photos") as (hidden, path):
        ...     size = (hidden / "model_card.json").write_text("{}")
        >>> path
        PosixPath('models/photos/1')
    """
    require_local(versions, "folder")
    with user_errors(OSError, f"{versions} cannot be written: {ERROR_TEXT}"):
        os.makedirs(versions, exist_ok=True)
        with locked(versions, "folder", wait=True):
            sweep(versions)
            path = Path(versions) / str(1 + max(version_numbers(versions), default=0))
            with partial_folder(versions) as hidden:
                yield hidden, path
                os.rename(hidden, path)


def version_numbers(versions: str | os.PathLike) -> list[int]:
    """Return the numbers of the versions in a folder, ascending; none where there is no folder."""
    try:
        return sorted(
            int(name) for name in os.listdir(versions) if re.fullmatch("[0-9]{1,18}", name)
        )
    except (FileNotFoundError, NotADirectoryError):
        return []


# The network


def check_backend() -> None:
    """Refuse to export on another backend of Keras than TensorFlow, whose graphs exports are.

    Raises:
        UserError: Keras runs on another backend.

    Example:
        >>> check_backend()
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise UserError(
            f"export needs Keras's TensorFlow backend, and KERAS_BACKEND is {backend}: save the "
            "embedder with "
            "embedder.save('embedder.keras'), and load and export it in a process with "
            "KERAS_BACKEND=tensorflow"
        )


def view_spec(shape: tuple[int, ...]) -> tf.TensorSpec:
    """Return what a network is fed: for (S, S, 3) `images` (B, S, S, 3) uint8, for (D,) `vectors`
    (B, D) float32.

    Example:
        >>> view_spec((768,))
        TensorSpec(shape=(None, 768), dtype=tf.float32, name='vectors')
    """
    if len(shape) == 1:
        return tf.TensorSpec((None, *shape), tf.float32, name="vectors")
    return tf.TensorSpec((None, *shape), tf.uint8, name="images")


def frozen_module(
    network: Callable[[tf.Tensor], tf.Tensor], shape: tuple[int, ...], dtype: tf.DType | None = None
) -> tf.Module:
    """Return a network as a module whose function `embed` has no variables.

    Args:
        network: From images (B, S, S, 3) to embeddings (B, d), such as an embedder.
        shape: (S, S, 3) of an image, as `Embedder.view_shape`.
        dtype: Of the images, if not that of `view_spec`.

    Returns:
        A module with `embed(images)`, which returns `{"embedding": (B, d)}`.

    Raises:
        UserError: The network calls a Python function, which no other process has.

    Example:
        >>> frozen_module(embedder, (28, 28, 3)).embed(views)["embedding"].shape
        TensorShape([2, 16])
    """
    spec = view_spec(shape)
    spec = tf.TensorSpec(spec.shape, dtype or spec.dtype, name=spec.name)
    traced = tf.function(lambda images: network(images), input_signature=[spec], autograph=False)
    frozen = workarounds.frozen(traced.get_concrete_function())
    graph = frozen.graph.as_graph_def()
    nodes = itertools.chain(graph.node, *(function.node_def for function in graph.library.function))
    if calls := [node.name for node in nodes if "PyFunc" in node.op]:
        raise UserError(
            f"{calls[0]} calls a Python function, which an exported model cannot: write it with "
            "keras.ops"
        )
    module = tf.Module()
    module.embed = tf.function(
        lambda images: {"embedding": frozen(images)[0]}, input_signature=[spec], autograph=False
    )
    return module


def in_float32(embedder: AnyEmbedder) -> AnyEmbedder:
    """Return the same embedder computing in float32; itself where it does already.

    Weights are float32 under every mixed policy: nothing is rounded. What is exported must not
    depend on the device's half precision, and LiteRT knows no mixed policy.

    Args:
        embedder: A built embedder.

    Returns:
        An embedder with the same weights.

    Example:
        >>> in_float32(embedder).compute_dtype
        'float32'
    """
    config = keras.saving.serialize_keras_object(embedder)
    plain = keras.tree.traverse(_plain, config)
    if plain == config:
        return embedder
    result = keras.saving.deserialize_keras_object(plain)
    result.build((None, *embedder.view_shape))
    # Through a file: Keras adds low-rank changes to the weights that it saves.
    with tempfile.TemporaryDirectory() as folder:
        embedder.save_weights(f"{folder}/embedder.weights.h5")
        result.load_weights(f"{folder}/embedder.weights.h5")
    return result


def _plain(node: Any) -> Any:
    """Return what takes the place of a mixed policy in a configuration; None for all else."""
    if isinstance(node, dict) and node.get("class_name") == "DTypePolicy":
        return {**node, "config": {"name": "float32"}}
    if isinstance(node, str) and node in ("mixed_float16", "mixed_bfloat16"):
        return "float32"
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what TensorFlow logs of every save and conversion; what fails is raised."""
    verbosity = logging.get_verbosity()
    # The converter warns of an interpreter that it uses itself.
    with warnings.catch_warnings(action="ignore"):
        try:
            logging.set_verbosity(logging.ERROR)
            yield
        finally:
            logging.set_verbosity(verbosity)


# The SavedModel


def export_saved_model(
    embedder: AnyEmbedder, folder: str | os.PathLike, max_pixels: int = SERVING_LIMIT
) -> Path:
    """Write the next version of a servable SavedModel atomically, and nothing else.

    `tfdml.export.export_model` writes other formats too, compares each with the embedder, and adds
    a model card.

    Args:
        embedder: A built `Embedder` or `MomentEmbedder`.
        folder: Where versions lie, as TF Serving's `base_path`; earlier versions stay.
        max_pixels: See `write_saved_model`.

    Returns:
        The path of the new version.

    Raises:
        UserError: Keras runs on another backend than TensorFlow, or the folder cannot be written.

    Example:
        >>> path = export_saved_model(embedder, "models/cars")
        >>> served = tf.saved_model.load(path)
        >>> served.signatures["serving_default"](image_bytes=tf.constant([jpeg]))["embedding"].shape
        TensorShape([1, 16])
    """
    check_backend()
    with new_version(folder) as (hidden, path):
        write_saved_model(embedder, hidden, max_pixels)
    return path


def write_saved_model(
    embedder: AnyEmbedder,
    folder: str | os.PathLike,
    max_pixels: int = SERVING_LIMIT,
    text_embedder: TextEmbedder | None = None,
) -> None:
    """Write a SavedModel with these signatures; each takes a batch of any size, none included.

    - `serving_default`: `image_bytes` (B,) strings, JPEG, PNG or WebP -> `embedding` (B, d) float32
      of length 1;
    - `embed_images`: `images` (B, H, W, 3) uint8 of any size -> `embedding`;
    - `embed_each`: `image_bytes` -> `embedding`, and `error` (B,) strings: what is wrong with an
      image, whose row is then zero, or empty. For a server that puts the images of several clients
      into one batch.

    With a tower of texts also:

    - `embed_texts`: `texts` (B,) strings, UTF-8 -> `embedding`. It fails on the first text that is
      empty or does not fit into the tokens, and names it.

    That of a `Head` has `serving_default` alone: `vectors` (B, D) float32 -> `embedding`.

    The first two fail on the first image that cannot be decoded, and name it. Decoding, resizing
    and cropping happen inside, by the functions that evaluation uses. The SavedModel needs
    TensorFlow only, neither Keras nor tfdml.

    Args:
        embedder: A built `Embedder` or `MomentEmbedder`.
        folder: Where to write; an empty folder or none.
        max_pixels: Images whose header states more pixels are refused before they are decoded.
        text_embedder: The tower of texts, with a tokenizer that TensorFlow runs; None: there is
            none.
    """
    spec = view_spec(embedder.view_shape)
    embed = _embedding_function(embedder, spec)
    endpoints: dict[str, tuple[Callable, tf.TensorSpec]]
    if len(embedder.view_shape) == 1:
        endpoints = {"serving_default": (lambda vectors: {"embedding": embed(vectors)}, spec)}
    else:
        views = RequestPreprocessor(EvaluationTransform.of(embedder), max_pixels)

        def embed_bytes(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"embedding": embed(views.all_or_error(image_bytes, "image_bytes"))}

        def embed_images(images: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"embedding": embed(views.of_images(images, "images"))}

        def embed_each(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
            images, errors = views.each(image_bytes)
            return {
                "embedding": tf.where((errors == "")[:, None], embed(images), 0.0),
                "error": errors,
            }

        text = tf.TensorSpec((None,), tf.string)
        endpoints = {
            "serving_default": (embed_bytes, text),
            "embed_images": (embed_images, tf.TensorSpec((None, None, None, 3), tf.uint8)),
            "embed_each": (embed_each, text),
        }
    module = tf.Module()
    if text_embedder is not None:
        module.tokenizer = text_embedder.tokenizer  # whose tables are saved
        endpoints["embed_texts"] = (
            _texts_endpoint(text_embedder),
            tf.TensorSpec((None,), tf.string),
        )
    module.endpoints = {
        name: tf.function(function, input_signature=[spec], autograph=False)
        for name, (function, spec) in endpoints.items()
    }
    # Nothing is trained any more, and gradients of constants cannot be saved.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    with quiet():
        tf.saved_model.save(module, str(folder), signatures=dict(module.endpoints), options=options)


def _embedding_function(
    embedder: AnyEmbedder, spec: tf.TensorSpec
) -> Callable[[tf.Tensor], tf.Tensor]:
    # Constants, which TensorFlow can fold into one another, run a third faster than variables; and
    # the signatures share them.
    network = frozen_module(embedder, embedder.view_shape, spec.dtype)

    @tf.function(input_signature=[spec], autograph=False)
    def embed(inputs: tf.Tensor) -> tf.Tensor:
        # TensorFlow's fused kernels fail on an empty batch; its answer is an empty one.
        none = tf.zeros((0, embedder.embedding_dim))
        return tf.cond(
            tf.shape(inputs)[0] > 0, lambda: network.embed(inputs)["embedding"], lambda: none
        )

    return embed


def _texts_endpoint(embedder: TextEmbedder) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """Return the function from strings to embeddings, which refuses what `TextEmbedder.tokenize`
    refuses."""
    embed = _embedding_function(embedder, tf.TensorSpec((None, *embedder.view_shape), tf.int32))

    def embed_texts(texts: tf.Tensor) -> dict[str, tf.Tensor]:
        tokens, is_full = embedder.encode(texts)
        cut = tf.logical_and(tf.cast(is_full, tf.bool), not embedder.truncate)
        faults = tf.where(cut, f"does not fit into {embedder.length} tokens", "")
        faults = tf.where(tf.strings.length(tf.strings.strip(texts)) == 0, "is empty", faults)
        with tf.control_dependencies([refuse(faults, "texts")]):
            return {"embedding": embed(tf.cast(tokens, tf.int32))}

    return embed_texts


def model_files(folder: Path) -> list[Path]:
    """Return the files of a SavedModel that its answers come from."""
    return [
        folder / "saved_model.pb",
        *sorted(file for file in (folder / "variables").rglob("*") if file.is_file()),
    ]


# The images of a request


@dataclasses.dataclass(frozen=True)
class RequestPreprocessor:
    """Views of the images of a request, by the functions that evaluation uses.

    An image is refused by its header when it is empty, of no known format, or larger than the
    limit; decoding finds the rest. A bad image is named by its place in the request.

    Args:
        transform: The view.
        max_pixels: Most pixels of an image. A quarter of it is what the resized image may have, and
            no side may be more than 100 times the other: a line of pixels, small as it is, becomes
            huge when it is enlarged.

    Example:
        >>> views = RequestPreprocessor(EvaluationTransform(256,
        ...     224)).all_or_error(tf.constant([jpeg]), "image_bytes")
    """

    transform: EvaluationTransform
    max_pixels: int = SERVING_LIMIT

    @property
    def spec(self) -> tf.TensorSpec:
        """Of one view."""
        return tf.TensorSpec((self.transform.image_size, self.transform.image_size, 3), tf.uint8)

    def all_or_error(self, texts: tf.Tensor, name: str) -> tf.Tensor:
        """Return the views of all images of a request, or an error that names the first that has
        none.

        Args:
            texts: (B,) strings, the bytes of images.
            name: What the request calls them.

        Returns:
            (B, S, S, 3) uint8.

        Raises:
            tf.errors.InvalidArgumentError: An image cannot be decoded; it is named:
                `image_bytes[3] of 32: ...`.
        """

        def together() -> tf.Tensor:
            views, faults = self.each(texts)
            with tf.control_dependencies([refuse(faults, name)]):
                return tf.identity(views)

        def alone() -> tf.Tensor:
            view, fault = self._view_or_fault(texts[0])
            check = tf.debugging.Assert(
                fault == "", [tf.strings.join([f"{name}[0] of 1: ", fault])]
            )
            with tf.control_dependencies([check]):
                return view[None]

        # The way for several costs two milliseconds, and a single image needs no name. Decoding it
        # outside lets TensorFlow's own words through as well.
        return tf.cond(tf.size(texts) == 1, alone, together)

    def each(self, texts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the view of every image that has one, and what is wrong with the others.

        Args:
            texts: See `all_or_error`.

        Returns:
            (B, S, S, 3) uint8, black where there is no view, and (B,) strings, empty where there is
            one.
        """
        count = tf.size(texts, out_type=tf.int64)
        items = tf.data.Dataset.from_tensor_slices(texts).enumerate()
        numbered = as_written(lambda index, text: (index, *self._view_or_fault(text)))
        items = items.map(numbered, num_parallel_calls=_SIDE_BY_SIDE)
        # A data set is TensorFlow's only way to continue after an operation has failed. It needs an
        # element to batch.
        last = tf.data.Dataset.from_tensors((count, self._no_view(), tf.constant("")))
        outcomes = only(items.ignore_errors().concatenate(last).batch(count + 1))
        indices, views, faults = (column[:-1] for column in outcomes)
        rows, size = indices[:, None], tf.reshape(count, (1,))
        views = tf.scatter_nd(rows, views, tf.concat([size, self.spec.shape], 0))
        faults = tf.tensor_scatter_nd_update(tf.fill(size, _DAMAGED), rows, faults)
        return tf.ensure_shape(views, (None, *self.spec.shape)), faults

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
        is_image = tf.reduce_any([starts_with(encoded, each.start) for each in FORMATS])

        def header_fault() -> tf.Tensor:
            fault = self.size_fault(header_size(encoded))
            return tf.cond(fault == "", lambda: scan_fault(encoded), lambda: fault)

        return tf.cond(is_image, header_fault, lambda: tf.where(length == 0, "no bytes", foreign))

    def size_fault(self, size: tf.Tensor) -> tf.Tensor:
        """Return what forbids an image of this size to be decoded and resized, a scalar string;
        empty for nothing.

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
        narrow = tf.strings.join(
            [stated, f", so narrow that one side is more than {narrowest} times the other"]
        )
        message = tf.where(
            tf.maximum(height, width) > narrowest * tf.minimum(height, width), narrow, ""
        )
        # Divided, as the product of such sides may overflow.
        large = height > most // tf.maximum(width, 1)
        message = tf.where(
            large, tf.strings.join([stated, f", more than the limit of {most}"]), message
        )
        return tf.where(
            (height < 1) | (width < 1),
            "its header states no size: it is damaged or cut off",
            message,
        )

    @functools.cached_property
    def _view_or_fault(self) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        """The view of one image, black where there is none, and what its header says against it."""

        # A function, so that it is traced once for all its uses.
        @tf.function(input_signature=[tf.TensorSpec((), tf.string)], autograph=False)
        def view_or_fault(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            fault = self.fault(encoded)

            def view() -> tf.Tensor:
                return self.transform(decode_image(encoded))

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


# Warm-up requests


def warm_up_requests(signatures: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield requests of every signature for batches of several sizes: the signature, and its inputs
    by name.

    They hold a synthetic image, not one of the data set: a model must not contain somebody's
    photograph.

    Args:
        signatures: The signatures of a loaded SavedModel.
    """
    ramp = np.arange(_WARM_UP_SIDE) * 255 // (_WARM_UP_SIDE - 1)
    down, right = np.meshgrid(ramp, ramp, indexing="ij")
    picture = np.stack([down, right, 255 - down], axis=-1).astype(np.uint8)
    jpeg = tf.io.encode_jpeg(picture).numpy()
    for size in _WARM_UP_SIZES:
        for name, signature in signatures.items():
            inputs = {}
            for key, spec in signature.structured_input_signature[1].items():
                row = {
                    tf.string: b"a" if key == "texts" else jpeg,
                    tf.uint8: picture,
                    tf.int32: 10,
                }.get(spec.dtype)
                rows = [np.ones(spec.shape[1:]) if row is None else row] * size
                inputs[key] = tf.constant(rows, spec.dtype).numpy()
            yield name, inputs


def write_warm_up(folder: Path, signatures: Mapping[str, Any]) -> Path:
    """Write the requests that TF Serving sends itself before it serves a version, so that no client
    waits.

    Args:
        folder: The SavedModel's.
        signatures: See `warm_up_requests`.

    Returns:
        The path of the file, a TFRecord of `tensorflow.serving.PredictionLog`.

    Example:
        >>> path = export_saved_model(embedder, "models/cars")
        >>> write_warm_up(path, tf.saved_model.load(path).signatures).name
        'tf_serving_warmup_requests'
    """
    path = folder / WARM_UP
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for name, inputs in warm_up_requests(signatures):
            writer.write(prediction_log(name, **inputs))
    return path


def prediction_log(signature: str, **inputs: Any) -> bytes:
    """Return a serialized `tensorflow.serving.PredictionLog` of one Predict request.

    Written field by field, so that exporting does not need tensorflow-serving-api.

    Args:
        signature: The name of the signature.
        **inputs: The value of each input.
    """
    # The numbers are those of prediction_log.proto, predict.proto and model.proto.
    request = _field(1, _field(3, signature.encode()))
    for name, value in inputs.items():
        tensor = tf.make_tensor_proto(value).SerializeToString()
        request += _field(2, _field(1, name.encode()) + _field(2, tensor))
    return _field(6, _field(1, request))


def _field(number: int, content: bytes) -> bytes:
    """Return a field of Protocol Buffers' wire format that holds bytes: a key, the length, the
    content."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    digits = []
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
