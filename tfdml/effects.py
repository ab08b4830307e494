"""When a flag has an effect: a condition on the values of other flags, and the message where it fails."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Effect:
    """When a flag has an effect.

    Args:
        holds: From the values of all flags, by name, to whether the flag has an effect.
        condition: The condition, as a user would meet it: flags with their values.
    """

    holds: Callable[[Mapping[str, Any]], bool]
    condition: str


def needs(flag: str, *values: Any) -> Effect:
    """Return the effect of a flag that needs another one: to have one of `values`, or else to be set at all.

    Example:
        >>> needs("sampling", "shuffle").holds({"sampling": "hierarchical"}), needs("clip_norm").holds({"clip_norm": 1})
        (False, True)
    """
    if not values:
        return Effect(lambda flags: bool(flags[flag]), f"--{flag}")
    return Effect(lambda flags: flags[flag] in values, f"--{flag}={' or '.join(map(str, values))}")


def either(*effects: Effect) -> Effect:
    """Return the effect of a flag for which one of several conditions is enough."""
    return Effect(
        lambda flags: any(effect.holds(flags) for effect in effects),
        " or ".join(effect.condition for effect in effects),
    )


def both(*effects: Effect) -> Effect:
    """Return the effect of a flag that needs several conditions."""
    return Effect(
        lambda flags: all(effect.holds(flags) for effect in effects),
        " and ".join(effect.condition for effect in effects),
    )


def in_vain(table: Mapping[str, Effect], values: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return what to say of each flag that has no effect, by name.

    Args:
        table: The effects of the flags that do not always have one.
        values: The values of all flags, by name.
        names: The flags to look at.

    Example:
        >>> in_vain({"drop_factor": needs("drop_epochs")}, {"drop_factor": 0.5, "drop_epochs": ""}, ["drop_factor"])
        {'drop_factor': '--drop_factor=0.5 has no effect: it needs --drop_epochs; add that, or leave --drop_factor out'}
    """
    return {
        name: f"--{name}={_text(values[name])} has no effect: it needs {table[name].condition}; add that, or leave "
        f"--{name} out"
        for name in names
        if name in table and not table[name].holds(values)
    }


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
