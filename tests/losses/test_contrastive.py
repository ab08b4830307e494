"""Contrastive, binomial deviance, margin, ranked list and VICReg losses."""

import numpy as np
import pytest
import tensorflow as tf

from tests import references as plain_references
from tests.losses import references
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
from tests.mathematics import (
    DEGENERATE,
    assert_close,
    degenerate_batches,
    finite_differences,
    random_batch,
    value_and_gradients,
)
from tfdml import losses
from tfdml.losses import MarginLoss, RankedListLoss, VICRegLoss

# Margins that leave some negatives of random unit vectors inside and some outside.
MARGINS = {"euclidean": 1.3, "sqeuclidean": 1.9, "cosine": 0.9, "dot": 0.1}


def contrastive(kind, average, reduction):
    loss = losses.ContrastiveLoss(
        margin=MARGINS[kind],
        distance=kind,
        average=average,
        reduction="sum" if reduction == "sum" else "sum_over_batch_size",
    )
    return loss, lambda y, x: plain_references.contrastive(y, x, MARGINS[kind], kind, average, reduction)


def binomial(alpha, beta, cost, reduction):
    loss = losses.BinomialDevianceLoss(
        alpha, beta, cost, reduction="sum" if reduction == "sum" else "sum_over_batch_size"
    )
    return loss, lambda y, x: plain_references.binomial(y, x, alpha, beta, cost, reduction)


def cosine_contrastive(margin, reduction):
    loss = losses.CosineContrastiveLoss(margin, reduction="sum" if reduction == "sum" else "sum_over_batch_size")
    return loss, lambda y, x: plain_references.cosine_contrastive(y, x, margin, reduction)


CASES = {
    **{
        f"contrastive {kind} {average} {reduction}": contrastive(kind, average, reduction)
        for kind in MARGINS
        for average in ("active", "all")
        for reduction in ("mean", "sum")
    },
    "cosine contrastive mean": cosine_contrastive(0.5, "mean"),
    "cosine contrastive sum": cosine_contrastive(-0.1, "sum"),
    "binomial mean": binomial(2.0, 0.5, 25.0, "mean"),
    "binomial sum": binomial(2.0, 0.5, 25.0, "sum"),
    "binomial even": binomial(5.0, 0.0, 1.0, "mean"),
}
every_case = pytest.mark.parametrize(("loss", "reference"), CASES.values(), ids=CASES)


def rounding(loss):
    """What the gradients of a batch's pairs, that should cancel, leave in float32: a few units in the last place."""
    steepest = loss.alpha * max(loss.negative_cost, 1.0) if isinstance(loss, losses.BinomialDevianceLoss) else 2.0
    pairs = 30.0 if loss.reduction == "sum" else 1.0
    return 4 * float(np.finfo("float32").eps) * steepest * pairs


@every_case
def test_equals_the_formula(loss, reference):
    for seed, (size, classes, dim) in enumerate([(2, 2, 3), (8, 3, 5), (12, 2, 2), (15, 6, 16), (9, 9, 4), (6, 1, 4)]):
        labels, x = random_batch(seed, size, classes, dim)
        # Near a cosine of 1 or a distance of 0, float32 carries about 1e-7 of the unit, hence the floor.
        assert_close(loss(labels, x), reference(labels, x), floor=1e-6)


@every_case
def test_equals_the_formula_on_vectors_of_any_length(loss, reference):
    labels, x = random_batch(5, 10, 3, 6, unit=False)
    assert_close(loss(labels, x), reference(labels, x))


@every_case
@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_gradient_equals_finite_differences(loss, reference, mode):
    labels, x = random_batch(11, 7, 3, 4)
    value, (gradient,) = value_and_gradients(lambda e: loss(labels, e), x, mode=mode)
    (expected,) = finite_differences(lambda e: reference(labels, e), x)
    assert_close(value, reference(labels, x))
    assert_close(gradient, expected)


@every_case
@pytest.mark.parametrize("batch", DEGENERATE)
def test_degenerate_batch_has_the_formula_s_value_and_a_finite_gradient(loss, reference, batch):
    labels, x = degenerate_batches()[batch]
    value, (gradient,) = value_and_gradients(lambda e: loss(labels, e), x)
    assert_close(value, reference(labels, x), floor=1e-6)
    assert np.all(np.isfinite(gradient))
    angular = "cosine" in repr(loss.get_config()) or isinstance(loss, losses.BinomialDevianceLoss)
    if "zero" in batch and angular:
        # The cosine has no derivative at 0; nothing may be learnt there.
        np.testing.assert_array_equal(gradient[np.all(x == 0, axis=1)], 0.0)
    else:
        (expected,) = finite_differences(lambda e: reference(labels, e), x)
        assert_close(gradient, expected, floor=rounding(loss))


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("sum")])
@pytest.mark.parametrize("mode", ["xla"])
def test_degenerate_batches_are_the_same_when_compiled(name, mode):
    loss, _ = CASES[name]

    @tf.function(jit_compile=True, autograph=False)
    def compiled(labels, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(labels, x)
        return value, tape.gradient(value, x)

    for labels, x in degenerate_batches().values():
        value, (gradient,) = value_and_gradients(lambda e, labels=labels: loss(labels, e), x)
        jit_value, jit_gradient = compiled(tf.constant(labels, tf.int64), tf.constant(x))
        assert_close(jit_value, value, floor=1e-6)
        assert_close(jit_gradient, gradient, floor=rounding(loss))


@every_case
def test_one_image_teaches_nothing(loss, reference):
    value, (gradient,) = value_and_gradients(lambda e: loss([3], e), np.ones((1, 4)))
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


@every_case
def test_order_of_the_images_does_not_matter(loss, reference):
    labels, x = random_batch(2, 12, 4, 6)
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_allclose(loss.call(labels[order], x[order]), np.asarray(loss.call(labels, x))[order], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "contrastive euclidean active mean",
        "contrastive cosine all sum",
        "cosine contrastive mean",
        "binomial mean",
    ],
)
def test_a_batch_of_four_thousand(name):
    labels, x = random_batch(0, 4096, 100, 128)
    value, (gradient,) = value_and_gradients(lambda e: CASES[name][0](labels, e), x)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))
    assert np.any(gradient)


def test_active_average_keeps_the_push_of_the_few():
    x = np.array([[0.0, 0], [0.5, 0], [9, 0], [0, 9]], "float32")
    labels = [0, 1, 2, 3]
    assert_close(losses.ContrastiveLoss(1.0, "euclidean", "active")(labels, x), 0.5)
    assert_close(losses.ContrastiveLoss(1.0, "euclidean", "all")(labels, x), 0.5 / 6)


def test_worked_examples_of_the_docstrings():
    embeddings = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], "float32")
    assert_close(losses.ContrastiveLoss(margin=1.0)([0, 0, 1], embeddings), 1.4)
    assert_close(losses.CosineContrastiveLoss(0.5)([0, 0, 1], embeddings), 0.23)
    assert_close(losses.BinomialDevianceLoss()([0, 0], [[1.0, 0.0], [1.0, 0.0]]), 0.3132617, 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"distance": "l2"}, "distance must be one of"), ({"average": "hard"}, "average must be 'active' or 'all'")],
)
def test_unknown_options_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        losses.ContrastiveLoss(**arguments)


@pytest.mark.parametrize(
    ("margin", "message"),
    [(-1.1, "at least -1 and at most 1"), (2.0, "at least -1 and at most 1"), (float("nan"), "a finite number")],
)
def test_a_margin_that_is_no_cosine_is_refused(margin, message):
    with pytest.raises(ValueError, match=f"margin must be {message}"):
        losses.CosineContrastiveLoss(margin)


def test_positives_are_pulled_the_harder_the_farther_they_are():
    near, far = np.array([[1.0, 0.0], [0.8, 0.6]], "float32"), np.array([[1.0, 0.0], [0.0, 1.0]], "float32")
    assert_close(losses.CosineContrastiveLoss()([0, 0], near), 0.02)
    assert_close(losses.CosineContrastiveLoss()([0, 0], far), 0.5)
    # In the linear form a positive costs its distance.
    assert_close(losses.ContrastiveLoss(0.5, "cosine")([0, 0], far), 1.0)


def cases(alpha, beta):
    def value(labels, x, reduction):
        return references.margin_loss(labels, x, alpha, beta, reduction)

    def frozen(labels, x, reduction):
        probabilities = references.draw_probabilities(labels, x)
        return lambda e: references.margin_loss(labels, e, alpha, beta, reduction, probabilities)

    return both_reductions(f"{alpha} {beta}", MarginLoss, value, frozen, alpha=alpha, beta=beta)


MARGIN_CASES = {**cases(0.2, 1.2), **cases(0.5, 0.9), **cases(0.0, 1.0)}
every_margin_case = pytest.mark.parametrize("case", MARGIN_CASES.values(), ids=MARGIN_CASES)


@every_margin_case
def test_margin_equals_the_formula(case):
    check_formula(case)


@by_mode(MARGIN_CASES)
def test_margin_gradient_equals_finite_differences(case, mode):
    check_gradient(case, mode)


@every_margin_case
def test_contract(case):
    check_contract(case.loss)


@pytest.mark.parametrize("mode", ["eager", "xla"])
def test_degenerate_batches(mode):
    check_degenerate(MARGIN_CASES["0.2 1.2 mean"], mode)


def test_a_batch_without_positives_teaches_nothing():
    check_nothing_to_learn(MarginLoss(), "no positive", "one image", "two images of two classes")


def test_one_class_is_pulled_together():
    x = np.array([[1.0, 0.0], [-1.0, 0.0]], "float32")
    assert_close(MarginLoss()([0, 0], x), 1.0, 1e-6)


@pytest.mark.slow
def test_margin_a_batch_of_four_thousand():
    check_large(MarginLoss())


def test_worked_example_of_the_docstring():
    assert_close(MarginLoss()([0, 0, 1], [[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]), 0.7675445, 1e-6)


def test_a_negative_margin_is_refused():
    with pytest.raises(ValueError, match="alpha must not be negative"):
        MarginLoss(alpha=-0.1)


def ranked_list(*numbers):
    def value(labels, x, reduction):
        return references.ranked_list(labels, x, *numbers, reduction)

    def frozen(labels, x, reduction):
        return lambda e: references.ranked_list(labels, e, *numbers, reduction, frozen=x)

    names = ("margin", "boundary", "negative_temperature", "positive_temperature", "balance")
    arguments = dict(zip(names, numbers, strict=True))
    return both_reductions(f"ranked list {numbers}", RankedListLoss, value, frozen, **arguments)


RANKED_LIST_CASES = {**ranked_list(0.4, 1.2, 10.0, 0.0, 0.5), **ranked_list(0.6, 1.4, 0.0, 3.0, 0.3)}
every_ranked_list_case = pytest.mark.parametrize("case", RANKED_LIST_CASES.values(), ids=RANKED_LIST_CASES)


@every_ranked_list_case
def test_ranked_list_equals_the_formula(case):
    check_formula(case)


@every_ranked_list_case
def test_ranked_list_gradient_equals_finite_differences(case):
    check_gradient(case, "eager")


@every_ranked_list_case
def test_ranked_list_contract(case):
    check_contract(case.loss)


@every_ranked_list_case
def test_ranked_list_degenerate_batches(case):
    check_degenerate(case, "eager")


def test_pairs_on_their_side_of_the_spheres_teach_nothing():
    check_nothing_to_learn(RankedListLoss(), "one image")
    apart = np.array([[0.0, 0.0], [0.5, 0.0], [2.0, 0.0]], "float32")
    np.testing.assert_array_equal(RankedListLoss().call([0, 0, 1], apart), 0.0)


@pytest.mark.slow
def test_ranked_list_a_batch_of_four_thousand():
    check_large(RankedListLoss())


def test_a_boundary_within_the_margin_is_refused():
    with pytest.raises(ValueError, match=r"boundary must be at least 0\.4, not 0\.3"):
        RankedListLoss(margin=0.4, boundary=0.3)
    with pytest.raises(ValueError, match="balance must be at least 0 and at most 1"):
        RankedListLoss(balance=2)


def vic_reg(*numbers):
    def value(labels, x, reduction):
        return references.vic_reg(labels, x, *numbers, reduction)

    names = ("invariance", "variance", "covariance", "deviation")
    return both_reductions(f"vicreg {numbers}", VICRegLoss, value, **dict(zip(names, numbers, strict=True)))


VIC_REG_CASES = {**vic_reg(25.0, 25.0, 1.0, 1.0), **vic_reg(1.0, 0.5, 2.0, 0.3)}
every_vic_reg_case = pytest.mark.parametrize("case", VIC_REG_CASES.values(), ids=VIC_REG_CASES)


@every_vic_reg_case
def test_vic_reg_equals_the_formula(case):
    check_formula(case)


@every_vic_reg_case
def test_vic_reg_gradient_equals_finite_differences(case):
    check_gradient(case, "eager")


@every_vic_reg_case
def test_vic_reg_contract(case):
    check_contract(case.loss)


@every_vic_reg_case
def test_vic_reg_degenerate_batches(case):
    check_degenerate(case, "eager")


@pytest.mark.slow
def test_vic_reg_a_batch_of_four_thousand():
    check_large(VICRegLoss())


def test_each_weight_is_that_of_its_term():
    labels, x = random_batch(2, 10, 3, 4, unit=False)
    terms = [VICRegLoss(*weights)(labels, x) for weights in np.eye(3)]
    assert_close(VICRegLoss(2.0, 3.0, 5.0)(labels, x), np.dot([2.0, 3.0, 5.0], terms))
    # In any place, the coordinates vary alike.
    assert_close(VICRegLoss()(labels, x + 100.0), VICRegLoss()(labels, x), 1e-4)
    # One coordinate alone has no covariance.
    assert float(VICRegLoss(0.0, 0.0, 1.0)(labels, x[:, :1])) == 0.0


def test_the_default_weights_are_those_of_the_authors_code_on_two_views():
    views = np.random.default_rng(3).normal(size=(2, 5, 3)) * 0.5
    views[1] = views[0]  # with equal views, both batches have the statistics of one

    def statistics(z):
        covariances = np.cov(z.T)
        shortfall = np.mean(np.maximum(1 - np.sqrt(np.diag(covariances) + 1e-4), 0))
        return shortfall, (np.sum(covariances**2) - np.sum(np.diag(covariances) ** 2)) / z.shape[1]

    deviations, squares = zip(*map(statistics, views), strict=True)
    authors = 25 * np.mean((views[0] - views[1]) ** 2) + 25 * sum(deviations) / 2 + 1 * sum(squares)
    # Of 10 images in place of 5, a variance is divided by 9 and not by 8.
    batch = np.concatenate(views) * np.sqrt(9 / 8)
    assert_close(VICRegLoss()(np.tile(np.arange(5), 2), batch.astype("float32")), authors)


def test_a_negative_weight_is_refused():
    with pytest.raises(ValueError, match="covariance must not be negative"):
        VICRegLoss(covariance=-1)
