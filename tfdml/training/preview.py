"""The first batch of an experiment as a picture, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from tfdml.data.augmentation.preview import contact_sheet, whole_images
from tfdml.data.pipeline import explain_failure, training_batches
from tfdml.errors import UserError
from tfdml.storage import atomic_write
from tfdml.training import building
from tfdml.training.experiment import Experiment


def write_preview(experiment: Experiment, path: str) -> str:
    """Write a contact sheet of the first batch as the network will see it, each view under its whole image.

    Args:
        experiment: The settings; its run folder is not touched.
        path: A PNG file to write.

    Returns:
        What was written, in words.

    Raises:
        UserError: The data cannot be loaded, or the file cannot be written.

    Example:
        >>> write_preview(Experiment(run_dir="unused", image_size=56, resize=64), "batch.png")  # doctest: +SKIP
    """
    file = Path(path)
    if file.suffix.lower() != ".png":
        raise UserError(f"--preview={path}: name a PNG file, e.g. --preview=batch.png")
    if not file.parent.is_dir():
        raise UserError(f"--preview={path}: there is no folder {file.parent}")
    train = building.load_splits(experiment).train
    sampler = building.make_sampler(experiment, train)
    transform, _ = building.make_transforms(experiment)
    batches = training_batches(train, sampler, transform, seed=experiment.seed, num_steps=1)
    try:
        images, labels = next(batches.as_numpy_iterator())
        sheet = contact_sheet(images, labels, train.class_names, whole_images(train, sampler.batch(0)))
    except tf.errors.OpError as error:
        raise (explain_failure(error, train) or error) from None
    try:
        with atomic_write(file) as temporary:
            sheet.save(temporary)
    except UserError as error:
        raise UserError(f"--preview={error}") from error
    return f"{path}: {len(labels)} views of {images.shape[2]} x {images.shape[1]} px from {train.name}, {transform}"
