"""Pages of the templates in `templates/`, in which all text is escaped unless it is markup already."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import json
import math
import numbers
import os
import pathlib
from typing import Any

import jinja2
from markupsafe import Markup

from tfdml.io.files import write_whole
from tfdml.report import metric_text

_ATTRIBUTES = {"css": "class", "aria_label": "aria-label", "aria_hidden": "aria-hidden"}


def render(template: str, **values: Any) -> Markup:
    """A template filled in; text among the values is escaped, `Markup` is taken as it is.

    Args:
        template: The name of a file in `templates/`.
        **values: What it speaks of. Those that it lacks are an error.

    Example:
        >>> render("settings.html", groups=[("Flags", {"note": "<b>"})])  # doctest: +ELLIPSIS
        Markup('...<th scope="row">note</th><td>&lt;b&gt;</td>...')
    """
    return Markup(_environment().get_template(template).render(values))  # noqa: S704 - a template escapes what it is given


def element(name: str, *children: Any, **attributes: Any) -> Markup:
    """An element of a figure; text in it and in its attributes is escaped.

    Args:
        name: Its tag.
        *children: Markup or text.
        **attributes: By name; `css` is its class.

    Example:
        >>> element("text", "a < b", css="tick", x=1.5)
        Markup('<text class="tick" x="1.5">a &lt; b</text>')
    """
    start = Markup("").join(
        Markup(' {}="{}"').format(_ATTRIBUTES.get(key, key), value) for key, value in attributes.items()
    )
    if not children:
        return Markup("<{}{}/>").format(name, start)
    return Markup("<{0}{1}>{2}</{0}>").format(name, start, Markup("").join(children))


def write_page(path: str | os.PathLike, template: str, **values: Any) -> None:
    """Write a page whole or not at all.

    Its style and its one script are inside it. The page's policy lets that script run and no other, and lets nothing
    be loaded.

    Args:
        path: Where to write; the folder is made if it is missing.
        template: One that extends `page.html`.
        **values: As `render`.

    Raises:
        OSError: The page cannot be written.
    """
    style, script = (_resource(name) for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    page = render(template, style=style, script=script, script_hash=f"sha256-{digest}", **values)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode("utf-8"))


def setting_text(value: Any) -> str:
    """A setting as text: strings as they are, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdml.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    environment.globals.update({name: getattr(metric_text, name) for name in metric_text.__all__})
    environment.filters.update(
        thousands=_thousands,
        percent=_percent,
        fixed=_fixed,
        duration=_duration,
        setting=setting_text,
        metric_name=metric_text.metric_name,
    )
    return environment


def _resource(name: str) -> Markup:
    text = importlib.resources.files("tfdml.report").joinpath(f"templates/{name}").read_text("utf-8")
    return Markup(text)  # noqa: S704 - a file of ours


# What templates write numbers with: a dash where there is none.


def _missing(value: Any) -> bool:
    return not isinstance(value, numbers.Real) or math.isnan(value)


def _thousands(value: Any) -> str:
    return "–" if _missing(value) else f"{value:,.0f}"


def _percent(value: Any, digits: int = 1) -> str:
    return "–" if _missing(value) else f"{100 * value:.{digits}f}"


def _fixed(value: Any) -> str:
    return "–" if _missing(value) else f"{value:.3f}"


def _duration(seconds: Any) -> str:
    if _missing(seconds):
        return "–"
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"
