"""Count how often intervals of thresholds hold what they promise, on made images or on stored ones.

  python -m benchmarks.coverage
  python -m benchmarks.coverage --embeddings Cars-196=cars.npz Omniglot=omniglot.npz

Each split calibrates on some classes and measures on as many others. An interval at 95 % should
hold the other classes' rate in 93 to 97 % of 300 splits. Made images are unit vectors around random
centers, of classes that are wider or narrower. Stored ones are `.npz` files with `embeddings` and
`labels`, of which each split draws 120 classes, and 12 images of each. NumPy alone, ten minutes.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping

import numpy as np

from tfdml.evaluation import Calibration, accepted_rates, calibrate, identification_rates
from tfdml.evaluation.intervals import Interval
from tools.numbers import Results, command_line

Classes = tuple[np.ndarray, np.ndarray]
Outcome = dict[str, bool]
PRIOR = 0.01
# Of stored embeddings a split draws so many classes, at most, and images of each.
CLASSES, IMAGES = 120, 12
COMPONENTS = 64


def made_classes(rng: np.random.Generator, classes: int = 60, images: int = IMAGES) -> Classes:
    """Return unit vectors (N, 16) around random centers, and their labels."""
    labels = np.repeat(np.arange(classes), images)
    centers = rng.normal(size=(classes, 16))
    widths = rng.uniform(0.2, 0.7, classes)
    vectors = centers[labels] + widths[labels, None] * rng.normal(size=(len(labels), 16))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels


def made_sides(rng: np.random.Generator) -> list[Classes]:
    """Return two made sets of classes."""
    return [made_classes(rng), made_classes(rng)]


def stored_classes(path: str) -> Classes:
    """Return embeddings of a file in their 64 principal components, of length 1, and labels."""
    with np.load(path) as file:
        vectors, labels = file["embeddings"], file["labels"]
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = np.linalg.eigh(np.cov(vectors.T))[1]
    vectors = (vectors - vectors.mean(axis=0)) @ directions[:, -COMPONENTS:]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels


def halves(
    rng: np.random.Generator, stored: Classes, classes: int = CLASSES, images: int = IMAGES
) -> list[Classes]:
    """Return images of so many classes, drawn at random, in two halves."""
    vectors, labels = stored
    drawn = rng.permutation(np.unique(labels))[:classes]
    sides = []
    for half in np.array_split(drawn, 2):
        rows = [rng.permutation(np.flatnonzero(labels == name))[:images] for name in half]
        numbers = np.repeat(np.arange(len(half)), list(map(len, rows)))
        sides.append((vectors[np.concatenate(rows)], numbers))
    return sides


def queries_of_one_gallery(first: Classes, second: Classes) -> list[dict[str, np.ndarray]]:
    """Return twice the arguments of a search: of a gallery of every second image of half of the
    classes of both sides, by the other images of the first side and of the second."""
    chosen = []
    for _, labels in (first, second):
        classes = np.unique(labels)
        known = np.isin(labels, classes[: len(classes) // 2])
        chosen.append(known & (np.arange(len(labels)) % 2 == 0))
    gallery = np.concatenate([first[0][chosen[0]], second[0][chosen[1]]])
    # The classes of the second side have other ids than those of the first.
    labels = [first[1], second[1] + first[1].max() + 1]
    gallery_labels = np.concatenate([labels[0][chosen[0]], labels[1][chosen[1]]])
    searches = []
    for side, (vectors, _) in enumerate((first, second)):
        queries = {"embeddings": vectors[~chosen[side]], "labels": labels[side][~chosen[side]]}
        searches.append({**queries, "gallery": gallery, "gallery_labels": gallery_labels})
    return searches


def held(intervals: Mapping[str, Interval], rates: Mapping[str, float]) -> Outcome:
    """Return by rate whether it is in its interval."""
    outcome = {}
    for name, value in rates.items():
        outcome[name] = intervals[name].low <= value <= intervals[name].high
    return outcome


def pair_rates(calibration: Calibration, images: Classes, prior: float | None) -> dict[str, float]:
    """Return the rates of pairs of other images at a threshold."""
    point = accepted_rates(*images, calibration.threshold)
    rates = {name: getattr(point, name).mean for name in ("far", "tar", "precision")}
    if prior is not None:
        accepted = prior * rates["tar"], (1 - prior) * rates["far"]
        rates["precision"] = accepted[0] / sum(accepted)
    return rates


def by_far(first: Classes, second: Classes) -> Outcome:
    """Calibrate pairs for a false accept rate."""
    calibration = calibrate(*first, far=0.01)
    return held(calibration.rates, pair_rates(calibration, second, None))


def by_precision(first: Classes, second: Classes) -> Outcome:
    """Calibrate pairs for a precision."""
    calibration = calibrate(*first, precision=0.8, prior=PRIOR)
    return held(calibration.rates, pair_rates(calibration, second, PRIOR))


def among_themselves(first: Classes, second: Classes) -> Outcome:
    """Calibrate searches of the images themselves, each without its own class."""
    calibration = calibrate(*first, fpir=0.05)
    rates = identification_rates(*second, calibration.threshold)
    return held(calibration.rates, {name: rate.mean for name, rate in rates.items()})


def in_one_gallery(first: Classes, second: Classes) -> Outcome:
    """Calibrate searches of a gallery that stays."""
    ours, theirs = queries_of_one_gallery(first, second)
    calibration = calibrate(**ours, fpir=0.05)
    rates = identification_rates(threshold=calibration.threshold, **theirs)
    return held(calibration.rates, {name: rate.mean for name, rate in rates.items()})


def in_other_sizes(first: Classes, second: Classes) -> Outcome:
    """Calibrate searches of a gallery, half of the classes of the first side, by the other half;
    and measure other strangers in half of that gallery, the mean of random halves, and in one of
    twice its size."""
    (gallery, strangers), (others, more) = map(parted, (first, second))
    calibration = calibrate(*strangers, gallery=gallery[0], gallery_labels=gallery[1], fpir=0.05)
    in_first = within(others[0], gallery, calibration.threshold)
    in_more = within(others[0], more, calibration.threshold)
    count = in_first.shape[1]
    rng = np.random.default_rng(0)
    parts = [in_first[:, rng.permutation(count)[: count // 2]] for _ in range(40)]
    rate_by_size = {
        0.5: np.mean([part.any(axis=1).mean() for part in parts]),
        1: in_first.any(axis=1).mean(),
        2: (in_first.any(axis=1) | in_more.any(axis=1)).mean(),
    }
    intervals = {}
    rates = {}
    for times, rate in rate_by_size.items():
        name = f"fpir in {times:g} times the size"
        intervals[name] = calibration.fpir_among(round(times * len(gallery[0])))
        rates[name] = rate
    return held(intervals, rates)


def parted(side: Classes) -> tuple[Classes, Classes]:
    """Return the images of half of the classes, and those of the others."""
    vectors, labels = side
    is_first = labels < np.median(np.unique(labels))
    return (vectors[is_first], labels[is_first]), (vectors[~is_first], labels[~is_first])


def within(queries: np.ndarray, gallery: Classes, threshold: float) -> np.ndarray:
    """Return (N, C), whether a query is within the threshold of an image of each class."""
    vectors, labels = gallery
    is_near = 2 - 2 * queries @ vectors.T <= threshold**2
    return np.stack([is_near[:, labels == name].any(axis=1) for name in np.unique(labels)], axis=1)


CALIBRATIONS = {
    "pairs, far=0.01": by_far,
    f"pairs, precision=0.8, prior={PRIOR}": by_precision,
    "searches without the own class, fpir=0.05": among_themselves,
    "searches of a gallery, fpir=0.05": in_one_gallery,
    "searches of galleries of other sizes, fpir=0.05": in_other_sizes,
}


def coverage(
    draw: Callable[[np.random.Generator], list[Classes]], calibrations: list[str], splits: int
) -> dict[str, float]:
    """Return by calibration and rate the share of splits whose interval holds the other rate."""
    hits: dict[str, list[bool]] = collections.defaultdict(list)
    for seed in range(splits):
        sides = draw(np.random.default_rng(seed))
        for name in calibrations:
            for rate, is_held in CALIBRATIONS[name](*sides).items():
                hits[f"{name}: {rate}"].append(is_held)
    return {name: float(np.mean(of_splits)) for name, of_splits in hits.items()}


def main() -> None:
    """Print the coverage of each interval, and write it to `--json`."""
    parser = command_line(__doc__)
    parser.add_argument("--embeddings", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--calibrations", nargs="*", default=list(CALIBRATIONS))
    parser.add_argument("--splits", type=int, default=300)
    flags = parser.parse_args()
    draws: dict[str, Callable] = {"made": made_sides}
    if flags.embeddings:
        draws = {}
    for text in flags.embeddings:
        name, _, path = text.partition("=")
        draws[name] = functools.partial(halves, stored=stored_classes(path))
    results = Results(flags.json)
    for name, draw in draws.items():
        add = results.table(name, "calibrated: rate", "in its interval")
        for key, share in coverage(draw, flags.calibrations, flags.splits).items():
            add(key, f"{share:.3f}")


if __name__ == "__main__":
    main()
