"""What objectives measure on the training set before the first step, such as the density of each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.pipeline import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.models import MetricLearner
from tfdml.objectives import Calibrated, Objective
from tfdml.storage import atomic_write


def calibrate(
    learner: MetricLearner, train: ImageDataset, transform: EvaluationTransform, batch_size: int, folder: Path
) -> None:
    """Calibrate every objective that asks for it, by one pass over the training images.

    What was measured is kept in `folder`, one file per objective, and taken from there if the run starts again.

    Args:
        learner: A built learner, untrained.
        train: The training images, with class ids 0 .. C - 1.
        transform: The view in which they are measured.
        batch_size: Images per batch.
        folder: Where the measurements are kept.
    """
    calibrated = [o for o in learner.objectives if isinstance(o, Calibrated) and o.calibrates_on]
    pending = [o for o in calibrated if not _restore(o, folder / f"{o.name}.npz")]
    if not pending:
        return
    names = sorted({str(objective.calibrates_on) for objective in pending})
    logging.info("measuring %s of %d training images for %s", ", ".join(names), len(train), _named(pending))
    batches = evaluation_batches(train, transform, batch_size)
    learner.calibrate(batches, pending)
    folder.mkdir(parents=True, exist_ok=True)
    for objective in pending:
        with atomic_write(folder / f"{objective.name}.npz") as temporary, open(temporary, "wb") as file:
            np.savez(file, *(np.asarray(variable) for variable in objective.non_trainable_variables))


def _restore(objective: Objective, path: Path) -> bool:
    if not path.is_file():
        return False
    with np.load(path) as file:
        for name, variable in zip(file.files, objective.non_trainable_variables, strict=True):
            variable.assign(file[name])
    logging.info("%s: measurements taken from %s", objective.name, path)
    return True


def _named(objectives: list[Objective]) -> str:
    return ", ".join(objective.name for objective in objectives)
