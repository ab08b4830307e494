"""Names and arguments of pytorch-metric-learning; that the values are theirs is tests/parity's to show."""

import math

import keras
import numpy as np
import pytest

from benchmarks import pml_names as pml
from benchmarks.pml_names import NormalizedLoss, from_pml
from tests.losses.cases import check_contract
from tests.mathematics import assert_close, random_batch
from tests.played_replicas import sum_and_gradient
from tfdml import losses, mining
from tfdml.errors import UserError
from tfdml.objectives import ProxyLoss

LP = "LpDistance"
PROXIES = {name for name, row in pml.LOSSES.items() if row.proxies is not None}
RESOLVED = [
    ("TripletMarginLoss", {}, NormalizedLoss(losses.TripletLoss(0.05, "all", "euclidean"))),
    (
        "TripletMarginLoss",
        {"margin": 0.2, "reducer": "MeanReducer", "distance": "CosineSimilarity"},
        losses.TripletLoss(0.2, "all", "cosine", "all"),
    ),
    ("TripletMarginLoss", {"miner": "BatchHardMiner"}, NormalizedLoss(losses.TripletLoss(0.05, "hard", "euclidean"))),
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
    ("MultiSimilarityLoss", {"miner": "MultiSimilarityMiner"}, losses.MultiSimilarityLoss()),
    ("MarginLoss", {"miner": "DistanceWeightedMiner"}, NormalizedLoss(losses.MarginLoss())),
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
        losses.TupletMarginLoss(5.73, 64, variance_weight=0, mining=mining.BatchHardMiner()),
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
]


NONZERO, COSINE = "AvgNonZeroReducer", "CosineSimilarity"
MARGINS = {"margin": (28.6, 30), "scale": (64, 32)}
#: Of each class there, 2.9.0: each argument's default in `__init__` and another value; then the default distance and
#: the default reducer, with the names of others.
DEFAULTS = {
    "AngularLoss": ({"alpha": (40, 45)}, LP, "MeanReducer"),
    "ArcFaceLoss": (MARGINS, COSINE, "MeanReducer"),
    "CircleLoss": ({"m": (0.4, 0.25), "gamma": (80, 64)}, COSINE, NONZERO),
    "ContrastiveLoss": ({"pos_margin": (0, 0.1), "neg_margin": (1, 0.5)}, LP, NONZERO),
    "CosFaceLoss": ({"margin": (0.35, 0.2), "scale": (64, 32)}, COSINE, "MeanReducer"),
    "FastAPLoss": ({"num_bins": (10, 20)}, from_pml(LP, power=2), "MeanReducer"),
    "GeneralizedLiftedStructureLoss": ({"neg_margin": (1, 0.5), "pos_margin": (0, 0.1)}, LP, "MeanReducer"),
    "HistogramLoss": ({"n_bins": (100, 50), "delta": (None, 0.1)}, COSINE, None),
    "LiftedStructureLoss": ({"neg_margin": (1, 0.5), "pos_margin": (0, 0.1)}, LP, "MeanReducer"),
    "MarginLoss": ({"margin": (0.2, 0.1), "beta": (1.2, 1.1)}, LP, "DivisorReducer"),
    "MultiSimilarityLoss": ({"alpha": (2, 1), "beta": (50, 40), "base": (0.5, 0.4)}, COSINE, "MeanReducer"),
    "NTXentLoss": ({"temperature": (0.07, 0.1)}, COSINE, "MeanReducer"),
    "NormalizedSoftmaxLoss": ({"temperature": (0.05, 0.1)}, "DotProductSimilarity", "MeanReducer"),
    "ProxyAnchorLoss": ({"margin": (0.1, 0.2), "alpha": (32, 16)}, COSINE, "DivisorReducer"),
    "ProxyNCALoss": ({"softmax_scale": (1, 3)}, from_pml(LP, power=2), "MeanReducer"),
    "SoftTripleLoss": (
        {"centers_per_class": (10, 5), "la": (20, 10), "gamma": (0.1, 0.2), "margin": (0.01, 0.02)},
        COSINE,
        "MeanReducer",
    ),
    "SubCenterArcFaceLoss": ({**MARGINS, "sub_centers": (3, 2)}, COSINE, "MeanReducer"),
    "SupConLoss": ({"temperature": (0.1, 0.2)}, COSINE, NONZERO),
    "TripletMarginLoss": (
        {"margin": (0.05, 0.1), "smooth_loss": (False, True)},
        LP,
        NONZERO,
    ),
    "TupletMarginLoss": ({"margin": (5.73, 10), "scale": (64, 32)}, COSINE, "MeanReducer"),
}
#: Of each distance and miner there: each argument's default, and what it is here.
PARTS = {
    LP: ({"normalize_embeddings": True, "p": 2, "power": 1}, "euclidean"),
    COSINE: ({}, "cosine"),
    "DotProductSimilarity": ({"normalize_embeddings": True}, "cosine"),
    "MultiSimilarityMiner": ({"epsilon": 0.1}, 0.1),
    "BatchEasyHardMiner": (
        {"pos_strategy": "easy", "neg_strategy": "semihard"},
        mining.BatchEasyHardMiner("easy", "semi_hard"),
    ),
    "BatchHardMiner": ({}, mining.BatchHardMiner()),
    "DistanceWeightedMiner": ({}, "distance_weighted"),
}


def made(name, **arguments):
    """What `from_pml` makes, as its config; what it refuses, as the message."""
    miner = "DistanceWeightedMiner" if name == "MarginLoss" else None
    options = {"num_classes": 3} if name in PROXIES else {}
    try:
        return keras.saving.serialize_keras_object(from_pml(name, miner, **options, **arguments))["config"]
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", DEFAULTS)
def test_what_is_left_out_has_their_default_and_every_argument_counts(name):
    arguments, distance, reducer = DEFAULTS[name]
    plain = made(name)
    assert isinstance(plain, dict)
    for argument, (default, other) in arguments.items():
        assert made(name, **{argument: default}) == plain, argument
        assert made(name, **{argument: other}) != plain, argument
    assert made(name, distance=distance) == plain
    assert made(name, distance=from_pml("DotProductSimilarity", normalize_embeddings=False)) != plain
    if reducer:  # the histogram is one number
        assert made(name, reducer=reducer) == plain
        assert made(name, reducer="SumReducer") != plain
        for other in {"MeanReducer", NONZERO, "DivisorReducer"} - {reducer}:
            assert made(name, reducer=other) != plain, other


def test_distances_and_miners_have_their_defaults():
    assert set(PARTS) == {*pml.DISTANCES, *pml.MINERS}
    for name, (arguments, ours) in PARTS.items():
        for made in (from_pml(name), from_pml(name, **arguments)):
            assert repr(made.ours) == repr(ours)
            assert made.unit == (name in pml.DISTANCES)
    assert not from_pml("DotProductSimilarity", normalize_embeddings=False).unit


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


def test_every_loss_with_an_equal_is_compared():
    assert set(pml.LOSSES) == set(DEFAULTS)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("TripletLoss", {}, "has no 'TripletLoss' that has an equal in tfdml; losses: AngularLoss"),
        ("TripletMarginLoss", {"swap": True}, "no argument `swap` has an equal in tfdml; margin, smooth_loss have one"),
        ("TripletMarginLoss", {"average": "all"}, "no argument `average`"),
        ("TripletMarginLoss", {"margin": "wide"}, "TripletMarginLoss: margin must be a (finite )?number"),
        (
            "TripletMarginLoss",
            {"distance": "SNRDistance"},
            "`distance='SNRDistance'` is no distance .*; known: LpDistance",
        ),
        ("LpDistance", {"p": 1}, "LpDistance: `p=1, power=1` has no equal"),
        ("TripletMarginLoss", {"reducer": "DivisorReducer"}, "the reducer DivisorReducer has no equal"),
        (
            "TripletMarginLoss",
            {"miner": "MultiSimilarityMiner"},
            "the miner MultiSimilarityMiner has no equal.*BatchHardMiner",
        ),
        ("ContrastiveLoss", {"pos_margin": 0.1}, "`pos_margin=0.1` has no equal in tfdml; nearest: `pos_margin=0`"),
        ("CircleLoss", {"distance": LP}, "LpDistance.* has no equal in tfdml; nearest: the loss's own"),
        ("TripletMarginLoss", {"smooth_loss": True}, "`smooth_loss=True` with a margin has no equal"),
        ("BatchHardMiner", {"allowed_pos_range": (0, 1)}, "no argument `allowed_pos_range`"),
        (
            "NTXentLoss",
            {"miner": "TripletMarginMiner"},
            "`miner='TripletMarginMiner'` is no miner .*BatchEasyHardMiner",
        ),
        (
            "ContrastiveLoss",
            {"miner": "BatchHardMiner", "distance": from_pml(LP, normalize_embeddings=False)},
            "the miner BatchHardMiner has no equal .* on normalized embeddings",
        ),
        ("BatchEasyHardMiner", {"pos_strategy": "best"}, "BatchEasyHardMiner: positives must be .easy"),
        ("AngularMiner", {}, "no 'AngularMiner' .*migrating.md names what is near"),
        ("MarginLoss", {}, "nearest: `miner='DistanceWeightedMiner'`"),
        ("MarginLoss", {"learn_beta": True}, "no argument `learn_beta`"),
        ("ArcFaceLoss", {}, "`num_classes` is missing"),
        ("ArcFaceLoss", {"num_classes": 3, "margin": 100}, "ArcFaceLoss: margin must be at least 0"),
    ],
)
def test_what_cannot_be_expressed_is_refused_in_a_line(name, arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        from_pml(name, **arguments)
    assert "\n" not in str(caught.value)


def test_a_loss_on_normalized_embeddings():
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
