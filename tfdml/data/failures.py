"""Finds the images that made training or evaluation fail."""

from __future__ import annotations

import re

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.dataset import ImageDataset
from tfdml.data.images.formats import FOREIGN
from tfdml.errors import UserError, short_message

_NAMED_IN_MESSAGES = 5
# A message of ours that came through TensorFlow, such as that of a damaged record file.
_USER_ERROR = re.compile(r"UserError: (.+)")
# What TensorFlow's message holds when reading or decoding an image failed: the operation's name or our own words.
_IMAGE_FAILURE = re.compile(
    r"ReadFile|Decode(AndCrop)?(Jpeg|Png|Image|Bmp|Gif|WebP)|ExtractJpegShape|Unknown image file format|"
    rf"{FOREIGN}|BMP of this kind|animated WebP|bounding box lies outside"
)


def explain_failure(
    error: BaseException, dataset: ImageDataset, leave_out: str = "`check_images='decode'` and `bad_images='skip'`"
) -> UserError | None:
    """Finds the images behind an exception that iteration over batches, or `fit`, raised.

    Reads and decodes every image of the data set, at about a millisecond each.

    Args:
        error: The exception.
        dataset: The data set that the batches came from.
        leave_out: By which arguments such images are left out (the default's are those of `tfdml.data.checking.check`);
            empty where they cannot be.

    Returns:
        An error that names the images and what is wrong with them; None if the exception has another cause.

    Example:
        >>> try:
        ...     history = model.fit(batches, steps_per_epoch=100)
        ... except tf.errors.OpError as error:
        ...     raise (explain_failure(error, dataset) or error) from None
    """
    if not isinstance(error, tf.errors.OpError):
        return None
    raised_below = _USER_ERROR.search(str(error))
    if raised_below:
        return UserError(raised_below[1])
    if not _IMAGE_FAILURE.search(str(error)):
        return None
    logging.warning("an image of %s cannot be read; looking for it among %d", dataset.name, len(dataset))
    source = dataset.images.lookup()
    read = tf.function(source.read, autograph=False)
    messages = {}
    for index in range(len(dataset)):
        try:
            read(*(tf.constant(column[0]) for column in source.columns(np.array([index]))))
        except tf.errors.OpError as failure:
            messages[index] = failure.message
    if not messages:
        return None
    from tfdml.data.images.faults import diagnose  # Pillow is only needed once something has gone wrong

    reasons = {fault.index: fault.reason for fault in diagnose(dataset.images, list(messages))}
    named = [
        f"{dataset.images.place(index)}: {reasons.get(index) or short_message(message, 'last') or 'cannot be decoded'}"
        for index, message in messages.items()
    ]
    rest = f"; and {len(named) - _NAMED_IN_MESSAGES} more" if len(named) > _NAMED_IN_MESSAGES else ""
    return UserError(
        f"{len(named)} of {len(dataset)} images of {dataset.name} ({dataset.split}) cannot be decoded: "
        f"{'; '.join(named[:_NAMED_IN_MESSAGES])}{rest}; fix or remove them"
        + (f", or leave them out with {leave_out}" if leave_out else "")
    )
