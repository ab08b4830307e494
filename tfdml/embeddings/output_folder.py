"""The folder that embeddings are written into: its owner, its progress, and files written whole or not at all."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.embeddings.reader import FORMAT, PROGRESS, read_manifest
from tfdml.errors import UserError, differences
from tfdml.manifests import fields, read_json
from tfdml.output_paths import require_local
from tfdml.storage import PARTIAL_PREFIX, atomic_write, lock

PARTIAL = "embeddings.npy.partial"


def read_state(folder: str | os.PathLike, identity: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest and the progress of a folder, either or both empty, without changing anything.

    Args:
        folder: The folder; it need not exist.
        identity: What decides the embeddings that are to be written there.

    Raises:
        UserError: It holds something else, or was begun with another identity: what differs is named.

    Example:
        >>> read_state("no/such/folder", {})
        ({}, {})
    """
    require_local(folder, "folder")
    folder = Path(folder)
    if not folder.exists():
        return {}, {}
    if not folder.is_dir():
        raise UserError(f"`folder={folder}` is a file; name a folder")
    manifest, progress = read_manifest(folder), _read_progress(folder)
    others = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(PARTIAL_PREFIX))
    if not manifest and not progress and others not in ([], [PARTIAL]):
        raise UserError(f"`folder={folder}` holds other files ({others[0]} ...); name a new or an empty folder")
    begun = (manifest or progress).get("identity", identity)
    different = differences(begun, identity, _text)
    if different:
        raise UserError(
            f"`folder={folder}` was begun with something else: {different}; name another folder, or delete it"
        )
    return manifest, progress


def _read_progress(folder: Path) -> dict[str, Any]:
    path, remedy = folder / PROGRESS, f"delete {folder} or name another folder"
    if not path.exists():
        return {}
    progress = read_json(path, remedy=remedy)
    if progress.get("format") != FORMAT:
        raise UserError(f"{path} is damaged or of something else; {remedy}")
    return fields(progress, {"identity": dict, "rows": int, "dimension": int, "sha256": str}, str(path), remedy)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def lock_folder(folder: Path) -> int:
    """Keep other processes out of a folder until the descriptor returned is closed, at the latest by the process's end.

    Raises:
        UserError: Another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, wait=False)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise UserError(f"`folder={folder}`: another process is writing into it; wait for it or stop it") from error
        raise
    return descriptor


def tidy(folder: Path) -> None:
    """Remove what a process left that was killed in the middle of writing a file."""
    for entry in folder.iterdir():
        if entry.name.startswith(PARTIAL_PREFIX):
            entry.unlink(missing_ok=True)


def write_archive(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz file, whole or not at all; the same arrays give the same bytes whatever the time."""
    with atomic_write(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)
