"""Losses of pytorch-metric-learning 2.9 and the losses of tfdml that equal them.

Benchmarks and parity tests compare both libraries by them. docs/migrating.md has the same for a
reader.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdml import losses, pairwise
from tfdml.mining import BatchEasyHardMiner, BatchHardMiner
from tfdml.objectives import ProxyLoss

MEAN, SUM = ("MeanReducer", {}), ("SumReducer", {})
SQUARED, RAW = ("LpDistance", {"power": 2}), ("LpDistance", {"normalize_embeddings": False})
COSINE, DOT = ("CosineSimilarity", {}), ("DotProductSimilarity", {"normalize_embeddings": False})
EASY_HARD, HARD = ("BatchEasyHardMiner", {}), ("BatchHardMiner", {})
WEIGHTED = ("DistanceWeightedMiner", {})

Part = tuple[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss there and the loss here that equals it.

    Args:
        name: The class there.
        ours: The loss here, of labels and embeddings, or of labels and class similarities where it
            has proxies.
        arguments: Those of the class there. A distance or a reducer is its name and its arguments.
        miner: The name and the arguments of a miner.
        proxies: How many proxies a class has; 0: none.
        batches: Names of the batches that parity is tested on.
    """

    name: str
    ours: Callable[..., Any]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    miner: Part | None = None
    proxies: int = 0
    batches: Sequence[str] = ("unit", "raw", "two a class", "real")

    def there(self) -> dict[str, Any]:
        """Return the case without the loss here, as JSON holds it, for the environment of the other
        library."""
        return {name: value for name, value in vars(self).items() if name != "ours"}

    def objective(self, num_classes: int) -> ProxyLoss:
        """Return the objective here that owns the proxies."""
        return ProxyLoss(self.ours, num_classes=num_classes, proxies_per_class=self.proxies)


def normalized(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss of embeddings of any length: theirs normalizes in its distances, ours in the
    `Embedder`."""
    return lambda labels, embeddings: loss(labels, pairwise.l2_normalize(embeddings))


def _triplet(*arguments: Any, **options: Any) -> Callable[..., Any]:
    return normalized(losses.TripletLoss(*arguments, **{"distance": "euclidean", **options}))


def _contrastive(*arguments: Any, **options: Any) -> Callable[..., Any]:
    return normalized(losses.ContrastiveLoss(*arguments, **{"distance": "euclidean", **options}))


def _tuplet_margin(*arguments: Any, **options: Any) -> Callable[..., Any]:
    return losses.TupletMarginLoss(*arguments, variance_weight=0.0, **options)


_SEMI_HARD = BatchEasyHardMiner("easy", "semi_hard")
CASES = {
    "angular": Case("AngularLoss", losses.AngularLoss(40), batches=("unit", "two a class", "real")),
    "angular 45 sum": Case(
        "AngularLoss",
        losses.AngularLoss(45, reduction="sum"),
        {"alpha": 45, "reducer": SUM},
        batches=("unit", "real"),
    ),
    "circle": Case("CircleLoss", losses.CircleLoss(0.4, 80)),
    "circle face": Case("CircleLoss", losses.CircleLoss(0.25, 32), {"m": 0.25, "gamma": 32}),
    "contrastive": Case("ContrastiveLoss", _contrastive(1)),
    "contrastive squared": Case(
        "ContrastiveLoss",
        _contrastive(0.8, distance="sqeuclidean"),
        {"neg_margin": 0.8, "distance": SQUARED},
    ),
    "contrastive raw": Case(
        "ContrastiveLoss", losses.ContrastiveLoss(1, "euclidean"), {"distance": RAW}
    ),
    "contrastive mean": Case("ContrastiveLoss", _contrastive(1, average="all"), {"reducer": MEAN}),
    "contrastive sum": Case("ContrastiveLoss", _contrastive(1, reduction="sum"), {"reducer": SUM}),
    # Its margins are similarities, ours distances.
    "contrastive cosine": Case(
        "ContrastiveLoss",
        losses.ContrastiveLoss(0.7, "cosine"),
        {"pos_margin": 1, "neg_margin": 0.3, "distance": COSINE},
    ),
    "contrastive easy": Case(
        "ContrastiveLoss", _contrastive(1, mining=_SEMI_HARD), miner=EASY_HARD
    ),
    "fast ap": Case("FastAPLoss", losses.FastAPLoss(10)),
    "fast ap 20": Case("FastAPLoss", losses.FastAPLoss(20), {"num_bins": 20}),
    # Where an anchor lacks a positive or a negative, theirs counts it with 0.
    "generalized lifted": Case(
        "GeneralizedLiftedStructureLoss", normalized(losses.GeneralizedLiftedStructureLoss(1, 0))
    ),
    "generalized lifted margins": Case(
        "GeneralizedLiftedStructureLoss",
        normalized(losses.GeneralizedLiftedStructureLoss(0.9, 0.2, reduction="sum")),
        {"neg_margin": 0.9, "pos_margin": 0.2, "reducer": SUM},
    ),
    "histogram": Case("HistogramLoss", losses.HistogramLoss(100)),
    "histogram delta": Case("HistogramLoss", losses.HistogramLoss(20), {"delta": 0.1}),
    "lifted": Case("LiftedStructureLoss", normalized(losses.LiftedStructureLoss(1))),
    # Both margins shift the same exponent.
    "lifted margins": Case(
        "LiftedStructureLoss",
        normalized(losses.LiftedStructureLoss(0.9 - 0.2, reduction="sum")),
        {"neg_margin": 0.9, "pos_margin": 0.2, "reducer": SUM},
    ),
    "lifted raw": Case("LiftedStructureLoss", losses.LiftedStructureLoss(1), {"distance": RAW}),
    # In expectation over the draws.
    "margin weighted": Case(
        "MarginLoss",
        normalized(losses.MarginLoss(0.2, 1.2)),
        miner=WEIGHTED,
        batches=("one negative",),
    ),
    "multi-similarity": Case("MultiSimilarityLoss", losses.MultiSimilarityLoss(2, 50, 0.5, None)),
    "multi-similarity mined": Case(
        "MultiSimilarityLoss",
        losses.MultiSimilarityLoss(1, 50, 0.5, 0.2),
        {"alpha": 1},
        ("MultiSimilarityMiner", {"epsilon": 0.2}),
    ),
    "nt xent": Case("NTXentLoss", losses.NTXentLoss(0.07)),
    "nt xent warm": Case(
        "NTXentLoss", losses.NTXentLoss(0.5, reduction="sum"), {"temperature": 0.5, "reducer": SUM}
    ),
    "nt xent easy": Case(
        "NTXentLoss",
        losses.NTXentLoss(0.2, mining=BatchEasyHardMiner("easy", "all")),
        {"temperature": 0.2},
        ("BatchEasyHardMiner", {"pos_strategy": "easy", "neg_strategy": "all"}),
    ),
    "sup con": Case("SupConLoss", losses.SupConLoss(0.1)),
    "sup con warm": Case(
        "SupConLoss", losses.SupConLoss(0.5, reduction="sum"), {"temperature": 0.5, "reducer": SUM}
    ),
    "threshold consistent": Case(
        "ThresholdConsistentMarginLoss", losses.ThresholdConsistentMarginLoss(0.9, 0.5)
    ),
    "threshold consistent wide": Case(
        "ThresholdConsistentMarginLoss",
        losses.ThresholdConsistentMarginLoss(0.3, -0.2, 0.5, 2),
        {"margin_plus": 0.3, "margin_minus": -0.2, "lambda_plus": 0.5, "lambda_minus": 2},
    ),
    "triplet": Case("TripletMarginLoss", _triplet(0.05)),
    "triplet squared": Case(
        "TripletMarginLoss",
        _triplet(0.2, distance="sqeuclidean"),
        {"margin": 0.2, "distance": SQUARED},
    ),
    "triplet cosine": Case(
        "TripletMarginLoss",
        losses.TripletLoss(0.1, distance="cosine"),
        {"margin": 0.1, "distance": COSINE},
    ),
    "triplet dot": Case(
        "TripletMarginLoss", losses.TripletLoss(0.05, distance="dot"), {"distance": DOT}
    ),
    "triplet raw": Case(
        "TripletMarginLoss", losses.TripletLoss(0.05, distance="euclidean"), {"distance": RAW}
    ),
    "triplet mean": Case(
        "TripletMarginLoss", _triplet(0.2, average="all"), {"margin": 0.2, "reducer": MEAN}
    ),
    "triplet sum": Case(
        "TripletMarginLoss", _triplet(0.2, reduction="sum"), {"margin": 0.2, "reducer": SUM}
    ),
    # "hard" is the miner of pairs with less work.
    "triplet hard": Case("TripletMarginLoss", _triplet(0.3, "hard"), {"margin": 0.3}, HARD),
    "triplet smooth": Case(
        "TripletMarginLoss", _triplet("soft"), {"margin": 0, "smooth_loss": True}
    ),
    "triplet easy": Case(
        "TripletMarginLoss", _triplet(0.3, _SEMI_HARD), {"margin": 0.3}, EASY_HARD
    ),
    "triplet weighted": Case(
        "TripletMarginLoss",
        _triplet(0.4, "distance_weighted"),
        {"margin": 0.4},
        WEIGHTED,
        batches=("one negative",),
    ),
    "tuplet margin": Case("TupletMarginLoss", _tuplet_margin(5.73, 64)),
    "tuplet margin gentle": Case(
        "TupletMarginLoss",
        _tuplet_margin(20, 8, reduction="sum"),
        {"margin": 20, "scale": 8, "reducer": SUM},
    ),
    "tuplet margin hard": Case(
        "TupletMarginLoss", _tuplet_margin(5.73, 64, mining=BatchHardMiner()), miner=HARD
    ),
    "arc face": Case("ArcFaceLoss", losses.ArcFaceLoss(64, math.radians(28.6)), proxies=1),
    "arc face gentle": Case(
        "ArcFaceLoss",
        losses.ArcFaceLoss(8, math.radians(60), reduction="sum"),
        {"margin": 60, "scale": 8, "reducer": SUM},
        proxies=1,
    ),
    "cos face": Case("CosFaceLoss", losses.AMSoftmaxLoss(64, 0.35), proxies=1),
    "normalized softmax": Case(
        "NormalizedSoftmaxLoss", losses.NormSoftmaxLoss(1 / 0.05), proxies=1
    ),
    "proxy anchor": Case("ProxyAnchorLoss", losses.ProxyAnchorLoss(32, 0.1), proxies=1),
    "proxy anchor sum": Case(
        "ProxyAnchorLoss",
        losses.ProxyAnchorLoss(8, 0.2, reduction="sum"),
        {"margin": 0.2, "alpha": 8, "reducer": SUM},
        proxies=1,
    ),
    # A softmax of -scale |x - p|^2 = 2 scale cos - const over all classes, the own included.
    "proxy nca": Case("ProxyNCALoss", losses.NormSoftmaxLoss(2), proxies=1),
    "proxy nca scaled": Case(
        "ProxyNCALoss", losses.NormSoftmaxLoss(18), {"softmax_scale": 9}, proxies=1
    ),
    "sub-center arc face": Case(
        "SubCenterArcFaceLoss", losses.SubCenterArcFaceLoss(64, math.radians(28.6)), proxies=3
    ),
    "soft triple": Case("SoftTripleLoss", losses.SoftTripleLoss(20, 0.1, 0.01), proxies=10),
}
