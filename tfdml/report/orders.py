"""HORDE's orders of moments on a page: what each order's own embedding finds, at the end and during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdml.report.elements import details, escape, scrolling, table
from tfdml.report.metric_text import metric_name, metric_order, metric_value, numbers

_TITLE = "Each order of moments by itself, in percent"


def orders_table(orders: Mapping[str, Mapping[str, float]]) -> str:
    """A row per order; empty without orders.

    Args:
        orders: Metrics by order: `"1"`, the embedding itself, `"2"` ... and `"all"`, all side by side.
    """
    if not orders:
        return ""
    keys = [key for key in metric_order(next(iter(orders.values()))) if "@" in key]
    heads = ["Order", *(escape(metric_name(key)) for key in keys)]
    rows = [
        [escape(_name(order)), *(f"<b>{metric_value(key, numbers(metrics).get(key))}</b>" for key in keys)]
        for order, metrics in orders.items()
    ]
    return details(_TITLE, scrolling(table(heads, rows, caption=_TITLE, css="metrics"), _TITLE))


def order_histories(history: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The history of each order that was measured more than once, by its name; that of order 1 is the run's own.

    Args:
        history: One mapping per epoch with `epoch` and, where they were measured, `orders`.
    """
    measured = [entry for entry in history if entry.get("orders")]
    if len(measured) < 2:
        return {}
    return {
        _name(order): [{"epoch": entry["epoch"], **entry["orders"].get(order, {})} for entry in measured]
        for order in measured[-1]["orders"]
        if order != "1"
    }


def _name(order: str) -> str:
    return {"1": "1, the embedding", "all": "all, side by side"}.get(order, f"order {order}")
