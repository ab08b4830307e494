"""A command line before its flags are parsed: arguments that are no text, and the flags of the files that it names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tfdml.errors import UserError


def read(arguments: Sequence[str], including: tuple[str, ...] = ()) -> list[str]:
    """Arguments in which the flags of a flag file stand in the place of its name.

    A file that a flag file names is looked for beside it, and then from the working folder.

    Args:
        arguments: A command line without the command, or the lines of a flag file.
        including: The flag files through which they were reached.

    Raises:
        UserError: An argument is not UTF-8; or a flag file cannot be read, is no text, or includes itself.
    """
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{word!r} is not UTF-8 text; rename what it names") from error
        name, equals, path = word.strip().partition("=")
        if name in ("--flagfile", "-flagfile"):
            found += _read_file((path if equals else next(words, "")).strip(), including)
        else:
            found.append(word)
    return found


def _read_file(path: str, including: tuple[str, ...]) -> list[str]:
    file = os.path.expanduser(path)
    if including and os.path.isfile(beside := os.path.join(os.path.dirname(including[-1]), file)):
        file = beside
    true = os.path.realpath(file)
    if true in including:
        raise UserError(f"--flagfile={path}: the file includes itself; take that line out")
    try:
        with open(file, encoding="utf-8") as opened:
            lines = opened.read().splitlines()
    except OSError as error:
        raise UserError(f"--flagfile={path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"--flagfile={path} is no UTF-8 text; write one flag a line, --name=value") from error
    if any("\0" in line for line in lines):
        raise UserError(f"--flagfile={path} is no text; write one flag a line, --name=value")
    flags = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(("#", "//"))]
    return read(flags, (*including, true))
