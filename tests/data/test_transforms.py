"""Resizing as Pillow does it, crops in their places, and every random choice a function of the
draws alone."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tfdml.data.transforms import (
    EvaluationTransform,
    TrainTransform,
    resize,
)
from tfdml.errors import UserError

KINDS = ("random_crop", "random_resized_crop", "none")


def picture(height, width, seed=0):
    """Smooth shapes and some noise, like a photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(
        (width, height), Image.BICUBIC
    )
    return np.clip(np.asarray(coarse) + rng.normal(0, 10, (height, width, 3)), 0, 255).astype(
        np.uint8
    )


def places():
    """An image whose pixels say where they are: (row, column, 0)."""
    return np.stack([*np.mgrid[0:60, 0:80], np.zeros((60, 80), int)], -1).astype(np.uint8)


@pytest.mark.parametrize(
    ("height", "width"), [(192, 192), (100, 333), (333, 100), (20, 31), (64, 64), (97, 64)]
)
@pytest.mark.parametrize("mode", ["shorter", "squash"])
def test_evaluation_is_pillows_bilinear_resize_and_a_central_crop(mode, height, width):
    image = picture(height, width)
    size = (64, 64)
    if mode == "shorter":
        size = (round(64 * height / min(height, width)), round(64 * width / min(height, width)))
    resized = np.asarray(Image.fromarray(image).resize(size[::-1], Image.BILINEAR)).astype(int)
    top, left = (size[0] - 56) // 2, (size[1] - 56) // 2
    expected = resized[top : top + 56, left : left + 56]
    result = EvaluationTransform(resize=64, image_size=56, resize_mode=mode)(
        tf.constant(image)
    ).numpy()
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
    one = tf.function(
        transform, input_signature=[tf.TensorSpec((None, None, 3), tf.uint8)], autograph=False
    )
    many = tf.function(
        transform, input_signature=[tf.TensorSpec((None, None, None, 3), tf.uint8)], autograph=False
    )
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


@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from(KINDS),
    st.sampled_from(["shorter", "squash"]),
)
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


def test_random_crops_reach_every_place_evenly():
    transform = TrainTransform("random_crop", resize=60, image_size=57, flip=False)
    draws = transform.draw(0, 0, 2000)
    crops = transform.batch(tf.repeat(places()[None], 2000, axis=0), draws)[:, 0, 0].numpy()
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


@pytest.mark.one_quick_case
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
        transform.batch,
        input_signature=[tf.TensorSpec(shape, tf.uint8), tf.TensorSpec((shape[0], 3), tf.float32)],
        autograph=False,
    )(images, draws)
    alone = [transform(tf.constant(image), draw) for image, draw in zip(images, draws, strict=True)]
    np.testing.assert_array_equal(together, alone)


NO_COLORS = ["gray", "1,2", "1,2,256", "-1,0,0", (1, 2), 3, None]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EvaluationTransform(resize=200, image_size=224), "resize"),
        (lambda: TrainTransform("color"), "augmentation"),
        (lambda: TrainTransform("random_resized_crop", scale=(0, 1)), "scale"),
        (lambda: TrainTransform("multi_resolution", resolutions=(1.8, 0.8)), "resolutions"),
        *(
            (lambda color=color: EvaluationTransform(pad_color=color), "pad_color")
            for color in NO_COLORS
        ),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(UserError, match=message):
        make()


IMAGE = tf.TensorSpec((None, None, 3), tf.uint8)
EDGES = st.integers(1, 90)


def whole_resize(image, size):
    """TensorFlow's own resize, in its usual way."""
    return tf.cast(
        tf.image.resize(image, size, method="bilinear", antialias=True) + 0.5, tf.uint8
    ).numpy()


@tf.function(input_signature=[IMAGE, tf.TensorSpec((2,), tf.int32)], autograph=False)
def resized(image, size):
    return resize(image, tuple(tf.unstack(size)))


@given(EDGES, EDGES, EDGES, EDGES)
@example(9, 90, 90, 90)
@example(375, 500, 256, 341)
@example(700, 900, 120, 154)
@example(9, 700, 256, 19911)
@settings(max_examples=80, deadline=None)
def test_resizing_has_the_bits_of_tensorflows(height, width, rows, columns):
    image = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    np.testing.assert_array_equal(
        resized(image, (rows, columns)), whole_resize(image, (rows, columns))
    )


@pytest.mark.slow
@given(
    EDGES,
    EDGES,
    st.floats(0, 1, width=32, exclude_max=True),
    st.floats(0, 1, width=32),
    st.floats(0, 1, width=32),
)
@example(90, 1, 0.0, 0.0, 0.0)
@settings(max_examples=60, deadline=None)
def test_multi_resolution_is_resize_crop_and_centered_black(height, width, scale, down, across):
    """HORDE: the longer side is uniform on 0.8 to 1.8 times the crop; black around what is
    smaller."""
    down, across = (
        min(draw, float(np.nextafter(np.float32(1), np.float32(0)))) for draw in (down, across)
    )
    image = picture(height, width)
    draws = tf.constant([0.9, down, across, scale], tf.float32)
    found = TrainTransform("multi_resolution", image_size=20)(tf.constant(image), draws).numpy()

    longer = round(
        float(np.float32(20) * (np.float32(0.8) + np.float32(scale) * np.float32(1.8 - 0.8)))
    )
    size = [max(1, int(edge * longer / max(height, width) + 0.5)) for edge in (height, width)]
    scaled = whole_resize(image, size)
    expected = np.zeros((20, 20, 3), np.uint8)
    places, sources = [], []
    for edge, draw in zip(size, (down, across), strict=True):
        start = min(int(np.float32(draw) * np.float32(max(edge - 20, 0) + 1)), max(edge - 20, 0))
        sources.append(slice(start, start + 20))
        places.append(slice(max(20 - edge, 0) // 2, max(20 - edge, 0) // 2 + min(edge, 20)))
    expected[tuple(places)] = scaled[tuple(sources)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [(30, 60), (60, 30), (7, 200), (50, 50), (3, 2)])
def test_pad_shows_the_whole_image_undistorted_on_black(size):
    image = np.full((*size, 3), 200, np.uint8)
    view = EvaluationTransform(resize=40, image_size=40, resize_mode="pad")(
        tf.constant(image)
    ).numpy()
    rows, columns = view.any((1, 2)).nonzero()[0], view.any((0, 2)).nonzero()[0]
    expected = [max(1, round(40 * edge / max(size))) for edge in size]
    assert [len(rows), len(columns)] == expected
    for found in (rows, columns):
        assert abs(found[0] - (39 - found[-1])) <= 1
    assert (view[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] == 200).all()


@pytest.mark.parametrize("color", [(255, 255, 255), (1, 128, 254)])
@pytest.mark.parametrize("size", [(30, 60), (60, 30), (50, 50)])
def test_a_color_changes_the_padding_and_nothing_else(size, color):
    image = tf.constant(picture(*size))
    black = EvaluationTransform(40, 36, "pad")(image).numpy()
    found = EvaluationTransform(40, 36, "pad", color)(image).numpy()
    inside = (
        EvaluationTransform(40, 36, "pad")(tf.fill((*size, 3), tf.constant(255, tf.uint8))).numpy()
        == 255
    )
    np.testing.assert_array_equal(found, np.where(inside, black, np.array(color, np.uint8)))
    batch = EvaluationTransform(40, 36, "pad", color)(tf.stack([image, image])).numpy()
    np.testing.assert_array_equal(batch, [found, found])
