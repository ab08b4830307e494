"""The error that the command line shows as one line, and words for it."""

import json
from collections.abc import Callable, Mapping
from typing import Any

_LONGEST = 60


class UserError(ValueError):
    """Something that the user can mend: a path, a file, a flag, a value.

    The message says what was wrong, where, and what to do about it. Arguments are named in backticks, as Python has
    them (`` `batch_size=0` must be positive ``); the commands in `bin/` print the message as one line without a
    traceback, with flags in their place (`--batch_size=0`), and exit with status 2.
    """


def differences(before: Mapping[str, Any], now: Mapping[str, Any], write: Callable[[Any], str] = json.dumps) -> str:
    """What differs between two mappings, in words; empty where nothing does.

    Args:
        before: By name.
        now: The same.
        write: Makes a value a text, which is cut where it is long.

    Example:
        >>> differences({"size": 224, "seed": 0}, {"size": 96, "seed": 0})
        'size was 224 and is now 96'
    """

    def short(value: Any) -> str:
        text = write(value)
        return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."

    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return "; ".join(f"{name} was {short(before.get(name))} and is now {short(now.get(name))}" for name in names)


def short_message(error: BaseException, longest: int = 200) -> str:
    """An exception on one line: its type and the beginning of what it says.

    Example:
        >>> short_message(KeyError("labels"))
        "KeyError: 'labels'"
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:longest]}".removesuffix(": ")
