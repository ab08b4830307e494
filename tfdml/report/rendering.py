"""Pages of the templates in `templates/`, in which all text is escaped unless it is markup already."""

import base64
import csv
import functools
import hashlib
import importlib.resources
import inspect
import io
import json
import math
import numbers
import os
import pathlib
import re
import urllib.parse
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from tfdml.io.files import as_named, cell_text, is_remote, write_whole
from tfdml.report import metric_text


def render(template: str, **values: Any) -> Markup:
    """Return a template filled in; text among the values is escaped, `Markup` is taken as it is.

    Args:
        template: The name of a file in `templates/`.
        **values: What it shows. Those that it lacks are an error.

    Example:
        >>> render("settings.html", groups=[("Flags", {"note": "<b>"})])  # doctest: +ELLIPSIS
        Markup('...<th scope="row">note</th><td>&lt;b&gt;</td>...')
    """
    return Markup(_environment().get_template(template).render(values))  # noqa: S704 - a template escapes what it is given


def write_page(path: str | os.PathLike, template: str, **values: Any) -> None:
    """Write a page atomically.

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
    if not is_remote(path):
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, as_named(page).encode("utf-8"))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdml.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(inspect.getmembers(metric_text, inspect.isfunction), class_of=class_of)
    environment.filters.update(
        thousands=lambda value: _number(value, ",.0f"),
        percent=lambda value, digits=1: _number(value, f".{digits}f", 100),
        fixed=lambda value: _number(value, ".3f"),
        duration=_duration,
        setting=setting_text,
        thumbnail=thumbnail,
        metric_name=metric_text.metric_name,
    )
    return environment


def _resource(name: str) -> Markup:
    text = importlib.resources.files("tfdml.report").joinpath(f"templates/{name}").read_text("utf-8")
    return Markup(text)  # noqa: S704 - a file of ours


def class_of(dataset: Any, index: int) -> str:
    """Return the name of the class of one image, or its id where it has none."""
    label = int(dataset.labels[index])
    return str(dataset.class_names.get(label, label))


def setting_text(value: Any) -> str:
    """Return a setting as text: strings as they are, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def csv_link(title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    """Return a link that saves the values of a plot as a CSV file, which is inside the link.

    Text that a spreadsheet would take for a formula starts with an apostrophe.

    Args:
        title: What is plotted; the file is named after it.
        heads: The names of the columns.
        rows: Numbers and text.

    Example:
        >>> "%27%3D1%2B1%2C0.5" in csv_link("Classes", ["class", "x"], [["=1+1", 0.5]])
        True
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    for row in (heads, *rows):
        writer.writerow([cell_text(cell) if isinstance(cell, str) else cell for cell in row])
    name = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")[:60] or "values"
    uri = "data:text/csv;charset=utf-8," + urllib.parse.quote(stream.getvalue(), safe="")
    return Markup('<p class="csv"><a href="{}" download="{}.csv" aria-label="{}, as CSV">CSV</a></p>').format(
        uri, name, title
    )


def _number(value: Any, form: str, factor: float = 1) -> str:
    """Return a number in print; a dash where there is none."""
    return "–" if not isinstance(value, numbers.Real) or math.isnan(value) else f"{factor * float(value):{form}}"


def _duration(seconds: Any) -> str:
    minutes = _number(seconds, ".0f", 1 / 60)
    if minutes == "–" or seconds >= 6000:
        return minutes if minutes == "–" else f"{seconds / 3600:.1f} h"
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min"


def thumbnail(image: np.ndarray, size: int) -> str:
    """Return an image (H, W, 3) uint8 as a JPEG data URI whose longer side is at most `size`."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(image, np.uint8))
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
