"""Pieces of HTML that every part of a page is made of. What they are given is HTML; `escape` makes it of text."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any


def escape(value: Any) -> str:
    """Text as HTML, in an element or in a quoted attribute.

    Example:
        >>> escape('<b title="x">')
        '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(str(value), quote=True)


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page with a heading of its own.

    Args:
        id: What links to it go by.
        title: Its heading.
        body: HTML.
        intro: HTML of the sentence below the heading, may be empty.
        nav: What the list of sections calls it; empty: it is not listed.
        half: Whether it shares a row with its neighbour where that is half too and the window is wide.
    """

    id: str
    title: str
    body: str
    intro: str = ""
    nav: str = ""
    half: bool = False

    def html(self) -> str:
        """The section as HTML."""
        intro = f'<p class="intro">{self.intro}</p>' if self.intro else ""
        return (
            f'<section class="card" id="{self.id}" aria-labelledby="{self.id}-title">'
            f'<h2 id="{self.id}-title">{escape(self.title)}</h2>{intro}{self.body}</section>'
        )


@dataclasses.dataclass(frozen=True)
class Column:
    """The head of a column.

    Args:
        name: HTML.
        css: A class of its cells, such as `"left"`.
        sort: `"ascending"` or `"descending"` if the rows come in the order of this column.
    """

    name: str
    css: str = ""
    sort: str = ""


def table(
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[str]],
    *,
    caption: str,
    css: str = "",
    show_caption: bool = False,
) -> str:
    """A table whose rows begin with their heads.

    Args:
        columns: The heads of the columns.
        rows: Cells as HTML. A cell that begins with `<td` or `<th` is taken as it is.
        caption: What a screen reader calls the table.
        css: Classes of the table.
        show_caption: Whether everybody sees the caption.
    """
    heads = [column if isinstance(column, Column) else Column(column) for column in columns]
    parts = []
    for column in heads:
        order = f' aria-sort="{column.sort}"' if column.sort else ""
        parts.append(f'<th scope="col"{_class(column.css)}{order}>{column.name}</th>')
    body = []
    for row in rows:
        cells = [_cell(cell, head, place == 0) for place, (cell, head) in enumerate(zip(row, heads, strict=True))]
        body.append(f"<tr>{''.join(cells)}</tr>")
    caption_css = "" if show_caption else ' class="hidden"'
    return (
        f"<table{_class(css)}><caption{caption_css}>{escape(caption)}</caption>"
        f"<thead><tr>{''.join(parts)}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""


def _cell(cell: str, head: Column, first: bool) -> str:
    if cell.startswith(("<td", "<th")):
        return cell
    if first:
        return f'<th scope="row"{_class(head.css)}>{cell}</th>'
    return f"<td{_class(head.css)}>{cell}</td>"


def scrolling(body: str, label: str, css: str = "") -> str:
    """A table, in a box that scrolls by itself and can be reached with the keyboard."""
    css = f"scroll {css}".strip()
    label = f"{label}, table"  # sections go by the bare name
    return f'<div class="{css}" tabindex="0" role="region" aria-label="{escape(label)}">{body}</div>'


def details(summary: str, body: str) -> str:
    """`body`, folded away under the text `summary`."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def paragraph(css: str, text: str) -> str:
    """A paragraph of plain text, nothing where there is none."""
    return f'<p class="{css}">{escape(text)}</p>' if text else ""
