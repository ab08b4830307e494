"""Count how often `tfdml evaluate --watch` reports a week in which nothing has changed.

  python -m benchmarks.weeks --embeddings Cars-196=cars.npz Omniglot=omniglot.npz

Each week draws 120 classes and 18 images of each, made or stored as for `benchmarks.coverage`. Half
of the classes are in the gallery, by a third of their images; the second third are the known
queries of the calibration, the last those of the week. A quarter of the classes are strangers of
the calibration, the last quarter those of the week. At most 5 % of the weeks should have a row
outside its interval. NumPy alone, some minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from benchmarks.coverage import CLASSES, Classes, halves, made_classes, stored_classes
from tfdml.evaluation import calibrate
from tools.numbers import Results, command_line

# Of each class.
IMAGES = 18
# Of a class in a week whose classes are known.
TOGETHER = 5
FPIR = 0.05
# A column: the number of queries, and whether their classes are known.
WEEKS = {
    "60 queries": (60, False),
    "150 queries": (150, False),
    "12 classes of 5": (60, True),
    "30 classes of 5": (150, True),
}


def made_images(rng: np.random.Generator) -> Classes:
    """Return made images of all classes."""
    return made_classes(rng, CLASSES, IMAGES)


def stored_images(rng: np.random.Generator, stored: Classes) -> Classes:
    """Return stored images of as many classes, drawn at random."""
    (first, names), (second, others) = halves(rng, stored, CLASSES, IMAGES)
    return np.concatenate([first, second]), np.concatenate([names, others + names.max() + 1])


def drawn_rows(
    rng: np.random.Generator, labels: np.ndarray, rows: np.ndarray, count: int, together: int
) -> np.ndarray:
    """Draw so many of the rows: each for itself, or so many of a class together."""
    if together == 1:
        return rng.choice(rows, count, replace=False)
    sizes = np.bincount(labels[rows])
    classes = rng.choice(np.flatnonzero(sizes >= together), count // together, replace=False)
    parts = []
    for name in classes:
        parts.append(rng.choice(rows[labels[rows] == name], together, replace=False))
    return np.concatenate(parts)


def is_reported(
    rng: np.random.Generator, images: Classes, count: int, classes_are_known: bool
) -> bool:
    """Return whether a week without a change has a row outside its interval."""
    vectors, labels = images
    order = rng.permutation(labels.max() + 1)
    known, strangers, others = np.split(order, [len(order) // 2, 3 * len(order) // 4])
    thirds = np.zeros(len(labels), int)
    for name in known:
        rows = rng.permutation(np.flatnonzero(labels == name))
        thirds[rows] = np.arange(len(rows)) % 3
    in_gallery = np.isin(labels, known) & (thirds == 0)
    gallery = vectors[in_gallery], labels[in_gallery]
    is_known = np.isin(labels, known) & (thirds == 1)
    queries = is_known | np.isin(labels, strangers)
    sides = {"gallery": gallery[0], "gallery_labels": gallery[1]}
    calibration = calibrate(vectors[queries], labels[queries], fpir=FPIR, **sides)
    share = 1 - is_known.sum() / queries.sum()
    together = TOGETHER if classes_are_known else 1
    unknown = together * rng.binomial(count // together, share)
    of_others = np.flatnonzero(np.isin(labels, others))
    of_known = np.flatnonzero(np.isin(labels, known) & (thirds == 2))
    new_strangers = drawn_rows(rng, labels, of_others, unknown, together)
    new_known = drawn_rows(rng, labels, of_known, count - unknown, together)
    week = np.concatenate([new_strangers, new_known])
    classes = labels[week] if classes_are_known else None
    return calibration.watch(vectors[week], *gallery, classes=classes).has_shifted


def row_of(draw: Callable[[np.random.Generator], Classes], weeks: int) -> list[str]:
    """Return the share of the weeks that are reported, by the queries of a week."""
    cells = []
    for count, classes_are_known in WEEKS.values():
        reports = []
        for seed in range(weeks):
            rng = np.random.default_rng(seed)
            reports.append(is_reported(rng, draw(rng), count, classes_are_known))
        cells.append(f"{100 * np.mean(reports):.1f} %")
    return cells


def main() -> None:
    """Print the table, and write it to `--json`."""
    parser = command_line(__doc__)
    parser.add_argument("--embeddings", nargs="*", default=[], metavar="NAME=FILE")
    parser.add_argument("--weeks", type=int, default=300)
    flags = parser.parse_args()
    add = Results(flags.json).table("table", "weeks with a row outside its interval", *WEEKS)
    add("made", *row_of(made_images, flags.weeks))
    for text in flags.embeddings:
        name, _, path = text.partition("=")
        draw = functools.partial(stored_images, stored=stored_classes(path))
        add(name, *row_of(draw, flags.weeks))


if __name__ == "__main__":
    main()
