"""What is compared with TensorFlow Similarity and TensorFlow Addons: their losses, and ours that
equal them."""

import dataclasses
from typing import Any

import numpy as np

from tests.support.mathematics import degenerate_batches, random_batch
from tfdml import mining
from tfdml.losses import (
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NTXentLoss,
    SoftNearestNeighborLoss,
    TripletLoss,
)

UNIT = ("unit", "two a class", "real")
RAW = (*UNIT, "raw")
# Degenerate, yet with a positive and a negative for every anchor.
WHOLE = (
    "duplicates in one class",
    "duplicates across classes",
    "all identical",
    "a zero vector",
    "all zero",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss of theirs and what it is compared with.

    Args:
        name: The class there.
        arguments: Its arguments.
        ours: The loss here; None where there is none, and the test knows the formula.
        form: How theirs is called: `"labels"` (labels, embeddings), or of anchors and positives as
            the first and the second half of the batch, `"views"`, `"similarities"` (a matrix) or
            `"pairs"` (distances).
        batches: Those on which values and gradients are compared.
        on_the_sphere: Theirs takes the embeddings for unit vectors, ours normalizes them: the
            gradients agree along the sphere.
    """

    name: str
    arguments: dict[str, Any]
    ours: Any
    form: str = "labels"
    batches: tuple[str, ...] = RAW
    on_the_sphere: bool = False

    def there(self):
        """What goes to the other environment."""
        whole = WHOLE if self.form == "labels" else ()
        lacking = tuple(LACKING) if self.form == "labels" else ()
        return {
            "name": self.name,
            "arguments": self.arguments,
            "form": self.form,
            "batches": [*self.batches, *whole, *lacking],
        }


# Where anchors have no positive or no negative.
LACKING = ("no positive", "no negative", "one image")


def _triplet(positives="hard", negatives="hard", margin=0.2, distance="cosine"):
    strategies = {"positive_mining_strategy": positives, "negative_mining_strategy": negatives}
    return {**strategies, "margin": margin, "distance": distance}


def _similarity(name, arguments, ours, **rest):
    cosine = arguments.get("distance", "cosine") == "cosine"
    return Case(
        name,
        arguments,
        ours,
        **{"batches": UNIT if cosine else RAW, "on_the_sphere": cosine, **rest},
    )


def _mined(positives, negatives):
    return TripletLoss(
        0.2, mining.BatchEasyHardMiner(positives, negatives), "cosine", average="all"
    )


SIMILARITY = {
    "hard": _similarity(
        "TripletLoss", _triplet(), TripletLoss(0.2, "hard", "cosine", average="all")
    ),
    "hard l2": _similarity(
        "TripletLoss", _triplet(distance="l2"), TripletLoss(0.2, "hard", "euclidean", average="all")
    ),
    "hard squared": _similarity(
        "TripletLoss",
        _triplet(distance="sql2"),
        TripletLoss(0.2, "hard", "sqeuclidean", average="all"),
    ),
    "soft margin": _similarity(
        "TripletLoss", _triplet(margin=None), TripletLoss("soft", "hard", "cosine", average="all")
    ),
    "easy, hard": _similarity("TripletLoss", _triplet("easy", "hard"), _mined("easy", "hard")),
    "easy, easy": _similarity("TripletLoss", _triplet("easy", "easy"), _mined("easy", "easy")),
    "hard, easy": _similarity("TripletLoss", _triplet("hard", "easy"), _mined("hard", "easy")),
    "multi-similarity": _similarity(
        "MultiSimilarityLoss", {}, MultiSimilarityLoss(2, 40, 0.5, 0.1)
    ),
    "multi-similarity gentle": _similarity(
        "MultiSimilarityLoss",
        {"alpha": 1, "beta": 20, "epsilon": 0.2, "lmda": 0.3},
        MultiSimilarityLoss(1, 20, 0.3, 0.2),
    ),
    "soft nearest neighbor": _similarity(
        "SoftNearestNeighborLoss",
        {"temperature": 1, "distance": "sql2"},
        SoftNearestNeighborLoss(1.0),
    ),
    "soft nearest neighbor cosine": _similarity(
        "SoftNearestNeighborLoss",
        {"temperature": 0.5, "distance": "cosine"},
        SoftNearestNeighborLoss(0.5, "cosine"),
    ),
    "two views": Case(
        "SimCLRLoss",
        {"temperature": 0.1},
        lambda y, x: 2 * NTXentLoss(0.1)(y, x),
        "views",
        ("anchors and positives",),
    ),
    "semi-hard": _similarity("TripletLoss", _triplet("hard", "semi-hard"), None),
    "circle": _similarity("CircleLoss", {}, None),
}
ADDONS = {
    **{
        f"{mined} {theirs}": Case(
            name,
            {"margin": 0.5, "distance_metric": theirs},
            TripletLoss(0.5, mined, ours, average="all"),
        )
        for mined, name in (("semi_hard", "TripletSemiHardLoss"), ("hard", "TripletHardLoss"))
        for theirs, ours in (
            ("L2", "euclidean"),
            ("squared-L2", "sqeuclidean"),
            ("angular", "cosine"),
        )
    },
    "soft": Case(
        "TripletHardLoss", {"soft": True}, TripletLoss("soft", "hard", "euclidean", average="all")
    ),
    "lifted": Case("LiftedStructLoss", {"margin": 1.0}, LiftedStructureLoss(1.0)),
    "lifted tight": Case("LiftedStructLoss", {"margin": 0.3}, LiftedStructureLoss(0.3)),
    "pairs": Case("ContrastiveLoss", {"margin": 1.0}, None, "pairs", ("pairs",)),
    "n-pairs": Case("NpairsLoss", {}, None, "similarities", ("anchors and positives",)),
}


def batches():
    """Name -> (labels, embeddings).

    "anchors and positives" has an image of each class in either half, "pairs" six positive and six
    negative pairs.
    """
    two = np.repeat(np.arange(6), 2)
    other = np.where(np.arange(12) < 6, np.arange(12), np.arange(12) + 12)
    halves = np.random.default_rng(3).normal(size=(24, 6)).astype("float32")
    return {
        "unit": random_batch(0, 12, 3, 8),
        "raw": random_batch(1, 14, 4, 6, unit=False),
        "two a class": (two, random_batch(2, 12, 3, 5)[1]),
        "real": (np.arange(128) % 12, random_batch(4, 128, 32, 64)[1]),
        "anchors and positives": (np.tile(np.arange(12), 2), halves),
        "pairs": (np.concatenate([np.arange(12), other]), 0.3 * halves),
        **{name: degenerate_batches()[name] for name in (*WHOLE, *LACKING)},
    }
