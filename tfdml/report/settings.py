"""Settings of a run, as folded tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfdml.report.elements import Column, details, escape, scrolling, table


def setting_text(value: Any) -> str:
    """A setting as text: strings as they are, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def settings_html(name: str, values: Mapping[str, Any] | None) -> str:
    """One table of settings, folded away; empty where there are none."""
    if not values:
        return ""
    rows = [[escape(key), escape(setting_text(value))] for key, value in values.items()]
    heads = [Column("Name"), Column("Value")]
    return details(name, scrolling(table(heads, rows, caption=name, css="settings"), name))
