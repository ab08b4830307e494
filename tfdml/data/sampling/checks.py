"""Checks of the samplers' arguments."""

from __future__ import annotations

from tfdml.errors import UserError


def check_positive(argument: str, value: int) -> None:
    """Refuses a number below 1."""
    if value < 1:
        raise UserError(f"`{argument}` must be at least 1, not {value}")


def check_seed(seed: int) -> None:
    """Refuses a negative seed."""
    if seed < 0:
        raise UserError(f"`seed` must not be negative, but is {seed}")


def check_choice(argument: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a word that is none of the choices."""
    if value not in choices:
        raise UserError(f"`{argument}` must be {' or '.join(choices)}, not {value!r}")
