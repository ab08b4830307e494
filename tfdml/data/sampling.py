"""Which images make up the batch of a training step: a pure function of the seed and the step.

Nothing is iterated and nothing remembered, so a run resumed at any step sees the batches that an unbroken run would
have seen. Orders come from keyed permutations that are evaluated only at the positions wanted: a batch costs the same
whether there are a hundred classes or a million.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from tfdml.errors import UserError

# Separates the random streams that one seed feeds; never reorder.
_CLASS_STREAM, _IMAGE_STREAM, _SHUFFLE_STREAM = 0, 1, 2
# Fewer than 12 rounds show in the frequencies of permutations of 5 or 7 items.
_ROUNDS = 12


class Sampler(Protocol):
    """What `tfdml.data.training_batches` needs of a sampler."""

    @property
    def batch_size(self) -> int:
        """Images per batch, B."""

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch."""

    def batch(self, step: int) -> np.ndarray:
        """(B,) int64 indices of the images of step `step`."""


class ClassBalancedSampler:
    """P distinct classes a batch, K images of each.

    Classes come in shuffled passes of floor(C / P) batches: within a pass no class comes twice, and the C mod P
    classes left over are others in every pass. The K images of a class are drawn without replacement. Rows are
    grouped by class: rows 0 .. K-1 are the first class, and so on.

    Args:
        labels: (N,) integer class ids, any values.
        classes_per_batch: P.
        images_per_class: K.
        seed: A non-negative integer.
        short_classes: What to do with classes of fewer than K images. `"repeat"`: all images of the class in random
            order, again (in a new order) as often as needed. `"drop"`: never sample the class.

    Attributes:
        batch_size: P * K.
        steps_per_epoch: floor(N / batch_size), at least 1, where N counts the images that can be sampled.

    Raises:
        UserError: There are fewer than P classes, a number is out of range, or the policy is unknown.

    Example:
        >>> sampler = ClassBalancedSampler(labels=[7, 7, 7, 9, 9, 9], classes_per_batch=2, images_per_class=2, seed=0)
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
        _check_positive("--classes_per_batch", classes_per_batch)
        _check_positive("--images_per_class", images_per_class)
        _check_seed(seed)
        if short_classes not in ("repeat", "drop"):
            raise UserError(f"--short_classes must be repeat or drop, not {short_classes!r}")
        labels = np.asarray(labels)
        if labels.ndim != 1 or not len(labels) or not np.issubdtype(labels.dtype, np.integer):
            raise UserError(f"labels must be (N,) integers with N > 0, not {labels.dtype} of shape {labels.shape}")
        self._order = np.argsort(labels, kind="stable")
        _, starts, counts = np.unique(labels[self._order], return_index=True, return_counts=True)
        available = len(counts)
        if short_classes == "drop":
            keep = counts >= images_per_class
            starts, counts = starts[keep], counts[keep]
        if classes_per_batch > len(counts):
            short = f" with at least --images_per_class={images_per_class} images" if short_classes == "drop" else ""
            raise UserError(
                f"--classes_per_batch={classes_per_batch}, but the data has {len(counts)} classes{short}"
                f"{f' (of {available})' if len(counts) < available else ''}; lower --classes_per_batch"
                + (", lower --images_per_class or use --short_classes=repeat" if len(counts) < available else "")
            )
        self._starts, self._counts = starts.astype(np.int64), counts.astype(np.int64)
        self._classes_per_batch, self._images_per_class, self._seed = classes_per_batch, images_per_class, seed
        self.batch_size = classes_per_batch * images_per_class
        self.steps_per_epoch = max(1, int(self._counts.sum()) // self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """The images of a step.

        Args:
            step: From 0.

        Returns:
            (P * K,) int64 indices into `labels`, grouped by class.
        """
        num_classes, p, k = len(self._counts), self._classes_per_batch, self._images_per_class
        number, place = divmod(int(step), num_classes // p)
        keys = _round_keys(self._seed, _CLASS_STREAM, number)
        classes = permute(np.arange(place * p, (place + 1) * p), num_classes, keys)
        counts = self._counts[classes][:, None]
        # Image k of a class is place k mod n of the order drawn for its turn, k div n.
        turn, position = np.divmod(np.arange(k)[None, :], counts)
        keys = _round_keys(self._seed, _IMAGE_STREAM, int(step), (p, 1)) + _mix(turn.astype(np.uint64))
        images = permute(position, np.broadcast_to(counts, position.shape), keys)
        return self._order[(self._starts[classes][:, None] + images).reshape(-1)]


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
        _check_positive("--batch_size", batch_size)
        _check_seed(seed)
        if batch_size > num_images:
            raise UserError(f"--batch_size={batch_size}, but the data has {num_images} images; lower --batch_size")
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
        return permute(positions, self._num_images, _round_keys(self._seed, _SHUFFLE_STREAM, epoch))


def permute(positions: np.ndarray, size: int | np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Where a keyed random permutation of 0 .. size-1 sends some positions, without building the permutation.

    A Feistel network over the smallest a x b grid that holds `size` cells, a and b close to its root; positions that
    leave 0 .. size-1 go round again until they come back, which keeps it a bijection.

    Args:
        positions: Integers in [0, size), any shape.
        size: Size of the permuted range; a scalar or of the shape of `positions` (several permutations at once).
        keys: (rounds, ...) uint64, one key per round; further axes broadcast against `positions`.

    Returns:
        int64, of the shape of `positions`.

    Example:
        >>> keys = np.arange(12, dtype=np.uint64)
        >>> sorted(permute(np.arange(5), 5, keys).tolist())
        [0, 1, 2, 3, 4]
    """
    shape = positions.shape
    keys = np.broadcast_to(keys.reshape(len(keys), *keys.shape[1:] or (1,) * len(shape)), (len(keys), *shape))
    keys = keys.reshape(len(keys), -1)
    values = positions.reshape(-1).astype(np.uint64)
    sizes = np.broadcast_to(np.asarray(size, np.uint64), shape).reshape(-1)
    rows = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    columns = (sizes + rows - np.uint64(1)) // rows
    outside = np.arange(values.size)
    while outside.size:
        turned = _feistel(values[outside], rows[outside], columns[outside], keys[:, outside])
        values[outside] = turned
        outside = outside[turned >= sizes[outside]]
    return values.astype(np.int64).reshape(shape)


def _feistel(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """One pass of the network: the halves are a cell's row and column, added to modulo their ranges in turn."""
    row, column = np.divmod(values, columns)
    for number, key in enumerate(keys):
        if number % 2:
            row = (row + _mix(column ^ key) % rows) % rows
        else:
            column = (column + _mix(row ^ key) % columns) % columns
    return row * columns + column


def _mix(x: np.ndarray) -> np.ndarray:
    """A well-mixed uint64 of each uint64 (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(seed: int, stream: int, number: int, shape: tuple[int, ...] = ()) -> np.ndarray:
    """(rounds, *shape) uint64 that depend on nothing but the arguments."""
    philox = np.random.Philox(np.random.SeedSequence((seed, stream, number)))
    return philox.random_raw(_ROUNDS * int(np.prod(shape, dtype=np.int64))).reshape(_ROUNDS, *shape)


def _check_positive(flag: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{flag} must be at least 1, not {value}")


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise UserError(f"--seed must not be negative, but is {seed}")
