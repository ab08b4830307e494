"""Finds what is wrong with a data set: near-duplicates, wrong labels, and outliers.

`audit` does all of it on embeddings, and on images where there are any. Its parts work alone:
`near_duplicates`, `label_confidences` and `outlier_factors`. `write_table` and `read_drops` are the
CSV files between `tfdml audit` and `tfdml train --drop`.
"""

import collections
import concurrent.futures
import csv
import dataclasses
import io
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tfdml.embeddings.files import ImageTable
from tfdml.errors import UserError
from tfdml.io.files import cell_text, write_whole
from tfdml.io.tables import Column, read_table
from tfdml.labels import integer_labels
from tfdml.names import PATH, ROLE
from tfdml.retrieval.exact import check_embeddings, nearest_neighbors, row_blocks, unit_rows

# Neighbors of each image that are searched; the nearest of these may be duplicates.
_NEIGHBORS = 10
_NEAREST = 5
# Sides of the thumbnail that is kept of an image, of the views that are compared first, and of
# those that are aligned.
_SIDE = 64
_COARSE = 16
_FINE = 40
# Below this, thumbnails that are not aligned yet are of different images.
_PROMISING = 0.85
# From this correlation on, no better alignment is looked for.
_SURE = 0.95
# From these scores on, of pixels and of vectors, one of two images may go.
_SAME_PICTURE = 0.9
_SAME_VECTOR = 1 - 1e-6
# Left and right, or two colors, may be different products: the most that mirror images score, and
# images of which a place differs by so many levels; and how much more alike than the image itself a
# mirror image has to be.
_UNSURE = 0.89
_LEVELS = 24
_CLEARLY = 0.02
# Of the windows in which an image is looked for in another: their sides, and places in the room
# around them.
_PLACES = (0.0, 0.5, 1.0)
_PLACED = itertools.product((0.95, 0.9, 0.85, 0.8), _PLACES, _PLACES)
_WINDOWS: list[tuple[float, ...]] = [(1.0, 0.0, 0.0)]
_WINDOWS += [(side, x * (1 - side), y * (1 - side)) for side, x, y in _PLACED]
# How a window moves: its side, left and top, in steps.
_MOVES = [
    *((0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1), (1, 0, 0), (-1, 0, 0)),
    *((1, -0.5, -0.5), (-1, 0.5, 0.5), (1, -1, 0), (1, 0, -1), (1, -1, -1), (-1, 1, 1)),
]
_SMALLEST_SIDE = 0.75
# With fewer images of a class, the others do not show whether one belongs to it.
_FEWEST = 3
# What is reported: labels with less than this share of the usual confidence, and images that lie
# this much sparser than their neighbors.
_DOUBT, _FAR = 0.2, 1.5
# Those of audit.csv.
_COLUMNS = (
    "kind",
    "score",
    "image",
    "role",
    "class",
    "other_image",
    "other_class",
    "group",
    "across",
    "action",
)


def near_duplicates(
    neighbors: np.ndarray,
    distances: np.ndarray,
    picture: Callable[[int], np.ndarray] | None = None,
    *,
    max_distance: float = 0.01,
    min_correlation: float = 0.8,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of images that show the same picture, among those that are neighbors.

    With images, neighbors are compared by their pixels: one, or its mirror image, is looked for in
    windows of the other, the window is aligned, and the details of both are correlated (normalized
    cross-correlation of high-passed thumbnails), over all and where they differ most; the lower
    counts. That finds copies of another quality or size, and crops of at least 75 % of the width.
    Mirror images, and those of another color or brightness, score at most 0.89. Without images the
    distance alone decides, which takes similar images for duplicates sooner or later.

    Args:
        neighbors: (N, k) rows of the nearest other images, nearest first.
        distances: (N, k) their distances.
        picture: From a row to its image (H, W, 3) uint8; None: there are no images.
        max_distance: Without images, the largest distance of duplicates.
        min_correlation: With images, the smallest correlation of duplicates.

    Returns:
        (P, 2) rows of each pair, once, and their (P,) scores: correlations, 1 for thumbnails that
        are the same; without images 1 - distance.

    Example:
        >>> near_duplicates(np.array([[1], [0], [1]]), np.array([[0.0], [0.0], [0.4]]))[0].tolist()
        [[0, 1]]

    Source: Lewis, "Fast normalized cross-correlation", Vision Interface 1995.
    """
    neighbors, distances = neighbors[:, :_NEAREST], distances[:, :_NEAREST]
    one = np.repeat(np.arange(len(neighbors)), neighbors.shape[1])
    ends = np.sort(np.stack([one, neighbors.ravel()], axis=1), axis=1)
    pairs, first = np.unique(ends, axis=0, return_index=True)
    if picture is None:
        alike, scores = distances.ravel()[first] <= max_distance, 1 - distances.ravel()[first]
    else:
        scores = _correlations(pairs, picture, len(neighbors))
        alike = scores >= min_correlation
    return pairs[alike], scores[alike]


def _correlations(
    pairs: np.ndarray, picture: Callable[[int], np.ndarray], count: int
) -> np.ndarray:
    """(P,) how well the details of two images agree, once they are aligned; 0 where they look
    different at once."""
    thumbnails = np.empty((count, _SIDE, _SIDE, 3), np.uint8)
    views, mirror_views = np.empty((2, count, 3 * _COARSE**2), np.float32)
    pairs_of = _pairs_of_images(pairs)
    scores = np.zeros(len(pairs))

    def look(row: int) -> None:
        thumbnails[row] = _thumbnail(picture(row))
        small = _window(thumbnails[row], _WINDOWS[0], _COARSE)
        views[row], mirror_views[row] = _normalized(np.stack([small, small[:, ::-1]]))

    def compare(row: int) -> None:
        numbers = pairs_of[row]
        near = pairs[numbers].sum(axis=1) - row
        large = thumbnails[row]
        similar = _similarities(large, views[near], mirror_views[near])
        for other, number, values in zip(near, numbers, similar, strict=True):
            if values.max() >= _PROMISING and scores[number] < _SURE:
                mirror, window = divmod(int(values.argmax()), len(_WINDOWS))
                score = _alignment(large, thumbnails[other], bool(mirror), _WINDOWS[window])
                scores[number] = max(scores[number], score)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(look, range(count)))
        list(pool.map(compare, sorted(pairs_of)))
    return scores


def _similarities(large: np.ndarray, views: np.ndarray, mirror_views: np.ndarray) -> np.ndarray:
    """(n, 2 W) how similar n views are to each window of a thumbnail, upright and then mirrored."""
    windows = _normalized(np.stack([_window(large, window, _COARSE) for window in _WINDOWS]))
    return np.concatenate([views @ windows.T, mirror_views @ windows.T - _CLEARLY], axis=1)


def _thumbnail(image: np.ndarray) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((_SIDE, _SIDE), Image.Resampling.BOX))


def _pairs_of_images(pairs: np.ndarray) -> dict[int, list[int]]:
    """Return the numbers of the pairs that each image is in."""
    pairs_of = collections.defaultdict(list)
    for number, (a, b) in enumerate(pairs.tolist()):
        pairs_of[a].append(number)
        pairs_of[b].append(number)
    return pairs_of


def _alignment(
    large: np.ndarray, small: np.ndarray, mirror: bool, window: tuple[float, ...]
) -> float:
    """Return the correlation of the details of two thumbnails, one in a window of the other that is
    moved to fit."""
    from scipy.ndimage import uniform_filter

    if np.array_equal(large, small):
        return 1.0
    target = _window(small[:, ::-1] if mirror else small, _WINDOWS[0], _FINE)
    reference = _normalized(target[None])[0]

    def fit(window: tuple[float, ...]) -> float:
        side, left, top = window
        is_inside = min(left, top) >= 0 and max(left, top) + side <= 1.000001
        if not (_SMALLEST_SIDE <= side <= 1 and is_inside):
            return -1.0
        view = _normalized(_window(large, window, _FINE)[None])[0]
        return float(view @ reference)

    best = fit(window)
    step = 0.025
    while step > 0.002 and _details(_window(large, window, _FINE), target) < _SURE:
        moves = [_moved(window, move, step) for move in _MOVES]
        fits = [fit(other) for other in moves]
        if max(fits) > best:
            best = max(fits)
            window = moves[int(np.argmax(fits))]
        else:
            step /= 2
    view = _window(large, window, _FINE)
    difference = np.subtract(view, target, dtype=np.float32)
    levels = np.abs(uniform_filter(difference, size=(7, 7, 1), mode="nearest")).max()
    is_unsure = mirror or levels > _LEVELS
    return min(_details(view, target), _UNSURE if is_unsure else 0.9999)


def _moved(window: tuple[float, ...], move: tuple[float, ...], step: float) -> tuple[float, ...]:
    return tuple(place + step * by for place, by in zip(window, move, strict=True))


def _details(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation of two images without what is larger than seven pixels, or their worst
    place's if lower.

    Pictures of two similar products agree but for a place: a label, or the hand of a clock.
    """
    from scipy.ndimage import uniform_filter

    both = np.stack([one, other]).astype(np.float32)
    both -= uniform_filter(both, size=(1, 7, 7, 1), mode="nearest")
    details = _normalized(both)
    # What is left of one image after the other, in at most twice or half its contrast.
    gain = np.clip(np.vdot(*both) / max(np.vdot(both[0], both[0]), 1), 0.5, 2)
    power = np.square([both[1] - gain * both[0], both[1]]).mean(axis=-1)
    rest, whole = uniform_filter(power, size=(1, 9, 9), mode="nearest").max(axis=(1, 2))
    return min(float(details[0] @ details[1]), 1 - float(rest / max(whole, 1)))


def _window(thumbnail: np.ndarray, window: tuple[float, ...], size: int) -> np.ndarray:
    from PIL import Image

    side, left, top = (_SIDE * part for part in window)
    box = (left, top, min(left + side, _SIDE), min(top + side, _SIDE))
    return np.asarray(
        Image.fromarray(thumbnail).resize((size, size), Image.Resampling.BILINEAR, box=box)
    )


def _normalized(images: np.ndarray) -> np.ndarray:
    """(n, D) images without their mean, of length 1; nearly flat ones shorter, so that noise
    correlates little."""
    rows = images.reshape(len(images), -1).astype(np.float32)
    rows -= rows.mean(axis=1, keepdims=True)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), rows.shape[1] ** 0.5)


def label_confidences(
    embeddings: Any, labels: Any, *, ridge: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return how far the other images support the label of each image, and which class they
    support.

    A linear classifier (ridge regression to one-hot classes) is fitted to all images but one, for
    each image in turn, in closed form. The score of the image's own class, beyond the class's share
    of the images, is divided by the mean score of that class's images, as confident learning has a
    threshold for each class.

    Args:
        embeddings: (N, d); their direction counts.
        labels: (N,) class ids; negative: without a label.
        ridge: Ridge penalty, as a multiple of the mean eigenvalue of the covariance.

    Returns:
        (N,) float32 confidences, about 1 for usual images and 0 for wrong labels, NaN where a class
        has fewer than three images or is the only one; (N,) class ids.

    Raises:
        UserError: The embeddings and labels do not go together.

    Example:
        >>> vectors = np.repeat(np.eye(2), 5, axis=0)
        >>> confidences, suggestions = label_confidences(vectors, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
        >>> int(confidences.argmin()), suggestions.tolist()
        (4, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1])

    Source: Northcutt et al., "Confident learning: estimating uncertainty in dataset labels", JAIR
    2021. Rifkin and Lippert, "Notes on regularized least squares", 2007, for leaving out each
          image.
    """
    x = unit_rows(check_embeddings(embeddings))
    labels = integer_labels(labels)
    if len(labels) != len(x):
        raise UserError(f"{len(x)} embeddings, but {len(labels)} labels")
    confidences = np.full(len(x), np.nan, np.float32)
    suggestions = labels.copy()
    rows = np.flatnonzero(labels >= 0)
    classes, own, counts = np.unique(labels[rows], return_inverse=True, return_counts=True)
    enough = counts >= _FEWEST
    if len(classes) < 2 or not enough.any():
        return confidences, suggestions
    support, best = _left_out_scores(x[rows], own, counts, enough, ridge)
    usual = np.bincount(own, weights=support) / counts
    usual = np.maximum(usual, max(float(support.mean()) / 4, 1e-6))
    confidences[rows] = np.where(enough[own], support / usual[own], np.nan)
    suggestions[rows] = np.where(enough[own], classes[best], labels[rows])
    return confidences, suggestions


def _left_out_scores(
    x: np.ndarray, own: np.ndarray, counts: np.ndarray, enough: np.ndarray, ridge: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return what a classifier of all images but one says of that one, for each in turn.

    Args:
        x: (N, d) vectors of length 1.
        own: (N,) the number of each image's class.
        counts: (C,) images of each class.
        enough: (C,) bool, whether a class may be suggested.
        ridge: As `label_confidences`.

    Returns:
        (N,) the score of its own class beyond the class's share, and (N,) the class with the
        highest.
    """
    x = x - x.mean(axis=0)
    covariance = (x.T @ x).astype(np.float64)
    penalty = max(ridge * np.trace(covariance) / len(covariance), np.finfo(np.float32).tiny)
    inverse = np.linalg.inv(covariance + penalty * np.eye(len(covariance))).astype(np.float32)
    sums = np.add.reduceat(x[np.argsort(own, kind="stable")], np.cumsum(counts) - counts)
    weights = inverse @ sums.T
    priors = (counts / len(x)).astype(np.float32)
    leverage = np.einsum("nd,nd->n", x @ inverse, x).clip(max=0.999)
    support = np.empty(len(x), np.float32)
    best = np.empty(len(x), np.int64)
    # A block has the scores of all classes, 128 MB: with priors, and times 1 - leverage.
    for part in row_blocks(len(x), max(1, 2**25 // len(counts))):
        scores = x[part] @ weights + priors
        each = np.arange(len(scores)), own[part]
        scores[each] -= leverage[part]
        support[part] = scores[each] / (1 - leverage[part]) - priors[own[part]]
        best[part] = np.where(enough, scores, -np.inf).argmax(axis=1)
    return support, best


def outlier_factors(neighbors: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Return how much sparser the place of each image is than the places of its neighbors: 1
    inside, more outside.

    Args:
        neighbors: (N, k) rows of the nearest other images.
        distances: (N, k) their distances.

    Returns:
        (N,) local outlier factors.

    Example:
        >>> line = np.array([[0.0], [1.0], [2.0], [9.0]])
        >>> neighbors, distances = tfdml.retrieval.nearest_neighbors(line, k=2)
        >>> int(outlier_factors(neighbors, distances).argmax())
        3

    Source: Breunig et al., "LOF: identifying density-based local outliers", SIGMOD 2000.
    """
    reach = np.maximum(distances[neighbors, -1], distances).mean(axis=1)
    smallest = max(1e-6 * float(np.median(reach)), float(np.finfo(np.float32).tiny))
    density = 1 / np.maximum(reach, smallest)
    return density[neighbors].mean(axis=1) / density


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about an image.

    Args:
        kind: `"duplicate"`, `"label"` or `"outlier"`.
        score: How sure it is, in the kind's own measure: larger is surer.
        row: Row of the image.
        other: Row of another image that shows why; -1: there is none.
        label: Class id of the image; -1: none.
        other_label: Class id of the other image, or the class that is suggested; -1: none.
        group: Number of the group of duplicates; 0: none.
        across: What a group lies across: `"split"`, `"class"`, `"split and class"` or nothing.
        action: What is suggested: `"keep"`, `"drop"`, `"relabel"` or `"check"`.
    """

    kind: str
    score: float
    row: int
    other: int
    label: int
    other_label: int
    group: int = 0
    across: str = ""
    action: str = "check"


@dataclasses.dataclass(frozen=True, eq=False)
class Audit:
    """What `audit` found.

    Attributes:
        table: The images.
        findings: All findings, the surest of each kind first; duplicates of different classes
            before the others.
        by_pixels: Whether duplicates were compared by their pixels.
        confidences: (N,) see `label_confidences`.
        suggestions: (N,) class ids that the other images support.
        outliers: (N,) see `outlier_factors`.
        neighbors: (N, k) rows of the nearest other images.
    """

    table: ImageTable
    findings: list[Finding]
    by_pixels: bool
    confidences: np.ndarray
    suggestions: np.ndarray
    outliers: np.ndarray
    neighbors: np.ndarray

    @property
    def num_classes(self) -> int:
        """How many classes the images have."""
        return len(np.unique(self.table.labels[self.table.labels >= 0]))

    def of(self, kind: str) -> list[Finding]:
        """Return the findings of one kind."""
        return [finding for finding in self.findings if finding.kind == kind]

    def groups(self) -> list[list[Finding]]:
        """Return the groups of duplicates, images to keep first and those to check last."""
        groups = itertools.groupby(self.of("duplicate"), lambda finding: finding.group)
        return [list(group) for _, group in groups]

    def counts(self) -> collections.Counter[str]:
        """Return how many findings of each kind there are, and of duplicates how many groups,
        across what, and actions.

        Their keys are `"group"`, `"across class"`, `"across split"`, `"keep"`, `"drop"` and
        `"check"`.
        """
        counts = collections.Counter(finding.kind for finding in self.findings)
        counts.update(finding.action for finding in self.of("duplicate"))
        for group in self.groups():
            counts["group"] += 1
            for kind in ("class", "split"):
                if kind in group[0].across:
                    counts[f"across {kind}"] += 1
        return counts

    def class_name(self, label: int) -> str:
        """Return the name of a class; empty for none."""
        return str(self.table.class_names.get(int(label), int(label))) if label >= 0 else ""

    def tables(self) -> dict[str, dict[str, list[Any]]]:
        """Return the columns of the CSV files: the findings as `audit`, and all `images`."""
        return {"audit": self._columns_of_findings(), "images": self._columns_of_images()}

    def _columns_of_findings(self) -> dict[str, list[Any]]:
        names = [*self.table.names, ""]  # the last is that of row -1
        rows = []
        for finding in self.findings:
            score = f"{finding.score:.4f}"
            image = [names[finding.row], self.table.roles[finding.row]]
            classes = [self.class_name(finding.label), self.class_name(finding.other_label)]
            decision = [finding.group or "", finding.across, finding.action]
            other = names[finding.other]
            rows.append([finding.kind, score, *image, classes[0], other, classes[1], *decision])
        columns: dict[str, list[Any]] = {}
        for place, column in enumerate(_COLUMNS):
            columns[column] = [row[place] for row in rows]
        return columns

    def _columns_of_images(self) -> dict[str, list[Any]]:
        names = self.table.names
        nearest = [names[near[0]] if len(near) else "" for near in self.neighbors]
        suggested = [self.class_name(label) for label in self.suggestions]
        confidences = [f"{value:.4f}" for value in self.confidences]
        outliers = [f"{value:.4f}" for value in self.outliers]
        images = {"image": list(names), "role": list(self.table.roles)}
        classes = [self.class_name(label) for label in self.table.labels]
        labels = {"class": classes, "label_confidence": confidences, "suggested_class": suggested}
        return {**images, **labels, "outlier_factor": outliers, "nearest_image": nearest}


def audit(
    embeddings: Any,
    table: ImageTable,
    picture: Callable[[int], np.ndarray] | None = None,
    *,
    max_distance: float = 0.01,
    min_correlation: float = 0.8,
) -> Audit:
    """Audit a data set.

    Memory is that of the embeddings, some copies of them, and 16 KB for each image that is
    compared.

    Args:
        embeddings: (N, d); their direction counts.
        table: The images, `ImageTable.of([train, test])`; a negative label means none.
        picture: From a row to its image (H, W, 3) uint8, by which duplicates are compared; None:
            there are no images.
        max_distance: As `near_duplicates`.
        min_correlation: As `near_duplicates`. An image is dropped only if it correlates by 0.9 with
            one that stays; without images, only if both have the same vector. The others are to
            check.

    Raises:
        UserError: The embeddings are not finite, or not as many as images; an image cannot be read.

    Example:
        >>> table = tfdml.embeddings.ImageTable.of([test])
        >>> result = audit(embeddings, table, test.images.picture)
        >>> len(result.confidences) == len(test)
        True
    """
    x = check_embeddings(embeddings)
    if len(x) != len(table):
        raise UserError(f"{len(x)} embeddings, but {len(table)} images")
    neighbors = np.empty((len(x), 0), np.int64)
    distances = np.empty((len(x), 0), np.float32)
    if len(x) > 1:
        k = min(_NEIGHBORS, len(x) - 1)
        neighbors, distances = nearest_neighbors(x, k=k, distance="cosine")
    confidences, suggestions = label_confidences(x, table.labels)
    outliers = outlier_factors(neighbors, distances) if len(x) > 2 else np.ones(len(x))
    pairs, scores = near_duplicates(
        neighbors,
        distances,
        picture,
        max_distance=max_distance,
        min_correlation=min_correlation,
    )
    enough = _SAME_PICTURE if picture else _SAME_VECTOR
    findings = _duplicates(pairs, scores, table, confidences, enough)
    findings += _wrong_labels(table.labels, confidences, suggestions, neighbors)
    findings += _outliers(table.labels, outliers, neighbors)
    with_pictures = picture is not None
    return Audit(table, findings, with_pictures, confidences, suggestions, outliers, neighbors)


def _wrong_labels(
    labels: np.ndarray, confidences: np.ndarray, suggestions: np.ndarray, neighbors: np.ndarray
) -> list[Finding]:
    """Return the images whose label is doubtful, with the nearest image of the suggested class."""
    findings = []
    for row in _ranked(confidences, (confidences < _DOUBT) & (suggestions != labels)):
        same = labels[neighbors[row]] == suggestions[row]
        near = int(neighbors[row][np.argmax(same)]) if same.any() else -1
        about = row, near, int(labels[row]), int(suggestions[row])
        findings.append(Finding("label", 1 - float(confidences[row]), *about, action="relabel"))
    return findings


def _outliers(labels: np.ndarray, factors: np.ndarray, neighbors: np.ndarray) -> list[Finding]:
    """Return the images that are far from all others, with the nearest."""
    findings = []
    for row in _ranked(-factors, factors > _FAR):
        near = int(neighbors[row, 0])
        about = row, near, int(labels[row]), int(labels[near])
        findings.append(Finding("outlier", float(factors[row]), *about))
    return findings


def _ranked(values: np.ndarray, mask: np.ndarray) -> list[int]:
    """Return the rows of a mask, the lowest value first."""
    rows = np.flatnonzero(mask)
    return rows[np.argsort(values[rows], kind="stable")].tolist()


def _duplicates(
    pairs: np.ndarray, scores: np.ndarray, table: ImageTable, confidences: np.ndarray, enough: float
) -> list[Finding]:
    """Return the images of each group of duplicates; one is dropped for its own pair with an image
    that stays."""
    component = _components(pairs, len(table))
    partners = _partners(pairs, scores)
    # Keep the image that is measured on rather than the one that is trained on, and then the surest
    # label.
    train = table.roles == "train"
    certainty = np.nan_to_num(confidences, nan=-np.inf)
    order = sorted(partners, key=lambda row: (component[row], train[row], -certainty[row], row))
    actions = _actions(order, partners, enough)
    groups = []
    for _, members in itertools.groupby(order, component.__getitem__):
        rows = sorted(members, key=lambda row: ("keep", "drop", "check").index(actions[row]))
        across_splits = len(np.unique(train[rows])) > 1
        across_classes = len(np.unique(table.labels[rows])) > 1
        best = max(partners[row][-1][0] for row in rows)
        groups.append((across_classes, best, across_splits, rows))
    groups.sort(key=lambda group: group[:3], reverse=True)
    findings = []
    for number, (across_classes, _, across_splits, rows) in enumerate(groups, 1):
        across = " and ".join(["split"] * across_splits + ["class"] * across_classes)
        for row in rows:
            score, other = partners[row][-1]
            about = int(table.labels[row]), int(table.labels[other]), number, across, actions[row]
            findings.append(Finding("duplicate", score, row, other, *about))
    return findings


def _components(pairs: np.ndarray, count: int) -> np.ndarray:
    """Return the number of the group of each image: those that pairs link share one."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    graph = coo_matrix((np.ones(len(pairs)), pairs.T), shape=(count, count))
    return connected_components(graph, directed=False)[1]


def _partners(pairs: np.ndarray, scores: np.ndarray) -> dict[int, list[tuple[float, int]]]:
    """Return the scores and rows of the partners of each image, the surest last."""
    partners = collections.defaultdict(list)
    for score, (a, b) in sorted(zip(scores.tolist(), pairs.tolist(), strict=True)):
        partners[a].append((score, b))
        partners[b].append((score, a))
    return partners


def _actions(
    order: Iterable[int], partners: dict[int, list[tuple[float, int]]], enough: float
) -> dict[int, str]:
    """Return what to do with each image. One is dropped for an image that stays, and its partners
    become those that stay.

    Args:
        order: The images, those to keep first.
        partners: As `_partners`.
        enough: The score from which one of two may go.
    """
    actions: dict[int, str] = {}
    for row in order:
        near = [partner for partner in partners[row] if partner[0] >= enough]
        stays = [partner for partner in near if actions.get(partner[1], "drop") != "drop"]
        actions[row] = "drop" if stays else "check"
        if stays:
            partners[row] = stays
            actions[stays[-1][1]] = "keep"
    return actions


def write_table(path: str | os.PathLike, columns: Mapping[str, Iterable[Any]]) -> None:
    """Write a CSV file that a spreadsheet opens without running what is in it, atomically.

    Text that a spreadsheet would take for a formula gets an apostrophe in front, which `read_drops`
    takes off.

    Args:
        path: The file.
        columns: The cells of each column.

    Raises:
        UserError: It cannot be written.

    Example:
        >>> write_table("picks.csv", {"image": ["=1+1.jpg"]})
        >>> open("picks.csv", encoding="utf-8-sig").read().split()
        ['image', "'=1+1.jpg"]

    Source: OWASP, "CSV injection".
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([cell_text(str(cell)) for cell in row])
    # With a byte-order mark, without which Excel takes UTF-8 for another encoding.
    write_whole(path, ("\ufeff" + text.getvalue()).encode("utf-8", "surrogateescape"))


def read_drops(path: str | os.PathLike) -> tuple[str, ...]:
    """Return the names of the images that a CSV file of `tfdml audit` says to drop, each once.

    It is read as a list is, so that a spreadsheet may have saved it. Only the columns `image` and
    `action` count.

    Args:
        path: The file.

    Raises:
        UserError: It cannot be read or has no such columns, or a row says to drop and names no
            image.

    Example:
        >>> write_table("mine.csv", {"image": ["a.jpg"], "action": ["drop"]})
        >>> read_drops("mine.csv")
        ('a.jpg',)
    """
    as_written = dataclasses.replace(PATH, several_lines=True, may_be_empty=True)
    columns = {**dict.fromkeys(_COLUMNS), "image": Column(as_written), "action": Column(ROLE)}
    table = read_table("drop", os.fspath(path), columns, ("image", "action"))
    rows = [row for row, action in enumerate(table.columns["action"]) if action.lower() == "drop"]
    images = [table.columns["image"][row].removeprefix("'") for row in rows]
    if "" in images:
        raise UserError(f"{table.where(rows[images.index('')])}: there is no image to drop")
    return tuple(dict.fromkeys(images))
