"""The protocol of disjoint parts: metrics on ten small test sets, with the interval of their mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.intervals import Interval, check_level
from tfdml.evaluation.paired import student_interval
from tfdml.evaluation.per_query import check_labels
from tfdml.evaluation.retrieval import evaluate_retrieval
from tfdml.evaluation.search.exact import check_embeddings


def split_into_parts(labels: Any, parts: int = 10, seed: int = 0) -> np.ndarray:
    """Assign the images of every class to disjoint parts of nearly equal size, so that each part holds every class.

    Args:
        labels: (N,) integer class ids.
        parts: How many parts, at least 2.
        seed: Of the order in which a class's images are assigned.

    Returns:
        (N,) int64, the part of each image, 0 .. parts - 1. The parts' shares of a class differ by at most one image.

    Raises:
        UserError: Labels that are not integers; fewer than 2 parts; classes with fewer images than parts.

    Example:
        >>> np.bincount(split_into_parts([7] * 5 + [8] * 7, parts=3)).tolist()
        [4, 4, 4]
    """
    labels = check_labels(labels, np.size(labels))
    if parts < 2:
        raise UserError(f"parts must be at least 2; got {parts}")
    counts = np.unique(labels, return_counts=True)[1]
    if not len(counts) or counts.min() < parts:
        raise UserError(
            f"{parts} parts need {parts} images of every class; {int((counts < parts).sum())} of {len(counts)} classes "
            f"have fewer (the smallest {min(counts, default=0)}). Take fewer parts, or bootstrap with "
            "confidence_intervals"
        )
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    # Assigned on from class to class without starting over, which keeps the parts equally large.
    result = np.empty(len(labels), np.int64)
    result[by_class] = np.arange(len(labels)) % parts
    return result


def part_protocol(
    embeddings: Any,
    labels: Any,
    *,
    parts: int = 10,
    level: float = 0.95,
    seed: int = 0,
    ks: Sequence[int] = (1, 2, 4, 8),
    metrics: Sequence[str] = ("recall",),
    **options: Any,
) -> dict[str, Interval]:
    """Split the test set into disjoint parts that each hold every class, measure each by itself, and average.

    The protocol of table 2 of Chu et al., 2020 (JRD), for CUB and CARS with ten parts. A query is searched in its own
    part, where its class has a tenth of its images: the values are far below those on the whole set, and compare only
    with others of this protocol. The interval is mean +- t s / sqrt(parts), with s the standard deviation of the parts'
    values (divisor parts - 1) and t the quantile of Student's distribution with parts - 1 degrees of freedom. The
    paper states neither how images are assigned nor the formula of its intervals: here they are assigned at random.

    It answers how the metric varies with the images drawn from these classes, not with other classes.

    Args:
        embeddings: (N, d).
        labels: (N,) integer class ids; every class needs at least `parts` images, and twice as many for a query of it
            to have something to find in every part.
        parts: How many parts.
        level: Coverage aimed at, between 0 and 1.
        seed: Of the split.
        ks: As `evaluate_retrieval`.
        metrics: As `evaluate_retrieval`, clustering included.
        **options: Further arguments of `evaluate_retrieval`, all-to-all.

    Returns:
        An `Interval` per metric; its standard error is s / sqrt(parts).

    Raises:
        UserError: As `split_into_parts` and `evaluate_retrieval`; `level` not between 0 and 1.

    Example:
        >>> labels = np.repeat([0, 1], 20)
        >>> part_protocol(labels[:, None] + 0.01 * np.arange(40)[:, None], labels, parts=4, ks=[1])["recall@1"].mean
        1.0
    """
    check_level(level)
    embeddings = check_embeddings(embeddings)
    labels = check_labels(labels, len(embeddings))
    part = split_into_parts(labels, parts, seed)
    measured = [
        evaluate_retrieval(embeddings[part == i], labels[part == i], ks=ks, metrics=metrics, **options)
        for i in range(parts)
    ]
    names = [name for name, value in measured[0].items() if isinstance(value, float)]
    return {name: student_interval([one[name] for one in measured], level) for name in names}
