"""On replicas of unequal size, every loss has the gradient of one device."""

import functools
import inspect

import numpy as np
import pytest

from tests.support.mathematics import assert_close, public_classes, random_batch
from tests.support.played_replicas import sum_and_gradient
from tfdml import losses
from tfdml.losses.classification import ClassSimilarityLoss

MAKE = public_classes(losses) | {
    f"TripletLoss {mining}": functools.partial(losses.TripletLoss, 0.5, mining)
    for mining in ("hard", "semi_hard", "distance_weighted")
}
MAKE["TripletLoss soft"] = functools.partial(losses.TripletLoss, "soft")


def make(name, reduction):
    # Losses that draw do so by a seed of their own.
    options = {"seed": 3} if "seed" in inspect.signature(MAKE[name]).parameters else {}
    return MAKE[name](reduction=reduction, **options)


def batch(loss):
    labels, x = random_batch(4, 10, 4, 4)
    return labels, 0.9 * x if isinstance(loss, ClassSimilarityLoss) else x


# A sum is taken in one place for all losses on pairs, and in one for those on classes.
REDUCED = [("sum", name) for name in ("ContrastiveLoss", "TripletLoss hard", "AMSoftmaxLoss")]
REDUCED += [("sum_over_batch_size", name) for name in MAKE]


@pytest.mark.one_quick_case
@pytest.mark.parametrize(("reduction", "name"), REDUCED)
def test_the_gradient_is_that_of_one_device(name, reduction):
    loss = make(name, reduction)
    arrays = batch(loss)
    expected = sum_and_gradient(loss, arrays, [10])
    assert np.any(expected[1])
    value, gradient = sum_and_gradient(loss, arrays, [7, 3])
    assert_close(gradient, expected[1], floor=1e-7)
    if reduction != "sum":
        # A mean is reported as Keras's logs expect it: the mean of the replicas' means, whatever
        # their sizes.
        value, _ = sum_and_gradient(loss, arrays, [5, 5])
    assert_close(value, expected[0])


@pytest.mark.parametrize("name", ["AMSoftmaxLoss", "ContrastiveLoss"])
def test_a_weighted_mean_is_that_of_all_weights(name):
    loss = make(name, "mean_with_sample_weight")
    labels, x = batch(loss)
    weights = np.linspace(0.0, 2.0, 10).astype("float32")

    def weighted(labels, weights, x):
        return loss(labels, x, sample_weight=weights)

    expected = sum_and_gradient(weighted, (labels, weights, x), [10])[1]
    assert_close(sum_and_gradient(weighted, (labels, weights, x), [7, 3])[1], expected)
