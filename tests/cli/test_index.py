"""`tfdml index` and what `tfdml search` prints and writes of its galleries."""

import numpy as np
import pytest
from pyarrow.parquet import read_table

from tfdml.cli.evaluation.thresholds import MaxDistance
from tfdml.errors import UserError
from tfdml.retrieval import IndexRecall, WritableGallery, open_gallery

pytest.importorskip("lancedb")


@pytest.fixture
def uri(tmp_path):
    return f"lancedb://{tmp_path}/galleries"


def write(path, ids, classes, seed=0):
    """A file of embeddings; its classes have names."""
    vectors = np.random.default_rng(seed).normal(size=(len(ids), 4))
    np.savez(path, embeddings=vectors, names=np.array(ids), labels=np.array(classes))
    return vectors


def run(commands, status, *words):
    got, out, errors = commands.run(*map(str, words))
    assert got == status, out + errors
    return out + errors


def test_rows_are_pruned_and_deleted(commands, uri, tmp_path):
    write(tmp_path / "old.npz", ["a", "b", "c"], ["bus", "bus", "van"])
    write(tmp_path / "new.npz", ["b", "c", "d"], ["bus", "van", "bus"], seed=1)
    index = ["index", f"--to={uri}"]
    text = run(commands, 0, *index, f"--embeddings={tmp_path}/old.npz")
    assert "3 added, 0 replaced, 0 there already" in text
    assert "besides" not in text
    new = [*index, f"--embeddings={tmp_path}/new.npz"]
    assert "2 ids of" in run(commands, 2, *new)
    text = run(commands, 0, *new, "--replace")
    assert "1 added, 2 replaced, 0 there already" in text
    assert "the gallery holds 1 row besides, from other folders or files" in text
    text = run(commands, 0, *new, "--prune")
    assert "1 row deleted, not in the embeddings" in text
    assert "besides" not in text
    text = run(commands, 0, *index, "--delete=class=bus")
    assert "2 rows deleted, whose class=bus; 1 are left" in text
    with open_gallery(uri) as gallery:
        assert gallery.rows(9).ids == ["c"]
    for words, says in (
        ([], "--embeddings: is missing, or --delete"),
        (["--delete=bus"], "--delete=bus: write it as class=bus"),
        (["--delete=price=3"], "column=price: unknown"),
        (["--delete=class=bus", "--prune"], "--prune=true: has no effect"),
        ([f"--embeddings={tmp_path}/new.npz", f"--to={tmp_path}/old.npz"], "is no database"),
    ):
        assert says in run(commands, 2, *index, *words)


def test_an_unknown_model_is_mixed_in_where_that_is_said(commands, uri, tmp_path):
    write(tmp_path / "x.npz", ["a", "b"], ["bus", "van"])
    index = ["index", f"--to={uri}", f"--embeddings={tmp_path}/x.npz"]
    assert "added" in run(commands, 0, *index, "--prefix=1/", "--model=sha256:1")
    refused = run(commands, 2, *index, "--prefix=2/")
    assert "is of model" in refused or "are of model sha256:1" in refused
    assert "set model=unknown to mix them in" in refused
    assert "different models" in run(commands, 2, *index, "--prefix=2/", "--model=sha256:2")
    assert "2 added" in run(commands, 0, *index, "--prefix=2/", "--model=unknown")


def test_a_search_says_where_nothing_is_near_enough(commands, uri, tmp_path):
    vectors = write(tmp_path / "x.npz", ["a", "b"], ["bus", "van"])
    queries = np.stack([vectors[0], vectors[0] + 9])
    names = np.array(["near", "far"])
    labels = np.array(["bus", "van"])
    np.savez(tmp_path / "q.npz", embeddings=queries, names=names, labels=labels)
    run(commands, 0, "index", f"--to={uri}", f"--embeddings={tmp_path}/x.npz")
    out = tmp_path / "out.parquet"
    tables = []
    for gallery in (uri, tmp_path / "x.npz"):
        search = ["search", f"--gallery={gallery}", f"--queries={tmp_path}/q.npz"]
        text = run(commands, 0, *search, "--max_distance=0.7671", f"--out={out}")
        assert "far\n  nothing within 0.7671\n" in text
        assert "Recall@1 50.00 %" in text
        tables.append(read_table(out).to_pylist())
        assert [row["id"] for row in tables[-1]] == ["a", None]
        assert (tables[-1][1]["class"], tables[-1][1]["distance"]) == (None, None)
        refused = run(commands, 2, *search, "--max_distance=-1")
        assert "--max_distance=-1: no euclidean distance is below 0" in refused
    # Both count what is right, and say the same.
    assert [{**row, "distance": None} for row in tables[0]] == [
        {**row, "distance": None} for row in tables[1]
    ]
    search = ["search", f"--gallery={tmp_path}/x.npz", f"--queries={tmp_path}/q.npz"]
    assert "dot distances, at most -1" in run(
        commands, 0, *search, "--max_distance=-1", "--distance=dot"
    )


def test_a_search_by_an_index_is_measured_first(commands, uri, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(600, 4))
    np.savez(tmp_path / "x.npz", embeddings=vectors[:500])
    np.savez(tmp_path / "later.npz", embeddings=vectors[500:])
    np.savez(tmp_path / "q.npz", embeddings=vectors[:3] + 0.001)
    index = ["index", f"--to={uri}"]
    queries = f"--queries={tmp_path}/q.npz"
    search = ["search", f"--gallery={uri}", queries, "--k=5"]
    run(commands, 0, *index, f"--embeddings={tmp_path}/x.npz")
    refused = run(commands, 2, *search, "--approximate")
    assert "has no index for euclidean distances: build it with tfdml index" in refused
    built = run(commands, 0, *index, "--build_index")
    assert built.startswith("the index finds 100.0 % of the 10 nearest of 200 rows of the gallery")
    exact = run(commands, 0, *search)
    quick = run(commands, 0, *search, "--approximate")
    measured = "the index finds 100.0 % of the 5 nearest of 200 rows of the gallery"
    assert measured in quick.splitlines()
    assert quick.splitlines()[-18:] == exact.splitlines()[-18:]
    added = run(commands, 0, *index, f"--embeddings={tmp_path}/later.npz", "--prefix=later/")
    assert "100 added" in added
    near = run(commands, 0, *search, "--approximate", "--max_distance=0.001")
    assert f"{measured}; it lacks 100 rows added later, compared one by one" in near
    assert "nothing within --max_distance may have a neighbor that the index misses" in near
    both = run(commands, 0, *index, "--delete=id=later/0", "--build_index")
    assert "1 row deleted" in both
    assert "it lacks" not in both


def test_an_index_that_misses_too_many_is_refused(commands, uri, tmp_path, monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(20, 4))
    np.savez(tmp_path / "x.npz", embeddings=vectors)
    search = ["search", f"--queries={tmp_path}/x.npz", "--approximate"]
    run(commands, 0, "index", f"--to={uri}", f"--embeddings={tmp_path}/x.npz", "--build_index")
    recall = IndexRecall(0.9412, 10, 20)
    monkeypatch.setattr(WritableGallery, "measure_index", lambda gallery, k: recall)
    says = "--min_recall=0.95: the index finds 94.1 % of the 10 nearest of 20 rows of the gallery: "
    refused = run(commands, 2, *search, f"--gallery={uri}")
    assert f"{says}search without --approximate, or accept a smaller recall" in refused
    assert len(refused.splitlines()) == 2  # the other one is "euclidean distances"
    assert "19" in run(commands, 0, *search, f"--gallery={uri}", "--min_recall=0.94")
    for words, says in (
        (["--min_recall=95"], "--min_recall=95.0: must be at most 1"),
        (["--min_recall=-0.1"], "--min_recall=-0.1: must be at least 0"),
        (["--min_recall=nan"], "--min_recall=nan"),
        (["--per_class=mean"], "--approximate=true: has no effect: it needs a --gallery in a"),
        (
            [f"--gallery={tmp_path}/x.npz"],
            "--approximate=true: has no effect: it needs a --gallery",
        ),
        ([f"--gallery={tmp_path}"], "--approximate=true: has no effect: it needs a --gallery in a"),
    ):
        refused = run(commands, 2, *search, f"--gallery={uri}", *words)
        assert says in refused, refused
    search.remove("--approximate")
    refused = run(commands, 2, *search, f"--gallery={uri}", "--min_recall=0.9")
    assert "--min_recall=0.9: has no effect: it needs --approximate" in refused
    refused = run(commands, 2, "index", f"--to={tmp_path}/x.npz", "--build_index")
    assert "is no database" in refused
    refused = run(commands, 2, "index", f"--to={tmp_path}/none", "--build_index")
    assert "none" in refused
    refused = run(commands, 2, "index", f"--to={uri}?table=other", "--build_index")
    assert "holds no gallery: write it with tfdml index" in refused


def test_a_number_states_no_model(caplog):
    """Which is said where the models of queries and gallery differ."""
    for text, model, gallery_model in (
        ("0.5", "sha256:1", "sha256:1"),
        ("0.5", "", "sha256:1"),
        ("", "sha256:2", "sha256:1"),
    ):
        MaxDistance.read(text).check_models(model, gallery_model)
    assert not caplog.text
    MaxDistance.read("0.5").check_models("sha256:2", "sha256:1")
    assert "max_distance=0.5: a number states no model, and two models are compared" in caplog.text
    with pytest.raises(UserError, match="max_distance=nan: write a number, calibrated, or a JSON"):
        MaxDistance.read("nan")
