"""What a data set is to the rest of the library: images that can be read by index, and their labels."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdml.data.images import ArrayImages, Images
from tfdml.errors import UserError
from tfdml.pairwise import integer_labels

#: What a data set may have of each image besides its class.
_COLUMNS = {"super_labels": np.int64, "is_query": np.bool_, "groups": np.int64, "label_rows": np.int64}
# With fewer images of a class, nobody sees whether it keeps together.
_BALANCED_PER_CLASS = 10


@dataclasses.dataclass(frozen=True, eq=False)
class Protocol:
    """How a benchmark measures its data set, beyond classes, roles and groups. `evaluate_dataset` follows it.

    Args:
        metrics: What it reports, as the `metrics` of `evaluate_retrieval`.
        ks: The K of `recall`.
        ids: (N,) int64, by which `lists` names the images; None where there are no lists.
        lists: By setting, the images that are right for each query and those that are ignored, both as a mapping from
            the query's id to ids. The settings end the names of metrics, such as `"/hard"`; the first is that of every
            other use of the data set.
        levels: (N, L) classes of a hierarchy, the finest level first; None for classes.
        draws: How many times one random image of each class is the gallery and all others are queries; 0 for the roles
            of the data set.
        finds_itself: Whether a query, of a data set without roles, is in its gallery and counts as a right answer.

    Example:
        >>> Protocol(("recall", "map"), ks=(1, 5, 10)).metrics
        ('recall', 'map')
    """

    metrics: tuple[str, ...]
    ks: tuple[int, ...] = (1,)
    ids: np.ndarray | None = None
    lists: Mapping[str, tuple[Mapping[int, Any], Mapping[int, Any]]] | None = None
    levels: np.ndarray | None = None
    draws: int = 0
    finds_itself: bool = False

    @classmethod
    def of_lists(cls, metrics: tuple[str, ...], settings: Mapping[str, tuple[Any, Any]], gallery: int) -> Protocol:
        """Return the protocol of queries, which come first, and of as many gallery images.

        Args:
            metrics: See the class.
            settings: By setting, the gallery rows that are right for each query, and those that are ignored.
            gallery: How many images follow the queries.
        """
        queries = len(next(iter(settings.values()))[0])
        ids = np.concatenate([gallery + np.arange(queries), np.arange(gallery)])
        lists = {name: tuple(dict(zip(ids, side, strict=False)) for side in sides) for name, sides in settings.items()}
        return cls(metrics, ids=ids, lists=lists)  # type: ignore[arg-type]

    def take(self, indices: np.ndarray) -> Protocol:
        """Return the protocol of the images at `indices`, in that order."""
        ids = None if self.ids is None else self.ids[indices]
        return dataclasses.replace(self, ids=ids, levels=None if self.levels is None else self.levels[indices])

    @staticmethod
    def draw(labels: np.ndarray, repeat: int = 0) -> np.ndarray:
        """(N,) bool: all images but one random one of each class, which are the gallery.

        Args:
            labels: (N,) class ids.
            repeat: The seed of the draw.

        Example:
            >>> Protocol.draw(np.array([7, 7, 7, 9])).tolist().count(False)
            2
        """
        shuffled = np.random.default_rng(repeat).permutation(len(labels))
        is_query = np.ones(len(labels), bool)
        is_query[shuffled[np.unique(labels[shuffled], return_index=True)[1]]] = False
        return is_query


@dataclasses.dataclass(frozen=True, eq=False)
class PairList:
    """Pairs or triplets of the images of a data set, given one by one.

    Args:
        rows: (G, 2) rows of the images of each pair, or (G, 3) anchor, positive and negative of each triplet.
        similarities: (G,) of each pair, 1 and 0 or any number; None for triplets.
        threshold: From which similarity on a pair is similar.

    Example:
        >>> PairList(np.array([[0, 1, 2]])).scored().tolist()
        [[0.0, 1.0, 1.0], [0.0, 2.0, 0.0]]
    """

    rows: np.ndarray
    similarities: np.ndarray | None = None
    threshold: float = 0.5

    @property
    def graded(self) -> bool:
        """Whether there are other similarities than 0 and 1."""
        return self.similarities is not None and not np.isin(self.similarities, (0, 1)).all()

    def scored(self) -> np.ndarray:
        """(P, 3) float64: of each pair, once, the two rows in ascending order, and the similarity."""
        if self.similarities is None:
            pairs = [np.insert(self.rows[:, [0, end]].astype(np.float64), 2, 2 - end, axis=1) for end in (1, 2)]
            found = np.concatenate(pairs)
        else:
            found = np.column_stack([self.rows, self.similarities])
        found[:, :2].sort(axis=1)
        return np.unique(found, axis=0)

    def similar(self) -> np.ndarray:
        """(P, 2) the rows of each similar pair."""
        scored = self.scored()
        return scored[scored[:, 2] >= self.threshold, :2].astype(np.int64)

    def checksum(self) -> str:
        """Return what identifies these pairs."""
        return hashlib.sha256(self.scored().tobytes()).hexdigest()

    def take(self, indices: np.ndarray, size: int) -> PairList:
        """Return those whose images all are among the images at `indices` of `size`, as rows of these."""
        place = np.full(size, -1)
        place[indices] = np.arange(len(indices))
        rows = place[self.rows]
        kept = (rows >= 0).all(axis=1)
        return dataclasses.replace(
            self, rows=rows[kept], similarities=None if self.similarities is None else self.similarities[kept]
        )


@dataclasses.dataclass(frozen=True, repr=False)
class ImageDataset:
    """Labelled images, one split of a data set.

    Args:
        name: The catalogue's name of the data set, e.g. `"cars196"`.
        split: `"train"` or `"test"`: their classes are disjoint; `"query"` or `"gallery"` for a part of the test split;
            `"all"` for all images.
        images: Where the images are; or an array (N, H, W, 3) of uint8 pixels 0-255, which becomes `ArrayImages`.
        labels: (N,) integer class ids. A class keeps its id whatever the order of the files; the ids of a split need
            not start at 0 nor be contiguous (see `contiguous`).
        class_names: The name of each class id that occurs; by default its digits.
        super_labels: (N,) int64 ids of the coarser class of each image, such as the kind of product; None where the
            data set has none.
        is_query: (N,) bool, where the data set says which test images are queries and which are the gallery that they
            are looked up in; None for all-to-all retrieval.
        groups: (N,) integer ids of what images of a class must not share to count as found, such as the camera or the
            sequence, see `tfdml.evaluation.Relevance.classes`; None where nothing is ignored.
        protocol: What the data set's benchmark measures, and by what; None for classes alone.
        label_rows: (N, L) integers, where an image has more than its class: label sets as rows of 0 and 1, or levels,
            the finest first, which are those of `protocol`.
        pairs: Pairs or triplets of the images; images of no pair are in no given relation.

    Raises:
        UserError: There is no image, labels and images differ in number, or labels are no integers.

    Example:
        >>> ImageDataset(images=np.zeros((4, 32, 32, 3), np.uint8), labels=[0, 0, 1, 1])
        ImageDataset('images', 'all', images=4, classes=2)
    """

    name: str = "images"
    split: str = "all"
    images: Any = ()  # an array becomes `Images`
    labels: Any = ()
    class_names: dict[int, str] = None  # type: ignore[assignment]
    super_labels: np.ndarray | None = None
    is_query: np.ndarray | None = None
    groups: np.ndarray | None = None
    protocol: Protocol | None = None
    label_rows: np.ndarray | None = None
    pairs: PairList | None = None

    def __post_init__(self):
        images = self.images if isinstance(self.images, Images) else ArrayImages(self.images)
        labels = integer_labels(self.labels)
        if labels.shape != (len(images),):
            raise UserError(f"{self.name}: {len(images)} images but labels of shape {labels.shape}")
        if not len(labels):
            raise UserError(f"{self.name}: the {self.split} split has no image")
        values: dict[str, Any] = {"images": images, "labels": labels}
        if self.class_names is None:
            values["class_names"] = {int(label): str(label) for label in np.unique(labels)}
        for field, kind in _COLUMNS.items():
            if getattr(self, field) is not None:
                values[field] = np.asarray(getattr(self, field), kind)
                if values[field].shape[: 1 if field == "label_rows" else None] != labels.shape:
                    raise UserError(f"{self.name}: {len(labels)} images but {field} of shape {values[field].shape}")
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        return f"ImageDataset({self.name!r}, {self.split!r}, images={len(self)}, classes={self.num_classes})"

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
    def targets(self) -> np.ndarray:
        """What a loss compares: (N,) rows of the images where there are `pairs`, or `label_rows`, or `labels`."""
        if self.pairs is not None:
            return np.arange(len(self))
        return self.labels if self.label_rows is None else self.label_rows

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each image, such as its path, in the order of the images.

        Example:
            >>> tfdml.data.load("folder", "photos", "all").names[0]
            'photos/bus/0.jpg'
        """
        return tuple(self.images.name(index) for index in range(len(self)))

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
        """Return the images at `indices`, in that order."""
        indices = np.asarray(indices, np.int64)
        columns = {name: getattr(self, name) for name in ("labels", *_COLUMNS)}
        taken = {name: column[indices] for name, column in columns.items() if column is not None}
        return dataclasses.replace(
            self,
            images=self.images.take(indices),
            class_names={int(c): self.class_names[int(c)] for c in np.unique(taken["labels"])},
            protocol=self.protocol and self.protocol.take(indices),
            pairs=self.pairs and self.pairs.take(indices, len(self)),
            **taken,
        )

    def select_classes(self, classes: Sequence[int] | np.ndarray) -> ImageDataset:
        """Return the images of the classes given, in their present order."""
        return self.take(np.flatnonzero(np.isin(self.labels, np.asarray(classes, np.int64))))

    def without_labels(self) -> ImageDataset:
        """Return the same images, each of a class of its own."""
        return ImageDataset(self.name, self.split, self.images, np.arange(len(self)))

    def contiguous(self) -> ImageDataset:
        """Return the same images with class ids 0 .. num_classes - 1, in ascending order of the old ids."""
        classes, labels = np.unique(self.labels, return_inverse=True)
        names = {new: self.class_names[int(old)] for new, old in enumerate(classes)}
        return dataclasses.replace(self, labels=labels.astype(np.int64), class_names=names)

    def balanced_rows(self, limit: int, seed: int = 0, include: Sequence[int] = ()) -> np.ndarray:
        """Draw up to `limit` images, equally many of every class as far as there are.

        Where that would leave fewer than ten of a class, whole classes are drawn instead, up to ten images of each.

        Args:
            limit: How many images at most.
            seed: Of the draw.
            include: Classes that are drawn before the others.

        Returns:
            Ascending rows.

        Example:
            >>> dataset = ImageDataset(images=np.zeros((65, 8, 8, 3), np.uint8), labels=np.repeat([3, 8], [50, 15]))
            >>> np.bincount(dataset.labels[dataset.balanced_rows(24)])[[3, 8]].tolist()
            [12, 12]
        """
        rng = np.random.default_rng(seed)
        shuffled = rng.permutation(len(self))
        order = shuffled[np.argsort(self.labels[shuffled], kind="stable")]
        classes, starts, sizes = np.unique(self.labels[order], return_index=True, return_counts=True)
        rank = np.arange(len(self)) - np.repeat(starts, sizes)  # of an image in its class
        caps = range(int(sizes.max()) + 1)
        fair = bisect.bisect_right(caps, limit, key=lambda cap: np.minimum(sizes, cap).sum()) - 1
        cap = max(_BALANCED_PER_CLASS, fair)
        drawn = rng.permutation(len(sizes))
        drawn = drawn[np.argsort(~np.isin(classes[drawn], include), kind="stable")]
        inside = drawn[np.cumsum(np.minimum(sizes, cap)[drawn]) <= limit]
        if not len(inside):  # not even the first of them
            return np.sort(order[starts[drawn[0]] :][:limit])
        in_class = np.repeat(np.isin(np.arange(len(sizes)), inside), sizes)
        return np.sort(order[in_class & (rank < cap)])

    def _role(self, split: str, is_query: bool) -> ImageDataset:
        if self.is_query is None:
            raise UserError(f"{self.name}: the {self.split} split is not divided into queries and a gallery")
        rows = np.flatnonzero(self.is_query == is_query)
        if not len(rows):
            raise UserError(f"{self.name}: the {self.split} split has no {split} image")
        return dataclasses.replace(self.take(rows), split=split, is_query=None, protocol=None)
