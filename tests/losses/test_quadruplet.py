import math

import numpy as np
import pytest

from tests.losses import references_ranking as references
from tests.losses.checks import (
    both_reductions,
    by_mode,
    check_contract,
    check_degenerate,
    check_formula,
    check_gradient,
    check_large,
    check_nothing_to_learn,
)
from tests.mathematics import assert_close, random_batch
from tfdml.layers import QuadrupletStatistic
from tfdml.losses import QuadrupletLoss
from tfdml.objectives.mutual_information import divergence_loss


def cases(kind, average, margin=0.3, pair_margin=0.2):
    def value(labels, x, reduction):
        return references.quadruplet(labels, x, margin, pair_margin, kind, average, reduction)

    arguments = {"margin": margin, "pair_margin": pair_margin, "distance": kind, "average": average}
    return both_reductions(f"{kind} {average}", QuadrupletLoss, value, **arguments)


CASES = {
    **cases("euclidean", "all"),
    **cases("euclidean", "active"),
    **cases("sqeuclidean", "all"),
    **cases("cosine", "active"),
    **cases("dot", "all"),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_equals_the_formula(case):
    check_formula(case)


@by_mode(CASES)
def test_gradient_equals_finite_differences(case, mode):
    check_gradient(case, mode)


@pytest.mark.one_quick_case
@by_mode({name: CASES[name] for name in ("euclidean all mean", "euclidean active mean", "cosine active mean")})
def test_degenerate_batches(case, mode):
    check_degenerate(case, mode)


@every_case
def test_contract(case):
    check_contract(case.loss)


@pytest.mark.parametrize("average", ["all", "active"])
def test_a_batch_without_pairs_of_either_kind_teaches_nothing(average):
    loss = QuadrupletLoss(average=average)
    check_nothing_to_learn(loss, "no positive", "no negative", "one image", "two images of two classes")


def test_a_batch_of_a_thousand():
    check_large(QuadrupletLoss(), size=1024)


def test_a_thousand_images_lose_no_digits():
    labels, x = np.arange(600) % 200, np.random.default_rng(3).normal(size=(600, 16)).astype("float32")
    d = np.linalg.norm(x[:, None].astype("float64") - x[None], axis=2)
    same = labels[:, None] == labels
    far = np.sort(d[~same])
    expected = np.mean([np.maximum(p + 0.1 - far, 0.0).mean() for p in d[same & ~np.eye(600, dtype=bool)]])
    assert_close(QuadrupletLoss(margin=-100.0)(labels, x), expected, 1e-5)


def test_worked_example_of_the_docstring():
    loss = QuadrupletLoss(margin=0.1, pair_margin=0.0, distance="sqeuclidean")
    assert_close(loss([0, 0, 1], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]), (0.5 + 0.2 + 0.2) / 3, 1e-6)


def test_rank_mi_with_v_fixed_to_eq_13_is_the_quadruplet_term():
    """Sec. 3.4: negatives enter as d - gamma, with gamma beyond all distances, so that no quadruplet is dropped."""
    gamma = 2.5
    _, x = random_batch(4, 12, 4, 5)
    labels = np.arange(12) % 4
    d = np.array([[math.dist(a, b) for b in x.astype("float64")] for a in x.astype("float64")])
    positive = (labels[:, None] == labels) & ~np.eye(12, dtype=bool)
    negative = labels[:, None] != labels
    values = QuadrupletStatistic()(np.where(negative, d - gamma, d).astype("float32"))
    bound = divergence_loss(values, positive, negative)
    without_triplets = QuadrupletLoss(margin=-100.0, pair_margin=gamma)
    assert_close(bound + 2 * math.log(2), without_triplets(labels, x), 1e-5)


def test_an_average_that_is_none_is_refused():
    with pytest.raises(ValueError, match="average must be 'active' or 'all', not 'mean'"):
        QuadrupletLoss(average="mean")
