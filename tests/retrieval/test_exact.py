"""A gallery on disk, searched chunk by chunk, gives what a search in memory gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support import references
from tests.support.far_vectors import NAMES, far_vectors
from tests.support.processes import run_python
from tfdml.errors import UserError
from tfdml.evaluation import evaluate_retrieval
from tfdml.registry import DISTANCES
from tfdml.retrieval import confusable_classes, exact, nearest_neighbors
from tfdml.retrieval.exact import check_embeddings, is_memory_mapped


def reference(queries, gallery, k, distance, own_rows=None):
    """Every distance in float64, by loops; the full row sorted by (distance, row)."""
    indices, distances = [], []
    for i, q in enumerate(queries):
        own = None if own_rows is None else own_rows[i]
        row = sorted(
            (references.distance(q, g, distance), j) for j, g in enumerate(gallery) if j != own
        )
        indices.append([j for _, j in row[:k]])
        distances.append([value for value, _ in row[:k]])
    return np.array(indices), np.array(distances)


def mapped(array, folder, name="x"):
    np.save(folder / f"{name}.npy", array)
    return np.load(folder / f"{name}.npy", mmap_mode="r")


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("with_gallery", [False, True])
def test_matches_a_slow_reference(distance, with_gallery):
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(70, 12)).astype(np.float32) + 3
    gallery = rng.normal(size=(90, 12)).astype(np.float32) + 3 if with_gallery else None
    indices, distances = nearest_neighbors(queries, gallery, k=7, distance=distance)
    own = None if with_gallery else np.arange(70)
    expected = reference(queries, queries if gallery is None else gallery, 7, distance, own)
    assert indices.dtype == np.int64
    assert distances.dtype == np.float32
    np.testing.assert_array_equal(indices, expected[0])
    np.testing.assert_allclose(distances, expected[1], rtol=1e-5, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    points=hnp.arrays(
        np.float32, st.tuples(st.integers(2, 30), st.integers(1, 3)), elements=st.integers(-3, 3)
    ),
    k=st.integers(1, 29),
    budget=st.sampled_from([200, 1500, 2**20]),
)
def test_ties_and_duplicates_follow_gallery_order(points, k, budget, tmp_path_factory):
    """Integer embeddings are full of exact ties: the lower row comes first, whatever the block."""
    k = min(k, len(points) - 1)
    expected = reference(points, points, k, "sqeuclidean", np.arange(len(points)))
    for gallery in (points, mapped(points, tmp_path_factory.mktemp("ties"))):
        result = nearest_neighbors(gallery, k=k, distance="sqeuclidean", memory_budget=budget)
        np.testing.assert_array_equal(result[0], expected[0])
        np.testing.assert_array_equal(result[1], expected[1])


def test_many_equal_rows_in_the_grouped_path_follow_gallery_order():
    points = np.random.default_rng(2).integers(0, 3, size=(2500, 3)).astype(np.float32)
    indices, distances = nearest_neighbors(points[:20], points, k=9, own_rows=np.arange(20))
    np.testing.assert_array_equal(
        indices, reference(points[:20], points, 9, "euclidean", np.arange(20))[0]
    )
    assert (distances == 0).all()
    indices, distances = nearest_neighbors(np.full((2000, 16), 0.1234567, np.float32), k=3)
    assert indices[[0, 2, -1]].tolist() == [[1, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert (distances == 0).all()


def test_equally_near_rows_of_unequal_scores_follow_gallery_order(tmp_path):
    """Differences of 1/256 are exact, so that all are equally far; the products that rank them
    first are rounded."""
    rng = np.random.default_rng(6)
    query = rng.integers(-100, 100, size=(1, 16))
    near = query + rng.choice([-1, 1], size=(40, 16)) / 256
    gallery = np.concatenate([near, -query + rng.integers(-9, 9, size=(60, 16))]).astype(np.float32)
    for side in (gallery, mapped(gallery, tmp_path)):
        indices, distances = nearest_neighbors(
            query, side, k=36, distance="sqeuclidean", memory_budget=2000
        )
        assert distances.tolist() == [[16 / 256**2] * 36]
        assert indices.tolist() == [list(range(36))]


@pytest.mark.parametrize(
    ("scale", "distance"),
    [(1e-25, "euclidean"), (1e-25, "cosine"), (1e30, "euclidean"), (1e18, "cosine")],
)
def test_tiny_and_huge_embeddings(scale, distance):
    points = np.random.default_rng(4).normal(size=(50, 4))
    indices, distances = nearest_neighbors(
        (points * scale).astype(np.float32), k=4, distance=distance
    )
    expected = reference(points, points, 4, distance, np.arange(50))
    np.testing.assert_array_equal(indices, expected[0])
    unit = scale if distance == "euclidean" else 1.0
    np.testing.assert_allclose(distances / unit, expected[1], rtol=1e-4, atol=1e-6)
    # A zero vector is at cosine distance 1.
    indices, distances = nearest_neighbors(
        [[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]], k=3, distance="cosine"
    )
    assert indices[:2].tolist() == [[1, 2, 3], [0, 2, 3]]
    assert distances[:2].tolist() == [[1.0, 1.0, 1.0], [1.0, 1.0, 2.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": np.zeros((0, 4)), "k": 1}, "neither"),
        ({"queries": np.zeros((3, 4)), "k": 3}, "k must"),
        ({"queries": np.zeros((3, 4)), "gallery": np.zeros((5, 3)), "k": 1}, "dimensions"),
        (
            {
                "queries": np.zeros((3, 4)),
                "gallery": np.zeros((5, 4)),
                "k": 1,
                "own_rows": [0, 1, 5],
            },
            "own_rows",
        ),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, message):
    with pytest.raises(UserError, match=message):
        nearest_neighbors(**arguments)


def test_not_finite_rows_are_counted_and_named():
    points = np.zeros((10, 3))
    points[4, 1], points[7, 0], points[9, 2] = np.nan, np.inf, 1e300
    with pytest.raises(UserError, match=r"3 of 10 rows .* first is row 4"):
        check_embeddings(points)
    huge = np.full((2, 3), 3e38, np.float32)  # finite, though their sum is not
    np.testing.assert_array_equal(check_embeddings(huge), huge)


@pytest.mark.parametrize("allowed", [True, False])
def test_products_of_keras_are_of_float32_whatever_training_allows(allowed, monkeypatch):
    """As on a GPU, which rounds the factors unless it is told not to; the neighbors are NumPy's."""
    points = np.random.default_rng(5).normal(size=(60, 4)).astype(np.float32)
    expected = nearest_neighbors(points, k=3)
    rounded = []
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    matmul = keras.ops.matmul

    def watched(*factors):
        rounded.append(tf.config.experimental.tensor_float_32_execution_enabled())
        return matmul(*factors)

    monkeypatch.setattr(keras.ops, "matmul", watched)
    monkeypatch.setattr(exact, "_has_gpu", lambda: True)
    tf.config.experimental.enable_tensor_float_32_execution(allowed)
    try:
        result = nearest_neighbors(points, k=3)
        assert rounded
        assert not any(rounded)
        assert tf.config.experimental.tensor_float_32_execution_enabled() == allowed
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
    np.testing.assert_array_equal(result[0], expected[0])
    np.testing.assert_array_equal(result[1], expected[1])


def test_a_search_imports_no_tensorflow():
    code = (
        "import sys; from tfdml.retrieval import nearest_neighbors; "
        "print(nearest_neighbors([[0.0], [1.0], [3.0]], k=1)[0].ravel().tolist(), "
        "{'keras', 'tensorflow', 'scipy', 'pyarrow'} & set(sys.modules))"
    )
    assert run_python("-c", code).stdout.strip() == "[1, 0, 1] set()"


def test_the_candidates_of_a_block_are_its_largest_scores():
    """With groups and without, among them equal scores and columns that fill up the groups."""
    scores = np.random.default_rng(7).integers(0, 50, size=(30, 512)).astype(np.float32)
    scores[:, 500:] = -1e30
    for group in (1, 4, 8):
        columns, least = exact._top_columns(scores, 9, group)
        assert all(len(set(row)) == 9 for row in columns.tolist())
        chosen = np.sort(np.take_along_axis(scores, columns, axis=1), axis=1)
        np.testing.assert_array_equal(chosen, np.sort(scores, axis=1)[:, -9:])
        np.testing.assert_array_equal(least, chosen[:, 0])


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("budget", [1, 3000])
def test_the_same_bits_as_in_memory(distance, budget, tmp_path):
    rng = np.random.default_rng(0)
    gallery = rng.normal(size=(211, 6)).astype(np.float32) * 7 + 3
    gallery[50:60] = gallery[150:160]  # copies in different chunks
    gallery[77] = 0
    queries = rng.normal(size=(13, 6)).astype(np.float32) * 7 + 3
    for arguments in ({}, {"own_rows": np.arange(100, 113)}):
        expected = nearest_neighbors(queries, gallery, k=9, distance=distance, **arguments)
        disk = check_embeddings(mapped(gallery, tmp_path))
        assert is_memory_mapped(disk[2:])
        result = nearest_neighbors(
            queries, disk, k=9, distance=distance, memory_budget=budget, **arguments
        )
        np.testing.assert_array_equal(result[0], expected[0])
        np.testing.assert_array_equal(result[1], expected[1])


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("name", NAMES)
def test_neighbors_are_those_of_float64(name, distance):
    """Also where one far vector, or many, would move the center and widen the rounding of the
    others."""
    x = far_vectors(name, size=400, dim=8)
    exact = x.astype(np.float64)
    if distance == "dot":
        expected = -exact @ exact.T
    else:
        exact = (
            exact / np.linalg.norm(exact, axis=1, keepdims=True) if distance == "cosine" else exact
        )
        expected = np.square(exact[:, None] - exact[None]).sum(axis=-1) / (
            2 if distance == "cosine" else 1
        )
    expected = np.sqrt(expected) if distance == "euclidean" else expected
    np.fill_diagonal(expected, np.inf)
    rows, distances = nearest_neighbors(x, k=3, distance=distance)
    nearest = np.sort(expected, axis=1)[:, :3]
    # Distances to the last bit of float32, and of equal ones any row.
    rounding = 1e-14 * np.square(exact).sum(axis=1).max() if distance == "dot" else 1e-15
    np.testing.assert_allclose(distances, nearest, rtol=2e-7, atol=rounding)
    np.testing.assert_allclose(
        np.take_along_axis(expected, rows, axis=1), nearest, rtol=1e-12, atol=rounding
    )


def test_one_far_image_leaves_the_recall_of_the_others():
    points = np.repeat(10.0 * np.arange(10), 2)[:, None] + np.tile([0.0, 0.1], 10)[:, None]
    measured = evaluate_retrieval(
        np.append(points, [[1e6]], axis=0), np.append(np.arange(20) // 2, 99), ks=(1,)
    )
    assert measured["recall@1"] == 1.0


# The classes that are confused, against a search in float64 that compares every pair by itself.


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
            if (
                relative_margin is None
                or not own
                or cosines[j] <= mean - relative_margin * abs(mean)
            ):
                votes[label][labels[j]] += 1
    table = np.full((len(classes), most), -1)
    for row, one in enumerate(classes):
        listed = [c for c in sorted(classes, key=lambda c: (-votes[one][c], c)) if votes[one][c]][
            :most
        ]
        table[row, : len(listed)] = [classes.index(c) for c in listed]
    return table


@pytest.mark.parametrize(
    "filters", [{}, {"skip_top": 2}, {"relative_margin": 0.05}, {"relative_margin": 0.0}]
)
def test_classes_follow_from_a_search_of_every_pair(filters):
    rng = np.random.default_rng(0)
    # Classes of 1 to 6 images, in no order, that overlap.
    labels = rng.permutation(np.repeat([3, 5, 8, 13, 21, 34, 55], [1, 2, 3, 4, 5, 6, 6]))
    x = rng.normal(size=(7, 4))[np.searchsorted([3, 5, 8, 13, 21, 34, 55], labels)] + rng.normal(
        size=(len(labels), 4)
    )
    for most, neighbors in ((2, 3), (6, 50)):
        expected = slowly(x, labels.tolist(), most, neighbors, **filters)
        np.testing.assert_array_equal(
            confusable_classes(x, labels, most=most, neighbors=neighbors, **filters), expected
        )


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
    with pytest.raises(UserError, match="most"):
        confusable_classes(x, range(4), most=0)
    with pytest.raises(UserError, match="3 labels"):
        confusable_classes(x, [1, 2, 3])
