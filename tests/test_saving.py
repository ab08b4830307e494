"""Losses, objectives, layers and kernels are shown and saved by their arguments."""

import inspect
import json

import keras
import numpy as np
import pytest

from tests.support.mathematics import required_arguments
from tfdml import kernels, layers, losses, objectives
from tfdml.saving import SavedByArguments


def _saved_classes():
    """Every public class that Keras saves by the arguments of its constructor."""
    modules = (kernels, layers, losses, objectives)
    classes = {cls for module in modules for _, cls in inspect.getmembers(module, inspect.isclass)}
    saved = [
        cls
        for cls in classes
        if issubclass(cls, SavedByArguments) and cls.__init__ is not object.__init__
    ]
    return sorted(saved, key=lambda cls: cls.__name__)


def _other(default):
    """Another value than a default, in most ranges."""
    if isinstance(default, bool):
        return not default
    return default + 2 if isinstance(default, int) else 0.75 * default or 0.25


@pytest.mark.parametrize("cls", _saved_classes())
def test_every_argument_is_in_the_config_under_its_name(cls):
    """Also in classes that are added later: an argument that is kept under another name would not
    be saved."""
    named = {
        name: p.default for name, p in inspect.signature(cls).parameters.items() if name != "kwargs"
    }
    required = required_arguments(cls)
    config = cls(**required).get_config()
    assert set(named) <= set(config)
    json.dumps(keras.saving.serialize_keras_object(cls(**required)))
    for name, default in named.items():
        # These are kept otherwise, or bound by another argument.
        if name in (*required, "orders", "label_columns", "strides") or not isinstance(
            default, (bool, int, float)
        ):
            continue
        for value in (default, _other(default)):
            made = cls(**required, **{name: value})
            config = made.get_config()
            # One weight for all orders is kept as one for each.
            assert config[name] == (
                [value] * len(config["orders"]) if name == "order_weights" else value
            ), name
            assert cls.from_config(config).get_config() == config


def test_arrays_and_mappings_are_saved_as_plain_values():
    class Kept(SavedByArguments):
        def __init__(self, array, mapping, *rest, pair, lost=None, **options):
            self.array, self.mapping, self.pair, self.rest, self.options = (
                array,
                mapping,
                pair,
                rest,
                options,
            )

    kept = Kept(
        np.array([[1.0, 2.0]]), {"kernel": kernels.Polynomial(3)}, 4, pair=(1, (2, 3)), more=5
    )
    polynomial = keras.saving.serialize_keras_object(kernels.Polynomial(3))
    assert kept.get_config() == {
        "array": [[1.0, 2.0]],
        "mapping": {"kernel": polynomial},
        "pair": [1, [2, 3]],
    }


def test_arguments_that_a_base_class_takes_are_shown_and_saved():
    @keras.saving.register_keras_serializable("tests.saving")
    class Doubled(losses.ContrastiveLoss):
        fixed = ("margin",)

        def __init__(self, factor=2.0, **kwargs):
            super().__init__(margin=0.5, **kwargs)
            self.factor = factor

    names = ["factor", "distance", "average", "mining", "positives", "reduction", "name"]
    assert list(inspect.signature(Doubled).parameters) == names
    made = Doubled(3.0, average="all", reduction="sum")
    assert repr(made).startswith("Doubled(factor=3.0, distance='sqeuclidean', average='all'")
    config = made.get_config()
    assert (
        config | {"factor": 3.0, "average": "all", "reduction": "sum", "name": "doubled"} == config
    )
    assert Doubled.from_config(config).get_config() == config
