"""The embedding map: some images laid out in the plane by t-SNE, drawn, and what a script lets the reader look at."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from tfdml.errors import UserError
from tfdml.evaluation.relevance import ids_or_names
from tfdml.report.plots import MARKS, STYLES, color, draw
from tfdml.report.queries import class_rows, rank_queries
from tfdml.report.rendering import csv_link, data_uri, render
from tfdml.retrieval.exact import check_embeddings, unit_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfdml.data.dataset import ImageDataset

# Images on the map: t-SNE of them takes some ten seconds of one core, their thumbnails 1 to 2 MB.
_MAX_IMAGES = 2000
_PERPLEXITY = 30.0
_ITERATIONS = 750
_DIMENSIONS = 50
_WIDTH, _HEIGHT, _EDGE = 640, 560, 12
_CELL, _COLUMNS = 64, 50
_LISTED = 40


def lay_out(embeddings: np.ndarray, *, distance: str = "euclidean", seed: int = 0) -> np.ndarray | None:
    """Places in the plane by t-SNE (van der Maaten and Hinton, 2008) of at most 50 principal components.

    Neighborhoods are kept, distances between groups are not. The same arguments give the same places.

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


def notebook_figure(width: float, height: float) -> Figure:
    """Return a matplotlib figure that a notebook displays as a cell's value, whether or not pyplot is imported.

    Args:
        width: In inches.
        height: The same.
    """
    from matplotlib.figure import Figure

    def png(figure: Figure) -> bytes:
        stream = io.BytesIO()
        figure.savefig(stream, format="png")
        return stream.getvalue()

    figure = Figure((width, height), layout="constrained")
    vars(figure)["_repr_png_"] = functools.partial(png, figure)
    return figure


def map(
    embeddings: Any,
    labels: Any = None,
    *,
    class_names: Mapping[int, str] | None = None,
    distance: str = "euclidean",
    seed: int = 0,
) -> Figure:
    """Draw embeddings in the plane by t-SNE, of at most 2,000 images; a notebook displays the figure.

    Args:
        embeddings: (N, d).
        labels: (N,) class ids, drawn as colors; the eight most frequent classes are named. None: one color.
        class_names: What the classes are called.
        distance: As `nearest_neighbors`.
        seed: Of the choice of images and of t-SNE.

    Raises:
        UserError: There are fewer than five different embeddings, or not as many labels.

    Example:
        >>> figure = tfdml.report.map(embeddings, labels)
        >>> figure.savefig("map.png")
    """
    vectors = check_embeddings(embeddings, "embeddings")
    labels = ids_or_names(np.zeros(len(vectors), np.int64) if labels is None else labels, len(vectors))
    rows = np.sort(np.random.default_rng(seed).permutation(len(vectors))[:_MAX_IMAGES])
    places = lay_out(vectors[rows], distance=distance, seed=seed)
    if places is None:
        raise UserError("there are too few different embeddings for a map: at least five")
    classes, counts = np.unique(labels[rows], return_counts=True)
    order = classes[np.argsort(-counts, kind="stable")]
    figure = notebook_figure(7.5, 6)
    axes = figure.add_subplot(aspect="equal", xticks=[], yticks=[])
    rest = np.isin(labels[rows], order[STYLES:])
    axes.scatter(places[rest, 0], places[rest, 1], c=labels[rows][rest] % 20, cmap="tab20", s=9, alpha=0.5)
    for style, label in enumerate(order[:STYLES].tolist()):
        name = str((class_names or {}).get(label, label))
        x, y = places[labels[rows] == label].T
        axes.scatter(x, y, s=30, marker=MARKS[style], label=name)
    if len(order) > 1:
        figure.legend(loc="outside right upper", frameon=False)
    return figure


def map_html(
    embeddings: np.ndarray,
    dataset: ImageDataset,
    emphasized: Sequence[int],
    *,
    distance: str = "euclidean",
    seed: int = 0,
) -> Markup:
    """Return the map of some of the images: a picture that reads without a script, what the script needs, and a table.

    Args:
        embeddings: (N, d) all images.
        dataset: The images.
        emphasized: Classes that are worth looking at, the first ones get a color and a shape of their own.
        distance: As `nearest_neighbors`.
        seed: Of the choice of images and of t-SNE.
    """
    rows = dataset.balanced_rows(_MAX_IMAGES, seed, emphasized[:STYLES])
    places = lay_out(embeddings[rows], distance=distance, seed=seed)
    if places is None:
        return Markup("<p>There are too few different images for a map.</p>")
    classes, class_of, counts = np.unique(dataset.labels[rows], return_inverse=True, return_counts=True)
    names = [str(dataset.class_names.get(label, label)) for label in classes.tolist()]
    number_of = {label: number for number, label in enumerate(classes.tolist())}
    shown = [number_of[label] for label in emphasized if label in number_of][:STYLES]
    ranked = rank_queries(places, class_of)
    assert ranked is not None
    # As user units, both axes to one scale.
    size = np.array([_WIDTH, _HEIGHT])
    extent = np.maximum(places.max(axis=0), 1e-9)
    points = size / 2 + ((size - 2 * _EDGE) / extent).min() * (places - extent / 2)
    files = [dataset.images.name(row) for row in rows]
    columns = (files, [names[number] for number in class_of], *places.T.round(5).tolist())
    return render(
        "map.html",
        csv=csv_link("Map of the embedding", ["image", "class", "x", "y"], zip(*columns, strict=True)),
        images=len(rows),
        names=names,
        picture=_picture(points, class_of, shown, names),
        marked=[(names[number], counts[number]) for number in shown],
        data={
            "cell": _CELL,
            "columns": _COLUMNS,
            "x": points[:, 0].round(1).tolist(),
            "y": points[:, 1].round(1).tolist(),
            "class": class_of.tolist(),
            "classes": names,
            # The end of a path, enough to find the file by.
            "names": ["/".join(name.replace("\\", "/").split("/")[-2:]) for name in files],
        },
        sheet=sprite_sheet(dataset, rows, _CELL, _COLUMNS),
        mixed=class_rows(ranked, class_of, class_of)[:_LISTED],
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


def _picture(points: np.ndarray, class_of: np.ndarray, shown: Sequence[int], names: Sequence[str]) -> Markup:
    def plot(figure: Figure) -> None:
        # A unit of the view box is one of the points' coordinates, as the script takes them.
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(_HEIGHT, 0))
        axes.axis("off")
        axes.plot(*points[~np.isin(class_of, shown)].T, "o", ms=4, color=color("dot"), mew=0)
        for style, number in enumerate(shown):
            x, y = points[class_of == number].T
            axes.plot(x, y, MARKS[style], ms=10, color=color(f"s{style}"), mec=color("card"), mew=0.7)

    marked = ", ".join(names[number] for number in shown)
    label = f"Map of {len(points)} images." + (f" Marked classes: {marked}." if shown else "")
    return draw(plot, f"{label} A table below shows how each class keeps together.", _WIDTH, _HEIGHT)
