"""SavedModel: encoded images in, embeddings out, with the whole preprocessing inside, and its warm-up requests.

And what all formats share: the network alone, in float32, its weights made constants, which they start from, and the
numbered versions, written atomically, that they are published in.
"""

import contextlib
import dataclasses
import errno
import logging as python_logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.core.framework import tensor_pb2

from tfdml import workarounds
from tfdml.backbones.lora import plain_weights
from tfdml.data.decoding import SERVING_LIMIT
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import UserError, short_message
from tfdml.evaluation import Calibration
from tfdml.evaluation.classification import KINDS
from tfdml.export.request import RequestPreprocessor
from tfdml.io.files import is_disk_full, partial_folder, read_json, require_local, sweep, unwritable
from tfdml.models import AnyEmbedder

SIGNATURES = ("serving_default", "embed_images", "embed_each")
WARM_UP = Path("assets.extra") / "tf_serving_warmup_requests"
# The numbers of images in warm-up requests; a server is quick for the shapes that it has seen.
_WARM_UP_SIZES = (1, 8, 32)
# Without these there is no version, for this library and for TensorFlow Serving; a store gets them last.


@dataclasses.dataclass
class NewVersion:
    """A version that is being written.

    Attributes:
        folder: Where to write its files: hidden, next to the finished versions.
        path: Its place; there is none before it is finished.
    """

    folder: Path
    path: Path = dataclasses.field(init=False)


@contextlib.contextmanager
def new_version(versions: str | os.PathLike) -> Iterator[NewVersion]:
    """Make the next version: `versions/<n>`, one more than the highest number there.

    What the block writes below `folder` appears under the number when the block ends well, in one step, and disappears
    when it does not. Earlier versions stay as they are. Two processes that export at once get two numbers. What exports
    left that were killed is removed.

    Args:
        versions: Where versions lie, as TF Serving's `base_path`; made if it is not there.

    Yields:
        The version; its `path` is known after the block.

    Raises:
        UserError: The folder cannot be written, or the disk is full.

    Example:
        >>> with new_version("models/cars") as version:
        ...     written = (version.folder / "model_card.json").write_text("{}")
        >>> version.path
        PosixPath('models/cars/1')
    """
    require_local(versions, "folder")
    versions = Path(versions)
    made = [part for part in (versions, *versions.parents) if not part.exists()]  # the innermost first
    try:
        versions.mkdir(parents=True, exist_ok=True)
        sweep(versions)
        # Gone before an error is worded: what there is of it takes no part in what is free.
        with partial_folder(versions) as hidden:
            version = NewVersion(hidden)
            yield version
            # On the disk: a name must not appear before its contents do.
            for path in hidden.rglob("*"):
                if path.is_file():
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
            version.path = _numbered(hidden, versions)
    except (OSError, tf.errors.OpError) as error:
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        raise unwritable(versions, error) from error
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only where it is empty: a refused export leaves nothing


def version_numbers(versions: str | os.PathLike) -> list[int]:
    """Return the numbers of the versions in a folder, ascending; none where there is no folder."""
    try:
        names = (entry.name for entry in Path(versions).iterdir())
        return sorted(int(name) for name in names if re.fullmatch("[0-9]{1,18}", name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _numbered(hidden: Path, versions: Path) -> Path:
    while True:
        path = versions / str(1 + max(version_numbers(versions), default=0))
        try:
            os.rename(hidden, path)
            return path
        except OSError as error:
            # Somebody else has taken the number in between.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


Network = Callable[[tf.Tensor], tf.Tensor]


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
            f"export needs Keras's TensorFlow backend, and KERAS_BACKEND is {backend}: save the embedder with "
            "embedder.save('embedder.keras'), and load and export it in a process with KERAS_BACKEND=tensorflow"
        )


def view_spec(shape: tuple[int, ...]) -> tf.TensorSpec:
    """Return what a network is fed: for (S, S, 3) `images` (B, S, S, 3) uint8, for (D,) `vectors` (B, D) float32.

    Example:
        >>> view_spec((768,))
        TensorSpec(shape=(None, 768), dtype=tf.float32, name='vectors')
    """
    if len(shape) == 1:
        return tf.TensorSpec((None, *shape), tf.float32, name="vectors")
    return tf.TensorSpec((None, *shape), tf.uint8, name="images")


def frozen_module(network: Network, shape: tuple[int, ...], dtype: tf.DType | None = None) -> tf.Module:
    """Return a network as a module whose function `embed` has no variables.

    Args:
        network: From images (B, S, S, 3) to embeddings (B, d), such as an embedder.
        shape: (S, S, 3) of an image, as `Embedder.view_shape`.
        dtype: Of the images, if not that of `view_spec`.

    Returns:
        A module with `embed(images)`, which returns `{"embedding": (B, d)}`.

    Example:
        >>> frozen_module(embedder, (28, 28, 3)).embed(views)["embedding"].shape
        TensorShape([2, 16])
    """
    spec = view_spec(shape)
    spec = tf.TensorSpec(spec.shape, dtype or spec.dtype, name=spec.name)
    traced = tf.function(lambda images: network(images), input_signature=[spec], autograph=False)
    frozen = workarounds.frozen(traced.get_concrete_function())
    module = tf.Module()
    module.embed = tf.function(lambda images: {"embedding": frozen(images)[0]}, input_signature=[spec], autograph=False)
    return module


def in_float32(embedder: AnyEmbedder) -> AnyEmbedder:
    """Return the same embedder computing in float32; itself where it does already.

    Weights are float32 under every mixed policy: nothing is rounded. What is exported must not depend on the
    device's half precision, and LiteRT knows no mixed policy.

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
    made = keras.saving.deserialize_keras_object(plain)
    made.build((None, *embedder.view_shape))
    made.set_weights(plain_weights(embedder))
    return made


def _plain(node: Any) -> Any:
    """Return what takes the place of a mixed policy in a configuration; None for all else."""
    if isinstance(node, dict) and node.get("class_name") == "DTypePolicy":
        return {**node, "config": {"name": "float32"}}
    return "float32" if isinstance(node, str) and node in ("mixed_float16", "mixed_bfloat16") else None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what TensorFlow and tf2onnx log of every save and conversion; what fails is raised."""
    onnx = python_logging.getLogger("tf2onnx")
    # The converter warns of an interpreter that it uses itself.
    with contextlib.ExitStack() as stack, warnings.catch_warnings(action="ignore"):
        stack.callback(logging.set_verbosity, logging.get_verbosity())
        stack.callback(onnx.setLevel, onnx.level)
        logging.set_verbosity(logging.ERROR)
        onnx.setLevel(python_logging.ERROR)
        yield


def export_saved_model(embedder: AnyEmbedder, folder: str | os.PathLike, max_pixels: int = SERVING_LIMIT) -> Path:
    """Write the next version of a servable SavedModel atomically, and nothing else.

    `tfdml.export.export_model` writes other formats too, compares each with the embedder, and adds a model card.

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
    with new_version(folder) as version:
        write_saved_model(embedder, version.folder, max_pixels)
    return version.path


def write_saved_model(
    embedder: AnyEmbedder,
    folder: str | os.PathLike,
    max_pixels: int = SERVING_LIMIT,
    calibration: Calibration | None = None,
) -> None:
    """Write a SavedModel with these signatures; each takes a batch of any size, none included.

    - `serving_default`: `image_bytes` (B,) strings, JPEG, PNG or WebP -> `embedding` (B, d) float32 of
      length 1;
    - `embed_images`: `images` (B, H, W, 3) uint8 of any size -> `embedding`;
    - `embed_each`: `image_bytes` -> `embedding`, and `error` (B,) strings: what is wrong with an image, whose row is
      then zero, or empty. For a server that puts the images of several clients into one batch;
    - `same`, where there is a calibration of pairs: `image_bytes` (B,) and `other_image_bytes` (B,) -> `distances` (B,)
      float32, `same` (B,) booleans and `probabilities` (B,) float32 of each pair, and `error` as above.

    That of a `Head` has `serving_default` alone: `vectors` (B, D) float32 -> `embedding`.

    The first two fail on the first image that cannot be decoded, and name it. Decoding, resizing and cropping happen
    inside, by the functions that evaluation uses. The SavedModel needs TensorFlow only, neither Keras nor tfdml.

    Args:
        embedder: A built `Embedder` or `MomentEmbedder`.
        folder: Where to write; an empty folder or none.
        max_pixels: Images whose header states more pixels are refused before they are decoded.
        calibration: The threshold of `same`, on Euclidean distances of pairs; None, or one of searches: without that
            signature.
    """
    # Constants, which TensorFlow can fold into one another, run a third faster than variables; and the signatures share
    # them.
    network = frozen_module(embedder, embedder.view_shape)
    views = RequestPreprocessor(EvaluationTransform.of(embedder), max_pixels)

    @tf.function(input_signature=[view_spec(embedder.view_shape)], autograph=False)
    def embed(images: tf.Tensor) -> tf.Tensor:
        # TensorFlow's fused kernels fail on an empty batch; its answer is an empty one.
        none = tf.zeros((0, embedder.embedding_dim))
        return tf.cond(tf.shape(images)[0] > 0, lambda: network.embed(images)["embedding"], lambda: none)

    def embed_bytes(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"embedding": embed(views.all_or_error(image_bytes, "image_bytes"))}

    def embed_images(images: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"embedding": embed(views.of_images(images, "images"))}

    def embed_each(image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        images, errors = views.each(image_bytes)
        return {"embedding": tf.where((errors == "")[:, None], embed(images), 0.0), "error": errors}

    text = tf.TensorSpec((None,), tf.string)
    endpoints: dict[str, tuple[Callable, tf.TensorSpec]] = {
        "serving_default": (embed_bytes, text),
        "embed_images": (embed_images, tf.TensorSpec((None, None, None, 3), tf.uint8)),
        "embed_each": (embed_each, text),
    }
    if len(embedder.view_shape) == 1:
        calibration = None
        endpoints = {"serving_default": (lambda vectors: {"embedding": embed(vectors)}, view_spec(embedder.view_shape))}
    module = tf.Module()
    module.endpoints = {
        name: tf.function(function, input_signature=[spec], autograph=False)
        for name, (function, spec) in endpoints.items()
    }
    if calibration is not None and calibration.kind != "fpir":
        module.endpoints["same"] = same_signature(module.endpoints["embed_each"], calibration)
    # Nothing is trained any more, and gradients of constants cannot be saved.
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    with quiet():
        tf.saved_model.save(module, str(folder), signatures=dict(module.endpoints), options=options)


def same_signature(embed_each: Callable[..., dict[str, tf.Tensor]], calibration: Calibration) -> Any:
    """Return the signature `same` on what embeds images, see `write_saved_model`."""
    # Beyond the last knot the curve is flat, as in `numpy.interp`.
    knots = np.append(calibration.distances, calibration.distances[-1] + 1)
    values = np.append(calibration.probabilities, calibration.probabilities[-1])

    def probability(distances: tf.Tensor) -> tf.Tensor:
        distances = tf.cast(distances, tf.float64)
        upper = tf.clip_by_value(tf.searchsorted(knots, distances, side="right"), 1, len(knots) - 1)
        low, high = tf.gather(knots, upper - 1), tf.gather(knots, upper)
        share = tf.clip_by_value((distances - low) / (high - low), 0.0, 1.0)
        before, after = tf.gather(values, upper - 1), tf.gather(values, upper)
        return tf.cast(before + share * (after - before), tf.float32)

    text = tf.TensorSpec((None,), tf.string)

    @tf.function(input_signature=[text, text], autograph=False)
    def same(image_bytes: tf.Tensor, other_image_bytes: tf.Tensor) -> dict[str, tf.Tensor]:
        numbers = (tf.size(image_bytes), tf.size(other_image_bytes))
        says = tf.strings.format("other_image_bytes: there are {} images, and {} others", numbers)
        with tf.control_dependencies([tf.debugging.Assert(numbers[0] == numbers[1], [says])]):
            found = embed_each(image_bytes=tf.concat([image_bytes, other_image_bytes], 0))
        first, second = tf.split(found["embedding"], 2)
        errors = [
            tf.where(error == "", "", tf.strings.join([f"{name}: ", error]))
            for name, error in zip(("image_bytes", "other_image_bytes"), tf.split(found["error"], 2), strict=True)
        ]
        error = tf.where(errors[0] == "", errors[1], errors[0])
        distances = tf.where(error == "", tf.norm(first - second, axis=1), float("inf"))
        return {
            "distances": distances,
            "same": distances <= np.float32(calibration.threshold),
            "probabilities": tf.where(error == "", probability(distances), 0.0),
            "error": error,
        }

    return same


def calibration_of_file(path: str, distance: str | None = "euclidean") -> Calibration:
    """Return the threshold in a JSON file that `tfdml evaluate` wrote.

    Args:
        path: The file.
        distance: As `read_calibration`.

    Raises:
        UserError: There is none, it is of training classes, or as `read_calibration`.
    """
    file = read_json(path)
    if "calibration" not in file or file.get("split") == "train":
        raise UserError(f"{path} has no threshold of held-out classes: write one with tfdml evaluate and `target`")
    return read_calibration(file["calibration"], path, distance)


def read_calibration(values: Any, where: str, distance: str | None = "euclidean") -> Calibration:
    """Return a stored calibration of the distances of an exported model, which are Euclidean.

    Args:
        values: What `Calibration.to_dict` gave.
        where: The file that holds it, for the message.
        distance: The one that it must be of, that of an exported model by default; None: any.

    Raises:
        UserError: It is damaged, or of another distance.
    """
    try:
        calibration = Calibration.from_dict(values)
        if distance not in (None, calibration.distance):
            raise UserError(f"its distance is {calibration.distance!r}, not {distance!r}")
        if calibration.kind not in KINDS:
            raise UserError(f"its kind is {calibration.kind!r}, not of {', '.join(KINDS)}")
        curve = np.stack([calibration.distances, calibration.probabilities])
        if not np.isfinite([calibration.threshold, *curve.ravel()]).all() or not (np.diff(curve[0]) > 0).all():
            raise UserError("its threshold or its curve is damaged")
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where}: the calibration cannot be used: {short_message(error)}") from error
    return calibration


def model_files(folder: Path) -> list[Path]:
    """Return the files of a SavedModel that its answers come from."""
    return [folder / "saved_model.pb", *sorted(file for file in (folder / "variables").rglob("*") if file.is_file())]


def write_warm_up(folder: Path, side: int, same: bool = False, more: Iterable[bytes] = ()) -> Path:
    """Write requests of every signature, which TF Serving sends itself before it serves a version.

    So no client waits for the first ones. The requests hold a synthetic image, not one of the data set: a model must
    not contain somebody's photograph.

    Args:
        folder: The SavedModel's.
        side: Height and width of the picture, in pixels.
        same: Whether it has the signature `same`.
        more: Further requests, see `prediction_log`.

    Returns:
        The path of the file, a TFRecord of `tensorflow.serving.PredictionLog`.

    Example:
        >>> write_warm_up(pathlib.Path("models/cars/1"), side=256)
        PosixPath('models/cars/1/assets.extra/tf_serving_warmup_requests')
    """
    rows = np.arange(side) * 255 // max(1, side - 1)
    picture = np.stack(np.broadcast_arrays(rows[:, None], rows[None], 255 - rows[:, None]), -1).astype(np.uint8)
    jpeg = tf.io.encode_jpeg(picture).numpy()
    path = folder / WARM_UP
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for size in _WARM_UP_SIZES:
            writer.write(prediction_log("serving_default", image_bytes=[jpeg] * size))
            writer.write(prediction_log("embed_each", image_bytes=[jpeg] * size))
            writer.write(prediction_log("embed_images", images=np.stack([picture] * size)))
            if same:
                writer.write(prediction_log("same", image_bytes=[jpeg] * size, other_image_bytes=[jpeg] * size))
        for request in more:
            writer.write(request)
    return path


def read_warm_up(folder: Path) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the signature and the inputs of each warm-up request of a SavedModel; nothing where it has none."""
    if (folder / WARM_UP).is_file():
        for record in tf.data.TFRecordDataset(str(folder / WARM_UP)).as_numpy_iterator():
            request = dict(_fields(dict(_fields(record))[6]))[1]
            inputs = [dict(_fields(part)) for number, part in _fields(request) if number == 2]
            signature = dict(_fields(dict(_fields(request))[1]))[3].decode()
            tensors = {entry[1].decode(): tensor_pb2.TensorProto.FromString(entry[2]) for entry in inputs}
            yield signature, {name: tf.make_ndarray(tensor) for name, tensor in tensors.items()}


def prediction_log(signature: str, **inputs) -> bytes:
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
    """Return a field of Protocol Buffers' wire format that holds bytes: a key, the length, the content."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _fields(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the content of each field, as `_field` writes them."""
    while content:
        numbers = []
        for _ in range(2):
            end = next(place for place, byte in enumerate(content) if byte < 0x80) + 1
            numbers.append(sum((byte & 0x7F) << 7 * place for place, byte in enumerate(content[:end])))
            content = content[end:]
        yield numbers[0] >> 3, content[: numbers[1]]
        content = content[numbers[1] :]


def _varint(value: int) -> bytes:
    digits = []
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
