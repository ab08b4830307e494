"""The index of a large gallery in a retriever's version: its cells, the recall in its card, its file."""

import numpy as np
import pytest

from tests.export.test_retriever_exact import units
from tfdml.errors import UserError
from tfdml.export.retriever import version
from tfdml.export.retriever.loaded import LoadedVersion
from tfdml.retrieval import load_index


def clustered(count, dimensions=8, classes=40, seed=0):
    rng = np.random.default_rng(seed)
    centres = units(rng, classes, dimensions)
    vectors = centres[rng.integers(0, classes, count)] + 0.2 * rng.normal(size=(count, dimensions))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def index():
    return version._index(clustered(3000), None)


def test_the_index_reaches_the_recall_that_its_card_tells_of(index):
    gallery = clustered(3000)
    card = version._index_card(index, gallery, 0.97)
    assert card["cells"] == index.lists == 76
    assert 1 <= card["cells_searched"] < card["cells"]
    found, _ = index.search(gallery, k=11, effort=card["cells_searched"])
    expected = np.argsort(-gallery @ gallery.T, axis=1)[:, :11]
    shares = [
        len(set(near.tolist()) & set(real.tolist()) - {row}) / 10
        for row, (near, real) in enumerate(zip(found, expected, strict=True))
    ]
    # On 500 of the 3,000: the standard error is below 0.004.
    assert np.mean(shares) == pytest.approx(card["recall@10"], abs=0.012)
    assert card["recall@10"] >= 0.97
    assert card["measured_on"].startswith("500 items")


def test_a_gallery_of_nearly_the_same_items_takes_the_cells_over(index):
    gallery = np.concatenate([clustered(3000), clustered(100, seed=3)])
    grown = version._index(gallery, index)
    np.testing.assert_array_equal(grown.centres(), index.centres())
    np.testing.assert_array_equal(grown.vectors(), gallery)
    assert version._index(clustered(1000), index).lists == 25


def test_a_written_index_is_read_and_a_damaged_one_refused(index, tmp_path):
    index.save(tmp_path / version.INDEX)
    read, queries = load_index(tmp_path / version.INDEX), clustered(5, seed=4)
    for found, expected in zip(read.search(queries, k=3), index.search(queries, k=3), strict=True):
        np.testing.assert_array_equal(found, expected)
    (tmp_path / version.INDEX).write_bytes(b"no index")
    with pytest.raises(UserError, match=r"gallery\.faiss is not an index that was saved here"):
        load_index(tmp_path / version.INDEX)


def test_a_recall_that_is_no_fraction_and_a_gallery_of_one_item(index):
    with pytest.raises(UserError, match=r"recall=1\.5"):
        version._index_card(index, clustered(3000), 1.5)
    one = version._index(clustered(1), None)
    card = version._index_card(one, clustered(1), 0.99)
    assert (card["cells"], card["cells_searched"], card["recall@10"]) == (1, 1, 1.0)


def test_a_search_of_few_cells_finds_as_many_as_asked_for(index, tmp_path):
    """One of 76 cells holds some 40 items: for 300 the whole gallery is searched, and no row is missing."""
    columns = {"ids": np.arange(3000).astype("S4"), "labels": np.arange(3000), "metadata": np.full(3000, b"")}
    card = {"items": 3000, "embedding_dim": 8, "index": {"cells_searched": 1}}
    queries, gallery = clustered(5, seed=4), clustered(3000)
    found = LoadedVersion(tmp_path, card, None, columns, index).search(queries, k=300)
    expected = np.argsort(-queries @ gallery.T, axis=1)[:, :300]
    assert [set(row.tolist()) for row in found.indices] == [set(row.tolist()) for row in expected]
