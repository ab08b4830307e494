"""Losses, objectives and kernels show their arguments."""

import keras
import pytest

from tfdml import kernels, losses, objectives
from tfdml.saving import in_words, restore

SHOWN = [
    (kernels.Polynomial(degree=3), "Polynomial(degree=3)"),
    (losses.NPairLoss(l2=0.5), "NPairLoss(name='n_pair_loss', reduction='sum_over_batch_size', l2=0.5, scale=None)"),
    (
        objectives.MetricLoss(losses.NPairLoss(reduction="sum"), weight=2, name="term"),
        "MetricLoss(name='term', weight=2.0, loss=NPairLoss(name='n_pair_loss', reduction='sum', l2=0.0, scale=None), "
        "representation='embedding')",
    ),
    (
        objectives.JointRepresentationSimilarity("embedding", kernels.Polynomial(degree=3), name="jrs"),
        "JointRepresentationSimilarity(name='jrs', weight=1.0, levels=['embedding'], "
        "kernels={'embedding': Polynomial(degree=3)}, unit_length=[], reduction='mean')",
    ),
]


@pytest.mark.parametrize(("value", "text"), SHOWN)
def test_arguments_are_shown(value, text):
    assert repr(value) == text


def test_what_is_shown_of_the_same_config_is_the_same():
    loss = losses.MultiSimilarityLoss(alpha=3.0)
    again = type(loss).from_config(loss.get_config())
    assert repr(again) == repr(loss)
    assert "alpha=3.0" in repr(loss)
    assert repr(again) != repr(losses.MultiSimilarityLoss())


def test_plain_values_are_left_alone():
    assert restore(3) == 3
    assert restore({"a": 1}) == {"a": 1}
    assert isinstance(restore(keras.saving.serialize_keras_object(losses.NPairLoss())), losses.NPairLoss)


def test_nested_containers():
    class Nested:
        def get_config(self):
            return {"parts": [{"a": (1, "b")}], "dtype": "float32"}

    assert in_words(Nested()) == "Nested(parts=[{'a': (1, 'b')}])"
