"""Compare what stands for a class of several images: nearest, mean and max_of_means.

  python -m benchmarks.identities --embeddings=vectors.npz --splits=20

`vectors.npz` has `embeddings` and `labels` of classes that the embedder was not trained on. Each
split halves the classes at random, and each half has a gallery of so many images of half of its
classes. The other images of these classes are known queries, the images of the other classes
strangers. The threshold at FPIR 5 % comes from one half, the rates from the other. Where a gallery
has all images of its classes, each is left out in turn. NumPy alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.evaluation.identification import Searches, largest_threshold
from tfdml.registry import PER_CLASS
from tfdml.retrieval.exact import unit_rows

FPIR = 0.05
COLUMNS = ("images a class", "per_class", "FPIR", "TPIR", "nearest class is right")


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


def row_of(vectors: np.ndarray, labels: np.ndarray, rule: str, images: int, splits: int) -> list:
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
    return [str(images), rule, *cells]


def main() -> None:
    """Print the table of stored embeddings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--embeddings", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--images", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    with np.load(flags.embeddings) as stored:
        vectors = np.asarray(unit_rows(stored["embeddings"]), np.float32)
        labels = stored["labels"]
    rows = []
    for images in flags.images:
        for rule in PER_CLASS:
            rows.append(row_of(vectors, labels, rule, images, flags.splits))
            print("  ".join(rows[-1]), flush=True)
    if flags.out:
        table = {"columns": COLUMNS, "rows": rows}
        flags.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
