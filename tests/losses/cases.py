"""Every loss on pairs with the arguments by which its path differs, its float64 reference, and what
all must do."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

from tests.losses import references
from tests.support import references as plain_references
from tests.support.mathematics import assert_close, random_batch
from tfdml import losses

MINING = ("all", "hard", "semi_hard", "distance_weighted")
# Margins that leave some negatives of random unit vectors inside and some outside.
MARGINS = {"euclidean": 1.3, "sqeuclidean": 1.9, "cosine": 0.9, "dot": 0.1}


class Case(NamedTuple):
    """A loss, and its reference.

    Args:
        loss: The loss.
        reference: The value of labels and vectors.
        differentiable: A function of labels and vectors that gives the function of vectors alone
            whose derivative the gradient is, where the loss stops some of it.
        relative: The tolerance of its gradient.
        floor: That of its value on degenerate batches.
        steep: Whether differences in steps of 1e-6 are too coarse for its gradient.
    """

    loss: Any
    reference: Callable
    differentiable: Callable
    relative: float = 1e-5
    floor: float = 2e-6
    steep: bool = False


def cases(make, reference, *arguments, frozen=None, **tolerances):
    """Two cases, of the mean and of the sum.

    Args:
        make: The loss's class.
        reference: Takes labels, vectors and the same arguments in the same order, and `reduction`.
        *arguments: Of the loss.
        frozen: A function of labels and vectors: what the reference takes as constant, by argument.
        **tolerances: As of `Case`.
    """

    def case(reduction):
        def value(labels, x, **constants):
            # Python's numbers: NumPy's scalars take twice the time.
            numbers = np.asarray(labels).tolist(), np.asarray(x, np.float64).tolist()
            return reference(*numbers, *arguments, reduction=reduction, **constants)

        def differentiable(labels, x):
            constants = frozen(labels, np.array(x, np.float64)) if frozen else {}
            return lambda e: value(labels, e, **constants)

        loss = make(*arguments, reduction="sum" if reduction == "sum" else "sum_over_batch_size")
        return Case(loss, value, differentiable, **tolerances)

    return {
        f"{make.__name__} {arguments} {reduction}": case(reduction) for reduction in ("mean", "sum")
    }


def margin(alpha, beta):
    def frozen(labels, x):
        return {"probabilities": references.draw_probabilities(labels, x)}

    return cases(losses.MarginLoss, references.margin_loss, alpha, beta, frozen=frozen)


def triplet(margin, mining, kind, average="active", **tolerances):
    def frozen(labels, x):
        return {"chosen": references.triplets(labels, x, mining, kind)}

    return cases(
        losses.TripletLoss,
        references.triplet,
        margin,
        mining,
        kind,
        average,
        frozen=frozen,
        **tolerances,
    )


def weights_of(labels, x):
    """The vectors of which weights are that carry no gradient."""
    del labels
    return {"frozen": x.tolist()}


def scaled_n_pair(labels, x, l2, scale, reduction):
    return references.n_pair(labels, scale * np.array(references.unit(x)), l2, reduction)


def contrastive():
    for kind, at in MARGINS.items():
        for average in ("active", "all"):
            yield cases(losses.ContrastiveLoss, plain_references.contrastive, at, kind, average)


def triplets():
    for mining in MINING:
        yield triplet(0.5, mining, "sqeuclidean")
        yield triplet(0.2, mining, "euclidean", "all")
        yield triplet("soft", mining, "sqeuclidean", floor=5e-6)
    yield from (triplet(0.3, "all", kind) for kind in ("cosine", "dot"))
    yield from (triplet(0.5, mining, "cosine") for mining in MINING)
    yield triplet("soft", "all", "euclidean", floor=5e-6)


# A cosine of 1 in float32 is off by 1e-7, which a scale of 64 or 256 multiplies.
SCALED, SCALED_256 = {"floor": 2e-5}, {"floor": 1e-4}
# A bin's width divides the rounding of a cosine: 1e-7 of the unit is 1e-5 of a bin of 1/50.
BINNED = {"floor": 2e-5, "relative": 3e-5}
K = (1, 2, 4, 8, 16)
GROUPS = [
    *contrastive(),
    *(
        cases(losses.CosineContrastiveLoss, plain_references.cosine_contrastive, at)
        for at in (0.5, -0.1)
    ),
    *(
        cases(losses.CosineSimilarityLoss, references.cosine_similarity, *ends)
        for ends in ((0.0, 1.0), (-1.0, 4.0))
    ),
    cases(losses.BinomialDevianceLoss, plain_references.binomial, 2.0, 0.5, 25.0),
    cases(losses.BinomialDevianceLoss, plain_references.binomial, 5.0, 0.0, 1.0),
    *(margin(*numbers) for numbers in ((0.2, 1.2), (0.5, 0.9), (0.0, 1.0))),
    *(
        cases(
            losses.ThresholdConsistentMarginLoss, references.threshold_consistent_margin, *numbers
        )
        for numbers in ((0.9, 0.5, 1.0, 1.0), (0.3, -0.2, 0.5, 2.0))
    ),
    cases(
        losses.RankedListLoss, references.ranked_list, 0.4, 1.2, 10.0, 0.0, 0.5, frozen=weights_of
    ),
    cases(
        losses.RankedListLoss, references.ranked_list, 0.6, 1.4, 0.0, 3.0, 0.3, frozen=weights_of
    ),
    cases(losses.VICRegLoss, references.vic_reg, 25.0, 25.0, 1.0, 1.0),
    cases(losses.VICRegLoss, references.vic_reg, 1.0, 0.5, 2.0, 0.3),
    *triplets(),
    *(cases(losses.QuadrupletLoss, references.quadruplet, 0.3, 0.2, kind) for kind in MARGINS),
    *(cases(losses.NPairLoss, references.n_pair, l2) for l2 in (0.0, 0.003)),
    *(cases(losses.NPairLoss, scaled_n_pair, 0.0, scale) for scale in (2.0, 10.0)),
    *(
        cases(losses.AngularLoss, references.angular, degrees)
        for degrees in (45.0, 36.0, 40.0, 65.0)
    ),
    cases(losses.NTXentLoss, references.nt_xent, 0.07, **SCALED),
    cases(
        losses.SoftNearestNeighborLoss,
        references.soft_nearest_neighbor,
        0.2,
        "sqeuclidean",
        **SCALED,
    ),
    cases(
        losses.SoftNearestNeighborLoss, references.soft_nearest_neighbor, 0.5, "euclidean", **SCALED
    ),
    cases(
        losses.TupletMarginLoss,
        references.tuplet_margin,
        5.73,
        64.0,
        0.0,
        0.01,
        steep=True,
        **SCALED,
    ),
    cases(losses.TupletMarginLoss, references.tuplet_margin, 20.0, 64.0, 0.5, 0.1, **SCALED),
    cases(losses.MultiSimilarityLoss, references.multi_similarity, 2.0, 50.0, 0.5, 0.1, floor=5e-6),
    cases(
        losses.MultiSimilarityLoss, references.multi_similarity, 3.0, 10.0, 0.2, None, floor=5e-6
    ),
    *(cases(losses.LiftedStructureLoss, references.lifted, at, floor=5e-6) for at in (1.0, 0.3)),
    cases(
        losses.GeneralizedLiftedStructureLoss,
        references.generalized_lifted,
        1.0,
        0.0,
        "euclidean",
        floor=5e-6,
    ),
    cases(losses.CircleLoss, references.circle, 0.4, 80.0, frozen=weights_of, **SCALED_256),
    cases(losses.CircleLoss, references.circle, 0.25, 256.0, frozen=weights_of, **SCALED_256),
    *(
        cases(losses.SupConLoss, references.sup_con, temperature, floor=5e-6)
        for temperature in (0.1, 1.0)
    ),
    *(cases(losses.HistogramLoss, references.histogram, bins, **BINNED) for bins in (100, 7)),
    *(cases(losses.FastAPLoss, references.fast_ap, bins, **BINNED) for bins in (10, 25)),
    cases(losses.SmoothAPLoss, references.smooth_ap, 0.2),
    cases(losses.SmoothAPLoss, references.smooth_ap, 0.01, steep=True),
    cases(losses.RecallAtKLoss, references.recall_at_k, (1, 3), 0.2, 0.5),
    cases(losses.RecallAtKLoss, references.recall_at_k, K, 0.01, 1.0, steep=True),
]
MEANS = {
    name: case for group in GROUPS for name, case in group.items() if case.loss.reduction != "sum"
}
#: Of each class and mining the first sum: other arguments take the same path to it.
SUMS = {
    (type(case.loss), case.loss.mining): (name, case)
    for group in reversed(GROUPS)
    for name, case in group.items()
    if case.loss.reduction == "sum"
}
CASES = {**MEANS, **dict(SUMS.values())}
#: Of each class and mining the first mean; other arguments take the same path.
FIRST = set(
    {(type(case.loss), case.loss.mining): name for name, case in reversed(MEANS.items())}.values()
)


def _marks(name):
    return [] if name in FIRST else pytest.mark.slow


def by_class(chosen):
    """Each case, of which the first of each class and mining are quick."""
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=_marks(name), id=name) for name, case in chosen.items()]
    )


def by_mode(chosen, compiled_every=1):
    """Each case eagerly, of which the first of each class and mining are quick, and every so many
    of those by XLA."""
    first = [name for name in chosen if name in FIRST]
    rows = [("eager", name) for name in chosen]
    rows += [("xla", name) for name in first[::compiled_every]]
    parameters = [
        pytest.param(chosen[name], mode, id=f"{mode} {name}", marks=_marks(name))
        for mode, name in rows
    ]
    return pytest.mark.parametrize(("case", "mode"), parameters)


def check_contract(loss):
    """One value per anchor, order-free, labels as integers of any size, and a configuration that
    restores it."""
    labels, x = random_batch(2, 12, 4, 6)
    values = np.asarray(loss.call(labels, x))
    assert values.shape == (12,)
    assert_close(np.sum(values) if loss.reduction == "sum" else np.mean(values), loss(labels, x))
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_allclose(
        loss.call(labels[order], x[order]), values[order], rtol=2e-5, atol=1e-6
    )
    np.testing.assert_array_equal(loss.call(labels.astype("int64") + 2**53, x), values)
    half = loss(labels, keras.ops.cast(x, "bfloat16"))
    assert keras.backend.standardize_dtype(half.dtype) == "float32"
    assert math.isfinite(half)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again) is type(loss)
    assert again.get_config() == loss.get_config()
    np.testing.assert_array_equal(again.call(labels, x), values)
