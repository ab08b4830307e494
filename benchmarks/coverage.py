"""Count how often intervals of thresholds hold what they promise, on made images or on stored ones.

  python -m benchmarks.coverage
  python -m benchmarks.coverage --embeddings=vectors.npz --splits=100

Each split calibrates on some classes and measures on as many others. An interval at 95 % should
hold the other classes' rate in 93 to 97 % of 300 splits. Made images are unit vectors around random
centers, of classes that are wider or narrower. Stored ones are an `.npz` with
`embeddings` and `labels`, whose classes are halved at random. NumPy alone, two minutes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation import Calibration, accepted_rates, calibrate, identification_rates

Classes = tuple[np.ndarray, np.ndarray]
PRIOR = 0.01


def made_classes(rng: np.random.Generator, classes: int = 60, images: int = 12) -> Classes:
    """Return unit vectors (N, 16) around random centers, and their labels."""
    labels = np.repeat(np.arange(classes), images)
    centers = rng.normal(size=(classes, 16))
    widths = rng.uniform(0.2, 0.7, classes)
    vectors = centers[labels] + widths[labels, None] * rng.normal(size=(len(labels), 16))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), labels


def halves(rng: np.random.Generator, vectors: np.ndarray, labels: np.ndarray) -> list[Classes]:
    """Return the images of both halves of the classes, drawn at random."""
    classes = rng.permutation(np.unique(labels))
    first = np.isin(labels, classes[: len(classes) // 2])
    return [(vectors[side], labels[side]) for side in (first, ~first)]


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


def pair_rates(calibration: Calibration, images: Classes, prior: float | None) -> dict[str, float]:
    """Return the rates of pairs of other images at a threshold."""
    point = accepted_rates(*images, calibration.threshold)
    rates = {name: getattr(point, name).mean for name in ("far", "tar", "precision")}
    if prior is not None:
        accepted = prior * rates["tar"], (1 - prior) * rates["far"]
        rates["precision"] = accepted[0] / sum(accepted)
    return rates


def outcomes(first: Classes, second: Classes) -> Iterator[tuple[str, Calibration, dict]]:
    """Yield what is calibrated, the calibration, and the rates of the other classes."""
    by_far = calibrate(*first, far=0.01)
    yield "pairs, far=0.01", by_far, pair_rates(by_far, second, None)
    with contextlib.suppress(UserError):  # images too much alike for it
        by_precision = calibrate(*first, precision=0.8, prior=PRIOR)
        name = f"pairs, precision=0.8, prior={PRIOR}"
        yield name, by_precision, pair_rates(by_precision, second, PRIOR)
    among = calibrate(*first, fpir=0.05)
    measured = identification_rates(*second, among.threshold)
    yield "searches without the own class, fpir=0.05", among, _means(measured)
    ours, theirs = queries_of_one_gallery(first, second)
    in_gallery = calibrate(**ours, fpir=0.05)
    measured = identification_rates(threshold=in_gallery.threshold, **theirs)
    yield "searches of a gallery, fpir=0.05", in_gallery, _means(measured)


def _means(rates: dict) -> dict[str, float]:
    return {name: rate.mean for name, rate in rates.items()}


def coverage(draw: Callable[[np.random.Generator], list[Classes]], splits: int) -> list[dict]:
    """Return by calibration and rate the share of splits whose interval holds the other rate, and
    how many splits have that calibration."""
    hits: dict[str, list[bool]] = collections.defaultdict(list)
    for seed in range(splits):
        for name, calibration, measured in outcomes(*draw(np.random.default_rng(seed))):
            for rate, value in measured.items():
                interval = calibration.rates[rate]
                hits[f"{name}: {rate}"].append(interval.low <= value <= interval.high)
    shares = {name: float(np.mean(held)) for name, held in hits.items()}
    return [shares, {name: len(held) for name, held in hits.items()}]


def main() -> None:
    """Print the coverage of each interval, and write it to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--embeddings", default="")
    parser.add_argument("--splits", type=int, default=300)
    parser.add_argument("--json", default="")
    flags = parser.parse_args()
    if flags.embeddings:
        with np.load(flags.embeddings) as file:
            vectors, labels = file["embeddings"], file["labels"]
        found, counts = coverage(lambda rng: halves(rng, vectors, labels), flags.splits)
    else:
        found, counts = coverage(lambda rng: [made_classes(rng), made_classes(rng)], flags.splits)
    for name, share in found.items():
        print(f"{name:<52}{share:6.3f}  of {counts[name]}")
    if flags.json:
        Path(flags.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
