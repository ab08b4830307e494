"""Approximate indexes of the databases: they are used, miss as much as they are told to, and make nothing up."""

import numpy as np
import pytest

from tfdml.errors import UserError
from tfdml.evaluation import nearest_neighbours
from tfdml.retrieval import connect

ROWS, NEAREST = 1500, 10


@pytest.fixture(scope="module")
def points():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(150, 16))
    vectors = (np.repeat(centres, 10, axis=0) + 0.4 * rng.normal(size=(ROWS, 16))).astype(np.float32)
    queries = vectors[::30] + 0.2 * rng.normal(size=(50, 16)).astype(np.float32)
    rows, distances = nearest_neighbours(queries, vectors, k=NEAREST)
    return vectors, queries, rows.astype(str), distances


def recall(found, wanted):
    return np.mean([len(set(a) & set(b)) / NEAREST for a, b in zip(found.ids.tolist(), wanted.tolist(), strict=True)])


@pytest.mark.one_quick_case
@pytest.mark.parametrize(
    ("kind", "index", "few", "many"),
    [
        ("lancedb", "ivf&lists=24", "effort=1", "effort=24"),
        ("pgvector", "ivf&lists=24", "effort=1", "effort=24"),
        ("lancedb", "ivf_pq&lists=8&bytes=4", "effort=1&refine=1", "effort=8&refine=20"),
        ("pgvector", "hnsw&links=4", "effort=1", "effort=200"),
        ("lancedb", "hnsw&lists=1&links=8", "effort=15", "effort=200"),
    ],
)
def test_an_index_is_used_and_effort_finds_more(kind, index, few, many, databases, points):
    vectors, queries, wanted, distances = points
    uri = databases.address(kind)
    ids = list(map(str, range(ROWS)))
    with connect(uri) as gallery:
        gallery.upsert(ids, vectors, {"label": np.arange(ROWS) // 10})
        assert recall(gallery.search(queries, NEAREST), wanted) == 1
    found = {}
    for effort in (few, many):
        with connect(f"{uri}{'&' if '?' in uri else '?'}index={index}&{effort}") as gallery:
            assert gallery.approximate
            if effort == few:
                gallery.optimize()
            found[effort] = gallery.search(queries, NEAREST)
            filtered = gallery.search(queries, NEAREST, {"label": 3}).ids
            assert {name for name in filtered.ravel() if name is not None} <= set(map(str, range(30, 40)))
            gallery.upsert(["new"], queries[:1], {"label": [0]})
            assert gallery.search(queries[:1], 1).ids.tolist() == [["new"]]
            assert gallery.delete(["new"]) == 1
    least = 1 if "ivf&" in index else 0.95
    assert recall(found[many], wanted) >= least
    assert recall(found[few], wanted) <= recall(found[many], wanted)
    # A graph of so few rows may miss none.
    assert recall(found[few], wanted) < 1 or "hnsw" in index
    # What is found has its own distance, also where the index has rounded it.
    for one in found.values():
        there = one.ids != None  # noqa: E711  (element by element)
        query, _ = np.nonzero(there)
        true = np.linalg.norm(vectors[one.ids[there].astype(int)] - queries[query], axis=1)
        np.testing.assert_allclose(one.distances[there], true, rtol=1e-5)
    # Without an index in the address the search is exact, whatever has been built.
    with connect(uri) as gallery:
        exact = gallery.search(queries, NEAREST)
        np.testing.assert_array_equal(exact.ids, wanted)
        np.testing.assert_allclose(exact.distances, distances, rtol=1e-5)


def test_too_few_rows_for_the_codes_are_told(databases):
    with databases.gallery("lancedb", index="ivf_pq") as gallery:
        gallery.upsert(["a"], np.ones((1, 4)))
        with pytest.raises(UserError, match="ivf_pq needs 256 rows at least, and there are 1"):
            gallery.optimize()
