"""Every image once an epoch."""

from __future__ import annotations

import numpy as np

from tfdml.data.sampling.checks import check_positive, check_seed
from tfdml.data.sampling.permutation import SHUFFLE_STREAM, permute, round_keys
from tfdml.errors import UserError


class ShuffleSampler:
    """Every image once an epoch, in an order that is new each epoch.

    An epoch visits floor(N / B) * B distinct images; the N mod B left over are others in every epoch.

    Args:
        num_images: N.
        batch_size: B.
        seed: A non-negative integer.

    Attributes:
        batch_size: B.
        steps_per_epoch: floor(N / B).

    Raises:
        UserError: B > N, or a number is out of range.

    Example:
        >>> sampler = ShuffleSampler(num_images=100, batch_size=10, seed=0)
        >>> len({i for step in range(10) for i in sampler.batch(step).tolist()})
        100
    """

    def __init__(self, num_images: int, batch_size: int, seed: int = 0):
        check_positive("batch_size", batch_size)
        check_seed(seed)
        if batch_size > num_images:
            raise UserError(f"`batch_size={batch_size}`, but the data has {num_images} images; lower `batch_size`")
        self._num_images, self._seed = num_images, seed
        self.batch_size = batch_size
        self.steps_per_epoch = num_images // batch_size

    def batch(self, step: int) -> np.ndarray:
        """The images of a step.

        Args:
            step: From 0.

        Returns:
            (B,) int64 indices.
        """
        epoch, place = divmod(int(step), self.steps_per_epoch)
        positions = np.arange(place * self.batch_size, (place + 1) * self.batch_size)
        return permute(positions, self._num_images, round_keys(self._seed, SHUFFLE_STREAM, epoch))
