"""The search in the graph and the index beside it, against a search by loops in float64."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdml.errors import UserError
from tfdml.export.retriever import exact, indexed
from tfdml.export.retriever.exact import nearest
from tfdml.export.retriever.indexed import GalleryIndex


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
    at_once=st.integers(1, 64),
)
def test_ties_are_in_the_order_of_rows_whatever_the_blocks(seed, batch, count, k, at_once):
    rng = np.random.default_rng(seed)
    queries, gallery = corners(rng, batch), corners(rng, count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_SCORES_AT_ONCE", at_once)
        patch.setattr(exact, "_DIFFERENCES_AT_ONCE", at_once)
        rows, squares = nearest(tf.constant(queries), tf.constant(gallery), tf.constant(k))
    expected_rows, expected_squares = by_loops(queries, gallery, k)
    assert rows.shape == (batch, min(k, count))
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_array_equal(squares, expected_squares)


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_equally_near_rows_are_in_order_also_where_their_products_are_not(at_once, monkeypatch):
    """Lengths differ, as much as rounding lets them differ, so that the later row has the larger product."""
    monkeypatch.setattr(exact, "_SCORES_AT_ONCE", at_once)
    gallery = np.array([[0.5, 0.25], [0.75, 0.5], [0.75, -0.5], [0.5, -0.25], [-1.0, 0.0]], np.float32)
    for k in (1, 2, 3, 4, 5):
        rows, squares = nearest(tf.constant([[1.0, 0.0]]), tf.constant(gallery), tf.constant(k))
        assert rows.numpy().tolist() == [[0, 1, 2, 3, 4][:k]]
        assert squares.numpy().tolist() == [[0.3125, 0.3125, 0.3125, 0.3125, 4.0][:k]]


@pytest.mark.parametrize("k", [1, 7, 300])
def test_distances_are_exact(k, monkeypatch):
    monkeypatch.setattr(exact, "_SCORES_AT_ONCE", 1000)
    rng = np.random.default_rng(k)
    gallery = units(rng, 257, 16)
    # Neighbours so near that a product of float32 would not tell their distance.
    queries = units(rng, 5, 16)
    gallery[100] = queries[2]
    gallery[200] = queries[2] + np.float32(3e-5) * units(rng, 1, 16)[0]
    rows, squares = nearest(tf.constant(queries), tf.constant(gallery), tf.constant(k))
    expected_rows, expected_squares = by_loops(queries, gallery, k)
    np.testing.assert_allclose(squares, expected_squares, rtol=2e-6, atol=1e-12)
    np.testing.assert_array_equal(rows, expected_rows)
    assert squares[2, 0] == 0


def clustered(count, dimensions=8, classes=40, seed=0):
    rng = np.random.default_rng(seed)
    centres = units(rng, classes, dimensions)
    vectors = centres[rng.integers(0, classes, count)] + 0.2 * rng.normal(size=(count, dimensions))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def index():
    return GalleryIndex.build(clustered(3000), recall=0.97)


def test_the_index_reaches_the_recall_that_its_card_tells_of(index):
    gallery = clustered(3000)
    assert index.card["recall@10"] >= 0.97
    assert 1 <= index.card["cells_searched"] < index.card["cells"]
    rows = np.unique(np.linspace(0, 2999, 500).astype(int))
    found, _ = index.search(gallery[rows], 11)
    expected = tf.math.top_k(gallery[rows] @ gallery.T, 11)[1].numpy()
    shares = [
        len(set(near.tolist()) & set(real.tolist()) - {row}) / 10
        for row, near, real in zip(rows, found, expected, strict=True)
    ]
    assert np.mean(shares) == pytest.approx(index.card["recall@10"], abs=0.002)


def test_what_the_index_finds_it_measures_and_orders_exactly(index):
    gallery, queries = clustered(3000), clustered(20, seed=1)
    rows, squares = index.search(queries, 5)
    for query, near, distances in zip(queries, rows, squares, strict=True):
        real = ((gallery[near].astype(np.float64) - query) ** 2).sum(1)
        np.testing.assert_allclose(distances, real, rtol=1e-5)
        assert list(zip(distances, near, strict=True)) == sorted(zip(distances, near, strict=True))


def test_more_neighbours_than_the_searched_cells_hold_is_all_of_the_gallery(index):
    rows, squares = index.search(clustered(2, seed=2), 5000)
    assert rows.shape == (2, 3000)
    for near, distances in zip(rows, squares, strict=True):
        assert sorted(near.tolist()) == list(range(3000))
        assert (np.diff(distances) >= 0).all()


def test_a_query_whose_cells_hold_fewer_is_searched_in_all_and_the_others_stay_as_they_are(index):
    """Each query gets as many as it asks for; only some of them need more cells for it."""
    gallery, queries = clustered(3000), clustered(40, seed=5)
    k = 100
    parameters = {"k": k, "cells": index.card["cells_searched"]}
    found = indexed._search(index.index, queries, **parameters)[1]
    short = (found < 0).any(axis=1)
    assert 0 < short.sum() < len(queries), "choose another k"
    rows, squares = index.search(queries, k)
    assert rows.shape == squares.shape == (40, k)
    assert (rows >= 0).all()
    np.testing.assert_array_equal(rows[short], by_loops(queries[short], gallery, k)[0])
    np.testing.assert_array_equal(np.sort(rows[~short], 1), np.sort(found[~short], 1))


def test_equally_near_rows_of_the_index_are_in_order():
    # Forty of each, as a sort of a few would keep them in their order by chance.
    gallery = np.repeat(clustered(30), 40, axis=0)[np.random.default_rng(0).permutation(1200)]
    rows, squares = GalleryIndex.build(gallery, recall=1.0).search(gallery[:20], 40)
    for query, near in zip(gallery[:20], rows, strict=True):
        assert near.tolist() == np.flatnonzero((gallery == query).all(axis=1)).tolist()
    assert not squares.any()


def test_an_index_keeps_its_embeddings_and_lends_its_cells(index, tmp_path):
    gallery = clustered(3000)
    np.testing.assert_array_equal(index.embeddings(), gallery)
    grown = GalleryIndex.build(np.concatenate([gallery, clustered(100, seed=3)]), 0.97, like=index)
    assert grown.card["cells"] == index.card["cells"]
    assert len(grown) == 3100
    grown.write(tmp_path)
    read = GalleryIndex.read(tmp_path, grown.card)
    queries = clustered(5, seed=4)
    for found, expected in zip(read.search(queries, 3), grown.search(queries, 3), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_damaged_index_and_a_recall_that_is_no_fraction(tmp_path):
    (tmp_path / "gallery.faiss").write_bytes(b"no index")
    with pytest.raises(UserError, match=r"gallery\.faiss cannot be read"):
        GalleryIndex.read(tmp_path, {})
    with pytest.raises(UserError, match=r"recall=1\.5"):
        GalleryIndex.build(clustered(50), recall=1.5)


def test_a_gallery_of_one_item_can_be_indexed():
    index = GalleryIndex.build(clustered(1))
    rows, squares = index.search(clustered(1), 3)
    assert (rows.tolist(), squares.tolist()) == ([[0]], [[0.0]])
