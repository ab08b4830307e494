import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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


def of_labels(labels):
    return ImageDataset(images=FileImages(tuple(map(str, range(len(labels))))), labels=labels)


@settings(max_examples=80, deadline=None)
@example(sizes=[3, 5], limit=4, seed=1)  # no class drawn first fits the limit
@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 300), st.integers(0, 9))
def test_balanced_rows_are_drawn_evenly(sizes, limit, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)) * 7, sizes))
    dataset = of_labels(labels)
    rows = dataset.balanced_rows(limit, seed)
    assert 0 < len(rows) <= limit
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(rows, dataset.balanced_rows(limit, seed))
    counts = {int(c): int((labels[rows] == c).sum()) for c in np.unique(labels[rows])}
    most = max(counts.values())
    if len(counts) > 1:
        # Each class has as many as the others, or all its images.
        assert all(n == most or n == (labels == c).sum() for c, n in counts.items())
    if sum(sizes) <= limit:
        assert len(rows) == sum(sizes)


def test_balanced_rows_of_many_classes_are_fewer_classes_of_ten():
    labels = np.repeat(np.arange(1000), 12)
    dataset = of_labels(labels)
    rows = dataset.balanced_rows(500)
    classes, counts = np.unique(labels[rows], return_counts=True)
    assert len(classes) == 50
    assert set(counts) == {10}
    assert classes.max() > 500  # drawn, not the first ones
    asked = [c for c in range(1000) if c not in classes][:3]
    assert set(asked) <= set(labels[dataset.balanced_rows(500, include=asked)])
