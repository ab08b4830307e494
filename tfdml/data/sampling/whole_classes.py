"""All images of random classes, until the batch is full."""

from __future__ import annotations

import array
import bisect
import functools

import numpy as np
from absl import logging

from tfdml.data.sampling.checks import check_positive, check_seed
from tfdml.data.sampling.class_index import ClassIndex
from tfdml.data.sampling.permutation import PASS_STREAM, shuffled_order
from tfdml.errors import UserError


class WholeClassSampler:
    """Batches that accumulate all images of randomly chosen classes until they hold B images.

    The batches of DML-DA on Stanford Online Products, whose classes have too few images for a fixed number of each (Li
    et al., "Deep Metric Learning with Density Adaptivity", IV-A). At every step, and without replaying any other:

    - A batch has exactly B distinct images, grouped by class. Every class is whole, save the last, which is cut at
      random to what still fits; a class of more than B images never gives more than B.
    - Classes come in shuffled passes of S batches: within a pass no class comes twice, hence no image. A pass leaves
      out N - S B images, fewer than B + S (n_max - 1), which are others in every pass.
    - S is the same for every pass: as many batches as any order of the classes is sure to fill. Before its last class
      a batch holds at most b images, the largest multiple of the sizes' common divisor below B, so S is the largest s
      with (s - 1) b + (images of the s - 1 largest classes) + B <= N, where a class counts at most B images (as it does
      in n_max and N).

    The order of a pass is laid out when its first batch is asked for, in O(C) (a tenth of a second per million
    classes), and each of its batches then costs O(B).

    Args:
        labels: (N,) integer class ids, any values.
        batch_size: B.
        seed: A non-negative integer.

    Attributes:
        batch_size: B.
        steps_per_epoch: S; an epoch is a pass.

    Raises:
        UserError: B > N, or a number is out of range.

    Example:
        >>> sampler = WholeClassSampler(labels=[7, 7, 8, 8, 8, 9, 9, 9], batch_size=4, seed=0)
        >>> sampler.batch(step=0).shape
        (4,)
    """

    def __init__(self, labels: np.ndarray, batch_size: int, seed: int = 0):
        check_positive("batch_size", batch_size)
        check_seed(seed)
        self._classes = ClassIndex.of(labels)
        num_images = self._classes.num_images
        if batch_size > num_images:
            raise UserError(f"`batch_size={batch_size}`, but the data has {num_images} images; lower `batch_size`")
        large = int((self._classes.counts >= batch_size).sum())
        if large:
            logging.warning(
                "%d of %d classes have `batch_size=%d` images or more: a batch that begins with one has no other class "
                "and no negative pair; raise `batch_size`, or use class_balanced sampling",
                large,
                len(self._classes),
                batch_size,
            )
        self._seed = seed
        self.batch_size = batch_size
        self.steps_per_epoch = self._sure_batches()
        # Batches are asked for in order; at the end of a pass, two passes may be at work at once.
        self._pass = functools.lru_cache(maxsize=2)(self._lay_out)

    def batch(self, step: int) -> np.ndarray:
        """The images of a step.

        Args:
            step: From 0.

        Returns:
            (B,) int64 indices into `labels`, grouped by class.
        """
        number, place = divmod(int(step), self.steps_per_epoch)
        order, first = self._pass(number)
        classes = order[first[place] : first[place + 1]]
        numbers = self._classes.counts[classes].astype(np.int64)
        numbers[-1] = self.batch_size - numbers[:-1].sum()
        return self._classes.draw_some(classes, numbers, self._seed, int(step))

    def _sizes(self) -> np.ndarray:
        return np.minimum(self._classes.counts, self.batch_size)

    def _sure_batches(self) -> int:
        sizes = self._sizes()
        num_images, divisor = int(sizes.sum(dtype=np.int64)), int(np.gcd.reduce(sizes))
        # What the first 0, 1, 2 ... batches use up at most.
        used = np.concatenate([[0], np.cumsum(np.sort(sizes)[: -(num_images // self.batch_size) : -1], dtype=np.int64)])
        used += np.arange(len(used)) * ((self.batch_size - 1) // divisor * divisor)
        return int(np.searchsorted(used, num_images - self.batch_size, side="right"))

    def _lay_out(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the classes in a pass, (C,), and where in it each batch begins and the last ends, (S + 1,)."""
        order = shuffled_order(len(self._classes), self._seed, PASS_STREAM, number)
        ends = array.array("q", np.cumsum(self._sizes()[order], dtype=np.int64).tobytes())
        first = np.zeros(self.steps_per_epoch + 1, np.int64)
        begin = 0
        for batch in range(self.steps_per_epoch):
            full = (ends[begin - 1] if begin else 0) + self.batch_size
            begin = bisect.bisect_left(ends, full, lo=begin) + 1
            first[batch + 1] = begin
        return order, first
