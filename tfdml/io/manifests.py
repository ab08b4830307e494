"""What a file that may come from anyone may say: JSON of bounded size and depth, flags, and names in their folder.

Manifests, model cards, results and answers of servers are read through here: whatever is in them, the worst that comes
of it is a `UserError` that says what is wrong where.
"""

import itertools
import json
import os
from collections.abc import Mapping
from typing import Any

from tfdml.errors import REASON, UserError, user_errors
from tfdml.io.files import read_bytes, sha256_of, size_of

# Manifests name every class of a data set, of which there may be a million; parsed, they take up to twenty times that.
MAX_BYTES = 2**27
# Ours nest five levels; what walks through them recursively must come to an end.
MAX_DEPTH = 64

Kinds = Mapping[str, type | tuple[type, ...]]
_WORDS = {dict: "an object", list: "a list", str: "a text", int: "an integer", float: "a number", bool: "true or false"}
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def read_json(path: str | os.PathLike, required: Kinds | None = None, remedy: str = "") -> dict[str, Any]:
    """Return the JSON object in a file, local or on any file system that `fsspec` knows.

    Args:
        path: The file.
        required: Keys that it must have, and of which type their values must be; see `fields`.
        remedy: What to do where the file is damaged, for the message.

    Raises:
        UserError: There is no such file, it cannot be read, is larger than `MAX_BYTES`, is no JSON object, is nested
            deeper than `MAX_DEPTH`, or a key is missing or of another type.

    Example:
        >>> read_json("embeddings/cars/manifest.json", {"count": int})["count"]
        256
    """
    where = os.fspath(path)
    return fields(parse_json(_read(where, remedy), where, remedy), required or {}, where, remedy)


def parse_json(data: bytes | str, where: str, remedy: str = "") -> Any:
    """Return a JSON text as Python's values.

    Args:
        data: The text, or its UTF-8 bytes.
        where: Where it was found, for the message.
        remedy: As `read_json`.

    Raises:
        UserError: It is not JSON, or nested deeper than `MAX_DEPTH`.

    Example:
        >>> parse_json(b'{"images": 3}', "manifest.json")
        {'images': 3}
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise _unreadable(where, _TOO_DEEP, remedy) from None
    except UnicodeDecodeError as error:
        raise _unreadable(where, "it is not UTF-8 text", remedy) from error
    except ValueError as error:  # also of an integer of thousands of digits
        raise _unreadable(where, f"it is not JSON ({error})", remedy) from error
    if _is_deep(value):
        raise _unreadable(where, _TOO_DEEP, remedy)
    return value


def parse_flags(text: str) -> dict[str, str]:
    """Return the flags of a flag file by name, as text, the last of each; empty lines and comments (#) are left out.

    Args:
        text: One flag a line, `--name=value`.

    Example:
        >>> parse_flags("# a comment" + chr(10) + "--ink=3" + chr(10) + "--paper=")
        {'ink': '3', 'paper': ''}
    """
    lines = (line.strip() for line in text.splitlines())
    named = (line.removeprefix("--").partition("=") for line in lines if line and not line.startswith("#"))
    return {name: value for name, _, value in named}


def fields(value: Any, required: Kinds, where: str, remedy: str = "") -> dict[str, Any]:
    """Return a JSON object, if it has keys with values of these types.

    Args:
        value: What should be the object.
        required: The type, or types, of the value of each key. A bool is no int, and an int is a float.
        where: Where it was found, for the message.
        remedy: As `read_json`.

    Raises:
        UserError: It is no object, or a key is missing or of another type.

    Example:
        >>> fields({"images": 3}, {"images": int}, "manifest.json: splits.train")
        {'images': 3}
    """
    if not isinstance(value, dict):
        raise _damaged(where, f"an object is expected, not {_kind(value)}", remedy)
    for key, kinds in required.items():
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if key not in value:
            raise _damaged(where, f"it has no key {key}", remedy)
        found = value[key]
        is_number = type(found) is int and float in kinds
        if not is_number and (not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds)):
            wanted = " or ".join(_WORDS.get(kind, kind.__name__) for kind in kinds)
            raise _damaged(where, f"its key {key} must be {wanted}, not {_kind(found)}", remedy)
    return value


def objects(value: Any, where: str) -> dict[str, dict[str, Any]]:
    """Return a JSON object whose values are all objects.

    Args:
        value: What should be it.
        where: Where it was found, for the message.

    Raises:
        UserError: It is something else.

    Example:
        >>> objects({"train": {"images": 3}}, "manifest.json: splits")
        {'train': {'images': 3}}
    """
    found = fields(value, {}, where)
    return fields(found, dict.fromkeys(found, dict), where)


def compare_files(folder: str | os.PathLike, files: Any, where: str, remedy: str) -> None:
    """Compare files with the checksums that a manifest has of them.

    This detects damage, not forgery: whoever can change a file can change its manifest.

    Args:
        folder: The manifest's folder.
        files: By name, an object with `sha256`.
        where: The manifest, for the message.
        remedy: What to do about damage.

    Raises:
        UserError: A file is missing, unreadable or damaged, or the manifest cannot be understood.
    """
    for name, entry in objects(files, where).items():
        path, expected = confined(folder, name, where), fields(entry, {"sha256": str}, where)["sha256"]
        with user_errors(OSError, f"{path}, which {where} lists, cannot be read ({REASON}){_and(remedy)}"):
            found = sha256_of(path)
        if found != expected:
            raise UserError(f"{path} is damaged: its SHA-256 is not that in {where}{_and(remedy)}")


def confined(folder: str | os.PathLike, name: Any, where: str) -> str:
    """Return the path of a file that a manifest names in its folder; a name that leads out of it is refused.

    Links within the folder are followed: what they lead to, the owner of the folder has decided.

    Args:
        folder: The folder.
        name: A relative path with forward slashes.
        where: The manifest, for the message.

    Raises:
        UserError: The name is no text, absolute, of another file system, or has a part that is empty, `.` or `..`.

    Example:
        >>> confined("embeddings", "embeddings-00000.npy", "embeddings/manifest.json")
        'embeddings/embeddings-00000.npy'
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if {"", ".", ".."}.intersection(parts) or "\0" in name or "\\" in name or "://" in name:
        raise UserError(f"{where} names a file outside its folder, {str(name)[:100]!r}, which is not opened")
    return os.path.join(os.fspath(folder), name)


def _read(path: str, remedy: str) -> bytes:
    size = size_of(path)
    if size is not None and size > MAX_BYTES:
        raise _unreadable(path, f"it has {size:,} bytes, more than the limit of {MAX_BYTES:,}", remedy)
    # Clients of file systems have their own error types.
    with user_errors(Exception, f"{path} cannot be read ({REASON}){_and(remedy)}"):
        return read_bytes(path)


def _is_deep(value: Any) -> bool:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        items = itertools.chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [item for item in items if isinstance(item, (dict, list))]
    return bool(level)


def _unreadable(where: str, reason: str, remedy: str) -> UserError:
    return UserError(f"{where} is damaged and cannot be read: {reason}{_and(remedy)}")


def _damaged(where: str, reason: str, remedy: str) -> UserError:
    return UserError(f"{where} is damaged or of something else: {reason}{_and(remedy)}")


def _and(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""


def _kind(value: Any) -> str:
    return "null" if value is None else _WORDS.get(type(value), type(value).__name__)
