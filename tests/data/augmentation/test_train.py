"""Resizing as Pillow does it, crops in their places, and every random choice a function of the draws alone."""

import json

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tfdml.data.augmentation.train import EvaluationTransform, TrainTransform
from tfdml.errors import UserError

KINDS = ("random_crop", "random_resized_crop", "none")


def picture(height, width, seed=0):
    """Smooth shapes and some noise, like a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    return np.clip(np.asarray(coarse) + rng.normal(0, 10, (height, width, 3)), 0, 255).astype(np.uint8)


def places():
    """An image whose pixels say where they are: (row, column, 0)."""
    return np.stack([*np.mgrid[0:60, 0:80], np.zeros((60, 80), int)], -1).astype(np.uint8)


@pytest.mark.parametrize(("height", "width"), [(192, 192), (100, 333), (333, 100), (20, 31), (64, 64), (97, 64)])
@pytest.mark.parametrize("mode", ["shorter", "squash"])
def test_evaluation_is_pillows_bilinear_resize_and_a_central_crop(mode, height, width):
    image = picture(height, width)
    size = (64, 64)
    if mode == "shorter":
        size = (round(64 * height / min(height, width)), round(64 * width / min(height, width)))
    resized = np.asarray(Image.fromarray(image).resize(size[::-1], Image.BILINEAR)).astype(int)
    top, left = (size[0] - 56) // 2, (size[1] - 56) // 2
    expected = resized[top : top + 56, left : left + 56]
    result = EvaluationTransform(resize=64, image_size=56, resize_mode=mode)(tf.constant(image)).numpy()
    assert result.dtype == np.uint8
    assert result.shape == (56, 56, 3)
    # Pillow rounds between its two passes as well.
    difference = result - expected
    assert np.abs(difference).max() <= 1
    assert np.abs(difference).mean() < 0.25
    assert abs(difference.mean()) < 0.03


def test_evaluation_in_a_graph_of_unknown_sizes_and_over_batches():
    """The serving graph knows no sizes; it must give the pixels of the input pipeline."""
    transform = EvaluationTransform(resize=48, image_size=40)
    one = tf.function(transform, input_signature=[tf.TensorSpec((None, None, 3), tf.uint8)], autograph=False)
    many = tf.function(transform, input_signature=[tf.TensorSpec((None, None, None, 3), tf.uint8)], autograph=False)
    mapped = tf.function(lambda batch: tf.map_fn(transform, batch), autograph=False)
    assert one.get_concrete_function().output_shapes.as_list() == [40, 40, 3]
    assert many.get_concrete_function().output_shapes.as_list() == [None, 40, 40, 3]
    for size in ((70, 50), (48, 48), (48, 90)):
        batch = np.stack([picture(*size, seed) for seed in range(3)])
        eager = np.stack([transform(tf.constant(image)) for image in batch])
        np.testing.assert_array_equal(many(batch), eager)
        np.testing.assert_array_equal(transform(tf.constant(batch)), eager)
        np.testing.assert_array_equal(mapped(batch), eager)
        np.testing.assert_array_equal(one(batch[1]), eager[1])


def test_images_of_the_right_size_are_left_alone():
    image = picture(64, 91)
    result = EvaluationTransform(resize=64, image_size=64)(tf.constant(image))
    np.testing.assert_array_equal(result, image[:, 13 : 13 + 64])


@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from(KINDS), st.sampled_from(["shorter", "squash"]))
@settings(max_examples=60, deadline=None)
def test_every_size_of_image_gives_the_crop(height, width, kind, mode):
    image = tf.constant(picture(height, width))
    transform = TrainTransform(kind, resize=24, image_size=20, resize_mode=mode)
    result = transform(image, transform.draw(0, height * 100 + width, 1)[0])
    assert result.shape == (20, 20, 3)
    assert result.dtype == tf.uint8
    assert EvaluationTransform(24, 20, mode)(image).shape == (20, 20, 3)


def test_draws_are_a_pure_function_of_seed_step_and_position():
    transform = TrainTransform("random_resized_crop")
    draws = transform.draw(3, 70_000_000_000, 16).numpy()
    np.testing.assert_array_equal(transform.draw(3, 70_000_000_000, 16), draws)
    np.testing.assert_array_equal(transform.draw(3, 70_000_000_000, 5), draws[:5])
    assert len(np.unique(draws)) == draws.size
    for other in (transform.draw(4, 70_000_000_000, 16), transform.draw(3, 70_000_000_001, 16)):
        assert not np.isin(other, draws).any()
    assert draws.min() >= 0
    assert draws.max() < 1


def test_the_bits_of_a_seed_do_not_change():
    """A resumed run of an older version must get the same augmentation."""
    expected = [
        [0.39551544189453125, 0.5190510749816895, 0.04291415214538574],
        [0.7309041023254395, 0.4187159538269043, 0.6553961038589478],
    ]
    np.testing.assert_array_equal(TrainTransform().draw(7, 4, 2), np.array(expected, np.float32))


def test_random_crops_reach_every_place_evenly():
    transform = TrainTransform("random_crop", resize=60, image_size=57, flip=False)
    draws = transform.draw(0, 0, 2000)
    crops = transform.vary_batch(tf.repeat(places()[None], 2000, axis=0), draws)[:, 0, 0].numpy()
    rows = np.bincount(crops[:, 0], minlength=4)
    columns = np.bincount(crops[:, 1], minlength=24)
    assert len(rows) == 4
    assert len(columns) == 24
    np.testing.assert_allclose(rows / 2000, 1 / 4, atol=0.05)
    np.testing.assert_allclose(columns / 2000, 1 / 24, atol=0.02)


def test_the_last_draw_below_one_stays_inside():
    """In float32, 0.99999994 times the room plus one can round up to a place outside the image."""
    largest = np.nextafter(np.float32(1), np.float32(0))
    transform = TrainTransform("random_crop", resize=60, image_size=57)
    crop = transform(tf.constant(places()), tf.fill((3,), largest))
    assert crop[0, 0].numpy().tolist() == [3, 23, 0]
    wide = tf.zeros((60, 4000, 3), tf.uint8)
    assert transform.vary(wide, tf.fill((3,), largest)).shape == (57, 57, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_half_of_the_images_are_mirrored_and_nothing_else_changes(kind):
    image = tf.constant(picture(60, 80))
    flipping = TrainTransform(kind, resize=60, image_size=50)
    plain = TrainTransform(kind, resize=60, image_size=50, flip=False)
    mirrored = []
    for draw in flipping.draw(1, 0, 60):
        expected = plain(image, draw).numpy()
        result = flipping(image, draw).numpy()
        mirrored.append(not np.array_equal(result, expected))
        np.testing.assert_array_equal(result, expected[:, ::-1] if mirrored[-1] else expected)
    assert 18 <= sum(mirrored) <= 42


def test_none_is_the_evaluation_view():
    image = tf.constant(picture(70, 110))
    transform = TrainTransform("none", resize=60, image_size=50, flip=False)
    np.testing.assert_array_equal(transform(image, transform.draw(0, 0, 1)[0]), EvaluationTransform(60, 50)(image))


@pytest.mark.slow
def test_random_resized_crop_is_pillows_resize_of_a_part_within_bounds():
    image = places()
    transform = TrainTransform("random_resized_crop", image_size=30, flip=False, scale=(0.2, 0.5))
    areas, ratios = [], []
    for draw in transform.draw(0, 0, 300):
        result = transform(tf.constant(image), draw).numpy().astype(int)
        # Rows and columns can be read off the pixels, give or take the rounding of their edges.
        height = (result[-1, 0, 0] - result[0, 0, 0]) * 30 / 29
        width = (result[0, -1, 1] - result[0, 0, 1]) * 30 / 29
        areas.append(height * width / (60 * 80))
        ratios.append(width / height)
    assert 0.17 < min(areas) < 0.23
    assert 0.47 < max(areas) < 0.54
    assert np.mean(areas) == pytest.approx(0.35, abs=0.02)
    assert 0.68 < min(ratios) < 0.8
    assert 1.25 < max(ratios) < 1.45
    assert np.mean(np.log(ratios)) == pytest.approx(0, abs=0.04)


@pytest.mark.parametrize("ratio", [(1.5, 2.5), (0.4, 0.6)])
def test_the_ratio_of_a_random_resized_crop_is_width_to_height(ratio):
    transform = TrainTransform("random_resized_crop", image_size=30, scale=(0.2, 0.4), ratio=ratio)
    windows = np.array([transform.window(tf.constant([400, 400]), draw) for draw in transform.draw(0, 0, 50)])
    ratios = windows[:, 3] / windows[:, 2]
    assert ratio[0] - 0.02 < ratios.min() < ratios.max() < ratio[1] + 0.02


def test_random_resized_crop_of_an_image_that_no_try_fits_is_central():
    image = np.zeros((10, 200, 3), np.uint8)
    image[:, :, 0] = np.arange(200)
    transform = TrainTransform("random_resized_crop", image_size=16, flip=False, scale=(0.9, 1.0))
    result = transform(tf.constant(image), transform.draw(0, 0, 1)[0]).numpy()[..., 0]
    assert result.mean() == pytest.approx(99.5, abs=1.0)
    assert result[0, -1] - result[0, 0] == pytest.approx(13, abs=1.5)


@pytest.mark.parametrize("kind", ["random_crop", "none"])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("shape", [(None, None, None, 3), (9, 60, 80, 3)])
def test_a_batch_at_once_is_bit_equal_with_one_by_one(kind, flip, shape):
    transform = TrainTransform(kind, resize=40, image_size=31, flip=flip)
    images = np.stack([picture(60, 80, seed) for seed in range(9)])
    draws = transform.draw(0, 5, 9)
    together = tf.function(
        lambda batch, draws: transform.vary_batch(transform.prepare(batch), draws),
        input_signature=[tf.TensorSpec(shape, tf.uint8), tf.TensorSpec((shape[0], 3), tf.float32)],
        autograph=False,
    )(images, draws)
    alone = [transform(tf.constant(image), draw) for image, draw in zip(images, draws, strict=True)]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_prepared_is_prepared_once(kind):
    transform = TrainTransform(kind, resize=40, image_size=31)
    prepared = transform.prepare(tf.constant(picture(60, 81)))
    np.testing.assert_array_equal(transform.prepare(prepared), prepared)


@pytest.mark.parametrize(
    "transform",
    [
        EvaluationTransform(100, 90, "squash"),
        TrainTransform("random_resized_crop", image_size=90, scale=(0.2, 0.9), flip=False),
        TrainTransform("random_crop", 120, 100),
    ],
)
def test_config_round_trip_through_json(transform):
    config = json.loads(json.dumps(transform.get_config()))
    assert type(transform).from_config(config) == transform


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EvaluationTransform(resize=200, image_size=224),
            "but is 224, and resize is 200",
        ),
        (lambda: EvaluationTransform(image_size=0), "but is 0"),
        (lambda: EvaluationTransform(resize_mode="longer"), "shorter, squash, not 'longer'"),
        (lambda: TrainTransform("colour"), "random_crop, random_resized_crop, none, not 'colour'"),
        (lambda: TrainTransform("random_resized_crop", scale=(0, 1)), "scale must be"),
        (lambda: TrainTransform("random_resized_crop", ratio=(2, 1)), "ratio must be"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_random_resized_crop_does_not_ask_for_a_matching_resize():
    assert TrainTransform("random_resized_crop", resize=100, image_size=224).image_size == 224
