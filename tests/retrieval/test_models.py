"""Of which model the vectors of a gallery are: what may be added, what may search, and what is
said."""

import logging

import numpy as np
import pytest

from tests.cli import commands
from tests.embeddings.folders import write_folder
from tests.retrieval.databases import KINDS
from tfdml import names
from tfdml.embeddings.files import ImageTable, read_embeddings
from tfdml.errors import UserError
from tfdml.retrieval import About, open_gallery

ONE = "sha256:1"
TWO = "sha256:2"
THREE = "sha256:3"


@pytest.fixture(params=KINDS)
def gallery(request, databases):
    with databases.gallery(request.param) as made:
        yield made


def test_the_first_known_model_is_that_of_the_gallery(gallery):
    gallery.add(["a"], [[1.0, 0.0]])
    assert gallery.about == About("euclidean", 2, "", has_unknown=True)
    assert gallery.about.models == ()
    gallery.add(["b"], [[0.0, 1.0]], model=ONE)
    assert gallery.about == About("euclidean", 2, ONE, has_unknown=True)
    assert gallery.about.models == (ONE,)
    with pytest.raises(UserError, match="different models"):
        gallery.add(["c"], [[1.0, 1.0]], model=TWO)
    # Replacing a row is no way around it, either.
    with pytest.raises(UserError, match="different models"):
        gallery.add(["a"], [[1.0, 1.0]], model=TWO, replace=True)
    with pytest.raises(UserError, match="set model=unknown to mix them in"):
        gallery.add(["c"], [[1.0, 1.0]])
    assert len(gallery) == 2
    gallery.add(["c"], [[1.0, 1.0]], model="unknown")
    assert sorted(gallery.rows(9).columns["model"]) == ["", "", ONE]
    # Where the known rows are gone, so is the model.
    assert gallery.delete(where={"model": ONE}) == 1
    assert gallery.about.model == ""
    gallery.add(["d"], [[1.0, 1.0]], model=TWO)
    assert gallery.delete(where={"model": ""}) == 2
    assert gallery.about == About("euclidean", 2, TWO, has_unknown=False)


def test_the_models_of_the_rows_are_in_each_row(gallery, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(4, 3))
    images = ImageTable(tuple("abcd"), [0, 0, 1, 1], ["train", "test", "query", "gallery"])
    write_folder(tmp_path / "x", {}, images, vectors, {"model": {"fingerprint": ONE}})
    np.savez(tmp_path / "x.npz", embeddings=vectors)
    known, unknown = read_embeddings(tmp_path / "x"), read_embeddings(tmp_path / "x.npz")
    gallery.add_embeddings(known)
    rows = gallery.rows(9)
    assert rows.columns["model"] == [ONE] * 4
    # The role of a measurement is none of a gallery.
    assert set(rows.columns) == {"path", "class", "source", "model"}
    with pytest.raises(UserError, match=f"are of model {ONE}, and that of .*x.npz is not known"):
        gallery.add_embeddings(unknown, "n/")
    with pytest.raises(UserError, match="states its model, sha256:1"):
        gallery.add_embeddings(known, "n/", model="unknown")
    with pytest.raises(UserError, match="different models"):
        gallery.add_embeddings(unknown, "n/", model=TWO)
    assert gallery.add_embeddings(unknown, "n/", model=ONE).added == 4
    assert gallery.add_embeddings(unknown, "m/", model="unknown").added == 4
    assert gallery.about == About("euclidean", 3, ONE, has_unknown=True)


def kinds_of_galleries(databases, folder):
    """A gallery of each kind, of the model ONE."""
    vectors = np.eye(3, dtype=np.float32)
    images = ImageTable(tuple("abc"), [0, 0, 1], None)
    write_folder(folder / "x", {}, images, vectors, {"model": {"fingerprint": ONE}})
    yield str(folder / "x")
    for kind in KINDS:
        uri = databases.address(kind)
        with open_gallery(uri) as gallery:
            gallery.add_embeddings(read_embeddings(folder / "x"))
        yield uri


def test_a_search_says_where_models_are_not_compared(databases, tmp_path, caplog):
    """The same words for a folder and a database; tests/export has the retriever."""
    for address in kinds_of_galleries(databases, tmp_path):
        with open_gallery(address) as gallery:
            names.warn.cache_clear()
            caplog.clear()
            gallery.search(np.eye(3), 1, model=ONE)
            gallery.search(np.eye(3), 1, model="unknown")
            assert not caplog.messages
            gallery.search(np.eye(3), 1)
            gallery.search(np.eye(3), 1)
            note = "the model of the query embeddings is not known: models are not compared"
            assert caplog.messages == [f"{gallery.address}: {note}"]
            with pytest.raises(UserError, match="different models"):
                gallery.search(np.eye(3), 1, model=TWO)
            assert caplog.records[0].levelno == logging.WARNING


def test_a_search_says_that_the_model_of_the_gallery_is_not_known(databases, tmp_path, caplog):
    np.save(tmp_path / "x.npy", np.eye(3))
    addresses = [str(tmp_path / "x.npy")]
    for kind in KINDS:
        addresses.append(databases.address(kind))
        with open_gallery(addresses[-1]) as gallery:
            gallery.add(["a"], [[1.0, 0.0, 0.0]])
    for address in addresses:
        with open_gallery(address) as gallery:
            caplog.clear()
            gallery.search(np.eye(3), 1)
            assert not caplog.messages
            gallery.search(np.eye(3), 1, model=ONE)
            (message,) = caplog.messages
            assert "the model of the gallery is not known" in message
    with open_gallery(addresses[-1]) as gallery:
        gallery.add(["b"], np.eye(3)[:1], model=ONE)
        gallery.search(np.eye(3), 1, model=ONE)
        assert "the model of some of its vectors is not known" in caplog.messages[-1]


def test_vectors_of_zeros_are_warned_of(databases, tmp_path, caplog):
    np.save(tmp_path / "x.npy", np.array([[1.0, 0.0], [0.0, 0.0]]))
    with open_gallery(str(tmp_path / "x.npy")) as gallery:
        assert "1 of 2 gallery embeddings of" in caplog.text
        gallery.search(np.zeros((3, 2)), 1)
        assert "3 of 3 query embeddings are 0 in all dimensions, the first is row 0" in caplog.text
    for kind in KINDS:
        names.warn.cache_clear()
        caplog.clear()
        with databases.gallery(kind) as gallery:
            gallery.add(["a", "b"], [[0.0, 1.0], [0.0, 0.0]])
            assert "1 of 2 gallery embeddings are 0 in all dimensions" in caplog.text


def test_classes_that_are_numbers_are_not_merged(gallery, tmp_path):
    for name in ("one", "two"):
        ids = np.array([f"{name}{row}" for row in range(4)])
        np.savez(tmp_path / name, embeddings=np.eye(4), labels=np.arange(4) // 2, names=ids)
    one, two = (read_embeddings(tmp_path / f"{name}.npz") for name in ("one", "two"))
    gallery.add_embeddings(one)
    assert gallery.add_embeddings(one).present == 4
    with pytest.raises(UserError, match=r"the classes of .*two.npz are numbers"):
        gallery.add_embeddings(two)
    assert len(gallery) == 4
    gallery.add_embeddings(two, "two/")
    assert gallery.class_counts() == {"0": 2, "1": 2, "two/0": 2, "two/1": 2}
    # The same images embedded again are no other classes.
    np.savez(tmp_path / "new", embeddings=-np.eye(4), labels=np.arange(4) // 2, names=one.names)
    assert gallery.add_embeddings(read_embeddings(tmp_path / "new.npz"), replace=True).replaced == 4


def test_a_gallery_admits_a_model_that_searches_and_adds_no_rows(gallery):
    gallery.add(["a", "b"], [[1.0, 0.0], [0.0, 1.0]], model=ONE)
    refused = "different models .*; to let this model search it, see tfdml index --admit"
    with pytest.raises(UserError, match=refused):
        gallery.search([[1.0, 0.1]], k=1, model=TWO)
    gallery.admit(TWO)
    gallery.admit(TWO)
    gallery.admit(THREE)
    assert gallery.about == About("euclidean", 2, ONE, admits=(TWO, THREE))
    for model in (ONE, TWO, THREE):
        assert gallery.search([[1.0, 0.1]], k=1, model=model).ids.tolist() == [["a"]]
    with pytest.raises(UserError, match="different models"):
        gallery.search([[1.0, 0.1]], k=1, model="sha256:4")
    with pytest.raises(UserError, match="different models"):
        gallery.add(["c"], [[1.0, 1.0]], model=TWO)
    assert gallery.add(["c"], [[1.0, 1.0]], model=ONE).added == 1
    assert gallery.about.models == (ONE, TWO, THREE)
    with pytest.raises(UserError, match="the model of the queries is not known"):
        gallery.admit("")


def test_a_folder_of_embeddings_admits_a_model(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(4, 3))
    images = ImageTable(tuple("abcd"), [0, 0, 1, 1])
    for name, model in (("old", ONE), ("aligned", TWO), ("new", THREE)):
        write_folder(tmp_path / name, {}, images, vectors, {"model": {"fingerprint": model}})
    search = ["search", f"--gallery={tmp_path}/old", "--k=1"]
    admit = ["index", f"--to={tmp_path}/old"]
    assert commands.run(*search, f"--queries={tmp_path}/aligned")[0] == 2
    status, text, errors = commands.run(*admit, f"--admit={tmp_path}/aligned")
    assert (status, f"is searched by vectors of {TWO}, too" in text) == (0, True), errors
    status, text, errors = commands.run(*search, f"--queries={tmp_path}/aligned")
    assert status == 0, errors
    status, _, errors = commands.run(*search, f"--queries={tmp_path}/new")
    assert (status, "see tfdml index --admit" in errors) == (2, True), errors
    # A file has no place for it.
    np.savez(tmp_path / "old.npz", embeddings=vectors)
    status, _, errors = commands.run("index", f"--to={tmp_path}/old.npz", f"--admit={TWO}")
    assert (status, "the model of the gallery is not known" in errors) == (2, True), errors
