"""Stored embeddings: the images that they are of, and reading them from Parquet, .npz and .npy files."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from tfdml.errors import REASON, UserError, user_errors
from tfdml.io.files import confined, fields, local_copy, read_json
from tfdml.io.folders import MANIFEST, PROGRESS
from tfdml.pairwise import integer_labels

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset

FORMAT = "tfdml-embeddings"
VERSION = 2
# The role of an image: `train`; `test` where a set is searched all-to-all; or one side of a test split.
ROLE_NAMES = ("train", "test", "query", "gallery")


@dataclasses.dataclass(frozen=True)
class ImageTable:
    """The images that embeddings are of, in their order.

    Args:
        names: What each image is called.
        labels: (N,) class ids.
        roles: (N,) of `ROLE_NAMES`.
        class_names: Names of the class ids.
        groups: (N,) integers, None for an image without one; see `tfdml.data.ImageDataset`. None: there are none.

    Raises:
        UserError: They differ in number.
    """

    names: tuple[str, ...]
    labels: np.ndarray
    roles: np.ndarray
    class_names: dict[int, str] = dataclasses.field(default_factory=dict)
    groups: Sequence[int | None] | None = None

    def __post_init__(self):
        object.__setattr__(self, "labels", integer_labels(self.labels))
        object.__setattr__(self, "roles", np.asarray(self.roles, "<U7"))
        if not len(self.names) == len(self.labels) == len(self.roles):
            raise UserError(f"{len(self.names)} names, {len(self.labels)} labels and {len(self.roles)} roles")
        if self.groups is not None and len(self.groups) != len(self):
            raise UserError(f"{len(self)} images and {len(self.groups)} groups")

    @classmethod
    def of(cls, splits: Sequence[ImageDataset], directory: str | os.PathLike = "") -> ImageTable:
        """Return the images of several splits, one after another.

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
        class_names: dict[int, str] = {}
        for label, name in (item for part in splits for item in part.class_names.items()):
            if class_names.setdefault(label, name) != name:
                two = f"class id {label} is {class_names[label]} in one split and {name} in another"
                raise UserError(f"{two}: embed them into two folders, whose classes go by name")
        labels = np.concatenate([part.labels for part in splits])
        groups = None
        if any(part.groups is not None for part in splits):
            sides = [[None] * len(part) if part.groups is None else part.groups.tolist() for part in splits]
            groups = [group for side in sides for group in side]
        return cls(tuple(names), labels, np.concatenate(roles), class_names, groups)

    def __len__(self) -> int:
        return len(self.names)

    def checksum(self) -> str:
        """SHA-256 of names, labels, roles and groups, as `"sha256:..."`.

        It identifies the list of images, not their content: an image that was replaced under its name goes unnoticed.
        """
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        digest.update(self.labels.astype("<i8").tobytes() + self.roles.astype("<U7").tobytes())
        if self.groups is not None:
            digest.update(str(list(self.groups)).encode())
        return f"sha256:{digest.hexdigest()}"

    def columns(self, rows: slice) -> dict[str, Any]:
        """Return what `tfdml.embeddings.parquet.table_of` takes of some of the images."""
        labels = self.labels[rows].tolist()
        return {
            "id": list(range(*rows.indices(len(self)))),
            "path": list(self.names[rows]),
            "label": labels,
            "class": [str(self.class_names.get(label, label)) for label in labels],
            "role": self.roles[rows].tolist(),
            "group": None if self.groups is None else self.groups[rows],
        }


@dataclasses.dataclass(frozen=True)
class StoredEmbeddings:
    """Embeddings read from disk.

    Args:
        source: Where they were read from.
        embeddings: (N, d); memory-mapped if they come from an .npy file or are too large for the memory.
        labels: (N,) int64 class ids, or None where the file holds none.
        roles: (N,) of `ROLE_NAMES`, or None where the file does not say.
        names: What each image is called, or None.
        manifest: The folder's manifest; empty for a file from elsewhere.
        groups: (N,) int64, or None where the file holds none; see `tfdml.data.ImageDataset`. Images without a group
            have each a negative number of their own.
        class_names: Names of the class ids, where the file holds any.
    """

    source: str
    embeddings: np.ndarray
    labels: np.ndarray | None
    roles: np.ndarray | None = None
    names: tuple[str, ...] | None = None
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    groups: np.ndarray | None = None
    class_names: dict[int, str] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.source

    @property
    def classes(self) -> np.ndarray | None:
        """(N,) the name of each row's class, or its number where the file holds no name; None without labels."""
        return None if self.labels is None else class_of_each(self.labels, self.class_names)

    @property
    def model(self) -> str:
        """The fingerprint of the model that embedded them; empty where it is not known."""
        return str(self.manifest.get("model", {}).get("fingerprint", ""))

    @property
    def is_query(self) -> np.ndarray | None:
        """(N,) bool where queries are searched in a gallery; None for all-to-all."""
        if self.roles is None:
            return None
        query = self.roles == "query"
        return query if query.any() and (self.roles == "gallery").any() else None

    def split(self, name: str) -> StoredEmbeddings:
        """Return the rows of one split; a run of rows in one piece stays memory-mapped.

        Args:
            name: `"train"` or `"test"` (with queries and gallery).

        Raises:
            UserError: There are none.
        """
        if self.roles is None:
            return self
        rows = np.flatnonzero((self.roles == "train") == (name == "train"))
        if not len(rows):
            held = ", ".join(sorted(set(self.roles.tolist())))
            raise UserError(f"{self.source} holds no {name} images, only {held}; name another `split`")
        if len(rows) == len(self):
            return self
        groups = None if self.groups is None else self.groups[rows]
        chosen: Any = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
        return dataclasses.replace(
            self,
            embeddings=self.embeddings[chosen],
            labels=None if self.labels is None else self.labels[chosen],
            roles=self.roles[chosen],
            names=None if self.names is None else tuple(self.names[row] for row in rows),
            groups=None if groups is None or (groups < 0).all() else groups,
        )


def class_of_each(labels: Any, class_names: Mapping[int, str]) -> np.ndarray:
    """Return (N,) names of the classes of (N,) class ids; the digits of those without a name.

    Example:
        >>> class_of_each([3, 8, 3], {3: "bus"}).tolist()
        ['bus', '8', 'bus']
    """
    ids, codes = np.unique(labels, return_inverse=True)
    return np.array([class_names.get(label, str(label)) for label in ids.tolist()], object)[codes]


def check_same_model(one: str, other: str, what: str) -> None:
    """Raise a `UserError` where vectors are of two models; a fingerprint that is not known (empty) fits any other.

    Args:
        one: The fingerprint of a model.
        other: Another one.
        what: What is compared, for the message.
    """
    if one and other and one != other:
        shown = " and ".join(text.replace("sha256:", "")[-64:][:12] if ":" in text else text for text in (one, other))
        raise UserError(f"{what} are of different models ({shown}): embed both by one model")


def holds_embeddings(path: str | os.PathLike) -> bool:
    """Whether a path is a folder of `tfdml embed`, finished or not, or a Parquet, .npz or .npy file.

    Example:
        >>> holds_embeddings("vectors.npz")
        True
    """
    path = Path(local_copy(path))
    known = path.suffix in (".npz", ".npy", ".parquet")
    return known or any((path / name).is_file() for name in (MANIFEST, PROGRESS)) or bool(_parquet_files(path))


def read_embeddings(path: str | os.PathLike) -> StoredEmbeddings:
    """Read the embeddings of a folder that `tfdml embed` wrote, or of Parquet, .npz or .npy files from anywhere.

    Parquet files have the column `embedding`, lists of d numbers, and optionally `class` (its name), `label` (a number
    of these files alone), `role`, `group` (integers or text) and `scale` (each row is multiplied by its own); rows come
    in the order of the files. An .npz holds `embeddings` (N, d) and `labels` (N,), integers or names of classes;
    optionally `is_query` (N,) bool, for queries that are searched in the rest, or `roles` (N,), and `names` (N,). An
    .npy holds the embeddings only, and is memory-mapped.

    Args:
        path: The folder or its manifest; a Parquet file, or a folder of them; the .npz or .npy file.

    Raises:
        UserError: There is nothing, something else, something unfinished, or arrays that do not go together.

    Example:
        >>> stored = read_embeddings("embeddings/cars")
        >>> evaluate_retrieval(stored.embeddings, stored.labels)["recall@1"]
        0.555
    """
    path = Path(local_copy(path))
    if path.suffix == ".npz":
        return _read_archive(path)
    if path.suffix == ".npy":
        return _checked(str(path), _load(path), None, None, None)
    if path.name == MANIFEST:
        path = path.parent
    if not path.is_dir() and path.suffix != ".parquet":
        raise UserError(f"there are no embeddings at {path}")
    from tfdml.embeddings import parquet  # pyarrow takes a while to import

    files, manifest = _files_of(path)
    embeddings, columns = parquet.read_files(files)
    checked = _checked(str(path), embeddings, columns["label"], columns["role"], None, columns["class"])
    stored = dataclasses.replace(checked, groups=columns["group"], manifest=manifest)
    if manifest and len(stored) != manifest["count"]:
        raise UserError(f"{path}: {MANIFEST} states {manifest['count']} images, the files hold {len(stored)}")
    return stored


def read_names(path: str | os.PathLike) -> tuple[str, ...]:
    """Read the names of the images of stored embeddings, in the order of the rows; their numbers where there are none.

    Args:
        path: As `read_embeddings`.

    Raises:
        UserError: As `read_embeddings`.
    """
    path = Path(local_copy(path))
    if path.suffix in (".npz", ".npy"):
        stored = read_embeddings(path)
        return tuple(map(str, stored.names or range(len(stored))))
    from tfdml.embeddings import parquet

    files, _ = _files_of(path)
    return parquet.read_paths(files)


def _files_of(path: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the Parquet files at a path, and the manifest of the folder; empty where there is none."""
    if not path.is_dir():
        return [path], {}
    manifest = read_manifest(path)
    if manifest:
        files = [path / name for name in sorted(manifest["files"]) if name.endswith(".parquet")]
    else:
        files = [] if (path / PROGRESS).is_file() else _parquet_files(path)
    if manifest and not files:
        raise UserError(f"{path / MANIFEST} lists no Parquet file; delete {path} and run tfdml embed again")
    if not files:
        hint = "; it is unfinished: run the same tfdml embed again" if (path / PROGRESS).is_file() else ""
        raise UserError(f"{path} holds no finished embeddings: there is no {MANIFEST}{hint}")
    return files, manifest


def _parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder by name; none where it is none."""
    return sorted(path for path in folder.glob("*.parquet") if not path.name.startswith("."))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder; empty if there is none.

    Raises:
        UserError: It is that of something else.
    """
    path = folder / MANIFEST
    if not path.exists():
        return {}
    manifest = read_json(path)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{folder / MANIFEST} is not of a folder of embeddings")
    if manifest.get("version") != VERSION:
        raise UserError(f"{folder} is of version {manifest.get('version')} of the format; this reads {VERSION}")
    objects = dict.fromkeys(("identity", "files", "dataset", "model"), dict)
    fields({"dataset": {}, "model": {}, **manifest}, {"count": int, "dimension": int, **objects}, str(path))
    for name in manifest["files"]:
        confined(folder, name, str(path))
    return manifest


def _load(path: Path) -> Any:
    """Return the array in an .npy file, memory-mapped, or those in an .npz file by name."""
    # Whatever NumPy raises on a damaged file.
    with user_errors(Exception, f"{path} cannot be read as {path.suffix}: {REASON}"):
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, mode="r")
        with np.load(path) as archive:
            return {name: archive[name] for name in archive.files}


def _read_archive(path: Path) -> StoredEmbeddings:
    arrays = _load(path)
    if "embeddings" not in arrays:
        held = f"it holds {', '.join(arrays)}" if arrays else "it is empty"
        raise UserError(f"{path} has no array embeddings; {held}")
    roles, is_query = arrays.get("roles"), arrays.get("is_query")
    if roles is None and is_query is not None:
        if is_query.dtype != np.bool_:
            raise UserError(f"{path}: is_query must be bool, not {is_query.dtype}")
        roles = np.where(is_query, "query", "gallery")
    return _checked(str(path), arrays["embeddings"], arrays.get("labels"), roles, arrays.get("names"))


def _checked(
    source: str,
    embeddings: np.ndarray,
    labels: np.ndarray | None,
    roles: np.ndarray | None,
    names: np.ndarray | None,
    classes: np.ndarray | None = None,
) -> StoredEmbeddings:
    if embeddings.ndim != 2 or 0 in embeddings.shape or embeddings.dtype.kind not in "fiu":
        raise UserError(f"{source}: embeddings must be numbers (N, d), not {embeddings.dtype} {embeddings.shape}")
    if labels is not None and labels.dtype.kind in "US":
        classes, labels = labels.astype(np.str_), np.unique(labels, return_inverse=True)[1].reshape(labels.shape)
    if labels is not None:
        with user_errors(UserError, f"{source}: {REASON}"):
            labels = integer_labels(labels)
    for what, array in (("labels", labels), ("roles or is_query", roles), ("names", names)):
        if array is not None and array.shape != (len(embeddings),):
            raise UserError(f"{source}: {len(embeddings)} embeddings but {what} of shape {array.shape}; one for each")
    class_names: dict[int, str] = {}
    if classes is not None:
        classes = np.ravel(classes)
        names_of_classes, codes = np.unique(classes.astype(np.str_), return_inverse=True)
        if labels is not None:
            pairs = np.unique(np.stack([labels, codes]), axis=1).shape[1]
            if not pairs == len(names_of_classes) == len(np.unique(labels)):
                text = "%s: the columns label and class disagree; classes go by name, and are %d"
                logging.warning(text, source, len(names_of_classes))
                labels = None
        labels = codes.astype(np.int64) if labels is None else labels
        class_names = dict(zip(labels.tolist(), map(str, classes), strict=True))
    if roles is not None:
        unknown = set(np.unique(roles).tolist()) - set(ROLE_NAMES)
        if unknown:
            raise UserError(f"{source}: unknown role {min(map(str, unknown))!r}; one of {', '.join(ROLE_NAMES)}")
    roles = None if roles is None else roles.astype("<U7")
    named = None if names is None else tuple(names.tolist())
    return StoredEmbeddings(source, embeddings, labels, roles, named, class_names=class_names)
