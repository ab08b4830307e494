"""Which images each class has, in arrays that stay small with a million classes."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdml.data.sampling.permutation import IMAGE_STREAM, mix, permute, round_keys
from tfdml.errors import UserError


@dataclasses.dataclass(frozen=True)
class ClassIndex:
    """The images of every class, one class after another; int32 unless there are 2^31 images or more.

    Args:
        order: (N,) image indices grouped by class, classes in ascending order of their ids.
        starts: (C,) where in `order` each class begins.
        counts: (C,) how many images it has.
    """

    order: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, labels: np.ndarray) -> ClassIndex:
        """The index of (N,) integer labels, by one sort.

        Raises:
            UserError: The labels are no integers, not one-dimensional or none.

        Example:
            >>> ClassIndex.of([7, 5, 7]).counts.tolist()
            [1, 2]
        """
        labels = np.asarray(labels)
        if labels.ndim != 1 or not len(labels) or not np.issubdtype(labels.dtype, np.integer):
            raise UserError(f"labels must be (N,) integers with N > 0, not {labels.dtype} of shape {labels.shape}")
        small = np.int32 if len(labels) < 2**31 else np.int64
        order = np.argsort(labels, kind="stable").astype(small)
        grouped = labels[order]
        starts = np.flatnonzero(grouped[1:] != grouped[:-1]) + 1
        starts = np.concatenate([[0], starts]).astype(small)
        return cls(order, starts, np.diff(starts, append=small(len(labels))))

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def num_images(self) -> int:
        """The images of all classes."""
        return int(self.counts.sum(dtype=np.int64))

    def select(self, classes: np.ndarray) -> ClassIndex:
        """Some of the classes, by position or by a mask."""
        return dataclasses.replace(self, starts=self.starts[classes], counts=self.counts[classes])

    def draw(self, classes: np.ndarray, images_per_class: int, seed: int, step: int) -> np.ndarray:
        """K images of each class without replacement; a class of fewer gives all of them before any comes again.

        Args:
            classes: (P,) positions of classes.
            images_per_class: K.
            seed: A non-negative integer.
            step: The training step.

        Returns:
            (P * K,) int64 image indices, grouped by class.
        """
        counts = self.counts[classes].astype(np.int64)[:, None]
        # Image k of a class is place k mod n of the order drawn for its turn, k div n.
        turn, place = np.divmod(np.arange(images_per_class)[None, :], counts)
        keys = round_keys(seed, IMAGE_STREAM, step, shape=(len(classes), 1)) + mix(turn.astype(np.uint64))
        places = permute(place, np.broadcast_to(counts, place.shape), keys)
        return self.order[(self.starts[classes][:, None] + places).reshape(-1)].astype(np.int64)

    def draw_some(self, classes: np.ndarray, numbers: np.ndarray, seed: int, step: int) -> np.ndarray:
        """A number of images of each class, at most as many as it has, without replacement.

        Args:
            classes: (P,) positions of classes.
            numbers: (P,) how many images of each.
            seed: A non-negative integer.
            step: The training step.

        Returns:
            (sum of `numbers`,) int64 image indices, grouped by class.
        """
        owner = np.repeat(np.arange(len(classes)), numbers)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        keys = round_keys(seed, IMAGE_STREAM, step, shape=(len(classes),))[:, owner]
        places = permute(place, self.counts[classes][owner], keys)
        return self.order[self.starts[classes][owner] + places].astype(np.int64)
