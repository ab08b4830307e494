"""What numeric arguments may be, by themselves and in everything that `--objectives` can name."""

import inspect

import keras
import numpy as np
import pytest

from tests.support.mathematics import public_classes, required_arguments
from tfdml import kernels, layers, losses, mining, objectives
from tfdml.arguments import boolean, integer, number


@pytest.mark.parametrize(
    ("value", "bounds"),
    [(0, {"above": 0}), (-2, {"at_least": -1, "at_most": 1}), (66, {"above": 0, "at_most": 65})],
)
def test_bounds_of_numbers(value, bounds):
    with pytest.raises(ValueError, match="x must be"):
        number("x", value, **bounds)


def test_numbers_of_every_type_become_pythons_own():
    for value in (2, 2.0, np.float32(2), np.int64(2)):
        assert type(number("x", value, at_least=2, at_most=2)) is float
    for value in (2, 2.0, np.int64(2)):
        assert type(integer("x", value, at_least=2, at_most=2)) is int
    assert boolean("x", np.bool_(True)) is True
    with pytest.raises(ValueError, match="at least 2"):
        integer("x", 1, at_least=2)


def _numeric_arguments():
    """Every public class, with each of its arguments whose default is a number or a truth value."""
    modules = (kernels, layers, losses, mining, objectives)
    classes = {cls for module in modules[1:] for cls in public_classes(module).values()}
    classes |= {
        cls
        for _, cls in inspect.getmembers(kernels, inspect.isclass)
        if issubclass(cls, kernels.Kernel)
    }
    for cls in sorted(
        (cls for cls in classes if inspect.isclass(cls)), key=lambda cls: cls.__name__
    ):
        parameters = inspect.signature(cls).parameters
        for parameter in parameters.values():
            if isinstance(parameter.default, (bool, int, float)):
                yield pytest.param(
                    cls, required_arguments(cls), parameter, id=f"{cls.__name__}-{parameter.name}"
                )


@pytest.mark.parametrize(("cls", "required", "parameter"), list(_numeric_arguments()))
def test_every_numeric_argument_is_checked(cls, required, parameter):
    """Also in classes that are added later: NaN, infinity and truth values never pass for
    numbers."""
    truth = isinstance(parameter.default, bool)
    for value in ("maybe", None, 1) if truth else (float("nan"), float("inf"), True, "1"):
        with pytest.raises(ValueError, match=parameter.name):
            cls(**{**required, parameter.name: value})
    made = cls(**{**required, parameter.name: parameter.default})
    assert isinstance(
        made, (keras.layers.Layer, keras.losses.Loss, kernels.Kernel, mining.Miner, mining.Relation)
    )
