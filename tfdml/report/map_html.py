"""The embedding map on the page: a picture that reads without a script, what the script adds, and a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from tfdml.report.axes import svg
from tfdml.report.elements import Column, details, escape, scrolling, table
from tfdml.report.embedding_map import choose_images, lay_out, mixing
from tfdml.report.figures import STYLES, marker
from tfdml.report.thumbnails import Pictures, sprite_sheet

_WIDTH, _HEIGHT, _EDGE = 640, 560, 12  # at most as high
_TAG = 10  # radius of the numbers on the map
_CELL, _COLUMNS = 64, 50
_LISTED = 40

# Where picture `row` of the map comes from: the data set it is in, and its index there.
Locate = Callable[[int], tuple[Pictures, int]]


def map_html(
    embeddings: np.ndarray,
    labels: np.ndarray,
    locate: Locate,
    emphasised: Sequence[int],
    *,
    distance: str = "euclidean",
    seed: int = 0,
) -> str:
    """The map of some of the images.

    Args:
        embeddings: (N, d) all images.
        labels: (N,) their class ids.
        locate: Where an image is.
        emphasised: Classes that are worth looking at, the first ones get a colour and a shape of their own.
        distance: As `nearest_neighbours`.
        seed: Of the choice of images and of t-SNE.
    """
    rows = choose_images(labels, seed=seed, include=emphasised[:STYLES])
    places = lay_out(embeddings[rows], distance=distance, seed=seed)
    if places is None:
        return "<p>There are too few different images for a map.</p>"
    labels = labels[rows]
    classes, class_of = np.unique(labels, return_inverse=True)
    located = [locate(int(row)) for row in rows]
    first_of = {int(c): located[i][0] for i, c in reversed(list(enumerate(class_of)))}
    names = [first_of[number].class_name(int(label)) for number, label in enumerate(classes)]
    number_of = {int(label): number for number, label in enumerate(classes)}
    shown = [number_of[label] for label in emphasised if label in number_of][:STYLES]
    points, height = _fitted(places)
    intro = (
        f"{len(rows):,} images of {len(classes):,} classes, laid out by t-SNE: images that are near in the embedding "
        "are near here, but the size of a group and the gap between two groups mean little."
    )
    data = {
        "cell": _CELL,
        "columns": _COLUMNS,
        "x": [round(float(x), 1) for x in points[:, 0]],
        "y": [round(float(y), 1) for y in points[:, 1]],
        "class": class_of.tolist(),
        "classes": names,
        "names": [_short(pictures.dataset.images.name(index)) for pictures, index in located],
    }
    # "<" cannot end the script element early if there is none.
    encoded = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    sprite = sprite_sheet((pictures.read(index) for pictures, index in located), len(located), _CELL, _COLUMNS)
    return (
        f'<p class="intro">{intro}</p><div class="map-columns"><div class="map" id="map">'
        f"{_picture(points, height, class_of, shown, names)}</div>{_legend(shown, names, class_of)}</div>"
        f'<script type="application/json" id="map-data">{encoded}</script>'
        f'<img id="map-sheet" hidden alt="" src="{sprite}">{_table(places, labels, classes, names)}'
    )


def _fitted(places: np.ndarray) -> tuple[np.ndarray, int]:
    """Places in [0, 1] as user units, both axes to one scale, and how high the picture is then."""
    extent = np.maximum(places.max(axis=0), 1e-9)
    room = np.array([_WIDTH - 2 * _EDGE, _HEIGHT - 2 * _EDGE])
    scale = float((room / extent).min())
    high = max(scale * extent[1], _HEIGHT / 4)
    middle = np.array([_WIDTH / 2, _EDGE + high / 2])
    return middle + scale * (places - extent / 2), round(high + 2 * _EDGE)


def _short(name: str) -> str:
    """The end of a path, enough to find the file by."""
    return "/".join(name.replace("\\", "/").split("/")[-2:])


def _picture(points: np.ndarray, height: int, class_of: np.ndarray, shown: Sequence[int], names: Sequence[str]) -> str:
    rest = ~np.isin(class_of, shown)
    dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points[rest])
    body = f'<path class="dots" d="{dots}"/>'
    for style, number in enumerate(shown):
        shapes = "".join(marker(style, float(x), float(y), 4.2) for x, y in points[class_of == number])
        body += f'<path class="point s{style}" d="{shapes}"/>'
    middles = [_middle(points[class_of == number]) for number in shown]
    for style, (x, y) in enumerate(_apart(middles, height)):
        body += (
            f'<circle class="tag s{style}" cx="{x:.1f}" cy="{y:.1f}" r="{_TAG}"/>'
            f'<text class="tag-text" x="{x:.1f}" y="{y + 4.6:.1f}">{style + 1}</text>'
        )
    marked = "; ".join(f"{style + 1} {names[number]}" for style, number in enumerate(shown))
    label = f"Map of {len(points)} images." + (f" Marked classes: {marked}." if shown else "")
    return svg(body, f"{label} A table below says how each class keeps together.", _WIDTH, height)


def _middle(points: np.ndarray) -> np.ndarray:
    """The point with the least sum of distances to the others."""
    gaps = np.linalg.norm(points[:, None] - points[None], axis=-1)
    return points[gaps.sum(axis=1).argmin()]


def _apart(places: Sequence[np.ndarray], height: int) -> list[tuple[float, float]]:
    """The places, those that would cover an earlier one moved aside where there is room near by."""
    low, high = _TAG + 1, np.array([_WIDTH, height]) - _TAG - 1
    result: list[np.ndarray] = []
    for place in places:
        angles = np.arange(12) * np.pi / 6
        circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        candidates = np.concatenate([np.zeros((1, 2)), 22 * circle, 34 * circle, 46 * circle]) + place
        candidates = np.clip(candidates, low, high)
        free = [c for c in candidates if all(np.linalg.norm(c - other) >= 2 * _TAG + 1 for other in result)]
        result.append(free[0] if free else candidates[0])
    return [(float(x), float(y)) for x, y in result]


def _legend(shown: Sequence[int], names: Sequence[str], class_of: np.ndarray) -> str:
    if not shown:
        return ""
    items = []
    for style, number in enumerate(shown):
        count = int((class_of == number).sum())
        items.append(
            f'<li><svg class="key-mark" viewBox="0 0 40 20" aria-hidden="true">'
            f'<circle class="tag s{style}" cx="10" cy="10" r="9"/><text class="tag-text" x="10" y="14.6">{style + 1}'
            f'</text><path class="point s{style}" d="{marker(style, 30, 10, 5)}"/></svg>'
            f'<span>{escape(names[number])} <span class="soft">{count}</span></span></li>'
        )
    return (
        '<div class="map-side"><h3>Marked classes</h3><p class="intro">Those most often confused, with their number of '
        f'images here; the grey points are the others.</p><ul class="map-key">{"".join(items)}</ul></div>'
    )


def _table(places: np.ndarray, labels: np.ndarray, classes: np.ndarray, names: Sequence[str]) -> str:
    name_of = dict(zip(classes.tolist(), names, strict=True))
    mixed = mixing(places, labels)
    listed = mixed[:_LISTED]
    rows = []
    for entry in listed:
        other = "–"
        if entry.other is not None:
            other = f'{escape(name_of[entry.other])} <span class="soft">{100 * entry.other_share:.0f}%</span>'
        rows.append([escape(name_of[entry.label]), str(entry.images), f"{100 * entry.own:.0f}", other])
    heads = [
        Column("Class"),
        Column("Images here"),
        Column("Nearest points of the same class, %", sort="ascending"),
        Column("Most mixed with", css="left"),
    ]
    title = "The map as a table: classes, the most mixed first"
    if len(mixed) > len(listed):
        title = f"The map as a table: the {len(listed)} most mixed of {len(mixed)} classes"
    listed_table = table(heads, rows, caption="Classes on the map, the most mixed first", css="sortable")
    return details(title, scrolling(listed_table, "Classes on the map", "tall"))
