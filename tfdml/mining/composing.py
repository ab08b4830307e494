"""Miners and distances of one's own: what a loss asks of an object given as `mining=` or `distance=`."""

from __future__ import annotations

import inspect

from keras import ops

from tfdml import pairwise
from tfdml.saving import SavedByArguments, in_words, restore


class Composed(SavedByArguments):
    """What both have: they are saved with a loss, by the arguments that they keep under their names."""

    @classmethod
    def from_config(cls, config):
        """The object that `get_config` describes."""
        return cls(**config)

    def __repr__(self):
        return in_words(self)


class Distance(Composed):
    """How far apart embeddings are, for the `distance` of a loss; a subclass gives `__call__`.

    It keeps its arguments in the attributes of their names, by which it is saved. Register it with
    `keras.saving.register_keras_serializable`, so that what holds it can be loaded. A function that is called in the
    same way does as well. A loss compares each vector with itself too, whose value it does not use: the
    gradient has to be finite there (`tfdml.pairwise.safe_sqrt`).

    Attributes:
        larger_is_closer: Whether it is a similarity. A loss then takes its negative, and so does its margin.

    Example:
        >>> @keras.saving.register_keras_serializable("mine")
        ... class Manhattan(tfdml.mining.Distance):
        ...     def __call__(self, a, b):
        ...         return tfdml.pairwise.absolute_distances(a, b)
        >>> loss = tfdml.losses.ContrastiveLoss(margin=3.0, distance=Manhattan())
        >>> float(loss([0, 0, 1], [[0.0, 1.0], [0.0, 2.0], [2.0, 1.0]]))  # 1 + (3 - 2)
        2.0
    """

    larger_is_closer = False

    def __call__(self, a, b):
        """The matrix of distances: (N, d), (M, d) -> (N, M), float32."""
        raise TypeError(f"{type(self).__name__} must define __call__(a, b)")


class Miner(Composed):
    """Chooses the pairs of a batch that a loss learns from, for its `mining`; a subclass gives `__call__`.

    It keeps its arguments in the attributes of their names, by which it is saved. Register it with
    `keras.saving.register_keras_serializable`, so that what holds it can be loaded. A function that is called in the
    same way does as well. It has to be a function of its arguments alone: every replica asks it anew.

    Attributes:
        needs_squared_distances: Whether it is called with squared Euclidean distances, computed from those of the loss,
            in the place of these. A loss refuses it if its distance does not give them.

    Example:
        >>> @keras.saving.register_keras_serializable("mine")
        ... class Near(tfdml.mining.Miner):
        ...     def __call__(self, distances, positives, negatives):
        ...         return positives, keras.ops.logical_and(negatives, distances < 0.5)
        >>> embeddings = [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]
        >>> loss = tfdml.losses.ContrastiveLoss(margin=1.0, mining=Near())
        >>> float(loss([0, 0, 1], embeddings))  # 0.8 + (1 - 0.4)
        1.4
    """

    needs_squared_distances = False

    def __call__(self, distances, positives, negatives):
        """The pairs to keep.

        Args:
            distances: (N, N), smaller is more alike, without a gradient. Those of the loss's `distance`; for losses
                on cosines s, 1 - s.
            positives: (N, N) booleans, the pairs of different images of one class.
            negatives: (N, N) booleans, the pairs of different classes.

        Returns:
            Two masks (N, N), of the positives and of the negatives to keep. Rows are anchors. What is no positive or
            negative is left out again.
        """
        raise TypeError(f"{type(self).__name__} must define __call__(distances, positives, negatives)")


def as_distance(distance):
    """A loss's `distance`: one of `tfdml.pairwise.DISTANCES`, or an object or function, or what was saved of it.

    Raises:
        ValueError: It is none of these.
    """
    return checked("distance", restore(distance), pairwise.DISTANCES, "(a, b)", Distance)


_named: dict[str, type] = {}


def named_miner(name: str):
    """Let losses know a miner by this name, as that with its default arguments; a decorator of the class."""

    def register(cls):
        _named[name] = cls
        return cls

    return register


def named_miners() -> dict[str, type]:
    """The miners that have a name."""
    return dict(sorted(_named.items()))


def as_miner(mining, names=("all",), *, distance):
    """A loss's `mining`: one of `names`, the name of a miner, or an object or function, or what was saved of it.

    Args:
        mining: What the loss was given.
        names: The loss's own kinds of mining.
        distance: The loss's distance, as `as_distance` gives it; `"cosine"` for losses on cosines.

    Raises:
        ValueError: It is none of these; or it needs squared Euclidean distances, and the loss's do not give them.
    """
    mining, called_with = restore(mining), "(distances, positives, negatives)"
    if not isinstance(mining, str) or mining in names:
        return _suited(checked("mining", mining, names, called_with, Miner), distance)
    if mining in _named:
        return _suited(_named[mining](), distance)
    known = f"one of {', '.join(names)}, or " if names else ""
    raise ValueError(
        f"mining must be {known}an object called with {called_with}, or the name of a miner "
        f"({', '.join(named_miners())}), not {mining!r}"
    )


# From each distance to the squared Euclidean one; for cosines, that of the vectors scaled to length 1.
_TO_SQUARED = {"sqeuclidean": lambda d: d, "euclidean": ops.square, "cosine": lambda d: 2.0 * d}


def _suited(mining, distance):
    if getattr(mining, "needs_squared_distances", False) and distance not in tuple(_TO_SQUARED):
        raise ValueError(
            f"mining={_name(mining)} needs squared Euclidean distances, which distance={distance!r} does not give: "
            f"choose one of {', '.join(_TO_SQUARED)}"
        )
    return mining


def matrix_of(distance, embeddings):
    """The distances between all embeddings, smaller is more alike: (N, d) -> (N, N), float32.

    Args:
        distance: As `as_distance` gives it.
        embeddings: (N, d).

    Raises:
        ValueError: An object gave something else than a matrix (N, N).
    """
    if isinstance(distance, str):
        return pairwise.distances(embeddings, distance=distance)
    matrix = ops.convert_to_tensor(distance(embeddings, embeddings))
    _check_square(f"distance {_name(distance)}", matrix, embeddings.shape[0])
    matrix = ops.cast(matrix, "float32")
    return -matrix if getattr(distance, "larger_is_closer", False) else matrix


def keep_pairs(mining, distances, labels, distance):
    """The positives and the negatives of a batch that `mining` keeps; a name keeps them all.

    Args:
        mining: As `as_miner` gives it.
        distances: (N, N), smaller is more alike.
        labels: (N,) integers.
        distance: What they are, as `as_distance` gives it; `"cosine"` for 1 - cos.

    Returns:
        Two masks (N, N).

    Raises:
        ValueError: An object gave something else than two masks (N, N).
    """
    pairs = pairwise.positive_mask(labels), pairwise.negative_mask(labels)
    if mining is None or isinstance(mining, str):
        return pairs
    distances = ops.stop_gradient(distances)
    if getattr(mining, "needs_squared_distances", False):
        distances = _TO_SQUARED[distance](distances)
    kept = mining(distances, *pairs)
    if not isinstance(kept, (tuple, list)) or len(kept) != 2:
        raise ValueError(f"mining {_name(mining)} must give two masks, of positives and of negatives, not {kept!r}")
    masks = [ops.convert_to_tensor(mask) for mask in kept]
    for mask in masks:
        _check_square(f"mining {_name(mining)}", mask, distances.shape[0])
    return tuple(ops.logical_and(pair, ops.cast(mask, "bool")) for pair, mask in zip(pairs, masks, strict=True))


def is_named(*choices) -> bool:
    """Whether all of a loss's choices are names (or None), and none an object, which wants square matrices."""
    return all(choice is None or isinstance(choice, str) for choice in choices)


def checked(argument, value, names, called_with, base):
    """A loss's choice, if it is one of `names`, or an object or function that can be saved.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, str) and value in names:
        return value
    known = f"one of {', '.join(names)}, or " if names else ""
    if inspect.isclass(value):
        raise ValueError(f"{argument} must be an object and not the class {value.__name__}: write {value.__name__}()")
    if not callable(value):
        raise ValueError(f"{argument} must be {known}an object called with {called_with}, not {value!r}")
    if not inspect.isfunction(value) and not hasattr(value, "get_config"):
        raise ValueError(
            f"{argument}: a {type(value).__name__} has no get_config, without which the loss cannot be saved; make it "
            f"a subclass of tfdml.mining.{base.__name__}"
        )
    return value


def _check_square(what, matrix, size):
    """Refuse what is no (size, size), as far as its shape is known."""
    shape = tuple(matrix.shape)
    if len(shape) != 2 or any(None not in (dim, size) and dim != size for dim in shape):
        wanted = "N" if size is None else size
        raise ValueError(f"{what} must give a matrix ({wanted}, {wanted}) for {wanted} embeddings, not {shape}")


def _name(value) -> str:
    return getattr(value, "__name__", type(value).__name__)
