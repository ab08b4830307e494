"""Names, labels and roles of the images that embeddings are of."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tfdml.errors import UserError

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset


@dataclasses.dataclass(frozen=True)
class ImageTable:
    """The images that embeddings are of, in their order.

    Args:
        names: What each image is called.
        labels: (N,) class ids.
        roles: (N,) of `embeddings_on_disk.ROLE_NAMES`.
        class_names: Names of the class ids.

    Raises:
        UserError: They differ in number.
    """

    names: tuple[str, ...]
    labels: np.ndarray
    roles: np.ndarray
    class_names: dict[int, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "labels", np.asarray(self.labels, np.int64))
        object.__setattr__(self, "roles", np.asarray(self.roles, "<U7"))
        if not len(self.names) == len(self.labels) == len(self.roles):
            raise UserError(f"{len(self.names)} names, {len(self.labels)} labels and {len(self.roles)} roles")

    @classmethod
    def of(cls, splits: Sequence[ImageDataset], directory: str | os.PathLike = "") -> ImageTable:
        """The images of several splits, one after another.

        Args:
            splits: The splits; one named `"train"` holds training images, one named `"all"` images to measure.
            directory: Where the data set lies, or the file that lists it: names of files below it become relative to
                it, so that they mean the same wherever it lies.
        """
        directory = os.fspath(directory)
        base = directory if os.path.isdir(directory) else os.path.dirname(directory)
        prefix = os.path.join(base, "") if base else ""
        names = [part.images.name(index).removeprefix(prefix) for part in splits for index in range(len(part))]
        roles = [
            np.full(len(part), "test" if part.split == "all" else part.split, "<U7")
            if part.is_query is None
            else np.where(part.is_query, "query", "gallery")
            for part in splits
        ]
        class_names = {label: name for part in splits for label, name in part.class_names.items()}
        labels = np.concatenate([part.labels for part in splits])
        return cls(tuple(names), labels, np.concatenate(roles), class_names)

    def __len__(self) -> int:
        return len(self.names)

    def checksum(self) -> str:
        """SHA-256 of names, labels and roles, as `"sha256:..."`."""
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        digest.update(self.labels.astype("<i8").tobytes() + self.roles.astype("<U7").tobytes())
        return f"sha256:{digest.hexdigest()}"

    def columns(self, rows: slice) -> dict[str, list]:
        """What `tfdml.embeddings.parquet.table_of` takes of some of the images."""
        labels = self.labels[rows].tolist()
        return {
            "id": list(range(*rows.indices(len(self)))),
            "path": list(self.names[rows]),
            "label": labels,
            "class": [str(self.class_names.get(label, label)) for label in labels],
            "role": self.roles[rows].tolist(),
        }

    def write(self, path: Path) -> None:
        """A CSV file with the columns id, label, class and role."""
        # Names of files that are no UTF-8 keep their bytes.
        with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["id", "label", "class", "role"])
            for name, label, role in zip(self.names, self.labels.tolist(), self.roles.tolist(), strict=True):
                table.writerow([name, label, self.class_names.get(label, label), role])
