"""The page around the sections: one file that loads nothing, written whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import os
import pathlib
import string
from collections.abc import Sequence

from tfdml.report.elements import Section, escape
from tfdml.storage import write_whole


def write_page(path: str | os.PathLike, title: str, header: str, sections: Sequence[Section]) -> None:
    """Write a page.

    Its style and its one script are inside it. The page's policy lets that script run and no other, and lets nothing
    be loaded.

    Args:
        path: Where to write; the folder is made if it is missing.
        title: Plain text.
        header: HTML below the title.
        sections: In order.

    Raises:
        OSError: The page cannot be written.
    """
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    links = "".join(f'<li><a href="#{s.id}">{escape(s.nav)}</a></li>' for s in sections if s.nav)
    page = string.Template(_resource("page.html")).substitute(
        title=escape(title),
        style=_resource("page.css"),
        script=script,
        script_hash=f"sha256-{digest}",
        header=header,
        links=links,
        first=sections[0].id,
        main=_rows(sections),
    )
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode("utf-8"))


def _rows(sections: Sequence[Section]) -> str:
    """The sections, two halves that follow one another in one row."""
    parts: list[str] = []
    waiting = ""
    for section, following in zip(sections, [*sections[1:], None], strict=True):
        if waiting:
            parts.append(f'<div class="pair">{waiting}{section.html()}</div>')
            waiting = ""
        elif section.half and following is not None and following.half:
            waiting = section.html()
        else:
            parts.append(section.html())
    return "\n".join(parts)


def _resource(name: str) -> str:
    return importlib.resources.files("tfdml.report").joinpath(f"templates/{name}").read_text("utf-8")
