"""Galleries too large to be read for every query: a faiss index, and how much of the exact answer it finds."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.errors import UserError

FILE = "gallery.faiss"
# What recall is measured at, and on how many queries.
_NEIGHBOURS = 10
_QUERIES = 500
# faiss asks for 39 vectors a cell at least and uses 256 at most.
_TRAINED_ON = 64
_SMALLEST_CELL = 39


@dataclasses.dataclass(frozen=True)
class GalleryIndex:
    """An inverted file over cells of the embedding space, of which a search visits the nearest ones.

    Args:
        index: The `faiss.IndexIVFFlat`; it holds the embeddings as they are.
        card: `cells`, `cells_searched`, and the measured `recall@10`.
    """

    index: Any
    card: dict[str, Any]

    @classmethod
    def build(cls, embeddings: np.ndarray, recall: float = 0.99, like: GalleryIndex | None = None) -> GalleryIndex:
        """Index embeddings, and search as few cells as the wanted recall takes.

        Recall@10 is the mean share of a query's 10 exact neighbours that are among its 10 found ones. It is measured on
        500 embeddings of the gallery, spread evenly over it, each left out of its own neighbours. Queries of classes
        that the gallery does not hold may find less.

        Args:
            embeddings: (N, d) float32 of length 1.
            recall: Recall@10 to reach, as a fraction.
            like: An index of a gallery of nearly the same items, whose cells are taken over, which saves their search.

        Raises:
            UserError: The recall is not a fraction.
        """
        import faiss

        if not 0 < recall <= 1:
            raise UserError(f"recall={recall}: must be a fraction above 0")
        count, dimensions = embeddings.shape
        if like is not None and count / 2 <= like.index.ntotal <= 2 * count:
            cells, centroids = like.index.nlist, like.index.quantizer.reconstruct_n(0, like.index.nlist)
        else:
            cells = max(1, min(int(4 * count**0.5), count // _SMALLEST_CELL))
            rows = np.linspace(0, count - 1, min(count, _TRAINED_ON * cells)).astype(int)
            means = faiss.Kmeans(dimensions, cells, niter=10, seed=0, max_points_per_centroid=_TRAINED_ON)
            means.train(embeddings[rows])
            centroids = means.centroids
        quantizer = faiss.IndexFlatL2(dimensions)
        quantizer.add(centroids)
        index = faiss.IndexIVFFlat(quantizer, dimensions, cells, faiss.METRIC_L2)
        index.is_trained = True
        index.add(embeddings)
        return cls(index, _tuned(index, embeddings, recall))

    def __len__(self) -> int:
        return self.index.ntotal

    def embeddings(self) -> np.ndarray:
        """(N, d) float32, as they were indexed."""
        return self.index.reconstruct_n(0, self.index.ntotal)

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows found for each query, nearest first, equally near ones by row.

        Args:
            queries: (B, d) float32 of length 1.
            k: How many.

        Returns:
            (B, min(k, N)) int64 rows and float32 squared distances.
        """
        k = min(k, self.index.ntotal)
        squares, rows = _search(self.index, queries, k, self.card["cells_searched"])
        # The cells that were searched may hold fewer than k; all of them hold enough.
        short = np.flatnonzero((rows < 0).any(axis=1))
        if len(short):
            squares[short], rows[short] = _search(self.index, queries[short], k, self.index.nlist)
        order = np.lexsort((rows, squares), axis=1)
        return np.take_along_axis(rows, order, 1), np.take_along_axis(squares, order, 1)

    def write(self, folder: Path) -> None:
        """Write the index into a version's folder."""
        import faiss

        faiss.write_index(self.index, os.fspath(folder / FILE))

    @classmethod
    def read(cls, folder: Path, card: dict[str, Any]) -> GalleryIndex:
        """Read a version's index into memory.

        Raises:
            UserError: It cannot be read.
        """
        import faiss

        try:
            index = faiss.read_index(os.fspath(folder / FILE))
        except RuntimeError as error:
            raise UserError(f"{folder / FILE} cannot be read: {str(error).splitlines()[0][:300]}") from error
        if not isinstance(index, faiss.IndexIVFFlat):
            raise UserError(f"{folder / FILE} is an index of another kind, {type(index).__name__}; build it again")
        return cls(index, card)


def _search(index: Any, queries: np.ndarray, k: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    import faiss

    # Parameters of the call, not of the index, which other threads search.
    parameters = faiss.SearchParametersIVF()
    parameters.nprobe = cells
    return index.search(np.ascontiguousarray(queries), k, params=parameters)


def _tuned(index: Any, embeddings: np.ndarray, wanted: float) -> dict[str, Any]:
    import faiss

    count = len(embeddings)
    rows = np.unique(np.linspace(0, count - 1, min(count, _QUERIES)).astype(int))
    queries, k = embeddings[rows], min(_NEIGHBOURS + 1, count)
    exact = _without_self(faiss.knn(queries, embeddings, k)[1], rows)
    cells, found = 1, 0.0
    while True:
        near = _without_self(_search(index, queries, k, cells)[1], rows)
        hits = [len(set(a) & set(b)) / max(1, len(a)) for a, b in zip(exact, near, strict=True)]
        found = float(np.mean(hits)) if k > 1 else 1.0
        if found >= wanted or cells == index.nlist:
            break
        cells = min(2 * cells, index.nlist)
    return {
        "type": "IVFFlat, L2",
        "cells": index.nlist,
        "cells_searched": cells,
        f"recall@{_NEIGHBOURS}": found,
        "measured_on": f"{len(rows)} items of the gallery, each left out of its own neighbours",
    }


def _without_self(found: np.ndarray, rows: np.ndarray) -> list[list[int]]:
    return [
        [other for other in near if other not in (row, -1)][:_NEIGHBOURS]
        for near, row in zip(found.tolist(), rows, strict=True)
    ]
