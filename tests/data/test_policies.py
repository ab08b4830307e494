"""Policies by name: repeatable bit by bit, and each does something, to the share of the images that
it is asked for."""

import numpy as np
import pytest
import tensorflow as tf

from tests.data.test_transforms import picture
from tfdml.data import policies
from tfdml.data.policies import Policy, Step
from tfdml.data.transforms import TrainTransform
from tfdml.errors import UserError
from tfdml.registry import VARIABLE

# Pale, so that stretching contrasts changes it.
IMAGE = tf.constant((picture(32, 32) * 0.75 + 30).astype(np.uint8))
QUICK = Policy((Step("erasing"), Step("grayscale", rate=0.5), Step("rotation")))


def keys(count, seed=0):
    return tf.constant(np.random.default_rng(seed).integers(0, 2**46, (count, 2)))


@pytest.mark.one_quick_case
@pytest.mark.parametrize("name", policies.names())
def test_every_policy_is_a_function_of_the_key_and_does_something(name):
    policy = Policy((Step(name),))
    found = [policy(IMAGE, key).numpy() for key in keys(8)]
    again = [policy(IMAGE, key).numpy() for key in reversed(keys(8))][::-1]
    np.testing.assert_array_equal(found, again)
    assert all(image.dtype == np.uint8 and image.shape == (32, 32, 3) for image in found)
    assert sum(not np.array_equal(image, IMAGE) for image in found) >= 4
    # Neither black nor white: pixels of 0-255 were understood as such.
    assert all(20 < image.mean() < 235 for image in found)
    fixed = ("grayscale",)
    assert len({image.tobytes() for image in found}) >= (1 if name in fixed else 4)


def test_a_step_may_be_any_keras_layer_by_its_import_path():
    text = "keras.layers.RandomRotation(factor=0.1) + 0.5 * keras.layers.Dropout(rate=0.2)"
    policy = Policy.of(text)
    assert str(policy) == text
    assert TrainTransform(resize=8, image_size=8, policy=text).policy == policy
    images = [policy(IMAGE, key).numpy() for key in keys(8)]
    np.testing.assert_array_equal(
        images, [policy(IMAGE, key).numpy() for key in reversed(keys(8))][::-1]
    )
    assert len({image.tobytes() for image in images}) == 8
    rotation = Policy.of("rotation(factor=0.1)")
    np.testing.assert_array_equal(
        Policy.of("keras.layers.RandomRotation(factor=0.1)")(IMAGE, keys(1)[0]),
        rotation(IMAGE, keys(1)[0]),
    )
    # A layer of colors takes three channels and no other number.
    assert Policy.of("keras.layers.RandomHue(factor=0.1)")(IMAGE, keys(1)[0]).shape == IMAGE.shape


def test_the_steps_of_a_policy_draw_independently_each_for_its_share():
    policy = Policy(
        (
            Step("grayscale", rate=0.3),
            Step("keras.layers.RandomPosterization", {"factor": [1, 1]}, rate=0.5),
        )
    )
    gray, coarse = [], []
    for key in keys(200):
        image = policy(IMAGE, key).numpy()
        gray.append((image[..., 0] == image[..., 1]).all())
        coarse.append(len(np.unique(image)) <= 6)
    assert [np.mean(gray), np.mean(coarse)] == pytest.approx([0.3, 0.5], abs=0.1)
    assert np.mean(np.array(gray) == np.array(coarse)) == pytest.approx(0.5, abs=0.12)


@pytest.mark.parametrize("kind", ["random_crop", "random_resized_crop", "multi_resolution"])
def test_a_policy_leaves_the_crops_where_they_are_and_draws_by_itself(kind):
    plain, varied = (
        TrainTransform(kind, resize=24, image_size=20, policy=policy) for policy in (None, QUICK)
    )
    expected, draws = plain.draw(3, 7, 16).numpy(), varied.draw(3, 7, 16).numpy()
    width = expected.shape[1]
    np.testing.assert_array_equal(draws[:, :width], expected)
    assert draws.shape[1] > width
    assert not np.isin(draws[:, width:], expected).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainTransform(policy="rainbow"), "policy"),
        (lambda: Step("blur", rate=1.5), "share"),
        (lambda: Policy((Step("erasing", {"size": 3}),)), "erasing"),
        (lambda: Policy((Step("keras.ops.add"),)), "no Keras layer"),
    ],
)
def test_wrong_policies_are_refused_before_the_first_batch(make, message, monkeypatch):
    monkeypatch.setenv(VARIABLE, "keras.ops")
    with pytest.raises(UserError, match=message):
        make()
