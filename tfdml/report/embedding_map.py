"""The embedding map: some images in the plane by t-SNE, drawn for a report or a notebook."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from tfdml.embeddings.files import class_of_each
from tfdml.errors import UserError
from tfdml.evaluation.relevance import ids_or_names
from tfdml.report.plots import MARKS, STYLES, color, draw
from tfdml.report.rendering import csv_link, render
from tfdml.retrieval.exact import check_embeddings, unit_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tfdml.data.dataset import ImageDataset

# Images on the map: t-SNE of them takes some ten seconds of one core.
_MAX_IMAGES = 2000


def lay_out(embeddings: np.ndarray, *, distance: str = "euclidean", seed: int = 0) -> np.ndarray | None:
    """Places in the plane by t-SNE (van der Maaten and Hinton, 2008); the same arguments give the same places.

    Args:
        embeddings: (n, d).
        distance: For `cosine` the embeddings are scaled to length 1 first; else their Euclidean distances count.
        seed: Of t-SNE.

    Returns:
        (n, 2) float32; None for fewer than five images or if all are the same.
    """
    x = unit_rows(embeddings) if distance == "cosine" else np.asarray(embeddings)
    if len(x) < 5 or np.ptp(x, axis=0).max() == 0:
        return None
    import threadpoolctl
    from sklearn.manifold import TSNE

    x = x / np.abs(x).max()
    x = np.pad(x, ((0, 0), (0, max(0, 2 - x.shape[1]))))  # a plane needs two
    tsne = TSNE(2, perplexity=min(30.0, (len(x) - 1) / 3), init="pca", max_iter=750, random_state=seed)
    # Its steps are short: on a busy machine, threads that wait for one another at each take many times as long.
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        return tsne.fit_transform(x)


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
        labels: (N,) class ids; the eight most frequent classes are marked and named. None: one color.
        class_names: What the classes are called.
        distance: As `nearest_neighbors`.
        seed: Of the choice of images and of t-SNE.

    Raises:
        UserError: There are fewer than five different embeddings, or not as many labels.

    Example:
        >>> figure = tfdml.report.map(embeddings, labels)
        >>> figure.savefig("map.png")
    """
    from matplotlib.figure import Figure

    vectors = check_embeddings(embeddings, "embeddings")
    labels = ids_or_names(np.zeros(len(vectors), np.int64) if labels is None else labels, len(vectors))
    rows = np.sort(np.random.default_rng(seed).permutation(len(vectors))[:_MAX_IMAGES])
    places = lay_out(vectors[rows], distance=distance, seed=seed)
    if places is None:
        raise UserError("there are too few different embeddings for a map: at least five")
    classes, counts = np.unique(labels[rows], return_counts=True)
    shown = classes[np.argsort(-counts, kind="stable")][:STYLES].tolist()
    figure = Figure((7.5, 6))
    names = {label: str((class_names or {}).get(label, label)) for label in shown}
    _plot(figure, places, labels[rows], names, {"dot": "#cccccc", "card": "white"}.get)
    if len(shown) > 1:
        figure.legend(loc="outside right upper", frameon=False)
    # What a notebook displays as a cell's value, whether or not pyplot is imported.
    vars(figure)["_repr_png_"] = functools.partial(_png, figure)
    return figure


def map_html(
    embeddings: np.ndarray, dataset: ImageDataset, emphasized: Sequence[int], *, distance: str = "euclidean"
) -> Markup:
    """Return the map of some of the images as a picture, with its values.

    Args:
        embeddings: (N, d) all images.
        dataset: The images.
        emphasized: At most eight classes that get a color and a shape of their own.
        distance: As `nearest_neighbors`.
    """
    rows = dataset.balanced_rows(_MAX_IMAGES, 0, emphasized)
    places, labels = lay_out(embeddings[rows], distance=distance), dataset.labels[rows]
    if places is None:
        return Markup("<p>There are too few different images for a map.</p>")
    names = class_of_each(labels, dataset.class_names)
    shown = {label: str(names[labels == label][0]) for label in emphasized if label in labels}
    label = f"Map of {len(rows)} images." + (f" Marked classes: {', '.join(shown.values())}." if shown else "")
    values = zip((dataset.images.name(row) for row in rows), names, *places.T.round(3), strict=True)
    return render(
        "map.html",
        picture=draw(lambda figure: _plot(figure, places, labels, shown, color), label, 640, 560),
        csv=csv_link("Map of the embedding", ["image", "class", "x", "y"], values),
        images=len(rows),
        classes=len(np.unique(labels)),
        marked=list(shown.values()),
    )


def _plot(figure: Figure, places: np.ndarray, labels: np.ndarray, shown: Mapping[Any, str], paint: Any) -> None:
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot(aspect="equal")
    axes.axis("off")
    axes.plot(*places[~np.isin(labels, list(shown))].T, "o", ms=4, color=paint("dot"), mew=0)
    for style, (label, name) in enumerate(shown.items()):
        x, y = places[labels == label].T
        axes.plot(x, y, MARKS[style], ms=9, color=paint(f"s{style}"), mec=paint("card"), label=name)


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()
