"""The input pipeline."""

import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.data.preparations import assert_same, encoded, shuffled
from tests.support.marks import first_quick
from tests.support.processes import run_python
from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import explain_failure
from tfdml.data.images import ArrayImages, EncodedImages, FileImages
from tfdml.data.pipeline import (
    class_balanced,
    decoded_bytes,
    decoded_source,
    evaluation_batches,
    memory_to_spare,
    training_batches,
)
from tfdml.data.sampling import ClassBalancedSampler
from tfdml.data.transforms import EvaluationTransform, TrainTransform

KINDS = ("random_crop", "random_resized_crop", "multi_resolution", "none", "policy")
CLASSES, EACH = 5, 4


def pictures(sizes):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def dataset_of(images):
    """Classes of `EACH` images, in order."""
    labels = np.arange(len(images)) // EACH * 7
    return ImageDataset(
        "made", "train", images, labels, {int(label): f"class {label}" for label in set(labels)}
    )


def pngs(sizes):
    images = [encoded(Image.fromarray(array), "PNG") for array in pictures(sizes)]
    return dataset_of(EncodedImages(tuple(images), tuple(f"{i}.png" for i in range(len(images)))))


@pytest.fixture(scope="module")
def mixed():
    """Images of several sizes."""
    return pngs([(30 + 3 * (i % 4), 40 - 2 * (i % 3)) for i in range(CLASSES * EACH)])


@pytest.fixture(scope="module")
def equal():
    """Images of one size, in the three ways that a data set can hold them."""
    return pngs([(36, 30)] * (CLASSES * EACH))


def as_files(source, folder):
    for i, data in enumerate(source.images.data):
        (folder / f"image {i}é.png").write_bytes(data)
    return dataset_of(
        FileImages(tuple(str(folder / f"image {i}é.png") for i in range(len(source))))
    )


def as_arrays(source):
    images = pictures([(36, 30)] * len(source))
    return dataset_of(ArrayImages(np.stack(images), tuple(map(str, range(len(source))))))


@pytest.mark.one_quick_case
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_the_transform_of_the_image_drawn(mixed, kind):
    sampler = ClassBalancedSampler(mixed.labels, 3, 2, seed=4)
    named = (
        {"augmentation": "random_crop", "policy": "erasing + 0.5 * grayscale"}
        if kind == "policy"
        else {}
    )
    transform = TrainTransform(**{"augmentation": kind, "resize": 24, "image_size": 20, **named})
    batches = training_batches(mixed, sampler, transform, seed=9, first_step=5, num_steps=2)
    assert batches.element_spec[0] == tf.TensorSpec((6, 20, 20, 3), tf.uint8)
    assert batches.element_spec[1] == tf.TensorSpec((6,), tf.int64)
    assert batches.cardinality() == 2
    for step, (images, labels) in enumerate(batches, start=5):
        indices = sampler.batch(step)
        np.testing.assert_array_equal(labels, mixed.labels[indices])
        for image, index, draws in zip(images, indices, transform.draw(9, step, 6), strict=True):
            original = tf.io.decode_png(mixed.images.data[index])
            np.testing.assert_array_equal(image, transform(original, draws))


def test_a_resumed_run_gets_the_batches_of_an_uninterrupted_one(mixed):
    transform = TrainTransform("random_resized_crop", resize=24, image_size=20)
    uninterrupted = class_balanced(mixed, 3, 2, transform, seed=1, num_steps=9)
    resumed = class_balanced(mixed, 3, 2, transform, seed=1, first_step=4, num_steps=5)
    assert_same(uninterrupted.skip(4), resumed)
    assert_same(resumed, resumed)


@pytest.mark.parametrize(
    ("which", "kind"),
    first_quick(
        [("mixed", "random_resized_crop"), ("mixed", "random_crop"), ("equal", "random_crop")]
    ),
)
def test_the_cache_changes_no_bit(request, which, kind):
    data = request.getfixturevalue(which)
    transform = TrainTransform(kind, resize=24, image_size=20)
    assert_same(
        shuffled(data, 6, transform, num_steps=7),
        shuffled(data, 6, transform, num_steps=7, cache=True),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "resize"), [("random_crop", 30), ("random_resized_crop", 24)])
def test_files_bytes_and_arrays_give_the_same_batches(equal, tmp_path, kind, resize):
    transform = TrainTransform(kind, resize=resize, image_size=20)
    expected = list(shuffled(equal, 6, transform, num_steps=4).as_numpy_iterator())
    files, arrays = as_files(equal, tmp_path), as_arrays(equal)
    assert_same(shuffled(files, 6, transform, num_steps=4), expected)
    assert_same(shuffled(arrays, 6, transform, num_steps=4), expected)
    assert_same(shuffled(arrays, 6, transform, num_steps=4, cache=True), expected)
    view = EvaluationTransform(resize, 20)
    expected = list(evaluation_batches(equal, view, 6).as_numpy_iterator())
    assert_same(evaluation_batches(files, view, 6), expected)
    assert_same(evaluation_batches(arrays, view, 6), expected)


def test_evaluation_keeps_order_and_the_last_images(mixed):
    transform = EvaluationTransform(resize=24, image_size=20)
    batches = evaluation_batches(mixed, transform, 8)
    assert batches.cardinality() == 3
    assert batches.element_spec[0].shape.as_list() == [None, 20, 20, 3]
    seen = list(batches.as_numpy_iterator())
    assert [len(labels) for _, labels in seen] == [8, 8, 4]
    np.testing.assert_array_equal(np.concatenate([labels for _, labels in seen]), mixed.labels)
    for image, data in zip(
        np.concatenate([images for images, _ in seen]), mixed.images.data, strict=True
    ):
        np.testing.assert_array_equal(image, transform(tf.io.decode_png(data)))


def test_the_cache_decodes_every_image_once(equal, tmp_path):
    files = as_files(equal, tmp_path)
    batches = shuffled(files, 4, TrainTransform(resize=24, image_size=20), num_steps=50, cache=True)
    for path in files.images.paths:
        with open(path, "wb"):
            pass
    assert len(list(batches)) == 50


def failure_of(run):
    with pytest.raises(tf.errors.OpError) as caught:
        run()
    return caught.value


def test_a_failure_inside_fit_is_explained(mixed):
    broken = dataset_of(EncodedImages((b"text", *mixed.images.data[1:]), mixed.images.names))
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(loss="mse")
    batches = shuffled(broken, 20, TrainTransform(resize=24, image_size=20))
    error = failure_of(lambda: model.fit(batches, steps_per_epoch=2, verbose=0))
    assert "1 of 20 images of made (train) cannot be decoded: 0.png: " in str(
        explain_failure(error, broken)
    )


@pytest.mark.slow
def test_the_process_ends_while_batches_are_still_being_made():
    """An iterator alive at exit waited for ever for a thread that Python had ended."""
    script = """
        import io
        import numpy as np, tensorflow as tf
        from PIL import Image
        from tfdml.data.dataset import ImageDataset
        from tfdml.data.images import ArrayImages, EncodedImages
        from tfdml.data.pipeline import training_batches
        from tfdml.data.sampling import ShuffleSampler
        from tfdml.data.transforms import TrainTransform

        file = io.BytesIO()
        Image.effect_noise((700, 500), 50).save(file, "JPEG")
        names, arrays = tuple(map(str, range(100))), np.zeros((100, 112, 112, 3), np.uint8)
        kept = []
        for images in (EncodedImages((file.getvalue(),) * 100, names), ArrayImages(arrays, names)):
            names = {i: "" for i in range(100)}
            data = ImageDataset("made", "train", images, np.arange(100), names)
            view = TrainTransform(resize=112, image_size=96)
            batches = training_batches(data, ShuffleSampler(100, 64), view)
            for _ in range(3):
                next(iter(batches))
            kept.append(iter(batches))
            next(kept[-1])
        print("complete", flush=True)
        raise SystemExit(3)
    """
    done = run_python("-c", textwrap.dedent(script), timeout=120, status=3)
    assert done.stdout == "complete\n"


@pytest.mark.parametrize(
    ("kind", "mode"),
    first_quick(
        [("random_crop", "shorter"), ("random_crop", "pad"), ("random_resized_crop", "squash")]
    ),
)
def test_the_estimate_is_what_the_cache_takes(mixed, kind, mode):
    transform = TrainTransform(kind, resize=24, image_size=20, resize_mode=mode)
    source = decoded_source(mixed, transform, limit_mb=10)
    images = (source.columns(np.array([i]))[0][0] for i in range(len(mixed)))
    taken = sum(np.asarray(image).nbytes if source.size else len(image) for image in images)
    assert decoded_bytes(mixed, transform) == pytest.approx(taken, abs=len(mixed))


def test_half_of_the_free_memory_is_the_most(monkeypatch):
    monkeypatch.setattr("tfdml.data.pipeline.free_memory", lambda: 4.0 * 2**20)
    assert memory_to_spare(100) == 2 * 2**20
    assert memory_to_spare(1) == 2**20
