"""Losses of pytorch-metric-learning 2.9 by their names and arguments there: tables of what equals what.

Benchmarks and parity tests compare both libraries by them. docs/migrating.md has the same for a reader.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
from typing_extensions import override

from tfdml import losses, pairwise
from tfdml.arguments import boolean, number
from tfdml.errors import REASON, UserError, user_errors
from tfdml.losses import PairLoss
from tfdml.mining import BatchEasyHardMiner, BatchHardMiner
from tfdml.objectives import ProxyLoss
from tfdml.saving import restore


@keras.saving.register_keras_serializable("tfdml")
class NormalizedLoss(PairLoss):
    """A loss on pairs, of embeddings that are L2-normalized first: loss(labels, x / |x|).

    pytorch-metric-learning normalizes in its distances, tfdml in its `Embedder`; so what another model gives reaches
    the loss as it would there. A zero vector stays zero and gets no gradient. Embeddings of length 1 are left as they
    are, but for rounding.

    Args:
        loss: A loss on pairs of embeddings, such as `tfdml.losses.TripletLoss()`. Its reduction and `positives`
            are this one's.
        name: The loss's name in logs; by default the inner loss's.

    Raises:
        ValueError: `loss` is not a loss on pairs of embeddings.

    Example:
        >>> loss = NormalizedLoss(tfdml.losses.ContrastiveLoss(distance="euclidean"))
        >>> float(loss([0, 0], [[3.0, 0.0], [0.0, 0.5]]))  # 2^0.5
        1.4142135
    """

    def __init__(self, loss, name=None):
        loss = restore(loss)
        if not isinstance(loss, PairLoss):
            raise ValueError(f"expected a loss on pairs of embeddings, got {loss!r}")
        super().__init__(positives=loss.positives, reduction=loss.reduction, name=name or loss.name)
        self.loss = loss
        self.whole_batch, self.within_batch = loss.needs_whole_batch, loss.within_batch

    def anchor_losses(self, pairs):
        """Compute the loss's values: (b,)."""
        return self.loss.values_of(pairs.map(pairwise.l2_normalize))

    @override
    def get_config(self):
        config = super().get_config()
        return {key: config[key] for key in ("loss", "name")}


class Part(NamedTuple):
    """A distance or a miner of pytorch-metric-learning.

    Args:
        name: Its class there.
        ours: What our losses take in its place.
        unit: Of a distance, whether it is one of normalized embeddings.
    """

    name: str
    ours: Any
    unit: bool = False


def _lp(normalize_embeddings=True, p=2, power=1):
    if p != 2 or power not in (1, 2):
        raise _refuse(LP, f"`p={p:g}, power={power:g}`", "`p=2`, `power=1` or 2, or a `tfdml.mining.Distance`")
    return Part(LP, EUCLIDEAN[int(power) - 1], boolean("normalize_embeddings", normalize_embeddings))


def _dot(normalize_embeddings=True):
    unit = boolean("normalize_embeddings", normalize_embeddings)
    return Part("DotProductSimilarity", "cosine" if unit else "dot", unit)


def _easy_hard(pos_strategy="easy", neg_strategy="semihard"):
    choices = ("semi_hard" if choice == "semihard" else choice for choice in (pos_strategy, neg_strategy))
    return Part("BatchEasyHardMiner", BatchEasyHardMiner(*choices))


LP, COSINE = "LpDistance", "CosineSimilarity"
EUCLIDEAN = ("euclidean", "sqeuclidean")
#: What creates ours from the arguments there, with their defaults.
DISTANCES: dict[str, Callable[..., Part]] = {
    LP: _lp,
    COSINE: lambda: Part(COSINE, "cosine", True),
    "DotProductSimilarity": _dot,
}
MINERS: dict[str, Callable[..., Part]] = {
    "BatchEasyHardMiner": _easy_hard,
    "BatchHardMiner": lambda: Part("BatchHardMiner", BatchHardMiner()),
    "DistanceWeightedMiner": lambda: Part("DistanceWeightedMiner", "distance_weighted"),
    "MultiSimilarityMiner": lambda epsilon=0.1: Part("MultiSimilarityMiner", number("epsilon", epsilon)),
}
PAIR_MINERS = ("BatchEasyHardMiner", "BatchHardMiner")
NONZERO, DIVISOR = "AvgNonZeroReducer", "DivisorReducer"
REDUCERS = (NONZERO, "MeanReducer", "SumReducer", DIVISOR)


class Loss(NamedTuple):
    """A loss there, and how to create ours.

    Args:
        ours: Takes the arguments there, with their defaults; our `distance`, `average` and `mining` by keyword where
            they can be chosen; and our `reduction`.
        distance: The default distance there.
        reducer: The default reducer there.
        distances: Ours that can be given, by name; where there are none, the default alone.
        reducers: Reducers that can be given, besides the default and the sum.
        miners: Miners that can be given.
        proxies: Of a loss with proxies, which becomes an objective of `num_classes`: the argument that states how many
            a class has, or `""` where each has one.
    """

    ours: Callable[..., Any]
    distance: str | Part = LP
    reducer: str = "MeanReducer"
    distances: tuple[str, ...] = ()
    reducers: tuple[str, ...] = ()
    miners: tuple[str, ...] = ()
    proxies: str | None = None


def _refuse(name: str, what: str, nearest: str) -> UserError:
    return UserError(f"{name}: {what} has no equal in tfdml; nearest: {nearest}")


def _contrastive(pos_margin=0, neg_margin=1, *, distance, average, mining, **ours):
    # The similarity at which our distance is 0.
    nearest = 1 if distance == "cosine" else 0
    if pos_margin != nearest:
        raise _refuse("ContrastiveLoss", f"`pos_margin={pos_margin}`", f"`pos_margin={nearest}`")
    margin = number("neg_margin", neg_margin)
    return losses.ContrastiveLoss(nearest - margin if nearest else margin, distance, average, mining=mining, **ours)


def _histogram(n_bins=None, delta=None, *, reduction):
    del reduction  # of one number
    if n_bins is None:
        n_bins = 100 if delta is None else round(2 / number("delta", delta, above=0), 6)
    return losses.HistogramLoss(n_bins)


def _margin(margin=0.2, beta=1.2, *, mining, **ours):
    if mining == "all":
        raise _refuse("MarginLoss", "a loss over all triplets", "`miner='DistanceWeightedMiner'`, the paper's")
    return NormalizedLoss(losses.MarginLoss(margin, beta, **ours))


def _triplet(margin=0.05, smooth_loss=False, *, distance, average, mining, **ours):
    if smooth_loss and margin != 0:
        raise _refuse("TripletMarginLoss", "`smooth_loss=True` with a margin", "`smooth_loss=True, margin=0`")
    # "hard" is the miner of pairs with less work.
    mining = "hard" if isinstance(mining, BatchHardMiner) else mining
    return losses.TripletLoss("soft" if smooth_loss else margin, mining, distance, average, **ours)


def _radians(margin) -> float:
    return math.radians(number("margin", margin))


#: The losses that have an equal.
LOSSES = {
    # Euclidean distances of normalized vectors are named there, and cosines computed.
    "AngularLoss": Loss(lambda alpha=40, **ours: losses.AngularLoss(alpha, **ours)),
    "ArcFaceLoss": Loss(
        lambda margin=28.6, scale=64, **ours: losses.ArcFaceLoss(scale, _radians(margin), **ours), COSINE, proxies=""
    ),
    "CircleLoss": Loss(lambda m=0.4, gamma=80, **ours: losses.CircleLoss(m, gamma, **ours), COSINE, NONZERO),
    "ContrastiveLoss": Loss(_contrastive, LP, NONZERO, (*EUCLIDEAN, "cosine"), ("MeanReducer",), PAIR_MINERS),
    "CosFaceLoss": Loss(
        lambda margin=0.35, scale=64, **ours: losses.AMSoftmaxLoss(scale, margin, **ours), COSINE, proxies=""
    ),
    "FastAPLoss": Loss(lambda num_bins=10, **ours: losses.FastAPLoss(num_bins, **ours), _lp(power=2)),
    # Where an anchor lacks a positive or a negative, theirs counts it with 0.
    "GeneralizedLiftedStructureLoss": Loss(
        lambda neg_margin=1, pos_margin=0, *, distance, **ours: losses.GeneralizedLiftedStructureLoss(
            neg_margin, pos_margin, distance, **ours
        ),
        distances=EUCLIDEAN,
    ),
    "HistogramLoss": Loss(_histogram, COSINE, reducers=REDUCERS),
    # Both margins shift the same exponent.
    "LiftedStructureLoss": Loss(
        lambda neg_margin=1, pos_margin=0, *, distance, **ours: losses.LiftedStructureLoss(
            number("neg_margin", neg_margin) - number("pos_margin", pos_margin), **ours
        ),
        distances=("euclidean",),
    ),
    # In expectation over the draws.
    "MarginLoss": Loss(_margin, reducer=DIVISOR, miners=("DistanceWeightedMiner",)),
    "MultiSimilarityLoss": Loss(
        lambda alpha=2, beta=50, base=0.5, *, mining, **ours: losses.MultiSimilarityLoss(
            alpha, beta, base, None if mining == "all" else mining, **ours
        ),
        COSINE,
        miners=("MultiSimilarityMiner",),
    ),
    "NTXentLoss": Loss(
        lambda temperature=0.07, *, mining, **ours: losses.NTXentLoss(temperature, mining=mining, **ours),
        COSINE,
        miners=PAIR_MINERS,
    ),
    # Its dot product normalizes by default.
    "NormalizedSoftmaxLoss": Loss(
        lambda temperature=0.05, **ours: losses.NormSoftmaxLoss(
            1 / number("temperature", temperature, above=0), **ours
        ),
        "DotProductSimilarity",
        proxies="",
    ),
    "ProxyAnchorLoss": Loss(
        lambda margin=0.1, alpha=32, **ours: losses.ProxyAnchorLoss(alpha, margin, **ours), COSINE, DIVISOR, proxies=""
    ),
    # A softmax of -scale |x - p|^2 = 2 scale cos - const over all classes, the own included.
    "ProxyNCALoss": Loss(
        lambda softmax_scale=1, **ours: losses.NormSoftmaxLoss(2 * number("softmax_scale", softmax_scale), **ours),
        _lp(power=2),
        proxies="",
    ),
    "SoftTripleLoss": Loss(
        lambda centers_per_class=10, la=20, gamma=0.1, margin=0.01, **ours: losses.SoftTripleLoss(
            la, gamma, margin, **ours
        ),
        COSINE,
        proxies="centers_per_class",
    ),
    "SubCenterArcFaceLoss": Loss(
        lambda margin=28.6, scale=64, sub_centers=3, **ours: losses.SubCenterArcFaceLoss(
            scale, _radians(margin), **ours
        ),
        COSINE,
        proxies="sub_centers",
    ),
    "SupConLoss": Loss(lambda temperature=0.1, **ours: losses.SupConLoss(temperature, **ours), COSINE, NONZERO),
    "TripletMarginLoss": Loss(
        _triplet,
        LP,
        NONZERO,
        (*EUCLIDEAN, "cosine", "dot"),
        ("MeanReducer",),
        (*PAIR_MINERS, "DistanceWeightedMiner"),
    ),
    "TupletMarginLoss": Loss(
        lambda margin=5.73, scale=64, *, mining, **ours: losses.TupletMarginLoss(
            margin, scale, variance_weight=0.0, mining=mining, **ours
        ),
        COSINE,
        miners=PAIR_MINERS,
    ),
}


def from_pml(name: str, miner: str | Part | None = None, **arguments: Any) -> Any:
    """Create the equal of a class of pytorch-metric-learning, with its arguments, defaults and conventions.

    Losses come with the distance, the normalization and the reduction that they have there: `TripletMarginLoss`
    compares Euclidean distances of normalized embeddings, and averages over the triplets that are not 0. A miner is
    given with the loss, and not at each call. What cannot be expressed exactly is refused; what agrees and what
    differs by rounding or on purpose is listed in `docs/parity.md`. PyTorch is not needed.

    Args:
        name: The class there: a loss, or a distance or miner to give to one.
        miner: Which pairs or triplets the loss learns from: the name of a miner, or what `from_pml` makes of it.
        **arguments: Those of the class there. `distance` is a name, or made by `from_pml` too; `reducer` is a name.
            `embedding_size` is accepted and not needed.

    Returns:
        A `keras.losses.Loss` on embeddings; a `tfdml.objectives.ProxyLoss` for a loss with weights of its own; a
        description to pass on for a distance or miner.

    Raises:
        UserError: There is no such name or argument, or tfdml has no equal.

    Example:
        >>> from_pml("TripletMarginLoss", margin=0.2)
        NormalizedLoss(loss=TripletLoss(... margin=0.2, mining='all', distance='euclidean', average='active'), ...)
        >>> from_pml("ArcFaceLoss", num_classes=98, embedding_size=128, margin=28.6).loss.margin  # radians
        0.4991641...
        >>> loss = from_pml("ContrastiveLoss", distance=from_pml("LpDistance", power=2), reducer="MeanReducer")
        >>> from_pml("MultiSimilarityLoss", miner=from_pml("MultiSimilarityMiner", epsilon=0.05)).mining_epsilon
        0.05
        >>> from_pml("ContrastiveLoss", pos_margin=0.5)
        Traceback (most recent call last):
        tfdml.errors.UserError: ContrastiveLoss: `pos_margin=0.5` has no equal in tfdml; nearest: `pos_margin=0`

    Source: K. Musgrave, S. Belongie, S.-N. Lim, "PyTorch Metric Learning", 2020; version 2.9.
    """
    with user_errors((TypeError, ValueError), f"{name}: {REASON}"):
        if make := {**DISTANCES, **MINERS}.get(name):
            _check_arguments(name, make, arguments)
            return make(**arguments)
        if name not in LOSSES:
            known = f"losses: {', '.join(sorted(LOSSES))}; parts: {', '.join([*DISTANCES, *MINERS])}"
            lacking = f"pytorch-metric-learning 2.9 has no {name!r} that has an equal in tfdml"
            raise UserError(f"{lacking}; {known}; docs/migrating.md names what is near")
        return _make_loss(name, LOSSES[name], miner, **arguments)


def _make_loss(name: str, row: Loss, miner: Any, *, distance: Any = None, reducer: str = "", **given: Any) -> Any:
    proxies = {} if row.proxies is None else {"num_classes": given.pop("num_classes", None)}
    if proxies:
        given.pop("embedding_size", None)  # which the embedder knows here
        if proxies["num_classes"] is None:
            raise UserError(f"{name}: `num_classes` is missing")
    parameters = _check_arguments(name, row.ours, given)
    own, reducer = _as_part("distance", row.distance, DISTANCES), reducer or row.reducer
    distance = own if distance is None else _as_part("distance", distance, DISTANCES)
    if reducer not in (row.reducer, *row.reducers, "SumReducer"):
        raise _refuse(name, f"the reducer {reducer}", ", ".join((row.reducer, *row.reducers, "SumReducer")))
    if distance.ours not in row.distances if row.distances else distance[1:] != own[1:]:
        raise _refuse(name, f"{distance}", f"the loss's own distance, {own.name}")
    mining = Part("", "all") if miner is None else _as_part("miner", miner, MINERS)
    # On normalized vectors all distances have one order, that of the miners there.
    if mining.name and (mining.name not in row.miners or not distance.unit):
        raise _refuse(name, f"the miner {mining.name}", f"{', '.join(row.miners) or 'none'}, on normalized embeddings")
    average = "all" if reducer == "MeanReducer" else "active"
    options = {"distance": distance.ours, "average": average, "mining": mining.ours}
    options = {key: value for key, value in options.items() if key in parameters}
    loss = row.ours(**given, **options, reduction="sum" if reducer == "SumReducer" else "sum_over_batch_size")
    if proxies:
        per_class = given.get(row.proxies, parameters[row.proxies].default) if row.proxies else 1
        return ProxyLoss(loss, **proxies, proxies_per_class=per_class)
    return NormalizedLoss(loss) if row.distances and distance.unit and distance.ours in EUCLIDEAN else loss


def _check_arguments(name: str, function: Callable, given: dict[str, Any]) -> Mapping[str, inspect.Parameter]:
    """Refuse arguments that a function does not take by position; return all that it takes."""
    parameters = inspect.signature(function).parameters
    known = [key for key, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    for key in given:
        if key not in known:
            raise UserError(f"{name}: no argument `{key}` has an equal in tfdml; {', '.join(known) or 'none'} have one")
    return parameters


def _as_part(kind: str, value: Any, known: Mapping[str, Callable[..., Part]]) -> Part:
    """Return what was given as `distance=` or `miner=`: a name, or what `from_pml` made of one."""
    part = known[value]() if isinstance(value, str) and value in known else value
    if not isinstance(part, Part) or part.name not in known:
        raise UserError(f"`{kind}={value!r}` is no {kind} by name or from_pml; known: {', '.join(known)}")
    return part
