"""What a data set is to the rest of the library: images that can be read by index, and their
labels."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdml.data.images import (
    ArrayImages,
    Images,
    OptionalImages,
    Source,
    images_checksum,
    join_images,
    row_numbers,
    source_of_vectors,
)
from tfdml.errors import UserError
from tfdml.labels import image_rows, integer_labels, true_or_false
from tfdml.mining import GivenPairs, Relation, SameLabel, same_label_or_text, shares_a_label
from tfdml.names import TEXT, class_names_of, clean


def _as_texts(values: Any) -> np.ndarray:
    return np.array(clean(values, TEXT, "texts", lambda row: f"row {row}"), object)


def _as_vectors(values: Any) -> np.ndarray:
    vectors = np.asarray(values)
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu":
        raise UserError(
            f"vectors must be numbers (N, D), not {vectors.dtype} of shape {vectors.shape}"
        )
    return vectors


def _joined(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    """Return a column of two data sets as one; None where one of them has none."""
    if first is None or second is None:
        return None
    return np.concatenate([first, second])


#: What a data set may have of each image besides its class, and how it is read.
_COLUMNS: dict[str, Callable[[Any], np.ndarray]] = {
    "super_labels": lambda values: integer_labels(values, "super_labels"),
    "is_query": lambda values: true_or_false(values, "is_query", len(values)),
    "groups": lambda values: integer_labels(values, "groups"),
    "label_rows": lambda values: integer_labels(values, "label_rows", rows=True).reshape(
        len(values), -1
    ),
    "texts": _as_texts,
    "tokens": np.asarray,
    "vectors": _as_vectors,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Protocol:
    """How a benchmark measures its data set, beyond classes, roles and groups. `evaluate_dataset`
    follows it.

    Args:
        metrics: What it reports, as the `metrics` of `evaluate_retrieval`.
        ks: The K of `recall`.
        ids: (N,) int64, by which `lists` names the images; None where there are no lists.
        lists: The images that are right for each query and those that are ignored, both as a
            mapping from the query's id to ids; None where classes decide.
        levels: (N, L) classes of a hierarchy, the finest level first; None for classes.

    Example:
        >>> Protocol(("recall", "map"), ks=(1, 5, 10)).metrics
        ('recall', 'map')
    """

    metrics: tuple[str, ...]
    ks: tuple[int, ...] = (1,)
    ids: np.ndarray | None = None
    lists: tuple[Mapping[int, Any], Mapping[int, Any]] | None = None
    levels: np.ndarray | None = None

    def take(self, indices: np.ndarray) -> Protocol:
        """Return the protocol of the images at `indices`, in that order."""
        ids = None if self.ids is None else self.ids[indices]
        return dataclasses.replace(
            self, ids=ids, levels=None if self.levels is None else self.levels[indices]
        )


@dataclasses.dataclass(frozen=True, eq=False)
class PairList:
    """Pairs or triplets of the images of a data set, given one by one.

    Args:
        rows: (G, 2) rows of the images of each pair, or (G, 3) anchor, positive and negative of
            each triplet.
        is_similar: (G,) whether each pair is similar, 1 or 0; None for triplets.

    Raises:
        UserError: A row is no whole number from 0 on, or there is not a 0 or 1 for each pair.

    Example:
        >>> PairList(np.array([[0, 1, 2]])).scored().tolist()
        [[0.0, 1.0, 1.0], [0.0, 2.0, 0.0]]
    """

    rows: Any
    is_similar: Any = None

    def __post_init__(self):
        rows, is_similar = image_rows(self.rows, "pairs"), self.is_similar
        if (is_similar is None) != (rows.shape[1] == 3):
            raise UserError(
                "give rows (G, 2) of pairs and whether each is similar, or rows (G, 3) of triplets "
                "alone"
            )
        if is_similar is not None:
            is_similar = true_or_false(is_similar, "is_similar", len(rows)).astype(np.float64)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "is_similar", is_similar)

    def scored(self) -> np.ndarray:
        """(P, 3) float64: of each pair, once, the two rows in ascending order, and 1 if it is
        similar, else 0."""
        pairs, is_similar = self.rows, self.is_similar
        if is_similar is None:
            pairs = np.concatenate([self.rows[:, [0, 1]], self.rows[:, [0, 2]]])
            is_similar = np.repeat([1.0, 0.0], len(self.rows))
        scored = np.column_stack([pairs, is_similar])
        scored[:, :2].sort(axis=1)
        return np.unique(scored, axis=0)

    def similar(self) -> np.ndarray:
        """(P, 2) the rows of each similar pair."""
        scored = self.scored()
        return scored[scored[:, 2] == 1, :2].astype(np.int64)

    def checksum(self) -> str:
        """Return what identifies these pairs."""
        return hashlib.sha256(self.scored().tobytes()).hexdigest()

    def take(self, indices: np.ndarray, size: int) -> PairList:
        """Return those whose images all are among the images at `indices` of `size`, as rows of
        these."""
        new_rows = np.full(size, -1)
        new_rows[indices] = np.arange(len(indices))
        rows = new_rows[self.rows]
        is_inside = (rows >= 0).all(axis=1)
        is_similar = None if self.is_similar is None else self.is_similar[is_inside]
        return PairList(rows[is_inside], is_similar)


@dataclasses.dataclass(frozen=True, repr=False)
class ImageDataset:
    """Labeled images, one split of a data set.

    Args:
        name: The catalog's name of the data set, e.g. `"cars196"`.
        split: `"train"` or `"test"`: their classes are disjoint; `"query"` or `"gallery"` for a
            part of the test split; `"all"` for all images.
        images: Where the images are; or an array (N, H, W, 3) of uint8 pixels 0-255, which becomes
            `ArrayImages`.
        labels: (N,) integer class ids. A class keeps its id whatever the order of the files; the
            ids of a split need not start at 0 nor be contiguous (see `contiguous`).
        class_names: The name of each class id that occurs; by default its digits.
        super_labels: (N,) int64 ids of the coarser class of each image, such as the kind of
            product; None where the data set has none.
        is_query: (N,) bool, where the data set says which test images are queries and which are the
            gallery that they are looked up in; None for all-to-all retrieval.
        groups: (N,) integer ids of what images of a class must not share to count as found, such as
            the camera or the sequence, see `tfdml.evaluation.Relevance.classes`; None where nothing
            is ignored.
        protocol: What the data set's benchmark measures, and by what; None for classes alone.
        label_rows: (N, L) integers, where an image has more than its class: label sets as rows of 0
            and 1, or levels, the finest first, which are those of `protocol`.
        pairs: Pairs or triplets of the images; images of no pair are in no given relation.
        texts: (N,) str, a text of each image, for a learner of images and texts. An image with
            several texts is there as often.
        tokens: (N, T) integers, what `TextEmbedder.tokenize` makes of the texts; or (N, D) floats,
            their stored vectors. The training batches have them next to the images.
        vectors: (N, D) numbers, stored vectors of the images, which a `Head` embeds: batches have
            them in the place of the images. They may be memory-mapped. `images` are for reports
            alone then, and may be missing.

    Raises:
        UserError: There is no image, labels and images differ in number, labels are no integers, a
            text or a name of a class is refused by `tfdml.names.clean`, or tokens are next to
            pairs or `label_rows`.

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
    texts: Any = None
    tokens: np.ndarray | None = None
    vectors: np.ndarray | None = None

    def __post_init__(self):
        labels = integer_labels(self.labels)
        images = self.images
        if self.vectors is not None and not len(images):
            images = OptionalImages(tuple(map(str, range(len(labels)))))
        if not isinstance(images, Images):
            images = ArrayImages(images)
        if labels.shape != (len(images),):
            raise UserError(f"{self.name}: {len(images)} images but labels of shape {labels.shape}")
        if not len(labels):
            raise UserError(f"{self.name}: the {self.split} split has no image")
        values: dict[str, Any] = {"images": images, "labels": labels}
        if self.class_names is None:
            values["class_names"] = {int(label): str(label) for label in np.unique(labels)}
        else:
            source = f"{self.name}: class_names"
            values["class_names"] = class_names_of(self.class_names, source)
        for field, read in _COLUMNS.items():
            if getattr(self, field) is not None:
                values[field] = read(getattr(self, field))
                if len(values[field]) != len(labels):
                    raise UserError(
                        f"{self.name}: {len(labels)} images but {field} of shape "
                        f"{values[field].shape}"
                    )
        if self.pairs is not None:
            image_rows(self.pairs.rows, f"{self.name}: pairs", len(images))
        if self.tokens is not None and (self.pairs is not None or self.label_rows is not None):
            raise UserError(
                f"{self.name}: texts go with one class an image, without pairs, label sets or "
                "levels"
            )
        for field, value in values.items():
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        return (
            f"ImageDataset({self.name!r}, {self.split!r}, images={len(self)}, "
            f"classes={self.num_classes})"
        )

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
    def dimension(self) -> int:
        """The size D of the vectors; 0 where images are embedded."""
        return 0 if self.vectors is None else self.vectors.shape[1]

    def lookup(self) -> Source:
        """How the input pipeline reads a batch: of the vectors, or else of the images."""
        return self.images.lookup() if self.vectors is None else source_of_vectors(self.vectors)

    def checksum(self) -> str:
        """Return what identifies the content of the images, see `images_checksum`, or all
        vectors."""
        if self.vectors is None:
            return images_checksum(self.images)
        return f"sha256:{hashlib.sha256(self.vectors.tobytes()).hexdigest()}"

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """What `relation` compares, (N,) or (N, L) integers; `labels` where that is None."""
        if self.pairs is not None:
            return np.arange(len(self))
        if self.label_rows is not None:
            return self.label_rows
        if self._has_shared_texts:
            return np.stack([self.labels, self.text_numbers], axis=1)
        return self.labels

    @property
    def relation(self) -> Relation | Callable | None:
        """Which images belong together by their `targets`: by the pairs that are given, by their
        label sets or finest levels, or by class and text; None where the class alone decides.

        A loss takes it as `positives`.

        Raises:
            UserError: There is no pair.

        Example:
            >>> loss = tfdml.losses.ContrastiveLoss(margin=1.0, positives=train.relation)
        """
        if self.pairs is not None:
            if not len(self.pairs.rows):
                raise UserError(
                    f"{self.name}: no given pair or triplet has all of its images in the "
                    f"{self.split} split"
                )
            return GivenPairs(self.pairs.scored())
        if self.label_rows is not None:
            return shares_a_label if self.protocol is None else SameLabel(0)
        return same_label_or_text if self._has_shared_texts else None

    @functools.cached_property
    def _has_shared_texts(self) -> bool:
        """Whether images of different classes share a text that the training batches have."""
        if self.tokens is None:
            return False
        labels_and_texts = np.stack([self.labels, self.text_numbers], axis=1)
        return len(np.unique(labels_and_texts, axis=0)) > len(np.unique(self.text_numbers))

    @functools.cached_property
    def text_numbers(self) -> np.ndarray:
        """(N,) int64, equal for equal texts, in their sorted order; where there are none, for equal
        `tokens`.

        Raises:
            UserError: There are neither.
        """
        self._require_texts()
        if self.tokens is not None and self.texts is None:
            numbers = np.unique(self.tokens, axis=0, return_inverse=True)[1]
        else:
            numbers = np.unique(self.texts, return_inverse=True)[1]
        return numbers.reshape(-1).astype(np.int64)

    def _require_texts(self) -> None:
        if self.texts is None and self.tokens is None:
            raise UserError(
                f"{self.name} has no texts: give its list a column text, or the data set texts"
            )

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
            UserError: The data set does not distinguish queries from a gallery, or has no query
                left.
        """
        return self._role("query", True)

    @property
    def gallery(self) -> ImageDataset:
        """The gallery alone, as a data set of split `"gallery"`.

        Raises:
            UserError: The data set does not distinguish queries from a gallery, or has no gallery
                left.
        """
        return self._role("gallery", False)

    def take(self, indices: Sequence[int] | np.ndarray) -> ImageDataset:
        """Return the images at `indices`, in that order.

        Raises:
            UserError: They are no integers, such as a mask.
        """
        indices = row_numbers(indices)
        columns = {name: getattr(self, name) for name in ("labels", *_COLUMNS)}
        taken: dict[str, Any] = {
            name: column[indices] for name, column in columns.items() if column is not None
        }
        classes = np.unique(taken["labels"]).tolist()
        taken["class_names"] = {label: self.class_names[label] for label in classes}
        if self.protocol is not None:
            taken["protocol"] = self.protocol.take(indices)
        if self.pairs is not None:
            taken["pairs"] = self.pairs.take(indices, len(self))
        return dataclasses.replace(self, images=self.images.take(indices), **taken)

    def with_class_names(self) -> ImageDataset:
        """Return the same images with texts: where they have none, the names of their classes."""
        if self.texts is not None or self.tokens is not None:
            return self
        return dataclasses.replace(
            self, texts=[self.class_names.get(label, str(label)) for label in self.labels.tolist()]
        )

    def with_tokens(self, tokenize: Callable[[Any], np.ndarray]) -> ImageDataset:
        """Return the same images and texts, with the `tokens` of the texts.

        Args:
            tokenize: Of an embedder of texts: `TextEmbedder.tokenize`.

        Raises:
            UserError: There are no texts, or one does not fit.
        """
        self._require_texts()
        return (
            self if self.texts is None else dataclasses.replace(self, tokens=tokenize(self.texts))
        )

    def select_classes(self, classes: Sequence[int] | np.ndarray) -> ImageDataset:
        """Return the images of the classes given, in their present order."""
        return self.take(np.flatnonzero(np.isin(self.labels, np.asarray(classes, np.int64))))

    def join(self, other: ImageDataset) -> ImageDataset:
        """Return the images of two splits as one, of split `"all"`; classes of one name are one
        class.

        Raises:
            UserError: The images have more than a class each: given pairs, label sets or levels.
        """
        id_of: dict[str, int] = {}
        labels: list[int] = []
        for side in (self, other):
            if side.pairs is not None or side.label_rows is not None:
                raise UserError(
                    f"{self.name}: splits with given pairs, label sets or levels cannot be joined"
                )
            for label in side.classes.tolist():
                id_of.setdefault(side.class_names[label], len(id_of))
            labels += [id_of[side.class_names[label]] for label in side.labels.tolist()]
        images = join_images(self.images, other.images)
        class_names = {number: name for name, number in id_of.items()}
        columns: dict[str, Any] = {
            name: _joined(getattr(self, name), getattr(other, name))
            for name in ("super_labels", "texts", "tokens", "vectors")
        }
        return ImageDataset(self.name, "all", images, labels, class_names, **columns)

    def contiguous(self) -> ImageDataset:
        """Return the same images with class ids 0 .. num_classes - 1, in ascending order of the old
        ids."""
        classes, labels = np.unique(self.labels, return_inverse=True)
        names = {new: self.class_names[int(old)] for new, old in enumerate(classes)}
        return dataclasses.replace(self, labels=labels.astype(np.int64), class_names=names)

    def _role(self, split: str, is_query: bool) -> ImageDataset:
        if self.is_query is None:
            raise UserError(
                f"{self.name}: the {self.split} split is not divided into queries and a gallery"
            )
        rows = np.flatnonzero(self.is_query == is_query)
        if not len(rows):
            raise UserError(f"{self.name}: the {self.split} split has no {split} image")
        return dataclasses.replace(self.take(rows), split=split, is_query=None, protocol=None)
