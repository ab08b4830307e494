"""Pictures inside a report: the images of a data set, small copies of them, and sheets of many."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset


def thumbnail(image: np.ndarray, size: int, quality: int = 80) -> str:
    """`image` (H, W, 3) uint8 as a JPEG data URI whose longer side is at most `size`."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(image, np.uint8))
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def sprite_sheet(images: Iterable[np.ndarray], count: int, size: int, columns: int, quality: int = 60) -> str:
    """Many small pictures in one: a WebP data URI, `columns` cells a row, each `size` pixels square.

    Args:
        images: (H, W, 3) uint8, taken one at a time; each is scaled to fit its cell, transparent around it.
        count: How many there are.
        size: Side of a cell in pixels.
        columns: Cells per row.
        quality: Of the WebP.

    Returns:
        The data URI; picture i is in row i // columns, column i % columns.
    """
    from PIL import Image

    rows = -(-count // columns)
    sheet = Image.new("RGBA", (min(count, columns) * size, rows * size), (0, 0, 0, 0))
    for place, image in enumerate(images):
        picture = Image.fromarray(np.ascontiguousarray(image, np.uint8))
        picture.thumbnail((size, size), Image.Resampling.LANCZOS, reducing_gap=2.0)
        row, column = divmod(place, columns)
        left, top = (size - picture.width) // 2, (size - picture.height) // 2
        sheet.paste(picture, (column * size + left, row * size + top))
    buffer = io.BytesIO()
    sheet.save(buffer, "WEBP", quality=quality, method=4)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The images of a data set, or some of them, that a page may show.

    Args:
        dataset: The images, their labels and names.
        rows: (n,) which images of `dataset`; None: all.
    """

    dataset: ImageDataset
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    @property
    def labels(self) -> np.ndarray:
        """(n,) class ids."""
        return self.dataset.labels if self.rows is None else self.dataset.labels[self.rows]

    def name(self, index: int) -> str:
        """The name of one image."""
        return self.dataset.images.name(self._row(index))

    def class_of(self, index: int) -> str:
        """The name of the class of one image."""
        return self.class_name(self.dataset.labels[self._row(index)])

    def class_name(self, label: int) -> str:
        """The name of a class, or its id where it has none."""
        return str(self.dataset.class_names.get(int(label), label))

    def read(self, index: int) -> np.ndarray:
        """One image, (H, W, 3) uint8."""
        return self.dataset.images.picture(self._row(index))

    def thumbnail(self, index: int, size: int) -> str:
        """One image as a data URI."""
        return thumbnail(self.read(index), size)

    def _row(self, index: int) -> int:
        return int(index if self.rows is None else self.rows[index])
