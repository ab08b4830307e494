"""Embeddings into a gallery: resuming, replacing, first dimensions."""

import numpy as np
import pytest

from tests.embeddings.folders import write_folder
from tests.retrieval.databases import KINDS
from tfdml.embeddings.files import ImageTable, read_embeddings
from tfdml.errors import UserError
from tfdml.retrieval import AddCounts, open_gallery


def written(folder, roles, seed=0, dim=6):
    """A folder as tfdml embed writes it, of classes of five images."""
    rng = np.random.default_rng(seed)
    labels = np.arange(len(roles)) // 5
    names = tuple(f"{label}/{row}.jpg" for row, label in enumerate(labels))
    vectors = rng.normal(size=(labels.max() + 1, dim))[labels] + 0.8 * rng.normal(
        size=(len(roles), dim)
    )
    write_folder(
        folder, {"model": f"seed {seed}"}, ImageTable(names, labels, np.array(roles)), vectors
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeddings")
    return {
        "cars": written(folder / "cars", ["train"] * 20 + ["test"] * 60),
        "again": written(folder / "again", ["train"] * 20 + ["test"] * 60, seed=1),
        "wide": written(folder / "wide", ["test"] * 10, dim=7),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_killed_goes_on(kind, folders, databases, monkeypatch):
    uri = databases.address(kind)
    embeddings = read_embeddings(folders["cars"])
    gallery = open_gallery(uri)
    monkeypatch.setattr(type(gallery), "batch_rows", 11)
    write, calls = type(gallery)._write, []

    def killed(self, rows):
        calls.append(len(rows.ids))
        if len(calls) == 4:
            raise KeyboardInterrupt
        write(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(type(gallery), "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            gallery.add_embeddings(embeddings)
    # It is not closed, as one of a process that was killed.
    progress, killed_gallery = [], gallery
    with open_gallery(uri) as gallery:
        counts = gallery.add_embeddings(embeddings, progress=lambda *done: progress.append(done))
        assert counts == AddCounts(47, 0, 33)
        assert progress == [(rows, 80) for rows in (11, 22, 33, 44, 55, 66, 77, 80)]
        assert len(gallery) == 80
        assert gallery.add_embeddings(embeddings) == AddCounts(0, 0, 80)
        # Rows that were deleted come back.
        gallery.delete([embeddings.names[3]])
        assert gallery.add_embeddings(embeddings) == AddCounts(1, 0, 79)
        assert len(gallery) == 80
        neighbors = gallery.search(
            embeddings.embeddings[40:41], 1, {"path": "8/40.jpg", "class": "8"}
        )
        assert neighbors.ids.tolist() == [["8/40.jpg"]]
    killed_gallery.close()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_other_embeddings_are_replaced_where_that_is_said(
    kind, folders, databases, tmp_path
):
    """Of two folders with the same names of images, and of two files without names."""
    first, second = read_embeddings(folders["cars"]), read_embeddings(folders["again"])
    with databases.gallery(kind) as gallery:
        gallery.add_embeddings(first)
        before = gallery.rows(80, first.names[:1]).vectors
        with pytest.raises(
            UserError, match=r"holds 80 ids of .*again, of other embeddings, such as 0/0.jpg"
        ):
            gallery.add_embeddings(second)
        np.testing.assert_array_equal(gallery.rows(80, first.names[:1]).vectors, before)
        assert gallery.add_embeddings(first) == AddCounts(0, 0, 80)
        assert gallery.add_embeddings(second, "again/") == AddCounts(80, 0, 0)
        assert len(gallery) == 160
        assert gallery.add_embeddings(second, replace=True) == AddCounts(0, 80, 0)
        assert (len(gallery), gallery.add_embeddings(second)) == (160, AddCounts(0, 0, 80))
    with databases.gallery(kind) as gallery:
        for name, vectors in (("a", np.eye(3)), ("b", -np.eye(3))):
            np.savez(tmp_path / f"{name}.npz", embeddings=vectors)
        assert gallery.add_embeddings(read_embeddings(tmp_path / "a.npz")).added == 3
        with pytest.raises(UserError, match=r"holds 3 ids of .*b\.npz"):
            gallery.add_embeddings(read_embeddings(tmp_path / "b.npz"))


def test_the_first_dimensions_are_another_source_of_length_one(folders, databases, tmp_path):
    stored = read_embeddings(folders["cars"])
    sources = []
    for dim in (0, 2):
        with databases.gallery("lancedb") as gallery:
            gallery.add_embeddings(stored, truncate_dim=dim)
            rows = gallery.rows(80, stored.names[3:4])
            sources.append(rows.columns["source"][0])
    assert sources[0] != sources[1]
    expected = stored.embeddings[3:4, :2] / np.linalg.norm(stored.embeddings[3, :2])
    np.testing.assert_allclose(rows.vectors, expected, atol=1e-6)
    np.savez(tmp_path / "twice.npz", embeddings=np.eye(2), names=np.array(["a", "a"]))
    with databases.gallery("lancedb") as gallery:
        gallery.add_embeddings(read_embeddings(folders["wide"]), "wide/")
        for path, dim, says in (
            (folders["cars"], 7, "truncate_dim"),
            (folders["cars"], 0, "dimensions"),
            (tmp_path / "twice.npz", 0, "more than once"),
        ):
            with pytest.raises(UserError, match=says):
                gallery.add_embeddings(read_embeddings(path), truncate_dim=dim)
        assert len(gallery) == 10
