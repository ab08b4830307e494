"""The first batch of a run as a picture, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from tfdml.data.contact_sheets import contact_sheet, whole_images
from tfdml.data.faults import explain_failure
from tfdml.data.pipeline import training_batches
from tfdml.errors import UserError
from tfdml.storage import atomic_write, sweep
from tfdml.training import building
from tfdml.training.settings import DataSettings


def write_preview(settings: DataSettings, seed: int, path: str) -> str:
    """Write a contact sheet of the first batch as the network will see it, each view under its whole image.

    Args:
        settings: The images, their views and batches.
        seed: Of what is drawn.
        path: A PNG file to write.

    Returns:
        What was written, in words.

    Raises:
        UserError: The data cannot be loaded, or the file cannot be written.

    Example:
        >>> write_preview(DataSettings(image_size=56, resize=64), 0, "batch.png")
        'batch.png: 100 views of 56 x 56 px from glyphs, ...'
    """
    file = Path(path)
    if file.suffix.lower() != ".png":
        raise UserError(f"--preview={path}: name a PNG file, e.g. --preview=batch.png")
    if not file.parent.is_dir():
        raise UserError(f"--preview={path}: there is no folder {file.parent}")
    transform, _ = building.make_transforms(settings)
    train = building.load_splits(settings, seed).train
    sampler = building.make_sampler(settings, train, seed)
    batches = training_batches(train, sampler, transform, seed=seed, num_steps=1)
    try:
        images, labels = next(batches.as_numpy_iterator())
        sheet = contact_sheet(images, labels, train.class_names, whole_images(train, sampler.batch(0)))
    except tf.errors.OpError as error:
        raise (explain_failure(error, train) or error) from None
    sweep(file.parent)
    try:
        with atomic_write(file) as temporary:
            sheet.save(temporary)
    except UserError as error:
        raise UserError(f"--preview={error}") from error
    return f"{path}: {len(labels)} views of {images.shape[2]} x {images.shape[1]} px from {train.name}, {transform}"
