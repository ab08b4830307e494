"""Whitening against an eigendecomposition in float64."""

import numpy as np
import pytest

from tests.evaluation.reranking.references import unit
from tests.evaluation.reranking.test_expansion import made
from tfdml.errors import UserError
from tfdml.evaluation.reranking import fit_whitening


def by_hand(train, rows, dim, power, shrinkage):
    train, rows = unit(train), unit(rows)
    mean = train.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(train.T))
    order = np.argsort(-values)
    values, vectors = values[order], vectors[:, order]
    values = (1 - shrinkage) * values + shrinkage * values.mean()
    return unit((rows - mean) @ vectors[:, :dim] / values[:dim] ** (power / 2))


@pytest.mark.parametrize("power", [0, 0.5, 1])
@pytest.mark.parametrize("shrinkage", [0, 0.3, 1])
@pytest.mark.parametrize("dim", [3, 0])
def test_equals_the_eigendecomposition(power, shrinkage, dim):
    train, rows = made(90, seed=1) * 3, made(20, seed=2)
    found = fit_whitening(train, dim, power=power, shrinkage=shrinkage)(rows)
    expected = by_hand(train, rows, dim or 6, power, shrinkage)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=2e-5)  # signs are free
    assert found.shape == (20, dim or 6)


def test_a_direction_without_variance_stays_without_weight():
    train = np.repeat(made(30), 2, axis=1)
    for power in (0.5, 1):
        found = fit_whitening(train, 12, power=power)(train)
        assert np.isfinite(found).all()
        assert np.abs(found[:, 6:]).max() < 1e-4


@pytest.mark.parametrize(
    ("count", "dim", "message"), [(40, 7, "fewer components"), (5, 5, "fewer components"), (40, 2, "6")]
)
def test_what_cannot_be_is_refused(count, dim, message):
    with pytest.raises(UserError, match=message):
        fit_whitening(made(count), dim)(np.ones((2, 5)))
