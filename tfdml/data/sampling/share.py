"""One worker's part of every batch."""

from __future__ import annotations

import numpy as np

from tfdml.data.sampling.protocol import Sampler
from tfdml.errors import UserError


class Share:
    """The part of a sampler's batches that one of several workers makes; a sampler itself.

    Worker r of R makes rows r B / R .. (r + 1) B / R - 1 of the global batch, as a strategy that splits the global
    batch over its replicas gives them to replica r. So the workers together see the batches of one device.

    Args:
        whole: The sampler of the global batch, of B images.
        index: r, from 0.
        count: R.

    Raises:
        UserError: The workers do not divide the batch, or there is no such worker.

    Example:
        >>> from tfdml.data.sampling import ShuffleSampler
        >>> sampler = ShuffleSampler(num_images=100, batch_size=8)
        >>> Share(sampler, 1, 2).batch(0).tolist() == sampler.batch(0)[4:].tolist()
        True

    Attributes:
        whole: The sampler of the global batch.
        rows: Which rows of the global batch these are.
        batch_size: B / count.
        steps_per_epoch: As of the whole.
    """

    def __init__(self, whole: Sampler, index: int, count: int):
        if not 0 <= index < count:
            raise UserError(f"worker {index} of {count}: workers are numbered from 0 to {count - 1}")
        check_divides(whole.batch_size, count, "workers")
        self.whole = whole
        self.batch_size = whole.batch_size // count
        self.steps_per_epoch = whole.steps_per_epoch
        self.rows = slice(index * self.batch_size, (index + 1) * self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """The images of a step that this worker makes.

        Args:
            step: From 0.

        Returns:
            (B / count,) int64 indices.
        """
        return self.whole.batch(step)[self.rows]


def check_divides(batch_size: int, count: int, what: str) -> None:
    """Refuses a batch that cannot be divided evenly.

    Args:
        batch_size: B.
        count: How many share it.
        what: What they are, e.g. `"replicas"`.

    Raises:
        UserError: The remainder is not 0.
    """
    if batch_size % count:
        raise UserError(
            f"a batch of {batch_size} images cannot be shared out evenly over {count} {what}: make `batch_size` (or "
            f"`classes_per_batch` times `images_per_class`) a multiple of {count}"
        )
