"""What a plain argument may be: each check returns the value as Python's own type, or says in one
line what is wrong.

`True`, `"1"` and NaN are numbers to Python or to `float`, but nobody means them: they are refused,
not converted.
"""

import numbers
import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)
_ROUNDING = 1e-14


def number(
    what: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> float:
    """Return a finite number within bounds.

    Args:
        what: The argument's name, for the message.
        value: What was given.
        above: It must be larger than this.
        at_least: It must not be smaller than this.
        at_most: It must not be larger than this.
        below: It must be smaller than this.

    Raises:
        ValueError: It is no number, a boolean, not finite (in float32, in which losses are
            computed), or out of bounds.

    Example:
        >>> number("margin", 1, at_least=0)
        1.0
        >>> number("scale", -2.0, above=0)
        Traceback (most recent call last):
        ValueError: scale must be positive, not -2
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{what} must be a number, not {reprlib.repr(value)}")
    real: Any = value  # mypy does not compare numbers.Real
    if not abs(real) <= _LARGEST:
        raise ValueError(f"{what} must be a finite number, not {reprlib.repr(value)}")
    result = float(value)
    # What float32 rounds to 0 is not positive.
    low = float(np.float32(result)) if above == 0 else result
    within = (above is None or low > above) and (at_least is None or result >= at_least)
    if (
        not within
        or (at_most is not None and result > at_most)
        or (below is not None and result >= below)
    ):
        raise ValueError(f"{what} must {_bounds(above, at_least, at_most, below)}, not {result:g}")
    return result


def integer(
    what: str, value: Any, *, at_least: int | None = None, at_most: int | None = None
) -> int:
    """Return an integer within bounds; 2.0 counts as one, `True` does not.

    Args:
        what: The argument's name, for the message.
        value: What was given.
        at_least: It must not be smaller than this.
        at_most: It must not be larger than this.

    Raises:
        ValueError: It is no integer, a boolean, or out of bounds.

    Example:
        >>> integer("heads", 8, at_least=1)
        8
    """
    whole = isinstance(value, numbers.Integral) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or (at_least is not None and value < at_least):
        kind = {None: "an integer", 1: "a positive integer"}.get(
            at_least, f"an integer of at least {at_least}"
        )
        raise ValueError(f"{what} must be {kind}, not {reprlib.repr(value)}")
    if at_most is not None and value > at_most:
        raise ValueError(f"{what} must be at most {at_most:,}, not {reprlib.repr(int(value))}")
    return int(value)


def count_of_share(share: Any, count: Any, *, up: bool = False) -> Any:
    """Return how many of some things a share of them is.

    A share such as 0.009 is not exact in binary. Where share x count is whole but for that, it is
    the count.

    Args:
        share: A number, or an array of them.
        count: How many things there are; a number, or an array.
        up: Round up what is not whole, in place of down.

    Returns:
        An int, or an int64 array.

    Example:
        >>> count_of_share(0.009, 3000), count_of_share(1 / 49, 49), count_of_share(0.1, 25)
        (27, 1, 2)
        >>> count_of_share(0.1, 30, up=True), count_of_share(0.1, 31, up=True)
        (3, 4)
    """
    product = np.multiply(share, count, dtype=np.float64)
    whole = np.rint(product)
    rounded = np.ceil(product) if up else np.floor(product)
    # Some units in the last place: shares are often differences, such as 1 - 0.99.
    is_whole = np.isclose(product, whole, rtol=_ROUNDING, atol=0)
    result = np.where(is_whole, whole, rounded).astype(np.int64)
    return result if result.ndim else int(result)


def boolean(what: str, value: Any) -> bool:
    """Accept True or False, and nothing that Python merely takes for one of them.

    Args:
        what: The argument's name, for the message.
        value: What was given.

    Raises:
        ValueError: It is neither.

    Example:
        >>> boolean("scaled", True)
        True
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{what} must be true or false, not {reprlib.repr(value)}")
    return bool(value)


def text(what: str, value: Any) -> str:
    """Return a text that can be written to a file.

    Args:
        what: The argument's name, for the message.
        value: What was given.

    Raises:
        ValueError: It is no text, or holds bytes that are not UTF-8.

    Example:
        >>> text("dataset", "cars196")
        'cars196'
    """
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text, not {reprlib.repr(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} must be UTF-8 text, not {reprlib.repr(value)}") from error
    return value


def one_of(what: str, value: Any, choices: Sequence[str]) -> str:
    """One of a few words.

    Args:
        what: The argument's name, for the message.
        value: What was given.
        choices: Two words or more.

    Raises:
        ValueError: It is none of them.

    Example:
        >>> one_of("reduction", "mean", ("mean", "sum"))
        'mean'
        >>> one_of("reduction", "none", ("mean", "sum"))
        Traceback (most recent call last):
        ValueError: reduction must be 'mean' or 'sum', not 'none'
    """
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{what} must be {', '.join(others)} or {last}, not {value!r}")
    return value


#: The check of each plain type.
BY_TYPE: dict[type, Callable[[str, Any], Any]] = {
    bool: boolean,
    float: number,
    int: integer,
    str: text,
}


def _bounds(
    above: float | None, at_least: float | None, at_most: float | None, below: float | None
) -> str:
    if at_most is below is None and above == 0:
        return "be positive"
    if at_most is below is None and at_least == 0:
        return "not be negative"
    bounds = (("above", above), ("at least", at_least), ("at most", at_most), ("below", below))
    return "be " + " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
