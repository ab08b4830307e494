"""Keyed permutations evaluated only at the positions wanted: what a batch costs does not depend on the data's size."""

from __future__ import annotations

import numpy as np

# Separates the random streams that one seed feeds; never reorder.
CLASS_STREAM, IMAGE_STREAM, SHUFFLE_STREAM, PASS_STREAM, SUPER_STREAM = 0, 1, 2, 3, 4
# Fewer than 12 rounds show in the frequencies of permutations of 5 or 7 items.
ROUNDS = 12


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
            row = (row + mix(column ^ key) % rows) % rows
        else:
            column = (column + mix(row ^ key) % columns) % columns
    return row * columns + column


def mix(x: np.ndarray) -> np.ndarray:
    """A well-mixed uint64 of each uint64 (the finaliser of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def round_keys(seed: int, stream: int, *numbers: int, shape: tuple[int, ...] = ()) -> np.ndarray:
    """(rounds, *shape) uint64 that depend on nothing but the arguments."""
    philox = np.random.Philox(np.random.SeedSequence((seed, stream, *numbers)))
    return philox.random_raw(ROUNDS * int(np.prod(shape, dtype=np.int64))).reshape(ROUNDS, *shape)


def shuffled_order(size: int, seed: int, stream: int, *numbers: int) -> np.ndarray:
    """(size,) int32: a whole random permutation that depends on nothing but the arguments.

    Cheaper than `permute` where every position is wanted.
    """
    philox = np.random.Philox(np.random.SeedSequence((seed, stream, *numbers)))
    return np.argsort(philox.random_raw(size), kind="stable").astype(np.int32)
