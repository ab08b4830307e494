"""P classes x K images from a few super-classes, so that the negatives of a batch are hard."""

from __future__ import annotations

import functools

import numpy as np
from absl import logging

from tfdml.data.sampling.checks import check_choice, check_positive, check_seed
from tfdml.data.sampling.class_balanced import SHORT_CLASSES
from tfdml.data.sampling.class_index import ClassIndex
from tfdml.data.sampling.permutation import CLASS_STREAM, PASS_STREAM, SUPER_STREAM, permute, round_keys, shuffled_order
from tfdml.errors import UserError

WEIGHTS = ("proportional", "uniform")
SHORT_SUPER_CLASSES = ("merge", "drop")


class HierarchicalSampler:
    """P distinct classes a batch, K images of each, P / S of them from each of S distinct super-classes.

    On Stanford Online Products a batch then holds bicycles and lamps, say, and most of its negative pairs are of one
    kind of product and hard (Cakir et al., "Deep Metric Learning to Rank", CVPR 2019: S = 2, uniform).

    The classes of a super-class are cut, in an order that is new every time, into groups of Q = P / S. A pass gives
    each super-class as many turns as it has groups (`"proportional"`: all classes are drawn equally often) or one
    (`"uniform"`: all super-classes are drawn equally often, the classes of small ones more often), but to no
    super-class more turns than the pass has batches. Turns are assigned by McNaughton's wrap-around rule: the
    super-classes, in an order and from a place that are new every pass, are laid end to end and cut into S rows of
    equal length; a batch is a column. The turns left over, and those that a dominant super-class has too many, are
    left out of the pass. In the next, a super-class goes on with its groups where its turns ended.

    Rows are grouped by super-class, then by class.

    Args:
        labels: (N,) integer class ids, any values.
        super_labels: (N,) integer ids of the super-classes, any values.
        classes_per_batch: P, a multiple of S.
        images_per_class: K.
        super_classes_per_batch: S.
        seed: A non-negative integer.
        weights: `"proportional"` or `"uniform"`.
        short_classes: What to do with classes of fewer than K images, see `ClassBalancedSampler`.
        short_super_classes: What to do with super-classes of fewer than P / S classes. `"merge"`: all of them together
            make one more super-class. `"drop"`: never sample them. Classes that are never sampled are counted in a
            warning.

    Attributes:
        batch_size: P * K.
        steps_per_epoch: floor(N / batch_size), at least 1, where N counts the images that can be sampled.

    Raises:
        UserError: S does not divide P, fewer than S super-classes have P / S classes, a class lies in two
            super-classes, a number is out of range, or a policy is unknown.

    Example:
        >>> labels, kinds = np.repeat(np.arange(8), 3), np.repeat([0, 1], 12)
        >>> sampler = HierarchicalSampler(labels, kinds, classes_per_batch=4, images_per_class=2)
        >>> len(set(kinds[sampler.batch(step=0)]))
        1
    """

    def __init__(
        self,
        labels: np.ndarray,
        super_labels: np.ndarray,
        classes_per_batch: int,
        images_per_class: int,
        super_classes_per_batch: int = 1,
        seed: int = 0,
        weights: str = "proportional",
        short_classes: str = "repeat",
        short_super_classes: str = "merge",
    ):
        check_positive("classes_per_batch", classes_per_batch)
        check_positive("images_per_class", images_per_class)
        check_positive("super_classes_per_batch", super_classes_per_batch)
        check_seed(seed)
        check_choice("weights", weights, WEIGHTS)
        check_choice("short_classes", short_classes, SHORT_CLASSES)
        check_choice("short_super_classes", short_super_classes, SHORT_SUPER_CLASSES)
        self._group, remainder = divmod(classes_per_batch, super_classes_per_batch)
        if remainder:
            raise UserError(
                f"`classes_per_batch={classes_per_batch}` is no multiple of "
                f"`super_classes_per_batch={super_classes_per_batch}`: each super-class gives as many classes"
            )
        self._classes = ClassIndex.of(labels)
        kinds = _kind_of_classes(self._classes, labels, super_labels)
        if short_classes == "drop":
            keep = self._classes.counts >= images_per_class
            self._classes, kinds = self._classes.select(keep), kinds[keep]
        self._by_kind, self._starts, self._counts = _members(kinds, self._group, short_super_classes == "merge")
        if len(self._counts) < super_classes_per_batch:
            raise UserError(
                f"`super_classes_per_batch={super_classes_per_batch}`, but the data has {len(self._counts)} "
                f"super-classes with at least {self._group} classes (of {len(np.unique(kinds))}); lower "
                "`super_classes_per_batch` or `classes_per_batch`"
            )
        self._images_per_class, self._seed, self._rows = images_per_class, seed, super_classes_per_batch
        turns = self._counts // self._group if weights == "proportional" else np.ones_like(self._counts)
        self._columns = _longest_pass(turns, super_classes_per_batch)
        self._turns = np.minimum(turns, self._columns)
        self.batch_size = classes_per_batch * images_per_class
        num_images = int(self._classes.counts[self._by_kind].sum(dtype=np.int64))
        self.steps_per_epoch = max(1, num_images // self.batch_size)
        # Batches are asked for in order; at the end of a pass, two passes may be at work at once.
        self._pass = functools.lru_cache(maxsize=2)(self._lay_out)

    def batch(self, step: int) -> np.ndarray:
        """The images of a step.

        Args:
            step: From 0.

        Returns:
            (P * K,) int64 indices into `labels`, grouped by super-class and class.
        """
        number, place = divmod(int(step), self._columns)
        order, ends, first, keys = self._pass(number)
        column = int(permute(np.array([place]), self._columns, keys)[0])
        turns = (first + column + self._columns * np.arange(self._rows)) % ends[-1]
        found = np.searchsorted(ends, turns, side="right")
        classes = [
            self._classes_of(int(order[i]), number, int(turn - (ends[i] - self._turns[order[i]])))
            for i, turn in zip(found, turns, strict=True)
        ]
        return self._classes.draw(np.concatenate(classes), self._images_per_class, self._seed, int(step))

    def _lay_out(self, number: int) -> tuple[np.ndarray, np.ndarray, int, np.ndarray]:
        """The order of the super-classes in a pass, where each one's turns end, the first turn, and the keys."""
        order = shuffled_order(len(self._turns), self._seed, SUPER_STREAM, number)
        ends = np.cumsum(self._turns[order], dtype=np.int64)
        keys = round_keys(self._seed, PASS_STREAM, number)
        first = int(round_keys(self._seed, PASS_STREAM, number, 1)[0] % np.uint64(ends[-1]))
        return order, ends, first, keys

    def _classes_of(self, kind: int, number: int, turn: int) -> np.ndarray:
        """The classes of a turn of a super-class, (Q,)."""
        count = int(self._counts[kind])
        again, group = divmod(number * int(self._turns[kind]) + turn, count // self._group)
        places = np.arange(group * self._group, (group + 1) * self._group)
        members = permute(places, count, round_keys(self._seed, CLASS_STREAM, again, kind))
        return self._by_kind[self._starts[kind] + members]


def _kind_of_classes(classes: ClassIndex, labels: np.ndarray, super_labels: np.ndarray) -> np.ndarray:
    """The super-class id of each class, (C,)."""
    super_labels = np.asarray(super_labels)
    if super_labels.shape != np.shape(labels) or not np.issubdtype(super_labels.dtype, np.integer):
        raise UserError(
            f"super_labels must be {np.shape(labels)} integers as the labels are, not {super_labels.dtype} of shape "
            f"{super_labels.shape}"
        )
    grouped = super_labels[classes.order]
    lowest, highest = (function.reduceat(grouped, classes.starts) for function in (np.minimum, np.maximum))
    split = np.flatnonzero(lowest != highest)
    if len(split):
        label = np.asarray(labels)[classes.order[classes.starts[split[0]]]]
        raise UserError(
            f"{len(split)} classes lie in more than one super-class: class {label} in {lowest[split[0]]} and "
            f"{highest[split[0]]}; correct the super-classes, or use class_balanced sampling"
        )
    return lowest


def _members(kinds: np.ndarray, at_least: int, merge: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The classes grouped by super-class, and where each super-class that has enough begins and how many it has."""
    _, kinds = np.unique(kinds, return_inverse=True)
    counts = np.bincount(kinds) if len(kinds) else np.zeros(0, np.int64)
    short = counts < at_least
    if merge and short.any():
        kinds = np.where(short[kinds], len(counts), kinds)
        counts = np.bincount(kinds)
    order = np.argsort(kinds, kind="stable").astype(np.int32)
    keep = counts >= at_least
    never = int(counts[~keep].sum())
    if never:
        logging.warning(
            "%d of %d classes are never sampled: their super-classes have fewer than the %d classes that "
            "`classes_per_batch` and `super_classes_per_batch` ask of each",
            never,
            len(kinds),
            at_least,
        )
    # Grouped again without those that are never sampled.
    order = order[np.repeat(keep, counts)]
    counts = counts[keep]
    return order, np.cumsum(counts) - counts, counts


def _longest_pass(turns: np.ndarray, rows: int) -> int:
    """The largest L with sum of min(turns, L) >= rows * L: how many batches can have distinct super-classes."""
    low, high = 1, int(turns.sum()) // rows
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(turns, middle).sum()) >= rows * middle:
            low = middle
        else:
            high = middle - 1
    return low
