"""The door for names: classes, ids, roles, texts and paths from outside, made plain by `clean`, and
the notes on what was changed. Needs Python alone."""

import collections
import dataclasses
import decimal
import functools
import logging
import numbers
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from tfdml.errors import UserError

_LOGGER = logging.getLogger(__name__)
# Words that tables write where a value is missing.
_MISSING = frozenset({"na", "n/a", "#n/a", "nan", "null", "none", "<na>", "nil", "nat"})
# Without width, which str.strip leaves: byte order marks, and what web pages put between words.
_WITHOUT_WIDTH = "\ufeff\u200b\u2060"
# No name has these, and they break a file system, a log or a report. The last are what Python makes
# of bytes that are no UTF-8.
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_CONTROL_IN_LINES = re.compile(r"[\x00-\x08\x0e-\x1b\x7f\ud800-\udfff]")
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?")
# By which W3C's Media Fragments name a part of an image: left, top, width and height in pixels.
_CROP = re.compile(r"#xywh=([0-9]{1,9}),([0-9]{1,9}),([1-9][0-9]{0,8}),([1-9][0-9]{0,8})$")
_LONGEST_WORD = max(map(len, _MISSING))
_LONGEST_QUOTE = 120


@dataclasses.dataclass(frozen=True)
class Kind:
    """How one kind of name is made plain.

    Args:
        plural: What several are called, in messages.
        plain: Whether white space around it is dropped, and accents are composed (NFC). Paths and
            ids are used as they are written; `composed` compares them.
        several_lines: Whether it may have line breaks and tabs.
        may_be_empty: Whether an empty value is accepted, as `""`.
        flags: Whether true and false are accepted, as such texts.
        missing: What becomes of a word for "missing", such as `NA`: it is `kept`, `noted` in a
            warning, or `dropped`, as `""`.
    """

    plural: str
    plain: bool = True
    several_lines: bool = False
    may_be_empty: bool = False
    flags: bool = False
    missing: Literal["kept", "noted", "dropped"] = "kept"


#: The name of a class, or of what classes are made of: a group, a label of a set.
CLASS = Kind("classes", missing="noted")
#: The same, or `""` where there is none.
CLASS_OR_NONE = dataclasses.replace(CLASS, may_be_empty=True)
#: What identifies an image.
ID = Kind("ids", plain=False)
#: A split or a role.
ROLE = Kind("roles", may_be_empty=True, missing="dropped")
#: Whether something is so; 1 and 0 are true and false.
FLAG = Kind("flags", flags=True)
#: What an image shows.
TEXT = Kind("texts", several_lines=True, missing="noted")
#: Where an image is.
PATH = Kind("paths", plain=False)


class _Noted(str):
    """A name that a warning has named: it passes further entrances without another one."""

    __slots__ = ()


@functools.lru_cache(maxsize=1024)
def warn(text: str) -> None:
    """Log a warning, once: several parts of a program read the same file."""
    _LOGGER.warning("%s", text)


def lines(text: str) -> list[str]:
    r"""Return the lines of a text file, each of which ends at a line feed, perhaps after a carriage
    return: other characters that break lines in print are a part of them.

    Args:
        text: What the file holds; a byte order mark at its start is dropped.

    Example:
        >>> lines("\ufeffa\u2028b\r\nc\n")
        ['a\u2028b', 'c']
    """
    pieces = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    return pieces if pieces[-1] else pieces[:-1]


def composed(text: str) -> str:
    """Return text in the composed Unicode form (NFC): file systems and lists spell an accent in one
    or two characters.

    Example:
        >>> composed("cafe\u0301") == "caf\u00e9"
        True
    """
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def crop_name(path: str, box: tuple[int, ...] | None) -> str:
    """Return the name of a part of an image; without a box that of the image, its path.

    Args:
        path: Of the image.
        box: x1, y1, x2, y2 in pixels of the upright image; x2 and y2 are outside.

    Example:
        >>> crop_name("a.jpg", (10, 20, 40, 60))
        'a.jpg#xywh=10,20,30,40'
    """
    if box is None:
        return path
    x1, y1, x2, y2 = box
    return f"{path}#xywh={x1},{y1},{x2 - x1},{y2 - y1}"


def split_crop_name(name: str) -> tuple[str, tuple[int, ...] | None]:
    """Return the path and the box that `crop_name` was given.

    Example:
        >>> split_crop_name("a.jpg#xywh=10,20,30,40")
        ('a.jpg', (10, 20, 40, 60))
    """
    match = _CROP.search(name)
    if match is None:
        return name, None
    x, y, width, height = map(int, match.groups())
    return name[: match.start()], (x, y, x + width, y + height)


def quoted(value: object) -> str:
    """Return a value from outside for a message: on one line, printable, not too long.

    Example:
        >>> quoted("a.jpg")
        "'a.jpg'"
    """
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "..."


def clean(
    values: Iterable[Any],
    kind: Kind,
    source: str,
    place: Callable[[int], str] = lambda row: f"value {row + 1}",
) -> list[str]:
    """Return names as text, all alike wherever they come from.

    A warning counts what is trimmed, what differs from others in its spelling alone and becomes one
    with them, words for "missing", and numbers that are written in several ways. Names that
    `clean` has returned give no second warning.

    Args:
        values: Texts, UTF-8 bytes, integers or None; a list or an array.
        kind: What they are, such as `CLASS`.
        source: Where they are from, for messages: a file and its column, or an argument.
        place: Returns where in it a row is, such as `"line 3"`.

    Raises:
        UserError: A value is of another type, empty, no UTF-8, or has control characters. The
            message names the first.

    Example:
        >>> clean([b"bus ", "bus", 7], CLASS, "list.csv, column label")
        ['bus', 'bus', '7']
        >>> clean(["bus", 0.5], CLASS, "list.csv, column label", lambda row: f"line {row + 2}")
        Traceback (most recent call last):
        tfdml.errors.UserError: list.csv, column label, line 3: must be a text or ..., it is 0.5
    """
    items = values.tolist() if hasattr(values, "tolist") else list(values)
    for wrong in set(map(type, items)) - _TYPES:
        row = next(row for row, item in enumerate(items) if type(item) is wrong)
        if wrong is bool and kind.flags:
            continue
        if issubclass(wrong, (bool, float)) or not issubclass(wrong, _ACCEPTED):
            fault = f"must be a text or an integer, it is {quoted(items[row])}"
            raise UserError(f"{source}, {place(row)}: {fault}")
    name_of: dict[Any, str] = {}
    for item in dict.fromkeys(items):
        if kind.missing != "dropped" and isinstance(item, str) and _is_plain(item):
            name_of[item] = item
            continue
        try:
            name_of[item] = _plain(item, kind)
        except ValueError as error:
            raise UserError(f"{source}, {place(items.index(item))}: {error}") from None
    for name in _warn_of_changes(name_of, kind, source):
        name_of.update({item: _Noted(name) for item in name_of if name_of[item] == name})
    return [name_of[item] for item in items]


_ACCEPTED = (str, bytes, numbers.Integral, type(None))
_TYPES = {str, bytes, int, type(None)}  # what nearly all are


def _plain(item: Any, kind: Kind) -> str:
    """Return a name as text; a `ValueError` says what is wrong with it."""
    if isinstance(item, bytes):
        try:
            item = item.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"is no UTF-8: {quoted(item)}") from None
    text = "" if item is None else str(item)
    if isinstance(item, bool):
        text = text.lower()
    if kind.plain:
        text = composed(_trimmed(text))
    control = _CONTROL_IN_LINES if kind.several_lines else _CONTROL
    if control.search(text):
        raise ValueError(f"must be text without control characters, it is {quoted(text)}")
    if kind.missing == "dropped" and text.lower() in _MISSING:
        text = ""
    if not text and not kind.may_be_empty:
        raise ValueError("is empty")
    return text


def _is_plain(text: str) -> bool:
    """Whether every kind leaves a text as it is, at a glance: nearly all names."""
    return text.isascii() and text.isprintable() and text == text.strip() and text != ""


def _trimmed(text: str) -> str:
    return text.strip().strip(_WITHOUT_WIDTH).strip()


def _warn_of_changes(name_of: dict[Any, str], kind: Kind, source: str) -> set[str]:
    """Warn of each kind of change, with a count and an example.

    Args:
        name_of: The plain name of each value.

    Returns:
        The names that stay as they are, against appearance.
    """
    noted: set[str] = set()
    changes: dict[str, list[Any]] = {}
    if kind.plain:
        changed = (item for item, name in name_of.items() if item is not name)
        changes["texts with white space around them: it is dropped"] = [
            item for item in changed if isinstance(item, str) and item != _trimmed(item)
        ]
        changes["written in several ways: each is taken for one"] = _written_twice(name_of)
    if kind.missing == "noted":
        words = _missing_words(name_of)
        spellings = _numbers_written_twice(name_of.values())
        changes['words for "missing": they are kept as names'] = words
        changes["numbers that others are, too, in another spelling: they are kept apart"] = (
            spellings
        )
        noted = {name_of[word] for word in words} | {*spellings}
    elif kind.missing == "dropped":
        changes['words for "missing": they are left out'] = _missing_words(name_of)
    for change, examples in changes.items():
        if examples:
            count = f"{len(examples):,} of the {kind.plural} are"
            warn(f"{source}: {count} {change}, such as {quoted(examples[0])}")
    return noted


def _written_twice(name_of: dict[Any, str]) -> list[str]:
    """Return the names that several values have."""
    if len({*name_of.values()}) == len(name_of):
        return []
    spellings = collections.Counter(filter(None, name_of.values()))
    return [name for name, count in spellings.items() if count > 1]


def _missing_words(name_of: dict[Any, str]) -> list[Any]:
    """Return the values that are words for "missing"."""
    words = []
    for item, name in name_of.items():
        if len(name) <= _LONGEST_WORD and not isinstance(name, _Noted):
            word = name or (_trimmed(item) if isinstance(item, str) else "")
            words += [item] if word.lower() in _MISSING else []
    return words


def _numbers_written_twice(names: Iterable[str]) -> list[str]:
    """Return the second spelling of each number, such as 1.0 next to 1."""
    first: dict[decimal.Decimal, str] = {}
    twice = []
    for name in dict.fromkeys(names):
        if isinstance(name, _Noted):
            continue
        if _NUMBER.fullmatch(name) and first.setdefault(decimal.Decimal(name), name) != name:
            twice.append(name)
    return twice


def class_names_of(class_names: Mapping[int, Any], source: str) -> dict[int, str]:
    """Return the names of class ids, made plain.

    Args:
        class_names: The name of each class id; empty for that of images without a class.
        source: As in `clean`.

    Raises:
        UserError: As `clean`, or the names of two ids differ in their spelling alone. Equal names
            are accepted: two kinds of crane are two classes.

    Example:
        >>> class_names_of({0: b"bus", 1: "van"}, "class_names")
        {0: 'bus', 1: 'van'}
    """
    ids = list(class_names)
    written = list(class_names.values())
    names = clean(written, CLASS_OR_NONE, source, lambda row: f"class id {ids[row]}")
    first: dict[str, int] = {}
    for row, name in enumerate(names):
        other = first.setdefault(name, row)
        if written[other] != written[row]:
            pair = f"{ids[other]} and {ids[row]}"
            raise UserError(
                f"{source}: class ids {pair} are both {quoted(name)}, written in two ways: give "
                "these images one id, or the classes two names"
            )
    return dict(zip(ids, names, strict=True))


def short_fingerprint(fingerprint: str) -> str:
    """Return the first digits of the fingerprint of a model; a name that is none stays as it is.

    Example:
        >>> short_fingerprint("sha256:" + 64 * "a")
        'aaaaaaaaaaaa'
    """
    if ":" not in fingerprint:
        return fingerprint
    return fingerprint.replace("sha256:", "")[-64:][:12]
