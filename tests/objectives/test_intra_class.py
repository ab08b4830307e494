"""The penalty on distances within classes."""

import numpy as np
import pytest

from tests import references
from tests.mathematics import assert_close
from tests.objectives.checks import (
    check_config,
    check_degenerate,
    check_formula,
    check_gradient,
    check_labels,
    check_large,
    check_nothing_to_learn,
    check_symmetries,
)
from tfdml.objectives import IntraClassPenalty
from tfdml.training.terms import build_objectives

every_mode = pytest.mark.parametrize("mode", ["eager", "xla"])
both_reductions = pytest.mark.parametrize("reduction", ["mean", "sum"])


def penalty(reduction="mean"):
    objective = IntraClassPenalty(reduction=reduction)
    return lambda labels, x: objective({"embedding": x}, labels)


def reference(reduction):
    return lambda labels, x: references.intra_class_penalty(labels, x, reduction)


@both_reductions
def test_equals_the_paper(reduction):
    check_formula(penalty(reduction), reference(reduction))


@both_reductions
@every_mode
def test_gradient_equals_finite_differences(reduction, mode):
    check_gradient(penalty(reduction), reference(reduction), mode)


@pytest.mark.one_quick_case
@both_reductions
@every_mode
def test_degenerate_batches(reduction, mode):
    check_degenerate(penalty(reduction), reference(reduction), mode)
    check_nothing_to_learn(penalty(reduction), "one image", "two images of two classes")


def test_neither_order_nor_names_nor_axes_count():
    check_symmetries(penalty("sum"))
    check_labels(penalty("sum"))


@pytest.mark.slow
def test_a_batch_of_four_thousand():
    check_large(penalty("sum"))


def test_every_class_counts_once_whatever_its_size():
    labels = [0] * 5 + [1] * 2
    x = np.array([[0.0], [1.0], [2.0], [3.0], [4.0], [0.0], [0.5]], "float32")
    alone = [penalty("sum")([c] * len(part), part) for c, part in ((0, x[:5]), (1, x[5:]))]
    assert_close(penalty("sum")(labels, x), sum(float(value) for value in alone))


@pytest.mark.parametrize(("name", "reduction"), [("embedding", "mean"), ("pooled", "sum")])
def test_configuration_restores_it(name, reduction):
    check_config(IntraClassPenalty(name, reduction, weight=0.3))


def test_command_line_makes_it():
    _, objective = build_objectives("am_softmax + 0.5 * intra_class_penalty(reduction=sum)", 4)
    assert isinstance(objective, IntraClassPenalty)
    assert (objective.weight, objective.reduction) == (0.5, "sum")


def test_another_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum'"):
        IntraClassPenalty(reduction="max")
