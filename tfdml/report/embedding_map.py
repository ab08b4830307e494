"""The embedding map: some images laid out in the plane, so that near ones stay near (t-SNE)."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfdml.retrieval.exact import nearest_neighbours, unit_rows

# Images on the map: t-SNE of them takes some ten seconds of one core, their thumbnails 1 to 2 MB.
MAX_IMAGES = 2000
_PERPLEXITY = 30.0
_ITERATIONS = 750
_DIMENSIONS = 50
# Nearest points that tell whether a class keeps together on the map.
_NEAR = 10


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
    if components == 1:  # a plane needs two
        x = np.concatenate([x, np.zeros_like(x)], axis=1)
    tsne = TSNE(
        2,
        perplexity=min(_PERPLEXITY, (count - 1) / 3),
        init=_start(x),
        max_iter=_ITERATIONS,
        random_state=seed,
    )
    # Its steps are short: on a busy machine, threads that wait for one another at each take many times as long.
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        places = tsne.fit_transform(x.astype(np.float32))
    places = places.astype(np.float64) - places.min(axis=0)
    return places / (places.max() or 1.0)


def _start(x: np.ndarray) -> np.ndarray:
    """The first two principal components, small, as t-SNE wants its start."""
    return (1e-4 * x[:, :2] / (x[:, 0].std() or 1.0)).astype(np.float32)


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
        counts = np.bincount(around, minlength=len(classes))
        own = counts[number] / len(around)
        counts[number] = 0
        other = int(counts.argmax())
        known = counts[other] > 0
        share = float(counts[other] / len(around))
        result.append(Mixing(label, size, float(own), int(classes[other]) if known else None, share))
    return sorted(result, key=lambda m: (m.own, m.label))
