"""Compare what stands for a class of several images: nearest, mean and max_of_means.

  python -m benchmarks.identities --embeddings Cars-196=cars.npz Omniglot=omniglot.npz

Each file has `embeddings` and `labels` of classes that the embedder was not trained on. Each split
halves the classes at random, and each half has a gallery of so many images of half of its classes.
The other images of these classes are known queries, the images of the other classes strangers. The
threshold at FPIR 5 % comes from one half, the rates from the other. Where a gallery has all images
of its classes, each is left out in turn. NumPy alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tfdml.evaluation.identification import Searches, largest_threshold
from tfdml.registry import PER_CLASS
from tfdml.retrieval.exact import unit_rows
from tools.numbers import Results, command_line

FPIR = 0.05
COLUMNS = ("data", "images a class", "`per_class`", "FPIR", "TPIR", "nearest class is right")


@dataclasses.dataclass(frozen=True)
class Side:
    """Half of the classes: the rows of the gallery, of known queries and of strangers."""

    vectors: np.ndarray
    labels: np.ndarray
    gallery: np.ndarray
    known: np.ndarray
    strangers: np.ndarray

    @classmethod
    def drawn(
        cls, rng: np.random.Generator, vectors: np.ndarray, labels: np.ndarray, images: int
    ) -> Side:
        """Draw a gallery of so many images of half of the classes."""
        classes = rng.permutation(np.unique(labels))
        rows = [rng.permutation(np.flatnonzero(labels == label)) for label in classes]
        half = len(classes) // 2
        gallery = np.concatenate([part[:images] for part in rows[:half]])
        known = np.concatenate([part[images:] for part in rows[:half]])
        return cls(vectors, labels, gallery, known, np.concatenate(rows[half:]))

    def searches(self, rule: str, queries: np.ndarray, own_rows: Any = None) -> Searches:
        """Return what queries find in the gallery."""
        sides = [self.vectors[queries], self.labels[queries]]
        sides += [self.vectors[self.gallery], self.labels[self.gallery]]
        return Searches(*sides, own_rows, per_class=rule)

    def threshold(self, rule: str) -> float:
        """Return the threshold at which a share `FPIR` of the strangers is accepted."""
        distances = self.searches(rule, self.strangers).unknown
        return largest_threshold(distances, FPIR, "euclidean")

    def rates(self, rule: str, threshold: float) -> tuple[float, float, float]:
        """Return FPIR and TPIR at a threshold, and how often the nearest class is right."""
        strangers = self.searches(rule, self.strangers).unknown
        known = self.searches(rule, self.known) if len(self.known) else None
        if known is None:
            known = self.searches(rule, self.gallery, np.arange(len(self.gallery)))
        answered = known.right & (known.nearest <= threshold)
        return np.mean(strangers <= threshold), np.mean(answered), np.mean(known.right)


def cells_of(
    vectors: np.ndarray, labels: np.ndarray, rule: str, images: int, splits: int
) -> list[str]:
    """Return the rates of a rule: means, and the middle 95 % of the splits."""
    values = []
    for split in range(splits):
        rng = np.random.default_rng(split)
        sides = []
        for classes in np.array_split(rng.permutation(np.unique(labels)), 2):
            mask = np.isin(labels, classes)
            sides.append(Side.drawn(rng, vectors[mask], labels[mask], images))
        values.append(sides[1].rates(rule, sides[0].threshold(rule)))
    cells = []
    for column in 100 * np.array(values).T:
        low, high = np.quantile(column, (0.025, 0.975))
        cells.append(f"{column.mean():.1f} % [{low:.1f}, {high:.1f}]")
    return cells


def rules_of(images: int) -> dict[str, str]:
    """Return the rules by what is printed of them; they are one where a class has one image."""
    if images == 1:
        return {"any": "nearest"}
    return {f"`{rule}`": rule for rule in PER_CLASS}


def main() -> None:
    """Print the table, and write it to `--json`."""
    parser = command_line(__doc__)
    parser.add_argument("--embeddings", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 5, 20])
    flags = parser.parse_args()
    add = Results(flags.json).table("table", *COLUMNS)
    for text in flags.embeddings:
        name, _, path = text.partition("=")
        with np.load(path) as stored:
            vectors = np.asarray(unit_rows(stored["embeddings"]), np.float32)
            labels = stored["labels"]
        for images in flags.images:
            for label, rule in rules_of(images).items():
                cells = cells_of(vectors, labels, rule, images, flags.splits)
                add(name, images, label, *cells)


if __name__ == "__main__":
    main()
