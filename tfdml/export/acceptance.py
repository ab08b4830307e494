"""Whether an exported file gives the embedder's vectors: run in a fresh process, compared on real images."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import explain_failure
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.backends import encoded_image
from tfdml.errors import UserError, short_message
from tfdml.evaluation import embed, evaluate_dataset
from tfdml.io.files import scratch_folder, unwritable
from tfdml.models import AnyEmbedder

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
    # and 0.985 on average. Neighbours are what counts: a point of Recall@1 at most.
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
        with scratch_folder() as folder:
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
