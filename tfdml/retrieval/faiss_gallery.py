"""faiss, in a folder: this library's own exact search and `GalleryIndex`, with the rows in one archive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.embeddings.output_folder import write_archive
from tfdml.errors import UserError, short_message
from tfdml.evaluation.search.exact import nearest_neighbours
from tfdml.evaluation.search.index import GalleryIndex, build_index, load_index
from tfdml.retrieval.database import About, GalleryDatabase
from tfdml.retrieval.rows import Rows
from tfdml.special_files import require_regular

_ATTRIBUTE = "attribute."


class FaissGallery(GalleryDatabase):
    """A gallery in files, held in memory while it is open.

    `TABLE.npz` holds rows and attributes, `TABLE.index` the approximate index. It is written whole, when it is closed
    and each time that it has doubled; of two processes that write, the later wins.

    Args:
        address: `faiss:///folder`.
    """

    batch_rows = 100_000
    _index: GalleryIndex | None = None

    def _open(self) -> str | bytes | None:
        self._ids: list[str] = []
        self._row_of: dict[str, int] = {}
        self._held = np.zeros((0, 0), np.float32)  # with room for more
        self._columns: dict[str, list[Any]] = {}
        self._saved, self._changed = 0, False
        if not self._archive.exists():
            return None
        try:
            require_regular(self._archive)
            with np.load(self._archive) as archive:
                arrays = {name: archive[name] for name in archive.files}
            self._held, self._ids = arrays["embeddings"], arrays["names"].tolist()
            about = str(arrays["about"])
        except Exception as error:  # whatever NumPy raises on a damaged file
            raise UserError(f"{self._archive} cannot be read: {short_message(error)}") from error
        self._columns = {
            name.removeprefix(_ATTRIBUTE): arrays[name].tolist() for name in arrays if name.startswith(_ATTRIBUTE)
        }
        self._row_of = {name: row for row, name in enumerate(self._ids)}
        self._saved = len(self._ids)
        sizes = {len(self._held), len(self._row_of), *map(len, self._columns.values())}
        if self._held.ndim != 2 or sizes != {len(self._ids)}:
            raise UserError(f"{self._archive} is damaged: its arrays are of different lengths; write it again")
        return about

    @property
    def _archive(self) -> Path:
        return Path(self.address.path, f"{self.address.table}.npz")

    @property
    def _index_file(self) -> Path:
        return self._archive.with_suffix(".index")

    @property
    def _vectors(self) -> np.ndarray:
        return self._held[: len(self._ids)]

    def _create(self, about: About) -> None:
        self._archive.parent.mkdir(parents=True, exist_ok=True)
        self._held = np.zeros((0, about.dimension), np.float32)
        self._columns = {name: [] for name in about.attributes}
        self._changed = True

    def _upsert(self, rows: Rows) -> None:
        for name in rows.ids:
            if name not in self._row_of:
                self._row_of[name] = len(self._ids)
                self._ids.append(name)
                for column in self._columns.values():
                    column.append(None)
        if len(self._held) < len(self._ids):
            room = np.empty((max(len(self._ids), 2 * len(self._held)), self._held.shape[1]), np.float32)
            room[: len(self._held)] = self._held
            self._held = room
        places = [self._row_of[name] for name in rows.ids]
        self._held[places] = rows.vectors
        for name, values in rows.attributes.items():
            for place, value in zip(places, values, strict=True):
                self._columns[name][place] = value
        self._changed, self._index = True, None
        if len(self._ids) >= 2 * max(self._saved, self.batch_rows):
            self._save()

    def _delete(self, ids: list[str]) -> int:
        gone = {self._row_of[name] for name in ids if name in self._row_of}
        if gone:
            kept = [row for row in range(len(self._ids)) if row not in gone]
            self._held, self._ids = self._held[kept], [self._ids[row] for row in kept]
            self._columns = {name: [column[row] for row in kept] for name, column in self._columns.items()}
            self._row_of = {name: row for row, name in enumerate(self._ids)}
            self._changed, self._index = True, None
        return len(gone)

    def _nearest(self, vectors: np.ndarray, k: int, conditions: dict[str, Any]) -> list[Rows]:
        among = self._among(conditions)
        available = len(self._ids) if among is None else int(among.sum())
        if not available:
            return [self._take(np.zeros(0, np.int64))] * len(vectors)
        k, distance = min(k, available), self._kept_distance
        if self.approximate:
            effort = self.address.options.get("effort")
            found, _ = self._built().search(vectors, k=k, effort=effort, among=among)
        elif among is None:
            found, _ = nearest_neighbours(vectors, self._vectors, k=k, distance=distance)
        else:
            rows = np.flatnonzero(among)
            found = rows[nearest_neighbours(vectors, self._vectors[rows], k=k, distance=distance)[0]]
        return [self._take(rows[rows >= 0]) for rows in found]

    @property
    def _kept_distance(self) -> str:
        """Of vectors that have length 1 for `cosine`."""
        return "dot" if self._by_product else "sqeuclidean"

    def _among(self, conditions: dict[str, Any]) -> np.ndarray | None:
        """(N,) bool, the rows with these values; None for all."""
        if not conditions:
            return None
        masks = [
            np.fromiter((held == value for held in self._columns[name]), bool, len(self._ids))
            for name, value in conditions.items()
        ]
        return np.logical_and.reduce(masks)

    def _take(self, rows: np.ndarray) -> Rows:
        attributes = {name: [column[row] for row in rows] for name, column in self._columns.items()}
        return Rows([self._ids[row] for row in rows], self._held[rows], attributes)

    def _built(self) -> GalleryIndex:
        """The index that the address names, of the rows as they are."""
        kind, options = self.address.index, self.address.options
        if self._index is None and not self._changed and self._index_file.exists():
            index = load_index(self._index_file)
            as_wanted = index.kind == kind and options.get("lists", index.lists) == index.lists
            if as_wanted and len(index) == len(self._ids) and index.distance == self._kept_distance:
                self._index = index
        if self._index is None:
            further: dict[str, Any] = {name: options[name] for name in ("lists", "links") if name in options}
            self._index = build_index(self._vectors, kind=kind, distance=self._kept_distance, **further)
        return self._index

    def _count(self, conditions: dict[str, Any]) -> int:
        among = self._among(conditions)
        return len(self._ids) if among is None else int(among.sum())

    def _rows(self) -> Iterator[Rows]:
        for start in range(0, len(self._ids), self.batch_rows):
            yield self._take(np.arange(start, min(start + self.batch_rows, len(self._ids))))

    def _optimize(self) -> None:
        self._save()
        if self.address.index:
            self._built().save(self._index_file)

    def _save(self) -> None:
        assert self.about is not None
        if self._changed:
            # An index beside an archive is of that archive.
            self._index_file.unlink(missing_ok=True)
            arrays = {"about": np.array(self.about.text()), "embeddings": self._vectors, "names": np.array(self._ids)}
            columns = {f"{_ATTRIBUTE}{name}": np.array(column) for name, column in self._columns.items()}
            write_archive(self._archive, {**arrays, **columns})
            self._saved, self._changed = len(self._ids), False

    def _close(self) -> None:
        if self.about is not None:
            self._save()
