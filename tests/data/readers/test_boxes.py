"""Images cut to annotated boxes: the right pixels, whatever the format, and wrong boxes named."""

import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageOps

from tfdml.data.augmentation.train import EvaluationTransform, TrainTransform
from tfdml.data.batches import shuffled
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import FileImages
from tfdml.data.pipeline import evaluation_batches, explain_failure
from tfdml.data.readers.boxes import boxed
from tfdml.errors import UserError

SIZES = [(40, 60), (50, 33), (64, 64), (37, 41)]
BOXES = np.array([[5, 7, 33, 52], [0, 0, 50, 33], [20, 1, 21, 64], [3, 30, 36, 41]])


@pytest.fixture
def paths(tmp_path):
    """JPEGs with colours of less resolution, one that has to be turned, and a PNG."""
    found = []
    for number, (height, width) in enumerate(SIZES):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        path = tmp_path / f"{number}.{'png' if number == 1 else 'jpg'}"
        image, options = Image.fromarray(noise), {}
        if number == 3:
            options["exif"] = Image.Exif()
            options["exif"][0x0112] = 6
            image = image.transpose(Image.Transpose.ROTATE_90)
        image.save(path, **({} if number == 1 else {"quality": 90, "subsampling": 2, **options}))
        found.append(str(path))
    return found


def cut(path, box):
    """The box's pixels, by Pillow."""
    top, left, bottom, right = box
    return np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))[top:bottom, left:right]


def dataset(images):
    return ImageDataset("made", "train", images, np.arange(len(images)), dict.fromkeys(range(len(images)), ""))


def test_images_are_cut_to_their_boxes_before_anything_else(paths):
    data = dataset(FileImages(tuple(paths), BOXES))
    transform, view = TrainTransform("random_resized_crop", image_size=16), EvaluationTransform(20, 16)
    images, labels = next(shuffled(data, 4, transform, seed=3).as_numpy_iterator())
    draws = transform.draw(3, 0, 4)
    for row, label in enumerate(labels):
        expected = transform(tf.constant(cut(paths[label], BOXES[label])), draws[row])
        np.testing.assert_array_equal(images[row], expected)
    views = next(evaluation_batches(data, view, 4).as_numpy_iterator())[0]
    for row, (path, box) in enumerate(zip(paths, BOXES, strict=True)):
        np.testing.assert_array_equal(views[row], view(tf.constant(cut(path, box))))
    cached = next(shuffled(data, 4, transform, seed=3, cache=True).as_numpy_iterator())[0]
    np.testing.assert_array_equal(cached, images)


def test_boxes_stay_with_their_images(paths):
    images = FileImages(tuple(paths), BOXES).take(np.array([3, 0]))
    assert images.paths == (paths[3], paths[0])
    np.testing.assert_array_equal(images.boxes, BOXES[[3, 0]])
    assert FileImages(tuple(paths)).take(np.array([1])).boxes is None
    split = dataset(FileImages(tuple(paths), BOXES)).select_classes([1, 2])
    np.testing.assert_array_equal(split.images.boxes, BOXES[1:3])


def test_the_bytes_of_a_boxed_image_are_those_of_the_cut_one(paths):
    images = FileImages(tuple(paths), BOXES)
    for index, (path, box) in enumerate(zip(paths, BOXES, strict=True)):
        found = Image.open(io.BytesIO(images.encoded(index)))
        np.testing.assert_array_equal(np.asarray(found), cut(path, box))


def test_boxes_beyond_the_image_are_clipped_and_counted(paths, caplog):
    boxes = BOXES.copy()
    boxes[0] = [-5, 7, 33, 99]
    boxes[3] = [3, 30, 80, 80]
    with caplog.at_level("WARNING"):
        images = boxed("cars196", paths, boxes)
    assert images.boxes.tolist() == [[0, 7, 33, 60], BOXES[1].tolist(), BOXES[2].tolist(), [3, 30, 37, 41]]
    assert f"2 of 4 bounding boxes reach beyond their images and were clipped, the first is that of {paths[0]}" in (
        caplog.text
    )
    # Unfitted boxes are clipped where they are applied.
    source = FileImages(tuple(paths), boxes).lookup()
    row = [column[0] for column in source.columns(np.array([0]))]
    np.testing.assert_array_equal(source.read(*row), cut(paths[0], (0, 7, 33, 60)))


def test_boxes_without_a_pixel_are_named(paths):
    empty, outside = BOXES.copy(), BOXES.copy()
    empty[2] = [9, 5, 9, 20]
    with pytest.raises(UserError, match=rf"1 of 4 bounding boxes are empty, the first is that of {paths[2]}"):
        FileImages(tuple(paths), empty)
    outside[1] = [50, 0, 70, 20]
    with pytest.raises(UserError, match=rf"1 of 4 .* outside .* {paths[1]}: rows 50 to 70, .* of 50 x 33 pixels"):
        boxed("cub200", paths, outside)
    with pytest.raises(UserError, match=r"4 images but boxes of shape \(3, 4\)"):
        FileImages(tuple(paths), BOXES[:3])
    data = dataset(FileImages(tuple(paths), outside))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(evaluation_batches(data, EvaluationTransform(20, 16), 4))
    assert paths[1] in str(explain_failure(caught.value, data))


def test_files_that_are_no_images_keep_their_boxes(paths, tmp_path):
    (tmp_path / "page.jpg").write_text("<html>")
    broken = [*paths[:2], str(tmp_path / "page.jpg"), str(tmp_path / "missing.jpg")]
    np.testing.assert_array_equal(boxed("cub200", broken, BOXES).boxes, BOXES)
