"""Distances, reducers and miners of pytorch-metric-learning, as they are given to its losses."""

from __future__ import annotations

from typing import Any, NamedTuple

from tfdml.arguments import boolean, number
from tfdml.errors import UserError

#: The arguments of each part, with their defaults there.
DISTANCES: dict[str, dict[str, Any]] = {
    "LpDistance": {"normalize_embeddings": True, "p": 2, "power": 1},
    "CosineSimilarity": {"p": 2, "power": 1},
    "DotProductSimilarity": {"normalize_embeddings": True, "p": 2, "power": 1},
}
REDUCERS: dict[str, dict[str, Any]] = {
    "AvgNonZeroReducer": {},
    "MeanReducer": {},
    "SumReducer": {},
    "DivisorReducer": {},
}
MINERS: dict[str, dict[str, Any]] = {
    "MultiSimilarityMiner": {"epsilon": 0.1, "distance": "CosineSimilarity"},
    "BatchEasyHardMiner": {
        "pos_strategy": "easy",
        "neg_strategy": "semihard",
        "allowed_pos_range": None,
        "allowed_neg_range": None,
        "distance": "LpDistance",
    },
    "BatchHardMiner": {"allowed_pos_range": None, "allowed_neg_range": None, "distance": "LpDistance"},
    "DistanceWeightedMiner": {"cutoff": 0.5, "nonzero_loss_cutoff": 1.4, "distance": "LpDistance"},
    "TripletMarginMiner": {"margin": 0.2, "type_of_triplets": "all", "distance": "LpDistance"},
}
_KNOWN = {"distance": DISTANCES, "reducer": REDUCERS, "miner": MINERS}
_NEAREST = {
    "SNRDistance": "none of tfdml's distances divides by a variance; a `tfdml.mining.Distance` of your own can",
    "AngularMiner": "`mining=tfdml.mining.AngularMiner()` of a loss: it keeps each pair once, not once a triplet",
    "HDCMiner": "`mining=tfdml.mining.HardAwareMiner()` of a loss: it keeps a pair from both ends or from none",
    "PairMarginMiner": "a `tfdml.mining.Miner` of your own",
    "UniformHistogramMiner": "`mining=tfdml.mining.UniformHistogramMiner()` of a loss: it draws without replacement",
    "EmbeddingsAlreadyPackagedAsTriplets": "labels that say which images belong together",
    "ThresholdReducer": "`AvgNonZeroReducer`",
    "PerAnchorReducer": "`MeanReducer`",
    "ClassWeightedReducer": "`MeanReducer`, and `sample_weight` where the loss is called",
    "DoNothingReducer": "`loss.call(labels, embeddings)`, which gives one value per image",
    "MultipleReducers": "one reducer",
}


class Part(NamedTuple):
    """A distance, reducer or miner of pytorch-metric-learning: its class and all its arguments."""

    name: str
    arguments: dict[str, Any]

    def __getattr__(self, argument):
        if argument in self.arguments:
            return self.arguments[argument]
        raise AttributeError(argument)


def make_part(name: str, arguments: dict[str, Any]) -> Part:
    """A part by its name, with defaults for the arguments not given.

    Raises:
        UserError: The part, or an argument of it, cannot be expressed.
    """
    kind = next((kind for kind, known in _KNOWN.items() if name in known), None)
    if kind is None:
        raise _no_such(name)
    known = _KNOWN[kind][name]
    given = {key: value for key, value in arguments.items() if key != "collect_stats"}
    for key in given:
        if key not in known:
            has = ", ".join(known) or "none"
            raise UserError(f"{name} has no argument `{key}` that tfdml can express; those it can: {has}")
    made = {**known, **given}
    try:
        for key in ("epsilon", "cutoff", "nonzero_loss_cutoff", "margin", "p", "power"):
            if key in made:
                made[key] = number(key, made[key])
        if "normalize_embeddings" in made:
            boolean("normalize_embeddings", made["normalize_embeddings"])
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
    if kind == "miner":
        made["distance"] = as_part("distance", made["distance"])
    return Part(name, made)


def as_part(kind: str, value: Any) -> Part:
    """What was given as `distance=`, `reducer=` or `miner=`: a name, or what `from_pml` made of one.

    Raises:
        UserError: It is neither, or another kind of part.
    """
    part = make_part(value, {}) if isinstance(value, str) else value
    if not isinstance(part, Part) or part.name not in _KNOWN[kind]:
        raise UserError(
            f"`{kind}={value!r}` is no {kind} of pytorch-metric-learning: give its name, or `from_pml(name, ...)` with "
            f"its arguments; known: {', '.join(_KNOWN[kind])}"
        )
    return part


def is_part(name: str) -> bool:
    """Whether the name is that of a distance, reducer or miner, expressible or not."""
    return name in _NEAREST or any(name in known for known in _KNOWN.values())


def matrix_of(name: str, distance: Part) -> tuple[str, bool]:
    """Our name of a distance, and whether embeddings are normalised before it.

    Raises:
        UserError: tfdml has no such distance; `name` is whose it is.
    """
    if distance.p != 2 or distance.power not in (1, 2):
        raise UserError(
            f"{name}: {distance.name} with `p={distance.p:g}, power={distance.power:g}` has no equal in tfdml; "
            "nearest: `p=2` with `power=1` or `power=2`, or a `tfdml.mining.Distance` of your own"
        )
    if distance.name == "LpDistance":
        return ("euclidean", "sqeuclidean")[int(distance.power) - 1], distance.normalize_embeddings
    if distance.power != 1:
        raise UserError(f"{name}: {distance.name} with `power=2` has no equal in tfdml; nearest: `power=1`")
    if distance.name == "CosineSimilarity" or distance.normalize_embeddings:
        return "cosine", False
    return "dot", False


def _no_such(name: str) -> UserError:
    if name in _NEAREST:
        return UserError(f"{name} of pytorch-metric-learning has no equal in tfdml; nearest: {_NEAREST[name]}")
    known = sorted(key for parts in _KNOWN.values() for key in parts)
    return UserError(f"pytorch-metric-learning 2.9 has no {name!r} that tfdml knows; parts: {', '.join(known)}")
