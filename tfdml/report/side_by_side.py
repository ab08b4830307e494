"""The same queries with what each of several embeddings finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tfdml.report.elements import escape
from tfdml.report.gallery import (
    KEY,
    Ranked,
    count_right,
    neighbours_html,
    query_html,
    rank_queries,
    spread_over_classes,
)
from tfdml.report.thumbnails import Pictures

_THUMBNAIL = 112
# A query and a gallery, (N, d) and (G, d) or None.
Embeddings = tuple[np.ndarray, np.ndarray | None]


def choose_queries(ranked: Sequence[Ranked], labels: np.ndarray, count: int) -> dict[str, list[int]]:
    """Which queries to show: drawn at random, better than under the first, and worse than under it.

    Better and worse by the average precision among the neighbours shown, of the run that differs most.

    Args:
        ranked: What each finds for the same queries.
        labels: Class ids of all queries.
        count: How many to choose.

    Returns:
        Places in `ranked` by kind: `random`, `better`, `worse`.
    """
    first = ranked[0].score
    others = np.stack([run.score for run in ranked[1:]]) - first
    labels = labels[ranked[0].queries]
    each = count // 3
    taken: set[int] = set()
    chosen: dict[str, list[int]] = {}
    for kind, gain in (("better", others.max(axis=0)), ("worse", -others.min(axis=0))):
        order = [
            int(place) for place in np.argsort(-gain, kind="stable") if gain[place] > 0 and int(place) not in taken
        ]
        chosen[kind] = spread_over_classes(order, labels)[:each]
        taken.update(chosen[kind])
    fresh = [place for place in range(len(labels)) if place not in taken]
    rest = count - len(taken) if count < 3 else count - 2 * each
    return {"random": spread_over_classes(fresh, labels)[:rest], **chosen}


def side_by_side_html(
    runs: Mapping[str, Embeddings],
    pictures: Pictures,
    gallery: Pictures | None,
    *,
    num_queries: int,
    neighbours: int,
    distance: str,
    seed: int,
) -> str:
    """Some queries, each with its neighbours under every run; empty where there is nothing to find.

    Args:
        runs: Embeddings by the run's name; all of the same images.
        pictures: The queries.
        gallery: What is searched; None: all-to-all.
        num_queries: How many queries.
        neighbours: How many neighbours of each.
        distance: As `nearest_neighbours`.
        seed: Of the draw.
    """
    labels = pictures.dataset.labels
    gallery_labels = None if gallery is None else gallery.dataset.labels
    ranked = []
    for queries, searched in runs.values():
        found = rank_queries(
            queries, labels, searched, gallery_labels, neighbours=neighbours, distance=distance, seed=seed
        )
        if found is None:
            return ""
        ranked.append(found)
    names = list(runs)
    titles = {
        "random": ("Typical", "drawn at random"),
        "better": ("Better", f"another run finds more than {names[0]}"),
        "worse": ("Worse", f"another run finds less than {names[0]}"),
    }
    parts = []
    for kind, places in choose_queries(ranked, labels, num_queries).items():
        if places:
            title, subtitle = titles[kind]
            rows = "".join(_row(place, names, ranked, pictures, gallery or pictures) for place in places)
            heading = f"<h3>{title} <span>{escape(subtitle)}</span></h3>"
            parts.append(f'<section class="group">{heading}{rows}</section>')
    return KEY + "".join(parts)


def _row(place: int, names: Sequence[str], ranked: Sequence[Ranked], pictures: Pictures, gallery: Pictures) -> str:
    query = int(ranked[0].queries[place])
    lists = []
    for name, run in zip(names, ranked, strict=True):
        example = run.example("", place)
        right = count_right(example)
        label = f"{name}: nearest to the query {pictures.class_of(query)}, {right}"
        lists.append(
            f'<p class="run-name"><b>{escape(name)}</b> <span class="soft">{right}</span></p>'
            f"{neighbours_html(example, gallery, _THUMBNAIL, label)}"
        )
    figure = query_html(query, pictures, _THUMBNAIL, "query")
    return f'<div class="example"><div class="query">{figure}</div><div>{"".join(lists)}</div></div>'
