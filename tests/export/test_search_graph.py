"""The search in the graph, against a search by loops in float64."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.export.search_graph import nearest


def by_loops(queries, gallery, k):
    """Rows and squared distances of the nearest, equally near ones by row."""
    rows, squares = [], []
    for query in queries.astype(np.float64):
        found = sorted(
            (sum((query[i] - item[i]) ** 2 for i in range(len(query))), row)
            for row, item in enumerate(gallery.astype(np.float64))
        )[:k]
        rows.append([row for _, row in found])
        squares.append([square for square, _ in found])
    shape = (len(queries), min(k, len(gallery)))
    return np.array(rows, int).reshape(shape), np.array(squares, float).reshape(shape)


def units(rng, count, dimensions):
    vectors = rng.normal(size=(count, dimensions))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def corners(rng, count):
    """Vectors of length 1 in whose products float32 makes no error, and which are often equally near."""
    return rng.choice([-0.5, 0.5], size=(count, 4)).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(0, 4),
    count=st.integers(1, 40),
    k=st.integers(0, 50),
)
def test_ties_are_in_the_order_of_rows(seed, batch, count, k):
    rng = np.random.default_rng(seed)
    queries, gallery = corners(rng, batch), corners(rng, count)
    rows, squares = nearest(tf.constant(queries), tf.constant(gallery), tf.constant(k))
    expected_rows, expected_squares = by_loops(queries, gallery, k)
    assert rows.shape == (batch, min(k, count))
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_array_equal(squares, expected_squares)


def test_equally_near_rows_are_in_order_also_where_their_products_are_not():
    """Lengths differ, as much as rounding lets them differ, so that the later row has the larger product."""
    gallery = np.array([[0.5, 0.25], [0.75, 0.5], [0.75, -0.5], [0.5, -0.25], [-1.0, 0.0]], np.float32)
    for k in (1, 2, 3, 4, 5):
        rows, squares = nearest(tf.constant([[1.0, 0.0]]), tf.constant(gallery), tf.constant(k))
        assert rows.numpy().tolist() == [[0, 1, 2, 3, 4][:k]]
        assert squares.numpy().tolist() == [[0.3125, 0.3125, 0.3125, 0.3125, 4.0][:k]]


@pytest.mark.parametrize("k", [1, 7, 300])
def test_distances_are_exact(k):
    rng = np.random.default_rng(k)
    gallery = units(rng, 257, 16)
    # Neighbors so near that a product of float32 would lose their distance.
    queries = units(rng, 5, 16)
    gallery[100] = queries[2]
    gallery[200] = queries[2] + np.float32(3e-5) * units(rng, 1, 16)[0]
    rows, squares = nearest(tf.constant(queries), tf.constant(gallery), tf.constant(k))
    expected_rows, expected_squares = by_loops(queries, gallery, k)
    np.testing.assert_allclose(squares, expected_squares, rtol=2e-6, atol=1e-12)
    np.testing.assert_array_equal(rows, expected_rows)
    assert squares[2, 0] == 0


def test_neighbors_of_a_crowd_are_those_of_float64():
    """More images within the rounding of the product than there are spare candidates."""
    rng = np.random.default_rng(0)
    gallery = np.array([1, 0, 0, 0]) + 1e-5 * rng.normal(size=(300, 4))
    gallery = (gallery / np.linalg.norm(gallery, axis=1, keepdims=True)).astype(np.float32)
    rows, squares = nearest(tf.constant(gallery[:20]), tf.constant(gallery), tf.constant(5))
    exact = gallery.astype(np.float64)
    expected = np.sort(np.square(exact[:20, None] - exact).sum(axis=2), axis=1)[:, :5]
    np.testing.assert_allclose(squares, expected, rtol=2e-7)
    chosen = np.square(exact[:20, None] - exact[rows.numpy()]).sum(axis=2)
    np.testing.assert_allclose(chosen, expected, rtol=1e-12)
