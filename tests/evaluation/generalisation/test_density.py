import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from tfdml.errors import UserError
from tfdml.evaluation import class_density
from tfdml.evaluation.generalisation import density
from tfdml.objectives.class_statistics import means_and_spreads


def reference(embeddings, labels):
    """Class id -> (D_avg, nearest squared distance between means, mean of them), by loops."""
    points, labels = np.asarray(embeddings, np.float64), np.asarray(labels)
    means = {c: sum(points[i] for i in range(len(points)) if labels[i] == c) / (labels == c).sum() for c in set(labels)}
    table = {}
    for c, mean in means.items():
        own = [((points[i] - mean) ** 2).sum() for i in range(len(points)) if labels[i] == c]
        others = [((mean - other) ** 2).sum() for d, other in means.items() if d != c]
        table[c] = (sum(own) / len(own), min(others), sum(others) / len(others))
    return table


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(5, 60), classes=st.integers(2, 8), rows=st.sampled_from([4, 8192]))
def test_table_matches_loops(seed, count, classes, rows):
    rng = np.random.default_rng(seed)
    labels = np.append([0, 1], rng.integers(0, classes, count)) * 10**10
    embeddings = rng.normal(3, 1, size=(count + 2, 4)).astype(np.float32)
    before, density._ROWS = density._ROWS, rows
    try:
        table = class_density(embeddings, labels)
    finally:
        density._ROWS = before
    expected = reference(embeddings, labels)
    assert table.classes.tolist() == sorted(expected)
    for i, c in enumerate(table.classes):
        found = (table.d_avg[i], table.d_nearest[i], table.d_others[i])
        assert found == pytest.approx(expected[c], rel=1e-9, abs=1e-9)
        assert table.counts[i] == (labels == c).sum()
        assert table.nearest_class[i] != c


def test_the_definition_is_that_of_the_objective():
    rng = np.random.default_rng(0)
    embeddings, labels = rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 5, 40)
    table = class_density(embeddings, labels)
    spreads = ops.convert_to_numpy(means_and_spreads(ops.array(embeddings), ops.array(labels))[1])
    np.testing.assert_allclose(table.d_avg[np.searchsorted(table.classes, labels)], spreads, rtol=1e-5)


def test_unit_vectors_have_one_minus_the_squared_length_of_the_mean():
    rng = np.random.default_rng(1)
    embeddings = rng.normal(size=(30, 5))
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    labels = np.arange(30) % 3
    lengths = [np.square(embeddings[labels == c].mean(axis=0)).sum() for c in range(3)]
    np.testing.assert_allclose(class_density(embeddings, labels).d_avg, 1 - np.array(lengths), rtol=1e-6)


def test_an_offset_changes_nothing():
    rng = np.random.default_rng(2)
    embeddings, labels = rng.integers(-8, 8, size=(50, 3)).astype(np.float32), rng.integers(0, 5, 50)
    near, far = class_density(embeddings, labels), class_density(embeddings + 2.0**20, labels)
    np.testing.assert_allclose(near.d_avg, far.d_avg, rtol=1e-9)
    np.testing.assert_allclose(near.d_others, far.d_others, rtol=1e-9)


def test_summary_leaves_classes_of_one_image_out_of_the_density():
    table = class_density([[0.0], [2.0], [10.0], [14.0], [100.0]], [0, 0, 1, 1, 2])
    assert table.d_avg.tolist() == [1, 4, 0]
    summary = table.summary()
    assert summary["num_dense_classes"] == 2
    assert (summary["d_avg_mean"], summary["d_avg_min"], summary["d_avg_max"], summary["d_avg_std"]) == (2.5, 1, 4, 1.5)
    assert summary["d_nearest_min"] == 121
    assert summary["d_nearest_mean"] == pytest.approx((121 + 121 + 88**2) / 3)
    assert summary["d_others_mean"] == pytest.approx((121 + 88**2 + 99**2) / 3)
    assert summary["separation"] == pytest.approx(summary["d_nearest_mean"] / 2.5)


def test_classes_collapsed_to_points_have_no_separation():
    summary = class_density([[0.0], [0.0], [3.0], [3.0]], [0, 0, 1, 1]).summary()
    assert summary["d_avg_mean"] == 0
    assert summary["d_nearest_mean"] == 9
    assert "separation" not in summary


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="two classes"):
        class_density([[0.0], [1.0]], [3, 3])
    with pytest.raises(UserError, match="two images"):
        class_density([[0.0], [1.0]], [0, 1]).summary()
    with pytest.raises(UserError, match="infinite"):
        class_density([[0.0], [np.inf]], [0, 1])
    with pytest.raises(UserError, match="one class id per embedding"):
        class_density([[0.0], [1.0]], [0])
