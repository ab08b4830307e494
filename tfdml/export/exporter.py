"""Exports an embedder: written in each format, run in fresh processes, compared, and only then published."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import SERVING_LIMIT
from tfdml.data.faults import explain_failure
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.backends import encoded_image
from tfdml.embeddings.backends.model_card import CARD, describe_files, model_card
from tfdml.errors import UserError
from tfdml.export.acceptance import TOLERANCES, Comparison, ExportVerifier, Tolerance
from tfdml.export.litert import PRECISIONS, convert_litert
from tfdml.export.network import check_backend, in_float32
from tfdml.export.onnx_format import check_onnx, convert_onnx
from tfdml.export.request import RequestPreprocessor
from tfdml.export.saved_model import SIGNATURES, write_saved_model
from tfdml.export.versions import new_version
from tfdml.export.warm_up import write_warm_up
from tfdml.io.files import write_json
from tfdml.models import AnyEmbedder

FORMATS = ("saved_model", *(f"litert_{precision}" for precision in PRECISIONS), "onnx")
# About how many bytes a file has for each parameter; of those not named here, 4.
_BYTES_PER_WEIGHT = {"litert_float16": 2, "litert_dynamic_range": 1, "litert_int8": 1}
_GROUPS = {"all": FORMATS, "litert": tuple(name for name in FORMATS if name.startswith("litert"))}


def chosen_formats(names: Sequence[str]) -> tuple[str, ...]:
    """The formats that names stand for, each once, in the order of `FORMATS`.

    Args:
        names: Of `FORMATS`, or `litert` for its four precisions, or `all`.

    Raises:
        UserError: A name is unknown, or there is none.

    Example:
        >>> chosen_formats(["onnx", "litert_int8", "litert_int8"])
        ('litert_int8', 'onnx')
    """
    chosen: set[str] = set()
    for name in names:
        if name not in FORMATS and name not in _GROUPS:
            raise UserError(f"`formats={name}`: must be of {', '.join((*FORMATS, *_GROUPS))}")
        chosen.update(_GROUPS.get(name, (name,)))
    if not chosen:
        raise UserError(f"`formats` is empty: name some of {', '.join((*FORMATS, *_GROUPS))}")
    return tuple(name for name in FORMATS if name in chosen)


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """How an export is made.

    Args:
        formats: See `chosen_formats`.
        images: On how many images the exports are compared with the embedder; 0: on all.
        representative_images: On how many training images the ranges of `litert_int8` are measured.
        max_pixels: Images that state more pixels in their header are refused by the SavedModel before they are decoded.
        min_cosine: In place of each format's own; see `tfdml.export.acceptance.Tolerance`.
        max_recall_drop: Likewise.

    Raises:
        UserError: A value is out of range.
    """

    formats: Sequence[str] = ("saved_model",)
    images: int = 2000
    representative_images: int = 500
    max_pixels: int = SERVING_LIMIT
    min_cosine: float | None = None
    max_recall_drop: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "formats", chosen_formats(self.formats))
        for name, low, high in (
            ("images", 0, None),
            ("representative_images", 1, None),
            ("max_pixels", 1, 2**40),
            ("min_cosine", -1, 1),
            ("max_recall_drop", 0, 1),
        ):
            value = getattr(self, name)
            if value is not None and not (low <= value and (high is None or value <= high)):
                raise UserError(
                    f"`{name}={value}`: must be at least {low}" + ("" if high is None else f", at most {high}")
                )

    def tolerance(self, name: str) -> Tolerance:
        """The tolerance of a format."""
        own = TOLERANCES[name]
        return Tolerance(
            min_cosine=own.min_cosine if self.min_cosine is None else self.min_cosine,
            max_recall_drop=own.max_recall_drop if self.max_recall_drop is None else self.max_recall_drop,
            # Whoever sets a cosine means it to decide alone.
            max_difference=own.max_difference if self.min_cosine is None else None,
        )


def export_model(
    embedder: AnyEmbedder,
    folder: str | os.PathLike,
    test: ImageDataset,
    train: ImageDataset | None = None,
    options: ExportOptions | None = None,
    about: dict[str, Any] | None = None,
    report: Callable[[str], None] = logging.info,
) -> Path:
    """Export an embedder as the next version, in every requested format or not at all.

        folder/<n>/   saved_model.pb, assets.extra/tf_serving_warmup_requests
                      litert/{float32,float16,dynamic_range,int8}.tflite   onnx/model.onnx   model_card.json

    Each file is loaded in a fresh process and compared with the embedder on images of `test`; where one differs by more
    than its tolerance no version is written, and the error says which and by how much.

    Args:
        embedder: A built `Embedder`, `AttentionEnsemble` or `MomentEmbedder`. One that was trained in half precision is
            exported in float32.
        folder: Where versions lie; earlier versions stay.
        test: Images that it was not trained on.
        train: Its training images, for `litert_int8`.
        options: The formats and tolerances; by default a SavedModel.
        about: What the model card states of data, flags and metrics.
        report: Called with a line on each format.

    Returns:
        The path of the version.

    Raises:
        UserError: Keras runs on another backend than TensorFlow, a format cannot be made or is refused, an image cannot
            be read, or the folder cannot be written.

    Example:
        >>> options = ExportOptions(formats=["saved_model", "litert_float32"])
        >>> export_model(embedder, "models/cars", test, train, options)
        PosixPath('models/cars/1')
    """
    check_backend()
    options = options or ExportOptions()
    if "onnx" in options.formats:
        check_onnx()
    if "litert_int8" in options.formats and train is None:
        raise UserError("litert_int8 needs representative images: pass the training images as train")
    embedder = in_float32(embedder)
    measured_on = whole_classes(test, options.images)
    if "saved_model" in options.formats:
        _check_pixel_limit(EvaluationTransform.of(embedder), measured_on, options.max_pixels)
    size = sum(_BYTES_PER_WEIGHT.get(name, 4) * embedder.count_params() for name in options.formats)
    with new_version(folder, size) as version:
        paths = {name: _write(name, embedder, version.folder, train, options) for name in options.formats}
        verifier = ExportVerifier(embedder, measured_on)
        compared, refused = {}, []
        for name, path in paths.items():
            compared[name] = verifier.compare(name, path)
            faults = compared[name].faults(options.tolerance(name))
            report(f"{name:<21} {_size(path, name):>9}  {compared[name]}" + ("  REFUSED" if faults else ""))
            refused += [f"{name}: {'; '.join(faults)}"] if faults else []
        if refused:
            raise UserError(
                f"no version is written: {'. '.join(refused)}. Leave the format out, or accept more knowingly with "
                "`min_cosine` or `max_recall_drop`"
            )
        if "saved_model" in paths:
            write_warm_up(version.folder, EvaluationTransform.of(embedder).resize)
        artefacts = {name: _artefact(name, paths, version.folder, compared[name], options) for name in paths}
        signatures = SIGNATURES if "saved_model" in artefacts else ()
        card = model_card(embedder, artefacts, signatures, options.max_pixels, about or {})
        write_json(version.folder / CARD, card)
    assert version.path is not None
    return version.path


def whole_classes(dataset: ImageDataset, images: int) -> ImageDataset:
    """Classes spread evenly over a data set, with all their images, until there are at least so many.

    Args:
        dataset: The images.
        images: How many; 0 for all.

    Returns:
        At least two classes where there are two, so that there is a wrong answer to give.
    """
    if not images or images >= len(dataset):
        return dataset
    classes, counts = np.unique(dataset.labels, return_counts=True)
    for number in range(2, len(classes)):
        # Evenly spaced over all of them, whatever the number.
        chosen = np.linspace(0, len(classes) - 1, number).round().astype(int)
        if counts[chosen].sum() >= images:
            return dataset.select_classes(classes[chosen])
    return dataset


def _check_pixel_limit(transform: EvaluationTransform, dataset: ImageDataset, max_pixels: int) -> None:
    """Refuse a limit that the images of the comparison, or of the warm-up, exceed."""
    if max_pixels < transform.resize**2:
        raise UserError(
            f"`max_pixels={max_pixels}`: images are resized to {transform.resize} x {transform.resize} pixels: allow "
            f"{transform.resize**2:,} at least"
        )
    text = tf.TensorSpec((), tf.string)
    says = tf.function(RequestPreprocessor(transform, max_pixels).fault, input_signature=[text], autograph=False)
    for index in range(len(dataset)):
        encoded = encoded_image(dataset.images, index)
        try:
            fault = says(encoded).numpy().decode()
        except tf.errors.InvalidArgumentError:
            continue  # a damaged header, which decoding reports
        if fault:
            raise UserError(
                f"`max_pixels={max_pixels}`: the SavedModel would refuse {dataset.images.name(index)}, on which it is "
                f"to be compared: {fault}; raise the limit or leave the image out"
            )


def _write(
    name: str,
    embedder: AnyEmbedder,
    folder: Path,
    train: ImageDataset | None,
    options: ExportOptions,
) -> Path:
    """Write one format; returns its file, or the SavedModel's folder."""
    if name == "saved_model":
        write_saved_model(embedder, folder, options.max_pixels)
        return folder
    if name == "onnx":
        path, data = folder / "onnx" / "model.onnx", convert_onnx(embedder)
    else:
        precision = name.removeprefix("litert_")
        views = None
        if precision == "int8":
            assert train is not None
            views = _representative(embedder, train, options.representative_images)
        path, data = folder / "litert" / f"{precision}.tflite", convert_litert(embedder, precision, views)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def _representative(embedder: AnyEmbedder, train: ImageDataset, count: int) -> np.ndarray:
    """Views of training images spread evenly over the data set."""
    rows = np.unique(np.linspace(0, len(train) - 1, min(count, len(train))).round().astype(int))
    chosen = train.take(rows)
    try:
        batches = evaluation_batches(chosen, EvaluationTransform.of(embedder), len(rows))
        return np.concatenate([images.numpy() for images, _ in batches])
    except tf.errors.OpError as error:
        raise (explain_failure(error, chosen, leave_out="") or error) from None


def _files(name: str, path: Path) -> list[Path]:
    if name != "saved_model":
        return [path]
    return [path / "saved_model.pb", *(entry for entry in (path / "variables").rglob("*") if entry.is_file())]


def _size(path: Path, name: str) -> str:
    return f"{sum(file.stat().st_size for file in _files(name, path)) / 1e6:,.2f} MB"


def _artefact(
    name: str, paths: dict[str, Path], version: Path, compared: Comparison, options: ExportOptions
) -> dict[str, Any]:
    return {
        **describe_files(version, _files(name, paths[name])),
        "acceptance": compared.as_json(),
        "tolerance": dataclasses.asdict(options.tolerance(name)),
    }
