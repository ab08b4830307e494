"""The embedding map on the page: a picture that reads without a script, what the script adds, and a table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from tfdml.report.axes import svg
from tfdml.report.embedding_map import MAX_IMAGES, lay_out, mixing
from tfdml.report.figures import STYLES, marker
from tfdml.report.rendering import element, render
from tfdml.report.thumbnails import Pictures, sprite_sheet

_WIDTH, _HEIGHT, _EDGE = 640, 560, 12  # at most as high
_TAG = 10  # radius of the numbers on the map
_CELL, _COLUMNS = 64, 50
_LISTED = 40


def map_html(
    embeddings: np.ndarray,
    pictures: Pictures,
    emphasised: Sequence[int],
    *,
    distance: str = "euclidean",
    seed: int = 0,
) -> Markup:
    """The map of some of the images.

    Args:
        embeddings: (N, d) all images.
        pictures: The images.
        emphasised: Classes that are worth looking at, the first ones get a colour and a shape of their own.
        distance: As `nearest_neighbours`.
        seed: Of the choice of images and of t-SNE.
    """
    rows = pictures.dataset.balanced_rows(MAX_IMAGES, seed, emphasised[:STYLES])
    places = lay_out(embeddings[rows], distance=distance, seed=seed)
    if places is None:
        return Markup("<p>There are too few different images for a map.</p>")
    classes, class_of, counts = np.unique(pictures.labels[rows], return_inverse=True, return_counts=True)
    names = [pictures.class_name(label) for label in classes]
    number_of = {label: number for number, label in enumerate(classes.tolist())}
    shown = [number_of[label] for label in emphasised if label in number_of][:STYLES]
    points, height = _fitted(places)
    mixed = mixing(places, class_of)
    return render(
        "map.html",
        images=len(rows),
        names=names,
        picture=_picture(points, height, class_of, shown, names),
        marked=[(_key(style), names[number], counts[number]) for style, number in enumerate(shown)],
        data={
            "cell": _CELL,
            "columns": _COLUMNS,
            "x": points[:, 0].round(1).tolist(),
            "y": points[:, 1].round(1).tolist(),
            "class": class_of.tolist(),
            "classes": names,
            "names": [_short(pictures.name(row)) for row in rows],
        },
        sheet=sprite_sheet((pictures.read(row) for row in rows), len(rows), _CELL, _COLUMNS),
        mixed=mixed[:_LISTED],
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


def _picture(
    points: np.ndarray, height: int, class_of: np.ndarray, shown: Sequence[int], names: Sequence[str]
) -> Markup:
    rest = ~np.isin(class_of, shown)
    body = element("path", css="dots", d="".join(f"M{x:.1f} {y:.1f}h0" for x, y in points[rest]))
    for style, number in enumerate(shown):
        shapes = "".join(marker(style, float(x), float(y), 4.2) for x, y in points[class_of == number])
        body += element("path", css=f"point s{style}", d=shapes)
    middles = [_middle(points[class_of == number]) for number in shown]
    for style, (x, y) in enumerate(_apart(middles, height)):
        body += _tag(style, f"{x:.1f}", f"{y:.1f}", f"{y + 4.6:.1f}", _TAG)
    marked = "; ".join(f"{style + 1} {names[number]}" for style, number in enumerate(shown))
    label = f"Map of {len(points)} images." + (f" Marked classes: {marked}." if shown else "")
    return svg(body, f"{label} A table below says how each class keeps together.", _WIDTH, height)


def _tag(style: int, x: str, y: str, baseline: str, radius: int) -> Markup:
    """The number of a marked class, ringed."""
    ring = element("circle", css=f"tag s{style}", cx=x, cy=y, r=radius)
    return ring + element("text", str(style + 1), css="tag-text", x=x, y=baseline)


def _key(style: int) -> Markup:
    """The number and the mark of a class, for the legend."""
    mark = element("path", css=f"point s{style}", d=marker(style, 30, 10, 5))
    body = _tag(style, "10", "10", "14.6", 9) + mark
    return element("svg", body, css="key-mark", viewBox="0 0 40 20", aria_hidden="true")


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
