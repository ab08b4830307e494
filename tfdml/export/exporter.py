"""Exports an embedder, or that of a run: each format is written, run in a fresh process, compared, then published.

`TOLERANCES` says by how much a file of a format may differ from the embedder, and an `ExportVerifier` compares.
"""

import dataclasses
import functools
import os
import reprlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.arguments import integer, number
from tfdml.data.dataset import ImageDataset, explain_failure
from tfdml.data.decoding import SERVING_LIMIT
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.backends import encoded_image, load_embedder
from tfdml.embeddings.model_card import CARD, describe_files, model_card
from tfdml.errors import REASON, UserError, short_message, user_errors
from tfdml.evaluation import Calibration, calibrate, embed, evaluate_dataset, target_of
from tfdml.evaluation.classification import TARGETS
from tfdml.export import saved_model
from tfdml.export.conversion import PRECISIONS, check_onnx, convert_litert, convert_onnx
from tfdml.io.files import is_remote, parse_flags, read_json, unwritable, write_json
from tfdml.models import AnyEmbedder, TruncatedEmbedder, WhitenedEmbedder, stack, with_whitening
from tfdml.training import RunFolder
from tfdml.training.images import Splits, load_splits
from tfdml.training.settings import Experiment

FORMATS = ("saved_model", *(f"litert_{precision}" for precision in PRECISIONS), "onnx")
_WHITENING_BATCH = 100
_RANGES = {
    "images": (0, 2**40),
    "representative_images": (1, 2**40),
    "max_pixels": (1, 2**40),
    "min_cosine": (-1, 1),
    "max_recall_drop": (0, 1),
}
# What `calibrate="auto"` asks for.
_TARGET = "far=0.001"
_GROUPS = {"all": FORMATS, "litert": tuple(name for name in FORMATS if name.startswith("litert"))}
_RUNNER = Path(__file__).with_name("fresh_process.py")
_BATCH_SIZE = 32
_UNIT = 1e-3


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """By how much an exported file may differ from the embedder.

    Args:
        min_cosine: Smallest cosine between an image's two vectors.
        max_recall_drop: Largest loss of Recall@1, as a fraction. The loss of a single query is always
            accepted.
        max_difference: Largest absolute difference of a component; None where cosines say enough.
    """

    min_cosine: float
    max_recall_drop: float
    max_difference: float | None = None


# The same arithmetic in another order: components of unit vectors differ by a few units in the last place, 1e-7 each.
_EXACT = Tolerance(min_cosine=1 - 1e-6, max_recall_drop=0.005, max_difference=1e-5)
TOLERANCES = {
    "saved_model": _EXACT,
    "litert_float32": _EXACT,
    "onnx": _EXACT,
    # 11 bits of precision in each weight: MobileNetV2 on Cars-196 came to at least 0.9993.
    "litert_float16": Tolerance(min_cosine=0.995, max_recall_drop=0.005),
    # 8 bits in each weight, then in each activation too: that network came to at least 0.986 and 0.89, and to 0.998
    # and 0.985 on average. Neighbors are what counts: a point of Recall@1 at most.
    "litert_dynamic_range": Tolerance(min_cosine=0.95, max_recall_drop=0.01),
    "litert_int8": Tolerance(min_cosine=0.85, max_recall_drop=0.01),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How close an exported file is to the embedder.

    Args:
        images: On how many images.
        min_cosine: The smallest cosine between an image's two vectors.
        mean_cosine: The mean.
        max_difference: The largest absolute difference of a component.
        max_length_error: The largest | |f| - 1 | of the file's vectors.
        recall_at_1_keras: Recall@1 of the embedder on these images; None where no two share a class.
        recall_at_1: Recall@1 of the file.
    """

    images: int
    min_cosine: float
    mean_cosine: float
    max_difference: float
    max_length_error: float
    recall_at_1_keras: float | None
    recall_at_1: float | None

    def faults(self, tolerance: Tolerance) -> list[str]:
        """Return what exceeds the tolerance, in words; nothing where the file is accepted."""
        found = []
        # Written so that NaN is a fault.
        if not self.min_cosine >= tolerance.min_cosine:
            found.append(f"the smallest cosine is {self.min_cosine:.6f} < {tolerance.min_cosine:.6f}")
        if tolerance.max_difference is not None and not self.max_difference <= tolerance.max_difference:
            found.append(f"a component differs by {self.max_difference:.1e} > {tolerance.max_difference:.1e}")
        if not self.max_length_error <= _UNIT:
            found.append(f"a vector's length is off by {self.max_length_error:.1e} > {_UNIT:.0e}")
        # One query, and what the subtraction of fractions may be off by.
        allowed = tolerance.max_recall_drop + 1 / self.images + 1e-9
        before, after = self.recall_at_1_keras, self.recall_at_1
        if before is not None and after is not None and not before - after <= allowed:
            most = f"{100 * tolerance.max_recall_drop:g}"
            found.append(f"Recall@1 falls from {100 * before:.1f} to {100 * after:.1f} %, by more than {most}")
        return found

    def as_json(self) -> dict[str, float | int | None]:
        """Return the measures, named as in `result.json`."""
        values = {name.replace("recall_at_1", "recall@1"): value for name, value in dataclasses.asdict(self).items()}
        before, after = self.recall_at_1_keras, self.recall_at_1
        return {**values, "recall@1_drop": None if before is None or after is None else before - after}

    def __str__(self) -> str:
        text = f"cosine min {self.min_cosine:.6f}, mean {self.mean_cosine:.6f}"
        if self.recall_at_1 is not None and self.recall_at_1_keras is not None:
            text += f", Recall@1 {100 * self.recall_at_1:.1f} % (Keras {100 * self.recall_at_1_keras:.1f} %)"
        return f"{text} on {self.images:,} images"


class ExportVerifier:
    """Compares exported files with the embedder that they were made of.

    The embedder's own vectors, the views and the encoded images are made once, for all files. Everything runs on the
    CPU: what a file computes must not be confused with what a GPU's reduced precision does.

    Args:
        embedder: The embedder.
        dataset: Images that it was not trained on, with several of a class, so that Recall@1 means something.

    Raises:
        UserError: An image cannot be read.

    Example:
        >>> verifier = ExportVerifier(embedder, test)
        >>> file = pathlib.Path("float16.tflite")
        >>> size = file.write_bytes(convert_litert(embedder, "float16"))
        >>> vectors = verifier.exported_vectors("litert_float16", file)
        >>> verifier.compare(vectors).faults(TOLERANCES["litert_float16"])
        []
    """

    def __init__(self, embedder: AnyEmbedder, dataset: ImageDataset):
        self.dataset = dataset
        self._embedder = embedder
        self._views = evaluation_views(embedder, dataset)

    @functools.cached_property
    def vectors(self) -> np.ndarray:
        """(N, d) the embedder's own."""
        parts = (self._views[first : first + _BATCH_SIZE] for first in range(0, len(self._views), _BATCH_SIZE))
        with tf.device("/CPU:0"):
            return embed(tf.function(lambda images: self._embedder(images, training=False), autograph=False), parts)

    @functools.cached_property
    def _recall(self) -> float | None:
        return self._recall_at_1(self.vectors)

    def compare(self, found: np.ndarray) -> Comparison:
        """Compare the vectors of a file with the embedder's.

        Args:
            found: (N, d), as `exported_vectors` returns them.

        Raises:
            UserError: They have another shape.
        """
        if found.shape != self.vectors.shape:
            raise UserError(f"the export gives {found.shape}, the embedder {self.vectors.shape}")
        ours, theirs = self.vectors.astype(np.float64), found.astype(np.float64)
        lengths = np.linalg.norm(theirs, axis=1)
        # A zero vector has cosine 0; the embedder's own vectors have length 1 or 0.
        cosines = (ours * theirs).sum(axis=1) / np.where(lengths > 0, lengths, 1.0)
        both_zero = (lengths == 0) & (np.linalg.norm(ours, axis=1) == 0)
        cosines, errors = np.where(both_zero, 1.0, cosines), np.where(both_zero, 0.0, np.abs(lengths - 1.0))
        return Comparison(
            images=len(ours),
            min_cosine=float(cosines.min()),
            mean_cosine=float(cosines.mean()),
            max_difference=float(np.abs(ours - theirs).max()),
            max_length_error=float(errors.max()),
            recall_at_1_keras=self._recall,
            recall_at_1=None if self._recall is None else self._recall_at_1(found),
        )

    def exported_vectors(self, name: str, path: Path) -> np.ndarray:
        """Run a file in a fresh process on all images.

        Args:
            name: The format, of `TOLERANCES`.
            path: The file, or the folder of a SavedModel.

        Returns:
            (N, d) its vectors.

        Raises:
            UserError: The file cannot be loaded or run.
        """
        kind = name.split("_")[0] if name.startswith("litert") else name
        given: dict[str, Any] = {"views": self._views}
        if kind == "saved_model" and len(self._embedder.view_shape) > 1:
            encoded = [encoded_image(self.dataset.images, index) for index in range(len(self.dataset))]
            ends = np.cumsum([len(image) for image in encoded])
            given = {"encoded": np.frombuffer(b"".join(encoded), np.uint8), "ends": ends}
        with tempfile.TemporaryDirectory() as folder:
            source, target = os.path.join(folder, "in.npz"), os.path.join(folder, "out.npy")
            try:
                np.savez(source, **given)
            except OSError as error:
                raise unwritable(source, error) from error
            status, output = _run_until_closed([sys.executable, "-P", str(_RUNNER), kind, str(path), source, target])
            if status:
                why = short_message(output, "last") or f"status {status}"
                raise UserError(f"the {kind} export cannot be run in a fresh process: {why}")
            return np.load(target)

    def _recall_at_1(self, vectors: np.ndarray) -> float | None:
        if not np.isfinite(vectors).all():
            return float("nan")
        try:
            return float(evaluate_dataset(vectors, self.dataset, ks=(1,), metrics=("recall",))["recall@1"])
        except UserError:
            return None  # no two images of a class


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


def _run_until_closed(command: list[str]) -> tuple[int, str]:
    """Run a command that ends when its standard input is closed; its status and what it wrote to standard error.

    So it ends when this process does, whatever ends this process.
    """
    pipe, environment = subprocess.PIPE, {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    with subprocess.Popen(
        command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True, env=environment
    ) as child:
        assert child.stderr is not None
        output = child.stderr.read()
    return child.returncode, output


def chosen_formats(names: Sequence[str]) -> tuple[str, ...]:
    """Return the formats that names stand for, each once, in the order of `FORMATS`.

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
        formats: What to write: saved_model; litert_float32, litert_float16, litert_dynamic_range, litert_int8, or
            litert for the four; onnx; all.
        images: Test images, as whole classes, on which the exports are compared with the embedder; 0: all.
        representative_images: Training images on which the ranges of litert_int8 are measured.
        max_pixels: The SavedModel refuses images with more pixels in their header before it decodes them.
        min_cosine: Smallest cosine to the Keras embedder, in place of each format's own.
        max_recall_drop: Largest loss of Recall@1, as a fraction, in place of each format's own.
        calibrate: How the threshold on the distance is chosen. For searches of a gallery fpir=0.01: the share of the
            queries of unknown classes that is accepted. For pairs of images, with the signature `same`, far=0.001 or
            precision=0.99. On the images of the comparison, or on those of a retriever's gallery. Or a JSON file of
            `tfdml evaluate` with a target; none; auto: for a retriever fpir=0.01, else far=0.001, where the images can
            show it.

    Raises:
        UserError: A value is out of range.
    """

    formats: Sequence[str] = ("saved_model",)
    images: int = 2000
    representative_images: int = 500
    max_pixels: int = SERVING_LIMIT
    min_cosine: float | None = None
    max_recall_drop: float | None = None
    calibrate: str = "auto"

    def __post_init__(self):
        object.__setattr__(self, "formats", chosen_formats(self.formats))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UserError(f"`{name}={value}`: must be at least {low}, at most {high:,}")

        if self.calibrate.startswith(TARGETS):
            target_of(self.calibrate, "calibrate")

    def tolerance(self, name: str) -> Tolerance:
        """Return the tolerance of a format."""
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
        test: Images of classes that it was not trained on.
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
    saved_model.check_backend()
    options = options or ExportOptions()
    if "onnx" in options.formats:
        check_onnx()
    if "litert_int8" in options.formats and train is None:
        raise UserError("litert_int8 needs representative images: pass the training images as train")
    embedder = saved_model.in_float32(embedder)
    measured_on = whole_classes(test, options.images)
    resize = EvaluationTransform.of(embedder).resize
    of_vectors = len(embedder.view_shape) == 1
    if "saved_model" in options.formats and options.max_pixels < resize**2:
        raise UserError(f"`max_pixels={options.max_pixels}`: images are resized to {resize} x {resize} pixels")
    with saved_model.new_version(folder) as version:
        verifier = ExportVerifier(embedder, measured_on)
        calibration, calibrated_on = _calibrated(options.calibrate, verifier, train, report)
        paths = {name: _write(name, embedder, version.folder, train, options, calibration) for name in options.formats}
        artifacts, refused = {}, []
        for name, path in paths.items():
            vectors, tolerance = verifier.exported_vectors(name, path), options.tolerance(name)
            compared = verifier.compare(vectors)
            faults = compared.faults(tolerance)
            files = describe_files(version.folder, saved_model.model_files(path) if name == "saved_model" else [path])
            size_text = f"{files['bytes'] / 1e6:,.2f} MB"
            report(f"{name:<21} {size_text:>9}  {compared}" + ("  REFUSED" if faults else ""))
            refused += [f"{name}: {'; '.join(faults)}"] if faults else []
            artifacts[name] = {**files, "acceptance": compared.as_json(), "tolerance": dataclasses.asdict(tolerance)}
            if calibration is not None and name != "saved_model" and not faults:
                own = _calibration_of(vectors, measured_on, calibration.target, f" of {name}")
                artifacts[name]["calibration"] = own.to_dict()
        if refused:
            raise UserError(
                f"no version is written: {'. '.join(refused)}. Leave the format out, or accept more knowingly with "
                "`min_cosine` or `max_recall_drop`"
            )
        same = calibration is not None and calibration.kind != "fpir"
        if "saved_model" in paths and not of_vectors:
            saved_model.write_warm_up(version.folder, resize, same)
        of_images = (*saved_model.SIGNATURES, *(("same",) if same else ()))
        signatures = () if "saved_model" not in paths else saved_model.SIGNATURES[:1] if of_vectors else of_images
        about = {**(about or {}), "calibration": calibration and calibration.to_dict(), "calibrated_on": calibrated_on}
        about["trained_on"] = None if train is None else sorted(train.class_names.values())
        card = model_card(embedder, artifacts, signatures, options.max_pixels, about)
        write_json(version.folder / CARD, card)
    return version.path


def _calibrated(
    wanted: str, verifier: ExportVerifier, train: ImageDataset | None, report: Callable[[str], None]
) -> tuple[Calibration | None, dict[str, Any] | None]:
    """Return the threshold that `ExportOptions.calibrate` means, and the data that it was measured on.

    Raises:
        UserError: The images cannot show it, the embedder was trained on their classes, or the file has none.
    """
    if wanted == "none":
        return None, None
    if wanted != "auto" and not wanted.startswith(TARGETS):
        calibration, file = saved_model.calibration_of_file(wanted), read_json(wanted)
        data = {name: file.get(name) for name in ("model", "dataset", "split")}
    else:
        dataset = verifier.dataset
        trained_on = set(train.class_names.values()) if train is not None else set()
        shared = trained_on.intersection(dataset.class_names.values())
        try:
            if shared:
                raise UserError(f"{len(shared)} classes of these images were trained on, such as {min(shared)}")
            calibration = _calibration_of(verifier.vectors, dataset, _TARGET if wanted == "auto" else wanted)
        except UserError as error:
            if wanted != "auto":
                raise
            report(f"no threshold: {error}")
            return None, None
        data = {"dataset": dataset.name, "split": dataset.split, "classes": dataset.classes.tolist()}
    report(str(calibration))
    return calibration, data


def _calibration_of(vectors: np.ndarray, dataset: ImageDataset, target: str, of: str = "") -> Calibration:
    with user_errors(UserError, f"the images cannot show the threshold{of}: {REASON}"):
        return calibrate(vectors, dataset.labels, **target_of(target))


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
    for size in range(2, len(classes)):
        # Evenly spaced over all of them, however many.
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
    calibration: Calibration | None,
) -> Path:
    """Write one format; returns its file, or the SavedModel's folder."""
    if name == "saved_model":
        saved_model.write_saved_model(embedder, folder, options.max_pixels, calibration)
        return folder
    if name == "onnx":
        path, data = folder / "onnx" / "model.onnx", convert_onnx(embedder)
    else:
        precision = name.removeprefix("litert_")
        views = None
        if precision == "int8":
            assert train is not None
            count = min(options.representative_images, len(train))
            rows = np.linspace(0, len(train) - 1, count).round().astype(int)  # spread evenly
            views = evaluation_views(embedder, train.take(np.unique(rows)))
        path, data = folder / "litert" / f"{precision}.tflite", convert_litert(embedder, precision, views)
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
        moments: Export `moments.keras`, which searches with all moments, in place of `embedder.keras`.
        data_dir: Where the run's data set lies now, if it has moved.
        report: Called with a line on each format.
        whitening: Arguments of `with_whitening` (`dim`, `power`, `shrinkage`), to export the embedder with a whitening
            behind it that is fitted to the run's training images; None: without.
        truncate_dim: Keep this many first dimensions of the vector, scaled to length 1; 0: all.
        stack_on: Of a head: the run of the embedder that its vectors come from. Both are exported as one embedder of
            images, which is compared on the images of that run; `data_dir` is then theirs.

    Returns:
        The path of the version.

    Raises:
        UserError: As `export_model`; or the folder is not that of a finished run, or its images are gone.

    Example:
        >>> export_run("runs/cars_jrd", "models/cars_jrd_all", ExportOptions(formats=["all"]))
        PosixPath('models/cars_jrd_all/1')
    """
    embedder, experiment = load_run(run_dir, moments, data_dir, stack_on)
    splits = load_splits(experiment, experiment.seed)
    about = _about(stack_on or run_dir, experiment, splits, moments)
    if stack_on:
        about = {**about, "metrics": None, "head": _about(run_dir, RunFolder(run_dir).load_experiment())}
    options = options or ExportOptions()
    if "test" in splits.two_views and options.calibrate == "auto":  # no two images are known to be the same
        options = dataclasses.replace(options, calibrate="none")
    if whitening is not None:
        embedder = _whitened(embedder, splits.train, whitening)
        # The run has measured the embedder without.
        about = {**about, "metrics": None, "whitening": dict(whitening)}
    if truncate_dim:
        if truncate_dim > embedder.embedding_dim:
            raise UserError(f"`truncate_dim={truncate_dim}`: the embedding has {embedder.embedding_dim} dimensions")
        about = {**about, "metrics": None, "truncated_from": embedder.embedding_dim}
        embedder = TruncatedEmbedder(embedder, truncate_dim)
        embedder.build((None, *embedder.view_shape))
    return export_model(embedder, folder, splits.test or splits.train, splits.train, options, about, report)


def check_whitening(arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a whitening, before anything is loaded.

    Raises:
        UserError: One is unknown or out of range.
    """
    share = functools.partial(number, at_least=0, at_most=1)
    checks: dict[str, Callable[..., Any]] = {
        "dim": functools.partial(integer, at_least=0),
        "power": share,
        "shrinkage": share,
    }
    for name, value in arguments.items():
        if name not in checks:
            raise UserError(f"`whitening` has no argument {reprlib.repr(name)}; it has {', '.join(checks)}")
        with user_errors(ValueError, f"`whitening`: {REASON}"):
            checks[name](name, value)


def _whitened(embedder: AnyEmbedder, train: ImageDataset, arguments: Mapping[str, Any]) -> WhitenedEmbedder:
    """Return an embedder with a whitening behind it, fitted to training images.

    Raises:
        UserError: An argument is unknown or out of range, or there are too few images.
    """
    check_whitening(arguments)
    dim = arguments.get("dim") or embedder.embedding_dim
    if dim > embedder.embedding_dim or dim >= len(train):
        raise UserError(
            f"`whitening`: there are no {dim} components of {len(train):,} training images, {embedder.embedding_dim}-d"
        )
    batches = evaluation_batches(train, EvaluationTransform.of(embedder), _WHITENING_BATCH)
    return with_whitening(embedder, embed(embedder, batches), **arguments)


def load_run(
    run_dir: str | os.PathLike, moments: bool = False, data_dir: str = "", stack_on: str = ""
) -> tuple[AnyEmbedder, Experiment]:
    """Return the embedder and the settings of a run; of a head that is stacked, the settings of its embedder's run.

    Raises:
        UserError: There are none, or the head does not go on that embedder.
    """
    if stack_on:
        (embedder, experiment), (head, _) = load_run(stack_on, data_dir=data_dir), load_run(run_dir, moments)
        with user_errors(ValueError, f"`run_dir={run_dir}`, `stack_on={stack_on}`: {REASON}"):
            return stack(embedder, head), experiment
    if data_dir and not is_remote(data_dir) and not os.path.exists(os.path.expanduser(data_dir)):
        raise UserError(f"`data_dir={data_dir}`: there is no such folder")
    run = RunFolder(run_dir)
    embedder = load_embedder(run.moments if moments else run.embedder)
    text = run.load_experiment().as_flags()
    changes = {"run_dir": str(run_dir), **({"data_dir": data_dir} if data_dir else {})}
    return embedder, Experiment.from_flags(text, **changes)


def _about(
    run_dir: str | os.PathLike, experiment: Experiment, splits: Splits | None = None, moments: bool = False
) -> dict[str, Any]:
    """Return what the model card states of a run: data, flags, metrics."""
    stored = RunFolder(run_dir).result
    result = read_json(stored) if stored.exists() else {}
    if not result:
        logging.warning("%s has no result.json: the model card is without metrics", run_dir)
    parts = {"train": splits.train, "test": splits.test} if splits else {}
    flags = parse_flags(experiment.as_flags())
    return {
        "data": {
            "dataset": experiment.data_name,
            "options": experiment.dataset_options,
            **{name: {"images": len(part), "classes": part.num_classes} for name, part in parts.items() if part},
        },
        # Paths of the machine that trained stay private.
        "flags": {
            name: value
            for name, value in flags.items()
            if name not in ("data_dir", "features", "run_dir", "start_from")
        },
        "metrics": result.get("metrics_moments" if moments else "metrics"),
        "protocol": result.get("protocol"),
        "selection": result.get("selection"),
    }
