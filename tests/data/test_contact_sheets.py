"""The contact sheet: every class in a row of its own, every view where it belongs."""

import numpy as np
import pytest

from tfdml.data.contact_sheets import contact_sheet, whole_images
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages

COLOURS = np.array([[200, 0, 0], [0, 200, 0], [0, 0, 200], [200, 200, 0]], np.uint8)


def views(labels, side=80):
    """Images of one colour per class."""
    return np.broadcast_to(COLOURS[np.array(labels) % 4][:, None, None], (len(labels), side, side, 3))


def find(sheet, colour):
    """Rows and columns of the sheet with this colour."""
    return np.nonzero((np.asarray(sheet) == colour).all(-1))


def test_rows_are_classes_in_the_order_of_the_batch():
    labels = [2, 0, 2, 1, 2]
    sheet = contact_sheet(views(labels), np.array(labels), {0: "null", 1: "eins", 2: "zwei"})
    bounds = {label: find(sheet, COLOURS[label]) for label in (0, 1, 2)}
    for label, (rows, columns) in bounds.items():
        assert len(rows) == labels.count(label) * 80 * 80
        assert np.ptp(rows) == 79
        assert columns.min() == min(other.min() for _, other in bounds.values())
    assert bounds[2][0].max() < bounds[0][0].min() < bounds[0][0].max() < bounds[1][0].min()
    # Something is written at the left of each row.
    left = np.asarray(sheet)[:, : bounds[2][1].min()]
    for rows, _ in bounds.values():
        assert (left[rows.min() : rows.max()] < 128).any()


def test_originals_stand_above_their_views_undistorted():
    originals = [np.full((30, 90, 3), [9, 9, 99], np.uint8), np.full((200, 100, 3), [9, 99, 9], np.uint8)]
    sheet = contact_sheet(views([0, 0]), np.array([0, 0]), {0: "a"}, originals)
    top = find(sheet, COLOURS[0])[0].min()
    for original, ratio in zip(originals, (1 / 3, 2), strict=True):
        rows, columns = find(sheet, original[0, 0])
        assert rows.max() < top
        assert (np.ptp(rows) + 1) / (np.ptp(columns) + 1) == pytest.approx(ratio, rel=0.05)


def test_large_batches_and_long_names_are_cut_and_said_to_be():
    labels = np.repeat(np.arange(60), 12)
    names = {label: f"Ein Name {label} in vielen Wörtern, 長い名前, der kein Ende nimmt " * 4 for label in range(60)}
    sheet = contact_sheet(views(labels, 20), labels, names)
    assert sheet.height < 40 * 100 + 100
    assert sheet.width < 190 + 10 * 100
    assert contact_sheet(views([5], 20), np.array([5]), {}).height < 120


def test_small_views_are_enlarged_and_large_ones_shrunk():
    small, large = (contact_sheet(views([0], side), np.array([0]), {0: "a"}) for side in (8, 500))
    assert len(find(small, COLOURS[0])[0]) == 72 * 72
    assert len(find(large, COLOURS[0])[0]) == 160 * 160


def test_wrong_numbers_are_refused():
    with pytest.raises(ValueError, match="0 images, 0 labels"):
        contact_sheet(np.zeros((0, 8, 8, 3), np.uint8), np.zeros(0, int), {})
    with pytest.raises(ValueError, match="2 images, 1 labels"):
        contact_sheet(views([0, 1]), np.array([0]), {})
    with pytest.raises(ValueError, match="as many images as labels"):
        contact_sheet(views([0, 1]), np.array([0, 1]), {}, [np.zeros((4, 4, 3), np.uint8)])


def test_whole_images_are_those_of_the_data_set():
    images = np.random.default_rng(0).integers(0, 256, (5, 9, 7, 3), dtype=np.uint8)
    data = ImageDataset("made", "train", ArrayImages(images, ("",) * 5), np.zeros(5), {0: ""})
    np.testing.assert_array_equal(whole_images(data, np.array([4, 1, 1])), images[[4, 1, 1]])
