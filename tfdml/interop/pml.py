"""Losses of pytorch-metric-learning 2.9 by their names and arguments there: tables of what equals what."""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from typing_extensions import override

from tfdml import losses, pairwise
from tfdml.arguments import boolean, number
from tfdml.errors import REASON, UserError, user_errors
from tfdml.losses import PairLoss
from tfdml.mining import BatchEasyHardMiner, BatchHardMiner, Miner
from tfdml.objectives import ProxyLoss
from tfdml.saving import restore


class NormalizedLoss(PairLoss):
    """A loss on pairs, of embeddings that are L2-normalised first: loss(labels, x / |x|).

    pytorch-metric-learning normalises in its distances, tfdml in its `Embedder`; so what another model gives reaches
    the loss as it would there. A zero vector stays zero and gets no gradient. Embeddings of length 1 are left as they
    are, but for rounding.

    Args:
        loss: A loss on pairs of embeddings, such as `tfdml.losses.TripletLoss()`. Its reduction and `with_positives`
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
        super().__init__(reduction=loss.reduction, name=name or loss.name)
        self.loss, self.positives = loss, loss.positives
        self.whole_batch, self.within_batch = loss.needs_whole_batch, loss.within_batch

    def anchor_losses(self, pairs):
        """Compute the loss's values: (b,)."""
        return self.loss.values_of(pairs.map(pairwise.l2_normalize))

    @override
    def get_config(self):
        config = super().get_config()
        return {key: config[key] for key in ("loss", "name", "positives") if key in config}


class Part(NamedTuple):
    """A distance, reducer or miner of pytorch-metric-learning: its class and all its arguments."""

    name: str
    arguments: dict[str, Any]

    def __getattr__(self, argument):
        if argument in self.arguments:
            return self.arguments[argument]
        raise AttributeError(argument)


LP, COSINE, DIVISOR, NONZERO = "LpDistance", "CosineSimilarity", "DivisorReducer", "AvgNonZeroReducer"
#: Distances, reducers and miners: their arguments with the defaults there.
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "distance": {
        LP: {"normalize_embeddings": True, "p": 2, "power": 1},
        COSINE: {"p": 2, "power": 1},
        "DotProductSimilarity": {"normalize_embeddings": True, "p": 2, "power": 1},
    },
    "reducer": {name: {} for name in (NONZERO, "MeanReducer", "SumReducer", DIVISOR)},
    "miner": {
        "MultiSimilarityMiner": {"epsilon": 0.1, "distance": COSINE},
        "BatchEasyHardMiner": {"pos_strategy": "easy", "neg_strategy": "semihard", "distance": LP},
        "BatchHardMiner": {"distance": LP},
        "DistanceWeightedMiner": {"cutoff": 0.5, "nonzero_loss_cutoff": 1.4, "distance": LP},
        "TripletMarginMiner": {"margin": 0.2, "type_of_triplets": "all", "distance": LP},
    },
}
EUCLIDEAN = ("euclidean", "sqeuclidean")
SQUARED = Part(LP, {**PARTS["distance"][LP], "power": 2})
PAIR_MINERS = ("BatchEasyHardMiner", "BatchHardMiner")


class Given(NamedTuple):
    """Arguments that several losses share there, in our words."""

    name: str
    distance: str
    average: str
    miner: Part | None
    mining: str | Miner

    def refuse(self, what: str, nearest: str) -> UserError:
        """Create the error for what cannot be expressed."""
        return _refuse(self.name, what, nearest)


class Loss(NamedTuple):
    """A loss there, and how to create ours from its arguments.

    Args:
        ours: Our class, or what creates ours.
        arguments: The arguments of ours in their order, from `Given` and the arguments there, with the defaults there.
        distance: The default distance there.
        reducer: The default reducer there.
        distances: Ours that can be given, by name; where there are none, the default alone.
        reducers: Reducers that can be given, besides the default and the sum.
        miners: Miners that can be given.
        proxies: Of a loss with proxies, which becomes an objective of `num_classes`: the argument that states how many
            a class has, or `""` where each has one. The embedder knows `embedding_size` here.
    """

    ours: Callable[..., Any]
    arguments: Callable[..., tuple]
    distance: str | Part = LP
    reducer: str = "MeanReducer"
    distances: tuple[str, ...] = ()
    reducers: tuple[str, ...] = ()
    miners: tuple[str, ...] = ()
    proxies: str | None = None


def _refuse(name: str, what: str, nearest: str) -> UserError:
    return UserError(f"{name}: {what} has no equal in tfdml; nearest: {nearest}")


def _radians(margin) -> float:
    return math.radians(number("margin", margin))


def _contrastive(o: Given, pos_margin=0, neg_margin=1):
    # The similarity at which our distance is 0.
    nearest = 1 if o.distance == "cosine" else 0
    if number("pos_margin", pos_margin) != nearest:
        raise o.refuse(f"`pos_margin={pos_margin:g}`", f"`pos_margin={nearest}`")
    margin = number("neg_margin", neg_margin)
    return nearest - margin if nearest else margin, o.distance, o.average


def _histogram(o: Given, n_bins=None, delta=None):
    if n_bins is None:
        n_bins = 100 if delta is None else round(2 / number("delta", delta, above=0), 6)
    return (n_bins,)


def _margin(o: Given, margin=0.2, nu=0, beta=1.2, triplets_per_anchor="all", learn_beta=False, num_classes=None):
    del nu, num_classes, triplets_per_anchor  # of the learned boundary, and of the loss without a miner
    if learn_beta:
        raise o.refuse("`learn_beta=True` in a loss", "the objective `tfdml.objectives.LearnedMargin(num_classes)`")
    if o.miner is None:
        raise o.refuse("a MarginLoss over all triplets", "`miner='DistanceWeightedMiner'`, the paper's")
    return margin, beta


def _triplet(o: Given, margin=0.05, swap=False, smooth_loss=False, triplets_per_anchor="all"):
    if swap:
        raise o.refuse(f"`swap={swap!r}`", "`swap=False`")
    if smooth_loss and number("margin", margin) != 0:
        raise o.refuse(f"`smooth_loss={smooth_loss!r}` with a margin", "`smooth_loss=True, margin=0`")
    if triplets_per_anchor != "all" and o.miner is None:
        raise o.refuse(f"`triplets_per_anchor={triplets_per_anchor!r}`", "`triplets_per_anchor='all'`")
    if o.miner is not None and o.miner.name == "TripletMarginMiner":
        violating = o.miner.type_of_triplets == "all" and o.miner.margin >= number("margin", margin)
        # What it leaves out costs 0 then, which only the mean over all triplets counts.
        if not violating or o.average != "active":
            what = f"margin={o.miner.margin:g}, type_of_triplets={o.miner.type_of_triplets!r}"
            nearest = "`tfdml.losses.TripletLoss(mining='semi_hard')`, which takes one negative a pair"
            raise o.refuse(f"TripletMarginMiner({what}) in this loss", nearest)
    # "hard" is the miner of pairs with less work.
    mining = "hard" if isinstance(o.mining, BatchHardMiner) else o.mining
    return "soft" if smooth_loss else margin, mining, o.distance, o.average


#: The losses that have an equal.
LOSSES = {
    # Euclidean distances of normalised vectors are named there, and cosines computed.
    "AngularLoss": Loss(losses.AngularLoss, lambda o, alpha=40: (alpha,)),
    "ArcFaceLoss": Loss(
        losses.ArcFaceLoss, lambda o, margin=28.6, scale=64: (scale, _radians(margin)), COSINE, proxies=""
    ),
    "CircleLoss": Loss(losses.CircleLoss, lambda o, m=0.4, gamma=80: (m, gamma), COSINE, NONZERO),
    "ContrastiveLoss": Loss(
        losses.ContrastiveLoss, _contrastive, LP, NONZERO, (*EUCLIDEAN, "cosine"), ("MeanReducer",), PAIR_MINERS
    ),
    "CosFaceLoss": Loss(losses.AMSoftmaxLoss, lambda o, margin=0.35, scale=64: (scale, margin), COSINE, proxies=""),
    "FastAPLoss": Loss(losses.FastAPLoss, lambda o, num_bins=10: (num_bins,), SQUARED),
    # Where an anchor lacks a positive or a negative, theirs counts it with 0.
    "GeneralizedLiftedStructureLoss": Loss(
        losses.GeneralizedLiftedStructureLoss,
        lambda o, neg_margin=1, pos_margin=0: (neg_margin, pos_margin, o.distance),
        distances=EUCLIDEAN,
    ),
    # One number, which no reducer changes.
    "HistogramLoss": Loss(
        lambda bins, reduction: losses.HistogramLoss(bins), _histogram, COSINE, reducers=tuple(PARTS["reducer"])
    ),
    # Both margins shift the same exponent.
    "LiftedStructureLoss": Loss(
        losses.LiftedStructureLoss,
        lambda o, neg_margin=1, pos_margin=0: (number("neg_margin", neg_margin) - number("pos_margin", pos_margin),),
        distances=("euclidean",),
    ),
    # In expectation over the draws.
    "MarginLoss": Loss(
        lambda *given, reduction: NormalizedLoss(losses.MarginLoss(*given, reduction=reduction)),
        _margin,
        reducer=DIVISOR,
        miners=("DistanceWeightedMiner",),
    ),
    "MultiSimilarityLoss": Loss(
        losses.MultiSimilarityLoss,
        lambda o, alpha=2, beta=50, base=0.5: (alpha, beta, base, o.miner and o.miner.epsilon),
        COSINE,
        miners=("MultiSimilarityMiner",),
    ),
    "NTXentLoss": Loss(losses.NTXentLoss, lambda o, temperature=0.07: (temperature,), COSINE, miners=PAIR_MINERS),
    # Its dot product normalises by default.
    "NormalizedSoftmaxLoss": Loss(
        losses.NormSoftmaxLoss,
        lambda o, temperature=0.05: (1 / number("temperature", temperature, above=0),),
        "DotProductSimilarity",
        proxies="",
    ),
    "ProxyAnchorLoss": Loss(
        losses.ProxyAnchorLoss, lambda o, margin=0.1, alpha=32: (alpha, margin), COSINE, DIVISOR, proxies=""
    ),
    # A softmax of -scale |x - p|^2 = 2 scale cos - const over all classes, the own included.
    "ProxyNCALoss": Loss(
        losses.NormSoftmaxLoss,
        lambda o, softmax_scale=1: (2 * number("softmax_scale", softmax_scale, above=0),),
        SQUARED,
        proxies="",
    ),
    "SoftTripleLoss": Loss(
        losses.SoftTripleLoss,
        lambda o, centers_per_class=10, la=20, gamma=0.1, margin=0.01: (la, gamma, margin),
        COSINE,
        proxies="centers_per_class",
    ),
    "SubCenterArcFaceLoss": Loss(
        losses.SubCenterArcFaceLoss,
        lambda o, margin=28.6, scale=64, sub_centers=3: (scale, _radians(margin)),
        COSINE,
        proxies="sub_centers",
    ),
    "SupConLoss": Loss(losses.SupConLoss, lambda o, temperature=0.1: (temperature,), COSINE, NONZERO),
    "TripletMarginLoss": Loss(
        losses.TripletLoss,
        _triplet,
        LP,
        NONZERO,
        (*EUCLIDEAN, "cosine", "dot"),
        ("MeanReducer",),
        (*PAIR_MINERS, "DistanceWeightedMiner", "TripletMarginMiner"),
    ),
    "TupletMarginLoss": Loss(
        losses.TupletMarginLoss, lambda o, margin=5.73, scale=64: (margin, scale, 0.0), COSINE, miners=PAIR_MINERS
    ),
}
#: Arguments of every loss there that must be left out, and what to use instead.
_INSTEAD = {
    "embedding_regularizer": "another term next to the loss, such as `tfdml.objectives.GlobalOrthogonal()`",
    "weight_regularizer": "`tfdml.objectives.RegularizedSoftTriple`, or `weight_decay` of the optimiser",
    "weight_init_func": "`objective.class_proxies.proxies.assign(...)` after the first call",
}
_WITHOUT_EFFECT = ("collect_stats", "embedding_reg_weight", "weight_reg_weight")


def from_pml(name: str, miner: str | Part | None = None, **arguments: Any) -> Any:
    """Create the equal of a class of pytorch-metric-learning, with its arguments, defaults and conventions.

    Losses come with the distance, the normalisation and the reduction that they have there: `TripletMarginLoss`
    compares Euclidean distances of normalised embeddings, and averages over the triplets that are not 0. A miner is
    given with the loss, and not at each call. What cannot be expressed exactly is refused; what agrees and what
    differs by rounding or on purpose is listed in `docs/parity.md`. PyTorch is not needed.

    Args:
        name: The class there: a loss, or a distance, reducer or miner to give to one.
        miner: Which pairs or triplets the loss learns from: the name of a miner, or what `from_pml` makes of it.
        **arguments: Those of the class there. `distance` and `reducer` are names, or made by `from_pml` too.
            `embedding_size` is accepted and not needed.

    Returns:
        A `keras.losses.Loss` on embeddings; a `tfdml.objectives.ProxyLoss` for a loss with weights of its own; a
        description to pass on for a distance, reducer or miner.

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
        >>> from_pml("TripletMarginLoss", swap=True)
        Traceback (most recent call last):
        tfdml.errors.UserError: TripletMarginLoss: `swap=True` has no equal in tfdml; nearest: `swap=False`

    Source: K. Musgrave, S. Belongie, S.-N. Lim, "PyTorch Metric Learning", 2020; version 2.9.
    """
    with user_errors((TypeError, ValueError), f"{name}: {REASON}"):
        if any(name in known for known in PARTS.values()):
            if miner is not None:
                raise UserError(f"{name} takes no `miner`")
            return _make_part(name, arguments)
        if name not in LOSSES:
            parts = sorted(part for kind in PARTS.values() for part in kind)
            known = f"losses: {', '.join(sorted(LOSSES))}; parts: {', '.join(parts)}"
            lacking = f"pytorch-metric-learning 2.9 has no {name!r} that has an equal in tfdml"
            raise UserError(f"{lacking}; {known}; docs/migrating.md names what is near")
        return _make_loss(name, LOSSES[name], miner, arguments)


def _make_loss(name: str, row: Loss, miner: Any, given: dict[str, Any]) -> Any:
    for argument, instead in _INSTEAD.items():
        if given.pop(argument, None) is not None:
            raise _refuse(name, f"`{argument}`", instead)
    own = _as_part("distance", row.distance)
    distance = _as_part("distance", given.pop("distance", own))
    reducer = _as_part("reducer", given.pop("reducer", row.reducer)).name
    given = {key: value for key, value in given.items() if key not in _WITHOUT_EFFECT}
    of_proxies = {} if row.proxies is None else {"num_classes": ..., "embedding_size": None}
    own_arguments = list(inspect.signature(row.arguments).parameters.values())[1:]
    defaults = {**of_proxies, **{argument.name: argument.default for argument in own_arguments}}
    for argument in given:
        if argument not in defaults:
            raise UserError(f"{name}: no argument `{argument}`; it has {', '.join(defaults)}, distance, reducer")
    arguments = {**defaults, **given}
    if arguments.get("num_classes") is ...:
        raise UserError(f"{name}: `num_classes` is missing")
    allowed = (row.reducer, *row.reducers, "SumReducer")
    if reducer not in allowed:
        raise _refuse(name, f"the reducer {reducer}", ", ".join(allowed))
    matrix, normalized = _matrix(name, distance)
    if matrix not in row.distances if row.distances else (matrix, normalized) != _matrix(name, own):
        written = ", ".join(f"{key}={value}" for key, value in distance.arguments.items())
        raise _refuse(name, f"the distance {distance.name}({written})", f"the loss's own, {own.name}")
    miner = None if miner is None else _as_part("miner", miner)
    mining = "all" if miner is None else _mining(name, row, miner, distance)
    o = Given(name, matrix, "all" if reducer == "MeanReducer" else "active", miner, mining)
    options: dict[str, Any] = {"reduction": "sum" if reducer == "SumReducer" else "sum_over_batch_size"}
    if row.miners[:2] == PAIR_MINERS and row.ours is not losses.TripletLoss:
        options["mining"] = mining
    own_values = row.arguments(o, **{key: value for key, value in arguments.items() if key not in of_proxies})
    loss = row.ours(*own_values, **options)
    if row.proxies is not None:
        return ProxyLoss(loss, arguments["num_classes"], arguments.get(row.proxies, 1))
    return NormalizedLoss(loss) if row.distances and normalized else loss


def _mining(name: str, row: Loss, miner: Part, distance: Part) -> str | Miner:
    """Our `mining` for a miner, which orders pairs by the loss's distance or by one of the same order."""
    nearest = f"{', '.join(row.miners) or 'none'} as it is there"
    refused = _refuse(name, f"the miner {miner.name} with {miner.distance.name}", nearest)
    if miner.name in row.miners and miner.name in PAIR_MINERS:
        # On normalised vectors all distances have one order.
        if miner.distance != distance and not (_on_unit_vectors(miner.distance) and _on_unit_vectors(distance)):
            raise refused
        if miner.name == "BatchHardMiner":
            return BatchHardMiner()
        choices = (miner.pos_strategy, miner.neg_strategy)
        return BatchEasyHardMiner(*("semi_hard" if choice == "semihard" else choice for choice in choices))
    as_there = {
        "DistanceWeightedMiner": miner == _make_part(miner.name, {}),
        "MultiSimilarityMiner": miner.distance.name == COSINE,
        "TripletMarginMiner": miner.distance == distance,
    }
    if miner.name not in row.miners or not as_there[miner.name]:
        raise refused
    return "distance_weighted" if miner.name == "DistanceWeightedMiner" else "all"


def _make_part(name: str, arguments: dict[str, Any]) -> Part:
    kind = next(kind for kind, known in PARTS.items() if name in known)
    known = PARTS[kind][name]
    given = {key: value for key, value in arguments.items() if key != "collect_stats"}
    for key in given:
        if key not in known:
            has = ", ".join(known) or "none"
            raise UserError(f"{name} has no argument `{key}` that tfdml can express; those it can: {has}")
    made = {**known, **given}
    for key in ("epsilon", "cutoff", "nonzero_loss_cutoff", "margin", "p", "power"):
        if key in made:
            made[key] = number(key, made[key])
    if "normalize_embeddings" in made:
        boolean("normalize_embeddings", made["normalize_embeddings"])
    if kind == "miner":
        made["distance"] = _as_part("distance", made["distance"])
    return Part(name, made)


def _as_part(kind: str, value: Any) -> Part:
    """Return what was given as `distance=`, `reducer=` or `miner=`: a name, or what `from_pml` made of one."""
    part = from_pml(value) if isinstance(value, str) and value in PARTS[kind] else value
    if not isinstance(part, Part) or part.name not in PARTS[kind]:
        raise UserError(f"`{kind}={value!r}` is no {kind} by name or from_pml; known: {', '.join(PARTS[kind])}")
    return part


def _matrix(name: str, distance: Part) -> tuple[str, bool]:
    """Our name of a distance, and whether embeddings are normalised before it."""
    if distance.p != 2 or distance.power not in ((1, 2) if distance.name == "LpDistance" else (1,)):
        what = f"{distance.name} with `p={distance.p:g}, power={distance.power:g}`"
        raise _refuse(name, what, "`p=2`, `power=1` or LpDistance's 2, or a `tfdml.mining.Distance` of your own")
    if distance.name == "LpDistance":
        return EUCLIDEAN[int(distance.power) - 1], distance.normalize_embeddings
    return "cosine" if _on_unit_vectors(distance) else "dot", False


def _on_unit_vectors(distance: Part) -> bool:
    return distance.name == COSINE or bool(distance.normalize_embeddings)
