"""Objectives over two views: their definitions, what items of one label are, replicas, dtypes, the
learner's step."""

import numpy as np
import pytest

from tests.objectives.references_views import sigmoid_across, softmax_across
from tests.support.mathematics import (
    assert_close,
    random_batch,
    value_and_gradients,
)
from tests.support.played_replicas import sum_and_gradient
from tfdml import losses, mining, replicas
from tfdml.objectives import AcrossViews, SigmoidAcrossViews, SoftmaxAcrossViews
from tfdml.objectives.terms import build_objectives
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
    # What the bounds of training would change at once.
    for scale in (0.5, 100.5):
        with pytest.raises(
            ValueError, match=f"scale must be at least 1 and at most 100, not {scale}"
        ):
            SoftmaxAcrossViews(scale=scale)
    assert_close(sigmoid.offset, -10)


def test_items_of_one_label_or_text_are_never_negatives():
    """Of labels and texts as rows, and each direction: moving them further apart never lowers the
    loss."""
    rows = np.array([[0, 5], [1, 5], [1, 6], [2, 7]])
    _, x, y = two_views(size=4)
    for cls, reference, extra in (
        (SoftmaxAcrossViews, softmax_across, ()),
        (SigmoidAcrossViews, sigmoid_across, (-10.0,)),
    ):
        for shared in ("positive", "left_out"):
            objective = built(cls(shared=shared, positives="same_label_or_text"))
            numbers = [float(objective.log_scale), *extra]
            assert_close(
                term_of(objective)(rows, x, y), reference(rows, x, y, *numbers, shared=shared)
            )


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
    """Anchors of one view, references of the other: a batch of both views, without pairs within a
    view."""
    labels, x, y = two_views()
    value, gradients = value_and_gradients(
        lambda a, b: term_of(AcrossViews(loss))(labels, a, b), x, y
    )
    expected, of_the_other = 0.0, np.tile(np.arange(16) < 8, (8, 1))
    for anchors, others in ((x, y), (y, x)):
        pairs = Pairs.of_batch(
            np.concatenate([others, anchors]), np.tile(labels, 2), scope=Scope(8, 8)
        )
        expected += float(loss.of_pairs(pairs.keep(of_the_other, of_the_other))) / 2
    assert_close(value, expected)
    assert all(np.any(gradient) for gradient in gradients)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SoftmaxAcrossViews(dims=[2, 5], dim_weights=[0.5, 1.0]),
        lambda: AcrossViews(losses.TripletLoss(0.3)),
    ],
    ids=["prefixes", "triplets"],
)
def test_on_replicas_it_is_that_of_the_global_batch(make):
    labels, x, y = two_views(size=9)
    objective = built(make())

    def of_replica(own_labels, both):
        views = {name: replicas.gather(both[:, i]) for i, name in enumerate(VIEWS)}
        return objective.term(
            views, replicas.gather(own_labels), Scope.of_replica(len(own_labels))
        ).share

    arrays = labels, np.stack([x, y], axis=1)
    alone = sum_and_gradient(of_replica, arrays, [9])
    for sizes in ([5, 4], [3, 1, 5]):
        for actual, expected in zip(
            sum_and_gradient(of_replica, arrays, sizes), alone, strict=True
        ):
            assert_close(actual, expected)


def test_prefixes_of_both_views_add_up():
    labels, x, y = two_views()
    value = term_of(built(SoftmaxAcrossViews(dims=[2, 5], dim_weights=[0.5, 2.0])))(labels, x, y)
    parts = [softmax_across(labels, x[:, :dim], y[:, :dim], np.log(1 / 0.07)) for dim in (2, 5)]
    assert_close(value, 0.5 * parts[0] + 2 * parts[1])


def test_names_of_expressions_and_a_relation_from_the_data():
    terms = build_objectives(
        "clip + 0.5 * siglip(shared=left_out) + across_views(loss=triplet(margin=0.2))"
    )
    assert [type(term) for term in terms] == [SoftmaxAcrossViews, SigmoidAcrossViews, AcrossViews]
    terms = build_objectives(
        "clip + across_views(loss=contrastive)", relation=mining.same_label_or_text, columns=2
    )
    assert all(term.positives is mining.same_label_or_text for term in terms)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="views must name two representations"):
        SoftmaxAcrossViews(views=("embedding", "embedding"))
    with pytest.raises(ValueError, match="shared must be 'positive' or 'left_out'"):
        SigmoidAcrossViews(shared="negative")
    with pytest.raises(ValueError, match="compares anchors with one another"):
        AcrossViews(losses.AngularLoss())
    with pytest.raises(ValueError, match="no loss over pairs"):
        AcrossViews(losses.AMSoftmaxLoss())
    with pytest.raises(ValueError, match="of one size"):
        SoftmaxAcrossViews().build_from({"embedding": (None, 4), "text_embedding": (None, 5)})
    with pytest.raises(ValueError, match="there are 5 dimensions"):
        built(SoftmaxAcrossViews(dims=[2, 6]))
