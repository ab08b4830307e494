"""The classes that are confused, against a search in float64 that compares every pair by itself."""

import numpy as np
import pytest

from tfdml.errors import UserError
from tfdml.retrieval import confusable_classes


def slowly(embeddings, labels, most, neighbors, skip_top=0, relative_margin=None):
    """Every image by itself, in float64."""
    x = np.asarray(embeddings, np.float64)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    classes = sorted(set(labels))
    votes = {one: dict.fromkeys(classes, 0) for one in classes}
    for i, label in enumerate(labels):
        cosines = {j: float(x[i] @ x[j]) for j in range(len(x)) if j != i}
        own = [cosines[j] for j in cosines if labels[j] == label]
        others = sorted((j for j in cosines if labels[j] != label), key=lambda j: -cosines[j])
        for j in others[skip_top : skip_top + neighbors]:
            mean = np.mean(own) if own else 0.0
            if relative_margin is None or not own or cosines[j] <= mean - relative_margin * abs(mean):
                votes[label][labels[j]] += 1
    table = np.full((len(classes), most), -1)
    for row, one in enumerate(classes):
        listed = [c for c in sorted(classes, key=lambda c: (-votes[one][c], c)) if votes[one][c]][:most]
        table[row, : len(listed)] = [classes.index(c) for c in listed]
    return table


@pytest.mark.parametrize("filters", [{}, {"skip_top": 2}, {"relative_margin": 0.05}, {"relative_margin": 0.0}])
def test_classes_follow_from_a_search_of_every_pair(filters):
    rng = np.random.default_rng(0)
    # Classes of 1 to 6 images, in no order, that overlap.
    labels = rng.permutation(np.repeat([3, 5, 8, 13, 21, 34, 55], [1, 2, 3, 4, 5, 6, 6]))
    x = rng.normal(size=(7, 4))[np.searchsorted([3, 5, 8, 13, 21, 34, 55], labels)] + rng.normal(size=(len(labels), 4))
    for most, neighbors in ((2, 3), (6, 50)):
        expected = slowly(x, labels.tolist(), most, neighbors, **filters)
        np.testing.assert_array_equal(
            confusable_classes(x, labels, most=most, neighbors=neighbors, **filters), expected
        )


def test_filters_leave_out_images_under_a_wrong_label():
    """Two images of class 0 are labeled 2: without the filters, 2 would be what 0 is most confused with."""
    angles = np.deg2rad([0, 1, 2, 3, 0.5, 1.5, 90, 91, 20, 21, 22])
    labels = np.array([0, 0, 0, 0, 2, 2, 2, 2, 1, 1, 1])
    x = np.stack([np.cos(angles), np.sin(angles)], 1)
    assert confusable_classes(x, labels, most=1, neighbors=2)[0, 0] == 2
    assert confusable_classes(x, labels, most=1, neighbors=2, skip_top=2)[0, 0] == 1
    assert confusable_classes(x, labels, most=1, neighbors=5, relative_margin=0.01)[0, 0] == 1


def test_degenerate_training_sets():
    x = np.random.default_rng(1).normal(size=(4, 3))
    assert confusable_classes(x, [7, 7, 7, 7], most=2).tolist() == [[-1, -1]]
    assert confusable_classes(x, [7, 7, 9, 9], most=2).tolist() == [[1, -1], [0, -1]]
    assert confusable_classes(x[:1], [7]).max() == -1
    # All classes of a single image, and all images at one point.
    others = [[c for c in range(4) if c != row] for row in range(4)]
    assert np.sort(confusable_classes(x, range(4), most=3), axis=1).tolist() == others
    assert confusable_classes(np.ones((4, 3)), [0, 0, 1, 1], most=1).ravel().tolist() == [1, 0]
    assert confusable_classes(x, range(4), skip_top=50).max() == -1
    for wrong in ({"most": 0}, {"neighbors": 0}, {"skip_top": -1}, {"relative_margin": 1.0}):
        with pytest.raises(UserError, match="must be at least 1"):
            confusable_classes(x, range(4), **wrong)
    with pytest.raises(UserError, match="4 embeddings, but 3 labels"):
        confusable_classes(x, [1, 2, 3])
