"""The steps of a chain, each by its name and arguments: `whitening(dim=128)`, `query_expansion(k=5, alpha=3)`."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tfdml.arguments import integer, number
from tfdml.embeddings.views import Views
from tfdml.errors import UserError
from tfdml.evaluation.reranking.csls import scaled
from tfdml.evaluation.reranking.expansion import augment_gallery, expanded
from tfdml.evaluation.reranking.k_reciprocal import Reranked
from tfdml.evaluation.reranking.searched import Searched, searched
from tfdml.evaluation.reranking.whitening import fit_whitening


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
