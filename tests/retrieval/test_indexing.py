"""Embeddings into a gallery: resuming, and what the command prints."""

import numpy as np
import pytest

from tests.cli import commands
from tests.embeddings.folders import write_folder
from tests.retrieval.databases import KINDS
from tfdml.embeddings.files import ImageTable, read_embeddings
from tfdml.errors import UserError
from tfdml.retrieval import connect, index_embeddings


def written(folder, roles, seed=0, dim=6):
    """A folder as tfdml embed writes it, of classes of five images."""
    rng = np.random.default_rng(seed)
    labels = np.arange(len(roles)) // 5
    names = tuple(f"{label}/{row}.jpg" for row, label in enumerate(labels))
    vectors = rng.normal(size=(labels.max() + 1, dim))[labels] + 0.8 * rng.normal(size=(len(roles), dim))
    write_folder(folder, {"model": f"seed {seed}"}, ImageTable(names, labels, np.array(roles)), vectors)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeddings")
    return {
        "cars": written(folder / "cars", ["train"] * 20 + ["test"] * 60),
        "shop": written(folder / "shop", (["query"] * 2 + ["gallery"] * 3) * 12),
        "wide": written(folder / "wide", ["test"] * 10, dim=7),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_killed_is_written_again(kind, folders, databases, monkeypatch):
    monkeypatch.setattr("tfdml.retrieval.galleries._ROWS_AT_ONCE", 11)
    uri, embeddings = databases.address(kind), read_embeddings(folders["cars"])

    def killed(done, total):
        if done == 33:
            raise KeyboardInterrupt

    with connect(uri) as gallery, pytest.raises(KeyboardInterrupt):
        index_embeddings(gallery, embeddings, progress=killed)
    with connect(uri) as gallery:
        assert len(gallery) == 33
        progress = []
        index_embeddings(gallery, embeddings, progress=lambda *done: progress.append(done))
        assert progress == [(rows, 80) for rows in (11, 22, 33, 44, 55, 66, 77, 80)]
        assert len(gallery) == 80
        neighbors = gallery.search(embeddings.embeddings[40:41], 1, {"path": "8/40.jpg", "role": "test"})
        assert neighbors.ids.tolist() == [["8/40.jpg"]]
        index_embeddings(gallery, embeddings, "again/")
        assert len(gallery) == 160


def test_the_command(folders, databases, tmp_path):
    """tfdml index, with the database that needs nothing and the one that has passwords."""
    lance, shop = f"lancedb://{tmp_path}/galleries?table=cars", databases.address("pgvector", distance="cosine")
    secret, cars = shop.replace("postgres@", "postgres:s3cret@"), f"--embeddings={folders['cars']}"
    for expected, *flags, says in (
        (0, cars, f"--to={lance}", "80 added, 0 replaced, 80 in all\n"),
        (0, cars, f"--to={lance}", "0 added, 80 replaced, 80 in all\n"),
        (0, cars, f"--to={lance}", "--prefix=x/", "80 added, 0 replaced, 160 in all\n"),
        (0, f"--embeddings={folders['shop']}", f"--to={secret}", "60 embeddings of 6 dimensions in pgvector://"),
        (2, cars, "--to=pgvector://me:s3cret@127.0.0.1:1/db", "--to=pgvector://127.0.0.1:1/db cannot be opened"),
    ):
        status, output, error = commands.run("index", *flags)
        assert (status, says in output + error) == (expected, True), error
        assert "s3cret" not in output + error


def test_the_first_dimensions_have_length_one(folders, databases, tmp_path):
    stored = read_embeddings(folders["cars"])
    with databases.gallery("lancedb") as gallery:
        index_embeddings(gallery, stored, truncate_dim=2)
        rows = gallery.rows(80)
        expected = stored.embeddings[3, :2] / np.linalg.norm(stored.embeddings[3, :2])
        np.testing.assert_allclose(rows.vectors[rows.ids.index(stored.names[3])], expected, atol=1e-6)
    np.savez(tmp_path / "twice.npz", embeddings=np.eye(2), names=np.array(["a", "a"]))
    with databases.gallery("lancedb") as gallery:
        index_embeddings(gallery, read_embeddings(folders["wide"]), "wide/")
        for path, dim, says in (
            (folders["cars"], 7, "`truncate_dim=7`: the embeddings have 6 dimensions"),
            (folders["cars"], 0, r"embeddings have 6 dimensions, .* has 7: embed both by one model"),
            (tmp_path / "twice.npz", 0, "1 names occur more than once"),
        ):
            with pytest.raises(UserError, match=says):
                index_embeddings(gallery, read_embeddings(path), truncate_dim=dim)
        assert len(gallery) == 10
