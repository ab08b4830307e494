"""Reading the folders of finished runs, without TensorFlow: flags, environment, history, result."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdml.errors import UserError
from tfdml.manifests import parse_json, read_json


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run.

    Args:
        name: What a page calls it.
        path: Its folder.
        result: What `result.json` holds.
        history: One mapping per epoch, what `metrics.jsonl` holds; empty where there is no such file.
        flags: Its flags by name, as text; empty where there is no `flags.txt`.
        environment: What `environment.json` holds; empty where there is no such file.
    """

    name: str
    path: Path
    result: dict[str, Any]
    history: list[dict[str, Any]]
    flags: dict[str, str]
    environment: dict[str, Any]

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the result."""
        return self.result["metrics"]


def read_runs(folders: Sequence[str | os.PathLike], names: Sequence[str] | None = None) -> list[Run]:
    """Read several runs.

    Args:
        folders: Their folders.
        names: What to call them; None: as their folders, with the folder above where two are called the same.

    Raises:
        UserError: As `read_run`; a folder twice; not one name per folder, or a name twice.
    """
    paths = [Path(folder) for folder in folders]
    resolved = [path.resolve() for path in paths]
    for path, real in zip(paths, resolved, strict=True):
        if resolved.count(real) > 1:
            raise UserError(f"{path} is named twice; compare different runs")
    if names is None:
        names = [Path(os.path.abspath(path)).name for path in paths]
        if len(set(names)) < len(names):
            names = ["/".join(path.parts[-2:]) for path in resolved]
        if len(set(names)) < len(names):
            names = [str(path) for path in resolved]
    if len(names) != len(paths):
        raise UserError(f"{len(names)} names for {len(paths)} runs; give one each")
    if len(set(names)) < len(names):
        raise UserError(f"runs need different names; got {', '.join(names)}")
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_run(path: str | os.PathLike, name: str = "") -> Run:
    """Read the folder of a finished run.

    Args:
        path: The folder.
        name: What to call the run; empty: as the folder.

    Raises:
        UserError: There is no such folder, the run in it has not ended, or one of its files is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path} is no folder; name the folder of a finished run")
    if not (path / "result.json").is_file():
        started = (path / "flags.txt").is_file()
        raise UserError(
            f"{path} holds a run that has not ended: there is no result.json; resume it and let it finish"
            if started
            else f"{path} is not the folder of a run: there is no result.json in it"
        )
    result = read_json(path / "result.json", {"metrics": dict}, "was it written by another program?")
    environment = read_json(path / "environment.json") if (path / "environment.json").is_file() else {}
    return Run(
        name=name or Path(os.path.abspath(path)).name,
        path=path,
        result=result,
        history=_lines(path / "metrics.jsonl"),
        flags=_flags(path / "flags.txt"),
        environment=environment,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        record = parse_json(line, f"{path}, line {number},")
        if isinstance(record, dict):
            records.append(record)
    return records


def _flags(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    flags = {}
    for line in _text(path).splitlines():
        if line.startswith("--"):
            name, _, value = line[2:].partition("=")
            flags[name] = value
    return flags
