"""From a path or address to the model that embeds."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from tfdml.embeddings.backends.base import EmbeddingBackend
from tfdml.embeddings.backends.endpoint import Address, Endpoint
from tfdml.embeddings.backends.keras_file import KerasEmbedder
from tfdml.embeddings.backends.litert import LiteRTEmbedder
from tfdml.embeddings.backends.model_card import CARD
from tfdml.embeddings.backends.onnx_file import OnnxEmbedder
from tfdml.embeddings.backends.saved_model import SavedModelEmbedder
from tfdml.embeddings.backends.view_file import ViewFileEmbedder
from tfdml.errors import UserError
from tfdml.manifests import objects, read_json

# Files that see views, which their model card describes.
_VIEW_FILES: dict[str, type[ViewFileEmbedder]] = {".tflite": LiteRTEmbedder, ".onnx": OnnxEmbedder}


def load_backend(
    model: str | os.PathLike,
    *,
    resize: int = 0,
    resize_mode: str = "",
    image_size: int = 0,
    pad_color: str = "",
    timeout: float = 60.0,
    threads: int = 0,
) -> EmbeddingBackend:
    """The model at a path or address.

    Args:
        model: A run folder, a .keras file, a SavedModel, a folder of versions (the newest that holds a SavedModel is
            taken), a .tflite or .onnx file, `grpc://host:port/name`, `rest://host:port/name` or
            `http://host:port/v1/models/name`.
        resize: For a .tflite or .onnx file, see `ViewFileEmbedder`.
        resize_mode: Likewise.
        image_size: Likewise.
        pad_color: Likewise.
        timeout: Seconds that a request to an endpoint may take.
        threads: Likewise.

    Returns:
        The source, loaded or reached.

    Raises:
        UserError: There is none of these, it cannot be loaded or reached, or a view is given to a model that has its
            own.

    Example:
        >>> load_backend("runs/cars_jrd").embed(test, batch_size=100).shape
        (256, 16)
    """
    path = Path(model)
    if path.suffix in _VIEW_FILES:
        return _VIEW_FILES[path.suffix](path, resize, resize_mode, image_size, pad_color, threads)
    if resize or resize_mode or image_size or pad_color:
        raise UserError(
            f"`model={model}` has its view inside: `resize`, `resize_mode`, `image_size` and `pad_color` go with a "
            ".tflite or .onnx file"
        )
    if "://" in str(model):
        return open_endpoint(str(model), timeout)
    version = served_version(path)
    if version is not None:
        return SavedModelEmbedder(version)
    files = sorted(str(file.relative_to(path)) for suffix in _VIEW_FILES for file in path.rglob(f"*{suffix}"))
    if files:
        raise UserError(f"`model={model}` holds no SavedModel: name one of {', '.join(files)}")
    return KerasEmbedder(path)


def served_version(path: Path) -> Path | None:
    """The folder of the SavedModel that a path means: itself, or the newest of its versions; None where there is none.

    Example:
        >>> served_version(Path("no/such/folder")) is None
        True
    """
    if (path / "saved_model.pb").is_file():
        return path
    versions = [entry for entry in path.iterdir() if entry.name.isdigit()] if path.is_dir() else []
    served = [entry for entry in versions if (entry / "saved_model.pb").is_file()]
    return max(served, key=lambda entry: int(entry.name)) if served else None


# By images per second on a CPU, the quickest first.
_QUICKEST = {
    "litert_int8": "litert/int8.tflite",
    "litert_float16": "litert/float16.tflite",
    "litert_float32": "litert/float32.tflite",
    "onnx": "onnx/model.onnx",
}
_RUN_BY = {".tflite": "ai_edge_litert", ".onnx": "onnxruntime"}
# What the quicker file may differ by for its vectors to pass for the SavedModel's.
_LEAST_COSINE, _MOST_RECALL_LOST = 0.999, 0.001


def quickest_on_cpu(model: str | os.PathLike) -> Path:
    """The file of an exported version that embeds the same in less time on a CPU.

    Of its LiteRT and ONNX files the quickest whose acceptance, in the model card, states a smallest cosine of at least
    0.999 to the embedder's vectors, and no loss of Recall@1 beyond 0.1 points.

    Args:
        model: As `load_backend`.

    Returns:
        The file; where none is accepted, or what runs it is not installed, what was given.

    Example:
        >>> quickest_on_cpu("models/cars_jrd")
        PosixPath('models/cars_jrd/1/litert/float16.tflite')
    """
    path = Path(model)
    version = served_version(path)
    if version is None or not (version / CARD).is_file():
        return path
    where = f"{version / CARD}: artefacts"
    artefacts = objects(read_json(version / CARD).get("artefacts", {}), where)
    for name, place in _QUICKEST.items():
        file = version / place
        accepted = artefacts.get(name, {}).get("acceptance")
        if not isinstance(accepted, dict) or importlib.util.find_spec(_RUN_BY[file.suffix]) is None:
            continue
        # Where no two images share a class there is no Recall@1 to lose.
        cosine, lost = accepted.get("min_cosine") or 0.0, accepted.get("recall@1_drop") or 0.0
        if cosine >= _LEAST_COSINE and lost <= _MOST_RECALL_LOST and file.is_file():
            return file
    return path


def open_endpoint(address: str, timeout: float = 60.0) -> Endpoint:
    """The endpoint at an address, reached.

    Args:
        address: `grpc://host:port/name`, `rest://host:port/name` or `http(s)://host:port/v1/models/name`; a version
            may follow: `/3`.
        timeout: Seconds that a request may take.

    Raises:
        UserError: The address is of no form known here; tensorflow-serving-api is missing; or as `Endpoint`.

    Example:
        >>> open_endpoint("grpc://localhost:8500/cars").checksum()  # doctest: +SKIP
        'cars version 1 at localhost:8500'
    """
    where = Address.parse(address)
    if where.scheme == "grpc":
        try:
            from tfdml.embeddings.backends.grpc_endpoint import GrpcEndpoint
        except ImportError as error:
            raise UserError(f"`model={address}` needs gRPC stubs: pip install 'tfdml[serving]' ({error})") from error
        return GrpcEndpoint(where, timeout)
    from tfdml.embeddings.backends.rest_endpoint import RestEndpoint

    return RestEndpoint(where, timeout)
