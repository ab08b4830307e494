"""What every gallery does, whichever database it lives in."""

import sys
import warnings

import numpy as np
import pytest

from tests.retrieval.databases import KINDS, psycopg
from tfdml.errors import UserError, redact
from tfdml.pairwise import DISTANCES
from tfdml.retrieval import connect, nearest_neighbors
from tfdml.retrieval.galleries import parse

# Signs that mean something in SQL, in expressions, in JSON, or to a terminal; and beyond ASCII.
AWKWARD = ["it's", 'a "b"', "back\\slash", "100%", "a;--", "{x}"]
AWKWARD += ["ünï/çødé 🚗", "`id`", " ", "tab\t", "line\nbreak", "$1"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def gallery(kind, databases):
    with databases.gallery(kind) as made:
        yield made


def exact(queries, ids, vectors, k, distance):
    """(N, k) ids and distances of the exact search, ties by id."""
    order = np.argsort(np.array(ids, object))
    rows, distances = nearest_neighbors(queries, vectors[order], k=k, distance=distance)
    return np.array(ids, object)[order][rows], distances


@pytest.mark.parametrize("distance", DISTANCES)
def test_the_order_is_that_of_the_exact_search(kind, databases, distance):
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(150, 12)).astype(np.float32) * rng.uniform(0.5, 2, (150, 1)).astype(np.float32)
    vectors[7] = 0
    ids = [f"row-{row * 7 % 150}" for row in range(150)]
    queries = np.concatenate([vectors[[20, 50]], rng.normal(size=(9, 12)).astype(np.float32)])
    with databases.gallery(kind, distance=distance) as gallery:
        gallery.upsert(ids, vectors)
        assert gallery.distance == distance
        neighbors = gallery.search(queries, k=15)
        names, distances = exact(queries, ids, vectors, 15, distance)
        np.testing.assert_allclose(neighbors.distances, distances, rtol=1e-5, atol=2e-5)
        np.testing.assert_array_equal(neighbors.ids, names)


def test_equal_distances_are_ordered_by_id(gallery):
    vectors = np.ones((6, 4), np.float32)
    vectors[:2] = 9
    gallery.upsert(["f", "e", "d", "c", "b", "a"], vectors)
    neighbors = gallery.search(np.ones((1, 4)), k=4)
    assert neighbors.ids.tolist() == [["a", "b", "c", "d"]]
    assert neighbors.distances.tolist() == [[0.0] * 4]
    assert gallery.search(np.ones((1, 4)), k=9).ids[0, 4:].tolist() == ["e", "f", None, None, None]


def test_upsert_replaces_the_whole_row_and_delete_ignores_unknown_ids(gallery):
    assert gallery.delete(["a"]) == 0
    gallery.upsert(["a", "b"], np.eye(2), {"class": ["bus", "coupe"], "role": ["query", "gallery"]})
    gallery.upsert(["b", "c"], -np.eye(2), {"class": ["van", "bus"]})
    assert len(gallery) == 3
    neighbors = gallery.search(np.array([[-1.0, 0.0]]), k=3)
    assert neighbors.ids.tolist() == [["b", "c", "a"]]
    assert [gallery.delete(ids) for ids in (["c", "zz"], ["c"], [])] == [1, 0, 0]
    gallery.upsert(["c"], -np.eye(2)[1:], {"class": ["bus"]})
    assert neighbors.distances[0, 0] == 0
    assert neighbors.columns["class"].tolist() == [["van", "bus", "bus"]]
    assert neighbors.columns["role"].tolist() == [["", "", "query"]]
    assert gallery.search(np.eye(2)[:1], 3, {"class": "bus", "role": "query"}).ids.tolist() == [["a", None, None]]
    assert gallery.search(np.eye(2)[:1], 1, {"class": "coupe"}).ids.tolist() == [[None]]


def test_awkward_texts_are_ids_values_and_filters(gallery):
    vectors = np.random.default_rng(0).normal(size=(len(AWKWARD), 5))
    gallery.upsert(AWKWARD, vectors, {"path": AWKWARD, "class": AWKWARD[::-1]})
    for row, text in enumerate(AWKWARD):
        neighbors = gallery.search(vectors[:1], 2, {"path": text})
        assert neighbors.ids.tolist() == [[text, None]]
        assert neighbors.columns["class"].tolist() == [[AWKWARD[-1 - row], None]]
        assert gallery.search(vectors[row : row + 1], 1).ids.tolist() == [[text]]
        assert gallery.rows(9, [text, text + "x"]).columns["path"] == [text]
    assert gallery.search(vectors, 1, {"class": AWKWARD[3], "path": AWKWARD[0]}).ids.tolist() == [[None]] * 12
    assert gallery.delete(AWKWARD[:6]) == 6
    assert len(gallery) == 6


def test_rows_that_are_written_are_there_when_opened_again(kind, databases):
    uri = databases.address(kind, distance="cosine")
    with connect(uri) as gallery:
        assert (len(gallery), gallery.about) == (0, None)
        gallery.upsert(["a", "b"], np.array([[3.0, 0.0], [0.0, 0.5]]), model="sha256:1")
    plain = uri.replace("&distance=cosine", "").replace("?distance=cosine", "")
    with connect(plain) as gallery:
        assert (gallery.distance, len(gallery)) == ("cosine", 2)
        neighbors = gallery.search(np.array([[5.0, 5.0], [0.0, 0.0]]), k=2)
        np.testing.assert_allclose(neighbors.distances, [[1 - 2**-0.5] * 2, [1, 1]], atol=1e-6)
        assert neighbors.ids.tolist() == [["a", "b"]] * 2
        gallery.upsert(["c"], np.ones((1, 2)))
        assert gallery.search(np.ones((1, 2)), k=1, model="sha256:1").ids.tolist() == [["c"]]
        for call in (lambda: gallery.upsert(["d"], np.ones((1, 2)), model="sha256:2"),
                     lambda: gallery.search(np.ones((1, 2)), model="sha256:2")):  # fmt: skip
            with pytest.raises(UserError, match="are of different models"):
                call()
        assert len(gallery) == 3
    with pytest.raises(UserError, match="made with distance=cosine"):
        connect(uri.replace("cosine", "dot"))


def test_wrong_rows_and_queries_are_refused_before_anything_is_written(gallery):
    queries = np.eye(3)
    with pytest.raises(UserError, match="holds no table"):
        gallery.search(queries)
    gallery.upsert(["a", "b", "c"], np.eye(3), {"class": ["x", "y", "z"]})
    for call, arguments, says in [
        (gallery.upsert, (["x"], np.ones((1, 4))), "have 4 dimensions, .* has 3"),
        (gallery.upsert, (["x", "x"], np.ones((2, 3))), "give 2 vectors"),
        (gallery.upsert, ([""], np.ones((1, 3))), "no empty id"),
        (gallery.upsert, (["x"], np.ones((1, 3)), {"class": ["a", "b"]}), "give 1 vectors"),
        (gallery.upsert, (["x"], np.ones((1, 3)), {"price": ["a"]}), "unknown column 'price'; one of path, class"),
        (gallery.upsert, (["x"], np.full((1, 3), np.nan)), "NaN"),
        (gallery.search, (np.eye(2),), "2 dimensions, .* has 3"),
        (gallery.search, (queries, 1, {"price": "x"}), "unknown column 'price'"),
    ]:
        with pytest.raises(UserError, match=says):
            call(*arguments)
    assert len(gallery) == 3
    assert gallery.search(queries, k=1).ids.ravel().tolist() == ["a", "b", "c"]
    rows = gallery.rows(9)
    assert sorted(zip(rows.ids, rows.columns["class"], strict=True)) == [("a", "x"), ("b", "y"), ("c", "z")]
    np.testing.assert_array_equal(rows.vectors[np.argsort(rows.ids)], np.eye(3))
    assert len(gallery.rows(2).ids) == 2


# Of the tests of approximate indexes.
ROWS, NEAREST = 1500, 10


@pytest.fixture(scope="module")
def points():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(150, 16))
    vectors = (np.repeat(centers, 10, axis=0) + 0.4 * rng.normal(size=(ROWS, 16))).astype(np.float32)
    queries = vectors[::30] + 0.2 * rng.normal(size=(50, 16)).astype(np.float32)
    rows, distances = nearest_neighbors(queries, vectors, k=NEAREST)
    return vectors, queries, rows.astype(str), distances


def recall(neighbors, nearest):
    return np.mean(
        [len(set(a) & set(b)) / NEAREST for a, b in zip(neighbors.ids.tolist(), nearest.tolist(), strict=True)]
    )


def test_an_index_is_used_and_effort_finds_more(kind, databases, points):
    vectors, queries, nearest, distances = points
    uri, efforts = databases.address(kind), (1, 200)
    mark = "&" if "?" in uri else "?"
    with connect(uri) as gallery:
        gallery.upsert(list(map(str, range(ROWS))), vectors, {"class": [str(row // 10) for row in range(ROWS)]})
    neighbors = []
    for effort in efforts:
        with connect(f"{uri}{mark}effort={effort}") as gallery:
            if effort == efforts[0]:
                gallery.optimize()
                assert any(name in built_index(gallery, databases) for name in ("IvfPq", "USING hnsw"))
            neighbors.append(gallery.search(queries, NEAREST))
            filtered = gallery.search(queries, NEAREST, {"class": "3"}).ids
            assert {name for name in filtered.ravel() if name is not None} <= set(map(str, range(30, 40)))
            gallery.upsert(["new"], queries[:1])
            assert gallery.search(queries[:1], 1).ids.tolist() == [["new"]]
            assert gallery.delete(["new"]) == 1
    few, many = (recall(one, nearest) for one in neighbors)
    assert few <= many
    assert many >= 0.95
    # What an index finds has its own distance, also where the index has rounded it.
    for one in neighbors:
        there = one.ids != None  # noqa: E711  (element by element)
        query, _ = np.nonzero(there)
        true = np.linalg.norm(vectors[one.ids[there].astype(int)] - queries[query], axis=1)
        np.testing.assert_allclose(one.distances[there], true, rtol=1e-5)
    # Without an effort in the address the search is exact, whatever has been built.
    with connect(uri) as gallery:
        exact = gallery.search(queries, NEAREST)
        np.testing.assert_array_equal(exact.ids, nearest)
        np.testing.assert_allclose(exact.distances, distances, rtol=1e-5)


def built_index(gallery, databases):
    """What the database itself says of its index."""
    if gallery.address.parts.scheme == "lancedb":
        import lancedb

        (index,) = lancedb.connect(gallery.address.path).open_table("gallery").list_indices()
        return str(index.index_type)
    query = "SELECT indexdef FROM pg_indexes WHERE tablename = %s"
    with psycopg.connect(host=databases.socket, user="postgres") as connection:
        return str(connection.execute(query, (gallery.address.table,)).fetchall())


SECRET, QUOTED = "s3cr/et@#?x", "s3cr%2Fet%40%23%3Fx"


def test_no_text_made_of_an_address_holds_its_password():
    address = parse(f"pgvector://me:{QUOTED}@[::1]:5433/my%20shop?table=cars&distance=cosine&effort=8")
    assert (address.parts.hostname, address.parts.port, address.path) == ("::1", 5433, "/my shop")
    assert (address.table, address.effort) == ("cars", 8)
    assert str(address) == "pgvector://[::1]:5433/my%20shop?table=cars&distance=cosine&effort=8"
    for uri in (
        f"pgvector://me:{SECRET}@host/shop",
        f"pgvector://me:{QUOTED}@host:port/shop",
        f"pgvector://me:{QUOTED}@host/shop?effort=x",
        f"redis://me:{SECRET}@host/0",
        f"lancedb://me:{SECRET}@host",
    ):
        try:
            text = f"{parse(uri)!r} {parse(uri)}"
        except UserError as error:
            text = f"{error} {error.__cause__}"
        for part in ("s3cr", "et@", "et%40"):
            assert part not in text
    assert "me" not in redact(f"pgvector://me:{SECRET}@host/x")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("redis://host/0", "write lancedb:///folder or pgvector://user"),
        ("lancedb:///a?table=a;drop", "the name of a table has a .. z"),
        ("lancedb:///a?lists=3", "unknown option 'lists'; one of table, distance, effort"),
        ("lancedb:///a?effort=0", "effort must be a positive number"),
    ],
)
def test_wrong_addresses_are_one_clear_line(uri, says):
    with pytest.raises(UserError) as caught:
        connect(uri)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("uri", "package"), [("lancedb:///a", "lancedb"), ("pgvector://h/d", "psycopg")])
def test_a_missing_client_is_named_with_its_extra(uri, package, monkeypatch):
    scheme = uri.partition(":")[0]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"tfdml.retrieval.{scheme}_gallery", raising=False)
    with pytest.raises(UserError, match=rf"{package}.*; pip install 'tfdml\[{scheme}\]'"):
        connect(uri)


def test_a_server_that_is_not_there_is_one_line_without_the_password(caplog, capfd):
    with warnings.catch_warnings(record=True) as warned, pytest.raises(UserError) as caught:
        connect(f"pgvector://me:{QUOTED}@127.0.0.1:1/shop")
    text = str(caught.value) + caplog.text + "".join(capfd.readouterr()) + "".join(str(one.message) for one in warned)
    assert "127.0.0.1:1/shop` cannot be opened: " in text
    assert "refused" in text
    assert "s3cr" not in text
    assert "\n" not in str(caught.value)
    assert "s3cr" not in str(caught.value.__cause__)


def test_files_of_something_else_are_refused(tmp_path):
    import lancedb
    import pyarrow

    lancedb.connect(tmp_path / "lance").create_table("gallery", pyarrow.table({"id": ["a"]}))
    with pytest.raises(UserError, match="is a table of something else: name another"):
        connect(f"lancedb://{tmp_path / 'lance'}")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), connect(f"lancedb://{tmp_path / 'file'}") as gallery:
        gallery.upsert(["a"], [[1.0]])
