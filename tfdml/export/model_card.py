"""`model_card.json`: what an exported version is, what it was made from, and how it was measured."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tfdml.data.augmentation.evaluation import EvaluationTransform
from tfdml.export.saved_model import SIGNATURES
from tfdml.models import Embedder, MomentEmbedder
from tfdml.version import __version__, installed

CARD = "model_card.json"
LICENCE = (
    "Not cleared by this export. The licences of the pretrained weights that training started from, and of the images "
    "that it trained on, decide what the model may be used for: check both."
)
_PACKAGES = ("tensorflow", "keras", "numpy", "ai-edge-litert", "tf2onnx", "onnx", "onnxruntime")


def model_card(
    embedder: Embedder | MomentEmbedder, artefacts: dict[str, dict], max_pixels: int, about: dict[str, Any]
) -> dict[str, Any]:
    """The card of a version.

    Args:
        embedder: What was exported.
        artefacts: By format: where it lies, its size and checksum, how it was accepted.
        max_pixels: The limit of the SavedModel's images.
        about: The training: data, flags, metrics.

    Returns:
        A dict that JSON can hold. `view` is the configuration of the `EvaluationTransform` that a LiteRT or ONNX file
        expects its images to have gone through.
    """
    return {
        "model": {"class": type(embedder).__name__, "name": embedder.name, "parameters": embedder.count_params()},
        "embedding_dim": embedder.embedding_dim,
        "distance": "euclidean, of vectors of length 1: |f - g|^2 = 2 - 2 cosine",
        "view": EvaluationTransform.of(embedder).get_config(),
        "signatures": list(SIGNATURES) if "saved_model" in artefacts else [],
        "max_pixels": max_pixels,
        "artefacts": artefacts,
        **about,
        "versions": {"tfdml": __version__, **installed(_PACKAGES)},
        "licence": LICENCE,
    }


def describe_files(version: Path, paths: Iterable[Path]) -> dict[str, Any]:
    """Size and SHA-256 of files below a version's folder.

    Returns:
        `bytes`, the sum; `files`, by path, the bytes and `sha256` of each.
    """
    files = {}
    for path in sorted(paths):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(version).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    return {"bytes": sum(entry["bytes"] for entry in files.values()), "files": files}
