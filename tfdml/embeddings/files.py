"""Embeddings on disk: which images they are of, reading Parquet, .npz and .npy, and folders that
resume after a kill.

Any Parquet tool reads the files. A folder is written part by part, and its parts are the record of
what is done: each has the folder's identity in the metadata of its schema. `manifest.json` comes
last.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import hashlib
import io
import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

from tfdml.errors import ERROR_TEXT, UserError, differences, user_errors
from tfdml.io import files
from tfdml.io.tables import Column, Table, read_table, vector_blocks
from tfdml.labels import integer_labels
from tfdml.names import (
    CLASS,
    FLAG,
    ID,
    PATH,
    ROLE,
    class_names_of,
    clean,
    quoted,
    short_fingerprint,
)
from tfdml.version import __version__

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset

FORMAT, VERSION = "tfdml-embeddings", 3
MANIFEST, BAD_IMAGES = "manifest.json", "bad_images.csv"
# The role of an image: `train`; `test` where a set is searched all-to-all; or one side of a test
# split.
ROLE_NAMES = ("train", "test", "query", "gallery")
_ROLE_OF_FLAG = {"true": "query", "1": "query", "false": "gallery", "0": "gallery"}
_COLUMNS: dict[str, Column | None] = {
    "embedding": None,
    "id": Column(ID, numbers=True),
    "path": Column(PATH),
    "label": Column(CLASS, numbers=True),
    "class": Column(CLASS),
    "role": Column(ROLE),
    "is_query": Column(FLAG),
    "group": Column(dataclasses.replace(CLASS, plural="groups", may_be_empty=True)),
}
# In the metadata of a part's schema.
_KEY = b"tfdml"
_PART = re.compile(r"part-(\d{6,})\.parquet")
# Rows of one group, which readers take at once.
_GROUP_BYTES = 2**24
# The share of the free memory that embeddings may take. Larger ones are copied into a file that is
# memory-mapped.
_SHARE_OF_MEMORY = 0.25


@dataclasses.dataclass(frozen=True)
class ImageTable:
    """Images in an order, and what is known of them.

    Args:
        names: What each image is called.
        labels: (N,) class ids. None: they are not known.
        roles: (N,) of `ROLE_NAMES`. None: they are not known.
        class_names: Names of the class ids.
        groups: (N,) integers, None for an image without one; see `tfdml.data.ImageDataset`. None:
            there are none.

    Raises:
        UserError: They differ in number, a role is another one, or `tfdml.names.clean` refuses a
            class.
    """

    names: tuple[str, ...]
    labels: Any = None
    roles: Any = None
    class_names: dict[int, str] = dataclasses.field(default_factory=dict)
    groups: Any = None

    def __post_init__(self):
        if self.labels is not None:
            object.__setattr__(self, "labels", integer_labels(self.labels))
        if self.roles is not None:
            object.__setattr__(self, "roles", _as_roles(self.roles))
        class_names = class_names_of(self.class_names, "class_names")
        object.__setattr__(self, "class_names", class_names)
        sizes = [
            len(column)
            for column in (self.names, self.labels, self.roles, self.groups)
            if column is not None
        ]
        if len(set(sizes)) > 1:
            raise UserError(
                f"{', '.join(map(str, sizes))} names, labels, roles and groups: give as many of "
                "each"
            )

    @classmethod
    def of(cls, splits: Sequence[ImageDataset], directory: str | os.PathLike = "") -> ImageTable:
        """Return the images of several splits, one after another.

        Args:
            splits: The splits; one named `"train"` holds training images, one named `"all"` images
                to measure.
            directory: Where the data set lies, or the file that lists it: names of files below it
                become relative to it, so that they mean the same wherever it lies.
        """
        directory = os.fspath(directory)
        base = directory if os.path.isdir(directory) else os.path.dirname(directory)
        prefix = os.path.join(base, "") if base else ""
        names: list[str] = []
        groups: list[int | None] = []
        class_names: dict[int, str] = {}
        for part in splits:
            names += [name.removeprefix(prefix) for name in part.names]
            groups += [None] * len(part) if part.groups is None else part.groups.tolist()
            for label, name in part.class_names.items():
                other = class_names.setdefault(label, name)
                if other != name:
                    raise UserError(
                        f"class id {label} is {other} in one split and {name} in another: embed "
                        "them into two folders, whose classes go by name"
                    )
        labels = np.concatenate([part.labels for part in splits])
        roles = np.concatenate(list(map(_roles_of_split, splits)))
        has_groups = any(part.groups is not None for part in splits)
        return cls(tuple(names), labels, roles, class_names, groups if has_groups else None)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def classes(self) -> np.ndarray | None:
        """(N,) the name of each row's class, or its number where it has no name; None without
        labels."""
        return None if self.labels is None else class_of_each(self.labels, self.class_names)

    @property
    def classes_are_numbers(self) -> bool:
        """Whether the classes have no names: their numbers mean something in these images alone."""
        return self.labels is not None and not self.class_names

    @property
    def is_query(self) -> np.ndarray | None:
        """(N,) bool where queries are searched in a gallery; None for all-to-all.

        Raises:
            UserError: Some test images have no such role, or all have the same.
        """
        sides = set() if self.roles is None else {*self.roles.tolist()} - {"train"}
        if sides <= {"test"}:
            return None
        if sides != {"query", "gallery"}:
            raise UserError(
                f"the roles of test images are {', '.join(sorted(sides))}: they must be query and "
                "gallery"
            )
        return self.roles == "query"

    def checksum(self) -> str:
        """SHA-256 of names, labels, roles and groups, as `"sha256:..."`.

        It identifies the list of images, not their content: an image that was replaced under its
        name goes unnoticed.
        """
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        for column, kind in ((self.labels, "<i8"), (self.roles, "<U7")):
            digest.update(b"" if column is None else column.astype(kind).tobytes())
        if self.groups is not None:
            digest.update(str(list(self.groups)).encode())
        return f"sha256:{digest.hexdigest()}"

    def columns(self, rows: slice = slice(None)) -> dict[str, Any]:
        """Return what `table_of` takes of some of the images; None for what is not known."""
        parts = {"label": self.labels, "class": self.classes, "role": self.roles}
        columns = {
            name: column[rows].tolist() for name, column in parts.items() if column is not None
        }
        groups = None if self.groups is None else list(self.groups[rows])
        return {
            "id": [*range(*rows.indices(len(self)))],
            "path": list(self.names[rows]),
            **columns,
            "group": groups,
        }


@dataclasses.dataclass(frozen=True)
class StoredEmbeddings(ImageTable):
    """Embeddings read from disk, and the images that they are of.

    Args:
        source: Where they were read from.
        embeddings: (N, d); memory-mapped if they come from an .npy file or are too large for the
            memory.
        manifest: The folder's manifest; empty for a file from elsewhere.
        groups: (N,) int64, or None where the file holds none. Images without a group have each a
            negative number of their own.
        **images: As `ImageTable`. Images without a name are called by their numbers.
    """

    source: str = dataclasses.field(kw_only=True)
    embeddings: np.ndarray = dataclasses.field(kw_only=True)
    manifest: dict[str, Any] = dataclasses.field(kw_only=True, default_factory=dict)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.source

    @property
    def model(self) -> str:
        """The fingerprint of the model that embedded them; empty where it is not known."""
        return str(self.manifest.get("model", {}).get("fingerprint", ""))

    @property
    def admits(self) -> tuple[str, ...]:
        """The fingerprints of other models whose vectors may search them, see `Gallery.admit`."""
        return tuple(map(str, self.manifest.get("admits", ())))

    @property
    def has_names(self) -> bool:
        """Whether the images have names, and not only their numbers."""
        return self.names != tuple(map(str, range(len(self))))

    def split(self, name: str) -> StoredEmbeddings:
        """Return the rows of one split; a run of rows in one piece stays memory-mapped.

        Args:
            name: `"train"` or `"test"` (with queries and gallery).

        Raises:
            UserError: There are none.
        """
        if self.roles is None:
            return self
        rows: Any = np.flatnonzero((self.roles == "train") == (name == "train"))
        if not len(rows):
            roles = ", ".join(sorted(set(self.roles.tolist())))
            raise UserError(
                f"{self.source} holds no {name} images, only {roles}; name another split"
            )
        columns: dict[str, Any] = {"names": tuple(self.names[row] for row in rows)}
        first, last = rows[0], rows[-1]
        if last - first + 1 == len(rows):
            rows = slice(first, last + 1)
        columns["embeddings"] = self.embeddings[rows]
        columns["roles"] = self.roles[rows]
        columns["labels"] = None if self.labels is None else self.labels[rows]
        columns["groups"] = None if self.groups is None else self.groups[rows]
        if self.groups is not None and (columns["groups"] < 0).all():
            columns["groups"] = None
        return dataclasses.replace(self, **columns)


def _roles_of_split(dataset: ImageDataset) -> np.ndarray:
    """Return the role of each image of a split, (N,)."""
    if dataset.is_query is not None:
        return np.where(dataset.is_query, "query", "gallery")
    role = "test" if dataset.split == "all" else dataset.split
    return np.full(len(dataset), role, "<U7")


def _as_roles(roles: Any) -> np.ndarray:
    names = clean(roles, ROLE, "roles")
    for name in sorted({*names} - {*ROLE_NAMES}):
        raise UserError(f"roles: one of {', '.join(ROLE_NAMES)}, not {quoted(name)}")
    return np.array(names, "<U7")


def class_of_each(labels: Any, class_names: Mapping[int, str]) -> np.ndarray:
    """Return (N,) names of the classes of (N,) class ids; the digits of those without a name.

    Example:
        >>> class_of_each([3, 8, 3], {3: "bus"}).tolist()
        ['bus', '8', 'bus']
    """
    ids, codes = np.unique(labels, return_inverse=True)
    return np.array([class_names.get(label, str(label)) for label in ids.tolist()], object)[codes]


def truncate(vectors: np.ndarray, dim: int) -> np.ndarray:
    """Return the first dimensions of vectors, scaled to length 1; a zero vector stays zero.

    Args:
        vectors: (N, d).
        dim: How many dimensions.

    Raises:
        UserError: The vectors have fewer.

    Example:
        >>> truncate(np.array([[3.0, 4.0, 12.0]]), 2)
        array([[0.6, 0.8]], dtype=float32)
    """
    if not 1 <= dim <= vectors.shape[1]:
        raise UserError(f"the embeddings have {vectors.shape[1]} dimensions", truncate_dim=dim)
    first = np.asarray(vectors[:, :dim], np.float64)
    lengths = np.linalg.norm(first, axis=1, keepdims=True)
    return (first / np.maximum(lengths, 1e-300)).astype(np.float32)


def check_same_model(first: str, second: str, vectors: str) -> None:
    """Raise a `UserError` where vectors are of two models; a fingerprint that is not known (empty)
    fits any other.

    Args:
        first: The fingerprint of a model.
        second: Another one.
        vectors: What is compared, for the message.
    """
    if first and second and first != second:
        names = f"{short_fingerprint(first)} and {short_fingerprint(second)}"
        raise UserError(f"{vectors} are of different models ({names}): embed both by one model")


def holds_embeddings(path: str | os.PathLike) -> bool:
    """Whether a path is a folder of `tfdml embed`, finished or not, or a Parquet, .npz or .npy
    file.

    Example:
        >>> holds_embeddings("vectors.npz")
        True
    """
    path = Path(files.local_copy(path))
    parts = [path / MANIFEST, *_parquet_files(path)]
    return path.suffix.lower() in (".npz", ".npy", ".parquet") or any(
        part.is_file() for part in parts
    )


def read_embeddings(path: str | os.PathLike) -> StoredEmbeddings:
    """Read the embeddings of a folder that `tfdml embed` wrote, or of Parquet, .npz or .npy files
    from anywhere.

    Files have the column `embedding`, (N, d) in an .npz and lists of d numbers in Parquet, and
    optionally, with a value for each row, `class` (its name), `label` (a name, or a number of these
    files alone), `path` or `id`, `role`, or else `is_query` for queries that are searched in the
    rest, and `group` (integers or text). Rows come in the order of the files. An .npy holds the
    embeddings only, and is memory-mapped.

    Columns go by the same names in Parquet and .npz files, and plurals such as `labels` stand for
    them; see `tfdml.io.tables.read_table`.

    Args:
        path: The folder or its manifest; a Parquet file, or a folder of them; the .npz or .npy
            file.

    Raises:
        UserError: There is nothing, something else, something unfinished, or arrays that do not go
            together.

    Example:
        >>> stored = read_embeddings("embeddings/cars")
        >>> tfdml.evaluation.evaluate_retrieval(stored.embeddings, stored.labels)["recall@1"]
        0.668
    """
    path = Path(files.local_copy(path))
    path = path.parent if path.name == MANIFEST else path
    manifest: dict[str, Any] = {}
    embeddings: np.ndarray
    table = Table("", str(path), {})
    with user_errors(
        Exception, f"{path} cannot be read: {ERROR_TEXT}", keep="first"
    ):  # whatever NumPy and Arrow raise
        if path.suffix.lower() == ".npy":
            embeddings = np.lib.format.open_memmap(path, mode="r")
        elif path.suffix.lower() == ".npz":
            columns = {**_COLUMNS, "embedding": Column(None)}
            table = read_table("", str(path), columns, ("embedding",))
            embeddings = table.columns.pop("embedding")
        else:
            parts, manifest = _files_of(path)
            paths = list(map(str, parts))
            table = read_table("", str(path), _COLUMNS, ("embedding",), paths)
            embeddings = _vectors_of(paths, table.keys["embedding"])
    if embeddings.ndim != 2 or 0 in embeddings.shape or embeddings.dtype.kind not in "fiu":
        raise UserError(
            f"{path}: embeddings must be numbers (N, d), not {embeddings.dtype} {embeddings.shape}"
        )
    if len(embeddings) != manifest.get("count", len(embeddings)):
        raise UserError(
            f"{path}: {MANIFEST} states {manifest['count']} images, the files hold "
            f"{len(embeddings)}"
        )
    labels, class_names = _classes_of(table)
    return StoredEmbeddings(
        _names_of(table, len(embeddings)),
        labels,
        _roles_of(table),
        class_names,
        _groups_of(table),
        source=str(path),
        embeddings=embeddings,
        manifest=manifest,
    )


def _names_of(table: Table, count: int) -> tuple[str, ...]:
    """Return what the images are called: their paths, or else their ids, or else their numbers."""
    names = table.columns.get("path", table.columns.get("id", range(count)))
    return tuple(map(str, names))


def _roles_of(table: Table) -> list[str] | None:
    if {"role", "is_query"} <= table.columns.keys():
        raise UserError(f"{table.source} has the columns role and is_query: leave out one of them")
    if "is_query" in table.columns:
        flags = [flag.lower() for flag in table.columns["is_query"]]
        table.columns["is_query"] = flags
        table.check_cells("is_query", _ROLE_OF_FLAG.__contains__, "true or false")
        return [_ROLE_OF_FLAG[flag] for flag in flags]
    if "role" not in table.columns:
        return None
    table.check_cells("role", ROLE_NAMES.__contains__, f"one of {', '.join(ROLE_NAMES)}")
    return table.columns["role"]


def _groups_of(table: Table) -> np.ndarray | None:
    """Return (N,) numbers of the groups in their order; negative ones of their own for images
    without a group."""
    if "group" not in table.columns:
        return None
    groups = table.columns["group"]
    number_of: dict[str, int] = {}
    for group in filter(None, groups):
        number_of.setdefault(group, len(number_of))
    numbers = [number_of.get(group, -1 - row) for row, group in enumerate(groups)]
    return np.array(numbers, np.int64)


def _classes_of(table: Table) -> tuple[np.ndarray | None, dict[int, str]]:
    """Return (N,) class ids and the names of the classes; names decide where both are there and
    disagree."""
    labels = table.columns.get("label")
    names = table.columns.get("class")
    if isinstance(labels, list):
        names = labels
        labels = None
    if labels is not None:
        with user_errors(UserError, f"{table.source}: {ERROR_TEXT}"):
            labels = integer_labels(labels)
    if names is None:
        return labels, {}
    id_of = {name: number for number, name in enumerate(sorted(set(names)))}
    codes = np.array([id_of[name] for name in names], np.int64)
    if labels is not None:
        pairs = np.unique(np.stack([labels, codes]), axis=1).shape[1]
        if not pairs == len(id_of) == len(np.unique(labels)):
            text = "%s: the columns label and class disagree; classes go by name, and are %d"
            logging.warning(text, table.source, len(id_of))
            labels = None
    labels = codes if labels is None else labels
    return labels, dict(zip(labels.tolist(), names, strict=True))


def _files_of(path: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the Parquet files at a path, and the manifest of the folder; empty where there is
    none."""
    if not path.is_dir():
        if path.suffix.lower() != ".parquet":
            raise UserError(f"there are no embeddings at {path}")
        if (
            _KEY not in (pq.read_schema(path).metadata or {})
            or not (path.parent / MANIFEST).is_file()
        ):
            return [path], {}
        logging.warning("%s is a part of the embeddings in its folder", path)
        return [path], {"model": _manifest_of(path.parent)["model"]}
    manifest = {}
    parts = _parquet_files(path)
    if not (path / MANIFEST).is_file():
        _refuse_others(path)
    if (path / MANIFEST).is_file():
        manifest = _manifest_of(path)
        names = [
            files.confined(path, name, str(path / MANIFEST)) for name in sorted(manifest["files"])
        ]
        parts = [Path(name) for name in names if name.endswith(".parquet")]
    elif any(_KEY in (pq.read_schema(part).metadata or {}) for part in parts):
        raise UserError(
            f"{path} holds no finished embeddings: it is unfinished: run the same tfdml embed again"
        )
    if not parts:
        raise UserError(
            f"{path} holds no finished embeddings: there is no {MANIFEST}, or it lists no Parquet "
            "file"
        )
    return parts, manifest


def _manifest_of(folder: Path) -> dict[str, Any]:
    path, objects = folder / MANIFEST, dict.fromkeys(("identity", "files", "model"), dict)
    manifest = {"model": {}, **files.read_json(path, {"format": str, "version": int})}
    if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
        raise UserError(f"{path} is not of a folder of embeddings of format version {VERSION}")
    return files.fields(manifest, {"count": int, **objects}, str(path))


def admit_models(folder: str | os.PathLike, models: Sequence[str]) -> None:
    """Write which other models may search the embeddings of a folder.

    Args:
        folder: A finished folder of `tfdml embed`.
        models: Their fingerprints.

    Raises:
        UserError: It is none, or cannot be written.
    """
    path = Path(folder)
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"{path} is no folder of tfdml embed, which keeps what it admits: put it into a "
            "database with tfdml index"
        )
    files.write_json(path / MANIFEST, {**_manifest_of(path), "admits": list(models)})


def _refuse_others(folder: Path) -> None:
    """Refuse a folder whose Parquet files would be read in part."""
    others = []
    for path in sorted(folder.rglob("*") if _parquet_files(folder) else folder.glob("*")):
        is_part = path.parent == folder and path.suffix == ".parquet"
        if not path.name.startswith((".", "_")) and not is_part and _is_parquet(path):
            others.append(path)
    if others:
        raise UserError(
            f"{folder}: {len(others):,} Parquet files would be left out, such as "
            f"{others[0].relative_to(folder)}: parts lie in the folder itself and end in .parquet; "
            "rename them, or put them elsewhere"
        )


def _is_parquet(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def _parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder by name; none where it is none."""
    return sorted(path for path in folder.glob("*.parquet") if not path.name.startswith("."))


def _vectors_of(paths: Sequence[str], key: str) -> np.ndarray:
    """Return the (N, d) float32 embeddings of Parquet files, of many in a file that is mapped."""
    count = sum(pq.read_metadata(path).num_rows for path in paths)
    if not count:
        raise UserError(f"{paths[0]} holds no row")
    done = 0
    embeddings = np.zeros((0, 0), np.float32)
    for vectors in vector_blocks(paths, key):
        if not done:
            embeddings = _allocate((count, vectors.shape[1]))
        if vectors.shape[1] != embeddings.shape[1]:
            raise UserError(
                f"{paths[0]}: embeddings of {vectors.shape[1]} dimensions after "
                f"{embeddings.shape[1]}; all must have as many"
            )
        embeddings[done : done + len(vectors)] = vectors
        done += len(vectors)
    return embeddings


def _allocate(shape: tuple[int, int]) -> np.ndarray:
    """Space for embeddings: in memory, or in a nameless file that is mapped where they are many."""
    if 4 * shape[0] * shape[1] <= _SHARE_OF_MEMORY * files.free_memory():
        return np.empty(shape, np.float32)
    with tempfile.NamedTemporaryFile(
        prefix="tfdml-embeddings-"
    ) as file:  # gone once nothing maps it
        os.posix_fallocate(
            file.fileno(), 0, 4 * shape[0] * shape[1]
        )  # a full disk would end the process later
        return np.memmap(file.name, np.float32, "r+", shape=shape)


def table_of(images: Mapping[str, Any], vectors: np.ndarray) -> pa.Table:
    """Return the Arrow table of images and their embeddings.

    Args:
        images: (N,) values of `id`, `path` and, where known, `label`, `class`, `role` and `group`;
            None where they are not.
        vectors: (N, d) float32.

    Returns:
        The table; `group` where there is any. `embedding` is a fixed-size list.

    Raises:
        UserError: A path is not UTF-8, or a vector is not finite; its path is named.

    Example:
        >>> table_of({"id": [0], "path": ["a.jpg"], "label": [3]}, np.ones((1, 2),
        ...     np.float32)).column_names
        ['id', 'path', 'label', 'class', 'role', 'embedding']
    """
    require_utf8(images["path"])
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        first, more = images["path"][bad[0]], f"as do {len(bad) - 1} more of its file"
        raise UserError(
            f"the embedding of {first} holds NaN or infinite values, {more}; has the model "
            "diverged?"
        )
    text = pa.dictionary(pa.int32(), pa.string())
    kinds = {
        "id": pa.int64(),
        "path": pa.string(),
        "label": pa.int64(),
        "class": text,
        "role": text,
    }
    kinds |= {} if images.get("group") is None else {"group": pa.int64()}
    empty = [None] * len(vectors)
    columns = {
        name: pa.array(images[name] if images.get(name) is not None else empty, kinds[name])
        for name in kinds
    }
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    columns["embedding"] = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    return pa.table(columns)


def require_utf8(texts: Iterable[str]) -> None:
    """Raise a `UserError` for a path or name that is not UTF-8, as Parquet's texts are."""
    for text in texts:
        if text != (shown := text.encode("utf-8", "backslashreplace").decode()):
            raise UserError(f"Parquet holds paths as UTF-8, and {shown} is not: rename the file")


def write_file(path: str | os.PathLike | Any, table: pa.Table) -> None:
    """Write a table of `table_of`; the same table gives the same bytes.

    Args:
        path: The file.
        table: The table.
    """
    # Numbers that look random do not shrink; the rest does.
    names = [name for name in table.column_names if name != "embedding"]
    compression = {**dict.fromkeys(names, "zstd"), "embedding.list.element": "none"}
    bytes_of_row = 4 * table.schema.field("embedding").type.list_size
    pq.write_table(
        table,
        path,
        row_group_size=max(1, _GROUP_BYTES // bytes_of_row),
        use_dictionary=["class", "role"],
        compression=compression,
        write_statistics=["id", "label"],
        write_page_checksum=True,
    )


def part_name(number: int) -> str:
    """Return the name of one of the files of a folder.

    Example:
        >>> part_name(7)
        'part-000007.parquet'
    """
    return f"part-{number:06d}.parquet"


@dataclasses.dataclass(frozen=True)
class PartRecord:
    """What a part of a folder holds.

    Args:
        rows: Its embeddings.
        dimension: d.
        bad: The images that could not be embedded: id, path and reason of each.
    """

    rows: int
    dimension: int
    bad: list[list]


class EmbeddingFolder:
    """A folder of embeddings that is written in parts, each of them a Parquet file; killed at any
    moment, it resumes.

    A part is written atomically, and is its own record. The manifest comes last: a folder without
    it is unfinished.

    Args:
        folder: A new or empty folder, or one that was begun with the same identity; of several
            machines, one that all have mounted at the same place.
        identity: What decides the embeddings, such as the checksums of model and images, as JSON
            holds it. A folder that was begun with another is refused.

    Attributes:
        manifest: What `finish` wrote; empty before.

    Example:
        >>> folder = EmbeddingFolder("vectors", {"model": "sha256:..."})
        >>> with folder.opened():
        ...     record = folder.write_part(0, ImageTable.of([test]).columns(), embeddings)
        ...     manifest = folder.finish(len(test))
        >>> manifest["count"]
        256
    """

    def __init__(self, folder: str | os.PathLike, identity: Mapping[str, Any]):
        self.folder = os.fspath(folder) if files.is_remote(folder) else os.path.abspath(folder)
        self.identity, self.manifest = dict(identity), dict[str, Any]()

    def path(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return f"{self.folder}/{name}"

    def read(self) -> None:
        """Read what the folder was begun with, and its manifest; change nothing.

        Raises:
            UserError: It holds something else, or was begun with another identity; the message
                names what differs.
        """
        names = [name for name in files.listing(self.folder) if not name.startswith(".")]
        if MANIFEST in names:
            remedy = f"delete {self.folder} to start again, or name another folder"
            value = files.read_json(self.path(MANIFEST), remedy=remedy)
            if (value.get("format"), value.get("version")) != (FORMAT, VERSION):
                raise UserError(
                    f"holds a {MANIFEST} of something else; name a new folder", folder=self.folder
                )
            self._compare(
                files.fields(value, {"identity": dict}, self.path(MANIFEST), remedy)["identity"]
            )
            self.manifest = value
            return
        for name in names:
            if _PART.fullmatch(name):
                self._record(name, whole=False)
            elif name != BAD_IMAGES:
                raise UserError(f"holds other files ({name} ...); name another", folder=self.folder)

    def _compare(self, identity: Mapping[str, Any]) -> None:
        different = differences(
            identity, self.identity, lambda x: x if isinstance(x, str) else json.dumps(x)
        )
        if different:
            raise UserError(
                f"was begun with something else: {different}; name another", folder=self.folder
            )

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, hold its lock, and remove what a killed process left half-written.

        Raises:
            UserError: As `read`; another process holds the lock; the folder cannot be written.
        """
        self.read()
        files.make_folder(self.folder)
        is_local = not files.is_remote(self.folder)  # object stores have no locks
        with files.locked(self.folder, "folder") if is_local else contextlib.nullcontext():
            if is_local:
                files.sweep(self.folder)
            self.read()  # again, now that nobody else can write
            yield

    def parts(self) -> dict[int, PartRecord]:
        """Return what the parts hold, by number; none of those that are damaged.

        Raises:
            UserError: A file is of something else, or was begun with another identity.
        """
        matches = filter(None, map(_PART.fullmatch, files.listing(self.folder)))
        records = {int(match[1]): self._record(match[0]) for match in matches}
        return {number: record for number, record in records.items() if record}

    def _record(self, name: str, whole: bool = True) -> PartRecord | None:
        """Return what a part holds; None where it is damaged, which the checksums of its pages
        show.

        Args:
            name: Of the file.
            whole: Whether its pages are read, and not its end alone.
        """
        try:
            with files.open_file(self.path(name)) as file:
                part = pq.ParquetFile(file, page_checksum_verification=True)
                schema, rows = part.schema_arrow, part.metadata.num_rows
                if whole:
                    part.read()
        except (OSError, pa.ArrowException):
            return None
        text = (schema.metadata or {}).get(_KEY)
        if text is None:
            raise UserError(f"holds other files ({name} ...); name another", folder=self.folder)
        about = files.fields(
            files.parse_json(text, self.path(name)),
            {"identity": dict, "bad": list},
            self.path(name),
        )
        self._compare(about["identity"])
        return PartRecord(rows, schema.field("embedding").type.list_size, about["bad"])

    def write_part(
        self, number: int, images: Mapping[str, Any], vectors: np.ndarray, bad: Sequence[list] = ()
    ) -> PartRecord:
        """Write the embeddings of a part.

        Args:
            number: Of the part.
            images: As `table_of`.
            vectors: (N, d) float32; N may be 0.
            bad: As `PartRecord`.

        Raises:
            UserError: As `table_of`; the disk is full.
        """
        vectors = vectors if len(vectors) else np.zeros((0, 1), np.float32)
        about: dict[str, Any] = {"identity": self.identity, "bad": list(bad)}
        table = table_of(images, vectors).replace_schema_metadata(
            {_KEY: json.dumps(about, sort_keys=True)}
        )
        with files.atomic_write(self.path(part_name(number))) as temporary:
            write_file(temporary, table)
        return PartRecord(len(table), vectors.shape[1], about["bad"])

    def finish(self, images: int, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write the list of bad images, if there are any, and the manifest.

        Args:
            images: How many there are, the bad ones among them.
            about: Further entries of the manifest.

        Returns:
            The manifest.

        Raises:
            UserError: Parts are missing, or no image could be embedded; the disk is full.
        """
        parts = self.parts()
        bad = list(itertools.chain.from_iterable(parts[number].bad for number in sorted(parts)))
        count = sum(record.rows for record in parts.values())
        if count + len(bad) != images:
            raise UserError(f"there are {count} embeddings of {images} images in {self.folder}")
        if not count:
            _, name, reason = bad[0]
            raise UserError(
                f"none of the {len(bad):,} images can be read; the first: {name}: {reason}"
            )
        entries = self._keep_parts(parts)
        if bad:
            self._write_bad_images(bad)
            entries[BAD_IMAGES] = {}
        for name, entry in entries.items():
            entry["sha256"] = files.sha256_of(self.path(name))
        dimension = next(record.dimension for record in parts.values() if record.rows)
        header = {"format": FORMAT, "version": VERSION, "tfdml": __version__}
        self.manifest = {
            **header,
            "identity": self.identity,
            "count": count,
            "bad_images": len(bad),
            "dimension": dimension,
            **(about or {}),
            "files": entries,
        }
        files.write_json(self.path(MANIFEST), self.manifest)
        return self.manifest

    def _keep_parts(self, parts: Mapping[int, PartRecord]) -> dict[str, dict[str, Any]]:
        """Return the entries of the parts in the manifest; remove parts without an embedding."""
        entries: dict[str, dict[str, Any]] = {}
        for number, record in sorted(parts.items()):
            name = part_name(number)
            if record.rows:
                entries[name] = {"rows": record.rows}
            else:
                files.remove(self.path(name))
        return entries

    def _write_bad_images(self, bad: Sequence[list]) -> None:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["id", "path", "reason"])
        writer.writerows(bad)
        files.write_whole(self.path(BAD_IMAGES), text.getvalue().encode())
