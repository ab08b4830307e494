"""Embeddings into a gallery and out again: resuming, and what is measured."""

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
from tfdml.evaluation import approximate_search, evaluate_gallery, evaluate_retrieval
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
            assert sorted(name for part in gallery.rows() for name in part.ids) == sorted(embeddings.ids)


def test_what_cannot_be_indexed_is_told_before_anything_is_written(folders, databases, tmp_path):
    with databases.gallery("lancedb") as gallery:
        index_embeddings(gallery, EmbeddingsToIndex.read(folders["wide"], "wide/"))
        assert sorted(gallery.rows().__next__().ids)[0] == "wide/0/0.jpg"
        with pytest.raises(UserError, match=r"is of dimension 7, .*cars of 6: name another table"):
            index_embeddings(gallery, EmbeddingsToIndex.read(folders["cars"]))
        assert len(gallery) == 10
    with databases.gallery("lancedb") as gallery:
        gallery.upsert(["a"], np.ones((1, 6)))
        with pytest.raises(UserError, match="was not written by tfdml index"):
            index_embeddings(gallery, EmbeddingsToIndex.read(folders["cars"]))
    np.savez(tmp_path / "twice.npz", embeddings=np.eye(2), names=np.array(["a", "a"]))
    with pytest.raises(UserError, match="1 names occur more than once, the first is 'a'"):
        EmbeddingsToIndex.read(tmp_path / "twice.npz")
    np.savez(tmp_path / "bare.npz", embeddings=np.eye(3))
    bare = EmbeddingsToIndex.read(tmp_path / "bare.npz")
    assert bare.ids == ["0", "1", "2"]
    with databases.gallery("lancedb") as gallery:
        assert index_embeddings(gallery, bare) == 3
        with pytest.raises(UserError, match="no attribute label of integers"):
            evaluate_gallery(gallery)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gallery_measures_as_its_embeddings_do(kind, folders, databases):
    for name, distance in (("cars", "euclidean"), ("shop", "cosine")):
        with databases.gallery(kind, distance=distance) as gallery:
            embeddings = EmbeddingsToIndex.read(folders[name])
            index_embeddings(gallery, embeddings)
            measured = evaluate_gallery(gallery, ks=(1, 3))
            part = embeddings.stored.split("test")
            arrays = (part.embeddings, part.labels)
            if name == "shop":
                query = part.is_query
                arrays = (*(a[query] for a in arrays), *(a[~query] for a in arrays))
            metrics = ["recall", "map@r", "r_precision"]
            wanted = evaluate_retrieval(*arrays, ks=(1, 3), metrics=metrics, distance=distance)
            assert measured.exact == pytest.approx(wanted, abs=1e-9)
            assert measured.found == pytest.approx(wanted, abs=1e-9)
            assert 0 < wanted["recall@1"] < 1
            assert (measured.images, measured.classes, measured.left_out) == (60, 12, ())


def test_what_a_database_misses_is_no_hit(folders, databases, monkeypatch):
    with databases.gallery("lancedb") as gallery:
        index_embeddings(gallery, EmbeddingsToIndex.read(folders["cars"]))
        nearest = type(gallery)._nearest
        monkeypatch.setattr(type(gallery), "_nearest", lambda self, v, k, c: nearest(self, v, 2, c))
        measured = evaluate_gallery(gallery, ks=(1, 4))
    # Of the two that are found, one is the query itself.
    assert measured.found["recall@1"] == measured.found["recall@4"] == measured.exact["recall@1"]
    assert measured.found["r_precision"] < measured.exact["r_precision"]


def test_what_cannot_be_measured_is_left_out_or_refused(databases, monkeypatch):
    labels, roles = np.arange(12) // 4, np.array(["test"] * 8 + ["gallery"] * 3 + ["train"])
    with databases.gallery("lancedb") as gallery:
        gallery.upsert(list(map(str, range(12))), np.random.default_rng(0).normal(size=(12, 3)), {"label": labels})
        monkeypatch.setattr(approximate_search, "MOST", 3)
        measured = evaluate_gallery(gallery, ks=(1,))
        assert measured.left_out == ("map@r", "r_precision")
        assert set(measured.found) == {"recall@1", "num_queries", "num_gallery", "queries_without_match"}
    with databases.gallery("lancedb") as gallery:
        gallery.upsert(list(map(str, range(12))), np.eye(12), {"label": labels, "role": roles})
        with pytest.raises(UserError, match="the roles gallery and test would be searched together"):
            evaluate_gallery(gallery, ks=(1,))
        gallery.delete(list(map(str, range(12))))
        with pytest.raises(UserError, match="holds no rows"):
            evaluate_gallery(gallery)


def test_the_commands(folders, databases, tmp_path):
    """tfdml index and tfdml evaluate, with the database that needs nothing and the one that has passwords."""
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
        "80 were written, in",
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
    answers = [
        commands.run("evaluate", *flags)
        for flags in (
            [f"--model={secret}", f"--json={tmp_path}/shop.json", "--ks=1,3"],
            [f"--model={lance}&index=ivf&lists=4&effort=1", f"--json={tmp_path}/cars.json", "--metrics=recall@1,map@r"],
            [f"--model={secret}", "--distance=dot"],
            [f"--model={lance}", "--report=page.html"],
            [f"--model={lance}", "--metrics=nmi"],
            [f"--model={lance}none"],
        )
    ]
    says = [
        "Recall",
        "ivf",
        "made with cosine",
        "needs anything but a gallery as --model",
        "unknown metric 'nmi'",
        "holds no table",
    ]
    for number, ((status, output, error), says_it) in enumerate(zip(answers, says, strict=True)):
        assert status == (0 if number < 2 else 2), error
        assert says_it.lower() in (output + error).lower()
        assert PASSWORD not in output + error
    stored = EmbeddingsToIndex.read(folders["shop"]).stored
    query = stored.is_query
    arrays = [array[rows] for rows in (query, ~query) for array in (stored.embeddings, stored.labels)]
    wanted = evaluate_retrieval(*arrays, ks=(1, 3), metrics=["recall", "map@r"], distance="cosine")
    shop, cars = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("shop", "cars"))
    for name, value in wanted.items():
        assert shop[name] == shop["exact"][name] == pytest.approx(value)
    assert (shop["index"], cars["index"]) == ("exact", "ivf")
    assert cars["recall@1"] <= cars["exact"]["recall@1"]
