"""Chains of steps around a search, such as whitening and expansion: by name, and what each step gains and costs."""

from __future__ import annotations

import dataclasses
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.arguments import integer, number
from tfdml.errors import UserError
from tfdml.evaluation.per_query import (
    PER_QUERY_METRICS,
    RetrievalTask,
    check_depth,
    requested,
    retrieval_task,
    search_depth,
    values_per_query,
)
from tfdml.memory import require_memory
from tfdml.retrieval.exact import nearest_neighbours
from tfdml.retrieval.reranking import Reranked, Searched, augment_gallery, expanded, fit_whitening, scaled, searched

if TYPE_CHECKING:  # needs TensorFlow, which measuring does not
    from tfdml.embeddings.views import Views


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where steps find what they need beside the embeddings.

    Args:
        train: Called with the views (None: one) for embeddings of training classes (M, D); None: there are none.
        embed: Called with views for the queries (N, D) and the gallery (G, D), or None for it all-to-all; None: the
            images are not known.
    """

    train: Callable[[Views | None], Any] | None = None
    embed: Callable[[Views], tuple[Any, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class TestViews:
    """`views(flip=true, crops=5)`: embed several views of every image, and average; see
    `tfdml.embeddings.views.Views`."""

    flip: bool = True
    crops: int = 1

    __test__ = False  # no test of pytest's

    def __post_init__(self):
        self.views  # noqa: B018  (checks the arguments)

    @property
    def views(self) -> Views:
        """Which."""
        from tfdml.embeddings.views import Views

        return Views(self.flip, self.crops)

    def apply(self, what: Searched, sources: Sources, views: Views | None) -> Searched:
        """The search of the averaged embeddings."""
        if sources.embed is None:
            raise UserError(
                "views needs the images and what embeds them: a run folder or a model's file, no embeddings"
            )
        return searched(*sources.embed(self.views))


@dataclasses.dataclass(frozen=True)
class Whiten:
    """`whitening(dim=0, power=1, shrinkage=0)`: see `fit_whitening`."""

    dim: int = 0
    power: float = 1.0
    shrinkage: float = 0.0

    def __post_init__(self):
        integer("dim", self.dim, at_least=0)
        number("power", self.power, at_least=0, at_most=1)
        number("shrinkage", self.shrinkage, at_least=0, at_most=1)

    def apply(self, what: Searched, sources: Sources, views: Views | None) -> Searched:
        """The search of whitened queries and gallery."""
        _require_plain(what, "whitening")
        if sources.train is None:
            raise UserError(
                "whitening is fitted to embeddings of training classes, and there are none: embed them too, "
                "`split='all'`"
            )
        whitening = fit_whitening(sources.train(views), self.dim, power=self.power, shrinkage=self.shrinkage)
        queries = whitening(what.queries)
        gallery = queries if what.queries is what.gallery else whitening(what.gallery)
        extra = what.extra_bytes + whitening.mean.nbytes + whitening.components.nbytes
        return Searched(queries, gallery, what.leave_one_out, extra_bytes=extra)


@dataclasses.dataclass(frozen=True)
class _Expansion:
    k: int = 10
    alpha: float = 3.0

    def __post_init__(self):
        integer("k", self.k, at_least=1)
        number("alpha", self.alpha, at_least=0)


@dataclasses.dataclass(frozen=True)
class ExpandQueries(_Expansion):
    """`query_expansion(k=10, alpha=3)`: see `expand_queries`."""

    def apply(self, what: Searched, sources: Sources, views: Views | None) -> Searched:
        """The search of the expanded queries in the same gallery."""
        return dataclasses.replace(what, queries=expanded(what, int(self.k), self.alpha))


@dataclasses.dataclass(frozen=True)
class AugmentGallery(_Expansion):
    """`database_augmentation(k=10, alpha=3)`: see `augment_gallery`.

    In leave-one-out each query searches the gallery as it would be without its own image.
    """

    def apply(self, what: Searched, sources: Sources, views: Views | None) -> Searched:
        """The search of the same queries in the augmented gallery."""
        _require_plain(what, "database_augmentation")
        if len(what.gallery) < 2:
            return what
        found = augment_gallery(what.gallery, k=int(self.k), alpha=self.alpha)
        augmented = found if what.leave_one_out else None
        return dataclasses.replace(what, gallery=found.vectors, augmented=augmented)


@dataclasses.dataclass(frozen=True)
class ScaleLocally:
    """`csls(k=10)`: see `csls_densities`."""

    k: int = 10

    def __post_init__(self):
        integer("k", self.k, at_least=1)

    def apply(self, what: Searched, sources: Sources, views: Views | None) -> Searched:
        """The search by CSLS."""
        _require_plain(what, "csls")
        return scaled(what, int(self.k))


@dataclasses.dataclass(frozen=True)
class RerankReciprocal:
    """`k_reciprocal(k1=20, k2=6, weight=0.3, top=200)`: see `k_reciprocal_neighbours`."""

    k1: int = 20
    k2: int = 6
    weight: float = 0.3
    top: int = 200

    def __post_init__(self):
        for name in ("k1", "k2", "top"):
            integer(name, getattr(self, name), at_least=1)
        number("weight", self.weight, at_least=0, at_most=1)

    def apply(self, what: Searched, sources: Sources, views: Views | None) -> Reranked:
        """The search with its answers re-ranked."""
        return Reranked.of(what, int(self.k1), int(self.k2), self.weight, int(self.top))


Step = TestViews | Whiten | ExpandQueries | AugmentGallery | ScaleLocally | RerankReciprocal

STEPS: dict[str, type[Step]] = {
    "views": TestViews,
    "whitening": Whiten,
    "database_augmentation": AugmentGallery,
    "query_expansion": ExpandQueries,
    "csls": ScaleLocally,
    "k_reciprocal": RerankReciprocal,
}
# Nothing can follow these: what they give is no embedding that could be changed further.
_LAST = (ScaleLocally, RerankReciprocal)


def name_of(step: Step) -> str:
    """A step as it is written: its name, and the arguments that are not the defaults.

    Example:
        >>> name_of(ExpandQueries(k=5))
        'query_expansion(k=5)'
    """
    name = next(name for name, kind in STEPS.items() if kind is type(step))
    fields = [(field.name, getattr(step, field.name), field.default) for field in dataclasses.fields(step)]
    given = ", ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value, default in fields
        if value != default
    )
    return f"{name}({given})" if given else name


def steps_of(calls: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Step]:
    """The steps that names and arguments mean, in their order.

    Args:
        calls: Pairs of a name of `STEPS` and its arguments.

    Raises:
        UserError: An unknown name or argument, a value out of range, or an order that cannot be.

    Example:
        >>> steps_of([("whitening", {"dim": 64}), ("query_expansion", {"k": 5})])
        [Whiten(dim=64, power=1.0, shrinkage=0.0), ExpandQueries(k=5, alpha=3.0)]
    """
    steps = []
    for name, arguments in calls:
        if name not in STEPS:
            raise UserError(f"unknown step {reprlib.repr(name)}; one of {', '.join(STEPS)}")
        known = [field.name for field in dataclasses.fields(STEPS[name])]
        unknown = [key for key in arguments if key not in known]
        if unknown:
            raise UserError(f"{name} has no argument {reprlib.repr(unknown[0])}; it has {', '.join(known)}")
        try:
            steps.append(STEPS[name](**arguments))
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error
    check_order(steps)
    return steps


def check_order(steps: Iterable[Step]) -> None:
    """Raise a `UserError` where a step stands where it cannot."""
    steps = list(steps)
    if not steps:
        raise UserError("a chain needs a step")
    for place, step in enumerate(steps):
        if isinstance(step, TestViews) and place:
            raise UserError(f"{name_of(step)} embeds the images anew: it must be the first step")
        if isinstance(step, _LAST) and place + 1 < len(steps):
            raise UserError(f"{name_of(step)} must be the last step: it gives a ranking, no embeddings")


def _require_plain(what: Searched, name: str) -> None:
    if what.augmented is not None:
        raise UserError(
            f"where the queries are the gallery, {name} cannot follow database_augmentation: only query_expansion can"
        )


def hubness(embeddings: Any, gallery: Any = None, *, k: int = 10, distance: str = "euclidean") -> dict[str, Any]:
    """How unequally often gallery images are among the k nearest of the queries.

    N_k(g) counts the queries that have image g among their k nearest; its mean is k N / G. In high dimensions a few
    images, hubs, are near to very many queries, and others, anti-hubs or orphans, to none.

    Args:
        embeddings: (N, d) the queries.
        gallery: (G, d) what is searched; None: each in all others.
        k: How many neighbours; all where there are fewer.
        distance: As `nearest_neighbours`.

    Returns:
        `k`; `skewness`, E[(N_k - mean)^3] / sd(N_k)^3, 0 where all are found equally often; `orphans`, the share of
        images with N_k = 0; `largest_hub`, the greatest N_k.

    Raises:
        ValueError: `k` is not positive.
        UserError: As `nearest_neighbours`.

    Example:
        >>> hubness(np.array([[0.0], [1.0], [1.9]]), k=1)
        {'k': 1, 'skewness': 0.0, 'orphans': 0.3333333333333333, 'largest_hub': 2}

    Source: Radovanovic, Nanopoulos and Ivanovic, "Hubs in Space", JMLR 2010, eq. 1 (there S_Nk).
    """
    size = len(embeddings) if gallery is None else len(gallery)
    k = min(integer("k", k, at_least=1), size - (gallery is None))
    rows, _ = nearest_neighbours(embeddings, gallery, k=k, distance=distance)
    return hubness_of(rows, size)


def hubness_of(rows: np.ndarray, size: int) -> dict[str, Any]:
    """What `hubness` gives, of neighbours that are known.

    Args:
        rows: (N, k) gallery rows.
        size: G.
    """
    counts = np.bincount(rows.ravel(), minlength=size).astype(np.float64)
    moved = counts - counts.mean()
    spread = np.sqrt((moved**2).mean())
    return {
        "k": rows.shape[1],
        "skewness": float((moved**3).mean() / spread**3) if spread > 0 else 0.0,
        "orphans": float((counts == 0).mean()),
        "largest_hub": int(counts.max()),
    }


# How far lengths may be from 1 for embeddings to be taken as they are.
_UNIT = 1e-3


def measure_chains(
    embeddings: Any,
    labels: Any,
    gallery: Any = None,
    gallery_labels: Any = None,
    *,
    chains: Sequence[Sequence[Step]],
    sources: Sources | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    metrics: Sequence[str] = ("recall", "map@r"),
    distance: str = "euclidean",
    hubs: int = 10,
) -> list[dict[str, Any]]:
    """Retrieval metrics before the chains and after every step of them.

    A chain is applied in its order, to embeddings scaled to length 1. All-to-all a query is not expanded by its own
    image, finds no gallery image that its own image has moved, and is not found by itself.

    Args:
        embeddings: (N, d) the queries.
        labels: (N,) their class ids.
        gallery: (G, d) what is searched; None: all-to-all.
        gallery_labels: (G,) class ids of the gallery.
        chains: The steps of each chain, see `steps_of`.
        sources: What the steps need beside the embeddings.
        ks: The K of `recall`.
        metrics: As `retrieval_per_query`, without `map`.
        distance: Of the plain search.
        hubs: The k of `hubness`.

    Returns:
        A row for `plain`, one for `length 1` where the embeddings have other lengths, and one for each step of each
        chain: `step` (the chain up to it), `metrics` (fractions), `gain` of each on `plain`, `seconds` of the step and
        the search after it, `bytes` that are kept to search in (vectors of the gallery and what is beside them), and
        `hubness`.

    Raises:
        UserError: As `evaluate_retrieval`; a step cannot be made, or not there; `map` is asked for.

    Example:
        >>> from tfdml.evaluation import steps_of
        >>> points = np.random.default_rng(0).normal(size=(40, 4)) + np.repeat(np.eye(4), 10, axis=0)
        >>> rows = measure_chains(points, np.repeat(range(4), 10), chains=[steps_of([("query_expansion", {"k": 3})])])
        >>> [row["step"] for row in rows]
        ['plain', 'length 1', 'query_expansion(k=3)']
    """
    for chain in chains:
        check_order(chain)
    names = requested(ks, metrics, PER_QUERY_METRICS)
    if "map" in names:
        raise UserError("map ranks the whole gallery, which steps after the embedding do not: choose map@r or map@K")
    task = retrieval_task(embeddings, labels, gallery, gallery_labels)
    check_depth(task, names)
    sources = sources or Sources()
    depth = max(search_depth(task, names), min(hubs, task.available))
    advice = "leave out map@r and r_precision, which need as many neighbours as the largest class has images"
    require_memory(40.0 * depth * len(task.labels), f"the {depth:,} nearest of each query", advice)

    rows: list[dict[str, Any]] = []

    def add(step: str, found: np.ndarray, began: float, size: int) -> None:
        seconds = time.perf_counter() - began
        values = _means(task, names, found)
        first = rows[0]["metrics"] if rows else values
        rows.append(
            {
                "step": step,
                "metrics": values,
                "gain": {name: values[name] - first[name] for name in names},
                "seconds": seconds,
                "bytes": size,
                "hubness": hubness_of(found[:, : min(hubs, task.available)], len(task.targets)),
            }
        )

    began = time.perf_counter()
    found, _ = nearest_neighbours(task.queries, task.gallery, k=depth, distance=distance)
    add("plain", found, began, (task.queries if task.gallery is None else task.gallery).nbytes)
    start = searched(task.queries, task.gallery)
    lengths = np.linalg.norm(task.queries if task.gallery is None else task.gallery, axis=1)
    if np.abs(lengths - 1).max() > _UNIT:
        began = time.perf_counter()
        add("length 1", start.neighbours(depth)[0], began, start.bytes)
    done = {"plain"}
    for chain in chains:
        what: Any = start
        views = None
        for place, step in enumerate(chain):
            name = " + ".join(map(name_of, chain[: place + 1]))
            began = time.perf_counter()
            what = step.apply(what, sources, views)
            views = step.views if isinstance(step, TestViews) else views
            if name not in done:  # two chains may begin alike
                add(name, what.neighbours(depth)[0], began, what.bytes)
            done.add(name)
    return rows


def _means(task: RetrievalTask, names: Sequence[str], found: np.ndarray) -> dict[str, float]:
    def neighbours(depth: int) -> Any:
        for start in range(0, len(found), 4096):
            block = slice(start, min(start + 4096, len(found)))
            yield block, found[block, :depth], np.zeros(0)

    values = values_per_query(task, names, "euclidean", 0, neighbours=neighbours)
    return {name: float(values[name][task.answerable].mean()) for name in names}
