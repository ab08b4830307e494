"""What numeric arguments may be, by themselves and in everything that `--objectives` can name."""

import inspect

import keras
import numpy as np
import pytest

from tests.mathematics import public_classes, required_arguments
from tfdml import kernels, layers, losses, mining, objectives
from tfdml.arguments import boolean, integer, number, one_of

NO_NUMBERS = [float("nan"), float("inf"), -float("inf"), True, "1", None, [1.0], 1e39, 10**400, 1j]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_finite_number_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"^margin must be a (finite )?number, not ") as caught:
        number("margin", value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 120
    with pytest.raises(ValueError, match=r"^heads must be an integer, not |^heads must be at most 8, not "):
        integer("heads", 2.5 if value in (1e39, 10**400) else value, at_most=8)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (0, {"above": 0}, "be positive, not 0"),
        (-2, {"at_least": -1, "at_most": 1}, "be at least -1 and at most 1, not -2"),
        (66, {"above": 0, "at_most": 65}, "be above 0 and at most 65, not 66"),
    ],
)
def test_bounds_of_numbers(value, bounds, message):
    with pytest.raises(ValueError, match=f"^x must {message}$"):
        number("x", value, **bounds)


def test_numbers_of_every_type_become_pythons_own():
    for value in (2, 2.0, np.float32(2), np.int64(2)):
        assert type(number("x", value, at_least=2, at_most=2)) is float
        assert number("x", value) == 2.0
    for value in (2, 2.0, np.int64(2)):
        assert type(integer("x", value, at_least=2, at_most=2)) is int
    assert boolean("x", np.bool_(True)) is True


def test_integers_and_truth_values_are_no_others():
    with pytest.raises(ValueError, match="x must be an integer of at least 2"):
        integer("x", 1, at_least=2)
    for value in ("no", 1, None):
        with pytest.raises(ValueError, match="x must be true or false"):
            boolean("x", value)


def _numeric_arguments():
    """Every public class, with each of its arguments whose default is a number or a truth value."""
    modules = (kernels, layers, losses, mining, objectives)
    classes = {cls for module in modules[1:] for cls in public_classes(module).values()}
    classes |= {cls for _, cls in inspect.getmembers(kernels, inspect.isclass) if issubclass(cls, kernels.Kernel)}
    for cls in sorted((cls for cls in classes if inspect.isclass(cls)), key=lambda cls: cls.__name__):
        parameters = inspect.signature(cls).parameters
        for parameter in parameters.values():
            if isinstance(parameter.default, (bool, int, float)):
                yield pytest.param(cls, required_arguments(cls), parameter, id=f"{cls.__name__}-{parameter.name}")


@pytest.mark.parametrize(("cls", "required", "parameter"), list(_numeric_arguments()))
def test_every_numeric_argument_is_checked(cls, required, parameter):
    """Also in classes that are added later: NaN, infinity and truth values never pass for numbers."""
    truth = isinstance(parameter.default, bool)
    for value in ("maybe", None, 1) if truth else (float("nan"), float("inf"), True, "1"):
        with pytest.raises(ValueError, match=parameter.name):
            cls(**{**required, parameter.name: value})
    made = cls(**{**required, parameter.name: parameter.default})
    assert isinstance(made, (keras.layers.Layer, keras.losses.Loss, kernels.Kernel, mining.Miner, mining.Relation))


def test_words_are_of_those_that_there_are():
    assert one_of("mode", "pad", ("shorter", "squash", "pad")) == "pad"
    for wrong in ("Pad", None):
        with pytest.raises(ValueError, match=f"mode must be 'shorter', 'squash' or 'pad', not {wrong!r}"):
            one_of("mode", wrong, ("shorter", "squash", "pad"))
