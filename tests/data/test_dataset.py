import numpy as np
import pytest

import tfdml
from tfdml.data.dataset import ImageDataset
from tfdml.embeddings.files import ImageTable
from tfdml.errors import UserError

PIXELS = np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3)


def test_arrays_alone_make_a_data_set():
    dataset = ImageDataset(images=PIXELS, labels=np.array([[7.0], [7.0], [9.0], [9.0]]))
    np.testing.assert_array_equal(dataset.images.pixels(), PIXELS)
    assert dataset.labels.tolist() == [7, 7, 9, 9]
    assert dataset.class_names == {7: "7", 9: "9"}
    assert dataset.names == ("0", "1", "2", "3")
    assert set(ImageTable.of([dataset]).roles) == {"test"}
    assert dataset.contiguous().take([2]).class_names == {1: "9"}
    for rows in ([True, False, True, False], [0.5]):
        with pytest.raises(UserError, match=r"rows must be integers, .*np\.flatnonzero"):
            dataset.take(rows)
    view = tfdml.data.EvaluationTransform(resize=8, image_size=8)
    ((images, labels),) = tfdml.data.evaluation_batches(dataset, view, 4)
    np.testing.assert_array_equal(images, PIXELS)
    assert np.asarray(labels).tolist() == [7, 7, 9, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": PIXELS / 255.0}, "uint8"),
        ({"images": PIXELS.astype("float32")}, "uint8"),
        ({"images": PIXELS[..., 0]}, "shape"),
        ({"images": PIXELS[:3]}, "3 images"),
        ({"images": PIXELS[:0], "labels": []}, "no image"),
        ({"labels": list("aabb")}, "np.unique"),
        ({"labels": np.eye(4)}, "argmax"),
        ({"super_labels": [0]}, "super_labels"),
        ({"is_query": ["False", "True", "False", "True"]}, "is_query"),
        ({"is_query": [np.nan, 1, 0, 0]}, "is_query"),
    ],
)
def test_what_makes_no_data_set_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        ImageDataset(**{"images": PIXELS, "labels": [0, 0, 1, 1], **arguments})
