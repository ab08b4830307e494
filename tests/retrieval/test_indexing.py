"""Embeddings into a gallery: resuming, and what the command prints."""

import json
import textwrap

import numpy as np
import pytest

from tests.cli import commands
from tests.fork_server import fork_server
from tests.retrieval.databases import KINDS
from tfdml.embeddings.reader import ImageTable
from tfdml.embeddings.writer import EmbeddingWriter
from tfdml.errors import UserError
from tfdml.retrieval import connect, index_embeddings
from tfdml.retrieval.indexing import EmbeddingsToIndex

PASSWORD = "s3cret"


def written(folder, roles, seed=0, dim=6):
    """A folder as tfdml embed writes it, of classes of five images."""
    rng = np.random.default_rng(seed)
    labels = np.arange(len(roles)) // 5
    names = tuple(f"{label}/{row}.jpg" for row, label in enumerate(labels))
    vectors = rng.normal(size=(labels.max() + 1, dim))[labels] + 0.8 * rng.normal(size=(len(roles), dim))
    with EmbeddingWriter(folder, {"model": f"seed {seed}"}, ImageTable(names, labels, np.array(roles))) as writer:
        writer.append(vectors)
        writer.finish({})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeddings")
    return {
        "cars": written(folder / "cars", ["train"] * 20 + ["test"] * 60),
        "again": written(folder / "again", ["train"] * 20 + ["test"] * 60, seed=1),
        "shop": written(folder / "shop", (["query"] * 2 + ["gallery"] * 3) * 12),
        "wide": written(folder / "wide", ["test"] * 10, dim=7),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_killed_goes_on(kind, folders, databases, monkeypatch):
    uri = databases.address(kind)
    embeddings = EmbeddingsToIndex.read(folders["cars"])
    gallery = connect(uri)
    monkeypatch.setattr(type(gallery), "batch_rows", 11)
    upsert, calls = type(gallery)._upsert, []

    def killed(self, rows):
        calls.append(len(rows))
        if len(calls) == 4:
            raise KeyboardInterrupt
        upsert(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(type(gallery), "_upsert", killed)
        with pytest.raises(KeyboardInterrupt):
            index_embeddings(gallery, embeddings)
    gallery.close()
    progress = []
    with connect(uri) as gallery:
        assert embeddings.written_in(gallery) == 33
        assert index_embeddings(gallery, embeddings, progress.append) == 47
        assert progress[-1] == 80
        assert len(gallery) == 80
        assert index_embeddings(gallery, embeddings) == 0
        # Rows that were deleted come back, also those of batches before the last.
        gallery.delete([embeddings.ids[3]])
        assert index_embeddings(gallery, embeddings) > 0
        assert len(gallery) == embeddings.written_in(gallery) == 80
        found = gallery.search(embeddings.stored.embeddings[40:41], 1, {"path": "8/40.jpg", "role": "test", "label": 8})
        assert found.ids.tolist() == [["8/40.jpg"]]
        # Other embeddings of the same images take their place.
        others = EmbeddingsToIndex.read(folders["again"])
        assert others.written_in(gallery) == 0
        assert index_embeddings(gallery, others) == 80
        assert (len(gallery), embeddings.written_in(gallery)) == (80, 0)


_KILLED = """
    import json, os, signal

    for uri in json.loads(URIS):
        child = os.fork()
        if not child:
            from tfdml.retrieval import connect, index_embeddings
            from tfdml.retrieval.indexing import EmbeddingsToIndex

            gallery = connect(uri)
            type(gallery).batch_rows = 11
            write = type(gallery)._upsert

            def killed(self, rows, calls=[]):
                calls.append(rows)
                write(self, rows)
                if len(calls) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)

            type(gallery)._upsert = killed
            index_embeddings(gallery, EmbeddingsToIndex.read(FOLDER))
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
"""


@pytest.mark.slow
def test_what_a_process_has_written_outlives_its_kill(folders, databases, monkeypatch):
    uris = {kind: databases.address(kind) for kind in KINDS}
    told = f"URIS = {json.dumps(list(uris.values()))!r}\nFOLDER = {str(folders['cars'])!r}\n"
    done = fork_server().run_script(told + textwrap.dedent(_KILLED))
    assert done.returncode == 0, done.stderr[-3000:]
    embeddings = EmbeddingsToIndex.read(folders["cars"])
    for kind, uri in uris.items():
        with connect(uri) as gallery:
            monkeypatch.setattr(type(gallery), "batch_rows", 11)
            assert embeddings.written_in(gallery) == 33, kind
            assert index_embeddings(gallery, embeddings) == 47
            found = gallery.search(embeddings.stored.embeddings, 1)
            assert found.ids.ravel().tolist() == embeddings.ids


def test_what_cannot_be_indexed_is_told_before_anything_is_written(folders, databases, tmp_path):
    with databases.gallery("lancedb") as gallery:
        index_embeddings(gallery, EmbeddingsToIndex.read(folders["wide"], "wide/"))
        assert gallery.delete(["wide/0/0.jpg"]) == 1
        with pytest.raises(UserError, match=r"is of dimension 7, .*cars of 6: name another table"):
            index_embeddings(gallery, EmbeddingsToIndex.read(folders["cars"]))
        assert len(gallery) == 9
    with databases.gallery("lancedb") as gallery:
        gallery.upsert(["a"], np.ones((1, 6)))
        with pytest.raises(UserError, match="was not written by tfdml index"):
            index_embeddings(gallery, EmbeddingsToIndex.read(folders["cars"]))
    np.savez(tmp_path / "twice.npz", embeddings=np.eye(2), names=np.array(["a", "a"]))
    with pytest.raises(UserError, match="1 `ids` occur more than once, the first is a"):
        EmbeddingsToIndex.read(tmp_path / "twice.npz")
    np.savez(tmp_path / "bare.npz", embeddings=np.eye(3))
    bare = EmbeddingsToIndex.read(tmp_path / "bare.npz")
    assert bare.ids == ["0", "1", "2"]
    with databases.gallery("lancedb") as gallery:
        assert index_embeddings(gallery, bare) == 3


def test_the_commands(folders, databases, tmp_path):
    """tfdml index, with the database that needs nothing and the one that has passwords."""
    lance, shop = f"lancedb://{tmp_path}/galleries?table=cars", databases.address("pgvector", distance="cosine")
    secret = shop.replace("postgres@", f"postgres:{PASSWORD}@")
    cars = f"--embeddings={folders['cars']}"
    answers = [
        commands.run("index", *flags)
        for flags in (
            [cars, f"--to={lance}", "--dry_run"],
            [cars, f"--to={lance}"],
            [cars, f"--to={lance}&index=ivf&lists=4&effort=1", "--prefix=x/"],
            [f"--embeddings={folders['shop']}", f"--to={secret}"],
            [f"--embeddings={folders['wide']}", f"--to={secret}"],
            [cars, f"--to=pgvector://me:{PASSWORD}@127.0.0.1:1/db"],
            [cars],
            [f"--to={lance}"],
            [f"--embeddings={tmp_path}/none", f"--to={lance}"],
        )
    ]
    says = [
        "would write 80 embeddings of 6 dimensions, of which 0 are there, to lancedb://",
        "80 were written\n",
        "the gallery holds 80 more rows, of other embeddings\nsearched by the index ivf",
        "60 embeddings of 6 dimensions in pgvector:///postgres?table=",
        "is of dimension 6",
        "--to=pgvector://127.0.0.1:1/db cannot be opened",
        "--to is missing",
        "--embeddings is missing",
        "there are no embeddings at",
    ]
    for number, ((status, output, error), says_it) in enumerate(zip(answers, says, strict=True)):
        assert status == (0 if number < 4 else 2), error
        assert says_it in output + error
        assert PASSWORD not in output + error
        assert "Traceback" not in error
    assert not (tmp_path / "galleries" / "gallery.lance").exists()


def test_the_first_dimensions_are_another_source_of_length_one(folders):
    whole, cut = EmbeddingsToIndex.read(folders["cars"]), EmbeddingsToIndex.read(folders["cars"], truncate_dim=2)
    assert (whole.dimension, cut.dimension) == (6, 2)
    assert whole.source != cut.source
    expected = whole.vectors(slice(3, 8))[:, :2]
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(cut.vectors(slice(3, 8)), expected, atol=1e-6)
    with pytest.raises(UserError, match="`truncate_dim=7`: the embeddings have 6 dimensions"):
        EmbeddingsToIndex.read(folders["cars"], truncate_dim=7)
