"""`tfdml index` and what `tfdml search` prints and writes of its galleries."""

import numpy as np
import pytest
from pyarrow.parquet import read_table

from tfdml.retrieval import open_gallery

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
    assert "the gallery holds 1 rows besides, from other folders or files" in text
    text = run(commands, 0, *new, "--prune")
    assert "1 rows deleted, not in the embeddings" in text
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
