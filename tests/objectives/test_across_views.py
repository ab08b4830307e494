"""Objectives over two views: their definitions, what items of one label are, replicas, dtypes, the learner's step."""

import numpy as np
import pytest

from tests.mathematics import (
    assert_close,
    random_batch,
    value_and_gradients,
)
from tests.objectives.references_views import sigmoid_across, softmax_across
from tests.played_replicas import sum_and_gradient
from tfdml import losses, replicas
from tfdml.objectives import AcrossViews, SigmoidAcrossViews, SoftmaxAcrossViews
from tfdml.pairs import Pairs, Scope

VIEWS = ("embedding", "text_embedding")


def two_views(seed=0, size=8, classes=3, dim=5):
    labels, x = random_batch(seed, size, classes, dim, unit=False)
    return labels, x, random_batch(seed + 50, size, classes, dim, unit=False)[1]


def built(objective, dim=5):
    if not objective.built:
        objective.build_from(dict.fromkeys(VIEWS, (None, dim)))
        objective.built = True
    return objective


def term_of(objective):
    return lambda labels, x, y: objective(dict(zip(VIEWS, (x, y), strict=True)), labels)


def test_published_starting_points():
    softmax, sigmoid = built(SoftmaxAcrossViews()), built(SigmoidAcrossViews())
    assert_close(softmax.log_scale, np.log(1 / 0.07))
    assert_close(sigmoid.log_scale, np.log(10))
    assert_close(sigmoid.offset, -10)


def test_items_of_one_label_or_text_are_never_negatives():
    """Of labels and texts as rows, and each direction: moving them further apart never lowers the loss."""
    rows = np.array([[0, 5], [1, 5], [1, 6], [2, 7]])
    _, x, y = two_views(size=4)
    for cls, reference, extra in (
        (SoftmaxAcrossViews, softmax_across, ()),
        (SigmoidAcrossViews, sigmoid_across, (-10.0,)),
    ):
        objective = built(cls(positives="same_label_or_text"))
        assert_close(term_of(objective)(rows, x, y), reference(rows, x, y, float(objective.log_scale), *extra))


@pytest.mark.parametrize(
    "loss",
    [
        losses.ContrastiveLoss(1.3, "euclidean", reduction="sum"),
        losses.TripletLoss(0.2, "all", reduction="sum"),
        losses.CircleLoss(reduction="sum"),
        losses.MultiSimilarityLoss(reduction="sum"),
        losses.SupConLoss(reduction="sum"),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_any_pair_loss_compares_the_views(loss):
    """Anchors of one view, references of the other: a batch of both views, without pairs within a view."""
    labels, x, y = two_views()
    value, gradients = value_and_gradients(lambda a, b: term_of(AcrossViews(loss))(labels, a, b), x, y)
    expected, of_the_other = 0.0, np.tile(np.arange(16) < 8, (8, 1))
    for anchors, others in ((x, y), (y, x)):
        pairs = Pairs.of_batch(np.concatenate([others, anchors]), np.tile(labels, 2), scope=Scope(8, 8))
        expected += float(loss.of_pairs(pairs.keep(of_the_other, of_the_other))) / 2
    assert_close(value, expected)
    assert all(np.any(gradient) for gradient in gradients)


@pytest.mark.parametrize("make", [SoftmaxAcrossViews, lambda: AcrossViews(losses.TripletLoss(0.3))])
def test_on_replicas_it_is_that_of_the_global_batch(make):
    labels, x, y = two_views(size=9)
    objective = built(make())

    def of_replica(own_labels, both):
        views = {name: replicas.gather(both[:, i]) for i, name in enumerate(VIEWS)}
        return objective.term(views, replicas.gather(own_labels), Scope.of_replica(len(own_labels))).share

    arrays = labels, np.stack([x, y], axis=1)
    alone = sum_and_gradient(of_replica, arrays, [9])
    for sizes in ([5, 4], [3, 1, 5]):
        for actual, expected in zip(sum_and_gradient(of_replica, arrays, sizes), alone, strict=True):
            assert_close(actual, expected)
