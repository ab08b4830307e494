"""Samplers: the images in the batch of a training step, as a pure function of the seed and the
step.

Nothing is iterated, so a run resumed at any step sees the batches of an uninterrupted run. The
order of a pass is a NumPy permutation of its own seed, made when the first batch of the pass is
asked for. A batch then costs the same whether there are a hundred classes or a million.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from typing import Any, Protocol

import keras
import numpy as np
from absl import logging

from tfdml.errors import UserError, check_choice, check_not_negative, check_positive
from tfdml.labels import image_rows, integer_labels, require_classes


class Sampler(Protocol):
    """What `tfdml.data.training_batches` needs of a sampler."""

    @property
    def batch_size(self) -> int:
        """Images per batch, B."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch."""

    def batch(self, step: int) -> np.ndarray:
        """Return the images of a step.

        Args:
            step: From 0.

        Returns:
            (B,) int64 indices.
        """


# Separates the random streams that one seed feeds.
CLASS_STREAM, IMAGE_STREAM, SHUFFLE_STREAM, PASS_STREAM, SUPER_STREAM = range(5)


def permutation(size: int, *key: int) -> np.ndarray:
    """Return a random permutation of 0 .. size-1, (size,) int64, that depends on nothing but the
    arguments.

    Example:
        >>> sorted(permutation(5, 0, 3).tolist())
        [0, 1, 2, 3, 4]
    """
    return np.random.default_rng(key).permutation(size)


# Batches are asked for in order; at the end of a pass, two passes may be at work at once.
_of_a_pass = functools.lru_cache(maxsize=4)(permutation)
# A super-class continues where its last turn ended.
_of_a_super_class = functools.lru_cache(maxsize=256)(permutation)


@dataclasses.dataclass(frozen=True)
class ClassIndex:
    """The images of every class, one class after another.

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
        """Return the index of the (N,) labels of images to train on, by one sort.

        Raises:
            UserError: There are none, or of one class, or `tfdml.labels.integer_labels` refuses
                them.

        Example:
            >>> ClassIndex.of([7, 5, 7]).counts.tolist()
            [1, 2]
        """
        labels = integer_labels(labels)
        if not len(labels):
            raise UserError("there is no image to sample: labels are empty")
        require_classes(labels, "training")
        order = np.argsort(labels, kind="stable")
        _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
        return cls(order, starts, counts)

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def num_images(self) -> int:
        """The images of all classes."""
        return int(self.counts.sum())

    def select(self, classes: np.ndarray) -> ClassIndex:
        """Return some of the classes, by position or by a mask."""
        return dataclasses.replace(self, starts=self.starts[classes], counts=self.counts[classes])

    def draw(
        self, classes: np.ndarray, numbers: int | np.ndarray, seed: int, step: int
    ) -> np.ndarray:
        """Return images of each class without replacement; a class of fewer gives all of them
        before any comes again.

        Args:
            classes: (P,) positions of classes.
            numbers: How many images of each; one number, or (P,).
            seed: A non-negative integer.
            step: The training step.

        Returns:
            (sum of `numbers`,) int64 image indices, grouped by class.
        """
        rng = np.random.default_rng((seed, IMAGE_STREAM, step))
        places = []
        for start, count, number in np.broadcast(
            self.starts[classes], self.counts[classes], numbers
        ):
            turns = [rng.permutation(count) for _ in range(-(-number // count))]
            places.append(start + np.concatenate(turns)[:number])
        return self.order[np.concatenate(places)]


class ShuffleSampler:
    """Every image once an epoch, in an order that is new each epoch.

    An epoch visits floor(N / B) * B distinct images; the N mod B left over are others in every
    epoch.

    Args:
        num_images: N.
        batch_size: B.
        seed: A non-negative integer.

    Attributes:
        num_images: N.
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
        check_positive(batch_size=batch_size)
        check_not_negative(seed=seed)
        if batch_size > num_images:
            raise UserError(
                f"the data has {num_images} images; lower batch_size", batch_size=batch_size
            )
        self.num_images, self._seed = num_images, seed
        self.batch_size = batch_size
        self.steps_per_epoch = num_images // batch_size

    def batch(self, step: int) -> np.ndarray:
        """See `Sampler.batch`."""
        epoch, place = divmod(int(step), self.steps_per_epoch)
        order = _of_a_pass(self.num_images, self._seed, SHUFFLE_STREAM, epoch)
        return order[place * self.batch_size : (place + 1) * self.batch_size].copy()


class PairSampler:
    """All images of B / 2 given pairs, or of B / 3 given triplets, in each batch.

    Every pair comes once an epoch, in an order that is new each epoch; those left over are others
    in every epoch. The images of a pair follow one another. An image of two pairs may come twice in
    a batch.

    Args:
        pairs: (G, 2) rows of images, or (G, 3).
        batch_size: B.
        seed: A non-negative integer.
        shuffle: Whether the order is random; else it is that of `pairs`, each epoch.

    Attributes:
        batch_size: B.
        steps_per_epoch: floor(2 G / B), or floor(3 G / B).
        num_images: How many images there must be: the largest row and 1.

    Raises:
        UserError: B is no multiple of 2 or 3, there are too few pairs, a row is no whole number
            from 0 on, or a number is out of range.

    Example:
        >>> PairSampler([[0, 5], [1, 2], [2, 7]], batch_size=4).batch(step=0).shape
        (4,)
    """

    def __init__(self, pairs: Any, batch_size: int, seed: int = 0, shuffle: bool = True):
        check_positive(batch_size=batch_size)
        self._pairs = image_rows(pairs, "pairs")
        count, width = self._pairs.shape
        self.num_images = int(self._pairs.max(initial=-1)) + 1
        if batch_size % width or batch_size // width > count:
            most = f"up to {count * width}, as there are {count} pairs or triplets"
            raise UserError(f"must be a multiple of {width}, {most}", batch_size=batch_size)
        self._order, self._shuffle = ShuffleSampler(count, batch_size // width, seed), shuffle
        self.batch_size, self.steps_per_epoch = batch_size, self._order.steps_per_epoch

    def batch(self, step: int) -> np.ndarray:
        """See `Sampler.batch`."""
        place = int(step) % self.steps_per_epoch * self._order.batch_size
        in_order = np.arange(place, place + self._order.batch_size)
        return self._pairs[self._order.batch(step) if self._shuffle else in_order].reshape(-1)


SHORT_CLASSES = ("repeat", "drop")


class _ClassSampler:
    """P classes a batch, K images of each; see `ClassBalancedSampler` for the arguments."""

    def __init__(
        self,
        labels: Any,
        classes_per_batch: int,
        images_per_class: int,
        seed: int,
        short_classes: str,
    ):
        check_positive(classes_per_batch=classes_per_batch, images_per_class=images_per_class)
        check_not_negative(seed=seed)
        check_choice("short_classes", short_classes, SHORT_CLASSES)
        classes = ClassIndex.of(labels)
        self._is_sampled = classes.counts >= (images_per_class if short_classes == "drop" else 1)
        self._classes = classes.select(self._is_sampled)
        self._images_per_class, self._seed = images_per_class, seed
        self.classes_per_batch, self.batch_size = (
            classes_per_batch,
            classes_per_batch * images_per_class,
        )
        self.steps_per_epoch = max(1, self._classes.num_images // self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """See `Sampler.batch`."""
        return self._classes.draw(
            self._classes_of(int(step)), self._images_per_class, self._seed, int(step)
        )

    def _classes_of(self, step: int) -> np.ndarray:
        """Return the positions of the classes in the batch of a step, (P,)."""
        raise NotImplementedError


class ClassBalancedSampler(_ClassSampler):
    """P distinct classes a batch, K images of each.

    Classes come in shuffled passes of floor(C / P) batches: within a pass no class comes twice, and
    the C mod P classes left over are others in every pass. The K images of a class are drawn
    without replacement. Rows are grouped by class: rows 0 .. K-1 are the first class, and so on.

    Args:
        labels: (N,) integer class ids, any values.
        classes_per_batch: P.
        images_per_class: K.
        seed: A non-negative integer.
        short_classes: What to do with classes of fewer than K images. `"repeat"`: all images of the
            class in random order, again (in a new order) as often as needed. `"drop"`: never sample
            the class.

    Attributes:
        batch_size: P * K.
        steps_per_epoch: floor(N / batch_size), at least 1, where N counts the images that can be
            sampled.

    Raises:
        UserError: There are fewer than P classes, a number is out of range, or the policy is
            unknown.

    Example:
        >>> sampler = ClassBalancedSampler(labels=[7, 7, 7, 9, 9, 9], classes_per_batch=2,
        ...     images_per_class=2, seed=0)
        >>> sampler.batch(step=0).shape
        (4,)
    """

    def __init__(
        self,
        labels: np.ndarray,
        classes_per_batch: int,
        images_per_class: int,
        seed: int = 0,
        short_classes: str = "repeat",
    ):
        super().__init__(labels, classes_per_batch, images_per_class, seed, short_classes)
        if classes_per_batch > len(self._classes):
            fault = f"the data has {len(self._classes)} classes"
            advice = "lower classes_per_batch"
            if short_classes == "drop":
                fault += f" with at least images_per_class={images_per_class} images"
                advice += ", lower images_per_class or use short_classes=repeat"
            raise UserError(f"{fault}; {advice}", classes_per_batch=classes_per_batch)

    def _classes_of(self, step: int) -> np.ndarray:
        num_classes, p = len(self._classes), self.classes_per_batch
        number, place = divmod(step, num_classes // p)
        return _of_a_pass(num_classes, self._seed, CLASS_STREAM, number)[
            place * p : (place + 1) * p
        ]


class NeighborSampler(ClassBalancedSampler):
    """P distinct classes a batch that the embedder confuses, K images of each.

    A batch begins with A anchor classes, which come in shuffled passes of floor(C / A) batches:
    within a pass no class is an anchor twice. Then come the class that each anchor is most often
    confused with, the second of each, and so on, until there are P classes. Where the table of
    `update` has too few, the next classes of the pass follow, and before the first `update` these
    are all.

    A batch is a pure function of the seed, the step and the table that holds for this step.

    Args:
        labels: (N,) integer class ids, any values.
        classes_per_batch: P.
        images_per_class: K.
        seed: A non-negative integer.
        short_classes: As `ClassBalancedSampler`.
        anchor_classes: A, from 1 (all others of the batch are confused with one class) to P.

    Attributes:
        batch_size: P * K.
        steps_per_epoch: As `ClassBalancedSampler`.
        classes_per_batch: P.

    Raises:
        UserError: As `ClassBalancedSampler`, or A is above P.

    Example:
        >>> labels = np.repeat(np.arange(4), 3)
        >>> sampler = NeighborSampler(labels, classes_per_batch=2, images_per_class=3,
        ...     anchor_classes=1)
        >>> sampler.update([[2], [3], [0], [1]])
        >>> sorted({int(row) // 3 for row in sampler.batch(0)}) in ([0, 2], [1, 3])
        True

    Source: Liao, Shao, "Graph Sampling Based Deep Metric Learning for Generalizable Person
    Re-Identification", CVPR 2022, where A is 1.
    """

    def __init__(
        self,
        labels: np.ndarray,
        classes_per_batch: int,
        images_per_class: int,
        seed: int = 0,
        short_classes: str = "repeat",
        anchor_classes: int = 4,
    ):
        super().__init__(labels, classes_per_batch, images_per_class, seed, short_classes)
        check_positive(anchor_classes=anchor_classes)
        if anchor_classes > classes_per_batch:
            raise UserError(
                f"is above classes_per_batch={classes_per_batch}", anchor_classes=anchor_classes
            )
        self._anchors = anchor_classes
        self._tables = [(0, np.zeros((len(self._classes), 0), np.int64))]

    def update(self, neighbors: Any, first_step: int = 0) -> None:
        """Compose the batches of `first_step` and later by another table; earlier steps keep the
        table before.

        Args:
            neighbors: (C, M) of each class, in ascending order of their ids, the positions of those
                that it is most confused with, from the first on; -1 where there are fewer. See
                `tfdml.retrieval.confusable_classes`.
            first_step: From 0.

        Raises:
            UserError: There is not one row for each class.
        """
        neighbors = np.asarray(neighbors)
        if neighbors.ndim != 2 or len(neighbors) != len(self._is_sampled):
            count = len(self._is_sampled)
            raise UserError(
                f"neighbors must be one row for each of {count} classes, not {neighbors.shape}"
            )
        places = np.where(self._is_sampled, np.cumsum(self._is_sampled) - 1, -1)
        table = np.where(neighbors < 0, -1, places[neighbors])[self._is_sampled]
        self._tables = [*self._tables[-1:], (first_step, table)]

    def _classes_of(self, step: int) -> np.ndarray:
        num_classes, p = len(self._classes), self.classes_per_batch
        a = self._anchors
        number, place = divmod(step, num_classes // a)
        positions = (place * a + np.arange(min(2 * p, num_classes))) % num_classes
        order = _of_a_pass(num_classes, self._seed, CLASS_STREAM, number)[positions]
        table = next(
            (table for first, table in reversed(self._tables) if first <= step), self._tables[0][1]
        )
        candidates = np.concatenate([order[:a], table[order[:a]].T.reshape(-1), order[a:]])
        return np.array(list(dict.fromkeys(candidates[candidates >= 0].tolist()))[:p])


WEIGHTS = ("proportional", "uniform")


class HierarchicalSampler(_ClassSampler):
    """P distinct classes a batch, K images of each, P / S of them from each of S distinct
    super-classes.

    On Stanford Online Products a batch then holds bicycles and lamps, say, and most of its negative
    pairs are of one kind of product and hard (Cakir et al., "Deep Metric Learning to Rank", CVPR
    2019: S = 2, uniform).

    The classes of a super-class are cut, in an order that is new every time, into groups of Q = P /
    S. A pass gives each super-class turns in proportion to its classes (`"proportional"`: all
    classes are drawn equally often) or one (`"uniform"`: all super-classes are drawn equally often,
    the classes of small ones more often), but to no super-class more turns than the pass has
    batches. In proportion that is one turn for Q classes; where Q does not divide their numbers, a
    pass is as much longer as makes the turns whole numbers, up to Q times. Turns are assigned by
    McNaughton's wrap-around rule: the super-classes, in an order and from a place that are new
    every pass, are laid end to end and cut into S rows of equal length; a batch is a column. The
    turns left over, and those that a dominant super-class has too many, are left out of the pass.
    In the next, a super-class continues with its groups where its turns ended.

    All super-classes of fewer than Q classes together make one more. Classes that are never
    sampled, because it is still too small, are counted in a warning. Rows are grouped by
    super-class, then by class.

    Args:
        labels: (N,) integer class ids, any values.
        super_labels: (N,) integer ids of the super-classes, any values.
        classes_per_batch: P, a multiple of S.
        images_per_class: K.
        super_classes_per_batch: S.
        seed: A non-negative integer.
        weights: `"proportional"` or `"uniform"`.
        short_classes: What to do with classes of fewer than K images, see `ClassBalancedSampler`.

    Attributes:
        batch_size: P * K.
        steps_per_epoch: floor(N / batch_size), at least 1, where N counts the images that can be
            sampled.

    Raises:
        UserError: S does not divide P, fewer than S super-classes have P / S classes, a class lies
            in two super-classes, a number is out of range, or a policy is unknown.

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
    ):
        super().__init__(labels, classes_per_batch, images_per_class, seed, short_classes)
        check_positive(super_classes_per_batch=super_classes_per_batch)
        check_choice("weights", weights, WEIGHTS)
        self._group, remainder = divmod(classes_per_batch, super_classes_per_batch)
        if remainder:
            divisor = f"super_classes_per_batch={super_classes_per_batch}"
            raise UserError(f"is no multiple of {divisor}", classes_per_batch=classes_per_batch)
        kinds = _kind_of_classes(labels, super_labels)[self._is_sampled]
        self._by_kind, self._starts, self._counts = _members(kinds, self._group)
        if len(self._counts) < super_classes_per_batch:
            fault = (
                f"the data has {len(self._counts)} super-classes with at least {self._group} "
                "classes"
            )
            advice = "lower super_classes_per_batch or classes_per_batch"
            raise UserError(f"{fault}; {advice}", super_classes_per_batch=super_classes_per_batch)
        self._rows = super_classes_per_batch
        shared = np.gcd.reduce(self._counts, initial=self._group)
        turns = self._counts // shared if weights == "proportional" else np.ones_like(self._counts)
        self._columns = _longest_pass(turns, super_classes_per_batch)
        self._turns = np.minimum(turns, self._columns)
        num_images = int(self._classes.counts[self._by_kind].sum())
        self.steps_per_epoch = max(1, num_images // self.batch_size)

    def _classes_of(self, step: int) -> np.ndarray:
        number, place = divmod(step, self._columns)
        order = _of_a_pass(len(self._turns), self._seed, SUPER_STREAM, number)
        ends = np.cumsum(self._turns[order])
        first = np.random.default_rng((self._seed, PASS_STREAM, number, 1)).integers(ends[-1])
        column = _of_a_pass(self._columns, self._seed, PASS_STREAM, number)[place]
        turns = (first + column + self._columns * np.arange(self._rows)) % ends[-1]
        places = np.searchsorted(ends, turns, side="right")
        turns -= ends[places] - self._turns[order[places]]
        groups = zip(order[places].tolist(), turns.tolist(), strict=True)
        return np.concatenate([self._group_of(kind, number, turn) for kind, turn in groups])

    def _group_of(self, kind: int, number: int, turn: int) -> np.ndarray:
        """Return the classes of a turn of a super-class, (Q,)."""
        count = int(self._counts[kind])
        again, group = divmod(number * int(self._turns[kind]) + turn, count // self._group)
        members = _of_a_super_class(count, self._seed, CLASS_STREAM, again, kind)
        return self._by_kind[
            self._starts[kind] + members[group * self._group : (group + 1) * self._group]
        ]


def _kind_of_classes(labels: Any, super_labels: Any) -> np.ndarray:
    """Return the super-class id of each class, (C,)."""
    labels, super_labels = integer_labels(labels), integer_labels(super_labels, "super_labels")
    if super_labels.shape != labels.shape:
        raise UserError(
            f"there are {len(labels)} labels and {len(super_labels)} super_labels: give one for "
            "each image"
        )
    _, first, classes = np.unique(labels, return_index=True, return_inverse=True)
    kinds = super_labels[first]
    split = np.flatnonzero(super_labels != kinds[classes])
    if len(split):
        lowest, highest = sorted((kinds[classes[split[0]]], super_labels[split[0]]))
        example = f"class {labels[split[0]]} in {lowest} and {highest}"
        count = len(np.unique(classes[split]))
        raise UserError(
            f"{count} classes lie in more than one super-class: {example}; correct the "
            "super-classes"
        )
    return kinds


def _members(kinds: np.ndarray, at_least: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group the classes by super-class: where each super-class that has enough begins, and how many
    it has."""
    _, kinds, counts = np.unique(kinds, return_inverse=True, return_counts=True)
    # Those that are too small make one more, the last. If it is still too small, it is cut off.
    kinds = np.where(counts[kinds] < at_least, len(counts), kinds)
    counts = np.bincount(kinds)
    counts = counts[counts >= at_least]
    sampled = int(counts.sum())
    if sampled < len(kinds):
        text = "%d of %d classes are never sampled: their super-classes have fewer than %d classes"
        logging.warning(text, len(kinds) - sampled, len(kinds), at_least)
    order = np.argsort(kinds, kind="stable")[:sampled]
    return order, np.cumsum(counts) - counts, counts


def _longest_pass(turns: np.ndarray, rows: int) -> int:
    """Return the largest L with sum of min(turns, L) >= rows * L: how many batches can have
    distinct super-classes."""
    lengths = range(2, int(turns.sum()) // rows + 1)
    return 1 + bisect.bisect_left(
        lengths, True, key=lambda length: np.minimum(turns, length).sum() < rows * length
    )


class WholeClassSampler:
    """Batches that accumulate all images of randomly chosen classes until they hold B images.

    The batches of DML-DA on Stanford Online Products, whose classes have too few images for a fixed
    number of each (Li et al., "Deep Metric Learning with Density Adaptivity", IV-A). At every step,
    and without replaying any other:

    - A batch has exactly B distinct images, grouped by class. Every class is whole, save the last,
      which is cut at random to what still fits; a class of more than B images never gives more than
      B.
    - Classes come in shuffled passes of S batches: within a pass no class comes twice, hence no
      image. A pass leaves out N - S B images, fewer than B + S (n_max - 1), which are others in
      every pass.
    - S is the same for every pass: as many batches as any order of the classes is sure to fill.
      Before its last class a batch holds at most b images, the largest multiple of the sizes'
      common divisor below B, so S is the largest s with (s - 1) b + (images of the s - 1 largest
      classes) + B <= N, where a class counts at most B images (as it does in n_max and N).

    The order of a pass is laid out when its first batch is asked for, in O(C) (a tenth of a second
    per million classes), and each of its batches then costs O(B).

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
        check_positive(batch_size=batch_size)
        check_not_negative(seed=seed)
        self._classes = ClassIndex.of(labels)
        num_images = self._classes.num_images
        if batch_size > num_images:
            raise UserError(
                f"the data has {num_images} images; lower batch_size", batch_size=batch_size
            )
        large = int((self._classes.counts >= batch_size).sum())
        if large:
            text = (
                "%d of %d classes have batch_size=%d images or more: a batch that begins with "
                "one has no negatives"
            )
            logging.warning(text, large, len(self._classes), batch_size)
        self._seed = seed
        self.batch_size = batch_size
        self.steps_per_epoch = self._sure_batches()
        # Batches are asked for in order; at the end of a pass, two passes may be at work at once.
        self._pass = functools.lru_cache(maxsize=2)(self._lay_out)

    def batch(self, step: int) -> np.ndarray:
        """See `Sampler.batch`."""
        number, place = divmod(int(step), self.steps_per_epoch)
        order, first = self._pass(number)
        classes = order[first[place] : first[place + 1]]
        numbers = self._classes.counts[classes]
        numbers[-1] = self.batch_size - numbers[:-1].sum()
        return self._classes.draw(classes, numbers, self._seed, int(step))

    def _sizes(self) -> np.ndarray:
        return np.minimum(self._classes.counts, self.batch_size)

    def _sure_batches(self) -> int:
        sizes = self._sizes()
        num_images, divisor = int(sizes.sum()), int(np.gcd.reduce(sizes))
        # What the first 0, 1, 2 ... batches use up at most.
        used = np.concatenate(
            [[0], np.cumsum(np.sort(sizes)[: -(num_images // self.batch_size) : -1])]
        )
        used += np.arange(len(used)) * ((self.batch_size - 1) // divisor * divisor)
        return int(np.searchsorted(used, num_images - self.batch_size, side="right"))

    def _lay_out(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of classes in a pass, (C,), and where each batch begins and the last
        ends, (S + 1,)."""
        order = permutation(len(self._classes), self._seed, PASS_STREAM, number)
        ends = np.cumsum(self._sizes()[order])
        first = [0]
        for _ in range(self.steps_per_epoch):
            used = ends[first[-1] - 1] if first[-1] else 0
            first.append(int(np.searchsorted(ends, used + self.batch_size)) + 1)
        return order, np.array(first)


class Share:
    """The part of a sampler's batches that one of several workers makes; a sampler itself.

    Worker r of R makes rows r B / R .. (r + 1) B / R - 1 of the global batch, as a strategy that
    splits the global batch over its replicas gives them to replica r. So the workers together see
    the batches of one device.

    Args:
        whole: The sampler of the global batch, of B images.
        index: r, from 0.
        count: R.

    Raises:
        UserError: The workers do not divide the batch, or there is no such worker.

    Example:
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
            raise UserError(
                f"worker {index} of {count}: workers are numbered from 0 to {count - 1}"
            )
        check_divides(whole.batch_size, count, "workers")
        self.whole = whole
        self.batch_size = whole.batch_size // count
        self.steps_per_epoch = whole.steps_per_epoch
        self.rows = slice(index * self.batch_size, (index + 1) * self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """See `Sampler.batch`."""
        return self.whole.batch(step)[self.rows]


def check_divides(batch_size: int, count: int, shares: str) -> None:
    """Refuses a batch that cannot be divided evenly.

    Args:
        batch_size: B.
        count: How many share it.
        shares: What they are, e.g. `"replicas"`.

    Raises:
        UserError: The remainder is not 0.
    """
    if batch_size % count:
        advice = (
            f"make batch_size (or classes_per_batch times images_per_class) a multiple of {count}"
        )
        raise UserError(
            f"a batch of {batch_size} images cannot be shared out evenly over {count} {shares}: "
            f"{advice}"
        )


def require_images(sampler: Sampler, count: int) -> None:
    """Refuse a sampler that may draw an image beyond the end.

    Args:
        sampler: Its `num_images`, where it has any, says how many it needs.
        count: How many images there are.

    Raises:
        UserError: It needs more.
    """
    needed = getattr(getattr(sampler, "whole", sampler), "num_images", 0)
    if needed > count:
        raise UserError(
            f"the sampler may draw image {needed - 1}, but there are {count}: make it for the same "
            "images"
        )


class ArrayBatches(keras.callbacks.Callback, keras.utils.PyDataset):
    """Batches that a sampler chooses from arrays, for `fit` on every Keras backend.

    Each epoch has the sampler's next `steps_per_epoch` batches, so no two epochs have the same
    ones. As a callback they follow the epochs of `fit`, also from `initial_epoch` and after
    `BackupAndRestore`:

        model.fit(batches, epochs=10, shuffle=False, callbacks=[batches])

    `MetricLearner.fit` does both by itself. Without the callback the epochs count from the
    attribute `epoch`.

    Args:
        x: (N, ...) the images, or whatever the model embeds; anything that NumPy indices select
            from.
        y: (N,) their labels; or rows (N, L), label sets or levels.
        sampler: Chooses the rows of each step, for example a `ClassBalancedSampler` of `y`.
        **options: Of `keras.utils.PyDataset`: `workers`, `use_multiprocessing`, `max_queue_size`.

    Raises:
        UserError: Not one label per image, labels that `tfdml.labels.integer_labels` refuses, or
            a sampler of more images. Within `fit`, with one worker: it asks for the batches of an
            epoch in another order.

    Example:
        >>> x, y = np.zeros((6, 8, 8, 3)), np.array([7, 7, 7, 9, 9, 9])
        >>> batches = ArrayBatches(x, y, ClassBalancedSampler(y, classes_per_batch=2,
        ...     images_per_class=2))
        >>> batches[0][1].tolist()
        [7, 7, 9, 9]
    """

    def __init__(self, x: Any, y: Any, sampler: Sampler, **options: Any):
        keras.callbacks.Callback.__init__(self)
        keras.utils.PyDataset.__init__(self, **options)
        y = integer_labels(y, "y", rows=True)
        if len(x) != len(y):
            raise UserError(f"has {len(x)} images and y has {len(y)} labels", x=...)
        require_images(sampler, len(x))
        self.x, self.y = x, y
        self.sampler = sampler
        self.epoch = 0
        self._follows_epochs = False
        # The next batch of the epoch, while Keras asks for them one after another.
        self._next: int | None = None

    def __len__(self) -> int:
        return self.sampler.steps_per_epoch

    def __getitem__(self, index):
        if self._next is not None and index >= self._next:
            if index > self._next:
                raise UserError(
                    "the batches of a sampler have an order: give fit shuffle=False, and no "
                    "steps_per_epoch"
                )
            self._next += 1
        rows = self.sampler.batch(self.epoch * len(self) + index)
        return self.x[rows], self.y[rows]

    def set_model(self, model):
        """Keep no model, as batches may be sent to other processes."""

    def on_epoch_begin(self, epoch=None, logs=None):
        """Begin the batches of an epoch; as a callback, of this one."""
        if epoch is not None:
            self.epoch, self._follows_epochs = epoch, True
        elif self.workers <= 1 and not self.use_multiprocessing:
            self._next = 0

    def on_epoch_end(self, epoch=None, logs=None):
        """Continue with the batches of the next epoch."""
        self._next = None
        if not self._follows_epochs:
            self.epoch += 1

    def on_train_end(self, logs=None):
        """Continue after the last epoch."""
        self.epoch, self._follows_epochs = self.epoch + 1, False
