"""Embeddings that lie on disk with their labels: a folder that is memory-mapped, Parquet files, or one .npz file."""

from __future__ import annotations

import csv
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.errors import UserError, short_message
from tfdml.manifests import confined, fields, read_json
from tfdml.special_files import require_regular

MANIFEST = "manifest.json"
EMBEDDINGS = "embeddings.npy"
LABELS = "labels.npy"
ROLES = "roles.npy"
IMAGES = "images.csv"
ARCHIVE = "embeddings.npz"
PROGRESS = "progress.json"
FORMAT = "tfdml-embeddings"
VERSION = 1
# The role of an image: `train`; `test` where a set is searched all in all; or one side of a test split.
ROLE_NAMES = ("train", "test", "query", "gallery")


@dataclasses.dataclass(frozen=True)
class StoredEmbeddings:
    """Embeddings read from disk.

    Args:
        source: Where they were read from.
        embeddings: (N, d); memory-mapped where they lie in a folder.
        labels: (N,) int64 class ids, or None where the file holds none.
        roles: (N,) of `ROLE_NAMES`, or None where the file does not say.
        names: What each image is called, or None.
        manifest: The folder's manifest; empty for a file from elsewhere.
    """

    source: str
    embeddings: np.ndarray
    labels: np.ndarray | None
    roles: np.ndarray | None = None
    names: tuple[str, ...] | None = None
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.embeddings)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.source

    @property
    def is_query(self) -> np.ndarray | None:
        """(N,) bool where queries are searched in a gallery; None for all in all."""
        if self.roles is None:
            return None
        query = self.roles == "query"
        return query if query.any() and (self.roles == "gallery").any() else None

    def split(self, name: str) -> StoredEmbeddings:
        """The rows of one split; a run of rows in one piece stays memory-mapped.

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
        chosen: Any = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
        return dataclasses.replace(
            self,
            embeddings=self.embeddings[chosen],
            labels=None if self.labels is None else self.labels[chosen],
            roles=self.roles[chosen],
            names=None if self.names is None else tuple(self.names[row] for row in rows),
        )


def holds_embeddings(path: str | os.PathLike) -> bool:
    """Whether a path is a folder of `bin/embed`, finished or not, or Parquet files, or an .npz or .npy file.

    Example:
        >>> holds_embeddings("vectors.npz")
        True
    """
    path = Path(path)
    known = path.suffix in (".npz", ".npy", ".parquet")
    return known or any((path / name).is_file() for name in (MANIFEST, PROGRESS)) or bool(_parquet_files(path))


def read_embeddings(path: str | os.PathLike) -> StoredEmbeddings:
    """The embeddings of a folder that `bin/embed` wrote, or of Parquet or an .npz file from anywhere.

    An .npz holds `embeddings` (N, d) and `labels` (N,), integers or names of classes; optionally `is_query` (N,) bool,
    for queries that are searched in the rest, or `roles` (N,), and `names` (N,). It is read into memory; a folder's
    embeddings are memory-mapped. Parquet files have the column `embedding`, lists of d numbers, and optionally `label`,
    `role`, `id` (numbers, by which the rows are ordered) and `scale` (each row is multiplied by its own).

    Args:
        path: The folder, its manifest or its `embeddings.npy`; a Parquet file, or a folder of them; the .npz file.

    Raises:
        UserError: There is nothing, something else, something unfinished, or arrays that do not go together.

    Example:
        >>> stored = read_embeddings("embeddings/cars")
        >>> evaluate_retrieval(stored.embeddings, stored.labels)["recall@1"]
        0.555
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".parquet":
        return _read_parquet(path, [path])
    if path.name in (MANIFEST, EMBEDDINGS) and (path.parent / MANIFEST).is_file():
        return _read_folder(path.parent)
    if path.suffix == ".npz":
        return _read_archive(path)
    if path.suffix == ".npy":
        raise UserError(f"{path} holds vectors but no labels: put both into an .npz, as embeddings and labels")
    raise UserError(f"there are no embeddings at {path}")


def read_names(path: str | os.PathLike) -> tuple[str, ...]:
    """The names of the images of a folder of `bin/embed`, in the order of its rows.

    Raises:
        UserError: There is no table, or it is not one of ours.
    """
    table = Path(path) / IMAGES
    if not table.exists() and (files := _parquet_files(Path(path))):
        from tfdml.embeddings import parquet

        names = parquet.read_paths(files)
        if names is None:
            raise UserError(f"{files[0]} has no column path")
        return names
    try:
        with open(table, encoding="utf-8", errors="surrogateescape", newline="") as file:
            return tuple(row["id"] for row in csv.DictReader(file))
    except OSError as error:
        raise UserError(f"{table} cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise UserError(f"{table} has no column id") from error


def _read_folder(folder: Path) -> StoredEmbeddings:
    manifest = read_manifest(folder)
    if not manifest and not (folder / PROGRESS).is_file() and (files := _parquet_files(folder)):
        return _read_parquet(folder, files)
    if not manifest:
        hint = "; it is unfinished: run the same bin/embed again" if (folder / PROGRESS).is_file() else ""
        raise UserError(f"{folder} holds no finished embeddings: there is no {MANIFEST}{hint}")
    files = [folder / name for name in sorted(manifest["files"]) if name.endswith(".parquet")]
    if files:
        stored = dataclasses.replace(_read_parquet(folder, files), manifest=manifest)
        return _as_many_as_stated(stored, folder)
    if (folder / ARCHIVE).is_file() and not (folder / EMBEDDINGS).is_file():
        return dataclasses.replace(_read_archive(folder / ARCHIVE), source=str(folder), manifest=manifest)
    arrays = {name: _open_array(folder / name, mapped=name == EMBEDDINGS) for name in (EMBEDDINGS, LABELS, ROLES)}
    stored = _checked(str(folder), arrays[EMBEDDINGS], arrays[LABELS], arrays[ROLES], None)
    return _as_many_as_stated(dataclasses.replace(stored, manifest=manifest), folder)


def _as_many_as_stated(stored: StoredEmbeddings, folder: Path) -> StoredEmbeddings:
    stated = stored.manifest.get("count")
    if len(stored) != stated:
        raise UserError(f"{folder}: {MANIFEST} states {stated} images, the arrays of {len(stored)}")
    return stored


def _parquet_files(folder: Path) -> list[Path]:
    """The Parquet files of a folder by name; none where it is none."""
    return sorted(path for path in folder.glob("*.parquet") if not path.name.startswith("."))


def _read_parquet(source: Path, files: list[Path]) -> StoredEmbeddings:
    from tfdml.embeddings import parquet

    rows = parquet.read_files(files)
    return _checked(str(source), rows.embeddings, rows.labels, rows.roles, None)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder; empty if there is none.

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
    fields(manifest, {"count": int, "dimension": int, "identity": dict, "files": dict}, str(path))
    for name in manifest["files"]:
        confined(folder, name, str(path))
    if not isinstance(manifest.get("dataset", {}), dict) or not isinstance(manifest.get("model", {}), dict):
        raise UserError(f"{path} is damaged: its keys dataset and model must be objects")
    return manifest


def _open_array(path: Path, mapped: bool = False) -> np.ndarray:
    try:
        require_regular(path)
        return np.load(path, mmap_mode="r" if mapped else None)
    except Exception as error:  # whatever NumPy raises on a damaged file
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _read_archive(path: Path) -> StoredEmbeddings:
    try:
        require_regular(path)
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise UserError(f"there is no file {path}") from error
    except Exception as error:  # whatever NumPy raises on a damaged file
        raise UserError(f"{path} cannot be read as .npz: {short_message(error)}") from error
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
) -> StoredEmbeddings:
    if embeddings.ndim != 2 or 0 in embeddings.shape or embeddings.dtype.kind not in "fiu":
        raise UserError(
            f"{source}: embeddings must be numbers (images, dimensions), neither of them 0; they are "
            f"{embeddings.dtype} of shape {embeddings.shape}"
        )
    for what, array in (("labels", labels), ("roles or is_query", roles), ("names", names)):
        if array is not None and array.shape != (len(embeddings),):
            raise UserError(f"{source}: {len(embeddings)} embeddings but {what} of shape {array.shape}; one for each")
    if labels is not None and labels.dtype.kind in "US":
        labels = np.unique(labels, return_inverse=True)[1]
    if labels is not None:
        if labels.dtype.kind not in "iu":
            raise UserError(f"{source}: labels must be integers or names of classes, not {labels.dtype}")
        labels = labels.astype(np.int64)
    if roles is not None:
        unknown = set(np.unique(roles).tolist()) - set(ROLE_NAMES)
        if unknown:
            raise UserError(f"{source}: unknown role {min(map(str, unknown))!r}; one of {', '.join(ROLE_NAMES)}")
    return StoredEmbeddings(source, embeddings, labels, roles, None if names is None else tuple(names.tolist()))
