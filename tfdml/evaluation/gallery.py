"""Retrieval examples of the report: which queries to show, their thumbnails and those of their neighbours."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation.neighbours import nearest_neighbours
from tfdml.evaluation.retrieval import matches_in_gallery, precision_sums

if TYPE_CHECKING:  # tfdml.data needs TensorFlow, which measuring does not
    from tfdml.data.dataset import ImageDataset

# Reads image `index` as (H, W, 3) uint8.
ReadImage = Callable[[int], np.ndarray]

# The page needs only a few queries; ranking this many finds good and bad ones without another pass over everything.
_RANKED_QUERIES = 2000
_GROUPS = {
    "random": ("Typical", "drawn at random"),
    "worst": ("Hardest", "fewest neighbours of the query’s own class"),
    "best": ("Best", "most neighbours of the query’s own class"),
}


def dataset_reader(dataset: ImageDataset) -> ReadImage:
    """A function that reads one image of `dataset` as a person sees it.

    Args:
        dataset: Files, encoded bytes or arrays. Transparency is laid over white and the EXIF orientation is applied.

    Returns:
        A function from an index to (H, W, 3) uint8. It raises `UserError` with the image's name where an image
        cannot be read.

    Example:
        >>> from tfdml.data import ArrayImages, ImageDataset
        >>> images = ArrayImages(np.zeros((1, 4, 6, 3), np.uint8), ("black",))
        >>> dataset_reader(ImageDataset("demo", "test", images, np.array([0]), {0: "night"}))(0).shape
        (4, 6, 3)
    """
    from tfdml.data.dataset import ArrayImages
    from tfdml.data.encoded import encoded_image

    images = dataset.images

    def read(index: int) -> np.ndarray:
        if isinstance(images, ArrayImages):
            return np.asarray(images.data[index], np.uint8)
        try:
            return _decode(encoded_image(images, index))
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for damaged files
            raise UserError(f"{images.name(index)} cannot be read as an image: {error}") from error

    return read


def _decode(data: bytes) -> np.ndarray:
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data)) as file:
        image = ImageOps.exif_transpose(file)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


def thumbnail(image: np.ndarray, size: int, quality: int = 80) -> str:
    """`image` (H, W, 3) uint8 as a JPEG data URI whose longer side is at most `size`."""
    from PIL import Image

    picture = Image.fromarray(np.ascontiguousarray(image, np.uint8))
    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


@dataclasses.dataclass(frozen=True)
class Example:
    """One query and its neighbours, nearest first."""

    kind: str  # "random", "worst" or "best"
    query: int
    neighbours: np.ndarray  # (k,) gallery rows
    distances: np.ndarray  # (k,)
    hits: np.ndarray  # (k,) bool


def choose_examples(
    embeddings: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    *,
    num_queries: int = 10,
    neighbours: int = 8,
    distance: str = "euclidean",
    seed: int = 0,
) -> list[Example]:
    """Some queries drawn at random, some whose nearest images are mostly wrong, some whose are mostly right.

    Right and wrong by average precision among the neighbours shown. Of up to 2,000 queries drawn at random, about
    two fifths of those shown are the first drawn, the rest worst and best in equal parts, of different classes as
    far as there are enough. The same arguments give the same choice.

    Args:
        embeddings: (N, d) queries.
        labels: (N,) their class ids.
        gallery: (G, d); None: all-to-all.
        gallery_labels: (G,).
        num_queries: How many queries, fewer where there are not as many with an image of their class to find.
        neighbours: How many neighbours of each, fewer where the gallery is smaller.
        distance: As `nearest_neighbours`.
        seed: Of the draw.
    """
    matches = matches_in_gallery(labels, gallery_labels)
    drawn = np.random.default_rng(seed).permutation(np.flatnonzero(matches > 0))[:_RANKED_QUERIES]
    if not len(drawn) or num_queries < 1 or neighbours < 1:
        return []
    searched, targets = (embeddings, labels) if gallery is None else (gallery, gallery_labels)
    own_rows = drawn if gallery is None else None
    rows, distances = nearest_neighbours(
        embeddings[drawn],
        searched,
        k=min(neighbours, len(searched) - (gallery is None)),
        distance=distance,
        own_rows=own_rows,
    )
    hits = np.asarray(targets)[rows] == labels[drawn][:, None]
    score = precision_sums(hits, np.minimum(matches[drawn], rows.shape[1]))[0]

    taken: list[tuple[str, int]] = []

    def take(kind: str, order: np.ndarray, count: int) -> None:
        used = {place for _, place in taken}
        fresh = [int(place) for place in order if int(place) not in used]
        seen: set[int] = set()
        new_class = []
        for place in fresh:
            if labels[drawn[place]] not in seen:
                seen.add(labels[drawn[place]])
                new_class.append(place)
        chosen = (new_class + [place for place in fresh if place not in set(new_class)])[:count]
        taken.extend((kind, place) for place in chosen)

    extremes = (num_queries * 3) // 10
    take("random", np.arange(len(drawn)), num_queries - 2 * extremes)
    take("worst", np.argsort(score, kind="stable"), extremes)
    take("best", np.argsort(-score, kind="stable"), extremes)
    return [Example(kind, int(drawn[p]), rows[p], distances[p], hits[p]) for kind, p in taken]


def gallery_html(
    examples: Sequence[Example],
    dataset: ImageDataset,
    gallery: ImageDataset,
    read_image: ReadImage,
    read_gallery_image: ReadImage,
    thumbnail_size: int = 144,
) -> str:
    """The examples as HTML: groups of rows, each a query and an ordered list of its neighbours.

    A neighbour of the query's class is framed green and marked with a tick, another red with a cross, and the words
    are there for whoever sees neither.
    """
    parts = []
    for kind, (title, subtitle) in _GROUPS.items():
        group = [example for example in examples if example.kind == kind]
        if group:
            heading = f"<h3>{title} <span>{subtitle}</span></h3>"
            rows = [_row(e, dataset, gallery, read_image, read_gallery_image, thumbnail_size) for e in group]
            parts.append(f'<section class="group">{heading}{"".join(rows)}</section>')
    return "".join(parts)


def _class_name(dataset: ImageDataset, index: int) -> str:
    label = int(dataset.labels[index])
    return str(dataset.class_names.get(label, label))


def _row(
    example: Example,
    dataset: ImageDataset,
    gallery: ImageDataset,
    read_image: ReadImage,
    read_gallery_image: ReadImage,
    size: int,
) -> str:
    query_class = _class_name(dataset, example.query)
    right = int(example.hits.sum())
    summary = f"{right} of {len(example.hits)} right"
    figure = _figure(
        thumbnail(read_image(example.query), size),
        alt=f"Query of class {query_class}",
        title=dataset.images.name(example.query),
        badge="",
        name=query_class,
        note=summary,
    )
    items = []
    neighbours = zip(example.neighbours, example.distances, example.hits, strict=True)
    for rank, (row, distance, hit) in enumerate(neighbours, 1):
        name = _class_name(gallery, int(row))
        verdict, mark = ("hit", "✓") if hit else ("miss", "✗")
        picture = _figure(
            thumbnail(read_gallery_image(int(row)), size),
            alt=f"Neighbour {rank}, {verdict}: {name}",
            title=gallery.images.name(int(row)),
            badge=f'<span class="badge" aria-hidden="true">{mark}</span>',
            name=name,
            note=f"{distance:.3f}",
        )
        items.append(f'<li class="{verdict}">{picture}</li>')
    label = html.escape(f"Nearest to the query {query_class}, {summary}", quote=True)
    return (
        f'<div class="example"><div class="query">{figure}</div>'
        f'<ol class="neighbours" aria-label="{label}">{"".join(items)}</ol></div>'
    )


def _figure(source: str, *, alt: str, title: str, badge: str, name: str, note: Any) -> str:
    alt, title, name = (html.escape(text, quote=True) for text in (alt, title, name))
    return (
        f'<figure><div class="frame"><img src="{source}" alt="{alt}" title="{title}">{badge}</div>'
        f'<figcaption><span class="name" title="{name}">{name}</span><span class="note">{note}</span></figcaption>'
        "</figure>"
    )
