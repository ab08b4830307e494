"""Chains of steps around a search, such as whitening and expansion: by name, and what each step gains and costs."""

from __future__ import annotations

import dataclasses
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.arguments import integer, number
from tfdml.errors import REASON, UserError, user_errors
from tfdml.evaluation import per_query
from tfdml.evaluation.relevance import Relevance
from tfdml.memory import require_memory
from tfdml.retrieval import reranking
from tfdml.retrieval.exact import nearest_neighbors, row_blocks

if TYPE_CHECKING:
    from tfdml.embeddings.backends import Views

# How far lengths may be from 1 for embeddings to be taken as they are.
_UNIT = 1e-3


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where steps find what they need next to the embeddings.

    Args:
        train: Called with the views (None: one) for embeddings of training classes (M, D); None: there are none.
        embed: Called with views for the queries (N, D) and the gallery (G, D), or None for it all-to-all; None: the
            images are not known.
    """

    train: Callable[[Views | None], Any] | None = None
    embed: Callable[[Views], tuple[Any, Any]] | None = None


# The steps with their arguments' defaults.
STEPS: dict[str, dict[str, Any]] = {
    "views": {"flip": True, "crops": 1},
    "whitening": {"dim": 0, "power": 1.0, "shrinkage": 0.0},
    "query_expansion": {"k": 10, "alpha": 3.0},
    "k_reciprocal": {"k1": 20, "k2": 6, "weight": 0.3, "top": 200},
}
# Nothing can follow it: it gives a ranking, and no embeddings that could be changed further.
_LAST = "k_reciprocal"
# The least and the greatest value of an argument.
_BOUNDS: dict[str, tuple[float, float | None]] = {
    **dict.fromkeys(("k", "k1", "k2", "top"), (1, None)),
    **dict.fromkeys(("power", "shrinkage", "weight"), (0, 1)),
    **dict.fromkeys(("dim", "alpha"), (0, None)),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a chain, such as `query_expansion(k=5)`; made by `steps_of`.

    Args:
        name: One of `STEPS`.
        arguments: All of its arguments.
    """

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        given = ", ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in self.arguments.items()
            if value != STEPS[self.name][key]
        )
        return f"{self.name}({given})" if given else self.name

    def apply(self, search: Any, sources: Sources, views: Views | None = None) -> Any:
        """Return what is searched after this step; `views` are those that it was embedded in."""
        if self.name == "views":
            if sources.embed is None:
                raise UserError("views needs the images: name a run folder or a model's file, no embeddings")
            return reranking.search_of(*sources.embed(_views_of(self.arguments)))
        if self.name == "whitening":
            return _whitened(search, sources, views, **self.arguments)
        if self.name == "query_expansion":
            return dataclasses.replace(search, queries=reranking.expanded_queries(search, **self.arguments))
        return reranking.Reranked.of(search, **self.arguments)


def _whitened(search: reranking.Search, sources: Sources, views: Views | None, **options: Any) -> reranking.Search:
    if sources.train is None:
        raise UserError("whitening needs embeddings of training classes: embed them too, `split='all'`")
    whitening = reranking.fit_whitening(sources.train(views), **options)
    queries = whitening(search.queries)
    gallery = queries if search.queries is search.gallery else whitening(search.gallery)
    return reranking.Search(queries, gallery, search.leave_one_out)


def _views_of(arguments: Mapping[str, Any]) -> Views:
    from tfdml.embeddings.backends import Views  # which imports TensorFlow

    return Views(**arguments)


def steps_of(calls: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Step]:
    """Return the steps that names and arguments mean, in their order.

    Args:
        calls: Pairs of a name of `STEPS` and its arguments.

    Raises:
        UserError: An unknown name or argument, a value out of range, or an order that cannot be.

    Example:
        >>> [str(step) for step in steps_of([("whitening", {"dim": 64}), ("query_expansion", {"k": 10})])]
        ['whitening(dim=64)', 'query_expansion']
    """
    steps = []
    for name, arguments in calls:
        if name not in STEPS:
            raise UserError(f"unknown step {reprlib.repr(name)}; one of {', '.join(STEPS)}")
        known = STEPS[name]
        unknown = [key for key in arguments if key not in known]
        if unknown:
            raise UserError(f"{name} has no argument {reprlib.repr(unknown[0])}; it has {', '.join(known)}")
        with user_errors(ValueError, f"{name}: {REASON}"):
            if name == "views":
                _views_of({**known, **arguments})
            for key in arguments if name != "views" else ():
                check: Callable[..., Any] = integer if isinstance(known[key], int) else number
                least, most = _BOUNDS[key]
                check(key, arguments[key], at_least=least, at_most=most)
        steps.append(Step(name, {**known, **arguments}))
    if not steps:
        raise UserError("a chain needs a step")
    for place, step in enumerate(steps):
        if step.name == "views" and place:
            raise UserError(f"{step} embeds the images again: it must be the first step")
        if step.name == _LAST and place + 1 < len(steps):
            raise UserError(f"{step} must be the last step: it gives a ranking, no embeddings")
    return steps


def measure_chains(
    embeddings: Any,
    labels: Any = None,
    gallery: Any = None,
    gallery_labels: Any = None,
    *,
    chains: Sequence[Sequence[Step]],
    relevance: Relevance | None = None,
    sources: Sources | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
    metrics: Sequence[str] = ("recall", "map@r"),
    distance: str = "euclidean",
) -> list[dict[str, Any]]:
    """Return retrieval metrics before the chains and after every step of them.

    A chain is applied in its order, to embeddings scaled to length 1. All-to-all a query is not expanded by its own
    image, finds no gallery image that its own image has moved, and is not found by itself.

    Args:
        embeddings: (N, d) the queries.
        labels: (N,) their class ids.
        gallery: (G, d) what is searched; None: all-to-all.
        gallery_labels: (G,) class ids of the gallery.
        chains: The steps of each chain, see `steps_of`.
        relevance: As `evaluate_retrieval`.
        sources: What the steps need next to the embeddings.
        ks: The K of `recall`.
        metrics: As `retrieval_per_query`, without `map`.
        distance: Of the plain search.

    Returns:
        A row for `plain`, one for `length 1` where the embeddings have other lengths, and one for each step of each
        chain: `step` (the chain up to it), `metrics` (fractions), `gain` of each on `plain`, and `seconds` of the step
        and the search after it.

    Raises:
        UserError: As `evaluate_retrieval`; a step cannot be made, or not there; `map` is asked for.

    Example:
        >>> from tfdml.evaluation import steps_of
        >>> points = np.random.default_rng(0).normal(size=(40, 4)) + np.repeat(np.eye(4), 10, axis=0)
        >>> rows = measure_chains(points, np.repeat(range(4), 10), chains=[steps_of([("query_expansion", {"k": 3})])])
        >>> [row["step"] for row in rows]
        ['plain', 'length 1', 'query_expansion(k=3)']
    """
    names = per_query.requested(ks, metrics, per_query.PER_QUERY_METRICS)
    task = per_query.retrieval_task(embeddings, labels, gallery, gallery_labels, relevance=relevance)
    per_query.check_depth(task, names)
    sources = sources or Sources()
    depth = task.depth_with_ignored(per_query.search_depth(task, names))
    advice = "leave out map@r and r_precision, which need as many neighbors as the largest class has images"
    require_memory(40.0 * depth * len(task.queries), f"the {depth:,} nearest of each query", advice)

    rows: list[dict[str, Any]] = []

    def add(step: str, found: np.ndarray, began: float) -> None:
        seconds = time.perf_counter() - began
        values = _means(task, names, found)
        first = rows[0]["metrics"] if rows else values
        gain = {name: values[name] - first[name] for name in values}
        rows.append({"step": step, "metrics": values, "gain": gain, "seconds": seconds})

    began = time.perf_counter()
    found, _ = nearest_neighbors(task.queries, task.gallery, k=depth, distance=distance)
    add("plain", found, began)
    start = reranking.search_of(task.queries, task.gallery)
    lengths = np.linalg.norm(task.searched, axis=1)
    if np.abs(lengths - 1).max() > _UNIT:
        began = time.perf_counter()
        add("length 1", start.neighbors(depth)[0], began)
    done = {"plain"}
    for chain in chains:
        search: Any = start
        views = None
        for place, step in enumerate(chain):
            name = " + ".join(map(str, chain[: place + 1]))
            began = time.perf_counter()
            search = step.apply(search, sources, views)
            views = _views_of(step.arguments) if step.name == "views" else views
            if name not in done:  # two chains may begin alike
                add(name, search.neighbors(depth)[0], began)
            done.add(name)
    return rows


def _means(task: per_query.RetrievalTask, names: Sequence[str], found: np.ndarray) -> dict[str, float]:
    def neighbors(depth: int) -> Any:
        for block in row_blocks(len(found), 4096):
            yield block, found[block, :depth], np.zeros(0)

    values = per_query.values_per_query(task, names, "euclidean", 0, neighbors=neighbors)
    levels = task.by_level.items()
    return {name + end: float(values[name + end][level.answerable].mean()) for end, level in levels for name in names}
