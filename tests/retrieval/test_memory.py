"""Stored vectors as a gallery: the same protocol and the same neighbors as in a database."""

import lancedb
import numpy as np
import pytest
from lancedb.index import IvfPq

from tests.retrieval.databases import KINDS, psycopg
from tfdml.embeddings.files import read_embeddings, table_of, write_file
from tfdml.errors import UserError
from tfdml.registry import DISTANCES
from tfdml.retrieval import About, MemoryGallery, Rows, WritableGallery, open_gallery

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
        gallery.add([f"{row:04}" for row in range(2000)], vectors)
        if kind == "lancedb":
            table = lancedb.connect(gallery.place.path).open_table("gallery")
            table.create_index("vector", config=IvfPq())
        else:
            with psycopg.connect(user="postgres", autocommit=True) as other:
                table = gallery.place.table
                other.execute(f"CREATE INDEX ON {table} USING hnsw (vector vector_l2_ops)")
        exact = gallery.search(vectors[:20], 60)
        if kind == "pgvector":
            # Which it would prefer for so few rows.
            gallery._connection.execute("SET enable_seqscan = off")
        quick = gallery.search(vectors[:20], 60, exact=False)
        assert not (exact.ids == quick.ids).all()
        if kind == "pgvector":
            gallery._connection.execute("RESET enable_seqscan")
        # The next is exact again.
        assert (exact.ids == gallery.search(vectors[:20], 60).ids).all()
        assert (exact.ids[:, 0] == quick.ids[:, 0]).mean() > 0.5
