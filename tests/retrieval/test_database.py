"""What every gallery does, whichever database it lives in."""

import sys
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.retrieval.databases import KINDS, psycopg
from tfdml import kernels
from tfdml.errors import UserError
from tfdml.pairwise import DISTANCES
from tfdml.retrieval import SCHEMES, connect, is_gallery, nearest_neighbors
from tfdml.retrieval.database import Address, GalleryDatabase, Rows, parse, ranked, shown

# Signs that mean something in SQL, in expressions, in JSON, or to a terminal; and beyond ASCII.
AWKWARD = [
    "it's",
    'a "b"',
    "back\\slash",
    "100%",
    "a;--",
    "{x}",
    "ünï/çødé 🚗",
    "`id`",
    " ",
    "tab\t",
    "line\nbreak",
    "$1",
]


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
    vectors[100:110] = vectors[20]
    ids = [f"row-{row * 7 % 150}" for row in range(150)]
    queries = np.concatenate([vectors[[20, 7, 50]], rng.normal(size=(9, 12)).astype(np.float32)])
    with databases.gallery(kind, distance=distance) as gallery:
        gallery.upsert(ids, vectors)
        assert gallery.distance == distance
        found = gallery.search(queries, k=15)
        wanted, distances = exact(queries, ids, vectors, 15, distance)
        np.testing.assert_allclose(found.distances, distances, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found.ids, wanted)


@pytest.mark.parametrize(
    ("kernel", "distance"),
    [
        (kernels.GaussianMixture(), "euclidean"),
        (kernels.Exponential(), "dot"),
        (kernels.Polynomial(3), "dot"),
    ],
)
def test_kernels_rank_as_the_distance_that_stands_for_them(kind, databases, kernel, distance):
    vectors = np.random.default_rng(5).normal(size=(80, 6)).astype(np.float32)
    with databases.gallery(kind, distance=distance) as gallery:
        gallery.upsert([f"{row}" for row in range(80)], vectors)
        found = gallery.search(vectors[:9], k=80).ids.astype(int)
    gram = np.asarray(kernel(vectors[:9], vectors), np.float64)
    ranked = np.take_along_axis(gram, found, axis=1)
    assert np.all(np.diff(ranked, axis=1) <= 1e-6 * np.abs(ranked).max())
    assert np.all(ranked[:, 0] > ranked[:, -1])


def small_galleries():
    """Vectors on a coarse grid, full of copies and ties, and queries of the same kind."""
    grid = hnp.arrays(np.float32, st.tuples(st.integers(1, 24), st.just(3)), elements=st.integers(-2, 2))
    return st.tuples(grid, grid, st.integers(1, 12), st.sampled_from(["sqeuclidean", "dot"]))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=small_galleries(), seed=st.integers(0, 10))
def test_ties_are_ordered_by_id_as_the_exact_search_orders_them(kind, databases, drawn, seed):
    vectors, queries, k, distance = drawn
    ids = [f"{row:02d}" for row in np.random.default_rng(seed).permutation(len(vectors))]
    labels = [row % 2 for row in range(len(vectors))]
    with databases.gallery(kind, distance=distance) as gallery:
        gallery.upsert(ids, vectors, {"label": labels})
        for condition in (None, {"label": 1}):
            chosen = [row for row in range(len(ids)) if condition is None or labels[row] == 1]
            found = gallery.search(queries, k, condition)
            held = min(k, len(chosen))
            assert np.all(found.ids[:, held:] == None)  # noqa: E711  (element by element)
            assert np.all(np.isinf(found.distances[:, held:]))
            if held:
                wanted = exact(queries, [ids[row] for row in chosen], vectors[chosen], held, distance)
                np.testing.assert_array_equal(found.ids[:, :held], wanted[0])
                np.testing.assert_array_equal(found.distances[:, :held], wanted[1])


def test_more_copies_than_candidates_are_ordered_by_id(gallery):
    vectors = np.ones((60, 4), np.float32)
    vectors[:10] = 9
    gallery.upsert([f"{row:03d}" for row in range(59, -1, -1)], vectors)
    found = gallery.search(np.ones((1, 4)), k=5)
    assert found.ids.tolist() == [["000", "001", "002", "003", "004"]]
    assert found.distances.tolist() == [[0.0] * 5]


def test_upsert_replaces_the_whole_row(gallery):
    gallery.upsert(["a", "b"], np.eye(2), {"label": [1, 2], "role": ["query", "gallery"]})
    gallery.upsert(["b", "c"], -np.eye(2), {"label": [5, 6], "role": ["train", "train"]})
    assert len(gallery) == 3
    found = gallery.search(np.array([[-1.0, 0.0]]), k=3)
    assert found.ids.tolist() == [["b", "a", "c"]] or found.ids.tolist() == [["b", "c", "a"]]
    assert found.distances[0, 0] == 0
    assert found.attributes["label"][0, 0] == 5
    assert found.attributes["role"][0, 0] == "train"
    assert (gallery.count({"label": 2}), gallery.count({"role": "train"})) == (0, 2)


def test_delete_passes_over_unknown_ids(gallery):
    assert gallery.delete(["a"]) == 0
    gallery.upsert(["a", "b", "c"], np.eye(3))
    assert gallery.delete(["b", "zz"]) == 1
    assert gallery.delete(["b"]) == 0
    assert gallery.delete([]) == 0
    assert len(gallery) == 2
    assert sorted(gallery.search(np.eye(3)[1:2], k=3).ids[0, :2].tolist()) == ["a", "c"]
    gallery.upsert(["b"], np.eye(3)[1:2])
    assert gallery.search(np.eye(3)[1:2], k=1).ids.tolist() == [["b"]]


def test_awkward_texts_are_ids_values_and_filters(gallery):
    vectors = np.random.default_rng(0).normal(size=(len(AWKWARD), 5))
    gallery.upsert(AWKWARD, vectors, {"path": AWKWARD, "label": [-(2**63), 2**63 - 1, *range(10)]})
    for row, text in enumerate(AWKWARD):
        found = gallery.search(vectors[:1], 2, {"path": text})
        assert found.ids.tolist() == [[text, None]]
        assert found.attributes["path"].tolist() == [[text, None]]
        assert gallery.count({"path": text + "x"}) == 0
        assert gallery.search(vectors[row : row + 1], 1).ids.tolist() == [[text]]
    assert gallery.search(vectors, 1, {"label": 2**63 - 1, "path": AWKWARD[1]}).ids.tolist() == [[AWKWARD[1]]] * 12
    assert gallery.search(vectors, 1, {"label": 3, "path": AWKWARD[0]}).ids.tolist() == [[None]] * 12
    assert gallery.delete(AWKWARD[:6]) == 6
    assert len(gallery) == 6


def test_what_is_written_is_there_when_opened_again(kind, databases):
    uri = databases.address(kind, distance="cosine")
    with connect(uri) as gallery:
        assert (len(gallery), gallery.about) == (0, None)
        gallery.upsert(["a", "b"], np.array([[3.0, 0.0], [0.0, 0.5]]), {"label": [1, 2]})
    gallery.close()  # again
    for call in (gallery.search, lambda eye: gallery.upsert(["a", "b"], eye), gallery.delete, gallery.count):
        with pytest.raises(UserError, match="is closed: connect again"):
            call(np.eye(2))
    plain = uri.replace("&distance=cosine", "").replace("?distance=cosine", "")
    with connect(plain) as gallery:
        assert (gallery.distance, len(gallery)) == ("cosine", 2)
        found = gallery.search(np.array([[5.0, 5.0], [0.0, 0.0]]), k=2)
        np.testing.assert_allclose(found.distances, [[1 - 2**-0.5] * 2, [1, 1]], atol=1e-6)
        assert found.ids.tolist() == [["a", "b"]] * 2
        gallery.upsert(["c"], np.ones((1, 2)), {"label": [3]})
        assert gallery.search(np.ones((1, 2)), k=1).ids.tolist() == [["c"]]
    with pytest.raises(UserError, match="made with distance=cosine, not dot"):
        connect(uri.replace("cosine", "dot"))


def test_what_is_wrong_is_told_before_anything_is_written(gallery):
    queries = np.eye(3)
    with pytest.raises(UserError, match="holds no table"):
        gallery.search(queries)
    with pytest.raises(UserError, match="write it with tfdml index"):
        gallery.optimize()
    gallery.upsert(["a", "b", "c"], np.eye(3), {"label": [1, 2, 3]})
    same = {"label": [1]}
    for arguments, says in [
        ((["x"], np.ones((1, 4)), same), "4 dimensions, the gallery 3"),
        ((["x"], np.ones((1, 3))), r"holds the attributes label \(integer\); these rows have none"),
        ((["x"], np.ones((1, 3)), {"label": ["1"]}), r"these rows have label \(text\)"),
        ((["x"], np.ones((1, 3)), {**same, "role": ["a"]}), "these rows have"),
        ((["x", "y"], np.ones((1, 3)), {"label": [1, 2]}), "2 ids for 1 vectors"),
        ((["x", "x"], np.ones((2, 3)), {"label": [1, 2]}), "occur more than once, the first is x"),
        (([""], np.ones((1, 3)), same), "is empty"),
        (("x", np.ones((1, 3)), same), "a list of texts"),
        (([3], np.ones((1, 3)), same), "an id must be a text"),
        ((["a\0b"], np.ones((1, 3)), same), "NUL"),
        ((["x" * 1001], np.ones((1, 3)), same), "1,000 bytes"),
        ((["\udcff"], np.ones((1, 3)), same), "UTF-8"),
        ((["x"], np.full((1, 3), np.nan), same), "NaN"),
        ((["x"], np.full((1, 3), 1e20), same), r"beyond 1e\+15"),
        ((["x"], np.ones((1, 3)), {"label": [1, 2]}), "has 2 values for 1 rows"),
        ((["x"], np.ones((1, 3)), {"label": [2**63]}), "64 bits"),
        ((["x"], np.ones((1, 3)), {"label": [True]}), "must be a text"),
        ((["x"], np.ones((1, 3)), {"Label": [1]}), "the attribute 'Label' must be of a .. z"),
        ((["x"], np.ones((1, 3)), {"id": [1]}), "neither id nor vector"),
        ((["x", "y"], np.ones((2, 3)), {"label": [1, "2"]}), "integers and texts"),
    ]:
        with pytest.raises(UserError, match=says):
            gallery.upsert(*arguments)
    for options, says in [
        ({"vectors": np.eye(2)}, "2 dimensions, the gallery 3"),
        ({"vectors": np.full((1, 3), np.inf)}, "NaN or infinite"),
        ({"vectors": queries, "k": 0}, "`k` must be a positive integer"),
        ({"vectors": queries, "k": 5000}, "`k` must be at most 4,096"),
        ({"vectors": queries, "filter": {"role": "x"}}, "'role', which is no attribute of the gallery; it has label"),
        ({"vectors": queries, "filter": {"label": "1"}}, "of type integer, which '1' is not"),
    ]:
        with pytest.raises(UserError, match=says):
            gallery.search(**options)
    with pytest.raises(UserError, match="no attribute"):
        gallery.count({"role": "x"})
    assert len(gallery) == 3
    assert gallery.search(queries, k=1).ids.ravel().tolist() == ["a", "b", "c"]
    rows = gallery.rows(9)
    assert sorted(zip(rows.ids, rows.attributes["label"], strict=True)) == [("a", 1), ("b", 2), ("c", 3)]
    assert len(gallery.rows(2)) == 2


class Rounding(GalleryDatabase):
    """A database that ranks by |q|^2 + |g|^2 - 2 q g in float32, which far from the origin is noise."""

    def _open(self):
        self.fetched = []

    def _create(self, about):
        pass

    def _upsert(self, rows):
        self.held = rows

    def _nearest(self, vectors, k, conditions):
        self.fetched.append(k)
        lengths = np.einsum("md,md->m", self.held.vectors, self.held.vectors)
        answers = []
        for query in vectors:
            far = np.float32(query @ query) + lengths - np.float32(2) * (self.held.vectors @ query)
            rows = np.argsort(far, kind="stable")[:k]
            answers.append(Rows([self.held.ids[row] for row in rows], self.held.vectors[rows], {}))
        return answers

    def _close(self):
        pass

    _delete = _count = _rows = _indexes = _optimize = None


def test_candidates_as_near_as_the_database_can_tell_are_all_fetched():
    """The nearest is the last of 40 that the database's rounding leaves in any order."""
    far = np.linspace(0.02, 0.01, 40, dtype=np.float32)
    vectors = np.full((41, 2), 1000, np.float32)
    vectors[:40, 0] += far
    vectors[40] = 0
    with Rounding(Address("lancedb", path="/x", distance="euclidean")) as gallery:
        gallery.upsert([f"{row:02d}" for row in range(41)], vectors)
        found = gallery.search(np.full((1, 2), 1000), k=3)
        assert found.ids.tolist() == [["39", "38", "37"]]
        assert gallery.fetched == [7, 14, 28, 56]
        gallery.fetched.clear()
        assert gallery.search(np.zeros((1, 2)), k=1).ids.tolist() == [["40"]]
        assert gallery.fetched == [5]


@pytest.mark.parametrize(("gap", "settled"), [(0.4e-6, False), (4e-6, True)])
def test_settled_is_a_candidate_beyond_the_rounding(gap, settled):
    """Squared distances of 1 and 1 + gap (|q|^2 + |g|^2), of a query of length 1."""
    query = np.array([1.0, 0.0], np.float32)
    near, beyond = (np.array([1.0, np.sqrt(1 + gap * part)], np.float64) for part in (0, 3))
    rows = Rows(["a", "b"], np.stack([near, beyond]).astype(np.float32), {})
    assert ranked(query, rows, 1, "sqeuclidean")[2] is settled


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


def built_index(gallery, databases):
    """What the database itself says of its index."""
    if gallery.address.scheme == "lancedb":
        import lancedb

        (index,) = lancedb.connect(gallery.address.path).open_table("gallery").list_indices()
        return f"{index.index_type} {index.index_details}"
    query = "SELECT indexdef FROM pg_indexes WHERE tablename = %s"
    with psycopg.connect(host=databases.socket, user="postgres") as connection:
        return str(connection.execute(query, (gallery.address.table,)).fetchall())


@pytest.mark.parametrize(
    ("kind", "index", "says"),
    [
        ("lancedb", "ivf_pq&lists=1&bytes=3", ("IvfPq", "'num_sub_vectors': 3")),
        ("lancedb", "hnsw&lists=1&links=6", ("IvfHnswFlat", "'max_connections': 6")),
        ("pgvector", "ivf&lists=7", ("ivfflat", "lists='7'")),
        ("pgvector", "hnsw&links=5", ("hnsw", "m='5'")),
    ],
)
def test_an_index_is_built_with_the_numbers_of_its_address(kind, index, says, databases, few):
    with connect(databases.address(kind, distance="euclidean", index=index)) as gallery:
        gallery.upsert(list(map(str, range(300))), few)
        gallery.optimize()
        built = built_index(gallery, databases)
    assert all(part in built for part in says), built


@pytest.mark.parametrize("kind", ["lancedb", "pgvector"])
def test_an_index_that_the_table_does_not_have_is_refused(kind, databases, few):
    uri = databases.address(kind, distance="euclidean")
    with connect(f"{uri}&index=hnsw&links=6") as gallery:
        gallery.upsert(list(map(str, range(300))), few)
        with pytest.raises(UserError, match=r"has no index hnsw&links=6 \(it has none\): build it with tfdml index"):
            gallery.search(few[:1])
        gallery.optimize()
        gallery.search(few[:1])
    for other, says in [("ivf", "no index ivf"), ("hnsw&links=8", r"no index hnsw&links=8 \(it has hnsw&links=6\)")]:
        with connect(f"{uri}&index={other}") as gallery, pytest.raises(UserError, match=says):
            gallery.search(few[:1])


SECRET = "s3cr/et@#?x"
QUOTED = "s3cr%2Fet%40%23%3Fx"


def test_what_an_address_says():
    address = parse(f"pgvector://me:{QUOTED}@[::1]:5433/shop?table=cars&distance=cosine&index=hnsw&links=8")
    assert (address.host, address.port, address.path) == ("::1", 5433, "/shop")
    assert (address.user, address.password) == ("me", SECRET)
    assert (address.table, address.distance, address.index, address.options) == ("cars", "cosine", "hnsw", {"links": 8})
    assert str(address) == "pgvector://[::1]:5433/shop?table=cars"
    plain = parse("lancedb:///data/my%20cars")
    assert (plain.path, plain.table, plain.distance, plain.index) == ("/data/my cars", "gallery", None, "")
    assert parse("qdrant://:key@host").password == "key"


def test_no_text_made_of_an_address_holds_what_is_secret():
    for uri in (
        f"pgvector://me:{QUOTED}@host/shop",
        f"pgvector://me:{SECRET}@host/shop",
        f"pgvector://me:{QUOTED}@host:port/shop?index=x{SECRET}",
        f"pgvector://me:{QUOTED}@host/shop?key={SECRET}",
        f"pgvector://me:{QUOTED}@host/shop?index=ivf&lists={SECRET}",
        f"redis://me:{SECRET}@host/0",
        f"lancedb://me:{SECRET}@host",
    ):
        try:
            told = f"{parse(uri)!r} {parse(uri)}"
        except UserError as error:
            told = f"{error} {error.__cause__}"
        for part in ("s3cr", "et@", "et%40"):
            assert part not in told
    assert "me" not in shown(f"pgvector://me:{SECRET}@host/x")


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("redis://host/0", "unknown database; write one of lancedb:///folder, pgvector://user"),
        ("/data/cars", "`uri=the address`: unknown database"),
        ("lancedb://data/cars", "write lancedb:///folder"),
        ("lancedb:///", "write lancedb:///folder"),
        ("pgvector://host:99999/db", "cannot be read"),
        ("pgvector://host:x/db", "cannot be read"),
        ("lancedb:///a#b", "cannot be read: write lancedb:///folder, with %2F"),
        ("lancedb:///a?table=Cars", "a table's name is of a .. z"),
        ("lancedb:///a?table=a;drop", "a table's name is of a .. z"),
        ("lancedb:///a?distance=manhattan", "unknown distance 'manhattan'; one of euclidean"),
        ("lancedb:///a?index=scann", "unknown index 'scann'; lancedb has ivf, ivf_pq, hnsw; leave it out for exact"),
        ("pgvector://h/d?index=ivf_pq", "pgvector has ivf, hnsw"),
        ("lancedb:///a?lists=3", "unknown option 'lists'; here it may be table, distance, index"),
        ("lancedb:///a?index=ivf&lists=0", "lists must be a positive integer, not 0"),
        ("lancedb:///a?index=ivf&lists=2.5", "lists must be a positive integer, not '2.5'"),
        ("lancedb:///a?table=a&table=b", "the option table is there twice"),
        ("lancedb:///a?table", "cannot be read"),
        ("qdrant://h?tls=maybe", "tls must be true or false"),
        ("qdrant:///tmp/x?index=hnsw", "the local mode searches exactly"),
    ],
)
def test_wrong_addresses_are_one_clear_line(uri, says):
    with pytest.raises(UserError, match=says.replace("?", r"\?").replace("(", r"\(")) as caught:
        connect(uri)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "package", "module"),
    [
        ("lancedb:///a", "lancedb", "lancedb_gallery"),
        ("pgvector://h/d", "psycopg", "pgvector_gallery"),
        ("qdrant://h", "qdrant_client", "qdrant_gallery"),
    ],
)
def test_a_missing_client_is_told_with_its_extra(uri, package, module, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"tfdml.retrieval.{module}", raising=False)
    with pytest.raises(
        UserError, match=rf"needs the package {package}: pip install 'tfdml\[{uri.partition(':')[0]}\]'"
    ):
        connect(uri)


@pytest.mark.parametrize("scheme", ["pgvector", "qdrant"])
def test_a_server_that_is_not_there_is_one_line_without_the_password(scheme, caplog, capfd):
    with warnings.catch_warnings(record=True) as warned, pytest.raises(UserError) as caught:
        connect(f"{scheme}://me:{QUOTED}@127.0.0.1:1/shop")
    told = str(caught.value) + caplog.text + "".join(capfd.readouterr()) + "".join(str(one.message) for one in warned)
    assert "127.0.0.1:1/shop` cannot be opened: " in told
    assert "refused" in told
    assert "s3cr" not in told
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_files_of_something_else_are_refused(tmp_path):
    import lancedb
    import pyarrow

    lancedb.connect(tmp_path / "lance").create_table("gallery", pyarrow.table({"id": ["a"]}))
    with pytest.raises(UserError, match="is a table of something else: name another"):
        connect(f"lancedb://{tmp_path / 'lance'}")
    (tmp_path / "file").write_text("")
    for kind in ("lancedb", "qdrant"):
        with pytest.raises(UserError, match="cannot be written"), connect(f"{kind}://{tmp_path / 'file'}") as gallery:
            gallery.upsert(["a"], [[1.0]])


def test_what_is_a_gallery():
    assert all(is_gallery(f"{scheme}://x") for scheme in SCHEMES)
    assert not any(map(is_gallery, ("lancedb", "runs/lancedb", "grpc://x", "")))
