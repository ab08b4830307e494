"""`model_card.json`: what an exported version is, what it was made from, how it was measured;
written and read.

Keras is imported by what writes: commands say what they load before they load it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdml.errors import UserError, short_message
from tfdml.io.files import compare_files, fields, read_json, sha256_of
from tfdml.version import __version__, installed

if TYPE_CHECKING:
    import keras

    from tfdml.models import AnyEmbedder

CARD = "model_card.json"
LICENSE = (
    "Not cleared by this export. The licenses of the pretrained weights that training started "
    "from, and of the images "
    "that it trained on, decide what the model may be used for: check both."
)
_PACKAGES = ("tensorflow", "keras", "numpy", "ai-edge-litert", "tf2onnx", "onnx", "onnxruntime")
# One float32 view of this side takes 3 GB.
_LARGEST_SIDE = 16_384


def model_card(
    embedder: AnyEmbedder,
    artifacts: dict[str, dict],
    signatures: Sequence[str],
    max_pixels: int,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Return the card of a version.

    Args:
        embedder: What was exported.
        artifacts: By format: where it lies, its size and checksum, how it was accepted.
        signatures: Those of its SavedModel.
        max_pixels: The limit of the SavedModel's images.
        about: The training: data, flags, metrics.

    Returns:
        A dict that JSON can hold.
    """
    model = {
        "class": type(embedder).__name__,
        "name": embedder.name,
        "parameters": embedder.count_params(),
    }
    vectors = {
        "fingerprint": fingerprint(embedder),
        "embedding_dim": embedder.embedding_dim,
        "distance": "euclidean, of vectors of length 1: |f - g|^2 = 2 - 2 cosine",
        "view": view_of(embedder),
    }
    return {
        "model": model,
        **vectors,
        "signatures": list(signatures),
        "max_pixels": max_pixels,
        "artifacts": artifacts,
        **about,
        "versions": {"tfdml": __version__, **installed(_PACKAGES)},
        "license": LICENSE,
    }


def fingerprint(model: keras.Model) -> str:
    """Return what identifies a model in every format that it is exported to: the hash of its
    weights and its view."""
    import keras

    from tfdml.models import AnyEmbedder

    weights = (keras.ops.convert_to_numpy(weight).tobytes() for weight in model.weights)
    parts = sorted(hashlib.sha256(weight).hexdigest() for weight in weights)
    parts.append(
        json.dumps(view_of(model), sort_keys=True) if isinstance(model, AnyEmbedder) else ""
    )
    return f"sha256:{hashlib.sha256(' '.join(parts).encode()).hexdigest()}"


def describe_files(version: Path, paths: Iterable[Path]) -> dict[str, Any]:
    """Size and SHA-256 of files below a version's folder.

    Returns:
        `bytes`, the sum; `files`, by path, the bytes and `sha256` of each.
    """
    files = {
        path.relative_to(version).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
        }
        for path in sorted(paths)
    }
    return {"bytes": sum(entry["bytes"] for entry in files.values()), "files": files}


def view_of(embedder: AnyEmbedder) -> dict[str, Any]:
    """Return the view in which an embedder sees images, as a LiteRT or ONNX file of it expects
    them.

    Returns:
        The configuration of its `EvaluationTransform`; of a `Head` the `dimension` of its vectors.

    Example:
        >>> view_of(tfdml.models.Head(8, embedding_dim=3))
        {'dimension': 8}
    """
    from tfdml.data.transforms import EvaluationTransform

    shape = embedder.view_shape
    if len(shape) == 1:
        return {"dimension": shape[0]}
    return EvaluationTransform.of(embedder).get_config()


def view_of_card(path: Path | None) -> dict[str, Any] | None:
    """Return the view in which an exported model sees images: the card's `view`; None where there
    is no card.

    Args:
        path: What `card_of` returned.

    Returns:
        The configuration of an `EvaluationTransform`.

    Raises:
        UserError: There is a card, but its view cannot be understood.

    Example:
        >>> view_of_card(Path("models/cars_jrd/1/model_card.json"))
        {'resize': 32, 'image_size': 28, 'resize_mode': 'shorter'}
    """
    if path is None:
        return None
    from tfdml.data.transforms import EvaluationTransform

    view: Any = read_json(path).get("view")
    if isinstance(view, dict) and "dimension" in view:
        raise UserError(
            f"{path} is of a head, which embeds vectors and no images: export it with stack_on"
        )
    try:
        fields(view, {"resize": int, "image_size": int, "resize_mode": str}, "view")
        if view["resize"] > _LARGEST_SIDE:
            raise ValueError(f"its side is more than {_LARGEST_SIDE:,} px")
        return EvaluationTransform(**view).get_config()
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{path} does not state the view of the model ({short_message(error)})"
        ) from error


def card_of(model: Path) -> Path | None:
    """Return the card next to a model, a file or the folder of a SavedModel, or in the folder
    above; None for none.

    Example:
        >>> card_of(Path("no/such/model.onnx")) is None
        True
    """
    folder = model if model.is_dir() else model.parent
    return next(
        (above / CARD for above in (folder, folder.parent) if (above / CARD).exists()), None
    )


def entry_of(card: Path, model: Path) -> dict[str, Any]:
    """Return the part of a card that is about the vectors of a model: of a file, such as one for
    LiteRT, its entry in `artifacts`; of a SavedModel the whole card.

    Args:
        card: What `card_of` returned.
        model: A file, or the folder of a SavedModel.

    Raises:
        UserError: The card cannot be understood, or does not list the file.
    """
    document = read_json(card)
    if model.is_dir():
        return document
    artifacts = fields(document.get("artifacts", {}), {}, f"{card}: artifacts")
    file = Path(os.path.abspath(model)).relative_to(os.path.abspath(card.parent)).as_posix()
    for artifact in artifacts.values():
        if file in artifact.get("files", {}):
            return artifact
    raise UserError(f"{card} does not list {file}: export the model again")


def compare_with_card(model: Path) -> None:
    """Compare the files of a model with the checksums in the card next to it, or in the folder
    above.

    What the card does not list is not compared, and nothing is where there is no card.

    Args:
        model: A file, or the folder of a SavedModel.

    Raises:
        UserError: A file that the card lists is missing or damaged, or the card cannot be
            understood.

    Example:
        >>> compare_with_card(Path("models/cars_jrd/1/litert/int8.tflite"))
    """
    model = Path(os.path.abspath(model))
    card = card_of(model)
    if card is None:
        return
    artifacts = fields(read_json(card).get("artifacts", {}), {}, f"{card}: artifacts")
    for name, artifact in artifacts.items():
        entries = fields(artifact, {"files": dict}, f"{card}: artifacts.{name}")["files"]
        if model == card.parent:
            # The folder is that of the SavedModel; other artifacts lie in it as files.
            compared = entries if name == "saved_model" else {}
        else:
            own = [file for file in entries if card.parent / file == model]
            compared = {file: entries[file] for file in own}
        advice = "copy the exported version again from its source, or export it again"
        compare_files(card.parent, compared, str(card), advice)


def served_version(path: Path) -> Path | None:
    """Return the folder of the SavedModel that a path means: itself or its newest version; None
    where there is none.

    Example:
        >>> served_version(Path("no/such/folder")) is None
        True
    """
    if (path / "saved_model.pb").is_file():
        return path
    if not path.is_dir():
        return None
    versions = [entry for entry in path.iterdir() if re.fullmatch("[0-9]{1,18}", entry.name)]
    models = [entry for entry in versions if (entry / "saved_model.pb").is_file()]
    return max(models, key=lambda entry: int(entry.name), default=None)
