"""Names and arguments of pytorch-metric-learning; that the values are theirs is tests/parity's to show."""

import math

import keras
import numpy as np
import pytest

from tests.losses.checks import check_contract
from tests.mathematics import assert_close, random_batch
from tests.played_replicas import sum_and_gradient
from tfdml import losses, mining
from tfdml.errors import UserError
from tfdml.interop import NormalizedLoss, from_pml, pml, pml_pairs, pml_proxies
from tfdml.objectives import ProxyLoss

LP = "LpDistance"
RESOLVED = [
    ("TripletMarginLoss", {}, NormalizedLoss(losses.TripletLoss(0.05, "all", "euclidean"))),
    (
        "TripletMarginLoss",
        {"margin": 0.2, "reducer": "MeanReducer", "distance": "CosineSimilarity"},
        losses.TripletLoss(0.2, "all", "cosine", "all"),
    ),
    ("TripletMarginLoss", {"miner": "BatchHardMiner"}, NormalizedLoss(losses.TripletLoss(0.05, "hard", "euclidean"))),
    (
        "TripletMarginLoss",
        {"margin": 0.2, "miner": "TripletMarginMiner"},
        NormalizedLoss(losses.TripletLoss(0.2, "all", "euclidean")),
    ),
    (
        "ContrastiveLoss",
        {"distance": from_pml(LP, power=2, normalize_embeddings=False)},
        losses.ContrastiveLoss(1.0, "sqeuclidean"),
    ),
    (
        "ContrastiveLoss",
        {"distance": "CosineSimilarity", "pos_margin": 1, "neg_margin": 0.25},
        losses.ContrastiveLoss(0.75, "cosine"),
    ),
    ("LiftedStructureLoss", {"pos_margin": 0.25}, NormalizedLoss(losses.LiftedStructureLoss(0.75))),
    ("MultiSimilarityLoss", {"base": 0.4}, losses.MultiSimilarityLoss(base=0.4, mining_epsilon=None)),
    ("MultiSimilarityLoss", {"miner": "MultiSimilarityMiner"}, losses.MultiSimilarityLoss()),
    ("MarginLoss", {"miner": "DistanceWeightedMiner"}, NormalizedLoss(losses.MarginLoss())),
    ("HistogramLoss", {"delta": 0.1}, losses.HistogramLoss(20)),
    ("NTXentLoss", {"temperature": 0.2}, losses.NTXentLoss(0.2)),
    (
        "NTXentLoss",
        {"miner": from_pml("BatchEasyHardMiner", neg_strategy="all")},
        losses.NTXentLoss(mining=mining.BatchEasyHardMiner("easy", "all")),
    ),
    (
        "ContrastiveLoss",
        {"miner": "BatchEasyHardMiner", "distance": from_pml(LP, power=2)},
        NormalizedLoss(losses.ContrastiveLoss(1.0, "sqeuclidean", mining=mining.BatchEasyHardMiner())),
    ),
    (
        "TupletMarginLoss",
        {"miner": "BatchHardMiner"},
        losses.TupletMarginLoss(5.73, 64, mining=mining.BatchHardMiner()),
    ),
    (
        "TripletMarginLoss",
        {"margin": 0, "smooth_loss": True},
        NormalizedLoss(losses.TripletLoss("soft", "all", "euclidean")),
    ),
    (
        "GeneralizedLiftedStructureLoss",
        {"pos_margin": 0.25},
        NormalizedLoss(losses.GeneralizedLiftedStructureLoss(1, 0.25)),
    ),
    ("FastAPLoss", {"num_bins": 20, "reducer": "SumReducer"}, losses.FastAPLoss(20, "sum")),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), RESOLVED)
def test_names_and_arguments_become_ours(name, arguments, expected):
    assert keras.losses.serialize(from_pml(name, **arguments)) == keras.losses.serialize(expected)


def test_losses_with_proxies_become_objectives():
    made = from_pml("ArcFaceLoss", num_classes=7, embedding_size=4, margin=30, reducer="SumReducer")
    assert isinstance(made, ProxyLoss)
    assert (made.num_classes, made.loss.margin, made.loss.reduction) == (7, math.radians(30), "sum")
    assert from_pml("NormalizedSoftmaxLoss", num_classes=3, temperature=0.1).loss.scale == 10
    assert from_pml("ProxyNCALoss", num_classes=3, softmax_scale=9).loss.scale == 18
    made = from_pml("SubCenterArcFaceLoss", num_classes=3, margin=0)
    assert (made.proxies_per_class, made.loss.scale, made.loss.margin) == (3, 64, 0)
    assert from_pml("SoftTripleLoss", num_classes=3, centers_per_class=5).proxies_per_class == 5


def test_every_name_of_theirs_is_answered():
    """What cannot be made says what is nearest; what is near exists."""
    for name in (*pml_pairs.TRANSLATED, *pml_proxies.TRANSLATED):
        options = {"num_classes": 3} if name in pml_proxies.TRANSLATED else {}
        miner = "DistanceWeightedMiner" if name == "MarginLoss" else None
        from_pml(name, miner=miner, **options)
        assert name not in pml.NEAREST
    for name in pml.NEAREST:
        with pytest.raises(UserError, match=f"^{name} of pytorch-metric-learning has no equal in tfdml; nearest: "):
            from_pml(name)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("TripletLoss", {}, "has no 'TripletLoss' that tfdml knows; losses: AngularLoss"),
        ("TripletMarginLoss", {"swap": True}, "`swap=True` has no equal in tfdml; nearest: `swap=False`"),
        ("TripletMarginLoss", {"gap": 1}, "no argument `gap`; it has margin, swap"),
        ("TripletMarginLoss", {"margin": "wide"}, "TripletMarginLoss: margin must be a (finite )?number"),
        ("TripletMarginLoss", {"distance": "SNRDistance"}, "none of tfdml's distances divides by a variance"),
        ("TripletMarginLoss", {"distance": "euclidean"}, "'euclidean' that tfdml knows; parts: "),
        ("TripletMarginLoss", {"distance": from_pml(LP, p=1)}, "with `p=1, power=1` has no equal"),
        ("TripletMarginLoss", {"reducer": "DivisorReducer"}, "the reducer DivisorReducer has no equal"),
        ("TripletMarginLoss", {"reducer": LP}, "`reducer=.*is no reducer"),
        ("TripletMarginLoss", {"miner": "MultiSimilarityMiner"}, "the miner MultiSimilarityMiner with Cosine"),
        (
            "TripletMarginLoss",
            {"miner": from_pml("TripletMarginMiner", type_of_triplets="semihard")},
            "type_of_triplets='semihard'.*one negative a pair",
        ),
        ("ContrastiveLoss", {"pos_margin": 0.1}, "`pos_margin=0.1` has no equal in tfdml; nearest: `pos_margin=0`"),
        ("ContrastiveLoss", {"distance": "CosineSimilarity"}, "nearest: `pos_margin=1`"),
        ("CircleLoss", {"distance": LP}, "the distance LpDistance.* has no equal in tfdml; nearest: the loss's own"),
        ("CircleLoss", {"reducer": "MeanReducer"}, "nearest: AvgNonZeroReducer, SumReducer"),
        ("TripletMarginLoss", {"smooth_loss": True}, "`smooth_loss=True` with a margin has no equal"),
        ("NTXentLoss", {"miner": from_pml("BatchHardMiner", allowed_pos_range=(0, 1))}, "a BatchHardMiner with ranges"),
        ("NTXentLoss", {"miner": "TripletMarginMiner"}, "TripletMarginMiner with LpDistance.*BatchEasyHardMiner"),
        (
            "NTXentLoss",
            {"miner": from_pml("BatchHardMiner", distance=from_pml(LP, normalize_embeddings=False))},
            "BatchHardMiner with",
        ),
        (
            "NTXentLoss",
            {"miner": from_pml("BatchEasyHardMiner", pos_strategy="best")},
            "NTXentLoss: positives must be .easy",
        ),
        ("AngularMiner", {}, "AngularMiner.*keeps each pair once"),
        ("HDCMiner", {}, "HDCMiner.*HardAwareMiner"),
        ("MarginLoss", {}, "nearest: `miner='DistanceWeightedMiner'`"),
        ("MarginLoss", {"learn_beta": True}, "LearnedMargin"),
        ("ArcFaceLoss", {}, "`num_classes` is missing"),
        ("ArcFaceLoss", {"num_classes": 3, "margin": 100}, "ArcFaceLoss: margin must be at least 0"),
        ("ArcFaceLoss", {"num_classes": 3, "weight_regularizer": 1}, "`weight_regularizer` has no equal"),
        ("LpDistance", {"q": 1}, "no argument `q`"),
        ("LpDistance", {"power": "two"}, "LpDistance: power must be a (finite )?number"),
    ],
)
def test_what_cannot_be_expressed_is_refused_in_a_line(name, arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        from_pml(name, **arguments)
    assert "\n" not in str(caught.value)


def test_a_loss_on_normalised_embeddings():
    loss = NormalizedLoss(losses.TripletLoss(0.3, "all", "euclidean"))
    check_contract(loss)
    labels, x = random_batch(1, 10, 4, 4, unit=False)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    assert_close(loss(labels, x), loss.loss(labels, unit))
    assert_close(loss(labels, 3.0 * x), loss(labels, x))
    whole, parts = (sum_and_gradient(loss, (labels, x), sizes) for sizes in ([10], [7, 3]))
    assert_close(parts[1], whole[1], floor=1e-7)
    with pytest.raises(ValueError, match="expected a loss on pairs"):
        NormalizedLoss(losses.AMSoftmaxLoss())
