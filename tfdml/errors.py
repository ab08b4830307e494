"""The error that the command line shows as one line, and words for it."""

import contextlib
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

#: Stands for what an exception says, in a message of `user_errors`.
ERROR_TEXT = "\0"
_LONGEST = 60
# Addresses of databases, in whose passwords a slash may stand; and of all else, also with too few
# slashes: s3://bucket/me@home.jpg has no user. Bounds keep the time linear in the text's length.
_DATABASE = re.compile(r"\b(pgvector|postgres(?:ql)?):[^\s\"<>]{0,1000}@")
_USER = re.compile(
    r"\b([a-z][\w+.-]{0,30}):"
    r"(?://[^/\s\"'<>]{0,1000}|/{1,3}[^/\s\"'<>:@]{0,100}:[^/\s\"'<>]{0,1000})@",
    re.IGNORECASE,
)
# Options of an address that let others in: ?password=, &X-Amz-Signature=, &sig=, &api_key=.
_SECRET = "passw(?:or)?d|pwd|token|secret|signature|credential|api_?key|access_?key"
_OPTION = re.compile(
    rf"([?&;](?:[\w.%-]{{0,50}}(?:{_SECRET})[\w.%-]{{0,50}}"
    r"|(?:[\w.%-]{0,50}[-_.])?(?:key|sig|auth|pass|user)(?:[-_.][\w.%-]{0,50})?)="
    r"|(?<![\w-])password=)[^&;#\s\"'<>]+",
    re.IGNORECASE,
)
# Verbs of several, and of one where that is not with an s at its end.
_VERBS = {"are": "is", "have": "has"}
# Choices that are listed next to the nearest.
_MOST_LISTED = 24


class UserError(ValueError):
    """Something that the user can mend: a path, a file, a flag, a value.

    The message says what was wrong, where, and what to do about it. The arguments that are wrong
    are values of their own, and come first in the text: the subcommands of `tfdml` write them as
    flags, print one line without a traceback, and exit with status 2.

    Args:
        message: What is wrong, and what to do.
        **arguments: The arguments that are wrong, by name. Texts, numbers, paths and short lists of
            them are written with their value, without passwords; of all else, and of `...`, the
            name alone.

    Example:
        >>> error = UserError("must be at least 1", batch_size=0)
        >>> str(error), error.text({"batch_size": "--batch_size"})
        ('batch_size=0: must be at least 1', '--batch_size=0: must be at least 1')
    """

    def __init__(self, message: str, **arguments: Any):
        self.message = redact_text(message)
        super().__init__(self.message)
        self.arguments = arguments

    def __reduce__(self):  # a process of a pool hands its errors over
        return _make_error, (type(self), self.message, self.arguments)

    def __str__(self) -> str:
        return self.text()

    def text(self, names: Mapping[str, str] = {}) -> str:
        """Return the message, its arguments first.

        Args:
            names: What an argument is called, by argument; others are called as in Python.
        """
        written = []
        for argument, value in self.arguments.items():
            name = names.get(argument, argument)
            written.append(f"{name}={as_text(value)}" if _is_plain(value) else name)
        return f"{' and '.join(written)}: {self.message}" if written else self.message


def _make_error(kind: type[UserError], message: str, arguments: Mapping[str, Any]) -> UserError:
    return kind(message, **arguments)


def as_text(value: Any) -> str:
    """Return a plain value as a flag file and a message have it, without passwords.

    Example:
        >>> as_text(True), as_text(0.5), as_text([1, 2]), as_text("s3://me:secret@host/list.csv")
        ('true', '0.5', '1,2', 's3://host/list.csv')
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(as_text, value))
    return redact_text(str(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= _MOST_LISTED and all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, os.PathLike))


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], write: Callable[[Any], str] = json.dumps
) -> str:
    """Return what differs between two mappings, in words; empty where nothing does.

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

    changed = []
    for name in sorted({*before, *now}):
        was, value = before.get(name), now.get(name)
        if isinstance(was, Mapping) and isinstance(value, Mapping) and was != value:
            changed.append(f"{name}: {differences(was, value, write)}")
        elif was != value:
            changed.append(f"{name} was {short(was)} and is now {short(value)}")
    return "; ".join(changed)


def short_message(
    error: BaseException | str,
    keep: Literal["all", "first", "last"] = "all",
    named: bool = False,
    longest: int = 300,
) -> str:
    r"""One line of what an exception says, over however many.

    Args:
        error: The exception, or what it says.
        keep: Which of its lines: all, joined; the first; or, for exceptions of TensorFlow, what an
            assertion says or else the last line before the description of its graph.
        named: Whether the exception's type comes first.
        longest: Characters of the line that are kept.

    Returns:
        The line; the exception's type where it says nothing.

    Example:
        >>> short_message(KeyError("labels"), named=True)
        "KeyError: 'labels'"
        >>> short_message("Graph execution error:\n\nInvalid PNG data\n\t [[{{node a}}]]", "last")
        'Invalid PNG data'
        >>> short_message("assertion failed: [image_bytes[0] of 1: no bytes]\n\t [[{{node b}}]]",
        ...     "last")
        'image_bytes[0] of 1: no bytes'
    """
    text = _before_graph(error) if keep == "last" else str(error)
    lines = [line for line in text.splitlines() if line.strip()]
    kept = {"all": lines, "first": lines[:1], "last": lines[-1:]}[keep]
    message = " ".join(" ".join(kept).split())[:longest]
    kind = "" if isinstance(error, str) else type(error).__name__
    return f"{kind}: {message}".removesuffix(": ") if named else message or kind


def _before_graph(error: BaseException | str) -> str:
    """Return what an exception of TensorFlow says: what an assertion says, or else what stands
    before the description of its graph."""
    text = str(getattr(error, "message", None) or error)
    start = text.partition("[[{{node")[0]
    asserted = re.search(r"assertion failed: \[(.+)\]", start)
    if asserted:
        return asserted[1]
    return start if start.strip() else text


def redact(address: str) -> str:
    """Return an address without its user and password, and without the values of options such as
    `token`, however wrong it is written.

    Example:
        >>> redact("pgvector://me:se@cret@db/cars?table=vans")
        'pgvector://db/cars?table=vans'
        >>> redact("pgvector:/me:se/cret@db/cars")
        'pgvector://db/cars'
        >>> redact("https://host/list.csv?size=8&X-Amz-Signature=0a1b")
        'https://host/list.csv?size=8&X-Amz-Signature=...'
    """
    return redact_text(re.sub(":/{0,3}(?!/).*@", "://", address, count=1, flags=re.DOTALL))


def redact_text(text: str) -> str:
    """Return a text without the users and passwords of the addresses in it; see `redact`.

    Example:
        >>> redact_text("https://me:secret@host/list.csv, and s3://photos/a@b.jpg")
        'https://host/list.csv, and s3://photos/a@b.jpg'
    """
    text = _DATABASE.sub(r"\1://", text)
    text = _USER.sub(r"\1://", text)
    return _OPTION.sub(r"\1...", text)


def check_positive(**numbers: float) -> None:
    """Raise a `UserError` that names the first of these arguments that is below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise UserError("must be at least 1", **{name: number})


def check_not_negative(**numbers: float) -> None:
    """Raise a `UserError` that names the first of these arguments that is below 0."""
    for name, number in numbers.items():
        if number < 0:
            raise UserError("must not be negative", **{name: number})


def check_share(**numbers: float) -> None:
    """Raise a `UserError` that names the first of these arguments that is not between 0 and 1."""
    for name, number in numbers.items():
        if not 0 < number < 1:
            raise UserError("must be between 0 and 1", **{name: number})


def counted(count: int, noun: str, verb: str = "") -> str:
    """Return a count with its noun, and with a verb that agrees.

    Args:
        count: How many.
        noun: What one is called.
        verb: Of several, such as `are`; empty for none.

    Example:
        >>> counted(1, "image", "are"), counted(2000, "query"), counted(0, "class", "have")
        ('1 image is', '2,000 queries', '0 classes have')
    """
    if count == 1:
        one = _VERBS.get(verb, f"{verb}s") if verb else ""
        return f"1 {noun} {one}".rstrip()
    plural = f"{noun}s"
    if noun.endswith("y"):
        plural = f"{noun[:-1]}ies"
    elif noun.endswith(("s", "x")):
        plural = f"{noun}es"
    return f"{count:,} {plural} {verb}".rstrip()


def choice_hint(value: Any, choices: Collection[str]) -> str:
    """Return which of some choices is the nearest to a value that is none of them, and of few all.

    Example:
        >>> choice_hint("euclidian", ["cosine", "euclidean"])
        "did you mean 'euclidean'? one of cosine, euclidean"
    """
    near = difflib.get_close_matches(str(value), choices, 1)
    hints = [f"did you mean {near[0]!r}?"] if near else []
    if not near or len(choices) <= _MOST_LISTED:
        hints.append(f"one of {', '.join(choices)}")
    return " ".join(hints)


def check_choice(argument: str, value: Any, choices: Collection[str]) -> None:
    """Raise a `UserError` where an argument is none of some choices; see `choice_hint`."""
    if value not in choices:
        raise UserError(f"unknown; {choice_hint(value, choices)}", **{argument: value})


@contextlib.contextmanager
def user_errors(
    kinds: type[Exception] | tuple[type[Exception], ...],
    message: str,
    *,
    keep: Literal["all", "first", "last"] = "all",
    named: bool = False,
    longest: int = 300,
    **arguments: Any,
) -> Iterator[None]:
    """Raise a `UserError` in place of an exception of these kinds; one that the block raises itself
    passes unchanged.

    Args:
        kinds: Types of exceptions; `UserError` alone to say more than the block's own.
        message: The message, with `ERROR_TEXT` where it quotes the exception.
        keep: Which lines of the exception are quoted; see `short_message`.
        named: Whether the exception's type is quoted.
        longest: Characters that are quoted.
        **arguments: The arguments that are wrong, next to those of the block's own `UserError`.

    Example:
        >>> with user_errors(ValueError, f"write a number ({ERROR_TEXT})", lists="many"):
        ...     int("many")
        Traceback (most recent call last):
        tfdml.errors.UserError: lists=many: write a number (invalid literal for int() with base ...
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, UserError):
            if kinds is not UserError:
                raise
            arguments.update(error.arguments)
            reason = error.message
        else:
            said = short_message(error, keep, named, longest)
            reason = getattr(error, "strerror", None) or said
        raise UserError(message.replace(ERROR_TEXT, reason), **arguments) from error


@contextlib.contextmanager
def quiet_errors() -> Iterator[None]:
    """Drop what libraries in C++ write to the error stream of the process as they load."""
    sys.stderr.flush()
    error_stream = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(error_stream, 2)
        os.close(error_stream)
