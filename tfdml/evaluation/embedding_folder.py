"""The folder that embeddings are written into: whose it is, how far it has come, and files that are there whole."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfdml.errors import UserError, differences
from tfdml.evaluation.embeddings_on_disk import FORMAT, PROGRESS, read_manifest
from tfdml.files import PARTIAL_PREFIX, atomic_path, hold

PARTIAL = "embeddings.npy.partial"


def begun_at(folder: str | os.PathLike, identity: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest and the progress of a folder, either or both empty, without changing anything.

    Args:
        folder: The folder; it need not exist.
        identity: What decides the embeddings that are to be written there.

    Raises:
        UserError: It holds something else, or was begun with another identity: what differs is named.

    Example:
        >>> begun_at("no/such/folder", {})
        ({}, {})
    """
    folder = Path(folder)
    if not folder.exists():
        return {}, {}
    if not folder.is_dir():
        raise UserError(f"--out={folder} is a file; name a folder")
    manifest, progress = read_manifest(folder), _read_progress(folder)
    others = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(PARTIAL_PREFIX))
    if not manifest and not progress and others not in ([], [PARTIAL]):
        raise UserError(f"--out={folder} holds other files ({others[0]} ...); name a new or an empty folder")
    begun = (manifest or progress).get("identity", identity)
    different = differences(begun, identity, _text)
    if different:
        raise UserError(f"--out={folder} was begun with something else: {different}; name another folder, or delete it")
    return manifest, progress


def _read_progress(folder: Path) -> dict[str, Any]:
    try:
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        progress = None
    if not isinstance(progress, dict) or progress.get("format") != FORMAT:
        raise UserError(f"{folder / PROGRESS} is damaged or of something else; delete {folder} or name another folder")
    return progress


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def lock(folder: Path) -> int:
    """Keep other processes out of a folder until the descriptor returned is closed, at the latest by the process's end.

    Raises:
        UserError: Another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        hold(descriptor, wait=False)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise UserError(f"--out={folder}: another process is writing into it; wait for it or stop it") from error
        raise
    return descriptor


def tidy(folder: Path) -> None:
    """Remove what a process left that was killed in the middle of writing a file."""
    for entry in folder.iterdir():
        if entry.name.startswith(PARTIAL_PREFIX):
            entry.unlink(missing_ok=True)


def write_archive(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz file, whole or not at all; the same arrays give the same bytes whatever the time."""
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
