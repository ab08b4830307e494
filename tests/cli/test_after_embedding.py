"""bin/evaluate --after: a row for each step beside plain, and one clear line for what is wrong."""

import json

import numpy as np
import pytest

from tests.cli.many import run_many
from tfdml.evaluation import evaluate_retrieval
from tfdml.evaluation.reranking import expand_queries


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
    assert [row["step"] for row in rows] == ["plain", "query_expansion(k=3, alpha=1.0)", "csls"]
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
        (["--after=whiten"], "--after=whiten: unknown step 'whiten'; one of views, whitening"),
        (["--after="], "--after= names nothing"),
        (["--after=0.5 * csls"], "steps have no factors"),
        (["--after=csls + csls"], "csls must be the last step"),
        (["--after=csls(k=many)"], "csls: k must be a positive integer"),
        (["--after=csls(k=1"], "it cannot be read"),
        (["--after=views"], "a run folder or .keras file"),
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
    assert (status, "--after goes with --model" in errors) == (2, True)


@pytest.mark.slow
def test_views_and_whitening_of_a_run(finished_run, tmp_path):
    flags = ["--metrics=recall", "--after=views(crops=5) + whitening(dim=8)", "--json=a.json", "--report=a.html"]
    saved_model = [f"--model={finished_run}/embedder.keras", "--dataset=glyphs", "--after=views(crops=2)"]
    (status, _, error), refused = run_many("evaluate", tmp_path, [[f"--model={finished_run}", *flags], saved_model])
    assert status == 0, error
    rows = json.loads((tmp_path / "a.json").read_text())["after"]
    assert [row["step"] for row in rows] == ["plain", "views(crops=5)", "views(crops=5) + whitening(dim=8)"]
    assert rows[1]["metrics"] != rows[0]["metrics"]
    assert rows[2]["bytes"] == 428 * 8 * 4 + (16 + 16 * 8) * 4
    assert "views(crops=5) + whitening(dim=8)" in (tmp_path / "a.html").read_text()
    assert refused[0] == 2
    assert "crops must be 1 or 5, not 2" in refused[2]


@pytest.mark.slow
def test_an_exported_whitening_measures_as_the_step(finished_run, tmp_path):
    out, data = f"--out={tmp_path}/models", ["--dataset=glyphs", "--dataset_options=images_per_class=4, size=32"]
    export = [f"--run_dir={finished_run}", out, "--whitening=dim=8, power=0.5"]
    ((status, _, error),) = run_many("export", tmp_path, [export])
    assert status == 0, error
    card = json.loads((tmp_path / "models" / "1" / "model_card.json").read_text())
    assert (card["embedding_dim"], card["whitening"], card["metrics"]) == (8, {"dim": 8, "power": 0.5}, None)
    flags = ["--metrics=recall@1,map@r"]
    done = run_many(
        "evaluate",
        tmp_path,
        [
            [f"--model={tmp_path}/models", *data, *flags, "--json=served.json"],
            [f"--model={finished_run}", *flags, "--after=whitening(dim=8, power=0.5)", "--json=step.json"],
        ],
    )
    assert [status for status, _, _ in done] == [0, 0], done
    served, step = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("served", "step"))
    for name, value in step["after"][-1]["metrics"].items():
        # Ranks of all but equal distances may swap between two graphs.
        assert served[name] == pytest.approx(value, abs=5e-3)
