"""What a data set is to the rest of the library: images that can be read by index, and their
labels.

And which of its images cannot be used: missing, damaged or unsupported files.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf
from absl import logging
from PIL import ExifTags, Image

from tfdml.data.decoding import (
    FOREIGN,
    PNG,
    WEBP,
    Format,
    decode_whole,
    format_of,
    is_cut,
    narrow_fault,
    orientation_of,
    scan_fault,
)
from tfdml.data.images import ArrayImages, Images, in_threads, join_images, read_header, row_numbers
from tfdml.data.limits import DECODER_LIMIT
from tfdml.errors import UserError, short_message
from tfdml.io.files import access_fault
from tfdml.labels import image_rows, integer_labels, true_or_false
from tfdml.names import TEXT, class_names_of, clean


def _as_texts(values: Any) -> np.ndarray:
    return np.array(clean(values, TEXT, "texts", lambda row: f"row {row}"), object)


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
        if self.is_similar is None:
            pairs = [
                np.insert(self.rows[:, [0, end]].astype(np.float64), 2, 2 - end, axis=1)
                for end in (1, 2)
            ]
            scored = np.concatenate(pairs)
        else:
            scored = np.column_stack([self.rows, self.is_similar])
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
        place = np.full(size, -1)
        place[indices] = np.arange(len(indices))
        rows = place[self.rows]
        kept = (rows >= 0).all(axis=1)
        return PairList(rows[kept], None if self.is_similar is None else self.is_similar[kept])


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

    @functools.cached_property
    def targets(self) -> np.ndarray:
        """What a loss compares: (N,) rows of the images where there are `pairs`, or `label_rows`,
        or `labels`.

        With `tokens`, where images of different classes share a text: (N, 2) labels and
        `text_numbers`, for `tfdml.mining.same_label_or_text`.
        """
        if self.pairs is not None:
            return np.arange(len(self))
        if self.tokens is not None:
            both = np.stack([self.labels, self.text_numbers], axis=1)
            return (
                both
                if len(np.unique(both, axis=0)) > len(np.unique(self.text_numbers))
                else self.labels
            )
        return self.labels if self.label_rows is None else self.label_rows

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
        taken = {name: column[indices] for name, column in columns.items() if column is not None}
        return dataclasses.replace(
            self,
            images=self.images.take(indices),
            class_names={int(c): self.class_names[int(c)] for c in np.unique(taken["labels"])},
            protocol=self.protocol and self.protocol.take(indices),
            pairs=self.pairs and self.pairs.take(indices, len(self)),
            **taken,
        )

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
        if any(side.pairs is not None or side.label_rows is not None for side in (self, other)):
            raise UserError(
                f"{self.name}: splits with given pairs, label sets or levels cannot be joined"
            )
        sides = (self, other)
        names = dict.fromkeys(
            side.class_names[label] for side in sides for label in side.classes.tolist()
        )
        ids = {name: number for number, name in enumerate(names)}
        labels = [ids[side.class_names[label]] for side in sides for label in side.labels.tolist()]
        coarse = [side.super_labels for side in sides if side.super_labels is not None]
        return ImageDataset(
            self.name,
            "all",
            join_images(self.images, other.images),
            labels,
            dict(enumerate(names)),
            super_labels=np.concatenate(coarse) if len(coarse) == 2 else None,
            texts=None
            if any(side.texts is None for side in sides)
            else np.concatenate([s.texts for s in sides]),
        )

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


_NAMED_IN_MESSAGES = 3
# Enough for any format's signature, and to show what another file is.
_HEAD = 32
_TAIL = 256
# What other files begin with, and what a message says of them.
_OTHER_KINDS = {
    b"GIF8": "a GIF; convert it",
    b"BM": "a BMP; convert it",
    b"II*\0": "a TIFF; convert it",
    b"MM\0*": "a TIFF; convert it",
    b"8BPS": "a PSD; convert it",
    b"%PDF": "a PDF; convert it",
    b"PK\3\4": "a zip archive; unpack it",
    b"\x1f\x8b": "a gzip archive; unpack it",
    b"version https://git-lfs": "a pointer of Git LFS; run git lfs pull",
    b"<": "HTML or XML",
}
_TEXT = {*range(32, 127), *b"\t\n\r"}

_JPEG_END = b"\xff\xd9"
# Texts of a PNG that may state an orientation, by Pillow's names.
_TURNING_TEXTS = ("XML:com.adobe.xmp", "Raw profile type exif")
_PNG_END = b"IEND\xaeB`\x82"
# What TensorFlow's message holds when reading or decoding an image failed: the operation's name or
# our own words.
_IMAGE_FAILURE = re.compile(
    r"ReadFile|Decode(AndCrop)?(Jpeg|Png|WebP)|ExtractJpegShape|Unknown image file format|"
    rf"{FOREIGN}|animated WebP|too narrow|too many scans"
)


@dataclasses.dataclass(frozen=True)
class ImageError:
    """What is wrong with one image.

    Args:
        index: Its place in the images inspected.
        name: Its path or name.
        reason: In words, e.g. `"truncated JPEG (no end-of-image marker)"`.
    """

    index: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def check(
    dataset: ImageDataset, bad_images: str = "error", check_images: str = "headers"
) -> ImageDataset:
    """Check all images of a data set before it is used.

    Args:
        dataset: The data set.
        bad_images: `"error"` to stop at bad images, `"skip"` to leave them out and log how many.
        check_images: `"headers"`: the header and the end of each file; `"decode"`: every image is
            decoded, at about a millisecond each.

    Returns:
        The data set, without the bad images.

    Raises:
        UserError: There are bad images and `bad_images` is `"error"`, or no image is left.

    Example:
        >>> len(check(load("folder", "photos"), bad_images="skip"))
        6
    """
    faults = find_faults(dataset.images, decode=check_images == "decode")
    if not faults:
        return dataset
    where = f"{len(faults)} of {len(dataset)} images of {dataset.name} ({dataset.split})"
    if bad_images == "error":
        raise UserError(
            f"{where} cannot be used: {_named(faults)}; mend them, or set bad_images=skip"
        )
    if len(faults) == len(dataset):
        raise UserError(f"none of the {where} can be used: {_named(faults)}")
    logging.warning("skipping %s: %s", where, _named(faults))
    return dataset.take(np.setdiff1d(np.arange(len(dataset)), [fault.index for fault in faults]))


def find_faults(
    images: Images, decode: bool = True, max_pixels: int = DECODER_LIMIT
) -> list[ImageError]:
    """Check images, on all cores by the decoder that training uses, or by their header and end
    alone.

    JPEG, PNG and WebP are supported, recognized by content and not by name.

    Args:
        images: The images. Arrays have nothing to check.
        decode: Decode images in full, at about a millisecond each. Damage in the middle of a file
            is not found otherwise.
        max_pixels: An image whose header states more pixels is bad: a small file can exhaust the
            memory.

    Returns:
        The bad images, in order.

    Example:
        >>> find_faults(EncodedImages((b"",), ("a.jpg",)))[0].reason
        'empty file'
    """

    if images.decoded:
        return []

    def header_fault(index: int) -> tuple[str, int]:
        try:
            with images.open(index) as file:
                return _header_fault(file, max_pixels)
        except Exception as error:  # clients of file systems have their own error types
            return access_fault(error), 1

    verdicts: Iterator[tuple[str, int]]
    if decode:
        # The shape alone: many images wait for their turn.
        examined = converted_images(images, lambda data, _: decode_whole(data).shape, max_pixels)
        verdicts = ((fault, turn) for _, fault, turn in examined)
    else:
        verdicts = in_threads(header_fault, range(len(images)))
    faults = []
    turned = []
    for index, (fault, turn) in enumerate(verdicts):
        if fault:
            faults.append(ImageError(index, images.name(index), fault))
        elif turn > 1:
            turned.append(images.name(index))
    warn_of_turned(turned, len(images))
    return faults


def warn_of_turned(names: Sequence[str], total: int) -> None:
    """Warn of images whose orientation the decoder does not read, if there are any.

    Args:
        names: Of these images.
        total: How many images there are in all.
    """
    if names:
        logging.warning(
            "%d of %d images are used as they are stored, for XMP or a text turns them, not EXIF: "
            "%s; `tfdml prepare` writes them upright",
            len(names),
            total,
            _named(names),
        )


def converted_images(
    images: Images, convert: Callable[[tf.Tensor, int], Any], max_pixels: int = DECODER_LIMIT
) -> Iterator[tuple[Any, str, int]]:
    """Yield what a function makes of each image, what is wrong with the image, or an empty text,
    and the orientation, 1 to 8, that Pillow finds and the decoder does not.

    Args:
        images: The images.
        convert: Called in threads with the bytes of an image and that orientation. Raises
            TensorFlow's errors where it cannot decode them.
        max_pixels: As for `find_faults`.

    Example:
        >>> next(converted_images(EncodedImages((jpeg[: len(jpeg) // 2],), ("a.jpg",)),
        ...     lambda data, turn: tfdml.data.decode_image(data)))
        (None, 'truncated JPEG (no end-of-image marker)', 1)
    """

    def convert_or_fault(index: int) -> tuple[Any, str, int]:
        try:
            data = images.encoded(index)
        except Exception as error:  # clients of file systems have their own error types
            return None, access_fault(error), 1
        fault, turn = _header_fault(io.BytesIO(data), max_pixels, is_whole=True)
        if fault:
            return None, fault, 1
        try:
            return convert(tf.constant(data), turn), "", turn
        except (
            tf.errors.OpError,
            UnicodeDecodeError,
        ) as error:  # the second where a message quotes bytes
            return None, f"damaged: {short_message(error, 'last')}", 1

    return in_threads(convert_or_fault, range(len(images)), os.cpu_count() or 1)


def explain_failure(
    error: BaseException,
    dataset: ImageDataset,
    leave_out: str = "check_images=decode and bad_images=skip",
) -> UserError | None:
    """Find the images behind an exception that iteration over batches, or `fit`, raised.

    Reads and decodes every image of the data set, at about a millisecond each.

    Args:
        error: The exception.
        dataset: The data set that the batches came from.
        leave_out: By which arguments such images are left out (the default's are those of
            `tfdml.data.dataset.check`); empty where they cannot be.

    Returns:
        An error that names the images and what is wrong with them; None if the exception has
        another cause.

    Example:
        >>> try:
        ...     history = model.fit(batches, steps_per_epoch=100)
        ... except tf.errors.OpError as error:
        ...     raise (explain_failure(error, dataset) or error) from None
    """
    if not (isinstance(error, tf.errors.OpError) and _IMAGE_FAILURE.search(str(error))):
        return None
    logging.warning(
        "an image of %s cannot be read; looking for it among %d", dataset.name, len(dataset)
    )
    faults = find_faults(dataset.images)
    if not faults:
        return None
    where = f"{len(faults)} of {len(dataset)} images of {dataset.name} ({dataset.split})"
    advice = f", or leave them out with {leave_out}" if leave_out else ""
    return UserError(f"{where} cannot be decoded: {_named(faults)}; fix or remove them{advice}")


def _named(items: Sequence[object]) -> str:
    """Return the first few of several, on one line."""
    named = "; ".join(str(item).replace("\n", " ") for item in items[:_NAMED_IN_MESSAGES])
    return named + (
        f"; and {len(items) - _NAMED_IN_MESSAGES} more" if len(items) > _NAMED_IN_MESSAGES else ""
    )


def _kind_of(head: bytes) -> str:
    """Return what a file seems to be, and what to do with it, in words of ours: a list may name any
    file, and a message holds nothing of it."""
    for start, words in _OTHER_KINDS.items():
        if head.startswith(start):
            return words
    if head[4:8] == b"ftyp":
        return "HEIC, AVIF or a film; convert it"
    return "text" if _TEXT.issuperset(head) else "of no format that is known here"


def _header_fault(file: BinaryIO, max_pixels: int, is_whole: bool = False) -> tuple[str, int]:
    """Return what a file's header and end say against it, empty for nothing, and the orientation
    that Pillow alone finds, 1 for none.

    Args:
        file: The file.
        max_pixels: See `find_faults`.
        is_whole: Whether the file is in memory, so that what lies behind a PNG's pixels is read.
    """
    head = file.read(_HEAD)
    if not head:
        return "empty file", 1
    kind = format_of(head)
    if kind is None:
        return f"{FOREIGN}, but {_kind_of(head)}", 1
    if fault := _end_fault(file, kind, head):
        return fault, 1
    try:
        image = read_header(file, kind)
        fault = _content_fault(image, kind, max_pixels)
        if not fault and "progressive" in image.info:
            file.seek(0)
            fault = scan_fault(tf.constant(file.read())).numpy().decode()
    except Exception as error:  # Pillow and TensorFlow raise many types on damaged data
        reason = re.sub(r"b(['\"]).*?\1", "...", short_message(error))
        return f"damaged or unsupported {kind.name} ({reason})", 1
    if fault:
        return fault, 1
    return "", _unread_turn(image, file, is_whole)


def _content_fault(image: Image.Image, kind: Format, max_pixels: int) -> str:
    width, height = image.size
    if not width or not height:
        return f"damaged {kind.name} (no size in its header)"
    if width * height > max_pixels:
        return f"too large: {width:,} x {height:,} pixels, more than {max_pixels:,}; shrink it"
    if getattr(image, "n_frames", 1) > 1 and kind is WEBP:
        return "unsupported type: animated WebP; save one frame of it"
    return narrow_fault(height, width)


def _unread_turn(image: Image.Image, file: BinaryIO, is_whole: bool) -> int:
    """Return the orientation that Pillow finds where the decoder finds none, 1 for none."""
    try:
        if is_whole and _has_text_behind(image, file):
            image.load()
        # Not that of a PNG, which always loads the image.
        turn = int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    except Exception:  # Pillow raises many types on damaged blocks, which count as upright
        return 1
    if turn not in range(2, 9):
        return 1
    file.seek(0)
    return 1 if orientation_of(tf.constant(file.read())) > 1 else turn


def _has_text_behind(image: Image.Image, file: BinaryIO) -> bool:
    """Whether a PNG states an orientation as text that its header lacks."""
    file.seek(0)
    data = file.read()
    return image.format == "PNG" and any(
        key.encode() in data and key not in image.info for key in _TURNING_TEXTS
    )


def _end_fault(file: BinaryIO, kind: Format, head: bytes) -> str:
    """Return what is wrong with the end of a file of a supported format, by its last bytes where
    these will do; empty for nothing."""
    size = file.seek(0, os.SEEK_END)
    if kind is WEBP:
        stated = int.from_bytes(head[4:8], "little") + 8
        return "truncated WebP (shorter than its header says)" if size < max(stated, 30) else ""
    end = _PNG_END if kind is PNG else _JPEG_END
    file.seek(max(size - _TAIL, 0))
    if end in file.read() and (kind is PNG or size > _TAIL):
        return ""
    file.seek(0)
    data = file.read()
    if kind is PNG:
        return "" if end in data else "truncated PNG (no IEND chunk)"
    # Phones append films, whose bytes are any; a thumbnail has an end marker as well.
    return "truncated JPEG (no end-of-image marker)" if is_cut(tf.constant(data)) else ""
