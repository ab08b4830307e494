"""Exports an embedder, or that of a run: each format is written, compared with the embedder, then
published.

`TOLERANCES` says by how much a file of a format may differ from the embedder.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import explain_failure
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings import embed
from tfdml.embeddings.backends import SavedModelEmbedder, encoded_image, load_embedder, open_file
from tfdml.embeddings.compute import slices
from tfdml.embeddings.model_card import CARD, describe_files, fingerprint, model_card
from tfdml.errors import ERROR_TEXT, UserError, counted, user_errors
from tfdml.evaluation import Calibration, calibrate, evaluate_dataset
from tfdml.evaluation.calibration import choose_calibration
from tfdml.evaluation.views import ViewItems
from tfdml.export import saved_model
from tfdml.export.conversion import check_onnx, convert_litert, convert_onnx
from tfdml.export.options import ExportOptions
from tfdml.flags import parse_flags
from tfdml.io.files import read_json, write_json
from tfdml.models import AnyEmbedder, TextEmbedder, TruncatedEmbedder, stack, with_whitening
from tfdml.training import RunFolder
from tfdml.training.run_data import load_splits
from tfdml.training.settings import DataSettings, Experiment

_BATCH_SIZE = 32
# Largest error of a vector's length.
_UNIT = 1e-3
# Flags that name places on the machine that trained; they stay private.
_PRIVATE = ("data_dir", "features", "run_dir", "start_from")


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """By how much an exported file may differ from the embedder.

    Args:
        min_cosine: Smallest cosine between an image's two vectors.
        max_recall_drop: Largest loss of Recall@1, as a fraction. The loss of a single query is
            always accepted.
        max_difference: Largest absolute difference of a component.
    """

    min_cosine: float
    max_recall_drop: float
    max_difference: float = 2.0


# The same arithmetic in another order: components of unit vectors differ by a few units in the last
# place, 1e-7 each.
_EXACT = Tolerance(min_cosine=1 - 1e-6, max_recall_drop=0.005, max_difference=1e-5)
TOLERANCES = {
    "saved_model": _EXACT,
    "litert_float32": _EXACT,
    "onnx": _EXACT,
    # 11 bits of precision in each weight: MobileNetV2 on Cars-196 came to at least 0.9993.
    "litert_float16": Tolerance(min_cosine=0.995, max_recall_drop=0.005),
    # 8 bits in each weight, then in each activation too: that network came to at least 0.986 and
    # 0.89, and to 0.998 and 0.985 on average. Neighbors are what counts: a point of Recall@1 at
    # most.
    "litert_dynamic_range": Tolerance(min_cosine=0.95, max_recall_drop=0.01),
    "litert_int8": Tolerance(min_cosine=0.85, max_recall_drop=0.01),
}


def compare_vectors(
    expected: np.ndarray, vectors: np.ndarray, dataset: ImageDataset
) -> dict[str, Any]:
    """Return how close the vectors of an exported file are to those of the embedder.

    Args:
        expected: (N, d) the embedder's own.
        vectors: (N, d) those of the file.
        dataset: The images, with several of a class, so that Recall@1 means something.

    Returns:
        The number of `images`; `min_cosine` and `mean_cosine` between an image's two vectors;
        `max_difference` of a component; `max_length_error`, the largest | |f| - 1 |;
        `recall@1_keras`, `recall@1` and their difference `recall@1_drop`, None where no two images
        share a class.

    Raises:
        UserError: They have another shape.
    """
    if vectors.shape != expected.shape:
        raise UserError(f"the export gives {vectors.shape}, the embedder {expected.shape}")
    # Rows of zeros on both sides have no direction to compare.
    is_compared = expected.any(axis=1) | vectors.any(axis=1)
    ours = expected.astype(np.float64)[is_compared]
    theirs = vectors.astype(np.float64)[is_compared]
    lengths = np.linalg.norm(theirs, axis=1)
    # A zero vector has cosine 0; the embedder's own vectors have length 1 or 0.
    cosines = (ours * theirs).sum(axis=1) / np.where(lengths > 0, lengths, 1.0)
    measures: dict[str, Any] = {"images": len(expected)}
    measures["min_cosine"] = float(cosines.min(initial=1.0))
    measures["mean_cosine"] = float(cosines.mean()) if len(cosines) else 1.0
    measures["max_difference"] = float(np.abs(ours - theirs).max(initial=0.0))
    measures["max_length_error"] = float(np.abs(lengths - 1.0).max(initial=0.0))
    before = _recall_at_1(expected, dataset)
    after = _recall_at_1(vectors, dataset)
    measures["recall@1_keras"] = before
    measures["recall@1"] = after
    measures["recall@1_drop"] = None
    if before is not None and after is not None:
        measures["recall@1_drop"] = before - after
    return measures


def _recall_at_1(vectors: np.ndarray, dataset: ImageDataset) -> float | None:
    try:
        return float(evaluate_dataset(vectors, dataset, ks=(1,), metrics=("recall",))["recall@1"])
    except UserError:
        return None  # no two images of a class, or vectors that are not finite


def faults_of(measures: Mapping[str, Any], tolerance: Tolerance) -> list[str]:
    """Return in which measures of `compare_vectors` a file exceeds its tolerance; nothing where it
    is accepted."""
    faults = []

    def check(name: str, is_within: bool, limit: float) -> None:
        # NaN is not, either.
        if not is_within:
            faults.append(f"{name} is {measures[name]:.6g}, beyond {limit:g}")

    lowest = tolerance.min_cosine
    check("min_cosine", measures["min_cosine"] >= lowest, lowest)
    largest = tolerance.max_difference
    check("max_difference", measures["max_difference"] <= largest, largest)
    check("max_length_error", measures["max_length_error"] <= _UNIT, _UNIT)
    # One query, and what the subtraction of fractions may be off by.
    most_lost = tolerance.max_recall_drop + 1 / measures["images"] + 1e-9
    drop = measures["recall@1_drop"] or 0
    check("recall@1_drop", drop <= most_lost, tolerance.max_recall_drop)
    return faults


def evaluation_views(embedder: AnyEmbedder, dataset: ImageDataset) -> np.ndarray:
    """(N, S, S, 3) uint8 views of a data set, as evaluation makes them.

    Raises:
        UserError: An image cannot be read.
    """
    batches = evaluation_batches(dataset, EvaluationTransform.of(embedder), _BATCH_SIZE)
    try:
        return np.concatenate([images.numpy() for images, _ in batches])
    except tf.errors.OpError as error:
        raise (explain_failure(error, dataset, leave_out="") or error) from None


def exported_vectors(name: str, path: Path, inputs: Any) -> np.ndarray:
    """Run an exported file on the CPU, by the runtime of its format.

    Args:
        name: The format, of `FORMATS`.
        path: The file, or the folder of a SavedModel.
        inputs: N encoded images for a SavedModel of images; N views or vectors for others.

    Returns:
        (N, d) its vectors.

    Raises:
        UserError: The file cannot be loaded or run.
    """
    message = f"the exported {name} cannot be run: {ERROR_TEXT}"
    with user_errors(Exception, message, keep="last"), tf.device("/CPU:0"):
        run: Any
        if name == "saved_model":
            loaded = tf.saved_model.load(str(path))
            run = loaded.signatures["serving_default"]
            (key,) = run.structured_input_signature[1]
            parts = [
                run(**{key: tf.constant(part)})["embedding"].numpy()
                for part in slices(inputs, _BATCH_SIZE)
            ]
        else:
            with user_errors(UserError, message):
                run, _, _ = open_file(path)
            parts = [run(part) for part in slices(inputs, _BATCH_SIZE)]
    return np.concatenate(parts)


def tolerance_of(options: ExportOptions, name: str) -> Tolerance:
    """Return the tolerance of a format."""
    changes: dict[str, float] = {}
    if options.max_recall_drop is not None:
        changes["max_recall_drop"] = options.max_recall_drop
    if options.min_cosine is not None:  # which then decides alone
        changes["min_cosine"] = options.min_cosine
        changes["max_difference"] = Tolerance.max_difference
    return dataclasses.replace(TOLERANCES[name], **changes)


def export_model(
    embedder: AnyEmbedder,
    folder: str | os.PathLike,
    test: ImageDataset,
    train: ImageDataset | None = None,
    options: ExportOptions | None = None,
    about: dict[str, Any] | None = None,
    report: Callable[[str], None] = logging.info,
    text_embedder: TextEmbedder | None = None,
) -> Path:
    """Export an embedder as the next version, in every requested format or not at all.

        folder/<n>/   saved_model.pb, assets.extra/tf_serving_warmup_requests
                      litert/{float32,float16,dynamic_range,int8}.tflite
                      onnx/model.onnx   model_card.json

    Each file is run on images of `test` and compared with the embedder; where one differs by more
    than its tolerance no version is written, and the error says which and by how much. Everything
    runs on the CPU: what a file computes must not be confused with what a GPU's reduced precision
    does.

    Args:
        embedder: A built `Embedder`, `AttentionEnsemble` or `MomentEmbedder`. One that was trained
            in half precision is exported in float32.
        folder: Where versions lie; earlier versions stay.
        test: Images of classes that it was not trained on.
        train: Its training images, for `litert_int8`.
        options: The formats and tolerances; by default a SavedModel.
        about: What the model card states of data, flags and metrics.
        report: Called with a line on each format.
        text_embedder: A tower of texts, which becomes the signature `embed_texts` of the
            SavedModel. It is compared on the texts of `test`.

    Returns:
        The path of the version.

    Raises:
        UserError: Keras runs on another backend than TensorFlow, a format cannot be made or is
            refused, an image cannot be read, or the folder cannot be written.

    Example:
        >>> options = ExportOptions(formats=["saved_model", "litert_float32"])
        >>> export_model(embedder, "models/cars", test, train, options)
        PosixPath('models/cars/1')
    """
    options = options or ExportOptions()
    _check_options(options, embedder)
    embedder = saved_model.in_float32(embedder)
    text_embedder = text_embedder and saved_model.in_float32(text_embedder)
    is_servable = "saved_model" in options.formats
    test = whole_classes(test, options.images)
    with saved_model.new_version(folder) as (hidden, path):
        files = {
            name: _write(name, embedder, hidden, train, options, text_embedder)
            for name in options.formats
        }
        acceptance = _Acceptance(embedder, test, train, options, report)
        model = fingerprint(embedder)
        expected, trained = acceptance.expected, acceptance.trained
        calibration = _calibration(options.calibrate, expected, test, trained, model, report)
        for name, file in files.items():
            acceptance.compare(name, file, hidden, calibration)
            if name == "saved_model" and text_embedder is not None:
                acceptance.compare_texts(text_embedder, file)
        acceptance.require()
        signatures = []
        if is_servable:
            loaded = tf.saved_model.load(str(hidden)).signatures
            saved_model.write_warm_up(hidden, loaded)
            signatures = list(loaded)
        about = dict(about or {})
        about["calibration"] = calibration and calibration.to_dict()
        about["trained_on"] = None if train is None else sorted(train.class_names.values())
        artifacts = acceptance.artifacts
        card = model_card(embedder, artifacts, signatures, options.max_pixels, about)
        write_json(hidden / CARD, card)
    return path


def _check_options(options: ExportOptions, embedder: AnyEmbedder) -> None:
    """Refuse what cannot be exported, before anything is computed."""
    saved_model.check_backend()
    if "onnx" in options.formats:
        check_onnx()
    resize = EvaluationTransform.of(embedder).resize
    if "saved_model" in options.formats and options.max_pixels < resize**2:
        raise UserError(
            f"images are resized to {resize} x {resize} pixels", max_pixels=options.max_pixels
        )


class _Acceptance:
    """Runs the files of a version on images, and compares their vectors with the embedder's.

    Args:
        embedder: The embedder.
        test: The images.
        train: Its training images.
        options: The tolerances.
        report: Called with a line on each format.

    Attributes:
        expected: (N, d) the embedder's vectors.
        trained: Names of the classes of the images that were trained on.
        artifacts: What the model card states of each format.
    """

    def __init__(
        self,
        embedder: AnyEmbedder,
        test: ImageDataset,
        train: ImageDataset | None,
        options: ExportOptions,
        report: Callable[[str], None],
    ):
        self._test = test
        self.trained = trained_classes(test, train)
        self._options = options
        self._report = report
        self._takes_images = len(embedder.view_shape) > 1
        self._views = evaluation_views(embedder, test)
        with tf.device("/CPU:0"):
            call = tf.function(lambda images: embedder(images, training=False), autograph=False)
            self.expected = embed(call, slices(self._views, _BATCH_SIZE))
        self._refused: list[str] = []
        self.artifacts: dict[str, Any] = {}

    def compare(self, name: str, file: Path, folder: Path, calibration: Calibration | None) -> None:
        """Compare the vectors of a file.

        Args:
            name: Its format.
            file: The file, or the folder of a SavedModel.
            folder: The version's.
            calibration: The threshold of the embedder, which is measured again by the file; None:
                there is none.
        """
        inputs: Any = self._views
        if name == "saved_model" and self._takes_images:
            inputs = [encoded_image(self._test.images, row) for row in range(len(self._test))]
        vectors = exported_vectors(name, file, inputs)
        measures = compare_vectors(self.expected, vectors, self._test)
        measures["classes"] = "trained" if self.trained else "unseen"
        tolerance = tolerance_of(self._options, name)
        faults = faults_of(measures, tolerance)
        paths = saved_model.model_files(file) if name == "saved_model" else [file]
        entry = describe_files(folder, paths)
        self._report(_line(name, entry["bytes"], measures) + ("  REFUSED" if faults else ""))
        entry["acceptance"] = measures
        entry["tolerance"] = dataclasses.asdict(tolerance)
        self.artifacts[name] = entry
        if faults:
            self._refused.append(f"{name}: {'; '.join(faults)}")
        elif calibration is not None and name != "saved_model":
            both = (self.expected, vectors)
            own = _moved_calibration(calibration, name, both, self._test, self._report)
            entry["calibration"] = own and own.to_dict()

    def compare_texts(self, text_embedder: TextEmbedder, folder: Path) -> None:
        """Compare the vectors of the texts of the images by the signature `embed_texts` of a
        SavedModel; there is no Recall@1."""
        texts = ViewItems.of(self._test).texts
        with tf.device("/CPU:0"):
            expected = text_embedder.embed_texts(texts)
            backend = SavedModelEmbedder(folder)
            parts = [backend.embed_texts(part) for part in slices(texts, _BATCH_SIZE)]
        dataset = ImageDataset("texts", "test", labels=np.arange(len(texts)), vectors=expected)
        measures = compare_vectors(expected, np.concatenate(parts), dataset)
        faults = faults_of(measures, tolerance_of(self._options, "saved_model"))
        self._refused += [f"saved_model, texts: {fault}" for fault in faults]
        cosine = f"cosine min {measures['min_cosine']:.6f}"
        self._report(f"{'saved_model':<21} {cosine} on {counted(measures['images'], 'text')}")
        self.artifacts["saved_model"]["acceptance_of_texts"] = measures

    def require(self) -> None:
        """Raise a `UserError` where a file exceeds its tolerance."""
        if self._refused:
            raise UserError(
                f"no version is written: {'. '.join(self._refused)}. Leave the format out, or "
                "accept more knowingly with min_cosine or max_recall_drop"
            )


def _line(name: str, size: int, measures: Mapping[str, Any]) -> str:
    text = (
        f"{size / 1e6:,.2f} MB  cosine min {measures['min_cosine']:.6f}, mean "
        f"{measures['mean_cosine']:.6f}"
    )
    if measures["recall@1_drop"] is not None:
        text += (
            f", Recall@1 {100 * measures['recall@1']:.1f} % (Keras "
            f"{100 * measures['recall@1_keras']:.1f} %)"
        )
    images = counted(measures["images"], "image")
    return f"{name:<21} {text} on {images} of {measures['classes']} classes"


def trained_classes(test: ImageDataset, train: ImageDataset | None) -> list[str]:
    """Return the names of the classes of `test` that are those of training images, too."""
    if train is None:
        return []
    names = {test.class_names.get(label, str(label)) for label in test.classes.tolist()}
    return sorted(names.intersection(train.class_names.values()))


def _calibration(
    option: str,
    vectors: np.ndarray,
    test: ImageDataset,
    trained: Sequence[str],
    model: str,
    report: Callable[[str], None],
) -> Calibration | None:
    """Return the threshold that `ExportOptions.calibrate` means.

    Args:
        option: The option.
        vectors: (N, d) the embedder's.
        test: The images.
        trained: Names of their classes that were trained on.
        model: The fingerprint of the embedder.
        report: Called with what the threshold is.
    """

    def measure(target: dict[str, Any]) -> Calibration:
        if trained:
            raise UserError(
                f"{len(trained)} classes of these images were trained on, such as {trained[0]}"
            )
        calibration = calibrate(vectors, test.labels, **target)
        return calibration.measured_on(gallery=f"{test.name}, {test.split}", model=model)

    calibration = choose_calibration(option, "far=0.001", measure, read_json, report)
    if calibration is not None and calibration.basis.model not in ("", model):
        report(
            "the threshold was measured on the vectors of another model than the one that is "
            "exported"
        )
    return calibration


def _moved_calibration(
    calibration: Calibration,
    name: str,
    vectors: tuple[np.ndarray, np.ndarray],
    test: ImageDataset,
    report: Callable[[str], None],
) -> Calibration | None:
    """Return the threshold for the vectors of a file; None where they cannot show it.

    Args:
        calibration: That of the embedder.
        name: The format of the file.
        vectors: (N, d) the embedder's and the file's.
        test: The images.
        report: Called with what the threshold is, or why there is none.
    """
    try:
        moved = calibration.moved_to(*vectors, test.labels)
    except UserError as error:
        report(
            f"{name}: no threshold: {error}. Measure one by the file: tfdml evaluate --model=FILE"
        )
        return None
    if moved.threshold != calibration.threshold:
        report(f"{name}: {moved}")
    return moved


def whole_classes(dataset: ImageDataset, images: int) -> ImageDataset:
    """Classes spread evenly over a data set, with all their images, until there are at least so
    many.

    Args:
        dataset: The images.
        images: How many; 0 for all.

    Returns:
        At least two classes where there are two, so that there is a wrong answer to give.
    """
    classes, counts = np.unique(dataset.labels, return_counts=True)
    for size in range(2, len(classes) if images else 0):
        chosen = np.linspace(0, len(classes) - 1, size).round().astype(int)
        if counts[chosen].sum() >= images:
            return dataset.select_classes(classes[chosen])
    return dataset


def _write(
    name: str,
    embedder: AnyEmbedder,
    folder: Path,
    train: ImageDataset | None,
    options: ExportOptions,
    text_embedder: TextEmbedder | None,
) -> Path:
    """Write one format; returns its file, or the SavedModel's folder."""
    if name == "saved_model":
        saved_model.write_saved_model(embedder, folder, options.max_pixels, text_embedder)
        return folder
    if name == "onnx":
        path = folder / "onnx" / "model.onnx"
        data = convert_onnx(embedder)
    else:
        precision = name.removeprefix("litert_")
        path = folder / "litert" / f"{precision}.tflite"
        views = None
        if precision == "int8" and train is not None:
            count = min(options.representative_images, len(train))
            rows = np.linspace(0, len(train) - 1, count)  # spread evenly
            views = evaluation_views(embedder, train.take(np.unique(rows.round().astype(int))))
        data = convert_litert(embedder, precision, views)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def export_run(
    run_dir: str | os.PathLike,
    folder: str | os.PathLike,
    options: ExportOptions | None = None,
    moments: bool = False,
    data_dir: str = "",
    report: Callable[[str], None] = logging.info,
    whitening: Mapping[str, Any] | None = None,
    truncate_dim: int = 0,
    stack_on: str = "",
) -> Path:
    """Export the embedder of a run; see `export_model`.

    Args:
        run_dir: The run's folder.
        folder: Where versions lie.
        options: The formats and tolerances.
        moments: Export `moments.keras`, which searches with all moments, in place of
            `embedder.keras`.
        data_dir: Where the run's data set lies now, if it has moved.
        report: Called with a line on each format.
        whitening: Arguments of `with_whitening` (`dim`, `power`, `shrinkage`), to export the
            embedder with a whitening behind it that is fitted to the run's training images; None:
            without.
        truncate_dim: Keep this many first dimensions of the vector, scaled to length 1; 0: all.
        stack_on: Of a head: the run of the embedder that its vectors come from. Both are exported
            as one embedder of images, which is compared on the images of that run; `data_dir` is
            then theirs.

    Returns:
        The path of the version.

    Raises:
        UserError: As `export_model`; or the folder is not that of a finished run, or its images are
            gone.

    Example:
        >>> export_run("runs/cars_jrd", "models/cars_jrd_all", ExportOptions(formats=["all"]))
        PosixPath('models/cars_jrd_all/1')
    """
    embedder, experiment = load_run(run_dir, moments, data_dir, stack_on)
    splits = load_splits(experiment.part(DataSettings), experiment.seed)
    about = _about(stack_on or run_dir, experiment, moments)
    for name, dataset in (("train", splits.train), ("test", splits.test)):
        if dataset:
            about["data"][name] = {"images": len(dataset), "classes": dataset.num_classes}
    if stack_on:
        about["head"] = _about(run_dir, Experiment.of_run(run_dir))
    options = options or ExportOptions()
    if whitening is not None:
        batches = evaluation_batches(splits.train, EvaluationTransform.of(embedder), _BATCH_SIZE)
        with user_errors((TypeError, ValueError), ERROR_TEXT, whitening=...):
            embedder = with_whitening(embedder, embed(embedder, batches), **whitening)
        about["whitening"] = dict(whitening)
    if truncate_dim:
        about["truncated_from"] = embedder.embedding_dim
        with user_errors(ValueError, ERROR_TEXT, truncate_dim=truncate_dim):
            embedder = TruncatedEmbedder(embedder, truncate_dim)
        embedder.build((None, *embedder.view_shape))
    is_changed = bool(stack_on or whitening is not None or truncate_dim)
    if is_changed:
        about["metrics"] = None  # the run has measured the embedder as it was
    can_hold_texts = "saved_model" in options.formats and not (is_changed or moments)
    text_embedder = _text_embedder(run_dir, can_hold_texts, report)
    test = splits.test or splits.train
    return export_model(embedder, folder, test, splits.train, options, about, report, text_embedder)


def _text_embedder(
    run_dir: str | os.PathLike, can_hold: bool, report: Callable[[str], None]
) -> TextEmbedder | None:
    """Return the tower of texts of a run; None where there is none, or the export cannot hold
    it."""
    path = RunFolder(run_dir).text_embedder
    if not path.is_file():
        return None
    tower = load_embedder(path)
    if can_hold and getattr(tower, "tokenizer", None) is not None:
        return tower
    needs = "a SavedModel, a tokenizer, and the images' embedder as it was trained"
    report(f"the tower of texts is left out: it needs {needs}")
    return None


def load_run(
    run_dir: str | os.PathLike, moments: bool = False, data_dir: str = "", stack_on: str = ""
) -> tuple[AnyEmbedder, Experiment]:
    """Return the embedder and the settings of a run; of a head that is stacked, the settings of its
    embedder's run.

    Raises:
        UserError: There are none, or the head does not go on that embedder.
    """
    if stack_on:
        embedder, experiment = load_run(stack_on, data_dir=data_dir)
        head, _ = load_run(run_dir, moments)
        with user_errors(ValueError, ERROR_TEXT, run_dir=run_dir, stack_on=stack_on):
            return stack(embedder, head), experiment
    run = RunFolder(run_dir)
    embedder = load_embedder(run.moments if moments else run.embedder)
    changes: dict[str, Any] = {"run_dir": str(run_dir)}
    if data_dir:
        changes["data_dir"] = data_dir
    return embedder, dataclasses.replace(Experiment.of_run(run_dir), **changes)


def _about(
    run_dir: str | os.PathLike, experiment: Experiment, moments: bool = False
) -> dict[str, Any]:
    """Return what the model card states of a run: data, flags, metrics."""
    path = RunFolder(run_dir).result
    if not path.exists():
        logging.warning("%s has no result.json: the model card is without metrics", run_dir)
    result = read_json(path) if path.exists() else {}
    flags = parse_flags(experiment.as_flags())
    data = {"dataset": experiment.data_name, "options": str(experiment.dataset_options)}
    shown = {name: value for name, value in flags.items() if name not in _PRIVATE}
    return {
        "data": data,
        "flags": shown,
        "metrics": result.get("metrics_moments" if moments else "metrics"),
        "protocol": result.get("protocol"),
        "selection": result.get("selection"),
    }
