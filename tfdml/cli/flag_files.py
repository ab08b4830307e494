"""What can be wrong with a command line before its flags are parsed: text that is no text, and flag files."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tfdml.errors import UserError


def check(arguments: Sequence[str], including: tuple[str, ...] = ()) -> None:
    """Check arguments, and the flag files that they name, and those that these name.

    Args:
        arguments: A command line without the command, or the lines of a flag file.
        including: The flag files through which they were reached.

    Raises:
        UserError: An argument is not UTF-8; or a flag file cannot be read, is no text, or includes itself.
    """
    words = iter(arguments)
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{word!r} is not UTF-8 text; rename what it names") from error
        name, equals, path = word.strip().partition("=")
        if name in ("--flagfile", "-flagfile"):
            _check_file(path if equals else next(words, ""), including)


def _check_file(path: str, including: tuple[str, ...]) -> None:
    file = os.path.realpath(os.path.expanduser(path.strip()))
    if file in including:
        raise UserError(f"--flagfile={path}: the file includes itself; take that line out")
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
        return  # a pipe can be read but once
    try:
        with open(file, encoding="utf-8") as opened:
            lines = opened.read().splitlines()
    except OSError as error:
        raise UserError(f"--flagfile={path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"--flagfile={path} is no UTF-8 text; write one flag a line, --name=value") from error
    if any("\0" in line for line in lines):
        raise UserError(f"--flagfile={path} is no text; write one flag a line, --name=value")
    check([line for line in lines if not line.lstrip().startswith(("#", "//"))], (*including, file))
