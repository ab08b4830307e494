import dataclasses

import numpy as np
import pytest

import tfdml
from tfdml.data import ArrayImages, FileImages, ImageDataset
from tfdml.embeddings.reader import ImageTable
from tfdml.errors import UserError

PIXELS = np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3)


def test_arrays_alone_make_a_data_set():
    dataset = ImageDataset(images=PIXELS, labels=np.array([[7.0], [7.0], [9.0], [9.0]]))
    np.testing.assert_array_equal(dataset.images.pixels(), PIXELS)
    assert dataset.labels.tolist() == [7, 7, 9, 9]
    assert dataset.class_names == {7: "7", 9: "9"}
    assert dataset.names == ("0", "1", "2", "3")
    assert dataset.contiguous().take([2]).class_names == {1: "9"}
    view = tfdml.data.EvaluationTransform(resize=8, image_size=8)
    ((images, labels),) = tfdml.data.evaluation_batches(dataset, view, 4)
    np.testing.assert_array_equal(images, PIXELS)
    assert np.asarray(labels).tolist() == [7, 7, 9, 9]


def test_repr_is_one_short_line():
    paths = tuple(f"/photos/{row}.jpg" for row in range(5000))
    dataset = ImageDataset("folder", "train", FileImages(paths), np.arange(5000) // 5, None)
    assert dataset.names == paths
    assert repr(dataset) == "ImageDataset('folder', 'train', images=5000, classes=1000)"
    assert repr(dataset.images) == "<FileImages of 5000 images>"
    assert repr(ArrayImages(PIXELS)) == "<ArrayImages of 4 images>"


def test_replace_keeps_the_other_fields():
    dataset = ImageDataset(images=PIXELS, labels=[0, 0, 1, 1], super_labels=[0, 0, 0, 1], is_query=[1, 0, 1, 0])
    again = dataclasses.replace(dataset, name="mine")
    assert (again.name, again.images) == ("mine", dataset.images)
    assert again.super_labels.tolist() == [0, 0, 0, 1]
    assert again.queries.labels.tolist() == [0, 1]


def test_the_images_of_a_whole_folder_are_test_images_in_files_of_embeddings():
    assert set(ImageTable.of([ImageDataset(images=PIXELS, labels=[0, 0, 1, 1])]).roles) == {"test"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": PIXELS / 255.0}, r"uint8 pixels of 0 to 255, not float64; convert them: \(255 \* images\)"),
        ({"images": PIXELS.astype("float32")}, r"not float32; convert them: images.round\(\).astype\('uint8'\)"),
        ({"images": PIXELS[..., 0]}, r"\(N, H, W, 3\), not of shape \(4, 8, 8\)"),
        ({"images": PIXELS[:3]}, r"3 images but labels of shape \(4,\)"),
        ({"images": PIXELS[:0], "labels": []}, "no image"),
        ({"labels": list("aabb")}, "np.unique"),
        ({"labels": np.eye(4)}, "argmax"),
        ({"super_labels": [0]}, r"super_labels of shape \(1,\)"),
    ],
)
def test_what_makes_no_data_set_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        ImageDataset(**{"images": PIXELS, "labels": [0, 0, 1, 1], **arguments})
