"""bin/evaluate --after: a row for each step beside plain, and one clear line for what is wrong."""

import json

import numpy as np
import pytest

from tests.cli.many import run_many
from tfdml.evaluation import evaluate_retrieval
from tfdml.retrieval import expand_queries


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """Embeddings without roles, with queries and a gallery, and with training classes."""
    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 20)
    points = rng.normal(size=(12, 8))[labels] + rng.normal(size=(240, 8))
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype("float32")
    np.savez(folder / "plain.npz", embeddings=points, labels=labels)
    np.savez(folder / "roles.npz", embeddings=points, labels=labels, is_query=np.arange(240) % 2 == 0)
    return folder


def test_rows_of_stored_embeddings(commands, vectors, tmp_path):
    points, labels = (np.load(vectors / "plain.npz")[name] for name in ("embeddings", "labels"))
    flags = ["--metrics=recall@1,map@r,nmi", "--after=query_expansion(k=3, alpha=1)", "--after=csls"]
    status, said, errors = commands.run(
        "evaluate", f"--model={vectors / 'plain.npz'}", *flags, f"--json={tmp_path / 'plain.json'}"
    )
    assert status == 0, errors
    rows = json.loads((tmp_path / "plain.json").read_text())["after"]
    assert [row["step"] for row in rows] == ["plain", "query_expansion(k=3, alpha=1)", "csls"]
    expected = evaluate_retrieval(
        expand_queries(points, k=3, alpha=1), labels, points, labels, metrics=["map@r"], own_rows=np.arange(240)
    )["map@r"]
    assert rows[1]["metrics"]["map@r"] == pytest.approx(expected, abs=1e-12)
    assert rows[1]["gain"]["map@r"] == pytest.approx(expected - rows[0]["metrics"]["map@r"], abs=1e-12)
    assert f"{100 * expected:.2f} ({100 * rows[1]['gain']['map@r']:+6.2f})" in said
    assert "orphans" in said

    status, said, errors = commands.run(
        "evaluate", f"--model={vectors / 'roles.npz'}", "--after=database_augmentation + k_reciprocal(k1=5)"
    )
    assert status == 0, errors
    assert "    database_augmentation + k_reciprocal(k1=5) " in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--after=whiten"], "--after='whiten': unknown step 'whiten'; one of views, whitening"),
        (["--after="], "--after= names nothing"),
        (["--after=0.5 * csls"], "steps have no factors"),
        (["--after=csls + csls"], "csls must be the last step"),
        (["--after=csls(k=many)"], "csls: k must be a positive integer"),
        (["--after=csls(k=1"], "it cannot be read"),
        (["--after=views"], "a run folder or a model's file"),
        (["--after=views(crops=2)"], "crops must be 1 or 5, not 2"),
        (["--after=whitening"], "bin/embed --split=all"),
        (["--after=whitening(dim=9)", "--split=train"], "split"),
        (["--after=csls", "--metrics=map"], "--metrics=map ranks the whole gallery"),
        (["--after=csls", "--metrics=recall@240"], "needs 240 gallery images"),
    ],
)
def test_what_is_wrong_is_one_line(commands, vectors, flags, says):
    status, _, errors = commands.run("evaluate", f"--model={vectors / 'plain.npz'}", *flags)
    assert status == 2
    assert says in errors
    assert errors.count("\n") == 1


def test_not_beside_compare(commands, tmp_path):
    status, _, errors = commands.run("evaluate", "--compare=a,b", f"--report={tmp_path / 'p.html'}", "--after=csls")
    assert (status, "--after=csls has no effect: it needs a model" in errors) == (2, True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--run_dir=x", "--whitening=dims=3"], "--whitening has no argument 'dims'; it has dim, power, shrinkage"),
        (["--run_dir=x", "--whitening=power=2"], "--whitening: power must be at least 0 and at most 1, not 2"),
        (["--run_dir=x", "--whitening=dim 3"], "--whitening='dim 3': it cannot be read"),
        (["--embedder=x", "--gallery=y", "--whitening=dim=3"], "it needs --run_dir in place of --embedder"),
    ],
)
def test_a_whitening_that_cannot_be_is_one_line(commands, flags, says):
    status, _, errors = commands.run("export", "--out=models", *flags)
    assert (status, errors.count("\n")) == (2, 1)
    assert says in errors


@pytest.mark.slow
def test_views_and_whitening_of_a_run_and_of_its_export(finished_run, tmp_path):
    data = ["--dataset=glyphs", "--dataset_options=images_per_class=4, size=32", "--metrics=recall@1,map@r"]
    steps = ["--after=views", "--after=whitening(dim=8, power=0.5)"]
    export = [f"--run_dir={finished_run}", "--out=models", "--whitening=dim=8, power=0.5"]
    measure = [f"--model={finished_run}", data[-1], *steps, "--json=steps.json", "--report=page.html"]
    done = [
        *run_many("export", tmp_path, [export]),
        *run_many("evaluate", tmp_path, [measure, ["--model=models", *data, "--json=served.json"]]),
    ]
    assert [status for status, _, _ in done] == [0, 0, 0], done
    steps, served = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("steps", "served"))
    rows = steps["after"]
    assert [row["step"] for row in rows] == ["plain", "views", "whitening(dim=8, power=0.5)"]
    assert rows[1]["metrics"] != rows[0]["metrics"]
    assert rows[2]["bytes"] == 428 * 8 * 4 + (16 + 16 * 8) * 4
    assert "whitening(dim=8, power=0.5)" in (tmp_path / "page.html").read_text()
    card = json.loads((tmp_path / "models" / "1" / "model_card.json").read_text())
    assert (card["embedding_dim"], card["whitening"], card["metrics"]) == (8, {"dim": 8, "power": 0.5}, None)
    for name, value in rows[2]["metrics"].items():
        # Ranks of all but equal distances may swap between two graphs.
        assert served[name] == pytest.approx(value, abs=5e-3)
