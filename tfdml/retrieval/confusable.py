"""`confusable_classes`: which classes an embedder takes for one another, by a search of the training set."""

from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.pairwise import integer_labels
from tfdml.retrieval.exact import check_embeddings, neighbour_blocks


def confusable_classes(
    embeddings: Any,
    labels: Any,
    *,
    most: int = 32,
    neighbors: int = 50,
    skip_top: int = 0,
) -> np.ndarray:
    """Return of each class the others whose images are most often near its own.

    Each image searches the images of other classes, by cosine. Its nearest ones vote for their classes, and a class
    lists the others by the votes of its images; of as many votes, the lower class comes first. `skip_top` leaves out
    images that may be of the same class in truth, as `range_min` of sentence-transformers' `mine_hard_negatives` does.

    Args:
        embeddings: (N, d).
        labels: (N,) class ids.
        most: Classes that are listed at most.
        neighbors: Images of other classes, after those that are skipped, that vote.
        skip_top: How many of the nearest images of other classes each image skips.

    Returns:
        (C, most) int32 positions of classes in ascending order of their ids; -1 where there are fewer.

    Raises:
        UserError: A number is out of range, or the embeddings and labels do not go together.

    Example:
        >>> confusable_classes([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]], [5, 6, 7], most=1, neighbors=1).ravel().tolist()
        [2, 2, 0]
    """
    embeddings, labels = check_embeddings(embeddings), integer_labels(labels)
    if len(labels) != len(embeddings):
        raise UserError(f"{len(embeddings)} embeddings, but {len(labels)} labels")
    if min(most, neighbors) < 1 or skip_top < 0:
        raise UserError("`most` and `neighbors` must be at least 1, `skip_top` at least 0")
    classes, own, counts = np.unique(labels, return_inverse=True, return_counts=True)
    table = np.full((len(classes), most), -1, np.int32)
    if len(classes) < 2:
        return table
    votes = []
    blocks = neighbour_blocks(
        embeddings,
        k=min(skip_top + neighbors, len(own) - int(counts.min())),
        distance="cosine",
        ignored=lambda block, rows: own[rows] == own[block, None],
        most_ignored=int(counts.max()) - 1,
    )
    for block, rows, _ in blocks:
        kept = rows >= 0
        kept[:, :skip_top] = False
        votes.append((own[block, None] * len(classes) + own[rows])[kept])
    pairs, numbers = np.unique(np.concatenate(votes), return_counts=True)
    one, other = np.divmod(pairs, len(classes))
    order = np.lexsort((other, -numbers, one))
    one, other = one[order], other[order]
    rank = np.arange(len(one)) - np.searchsorted(one, one)
    table[one[rank < most], rank[rank < most]] = other[rank < most]
    return table
