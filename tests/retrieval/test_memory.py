"""Stored vectors as a gallery: the same protocol and the same neighbors as in a database."""

import lancedb
import numpy as np
import pytest
from lancedb.index import IvfPq

from tests.retrieval.databases import KINDS, psycopg
from tfdml.embeddings.files import read_embeddings, table_of, write_file
from tfdml.errors import UserError
from tfdml.registry import DISTANCES
from tfdml.retrieval import (
    About,
    IndexRecall,
    MemoryGallery,
    Neighbors,
    Rows,
    WritableGallery,
    open_gallery,
)
from tfdml.retrieval.databases import _count_hits

CLASSES = ["bus", "van", "bus", "cab", "van", "bus"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The same vectors in each kind of file."""
    folder = tmp_path_factory.mktemp("memory")
    vectors = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    names = np.array(list("abcdef"))
    np.savez(folder / "x.npz", embeddings=vectors, labels=np.array(CLASSES), names=names)
    np.save(folder / "x.npy", vectors)
    images = {"id": range(6), "path": list("abcdef"), "class": CLASSES}
    write_file(folder / "x.parquet", table_of(images, vectors))
    return folder


@pytest.mark.parametrize("distance", DISTANCES)
def test_the_neighbors_are_those_of_a_database(databases, paths, distance):
    queries = np.random.default_rng(1).normal(size=(5, 3))
    with databases.gallery("lancedb", distance=distance) as database:
        stored = open_gallery(str(paths / "x.npz"), distance=distance)
        rows = stored.rows(9)
        database.add(rows.ids, rows.vectors, rows.columns)
        for where in (None, {"class": "bus"}, {"class": "cab", "id": "d"}, {"path": "zz"}):
            expected = database.search(queries, 4, where)
            for name in ("x.npz", "x.parquet"):
                gallery = open_gallery(str(paths / name), distance=distance)
                found = gallery.search(queries, 4, where)
                np.testing.assert_array_equal(found.ids, expected.ids)
                np.testing.assert_allclose(found.distances, expected.distances, atol=1e-5)
                for column in ("class", "path"):
                    np.testing.assert_array_equal(found.columns[column], expected.columns[column])
        assert stored.class_counts() == database.class_counts() == {"bus": 3, "van": 2, "cab": 1}
        assert stored.about == About(distance, 3)


def test_rows_are_at_most_so_many(paths):
    with open_gallery(str(paths / "x.parquet")) as gallery:
        assert (len(gallery), gallery.rows(2).ids) == (6, ["a", "b"])
        rows = gallery.rows(2, ["f", "zz", "c", "d"])
        assert (rows.ids, rows.columns["class"]) == (["c", "d"], ["bus", "cab"])
        assert not isinstance(gallery, WritableGallery)
    unnamed = open_gallery(str(paths / "x.npy"))
    assert unnamed.rows(9).columns["class"] == [""] * 6
    assert unnamed.class_counts() == {}


def test_what_is_no_gallery_is_refused(databases, paths, tmp_path):
    (tmp_path / "photos" / "bus").mkdir(parents=True)
    uri = databases.address("lancedb", distance="cosine")
    with open_gallery(uri) as gallery:
        gallery.add(["a"], [[1.0, 2.0]])
    for address, distance, says in (
        (tmp_path / "photos", "", "holds no gallery: neither embeddings nor a retriever"),
        (tmp_path / "no.npz", "", "no.npz"),
        ("redis://me:secret@host/0", "", "uri=redis://host/0: write lancedb:///folder or"),
        (uri, "dot", "distance=dot: the distance of lancedb.* is cosine"),
    ):
        with pytest.raises(UserError, match=says):
            open_gallery(str(address), distance=distance)


def test_a_gallery_in_memory_may_have_no_neighbors_to_return():
    rows = Rows(["a"], np.eye(2)[:1], {"class": ["bus"]})
    gallery = MemoryGallery("cars", rows, About("euclidean", 2))
    neighbors = gallery.search(np.eye(2), 3, {"class": "van"})
    assert neighbors.ids.tolist() == [[None] * 3] * 2
    assert np.isinf(neighbors.distances).all()
    assert neighbors.columns["class"].tolist() == [[None] * 3] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_prune_deletes_what_was_indexed_before_with_the_same_prefix(databases, kind, tmp_path):
    def stored(name, ids):
        vectors = np.random.default_rng(len(ids)).normal(size=(len(ids), 3))
        np.savez(tmp_path / name, embeddings=vectors, names=np.array(list(ids)))
        return read_embeddings(tmp_path / f"{name}.npz")

    with databases.gallery(kind) as gallery:
        assert gallery.prune(stored("new", "bcd")) == 0
        gallery.add_embeddings(stored("old", "abc"))
        gallery.add_embeddings(stored("old", "abc"), "it's \"/")
        gallery.add(["own"], np.eye(3)[:1])
        new = stored("new", "bcd")
        assert gallery.add_embeddings(new, replace=True).replaced == 2
        assert gallery.prune(new) == 1
        assert gallery.prune(new) == 0
        others = [f"it's \"/{name}" for name in "abc"]
        assert sorted(gallery.rows(9).ids) == sorted(["b", "c", "d", "own", *others])
        assert gallery.prune(new, "it's \"/") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_of_the_database_is_used_where_that_is_said(databases, kind):
    """It misses neighbors here, which shows that it is."""
    vectors = np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)
    with databases.gallery(kind) as gallery:
        classes = ["bus" if row % 100 == 0 else "" for row in range(2000)]
        gallery.add([f"{row:04}" for row in range(2000)], vectors, {"class": classes})
        with pytest.raises(UserError, match="has no index for euclidean distances: build it"):
            gallery.measure_index()
        build_poor_index(kind, gallery)
        exact = gallery.search(vectors[:20], 60)
        quick = gallery.search(vectors[:20], 60, exact=False)
        assert not (exact.ids == quick.ids).all()
        # The next is exact again.
        assert (exact.ids == gallery.search(vectors[:20], 60).ids).all()
        assert (exact.ids[:, 0] == quick.ids[:, 0]).mean() > 0.5
        assert gallery.measure_index(60).recall < 0.95
        # So is one of some rows, which an index would leave out.
        where = {"class": "bus"}
        some = gallery.search(vectors[:20], 60, where, exact=False)
        assert (some.ids == gallery.search(vectors[:20], 60, where).ids).all()


def build_poor_index(kind, gallery, distance="l2"):
    """Build an index that misses neighbors."""
    if kind == "lancedb":
        table = lancedb.connect(gallery.place.path).open_table("gallery")
        table.create_index("vector", config=IvfPq(distance_type=distance, num_sub_vectors=1))
        return
    operators = {"l2": "vector_l2_ops", "dot": "vector_ip_ops"}[distance]
    with psycopg.connect(user="postgres", autocommit=True) as other:
        options = "WITH (m = 4, ef_construction = 8)"
        table = gallery.place.table
        other.execute(f"CREATE INDEX ON {table} USING hnsw (vector {operators}) {options}")


@pytest.mark.parametrize("distance", ["euclidean", "cosine", "dot"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_index_is_built_in_place_of_another_and_measured(databases, kind, distance):
    vectors = np.random.default_rng(0).normal(size=(600, 10)).astype(np.float32)
    ids = [f"{row:04}" for row in range(600)]
    poor, other = ("l2", "dot") if distance == "euclidean" else ("dot", "l2")
    with databases.gallery(kind, distance=distance) as gallery:
        with pytest.raises(UserError, match="holds no gallery"):
            gallery.build_index()
        gallery.add(ids, vectors)
        build_poor_index(kind, gallery, other)
        with pytest.raises(UserError, match=f"has no index for {distance} distances"):
            gallery.measure_index()
        build_poor_index(kind, gallery, poor)
        gallery.build_index()
        exact = gallery.search(vectors[:40], 6)
        quick = gallery.search(vectors[:40], 6, exact=False)
        np.testing.assert_array_equal(quick.ids, exact.ids)
        np.testing.assert_allclose(quick.distances, exact.distances, atol=1e-5)
        measured = gallery.measure_index(5)
        assert str(measured) == (
            "the index finds 100.0 % of the 5 nearest of 200 rows of the gallery"
        )
        # Rows that are added later are found, too.
        length = 50 if distance == "dot" else 1.001
        gallery.add(["new"], length * vectors[:1])
        assert "new" in gallery.search(vectors[:1], 3, exact=False).ids
        assert gallery.measure_index(5).unindexed == (kind == "lancedb")


def test_a_build_that_outgrows_its_memory_is_said(databases, monkeypatch, caplog):
    monkeypatch.setenv("PGOPTIONS", "-c maintenance_work_mem=1MB")
    with databases.gallery("pgvector") as gallery:
        gallery.add(map(str, range(2000)), np.random.default_rng(0).normal(size=(2000, 32)))
        gallery.build_index()
        assert "no longer fits into maintenance_work_mem after" in caplog.text
        assert gallery.measure_index(1).recall == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_recall_is_of_the_others_that_there_are(databases, kind):
    """Of equally near ones, any counts."""
    with databases.gallery(kind) as gallery:
        gallery.add(["a"], np.ones((1, 3)))
        gallery.build_index()
        with pytest.raises(UserError, match="has less than two rows: search exactly"):
            gallery.measure_index()
        gallery.add(list("bcdefgh"), np.ones((7, 3)))
        gallery.build_index()
        for k in (2, 7, 10, 1001):
            assert gallery.measure_index(k) == IndexRecall(1.0, k, 8)
        found = gallery.search(np.ones((1, 3)), 1001, exact=False).ids
        assert sum(name is not None for name in found[0]) == 8


def test_a_recall_counts_what_an_index_misses():
    ids = np.array([list("abcd"), list("bacd")], object)
    exact = Neighbors(ids, np.array([[0, 1, 2, 3], [0, 1, 2, 3]], np.float32), {})
    missed = np.array([["a", "c", "x", None], ["b", None, None, None]], object)
    far = np.array([[0, 2, 4, np.inf], [0, np.inf, np.inf, np.inf]], np.float32)
    quick = Neighbors(missed, far, {})
    assert [_count_hits(exact, quick, query, id, 3) for query, id in enumerate("ab")] == [1, 0]
    assert _count_hits(exact, exact, 0, "a", 3) == 3
