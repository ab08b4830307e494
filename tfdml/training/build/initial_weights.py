"""What a run starts from: the weights of an old one, and what objectives measure on the training images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging
from keras import ops

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.embeddings.backends import load_embedder
from tfdml.errors import REASON, UserError, user_errors
from tfdml.io.copies import local_copy
from tfdml.models import Embedder, MetricLearner
from tfdml.objectives import Calibrated, Stateful
from tfdml.training import checkpoints
from tfdml.training.distributed.processes import Processes, assign_here
from tfdml.training.run_folder import RunFolder


def start_from(path: str, learner: MetricLearner) -> None:
    """Take over weights: the backbone's, and those of the projection and of each objective that are alike.

    A part is taken over if it has as many weights of the same shapes; an objective, if it has the same name, too. What
    an optimiser has gathered is left behind.

    Args:
        path: A run folder, whose newest checkpoint is taken, else its embedder; a checkpoint; or a .keras file.
        learner: A built learner.

    Raises:
        UserError: The file is none of those, holds weights that are not finite, or has another backbone.

    Example:
        >>> start_from("runs/cars_jrd", learner)
    """
    source, found = _read(Path(local_copy(path)).expanduser())
    if not all(np.isfinite(array).all() for arrays in found.values() for array in arrays):
        raise UserError(f"--start_from={source} holds weights that are not finite: its run had diverged")
    parts = checkpoints.parts(learner)
    alike = [part for part, weights in parts.items() if _shapes(weights) == _shapes(found.get(part, []))]
    if "backbone" not in alike:
        raise UserError(f"--start_from={source} has another backbone than this run: use the same --backbone")
    for part in alike:
        for weight, array in zip(parts[part], found.get(part, []), strict=True):
            assign_here(weight, array)
    for objective in learner.objectives:
        if isinstance(objective, Stateful):
            objective.forget()  # of the images of the old run
    taken = [part for part in alike if parts[part]]
    fresh = "".join(f", {part} as new" for part in parts if part not in alike)
    logging.info("starting from %s: %s taken over%s", source, ", ".join(taken), fresh)


def check_start(path: str) -> None:
    """Refuse a `--start_from` that is not there, before the images are read.

    Raises:
        UserError: There is no such file or folder.
    """
    if path and not Path(local_copy(path)).expanduser().exists():
        raise UserError(f"--start_from={path}: there is no such file or folder")


def _shapes(arrays: Sequence[Any]) -> list[tuple[int, ...]]:
    return [tuple(array.shape) for array in arrays]


def _read(path: Path) -> tuple[Path, dict[str, Sequence[np.ndarray]]]:
    """Where weights were found, and the arrays of each part."""
    if path.is_dir():
        return _of_run(RunFolder(path))
    if path.suffix == ".npz":
        with user_errors(ValueError, f"--start_from={path}: {REASON}"):
            return path, _of_checkpoint(path)
    return path, _of_embedder(path)


def _of_run(run: RunFolder) -> tuple[Path, dict[str, Sequence[np.ndarray]]]:
    for path in reversed(checkpoints.list_checkpoints(run.checkpoints)):
        try:
            return path, _of_checkpoint(path)
        except ValueError as error:
            logging.warning("%s; trying the one before", error)
    if run.embedder.is_file():
        return run.embedder, _of_embedder(run.embedder)
    raise UserError(f"--start_from={run.path} holds neither a checkpoint nor an embedder")


def _of_checkpoint(path: Path) -> dict[str, Sequence[np.ndarray]]:
    arrays, _ = checkpoints.read(path)
    found: dict[str, list[np.ndarray]] = {}
    for name in sorted(arrays):
        found.setdefault(name.rpartition("/")[0], []).append(arrays[name])
    return {part: members for part, members in found.items() if part not in checkpoints.NOT_WEIGHTS}


def _of_embedder(path: Path) -> dict[str, Sequence[np.ndarray]]:
    embedder = load_embedder(path)
    if not isinstance(embedder, Embedder):
        raise UserError(f"--start_from={path} holds a {type(embedder).__name__}: name the run's embedder.keras")
    parts = checkpoints.embedder_parts(embedder)
    return {part: [ops.convert_to_numpy(weight) for weight in weights] for part, weights in parts.items()}


def calibrate(
    learner: MetricLearner,
    train: ImageDataset,
    transform: EvaluationTransform,
    batch_size: int,
    processes: Processes | None = None,
) -> None:
    """Calibrate every objective that asks for it, by one pass over the training images.

    Args:
        learner: A built learner, untrained.
        train: The training images, with class ids 0 .. C - 1.
        transform: The view in which they are measured.
        batch_size: Images per batch.
        processes: Who trains: the chief measures for all.
    """
    calibrated = [o for o in learner.objectives if isinstance(o, Calibrated) and o.calibrates_on]
    if not calibrated:
        return
    processes = processes or Processes()

    def measure() -> None:
        wanted = ", ".join(sorted({str(objective.calibrates_on) for objective in calibrated}))
        names = ", ".join(objective.name for objective in calibrated)
        logging.info("measuring %s of %d training images for %s", wanted, len(train), names)
        learner.calibrate(evaluation_batches(train, transform, batch_size), calibrated)

    if processes.lockstep:
        measure()
    else:
        processes.of_chief(measure)
    checkpoints.share_weights(processes, learner)
