"""Embeddings on disk: which images they are of, reading Parquet, .npz and .npy, and folders that resume after a kill.

Any Parquet tool reads the files. A folder is written part by part. `progress.json` has its identity and
`progress/part-000000.json` the record of a part that is done; `manifest.json` comes last, and the others go.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging

from tfdml.errors import REASON, UserError, check_choice, check_positive, differences, user_errors
from tfdml.io import files
from tfdml.memory import free_memory
from tfdml.pairwise import integer_labels
from tfdml.version import __version__

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset

FORMAT, VERSION = "tfdml-embeddings", 2
MANIFEST, PROGRESS, _RECORDS = "manifest.json", "progress.json", "progress"
# The role of an image: `train`; `test` where a set is searched all-to-all; or one side of a test split.
ROLE_NAMES = ("train", "test", "query", "gallery")
DTYPES = ("float32", "int8")
ROWS_PER_FILE = 4096
# Rows of one group, which readers take at once.
_GROUP_BYTES = 2**24
_BATCH_ROWS = 8192
# The share of the free memory that embeddings may take. Larger ones are copied into a file that is memory-mapped.
_SHARE_OF_MEMORY = 0.25


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
        sizes = [len(self.names), len(self.labels), len(self.roles)]
        sizes += [] if self.groups is None else [len(self.groups)]
        if len(set(sizes)) > 1:
            raise UserError(f"{', '.join(map(str, sizes))} names, labels, roles and groups: give as many of each")

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
        sides = [[None] * len(part) if part.groups is None else part.groups.tolist() for part in splits]
        groups = list(itertools.chain(*sides)) if any(part.groups is not None for part in splits) else None
        labels = np.concatenate([part.labels for part in splits])
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
        """Return what `table_of` takes of some of the images."""
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
        if self.roles is None or not {"query", "gallery"}.issubset(self.roles.tolist()):
            return None
        return self.roles == "query"

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
            roles = ", ".join(sorted(set(self.roles.tolist())))
            raise UserError(f"{self.source} holds no {name} images, only {roles}; name another `split`")
        groups = None if self.groups is None else self.groups[rows]
        part: Any = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
        return dataclasses.replace(
            self,
            embeddings=self.embeddings[part],
            labels=None if self.labels is None else self.labels[part],
            roles=self.roles[part],
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
        names = " and ".join(text.replace("sha256:", "")[-64:][:12] if ":" in text else text for text in (one, other))
        raise UserError(f"{what} are of different models ({names}): embed both by one model")


def holds_embeddings(path: str | os.PathLike) -> bool:
    """Whether a path is a folder of `tfdml embed`, finished or not, or a Parquet, .npz or .npy file.

    Example:
        >>> holds_embeddings("vectors.npz")
        True
    """
    path = Path(files.local_copy(path))
    parts = [path / MANIFEST, path / PROGRESS, *_parquet_files(path)]
    return path.suffix in (".npz", ".npy", ".parquet") or any(part.is_file() for part in parts)


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
    path = Path(files.local_copy(path))
    path = path.parent if path.name == MANIFEST else path
    manifest: dict[str, Any] = {}
    embeddings: np.ndarray
    columns: dict[str, np.ndarray]
    with user_errors(Exception, f"{path} cannot be read: {REASON}", keep="first"):  # whatever NumPy and Arrow raise
        if path.suffix == ".npy":
            embeddings, columns = np.lib.format.open_memmap(path, mode="r"), {}
        elif path.suffix == ".npz":
            with np.load(path) as archive:
                embeddings, columns = archive["embeddings"], _columns_of(archive)
        else:
            parts, manifest = _files_of(path)
            embeddings, columns = _read_parquet(parts)
    if embeddings.ndim != 2 or 0 in embeddings.shape or embeddings.dtype.kind not in "fiu":
        raise UserError(f"{path}: embeddings must be numbers (N, d), not {embeddings.dtype} {embeddings.shape}")
    if manifest and len(embeddings) != manifest["count"]:
        raise UserError(f"{path}: {MANIFEST} states {manifest['count']} images, the files hold {len(embeddings)}")
    if "label" in columns and columns["label"].dtype.kind not in "US":
        with user_errors(UserError, f"{path}: {REASON}"):
            columns["label"] = integer_labels(columns["label"])
    for name, values in columns.items():
        if values.shape != (len(embeddings),):
            raise UserError(f"{path}: {len(embeddings)} embeddings but {name} of shape {values.shape}; one for each")
    if unknown := set(map(str, columns.get("role", ()))) - set(ROLE_NAMES):
        raise UserError(f"{path}: unknown role {min(unknown)!r}; one of {', '.join(ROLE_NAMES)}")
    labels, class_names = _classes_of(str(path), columns.get("label"), columns.get("class"))
    return StoredEmbeddings(
        str(path),
        embeddings,
        labels,
        columns["role"].astype("<U7") if "role" in columns else None,
        tuple(columns["names"].tolist()) if "names" in columns else None,
        manifest,
        columns.get("group"),
        class_names,
    )


def read_names(path: str | os.PathLike) -> tuple[str, ...]:
    """Read the names of the images of stored embeddings, in the order of the rows; their numbers where there are none.

    Args:
        path: As `read_embeddings`.

    Raises:
        UserError: As `read_embeddings`.
    """
    path = Path(files.local_copy(path))
    if path.suffix in (".npz", ".npy"):
        stored = read_embeddings(path)
        return tuple(map(str, stored.names or range(len(stored))))
    with user_errors(Exception, f"{path} cannot be read: {REASON}", keep="first"):
        parts, _ = _files_of(path)
        count = sum(pq.read_metadata(part).num_rows for part in parts)
        names = _column(parts, "path", count)
    return tuple(map(str, range(count) if names is None else names.tolist()))


def _columns_of(archive: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the columns of an .npz file, by the names that they have in Parquet."""
    columns = {"labels": "label", "roles": "role", "names": "names"}
    table = {name: archive[array] for array, name in columns.items() if array in archive}
    if "is_query" in archive and "role" not in table:
        if archive["is_query"].dtype != np.bool_:
            raise UserError(f"is_query must be bool, not {archive['is_query'].dtype}")
        table["role"] = np.where(archive["is_query"], "query", "gallery")
    return table


def _classes_of(
    source: str, labels: np.ndarray | None, names: np.ndarray | None
) -> tuple[np.ndarray | None, dict[int, str]]:
    """Return (N,) class ids and the names of the classes; names decide where both are there and disagree."""
    if labels is not None and labels.dtype.kind in "US":
        labels, names = None, labels
    if names is None:
        return labels, {}
    classes, codes = np.unique(names.astype(np.str_), return_inverse=True)
    if labels is not None:
        pairs = np.unique(np.stack([labels, codes]), axis=1).shape[1]
        if not pairs == len(classes) == len(np.unique(labels)):
            text = "%s: the columns label and class disagree; classes go by name, and are %d"
            logging.warning(text, source, len(classes))
            labels = None
    labels = codes.astype(np.int64) if labels is None else labels
    return labels, dict(zip(labels.tolist(), map(str, names), strict=True))


def _files_of(path: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the Parquet files at a path, and the manifest of the folder; empty where there is none."""
    if not path.is_dir():
        if path.suffix != ".parquet":
            raise UserError(f"there are no embeddings at {path}")
        return [path], {}
    if (path / PROGRESS).is_file() and not (path / MANIFEST).is_file():
        raise UserError(f"{path} holds no finished embeddings: it is unfinished: run the same tfdml embed again")
    manifest = {}
    parts = _parquet_files(path)
    if (path / MANIFEST).is_file():
        objects = dict.fromkeys(("identity", "files"), dict)
        manifest = files.read_json(path / MANIFEST, {"format": str, "version": int})
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            raise UserError(f"{path / MANIFEST} is not of a folder of embeddings of format version {VERSION}")
        files.fields({"model": {}, **manifest}, {"count": int, "model": dict, **objects}, str(path / MANIFEST))
        names = [files.confined(path, name, str(path / MANIFEST)) for name in sorted(manifest["files"])]
        parts = [Path(name) for name in names if name.endswith(".parquet")]
    if not parts:
        raise UserError(f"{path} holds no finished embeddings: there is no {MANIFEST}, or it lists no Parquet file")
    return parts, manifest


def _parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files of a folder by name; none where it is none."""
    return sorted(path for path in folder.glob("*.parquet") if not path.name.startswith("."))


def _read_parquet(parts: Sequence[Path]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return (N, d) float32 embeddings, of many in a file that is mapped, and the (N,) values of other columns."""
    count, done, embeddings = sum(pq.read_metadata(part).num_rows for part in parts), 0, None
    for batch in _batches(parts, "embedding", "scale"):
        vectors = _vectors(batch)
        if embeddings is None:
            embeddings = _allocate((count, vectors.shape[1]))
        if vectors.shape[1] != embeddings.shape[1]:
            raise UserError(f"embeddings of {vectors.shape[1]} dimensions after {embeddings.shape[1]}")
        embeddings[done : done + len(vectors)] = vectors
        done += len(vectors)
    if embeddings is None:
        raise UserError(f"{parts[0]} holds no row")
    columns = {name: _column(parts, name, count) for name in ("label", "class", "role", "group")}
    return embeddings, {name: values for name, values in columns.items() if values is not None}


def _batches(parts: Sequence[Path], *names: str) -> Iterator[pa.RecordBatch]:
    for part in parts:
        with pq.ParquetFile(part, memory_map=True) as file:
            if "embedding" not in file.schema_arrow.names:
                raise UserError(f"{part} has no column embedding; it has {', '.join(file.schema_arrow.names)}")
            yield from file.iter_batches(_BATCH_ROWS, columns=list(names))


def _vectors(batch: pa.RecordBatch) -> np.ndarray:
    """(B, d) float32 of a batch."""
    column = batch.column("embedding")
    column = getattr(column, "storage", column)  # of an extension type, such as another library's tensors
    if pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type):
        values, lengths = column.flatten(), column.value_lengths().unique().to_pylist()
        is_number = pa.types.is_floating(values.type) or pa.types.is_integer(values.type)
        if is_number and not values.null_count and len(lengths) == 1 and lengths[0]:
            vectors = values.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, lengths[0])
            if "scale" in batch.schema.names:
                vectors *= batch.column("scale").to_numpy(zero_copy_only=False).astype(np.float32)[:, None]
            return vectors
    raise UserError(f"embedding must be a list of as many numbers in every row, without null, not {column.type}")


def _column(parts: Sequence[Path], name: str, count: int) -> np.ndarray | None:
    """All of a column, (N,); None where it is in no file, or no value."""
    columns = [batch.column(name) for batch in _batches(parts, name) if name in batch.schema.names]
    values = pa.chunked_array(columns) if columns else pa.chunked_array([], pa.null())
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if values.null_count == len(values):
        return None
    missing = count - len(values) + values.null_count
    if name == "group" and not missing - values.null_count:
        if not (pa.types.is_integer(values.type) or values.type in (pa.string(), pa.large_string())):
            raise UserError(f"group must be integers or text, not {values.type}")
        numbers = values.combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy().astype(np.int64)
        return np.where(numbers < 0, -1 - np.arange(len(numbers)), numbers)
    if missing:
        raise UserError(f"{missing:,} of {count:,} rows have no {name}; all or none must")
    array = values.to_numpy()
    return array.astype(np.str_) if array.dtype == object else array


def _allocate(shape: tuple[int, int]) -> np.ndarray:
    """Space for embeddings: in memory, or in a nameless file that is mapped where they are many."""
    if 4 * shape[0] * shape[1] <= _SHARE_OF_MEMORY * free_memory():
        return np.empty(shape, np.float32)
    with tempfile.NamedTemporaryFile(prefix="tfdml-embeddings-") as file:  # gone once nothing maps it
        os.posix_fallocate(file.fileno(), 0, 4 * shape[0] * shape[1])  # a full disk would end the process later
        return np.memmap(file.name, np.float32, "r+", shape=shape)


def quantized(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows in 8 bits with a scale each: v is about scale * q, to half a scale in each component.

    Args:
        vectors: (N, d) finite.

    Returns:
        q (N, d) int8 in -127 .. 127 and the scales (N,) float32, max |v| / 127; a zero row has scale 0.

    Example:
        >>> q, scale = quantized(np.array([[1.27, -0.5], [0.0, 0.0]]))
        >>> q.tolist(), np.round(scale, 4).tolist()
        ([[127, -50], [0, 0]], [0.01, 0.0])
    """
    scale = (np.abs(vectors).max(axis=1) / 127).astype(np.float32)
    # A scale too small for float32 is that of a zero row.
    divisor = np.where(scale > 0, scale, np.float32(1))[:, None]
    return np.clip(np.rint(vectors / divisor), -127, 127).astype(np.int8) * (scale > 0)[:, None], scale


def table_of(images: Mapping[str, Any], vectors: np.ndarray, dtype: str = "float32") -> pa.Table:
    """Return the Arrow table of images and their embeddings.

    Args:
        images: (N,) values of `id`, `path` and, where known, `label`, `class`, `role` and `group`; None where they are
            not.
        vectors: (N, d) float32.
        dtype: `"float32"`, or `"int8"` with a `scale` for each row, see `quantized`.

    Returns:
        The table; `group` and `scale` where there are any. `embedding` is a fixed-size list.

    Raises:
        UserError: A path is not UTF-8.

    Example:
        >>> table_of({"id": [0], "path": ["a.jpg"], "label": [3]}, np.ones((1, 2), np.float32)).column_names
        ['id', 'path', 'label', 'class', 'role', 'embedding']
    """
    require_utf8(images["path"])
    values, scale = (vectors.astype(np.float32, copy=False), None) if dtype == "float32" else quantized(vectors)
    text = pa.dictionary(pa.int32(), pa.string())
    kinds = {"id": pa.int64(), "path": pa.string(), "label": pa.int64(), "class": text, "role": text}
    kinds |= {} if images.get("group") is None else {"group": pa.int64()}
    empty = [None] * len(values)
    columns = {name: pa.array(images[name] if images.get(name) is not None else empty, kinds[name]) for name in kinds}
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    columns["embedding"] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    return pa.table(columns if scale is None else columns | {"scale": pa.array(scale)})


def require_utf8(paths: Iterable[str]) -> None:
    """Raise a `UserError` for a path that is not UTF-8, as Parquet's texts are."""
    for path in paths:
        if path != (text := path.encode("utf-8", "backslashreplace").decode()):
            raise UserError(f"Parquet holds paths as UTF-8, and {text} is not: rename the file")


def write_file(path: str | os.PathLike | Any, table: pa.Table) -> None:
    """Write a table of `table_of`; the same table gives the same bytes.

    Args:
        path: The file.
        table: The table.
    """
    field = table.schema.field("embedding").type
    # Numbers that look random do not shrink; the rest does.
    names = [name for name in table.column_names if name != "embedding"]
    pq.write_table(
        table,
        path,
        row_group_size=max(1, _GROUP_BYTES // (field.value_type.bit_width // 8 * field.list_size)),
        use_dictionary=["class", "role"],
        compression={**dict.fromkeys(names, "zstd"), "embedding.list.element": "none"},
        write_statistics=["id", "label"],
    )


def part_name(number: int) -> str:
    """Return the name of one of the files of a folder.

    Example:
        >>> part_name(7)
        'part-000007.parquet'
    """
    return f"part-{number:06d}.parquet"


class EmbeddingFolder:
    """A folder of embeddings that is written in parts, each of them a Parquet file; killed at any moment, it resumes.

    Args:
        folder: A new or empty folder, or one that was begun with the same identity.
        identity: What decides the embeddings, as JSON holds it. A folder that was begun with another is refused.

    Attributes:
        manifest: What `finish_parts` wrote; empty before.
    """

    def __init__(self, folder: str | os.PathLike, identity: Mapping[str, Any]):
        self.folder, self.identity = os.fspath(folder), dict(identity)
        self.manifest: dict[str, Any] = {}
        self._remedy = f"delete {self.folder} to start again, or name another folder"

    def path(self, name: str) -> str:
        """Return the path of a file in the folder."""
        return f"{self.folder}/{name}"

    def read(self) -> None:
        """Read what the folder was begun with, and its manifest; change nothing.

        Raises:
            UserError: It holds something else, or was begun with another identity; the message names what differs.
        """
        names = [name for name in files.listing(self.folder) if not files.is_debris(name)]
        name = MANIFEST if MANIFEST in names else PROGRESS
        if name not in names:
            if names:
                raise UserError(f"`folder={self.folder}` holds other files ({names[0]} ...); name another")
            return
        value = files.read_json(self.path(name), remedy=self._remedy)
        if (value.get("format"), value.get("version")) != (FORMAT, VERSION):
            raise UserError(f"`folder={self.folder}` holds a {name} of something else; name a new folder")
        files.fields(value, {"identity": dict}, self.path(name), self._remedy)
        different = differences(value["identity"], self.identity, lambda x: x if isinstance(x, str) else json.dumps(x))
        if different:
            raise UserError(f"`folder={self.folder}` was begun with something else: {different}; name another")
        self.manifest = value if name == MANIFEST else {}

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
            for name in files.listing(self.folder):
                if name.startswith(files.PARTIAL_PREFIX):
                    files.remove(self.path(name))
            self.read()  # again, now that nobody else can write
            if self.manifest:
                self.discard()
            yield

    def begin(self) -> None:
        """Write the identity, and make the folder of the records."""
        files.write_json(self.path(PROGRESS), {"format": FORMAT, "version": VERSION, "identity": self.identity})
        files.make_folder(self.path(_RECORDS))

    def parts(self) -> dict[int, dict[str, Any]]:
        """Return the records of the parts that are done, by number; none of parts whose file is gone or damaged.

        Raises:
            UserError: A record is damaged.
        """
        records = {}
        kinds = {"part": int, "rows": int, "dimension": int, "sha256": str}
        for name in files.listing(self.path(_RECORDS)):
            if not files.is_debris(name):
                record = files.read_json(self.path(f"{_RECORDS}/{name}"), kinds, self._remedy)
                if not record["rows"] or _is_whole(self.path(part_name(record["part"])), record):
                    records[record["part"]] = record
        return records

    def write_part(self, number: int, table: pa.Table | None, **entries: Any) -> dict[str, Any]:
        """Write the embeddings of a part, then the record that it is done.

        Args:
            number: Of the part.
            table: Of `table_of`; None for a part without any embedding.
            **entries: What else to keep of the part.

        Returns:
            What `parts` returns of it.
        """
        record = {"part": number, "rows": 0, "dimension": 0, "sha256": "", **entries}
        if table is not None:
            with files.atomic_write(self.path(part_name(number))) as temporary:
                write_file(temporary, table)
                record |= {"rows": len(table), "dimension": table.schema.field("embedding").type.list_size}
                record["sha256"] = files.sha256_of(temporary)
        files.write_json(self.path(f"{_RECORDS}/{part_name(number)}.json"), record)
        return record

    def finish_parts(self, dtype: str, about: Mapping[str, Any], more: Iterable[str] = ()) -> dict[str, Any]:
        """Write the manifest, and remove what only an unfinished folder needs.

        Args:
            dtype: One of `DTYPES`.
            about: Further entries.
            more: Names of further files of the folder.

        Returns:
            The manifest.

        """
        parts = {part_name(number): record for number, record in self.parts().items() if record["rows"]}
        listed = {name: {"sha256": record["sha256"], "rows": record["rows"]} for name, record in parts.items()}
        self.manifest = {
            "format": FORMAT,
            "version": VERSION,
            "tfdml": __version__,
            "identity": self.identity,
            "complete": True,
            "count": sum(record["rows"] for record in parts.values()),
            "dimension": next(iter(parts.values()))["dimension"],
            "dtype": dtype,
            **about,
            "files": listed | {name: {"sha256": files.sha256_of(self.path(name))} for name in more},
        }
        files.write_json(self.path(MANIFEST), self.manifest)
        self.discard()
        return self.manifest

    def discard(self) -> None:
        """Remove what only an unfinished folder needs: the records of the parts, and the identity."""
        files.remove(self.path(_RECORDS))
        files.remove(self.path(PROGRESS))


def _is_whole(path: str, record: Mapping[str, Any]) -> bool:
    # A file in a store is whole or absent, and would be fetched for its checksum.
    return files.is_file(path) and (files.in_store(path) or files.sha256_of(path) == record["sha256"])


class EmbeddingWriter(EmbeddingFolder):
    """Writes embeddings into a folder of its own; a context manager.

    Every file is written atomically before its record. The manifest comes last: a folder without it is unfinished.
    While open, the folder is locked against other writers.

    Args:
        folder: A new or empty folder, or one that was begun with the same arguments.
        identity: What decides the embeddings, such as the checksums of model and data, as JSON holds it.
        images: The images that the embeddings are of, in their order.
        dtype: `"float32"`, or `"int8"` with a scale for each row.
        rows_per_file: A file ends with the batch by which it has so many rows. A kill loses the rows of one file at
            most.

    Attributes:
        rows: How many embeddings have been appended; on entering, how many an earlier process wrote.
        manifest: What `finish` wrote; empty before.

    Raises:
        UserError: A name is not UTF-8. On entering: the folder holds something else, was begun with another identity,
            or is written by another process. Later: the disk is full, or embeddings are not as announced.

    Example:
        >>> with EmbeddingWriter("vectors", {"model": "sha256:..."}, ImageTable.of([test])) as writer:
        ...     for first in range(writer.rows, len(test), 100):
        ...         writer.append(embeddings[first : first + 100])
        ...     manifest = writer.finish()
        >>> manifest["count"]
        256
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        identity: Mapping[str, Any],
        images: ImageTable,
        dtype: str = "float32",
        rows_per_file: int = ROWS_PER_FILE,
    ):
        check_choice("`dtype`", dtype, DTYPES)
        check_positive(rows_per_file=rows_per_file)
        require_utf8((*images.names, *images.class_names.values()))
        super().__init__(folder, {**identity, "dtype": dtype, "rows_per_file": rows_per_file})
        self.images, self.dtype, self.rows_per_file = images, dtype, rows_per_file
        self.rows = self._written = self._dimension = 0
        self._batches: list[np.ndarray] = []  # appended, and not yet in a file
        self._lock = contextlib.ExitStack()

    def __enter__(self) -> EmbeddingWriter:
        with contextlib.ExitStack() as lock:
            lock.enter_context(self.opened())
            parts = self.parts()
            while record := parts.get(self._written):
                self.rows, self._dimension = self.rows + record["rows"], record["dimension"]
                self._written += 1
            self.rows = len(self.images) if self.manifest else self.rows
            self._lock = lock.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def append(self, embeddings: np.ndarray) -> None:
        """Add the embeddings (B, d) of the next images.

        Raises:
            UserError: They are not finite (the first image is named), of another dimension, or too many; the disk is
                full.
        """
        embeddings = np.ascontiguousarray(embeddings, "<f4")
        if embeddings.ndim != 2 or 0 in embeddings.shape or (self.rows and embeddings.shape[1] != self._dimension):
            expected = f"(images, {self._dimension})" if self.rows else "(images, dimensions)"
            raise UserError(f"embeddings must be {expected}, not of shape {embeddings.shape}")
        if self.rows + len(embeddings) > len(self.images):
            raise UserError(f"there are more embeddings than the {len(self.images)} images")
        bad = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
        if len(bad):
            first, more = self.images.names[self.rows + bad[0]], f"as do {len(bad) - 1} more of its batch"
            raise UserError(f"the embedding of {first} holds NaN or infinite values, {more}; has the model diverged?")
        if not self.rows:
            self._dimension = embeddings.shape[1]
            self.begin()
        self._batches.append(embeddings)
        self.rows += len(embeddings)
        if sum(map(len, self._batches)) >= self.rows_per_file:
            self._write_file()

    def finish(self, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Write the last file and then the manifest; a finished folder stays as it is.

        Args:
            about: Further entries of the manifest.

        Returns:
            The manifest.

        Raises:
            UserError: Embeddings are missing; the disk is full.
        """
        if self.manifest:
            return self.manifest
        if self.rows != len(self.images):
            raise UserError(f"there are {self.rows} embeddings of {len(self.images)} images")
        if self._batches:
            self._write_file()
        return self.finish_parts(self.dtype, about or {})

    def _write_file(self) -> None:
        vectors = np.concatenate(self._batches)
        images = self.images.columns(slice(self.rows - len(vectors), self.rows))
        self.write_part(self._written, table_of(images, vectors, self.dtype))
        self._written += 1
        self._batches = []
