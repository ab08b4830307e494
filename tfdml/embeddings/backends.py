"""Models in files (Keras, SavedModel, LiteRT, ONNX), and `load_backend`, from a path or address to its model."""

import abc
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import explain_failure
from tfdml.data.pipeline import evaluation_batches, own_threads, readable_views
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.base import (
    EmbeddingBackend,
    EncodedImagesBackend,
    ImageRefused,
    TruncatedBackend,
    checked_vectors,
)
from tfdml.embeddings.compute import embed_batches
from tfdml.embeddings.model_card import CARD, card_of, compare_with_card, served_version, view_of, view_of_card
from tfdml.errors import REASON, UserError, short_message, user_errors
from tfdml.io.copies import in_store, local_copy
from tfdml.io.files import is_remote
from tfdml.models import AnyEmbedder


class ViewBackend(EmbeddingBackend):
    """A model that is fed by the evaluation pipeline.

    Attributes:
        transform: The view in which it sees images.
    """

    transform: EvaluationTransform

    @abc.abstractmethod
    def _vectors(self, batches: Iterable[Any], batch_size: int) -> Iterator[np.ndarray]:
        """Yield the vectors of one batch after another, of images or of tuples that begin with images."""

    def stream(self, dataset: ImageDataset, batch_size: int, first: int = 0) -> Iterator[np.ndarray]:
        """See `EmbeddingBackend.stream`."""
        self.check_input(dataset)
        rest = dataset.take(np.arange(first, len(dataset))) if first else dataset
        batches = own_threads(evaluation_batches(rest, self.transform, batch_size))
        try:
            yield from self._vectors(batches, min(batch_size, len(dataset)))
        except tf.errors.OpError as error:
            raise (explain_failure(error, rest, leave_out="`bad_images='skip'`") or error) from None

    def stream_readable(self, dataset: ImageDataset, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `EmbeddingBackend.stream_readable`."""
        self.check_input(dataset)
        for rows, images in readable_views(dataset.images, self.transform, batch_size):
            yield rows, next(self._vectors([images], min(batch_size, len(dataset))))


class KerasEmbedder(ViewBackend):
    """A Keras embedder of images, or a `Head` of stored vectors, fed by the evaluation pipeline.

    Args:
        path: A run folder or a .keras file.

    Raises:
        UserError: There is none, or the file is not an embedder.
    """

    kind = "keras"

    def __init__(self, path: str | os.PathLike):
        self.path = _file(path)
        self.address = str(path)
        self.embedder = load_embedder(path)
        self.transform = EvaluationTransform.of(self.embedder)
        self.view = view_of(self.embedder)
        self.dimension = self.view.get("dimension", 0)

    def _vectors(self, batches: Iterable[Any], batch_size: int) -> Iterator[np.ndarray]:
        return embed_batches(self.embedder, batches, batch_size=batch_size)


def _file(path: str | os.PathLike) -> Path:
    path = Path(path)
    return path / "embedder.keras" if path.is_dir() else path


def _check_archive(path: Path) -> None:
    """Refuse what is no .keras archive, such as a legacy HDF5 model, or is damaged, for which Keras does not look."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged:
        raise ValueError(f"{damaged} in it is damaged")


def load_embedder(path: str | os.PathLike) -> AnyEmbedder:
    """Return the Keras embedder of a run folder or a .keras file.

    Raises:
        UserError: There is none, or the file is not an embedder.
    """
    path = _file(path)
    if not path.is_file():
        of_seeds = sorted(path.parent.glob("seed_*/embedder.keras"))
        ask = f"name the run of one seed, such as {of_seeds[0].parent}" if of_seeds else "has the run finished?"
        raise UserError(f"there is no embedder at {path}; {ask}")
    compare_with_card(path)
    # Unknown layers, and whatever else Keras raises on a foreign file.
    with user_errors(Exception, f"{path} cannot be loaded: {REASON}", named=True):
        _check_archive(path)
        # Code in the file, such as that of a Lambda layer, is refused; `safe_mode` is Keras's default.
        embedder = keras.saving.load_model(path, compile=False, safe_mode=True)
    if not isinstance(embedder, AnyEmbedder):
        raise UserError(f"{path} holds a {type(embedder).__name__}, not an Embedder")
    return embedder


class SavedModelEmbedder(EncodedImagesBackend):
    """A SavedModel whose signature `serving_default` takes `image_bytes` (B,) and gives `embedding` (B, d).

    Args:
        path: The path of a version.

    Raises:
        UserError: It cannot be loaded, or has no such signature.
    """

    kind = "saved_model"

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.address = str(path)
        self.view = view_of_card(card_of(self.path))
        compare_with_card(self.path)
        # Whatever TensorFlow raises on a damaged graph.
        with user_errors(Exception, f"`model={path}` cannot be loaded as SavedModel: {REASON}", keep="last"):
            # Kept, because what the signature refers to lives only as long as this.
            self.loaded = tf.saved_model.load(str(path))
        if "serving_default" not in self.loaded.signatures:
            raise UserError(f"`model={path}`: the SavedModel has no signature serving_default")
        self.serve = self.loaded.signatures["serving_default"]
        inputs, outputs = self.serve.structured_input_signature[1], self.serve.structured_outputs
        if list(inputs) != ["image_bytes"] or "embedding" not in outputs:
            raise UserError(f"`model={path}`: serving_default takes {', '.join(inputs)} and gives {', '.join(outputs)}")

    def request(self, encoded_images: list[bytes]) -> np.ndarray:
        """See `EncodedImagesBackend.request`."""
        try:
            return self.serve(image_bytes=tf.constant(encoded_images))["embedding"].numpy()
        except tf.errors.InvalidArgumentError as error:
            raise ImageRefused(short_message(error, "last")) from error

    def request_each(self, encoded_images: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """See `EncodedImagesBackend.request_each`; by the signature `embed_each`, where there is one."""
        if "embed_each" not in self.loaded.signatures:
            return super().request_each(encoded_images)
        found = self.loaded.signatures["embed_each"](image_bytes=tf.constant(encoded_images))
        return found["embedding"].numpy(), found["error"].numpy() == b""


class ViewFileEmbedder(ViewBackend):
    """A file from (1 or B, S, S, 3) uint8 views to (1 or B, d) float embeddings.

    Args:
        path: The file. Its export's model card lies next to it or in the folder above.
        threads: That compute; 0: as many as there are CPUs.

    Raises:
        UserError: The file is no such model, or its view is not known.
    """

    def __init__(self, path: str | os.PathLike, threads: int = 0):
        self.path = Path(path)
        self.address = str(path)
        if not self.path.is_file():
            raise UserError(f"there is no file {path}")
        compare_with_card(self.path)
        shape = self._open(threads or os.cpu_count() or 1)
        if len(shape) != 4 or shape[3] != 3 or shape[1] != shape[2] or shape[1] < 1:
            raise UserError(f"`model={path}`: its input must be square images (B, S, S, 3), not {shape}")
        # How many images it takes at once; 0 for any number.
        self._rows = max(shape[0], 0)
        self.view = view_of_card(card_of(self.path))
        if self.view is None:
            raise UserError(f"`model={path}`: no {CARD} describes its view: copy that of its export next to it")
        if self.view["image_size"] != shape[1]:
            raise UserError(f"`model={path}` takes {shape[1]} px, but its {CARD} states {self.view['image_size']} px")
        self.transform = EvaluationTransform(**self.view)

    @abc.abstractmethod
    def _open(self, threads: int) -> list[int]:
        """Load the file; the shape of its input, at most 0 where it is free."""

    @abc.abstractmethod
    def _run(self, images: np.ndarray) -> np.ndarray:
        """Return the vectors of (B, S, S, 3) uint8 images, as many as the file takes at once."""

    def _vectors(self, batches: Iterable[Any], batch_size: int) -> Iterator[np.ndarray]:
        for batch in batches:
            images = np.asarray(batch[0] if isinstance(batch, tuple) else batch)
            rows = self._rows or len(images)
            filled = np.concatenate([images, np.repeat(images[-1:], -len(images) % rows, axis=0)])
            parts = [self._run(filled[first : first + rows]) for first in range(0, len(filled), rows)]
            yield checked_vectors(np.concatenate(parts)[: len(images)], len(images), self.address)

    def _wrong_types(self) -> UserError:
        return UserError(f"`model={self.path}`: it must take uint8 images and give one float32 output, the embedding")


class LiteRTEmbedder(ViewFileEmbedder):
    """A .tflite file from (1 or B, S, S, 3) uint8 images, after the evaluation view, to float embeddings.

    Args: those of `ViewFileEmbedder`.

    Raises:
        UserError: The file is no such model, its view is not known, or LiteRT is not installed.
    """

    kind = "litert"

    def _open(self, threads: int) -> list[int]:
        interpreter = litert_interpreter()
        damaged = f"`model={self.path}` cannot be loaded as a .tflite file: {REASON}"
        with user_errors((ValueError, RuntimeError), damaged, keep="last"):
            self._interpreter = interpreter(model_path=str(self.path), num_threads=threads)
            self._interpreter.allocate_tensors()
        inputs, outputs = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        self._input, self._output = inputs[0], _embedding(outputs)
        if self._input["dtype"] != np.uint8 or self._output is None or self._output["dtype"] != np.float32:
            raise self._wrong_types()
        return self._input["shape_signature"].tolist() if len(inputs) == 1 else []

    def _run(self, images: np.ndarray) -> np.ndarray:
        if self._interpreter.get_input_details()[0]["shape"][0] != len(images):
            self._interpreter.resize_tensor_input(self._input["index"], images.shape)
            self._interpreter.allocate_tensors()
        self._interpreter.set_tensor(self._input["index"], images)
        self._interpreter.invoke()
        return self._interpreter.get_tensor(self._output["index"])


def litert_interpreter() -> Any:
    """Return the class of LiteRT's interpreter, or TensorFlow's where LiteRT is not installed."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        if not hasattr(tf, "lite"):
            raise UserError("a .tflite file needs LiteRT: pip install 'tfdml[litert]'") from None
        return tf.lite.Interpreter
    return Interpreter


def _embedding(outputs: list[dict[str, Any]]) -> Any:
    """Return the output that is the embedding: the only one, or the only one of two axes so named."""
    if len(outputs) > 1:
        outputs = [output for output in outputs if "embedding" in output["name"]]
    return outputs[0] if len(outputs) == 1 else None


class OnnxEmbedder(ViewFileEmbedder):
    """An .onnx file from (1 or B, S, S, 3) uint8 images, after the evaluation view, to float embeddings.

    Args: those of `ViewFileEmbedder`.

    Raises:
        UserError: The file is no such model, its view is not known, or ONNX Runtime is not installed.
    """

    kind = "onnx"

    def _open(self, threads: int) -> list[int]:
        with user_errors(ImportError, "an .onnx file needs ONNX Runtime: pip install 'tfdml[onnx]'"):
            import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Its own kinds of errors derive from nothing narrower.
        with user_errors(Exception, f"`model={self.path}` cannot be loaded as an .onnx file: {REASON}", keep="last"):
            self._session = onnxruntime.InferenceSession(self.path, options, providers=["CPUExecutionProvider"])
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        if len(outputs) > 1:
            outputs = [output for output in outputs if "embedding" in output.name]
        types = [given.type for given in (*inputs, *outputs)]
        if types != ["tensor(uint8)", "tensor(float)"]:
            raise self._wrong_types()
        self._input, self._output = inputs[0].name, outputs[0].name
        return [size if isinstance(size, int) else 0 for size in inputs[0].shape]

    def _run(self, images: np.ndarray) -> np.ndarray:
        return self._session.run([self._output], {self._input: images})[0]


# Files that see views, which their model card describes.
_VIEW_FILES: dict[str, type[ViewFileEmbedder]] = {".tflite": LiteRTEmbedder, ".onnx": OnnxEmbedder}


def load_backend(model: str | os.PathLike, *, threads: int = 0, truncate_dim: int = 0) -> EmbeddingBackend:
    """Return the model at a path, or at a URL in a store.

    Args:
        model: A run folder, a .keras file, a SavedModel, a folder of versions (the newest that holds a SavedModel is
            taken), or a .tflite or .onnx file.
        threads: That a .tflite or .onnx file computes with; 0: as many as there are CPUs.
        truncate_dim: Keep this many first dimensions of the embeddings, scaled to length 1; 0: all.

    Returns:
        The source, loaded.

    Raises:
        UserError: There is none of these, or it cannot be loaded.

    Example:
        >>> load_backend("runs/cars_jrd").embed(test, batch_size=100).shape
        (256, 16)
    """
    if truncate_dim:
        return TruncatedBackend(load_backend(model, threads=threads), truncate_dim)
    if is_remote(model) and not in_store(model):
        raise UserError(f"`model={model}` is neither a file or folder nor in a store: name what the server loads")
    path = Path(local_copy(model))
    if path.suffix in _VIEW_FILES:
        return _VIEW_FILES[path.suffix](path, threads)
    version = served_version(path)
    if version is not None:
        return SavedModelEmbedder(version)
    files = sorted(str(file.relative_to(path)) for suffix in _VIEW_FILES for file in path.rglob(f"*{suffix}"))
    if files:
        raise UserError(f"`model={model}` holds no SavedModel: name one of {', '.join(files)}")
    return KerasEmbedder(path)
