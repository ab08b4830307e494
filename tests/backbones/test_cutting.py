import keras
import numpy as np
import pytest

from tests.models.ensembles import cuttable_backbone
from tests.models.networks import images
from tests.support.mathematics import assert_close
from tfdml import backbones

IMAGES = images() / np.float32(255)


@pytest.mark.parametrize("at", ["first", "second", "third"])
def test_the_parts_make_the_whole_and_share_its_weights(at):
    model = cuttable_backbone()
    trunk, rest = backbones.cut(model, at)
    assert_close(rest(trunk(IMAGES)), model(IMAGES), 1e-6)
    assert_close(trunk(IMAGES), keras.Model(model.input, model.get_layer(at).output)(IMAGES), 1e-6)
    assert {id(w) for w in [*trunk.weights, *rest.weights]} == {id(w) for w in model.weights}
    model.get_layer("third_conv").kernel.assign(
        keras.ops.zeros_like(model.get_layer("third_conv").kernel)
    )
    assert_close(rest(trunk(IMAGES)), model(IMAGES), 1e-6)


def test_a_model_can_be_cut_again_and_again_and_is_saved_as_before(tmp_path):
    model = cuttable_backbone()
    config = model.get_config()
    _, rest = backbones.cut(model, "first")
    middle, end = backbones.cut(rest, "second")
    trunk, _ = backbones.cut(model, "first")
    assert_close(end(middle(trunk(IMAGES))), model(IMAGES), 1e-6)
    assert model.get_config() == config
    model.save(tmp_path / "x.keras")
    assert_close(keras.saving.load_model(tmp_path / "x.keras")(IMAGES), model(IMAGES), 1e-6)


@pytest.mark.parametrize(
    ("at", "message"), [("frist", "near: first"), ("second_conv", "past"), ("last", "one side")]
)
def test_places_that_cannot_be_cut_are_named(at, message):
    with pytest.raises(ValueError, match=message):
        backbones.cut(cuttable_backbone(), at)
