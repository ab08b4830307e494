"""What a data set is to the rest of the library: images that can be read by index, and their labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdml.data.images import Images
from tfdml.errors import UserError


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """Labelled images, one split of a data set.

    Args:
        name: The catalogue's name of the data set, e.g. `"cars196"`.
        split: `"train"` or `"test"`: their classes are disjoint; `"query"` or `"gallery"` for a part of the test split.
        images: Where the images are.
        labels: (N,) int64 class ids. A class keeps its id whatever the order of the files; the ids of a split need
            not start at 0 nor be contiguous (see `contiguous`).
        class_names: The name of each class id that occurs.
        super_labels: (N,) int64 ids of the coarser class of each image, such as the kind of product; None where the
            data set has none.
        is_query: (N,) bool, where the data set says which test images are queries and which are the gallery that they
            are looked up in; None for all-to-all retrieval.

    Raises:
        UserError: There is no image, or labels and images differ in number.
    """

    name: str
    split: str
    images: Images
    labels: np.ndarray
    class_names: dict[int, str]
    super_labels: np.ndarray | None = None
    is_query: np.ndarray | None = None

    def __post_init__(self):
        labels = np.asarray(self.labels, np.int64)
        object.__setattr__(self, "labels", labels)
        if labels.shape != (len(self.images),):
            raise UserError(f"{self.name}: {len(self.images)} images but labels of shape {labels.shape}")
        if not len(labels):
            raise UserError(f"{self.name}: the {self.split} split has no image")
        for field, dtype in (("super_labels", np.int64), ("is_query", np.bool_)):
            if getattr(self, field) is not None:
                values = np.asarray(getattr(self, field), dtype)
                object.__setattr__(self, field, values)
                if values.shape != labels.shape:
                    raise UserError(f"{self.name}: {len(labels)} images but {field} of shape {values.shape}")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> np.ndarray:
        """The class ids that occur, ascending."""
        return np.unique(self.labels)

    @property
    def num_classes(self) -> int:
        """How many classes occur."""
        return len(self.classes)

    @property
    def queries(self) -> ImageDataset:
        """The queries alone, as a data set of split `"query"`.

        Raises:
            UserError: The data set does not distinguish queries from a gallery, or has no query left.
        """
        return self._role("query", True)

    @property
    def gallery(self) -> ImageDataset:
        """The gallery alone, as a data set of split `"gallery"`.

        Raises:
            UserError: The data set does not distinguish queries from a gallery, or has no gallery left.
        """
        return self._role("gallery", False)

    def take(self, indices: Sequence[int] | np.ndarray) -> ImageDataset:
        """The images at `indices`, in that order."""
        indices = np.asarray(indices, np.int64)
        labels = self.labels[indices]
        return dataclasses.replace(
            self,
            images=self.images.take(indices),
            labels=labels,
            class_names={int(c): self.class_names[int(c)] for c in np.unique(labels)},
            super_labels=None if self.super_labels is None else self.super_labels[indices],
            is_query=None if self.is_query is None else self.is_query[indices],
        )

    def select_classes(self, classes: Sequence[int] | np.ndarray) -> ImageDataset:
        """The images of the classes given, in their present order."""
        return self.take(np.flatnonzero(np.isin(self.labels, np.asarray(classes, np.int64))))

    def contiguous(self) -> ImageDataset:
        """The same images with class ids 0 .. num_classes - 1, in ascending order of the old ids."""
        classes, labels = np.unique(self.labels, return_inverse=True)
        names = {new: self.class_names[int(old)] for new, old in enumerate(classes)}
        return dataclasses.replace(self, labels=labels.astype(np.int64), class_names=names)

    def _role(self, split: str, is_query: bool) -> ImageDataset:
        if self.is_query is None:
            raise UserError(f"{self.name}: the {self.split} split is not divided into queries and a gallery")
        rows = np.flatnonzero(self.is_query == is_query)
        if not len(rows):
            raise UserError(f"{self.name}: the {self.split} split has no {split} image")
        return dataclasses.replace(self.take(rows), split=split, is_query=None)
