"""Flags: the flag files that come with the package, and what flag files hold."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from tfdml.errors import ERROR_TEXT, UserError, user_errors
from tfdml.names import lines
from tfdml.version import package_folder

_FLAG_FILE = ("--flagfile", "-flagfile")


def folder() -> Path:
    """Return the folder of the shipped flag files."""
    return package_folder("configs")


def names() -> list[str]:
    """Return the shipped flag files as a command line names them: `configs/sop_jrd.flags`."""
    files = sorted(folder().rglob("*.flags"), key=lambda file: (len(file.parts), file))
    return [f"configs/{file.relative_to(folder()).as_posix()}" for file in files]


def shipped(path: str) -> Path | None:
    """Return the shipped file that a path such as `configs/sop_jrd.flags` names; None where there
    is none."""
    return folder().parent / path if path in names() else None


def read_flag_files(words: Sequence[str], including: tuple[str, ...] = ()) -> list[str]:
    """Return a command line in which the flags of a flag file stand in the place of its name.

    A file that a flag file names is looked for next to it, and then from the working folder.
    `configs/...` that is not there is one of the files that come with the package.

    Args:
        words: A command line without the command, or the lines of a flag file.
        including: The flag files through which they were reached.

    Raises:
        UserError: A flag file cannot be read, is no text, or includes itself.
    """
    flags: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, path = word.strip().partition("=")
        if name in _FLAG_FILE:
            flags += _read((path if equals else next(rest, "")).strip(), including)
        else:
            flags.append(word)
    return flags


def typed_words(words: Sequence[str]) -> list[str]:
    """Return a command line without its flag files.

    Example:
        >>> typed_words(["--flagfile=cars.flags", "--epochs=2", "--flagfile", "small.flags"])
        ['--epochs=2']
    """
    typed: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.strip().partition("=")
        if name not in _FLAG_FILE:
            typed.append(word)
        elif not equals:
            next(rest, None)
    return typed


def _read(path: str, including: tuple[str, ...]) -> list[str]:
    next_to = [os.path.join(os.path.dirname(including[-1]), path)] if including else []
    places = [*next_to, os.path.expanduser(path), str(shipped(path) or "")]
    file = next((place for place in places if os.path.exists(place)), None)
    if file is None:
        near = difflib.get_close_matches(path, names(), 1)
        hint = f"did you mean {near[0]}?" if near else "see tfdml configs"
        raise UserError(f"there is no such file; {hint}", flagfile=path)
    if os.path.realpath(file) in map(os.path.realpath, including):
        raise UserError("the file includes itself; take that line out", flagfile=path)
    with user_errors((OSError, ValueError), f"cannot be read as text: {ERROR_TEXT}", flagfile=path):
        text = Path(file).read_bytes().decode("utf-8")
    words = [word for word in map(str.strip, lines(text)) if not word.startswith(("#", "//"))]
    return read_flag_files(list(filter(None, words)), (*including, file))


def parse_flags(text: str) -> dict[str, str]:
    """Return the flags of a flag file by name, as text, the last of each; empty lines and comments
    (#) are left out.

    Args:
        text: One flag a line, `--name=value`.

    Example:
        >>> parse_flags("# a comment" + chr(10) + "--ink=3" + chr(10) + "--paper=")
        {'ink': '3', 'paper': ''}
    """
    flags = {}
    for line in map(str.strip, lines(text)):
        if line and not line.startswith("#"):
            name, _, value = line.removeprefix("--").partition("=")
            flags[name] = value
    return flags
