"""`confusable_classes`: which classes an embedder takes for one another, by a search of the
training set."""

from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.labels import integer_labels
from tfdml.retrieval.exact import check_embeddings, neighbor_blocks, unit_rows


def confusable_classes(
    embeddings: Any,
    labels: Any,
    *,
    most: int = 32,
    neighbors: int = 50,
    skip_top: int = 0,
    relative_margin: float | None = None,
) -> np.ndarray:
    """Return of each class the others whose images are most often near its own.

    Each image searches the images of other classes, by cosine. Its nearest ones vote for their
    classes, and a class lists the others by the votes of its images; of as many votes, the lower
    class comes first. `skip_top` and `relative_margin` leave out images that may be of the same
    class in truth, as `range_min` and `relative_margin` of sentence-transformers'
    `mine_hard_negatives` do.

    Args:
        embeddings: (N, d).
        labels: (N,) class ids.
        most: Classes that are listed at most.
        neighbors: Images of other classes, after those that are skipped, that vote.
        skip_top: How many of the nearest images of other classes each image skips.
        relative_margin: Leave out an image whose cosine with the searching one is above 1 -
            `relative_margin` times the mean cosine of the latter with the other images of its
            class; 0.05 keeps what is at most 95 % as similar. None: leave out none. An image that
            is alone in its class leaves out none.

    Returns:
        (C, most) int32 positions of classes in ascending order of their ids; -1 where there are
        fewer.

    Raises:
        UserError: A number is out of range, or the embeddings and labels do not go together.

    Example:
        >>> confusable_classes([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]], [5, 6, 7], most=1,
        ...     neighbors=1).ravel().tolist()
        [2, 2, 0]
    """
    embeddings = check_embeddings(embeddings)
    labels = integer_labels(labels)
    if len(labels) != len(embeddings):
        raise UserError(f"{len(embeddings)} embeddings, but {len(labels)} labels")
    if min(most, neighbors) < 1 or skip_top < 0 or not 0 <= (relative_margin or 0) < 1:
        raise UserError(
            "must be at least 1, skip_top at least 0, relative_margin in [0, 1)",
            most=...,
            neighbors=...,
        )
    classes, own, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(classes) < 2:
        return np.full((len(classes), most), -1, np.int32)
    highest = np.full(len(own), np.inf)
    if relative_margin is not None:
        positive = _mean_positive_cosines(embeddings, own, counts)
        limits = positive - relative_margin * np.abs(positive)
        highest = np.where(counts[own] > 1, limits, np.inf)
    votes = _votes(embeddings, own, counts, skip_top, neighbors, highest)
    return _most_voted(votes, len(classes), most)


def _votes(
    embeddings: np.ndarray,
    own: np.ndarray,
    counts: np.ndarray,
    skip_top: int,
    neighbors: int,
    highest: np.ndarray,
) -> np.ndarray:
    """Return all votes of images for other classes.

    Args:
        embeddings: (N, d).
        own: (N,) the place of each image's class.
        counts: (C,) the number of images of each class.
        skip_top: As `confusable_classes`.
        neighbors: As `confusable_classes`.
        highest: (N,) the largest cosine of an image for which each votes.

    Returns:
        (V,) C times the voting class, plus the class voted for.
    """

    def is_own(block: slice, rows: np.ndarray) -> np.ndarray:
        return own[rows] == own[block, None]

    others = len(own) - int(counts.min())
    blocks = neighbor_blocks(
        embeddings,
        k=min(skip_top + neighbors, others),
        distance="cosine",
        ignored=is_own,
        most_ignored=int(counts.max()) - 1,
    )
    votes = []
    for block, rows, distances in blocks:
        is_vote = (rows >= 0) & (1.0 - distances <= highest[block, None])
        is_vote[:, :skip_top] = False
        pairs = own[block, None] * len(counts) + own[rows]
        votes.append(pairs[is_vote])
    return np.concatenate(votes)


def _most_voted(votes: np.ndarray, num_classes: int, most: int) -> np.ndarray:
    """Return of each class the others with the most votes, see `confusable_classes`."""
    pairs, counts = np.unique(votes, return_counts=True)
    voters, voted = np.divmod(pairs, num_classes)
    order = np.lexsort((voted, -counts, voters))
    voters = voters[order]
    voted = voted[order]
    rank = np.arange(len(voters)) - np.searchsorted(voters, voters)
    is_listed = rank < most
    table = np.full((num_classes, most), -1, np.int32)
    table[voters[is_listed], rank[is_listed]] = voted[is_listed]
    return table


def _mean_positive_cosines(
    embeddings: np.ndarray, own: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Return of each image the mean cosine with the other images of its class, (N,) float64; 0
    where it has none."""
    unit = unit_rows(embeddings).astype(np.float64)
    by_class = unit[np.argsort(own, kind="stable")]
    starts = np.cumsum(counts) - counts
    sums = np.add.reduceat(by_class, starts)
    # The cosine of an image with itself is left out; alone in its class it has 0.
    with_others = np.einsum("nd,nd->n", unit, sums[own]) - np.einsum("nd,nd->n", unit, unit)
    return with_others / np.maximum(counts[own] - 1, 1)
