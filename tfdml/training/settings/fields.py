"""What every stage's settings are made of: fields with a default, a help text, and checks of their values."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

from tfdml import arguments
from tfdml.errors import UserError

# Counts and seeds beyond this do not fit the 32-bit integers of TensorFlow and Keras.
LARGEST_INTEGER = 2**31 - 1
_CHECKS: dict[type, Callable[[str, Any], Any]] = {
    bool: arguments.boolean,
    float: arguments.number,
    int: functools.partial(arguments.integer, at_most=LARGEST_INTEGER),
    str: arguments.text,
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every stage's settings share: each field is checked by its type, its choices and its bounds.

    Raises:
        UserError: A value is out of range; the message names the flag.
    """

    def __post_init__(self):
        types = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            try:
                value = _CHECKS[types[field.name]](f"--{field.name}", getattr(self, field.name))
            except ValueError as error:
                raise UserError(str(error)) from error
            object.__setattr__(self, field.name, value)
            choices = field.metadata.get("choices")
            if choices and value not in choices:
                raise UserError(f"--{field.name}={value}: must be one of {', '.join(choices)}")
            check: Callable | None = field.metadata.get("check")
            if check and not check(value):
                raise UserError(f"--{field.name}={value}: out of range. {field.metadata['help']}")


def choice(default: Any, help_text: str, **checks: Any) -> Any:
    """A field of settings, which is also a flag.

    Args:
        default: Its default.
        help_text: What it means; the one place where that stands.
        **checks: `choices`: the values that there are; `check`: whether a value is in range; `switch`: `--name` alone
            means true, although it takes words.
    """
    return dataclasses.field(default=default, metadata={"help": help_text, **checks})


def positive(value) -> bool:
    """Whether a value is above 0."""
    return value > 0


def not_negative(value) -> bool:
    """Whether a value is 0 or above."""
    return value >= 0


def fraction(value) -> bool:
    """Whether a value is a share that leaves something over."""
    return 0 <= value < 1


def integers(text: str, flag: str, required: bool = False) -> tuple[int, ...]:
    """Positive integers from text, such as `1,2,4`.

    Args:
        text: The integers, with commas.
        flag: The flag's name, for the message.
        required: Whether there must be one.

    Raises:
        UserError: The text is something else.

    Example:
        >>> integers("20,40", "--drop_epochs")
        (20, 40)
    """
    wanted = UserError(f"{flag}={text}: write integers of 1 to {LARGEST_INTEGER:,} with commas, e.g. 1,2,4")
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise wanted from error
    if (required and not values) or any(not 1 <= value <= LARGEST_INTEGER for value in values):
        raise wanted
    return values


def as_text(value: Any) -> str:
    """A setting as it stands in a flag file.

    Example:
        >>> as_text(True), as_text(0.5)
        ('true', '0.5')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)
