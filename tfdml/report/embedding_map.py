"""The embedding map: some images laid out in the plane by t-SNE, drawn, and what a script lets the reader look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from tfdml.report.plots import MARKS, STYLES, colour, draw
from tfdml.report.rendering import data_uri, render
from tfdml.retrieval.exact import nearest_neighbours, unit_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfdml.data.dataset import ImageDataset

# Images on the map: t-SNE of them takes some ten seconds of one core, their thumbnails 1 to 2 MB.
_MAX_IMAGES = 2000
_PERPLEXITY = 30.0
_ITERATIONS = 750
_DIMENSIONS = 50
# Nearest points that show whether a class keeps together on the map.
_NEAR = 10
_WIDTH, _HEIGHT, _EDGE = 640, 560, 12  # at most as high
_TAG = 11  # radius of the numbers on the map
_CELL, _COLUMNS = 64, 50
_LISTED = 40


def lay_out(embeddings: np.ndarray, *, distance: str = "euclidean", seed: int = 0) -> np.ndarray | None:
    """Places in the plane by t-SNE (van der Maaten and Hinton, 2008) of at most 50 principal components.

    Neighbourhoods are kept, distances between groups are not. The same arguments give the same places.

    Args:
        embeddings: (n, d).
        distance: For `cosine` the embeddings are scaled to length 1 first; else their Euclidean distances count.
        seed: Of t-SNE.

    Returns:
        (n, 2) float64 within [0, 1], the longer side filled; None for fewer than five images or if all are the same.
    """
    count = len(embeddings)
    if count < 5 or np.ptp(embeddings, axis=0).max() == 0:
        return None
    import threadpoolctl
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    x = (unit_rows(embeddings) if distance == "cosine" else embeddings).astype(np.float64)
    x = x - x.mean(axis=0)
    x /= np.abs(x).max() or 1.0
    components = min(_DIMENSIONS, count, x.shape[1])
    x = PCA(components, svd_solver="full").fit_transform(x)
    x = np.pad(x, ((0, 0), (0, max(0, 2 - components))))  # a plane needs two
    start = (1e-4 * x[:, :2] / (x[:, 0].std() or 1.0)).astype(np.float32)
    perplexity = min(_PERPLEXITY, (count - 1) / 3)
    tsne = TSNE(2, perplexity=perplexity, init=start, max_iter=_ITERATIONS, random_state=seed)
    # Its steps are short: on a busy machine, threads that wait for one another at each take many times as long.
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        places = tsne.fit_transform(x.astype(np.float32))
    places = places.astype(np.float64) - places.min(axis=0)
    return places / (places.max() or 1.0)


@dataclasses.dataclass(frozen=True)
class Mixing:
    """How a class keeps together on the map.

    Args:
        label: The class.
        images: How many of its images are on the map.
        own: Share of the nearest points of its points that are of it too.
        other: The class that most of the others are of; None: there are none.
        other_share: Its share of the nearest points.
    """

    label: int
    images: int
    own: float
    other: int | None
    other_share: float


def mixing(places: np.ndarray, labels: np.ndarray, near: int = _NEAR) -> list[Mixing]:
    """Every class on the map, the most mixed first.

    Of a class with n points, the min(near, n - 1) nearest points of each are looked at, so that 1 can be reached; of a
    class with one point, `near`.

    Args:
        places: (n, 2).
        labels: (n,) class ids.
        near: How many nearest points.
    """
    classes, place, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    near = min(near, len(labels) - 1)
    rows = nearest_neighbours(places, k=near)[0]
    result = []
    for number, (label, size) in enumerate(zip(classes.tolist(), sizes.tolist(), strict=True)):
        looked_at = min(near, size - 1) or near
        around = place[rows[place == number, :looked_at]].ravel()
        shares = np.bincount(around, minlength=len(classes)) / len(around)
        own, shares[number] = float(shares[number]), 0
        other = int(shares.argmax())
        share = float(shares[other])
        result.append(Mixing(label, size, own, int(classes[other]) if share else None, share))
    return sorted(result, key=lambda m: (m.own, m.label))


def map_html(
    embeddings: np.ndarray,
    dataset: ImageDataset,
    emphasised: Sequence[int],
    *,
    distance: str = "euclidean",
    seed: int = 0,
) -> Markup:
    """The map of some of the images: a picture that reads without a script, what the script needs, and a table.

    Args:
        embeddings: (N, d) all images.
        dataset: The images.
        emphasised: Classes that are worth looking at, the first ones get a colour and a shape of their own.
        distance: As `nearest_neighbours`.
        seed: Of the choice of images and of t-SNE.
    """
    rows = dataset.balanced_rows(_MAX_IMAGES, seed, emphasised[:STYLES])
    places = lay_out(embeddings[rows], distance=distance, seed=seed)
    if places is None:
        return Markup("<p>There are too few different images for a map.</p>")
    classes, class_of, counts = np.unique(dataset.labels[rows], return_inverse=True, return_counts=True)
    names = [str(dataset.class_names.get(label, label)) for label in classes.tolist()]
    number_of = {label: number for number, label in enumerate(classes.tolist())}
    shown = [number_of[label] for label in emphasised if label in number_of][:STYLES]
    points, height = _fitted(places)
    return render(
        "map.html",
        images=len(rows),
        names=names,
        picture=_picture(points, height, class_of, shown, names),
        marked=[(names[number], counts[number]) for number in shown],
        data={
            "cell": _CELL,
            "columns": _COLUMNS,
            "x": points[:, 0].round(1).tolist(),
            "y": points[:, 1].round(1).tolist(),
            "class": class_of.tolist(),
            "classes": names,
            # The end of a path, enough to find the file by.
            "names": ["/".join(dataset.images.name(row).replace("\\", "/").split("/")[-2:]) for row in rows],
        },
        sheet=sprite_sheet(dataset, rows, _CELL, _COLUMNS),
        mixed=mixing(places, class_of)[:_LISTED],
    )


def sprite_sheet(dataset: ImageDataset, rows: np.ndarray, size: int, columns: int) -> str:
    """Many small pictures in one: a WebP data URI, `columns` cells a row, each `size` pixels square.

    Args:
        dataset: The images.
        rows: (n,) which of them; each is scaled to fit its cell, transparent around it.
        size: Side of a cell in pixels.
        columns: Cells per row; picture i is in row i // columns, column i % columns.
    """
    from PIL import Image

    sheet = Image.new("RGBA", (min(len(rows), columns) * size, -(-len(rows) // columns) * size), (0, 0, 0, 0))
    for place, index in enumerate(rows.tolist()):
        picture = Image.fromarray(dataset.images.picture(index))
        picture.thumbnail((size, size), Image.Resampling.LANCZOS, reducing_gap=2.0)
        row, column = divmod(place, columns)
        left, top = (size - picture.width) // 2, (size - picture.height) // 2
        sheet.paste(picture, (column * size + left, row * size + top))
    return data_uri(sheet, "WEBP", quality=60, method=4)


def _fitted(places: np.ndarray) -> tuple[np.ndarray, int]:
    """Places in [0, 1] as user units, both axes to one scale, and how high the picture is then."""
    extent = np.maximum(places.max(axis=0), 1e-9)
    room = np.array([_WIDTH - 2 * _EDGE, _HEIGHT - 2 * _EDGE])
    scale = float((room / extent).min())
    high = max(scale * extent[1], _HEIGHT / 4)
    middle = np.array([_WIDTH / 2, _EDGE + high / 2])
    return middle + scale * (places - extent / 2), round(high + 2 * _EDGE)


def _picture(
    points: np.ndarray, height: int, class_of: np.ndarray, shown: Sequence[int], names: Sequence[str]
) -> Markup:
    def plot(figure: Figure) -> None:
        # A unit of the view box is one of the points' coordinates, as the script takes them.
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(height, 0))
        axes.axis("off")
        rest = ~np.isin(class_of, shown)
        axes.plot(*points[rest].T, "o", ms=4, color=colour("dot"), mew=0)
        for style, number in enumerate(shown):
            axes.plot(*points[class_of == number].T, MARKS[style], ms=8, color=colour(f"s{style}"), mec=colour("card"))
        middles = [_middle(points[class_of == number]) for number in shown]
        for style, (x, y) in enumerate(_apart(middles, height)):
            ring = {"boxstyle": "circle,pad=0.2", "fc": colour("card"), "ec": colour(f"s{style}"), "lw": 2}
            axes.text(x, y, str(style + 1), ha="center", va="center", weight="bold", bbox=ring)

    marked = "; ".join(f"{style + 1} {names[number]}" for style, number in enumerate(shown))
    label = f"Map of {len(points)} images." + (f" Marked classes: {marked}." if shown else "")
    return draw(plot, f"{label} A table below shows how each class keeps together.", _WIDTH, height)


def _middle(points: np.ndarray) -> np.ndarray:
    """The point with the least sum of distances to the others."""
    gaps = np.linalg.norm(points[:, None] - points[None], axis=-1)
    return points[gaps.sum(axis=1).argmin()]


def _apart(places: Sequence[np.ndarray], height: int) -> list[tuple[float, float]]:
    """The places, those that would cover an earlier one moved aside where there is room near by."""
    low, high = _TAG + 1, np.array([_WIDTH, height]) - _TAG - 1
    angles = np.arange(12) * np.pi / 6
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    moves = np.concatenate([np.zeros((1, 2)), 22 * circle, 34 * circle, 46 * circle])
    result: list[np.ndarray] = []
    for place in places:
        candidates = np.clip(place + moves, low, high)
        free = [c for c in candidates if all(np.linalg.norm(c - other) >= 2 * _TAG + 1 for other in result)]
        result.append(free[0] if free else candidates[0])
    return [(float(x), float(y)) for x, y in result]
