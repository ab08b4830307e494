"""Losses of pytorch-metric-learning on pairs and triplets, translated.

Each function has the arguments and defaults of the class there; what the loss is given beside comes as `given`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdml import losses
from tfdml.arguments import number
from tfdml.interop.given import PAIR_MINERS, Given
from tfdml.mining import Miner

_AVERAGE = {"AvgNonZeroReducer": "active", "MeanReducer": "all", "SumReducer": "active"}


def angular(given: Given, alpha=40):
    """`AngularLoss`: Euclidean distances of normalised vectors are named there, and cosines computed."""
    given.no_miner()
    given.only_distance("LpDistance")
    return losses.AngularLoss(alpha, given.keras_reduction("MeanReducer"))


def circle(given: Given, m=0.4, gamma=80):
    """`CircleLoss`."""
    given.no_miner()
    given.only_distance("CosineSimilarity")
    return losses.CircleLoss(m, gamma, given.keras_reduction("AvgNonZeroReducer"))


def contrastive(given: Given, pos_margin=0, neg_margin=1):
    """`ContrastiveLoss`; margins of a similarity are turned into those of 1 - s or -s."""
    pos_margin, neg_margin = number("pos_margin", pos_margin), number("neg_margin", neg_margin)
    distance, normalized = given.matrix()
    # The similarity at which our distance is 0.
    nearest = {"cosine": 1.0, "dot": 0.0}.get(distance)
    margin = neg_margin if nearest is None else nearest - neg_margin
    if distance == "dot":
        raise given.refuse("a dot product that is not normalised", "CosineSimilarity")
    if pos_margin != (nearest or 0.0):
        raise given.refuse(f"`pos_margin={pos_margin:g}`", f"`pos_margin={nearest or 0.0:g}`")
    average = _AVERAGE[given.reduction("AvgNonZeroReducer", "MeanReducer")]
    reduction = given.keras_reduction("AvgNonZeroReducer", "MeanReducer")
    mining = given.mining("LpDistance")
    return given.wrap(losses.ContrastiveLoss(margin, distance, average, reduction, mining=mining), normalized)


def fast_ap(given: Given, num_bins=10):
    """`FastAPLoss`."""
    given.no_miner()
    given.only_distance("LpDistance", power=2)
    return losses.FastAPLoss(num_bins, given.keras_reduction("MeanReducer"))


def generalized_lifted(given: Given, neg_margin=1, pos_margin=0):
    """`GeneralizedLiftedStructureLoss`; where an anchor lacks a positive or a negative, theirs counts it with 0."""
    given.no_miner()
    distance, normalized = given.matrix()
    if distance not in ("euclidean", "sqeuclidean"):
        raise given.refuse("a distance other than the Euclidean", "LpDistance()")
    reduction = given.keras_reduction("MeanReducer")
    loss = losses.GeneralizedLiftedStructureLoss(neg_margin, pos_margin, distance, reduction)
    return given.wrap(loss, normalized)


def histogram(given: Given, n_bins=None, delta=None):
    """`HistogramLoss`; its value is one number, which no reducer changes."""
    given.no_miner()
    given.only_distance("CosineSimilarity")
    if n_bins is None and delta is not None:
        n_bins = round(2 / number("delta", delta, above=0), 6)
    return losses.HistogramLoss(100 if n_bins is None else n_bins)


def lifted(given: Given, neg_margin=1, pos_margin=0):
    """`LiftedStructureLoss`; both margins shift the same exponent."""
    given.no_miner()
    distance, normalized = given.matrix()
    if distance != "euclidean":
        raise given.refuse("a distance other than the Euclidean", "LpDistance()")
    margin = number("neg_margin", neg_margin) - number("pos_margin", pos_margin)
    return given.wrap(losses.LiftedStructureLoss(margin, given.keras_reduction("MeanReducer")), normalized)


def margin(given: Given, margin=0.2, nu=0, beta=1.2, triplets_per_anchor="all", learn_beta=False, num_classes=None):
    """`MarginLoss` with `DistanceWeightedMiner`, as its paper has it, in expectation over the draws."""
    del triplets_per_anchor  # of no use beside a miner
    if learn_beta:
        raise given.refuse("`learn_beta=True` in a loss", "the objective `tfdml.objectives.LearnedMargin(num_classes)`")
    del nu, num_classes  # of the learned boundary alone
    given.only_distance("LpDistance")
    given.reduction("DivisorReducer")
    if not _draws_negatives(given):
        raise given.refuse("a MarginLoss over all triplets", "`miner='DistanceWeightedMiner'`, the paper's")
    reduction = given.keras_reduction("DivisorReducer")
    return given.wrap(losses.MarginLoss(margin, beta, reduction), given.matrix()[1])


def multi_similarity(given: Given, alpha=2, beta=50, base=0.5):
    """`MultiSimilarityLoss`, with its miner or without any."""
    given.only_distance("CosineSimilarity")
    miner = given.parts.get("miner")
    if miner is not None and (miner.name != "MultiSimilarityMiner" or miner.distance.name != "CosineSimilarity"):
        raise given.refuse(f"the miner {miner.name}({miner.distance.name})", "MultiSimilarityMiner")
    epsilon = None if miner is None else miner.epsilon
    return losses.MultiSimilarityLoss(alpha, beta, base, epsilon, given.keras_reduction("MeanReducer"))


def nt_xent(given: Given, temperature=0.07):
    """`NTXentLoss`, over all pairs or those of a miner."""
    given.only_distance("CosineSimilarity")
    reduction = given.keras_reduction("MeanReducer")
    return losses.NTXentLoss(temperature, reduction, mining=given.mining("CosineSimilarity"))


def sup_con(given: Given, temperature=0.1):
    """`SupConLoss`."""
    given.no_miner()
    given.only_distance("CosineSimilarity")
    return losses.SupConLoss(temperature, given.keras_reduction("AvgNonZeroReducer"))


def triplet(given: Given, margin=0.05, swap=False, smooth_loss=False, triplets_per_anchor="all"):
    """`TripletMarginLoss`, over all triplets or those of a miner."""
    if swap:
        raise given.refuse(f"`swap={swap!r}`", "`swap=False`")
    if smooth_loss and number("margin", margin) != 0:
        raise given.refuse(f"`smooth_loss={smooth_loss!r}` with a margin", "`smooth_loss=True, margin=0`")
    if triplets_per_anchor != "all" and "miner" not in given.parts:
        raise given.refuse(f"`triplets_per_anchor={triplets_per_anchor!r}`", "`triplets_per_anchor='all'`")
    distance, normalized = given.matrix()
    average = _AVERAGE[given.reduction("AvgNonZeroReducer", "MeanReducer")]
    reduction = given.keras_reduction("AvgNonZeroReducer", "MeanReducer")
    mining = _triplets(given, margin, distance, normalized, average)
    margin = "soft" if smooth_loss else margin
    return given.wrap(losses.TripletLoss(margin, mining, distance, average, reduction), normalized)


def tuplet_margin(given: Given, margin=5.73, scale=64):
    """`TupletMarginLoss`, over all pairs or those of a miner."""
    given.only_distance("CosineSimilarity")
    reduction = given.keras_reduction("MeanReducer")
    return losses.TupletMarginLoss(margin, scale, reduction=reduction, mining=given.mining("CosineSimilarity"))


def _triplets(given: Given, margin, distance: str, normalized: bool, average: str) -> str | Miner:
    """Our `mining` for a miner of triplets."""
    if _draws_negatives(given):
        return "distance_weighted"
    miner = given.parts.get("miner")
    if miner is None:
        return "all"
    if miner.name in PAIR_MINERS:
        mining = given.mining("LpDistance")
        # The same, with less work.
        return "hard" if miner.name == "BatchHardMiner" else mining
    same = given.part("distance", "LpDistance") == miner.distance
    if miner.name == "TripletMarginMiner":
        # What it leaves out costs 0 then, and is not counted.
        violating = miner.type_of_triplets == "all" and same and miner.margin >= number("margin", margin)
        if violating and average == "active":
            return "all"
        raise given.refuse(
            f"TripletMarginMiner(margin={miner.margin:g}, type_of_triplets={miner.type_of_triplets!r}) in this loss",
            "`tfdml.losses.TripletLoss(mining='semi_hard')`, which takes one negative a pair",
        )
    raise given.refuse(f"the miner {miner.name} with {miner.distance.name}", "BatchHardMiner with the loss's distance")


def _draws_negatives(given: Given) -> bool:
    """Whether the miner is the one of distance-weighted negatives, in the one form that tfdml has of it."""
    miner = given.parts.get("miner")
    if miner is None or miner.name != "DistanceWeightedMiner":
        return False
    if (miner.cutoff, miner.nonzero_loss_cutoff) != (0.5, 1.4):
        raise given.refuse("a DistanceWeightedMiner of other cutoffs", "`cutoff=0.5, nonzero_loss_cutoff=1.4`")
    return True


TRANSLATED: dict[str, Callable[..., Any]] = {
    "AngularLoss": angular,
    "CircleLoss": circle,
    "ContrastiveLoss": contrastive,
    "FastAPLoss": fast_ap,
    "GeneralizedLiftedStructureLoss": generalized_lifted,
    "HistogramLoss": histogram,
    "LiftedStructureLoss": lifted,
    "MarginLoss": margin,
    "MultiSimilarityLoss": multi_similarity,
    "NTXentLoss": nt_xent,
    "SupConLoss": sup_con,
    "TripletMarginLoss": triplet,
    "TupletMarginLoss": tuplet_margin,
}
