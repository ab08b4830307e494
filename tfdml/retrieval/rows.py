"""What goes into a gallery: ids, vectors and attributes, checked before a database sees them."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdml import arguments
from tfdml.errors import UserError
from tfdml.evaluation.search.exact import check_embeddings

# PostgreSQL's indexes of texts end at about 2,700 bytes, the others' later.
LONGEST_ID = 1000
LONGEST_TEXT = 65_535
# Databases sum squares in float32.
LARGEST = 1e15
_NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")
_TAKEN = ("id", "vector")
_INT64 = np.iinfo(np.int64)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a gallery.

    Args:
        ids: M names.
        vectors: (M, d) float32.
        attributes: M values each, by name.
    """

    ids: list[str]
    vectors: np.ndarray
    attributes: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.ids)


def checked_ids(ids: Any) -> list[str]:
    """Ids as a list of texts, each once.

    Raises:
        UserError: One is empty, no text, too long, or occurs twice.
    """
    if isinstance(ids, str):
        raise UserError("`ids` must be a list of texts, not one text")
    names = [name.item() if isinstance(name, np.str_) else name for name in ids]
    for name in names:
        _checked_text("an id", name, LONGEST_ID)
        if not name:
            raise UserError("an id of `ids` is empty")
    twice = [name for name, times in collections.Counter(names).items() if times > 1]
    if twice:
        raise UserError(f"{len(twice)} `ids` occur more than once, the first is {twice[0]}")
    return names


def checked_vectors(vectors: Any, what: str, dimension: int | None) -> np.ndarray:
    """Vectors as (N, d) float32.

    Raises:
        UserError: They are not (N, d) or not finite, of another dimension than the gallery, or too large.
    """
    checked = check_embeddings(vectors, what)
    if dimension is not None and checked.shape[1] != dimension:
        raise UserError(
            f"{what} have {checked.shape[1]} dimensions, the gallery {dimension}; both must come from the same model"
        )
    if max(checked.max(), -checked.min()) > LARGEST:
        raise UserError(f"{what} hold numbers beyond {LARGEST:g}, of which float32 cannot sum the squares")
    return checked


def checked_attributes(attributes: Mapping[str, Sequence[Any]] | None, count: int) -> dict[str, list[Any]]:
    """Attributes as lists of Python's integers or texts, one value per row.

    Raises:
        UserError: A name that databases do not take; not one value per row; values that are neither all integers nor
            all texts.
    """
    checked: dict[str, list[Any]] = {}
    for name, values in (attributes or {}).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN:
            raise UserError(
                f"the attribute {name!r:.40} must be of a .. z, 0 .. 9 and _, a letter first, and neither id nor vector"
            )
        column = values.tolist() if isinstance(values, np.ndarray) else list(values)
        if len(column) != count:
            raise UserError(f"the attribute {name} has {len(column)} values for {count} rows")
        kinds = {kind_of(name, value) for value in column}
        if len(kinds) > 1:
            raise UserError(f"the attribute {name} holds integers and texts: one of them in all rows")
        checked[name] = [int(value) if kinds == {"integer"} else str(value) for value in column]
    return checked


def kind_of(name: str, value: Any) -> str:
    """`"integer"` or `"text"`.

    Raises:
        UserError: It is neither, an integer beyond 64 bits, or a text that not every database holds.
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        if not _INT64.min <= value <= _INT64.max:
            raise UserError(f"the attribute {name} must fit 64 bits, which {value} does not")
        return "integer"
    _checked_text(f"the attribute {name}", value, LONGEST_TEXT)
    return "text"


def checked_filter(conditions: Mapping[str, Any] | None, kinds: Mapping[str, str]) -> dict[str, Any]:
    """The values that rows must have.

    Raises:
        UserError: There is no such attribute, or it is of another type.
    """
    checked: dict[str, Any] = {}
    for name, value in (conditions or {}).items():
        if name not in kinds:
            known = f"it has {', '.join(kinds)}" if kinds else "it has none"
            raise UserError(f"`filter` names {name!r:.40}, which is no attribute of the gallery; {known}")
        if kind_of(name, value) != kinds[name]:
            raise UserError(f"`filter`: the attribute {name} is of type {kinds[name]}, which {value!r:.40} is not")
        checked[name] = int(value) if kinds[name] == "integer" else str(value)
    return checked


def _checked_text(what: str, value: Any, longest: int) -> None:
    try:
        size = len(arguments.text(what, value).encode())
    except ValueError as error:
        raise UserError(str(error)) from None
    if "\0" in value or size > longest:
        raise UserError(f"{what} must be at most {longest:,} bytes without a NUL among them; got {value[:40]!r}")
