"""What every gallery does, whichever database it lives in."""

import warnings

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.index import IvfPq

from tests.retrieval.databases import KINDS, psycopg
from tests.retrieval.identities import distances_by_hand, made
from tfdml.errors import UserError, redact
from tfdml.evaluation import KNNClassifier
from tfdml.registry import DISTANCES, PER_CLASS
from tfdml.retrieval import (
    About,
    AddCounts,
    MemoryGallery,
    Rows,
    galleries,
    nearest_neighbors,
    open_gallery,
)
from tfdml.retrieval.addresses import parse

# Signs that mean something in SQL, in expressions, in JSON, or to a terminal; and beyond ASCII.
AWKWARD = ["it's", 'a "b"', "back\\slash", "100%", "a;--", "{x}"]
AWKWARD += ["ünï/çødé 🚗", "`id`", "per_cent", "'", "\\'", "$1"]


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
    vectors = rng.normal(size=(150, 12)).astype(np.float32) * rng.uniform(0.5, 2, (150, 1)).astype(
        np.float32
    )
    vectors[7] = 0
    ids = [f"row-{row * 7 % 150}" for row in range(150)]
    queries = np.concatenate([vectors[[20, 50]], rng.normal(size=(9, 12)).astype(np.float32)])
    with databases.gallery(kind, distance=distance) as gallery:
        gallery.add(ids, vectors)
        assert gallery.distance == distance
        neighbors = gallery.search(queries, k=15)
        names, distances = exact(queries, ids, vectors, 15, distance)
        np.testing.assert_allclose(neighbors.distances, distances, rtol=1e-5, atol=2e-5)
        np.testing.assert_array_equal(neighbors.ids, names)


def test_equal_distances_are_ordered_by_id(gallery):
    vectors = np.ones((6, 4), np.float32)
    vectors[:2] = 9
    gallery.add(["f", "e", "d", "c", "b", "a"], vectors)
    neighbors = gallery.search(np.ones((1, 4)), k=4)
    assert neighbors.ids.tolist() == [["a", "b", "c", "d"]]
    assert neighbors.distances.tolist() == [[0.0] * 4]
    assert gallery.search(np.ones((1, 4)), k=9).ids[0, 4:].tolist() == ["e", "f", None, None, None]


def test_a_row_is_replaced_and_keeps_what_is_not_given(gallery):
    assert gallery.delete(["a"]) == 0
    columns = {"class": ["bus", "coupe"], "path": ["a.jpg", "b.jpg"]}
    assert gallery.add(["a", "b"], np.eye(2), columns) == AddCounts(2, 0, 0)
    # A vector alone, and a vector with a class.
    assert gallery.add(["a"], [[3.0, 3.0]]) == AddCounts(0, 1, 0)
    assert gallery.add(["b", "c"], -np.eye(2), {"class": ["van", "bus"]}) == AddCounts(1, 1, 0)
    rows = gallery.rows(9, ["a", "b", "c"])
    texts = zip(rows.ids, rows.columns["class"], rows.columns["path"], strict=True)
    assert sorted(texts) == [("a", "bus", "a.jpg"), ("b", "van", "b.jpg"), ("c", "bus", "")]
    np.testing.assert_array_equal(rows.vectors[rows.ids.index("a")], [3, 3])
    neighbors = gallery.search(np.array([[-1.0, 0.0]]), k=3)
    assert neighbors.ids.tolist() == [["b", "c", "a"]]
    assert neighbors.distances[0, 0] == 0
    assert neighbors.columns["class"].tolist() == [["van", "bus", "bus"]]
    assert (
        gallery.search(np.eye(2), 3, {"class": "bus", "path": "a.jpg"}).ids.tolist()
        == [["a", None, None]] * 2
    )


def test_rows_are_deleted_by_id_and_by_what_they_are(gallery, monkeypatch):
    assert gallery.delete(where={"class": "bus"}) == 0
    classes = ["bus", "bus", "van", "cab", "", "it's"]
    gallery.add(list("abcdef"), np.ones((6, 2)), {"class": classes})
    assert [gallery.delete(ids) for ids in (["c", "zz"], ["c"], [])] == [1, 0, 0]
    assert gallery.delete(["a", "d"], where={"class": "bus"}) == 1
    assert sorted(gallery.rows(9).ids) == ["b", "d", "e", "f"]
    assert gallery.delete(where={"class": "it's"}) == gallery.delete(where={"class": ""}) == 1
    assert gallery.class_counts() == {"bus": 1, "cab": 1}
    with pytest.raises(UserError, match="name the rows"):
        gallery.delete()
    with pytest.raises(UserError, match="column=price"):
        gallery.delete(where={"price": "1"})
    # More ids than are named in one statement.
    monkeypatch.setattr(galleries, "LISTED_AT_ONCE", 10)
    many = [f"{row:02}" for row in range(45)]
    gallery.add(many, np.ones((45, 2)))
    assert [len(gallery.rows(most, many).ids) for most in (43, 10, 5, 0)] == [43, 10, 5, 0]
    assert len(gallery.rows(0).ids) == 0
    assert gallery.delete(many) == 45


def test_awkward_texts_are_ids_values_and_filters(gallery):
    vectors = np.random.default_rng(0).normal(size=(len(AWKWARD), 5))
    gallery.add(AWKWARD, vectors, {"path": AWKWARD, "class": AWKWARD[::-1]})
    for row, text in enumerate(AWKWARD):
        neighbors = gallery.search(vectors[:1], 2, {"path": text})
        assert neighbors.ids.tolist() == [[text, None]]
        assert neighbors.columns["class"].tolist() == [[AWKWARD[-1 - row], None]]
        assert gallery.search(vectors[row : row + 1], 1).ids.tolist() == [[text]]
        assert gallery.rows(9, [text, text + "x"]).columns["path"] == [text]
    assert (
        gallery.search(vectors, 1, {"class": AWKWARD[3], "path": AWKWARD[0]}).ids.tolist()
        == [[None]] * 12
    )
    assert gallery.delete(AWKWARD[:6]) == 6
    assert len(gallery) == 6


def test_rows_that_are_written_are_there_when_opened_again(kind, databases):
    uri = databases.address(kind, distance="cosine")
    with open_gallery(uri) as gallery:
        assert (len(gallery), gallery.about) == (0, None)
        gallery.add(["a", "b"], np.array([[3.0, 0.0], [0.0, 0.5]]), model="sha256:1")
    plain = uri.replace("&distance=cosine", "").replace("?distance=cosine", "")
    with open_gallery(plain) as gallery:
        assert (gallery.distance, len(gallery)) == ("cosine", 2)
        neighbors = gallery.search(np.array([[5.0, 5.0], [0.0, 0.0]]), k=2)
        np.testing.assert_allclose(neighbors.distances, [[1 - 2**-0.5] * 2, [1, 1]], atol=1e-6)
        assert neighbors.ids.tolist() == [["a", "b"]] * 2
        gallery.add(["c"], np.ones((1, 2)), model="unknown")
        assert gallery.search(np.ones((1, 2)), k=1, model="sha256:1").ids.tolist() == [["c"]]
        for call in (lambda: gallery.add(["d"], np.ones((1, 2)), model="sha256:2"),
                     lambda: gallery.search(np.ones((1, 2)), model="sha256:2")):  # fmt: skip
            with pytest.raises(UserError, match="are of different models"):
                call()
        assert len(gallery) == 3
    with pytest.raises(UserError, match="made with distance=cosine"):
        open_gallery(uri.replace("cosine", "dot"))


def test_wrong_rows_and_queries_are_refused_before_anything_is_written(gallery):
    queries = np.eye(3)
    with pytest.raises(UserError, match="holds no gallery"):
        gallery.search(queries)
    gallery.add(["a", "b", "c"], np.eye(3), {"class": ["x", "y", "z"]})
    for call, arguments, says in [
        (gallery.add, (["x"], np.ones((1, 4))), "dimensions"),
        (gallery.add, (["x", "x"], np.ones((2, 3))), "1 id occurs more than once"),
        (gallery.add, ([""], np.ones((1, 3))), "empty id"),
        (gallery.add, (["x"], np.ones((1, 3)), {"class": ["a", "b"]}), "texts"),
        (gallery.add, (["x\n"], np.ones((1, 3))), "control characters"),
        (gallery.add, (["x"], np.ones((1, 3)), {"price": ["a"]}), "price"),
        (gallery.add, (["x"], np.full((1, 3), np.nan)), "NaN"),
        (gallery.search, (np.eye(2),), "dimensions"),
        (gallery.search, (queries, 1, {"price": "x"}), "price"),
    ]:
        with pytest.raises(UserError, match=says):
            call(*arguments)
    assert len(gallery) == 3
    assert gallery.search(queries, k=1).ids.ravel().tolist() == ["a", "b", "c"]
    rows = gallery.rows(9)
    assert sorted(zip(rows.ids, rows.columns["class"], strict=True)) == [
        ("a", "x"),
        ("b", "y"),
        ("c", "z"),
    ]
    np.testing.assert_array_equal(rows.vectors[np.argsort(rows.ids)], np.eye(3))
    assert len(gallery.rows(2).ids) == 2


def test_an_index_of_the_database_leaves_the_search_exact(kind, databases):
    vectors = np.random.default_rng(0).normal(size=(1500, 16)).astype(np.float32)
    uri = databases.address(kind)
    with open_gallery(uri) as gallery:
        gallery.add([f"{row:04}" for row in range(1500)], vectors)
    if kind == "lancedb":
        lancedb.connect(gallery.place.path).open_table("gallery").create_index(
            "vector", config=IvfPq()
        )
    else:
        with psycopg.connect(user="postgres", autocommit=True) as connection:
            connection.execute(
                f"CREATE INDEX ON {gallery.place.table} USING hnsw (vector vector_l2_ops)"
            )
    with open_gallery(uri) as gallery:
        rows = gallery.search(vectors[::30], 10).ids.astype(int)
    np.testing.assert_array_equal(rows, nearest_neighbors(vectors[::30], vectors, k=10)[0])


SECRET, QUOTED = "s3cr/et@#?x", "s3cr%2Fet%40%23%3Fx"


def test_no_text_made_of_an_address_holds_its_password():
    address = parse(f"pgvector://me:{QUOTED}@[::1]:5433/my%20shop?table=cars&distance=cosine")
    assert (address.parts.hostname, address.parts.port, address.path) == ("::1", 5433, "/my shop")
    assert address.table == "cars"
    assert str(address) == "pgvector://[::1]:5433/my%20shop?table=cars&distance=cosine"
    assert "s3cr" not in repr(address)
    for uri in (
        f"pgvector://me:{SECRET}@host/shop",
        f"pgvector://me:{QUOTED}@host:port/shop",
        f"pgvector://me:{QUOTED}@host/shop?effort=8",
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
        ("redis://host/0", "lancedb:///folder"),
        ("lancedb:///a?table=a;drop", "table"),
        ("lancedb:///a?lists=3", "lists"),
        ("lancedb:///a?distance=far", "distance"),
    ],
)
def test_wrong_addresses_are_refused(uri, says):
    with pytest.raises(UserError, match=says):
        open_gallery(uri)


def test_a_server_that_is_not_there_is_one_line_without_the_password(caplog, capfd):
    with warnings.catch_warnings(record=True) as warned, pytest.raises(UserError) as caught:
        open_gallery(f"pgvector://me:{QUOTED}@127.0.0.1:1/shop")
    text = (
        str(caught.value)
        + caplog.text
        + "".join(capfd.readouterr())
        + "".join(str(one.message) for one in warned)
    )
    assert "127.0.0.1:1/shop: cannot be opened: " in text
    assert "refused" in text
    assert "s3cr" not in text
    assert "\n" not in str(caught.value)
    assert "s3cr" not in str(caught.value.__cause__)


def test_files_of_something_else_are_refused(tmp_path):
    lancedb.connect(tmp_path / "lance").create_table("gallery", pa.table({"id": ["a"]}))
    with pytest.raises(UserError, match="is a table of something else: name another"):
        open_gallery(f"lancedb://{tmp_path / 'lance'}")
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot be written"),
        open_gallery(f"lancedb://{tmp_path / 'file'}") as gallery,
    ):
        gallery.add(["a"], [[1.0]])


@pytest.mark.parametrize("rule", PER_CLASS[1:])
@pytest.mark.parametrize("distance", DISTANCES)
def test_classes_are_those_of_the_rule(kind, databases, distance, rule, monkeypatch):
    """As a slow search by hand, of rows that are read in several blocks; the same by the gallery of
    embeddings, and by a classifier."""
    monkeypatch.setattr(galleries, "LISTED_AT_ONCE", 12)
    vectors, labels, groups = made()
    queries = made(1)[0][:7]
    names = [f"class {label}" for label in labels]
    ids = [f"row {row:03}" for row in range(len(labels))]
    with databases.gallery(kind, distance=distance) as gallery:
        gallery.add(ids, vectors, {"class": names, "path": [f"video {group}" for group in groups]})
        gallery.add(["of no class"], vectors[:1] + 9)
        by_groups = gallery.identities(rule, "path")
        answers = [by_groups.search(queries, k=9)]
        alone = gallery.identities(rule)
        assert gallery.class_counts()["class 2"] == 5
    assert (len(alone), by_groups.about.per_class) == (6, rule)
    assert by_groups.class_counts() == {f"class {label}": 1 for label in range(6)}
    columns = {"class": names, "group": list(map(str, groups))}
    memory = MemoryGallery("memory", Rows(ids, vectors, columns), About(distance, 4))
    answers.append(memory.identities(rule, "group").search(queries, k=9))
    classifier = KNNClassifier(vectors, names, distance=distance, per_class=rule)
    for row, query in enumerate(queries.astype(np.float64)):
        expected = distances_by_hand(query, vectors, labels, groups, rule, distance)
        order = np.argsort(expected)
        for neighbors in answers:
            assert neighbors.ids[row].tolist()[:6] == [f"class {label}" for label in order]
            assert neighbors.ids[row].tolist()[6:] == [None] * 3
            far = neighbors.distances[row]
            np.testing.assert_allclose(far[:6], expected[order], rtol=1e-5, atol=2e-6)
            assert (neighbors.columns["class"] == neighbors.ids).all()
    first = alone.search(queries, k=1)
    predictions = classifier.classify(queries)
    assert first.ids[:, 0].tolist() == predictions.labels.tolist()
    np.testing.assert_allclose(first.distances[:, 0], predictions.distances, atol=2e-6)
    of_class = alone.search(queries, k=1, where={"class": "class 3"})
    assert of_class.ids[:, 0].tolist() == ["class 3"] * 7


def test_classes_of_a_gallery_are_refused_where_there_are_none(gallery, caplog):
    gallery.add(["a"], np.eye(2)[:1])
    with pytest.raises(UserError, match=r"no row of .* has a class"):
        gallery.identities("mean")
    gallery.add(["b"], np.eye(2)[1:], {"class": ["bus"]})
    with pytest.raises(UserError, match=r"groups=medium.*there are path, class"):
        gallery.identities("mean", "medium")
    with pytest.raises(UserError, match="1 of 1 images have none"):
        gallery.identities("mean", "path")
    with pytest.raises(UserError, match="per_class=median"):
        gallery.identities("median")
    assert gallery.identities("nearest") is gallery
    caplog.clear()
    classes = gallery.identities("mean")
    assert "leaves out 1 row without a class" in caplog.text
    with pytest.raises(UserError, match="not their images"):
        classes.identities("max_of_means")
    with pytest.raises(UserError, match="classes have no path"):
        classes.search(np.eye(2), where={"path": "a.jpg"})
