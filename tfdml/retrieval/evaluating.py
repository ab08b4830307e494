"""What users of a gallery get: its queries searched in the database, measured beside the exact search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tfdml.embeddings.reader import StoredEmbeddings
from tfdml.errors import UserError
from tfdml.evaluation.per_query import matches_in_gallery
from tfdml.evaluation.retrieval import dataset_protocol, evaluate_retrieval
from tfdml.memory import require_memory
from tfdml.retrieval.database import MOST, GalleryDatabase

METRICS = ("recall", "map@r", "r_precision")
# Queries that are asked at once.
_ASKED = 100


@dataclasses.dataclass(frozen=True)
class GalleryMetrics:
    """Metrics of one gallery, as `evaluate_retrieval` returns them.

    Args:
        found: Of what the database finds.
        exact: Of the exact search over the same rows.
        left_out: Metrics that need more neighbours than a search of the database returns.
        images: How many rows of the split were measured.
        classes: Of how many classes.
    """

    found: dict[str, Any]
    exact: dict[str, Any]
    left_out: tuple[str, ...]
    images: int
    classes: int


def read_rows(gallery: GalleryDatabase) -> StoredEmbeddings:
    """All rows of a gallery, by id.

    Raises:
        UserError: They have no labels, or do not fit into the memory.
    """
    about = gallery.about
    if about is not None and about.attributes.get("label") != "integer":
        raise UserError(f"`uri={gallery.address}` has no attribute label of integers: nothing tells what is a hit")
    if about is not None:
        advice = "measure a part of it, indexed as a table of its own"
        require_memory(3 * 4 * len(gallery) * about.dimension, f"the vectors of {gallery.address}", advice)
    parts = list(gallery.rows())
    ids = np.array([name for part in parts for name in part.ids], object)
    if not len(ids):
        raise UserError(f"`uri={gallery.address}` holds no rows")
    order = np.argsort(ids)
    labels = np.array([label for part in parts for label in part.attributes["label"]], np.int64)
    roles = np.array([role for part in parts for role in part.attributes.get("role", ())])
    return StoredEmbeddings(
        str(gallery.address),
        np.concatenate([part.vectors for part in parts])[order],
        labels[order],
        roles[order] if len(roles) else None,
        tuple(ids[order]),
    )


def evaluate_gallery(
    gallery: GalleryDatabase,
    split: str = "test",
    ks: Sequence[int] | Callable[[Any], Sequence[int]] = (1, 2, 4, 8),
    metrics: Sequence[str] = METRICS,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> GalleryMetrics:
    """Search a gallery's queries in the database, and score what is found.

    Rows with the role `query` are searched among those with the role `gallery`; without such roles each row of the
    split among all others. A neighbour that the database does not find is no hit. The distance is the gallery's.

    Args:
        gallery: With the attributes `label` and, where it has queries or training images, `role`.
        split: `"test"` or `"train"`, by role.
        ks: The K of Recall@K, or what gives them for the rows.
        metrics: As `evaluate_retrieval`, without `map` and clustering.
        progress: Called with the queries searched in the database, and how many there are.

    Returns:
        The metrics, and those of the exact search. `map@r` and `r_precision` are left out where a class has more images
        than a search returns, 4,095.

    Raises:
        UserError: The gallery has no labels or no such split; a metric or K as in `evaluate_retrieval`; or the database
            fails.

    Example:
        >>> with connect(f"lancedb://{os.path.abspath('galleries')}?index=ivf") as gallery:
        ...     gallery.upsert(test.images.names, embeddings, {"label": labels})
        ...     gallery.optimize()
        ...     measured = evaluate_gallery(gallery, ks=(1, 10))
        >>> round(measured.found["recall@1"], 1), round(measured.exact["recall@1"], 1)
        (0.6, 0.6)
    """
    everything = read_rows(gallery)
    part = everything.split(split)
    chosen = ks(part) if callable(ks) else ks
    arrays = dataset_protocol(part.embeddings, part)  # type: ignore[arg-type]  # which has labels and roles
    matches = matches_in_gallery(arrays["labels"], arrays.get("gallery_labels"))
    left_out = tuple(name for name in metrics if name in ("map@r", "r_precision") and matches.max() > MOST - 1)
    kept = [name for name in metrics if name not in left_out]
    options: dict[str, Any] = {"ks": chosen, "metrics": kept, "distance": gallery.distance}
    search = _search(gallery, part, _searched_roles(everything, part), progress)
    found = evaluate_retrieval(**arrays, **options, neighbours=search)
    exact = evaluate_retrieval(**arrays, **options)
    assert part.labels is not None
    return GalleryMetrics(found, exact, left_out, len(part), len(np.unique(part.labels)))


def _searched_roles(everything: StoredEmbeddings, part: StoredEmbeddings) -> dict[str, str]:
    """The filter that leaves what is searched."""
    if part.is_query is not None:
        return {"role": "gallery"}
    if len(part) == len(everything) or part.roles is None:
        return {}
    roles = sorted(set(part.roles.tolist()))
    if len(roles) > 1:
        raise UserError(
            f"`uri={everything.source}`: the roles {' and '.join(roles)} would be searched together, which no filter "
            "of one value leaves; index them as a table of their own"
        )
    return {"role": roles[0]}


def _search(
    gallery: GalleryDatabase, part: StoredEmbeddings, condition: dict[str, str], progress: Callable[[int, int], None]
) -> Callable[[int], Iterator[tuple[slice, np.ndarray, np.ndarray]]]:
    """The search of the database as `evaluate_retrieval` takes it."""
    names = np.array(part.names, object)
    is_query = part.is_query
    asked = np.arange(len(part)) if is_query is None else np.flatnonzero(is_query)
    targets = names if is_query is None else names[~is_query]
    row_of = {name: row for row, name in enumerate(targets)}

    def neighbours(depth: int) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
        for start in range(0, len(asked), _ASKED):
            block = slice(start, min(start + _ASKED, len(asked)))
            queries = asked[block]
            # One more, where a query is among what is searched.
            found = gallery.search(part.embeddings[queries], depth + (is_query is None), condition)
            rows = np.full((len(queries), depth), -1, np.int64)
            distances = np.full(rows.shape, np.inf, np.float32)
            for query, name in enumerate(names[queries]):
                kept = [i for i, other in enumerate(found.ids[query]) if other is not None and other != name][:depth]
                rows[query, : len(kept)] = [row_of.get(other, -1) for other in found.ids[query, kept]]
                distances[query, : len(kept)] = found.distances[query, kept]
            progress(block.stop, len(asked))
            yield block, rows, distances

    return neighbours
