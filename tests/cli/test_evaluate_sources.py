"""bin/evaluate gives the same numbers for the same model wherever it lies, and one clear line for what is wrong."""

import json

import keras
import numpy as np
import pytest

import tfdml  # noqa: F401  (registers the classes that a saved embedder names)
from tests.cli.many import run_many
from tests.export.models_on_disk import tflite
from tests.serving_double import serving
from tfdml.export import export_saved_model

# Ranks of all but equal distances may swap between two graphs.
BETWEEN_GRAPHS = 5e-3
DATA = ["--dataset=glyphs", "--dataset_options=images_per_class=4, size=32"]


@pytest.fixture(scope="module")
def forms(finished_run, tmp_path_factory):
    """Where the embedder of the run lies as a SavedModel and as .tflite."""
    folder = tmp_path_factory.mktemp("forms")
    embedder = keras.saving.load_model(finished_run / "embedder.keras")
    version = export_saved_model(embedder, folder / "versions")
    (folder / "model.tflite").write_bytes(tflite(embedder))
    return {"run": finished_run, "saved_model": version, "litert": folder / "model.tflite"}


@pytest.mark.slow
def test_the_same_numbers_for_the_same_model(forms, tmp_path):
    with serving({"tiny": {3: forms["saved_model"]}}) as server:
        places = {
            "run": [f"--model={forms['run']}"],
            "keras": [f"--model={forms['run'] / 'embedder.keras'}", *DATA],
            "saved_model": [f"--model={forms['saved_model'].parent}", *DATA],
            "litert": [f"--model={forms['litert']}", "--resize=32", "--image_size=28", *DATA],
            "grpc": [f"--model=grpc://127.0.0.1:{server.grpc_port}/tiny", *DATA],
            "rest": [f"--model=http://127.0.0.1:{server.rest_port}/v1/models/tiny", *DATA],
        }
        answers = run_many("evaluate", tmp_path, [[*flags, f"--json={name}.json"] for name, flags in places.items()])
    for (status, output, error), name in zip(answers, places, strict=True):
        assert status == 0, (name, error)
        assert "428 images of 107 classes" in output
    results = {}
    for name in places:
        result = json.loads((tmp_path / f"{name}.json").read_text())
        results[name] = {key: value for key, value in result.items() if key != "model"}
        assert result["dataset"] == "glyphs"
    trained = json.loads((forms["run"] / "result.json").read_text())["metrics"]
    for metric in ("recall@1", "recall@8", "map@r", "r_precision"):
        assert results["run"][metric] == pytest.approx(trained[metric], abs=1e-6)
        for name in ("saved_model", "litert"):
            assert results[name][metric] == pytest.approx(trained[metric], abs=BETWEEN_GRAPHS)
    assert results["keras"] == results["run"]
    assert results["grpc"] == results["saved_model"]
    assert results["rest"] == results["saved_model"]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A folder of .npz files, good and bad."""
    folder = tmp_path_factory.mktemp("vectors")
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 20)
    points = rng.normal(size=(12, 8))[labels] + rng.normal(size=(240, 8))
    np.savez(folder / "good.npz", embeddings=points, labels=labels)
    np.savez(folder / "roles.npz", embeddings=points, labels=labels, is_query=np.arange(240) % 2 == 0)
    np.savez(folder / "bare.npz", embeddings=points)
    np.savez(folder / "short.npz", embeddings=points, labels=labels[:-1])
    np.savez(folder / "keys.npz", vectors=points, labels=labels)
    points[7, 3] = np.nan
    np.savez(folder / "nan.npz", embeddings=points, labels=labels)
    (folder / "text.npz").write_text("no archive")
    (folder / "folder").mkdir()
    return folder


@pytest.mark.slow
def test_an_archive_is_measured_as_its_arrays_are(vectors):
    from tfdml.evaluation import evaluate_retrieval, part_protocol

    answers = run_many(
        "evaluate",
        vectors,
        [
            ["--model=good.npz", "--json=good.json", "--intervals=queries", "--metrics=recall,map,nmi", "--ks=1,3"],
            ["--model=roles.npz", "--json=roles.json", "--distance=cosine"],
            ["--model=good.npz", "--json=parts.json", "--intervals=parts", "--metrics=recall@1", "--generalisation"],
        ],
    )
    for status, _, error in answers:
        assert status == 0, error
    arrays = np.load(vectors / "roles.npz")
    points, labels, query = arrays["embeddings"], arrays["labels"], arrays["is_query"]
    expected = evaluate_retrieval(points, labels, metrics=["recall", "map", "nmi"], ks=(1, 3), intervals="queries")
    found = json.loads((vectors / "good.json").read_text())
    assert {key: found[key] for key in expected if key != "intervals"} == {
        key: value for key, value in expected.items() if key != "intervals"
    }
    assert found["intervals"] == {name: list(value) for name, value in expected["intervals"].items()}
    assert "12 classes" in answers[0][1]
    assert f"[{100 * expected['intervals']['recall@1'].low:.2f}," in answers[0][1]

    expected = evaluate_retrieval(points[query], labels[query], points[~query], labels[~query], distance="cosine")
    found = json.loads((vectors / "roles.json").read_text())
    assert {key: found[key] for key in expected} == expected
    assert found["num_gallery"] == 120

    found = json.loads((vectors / "parts.json").read_text())
    assert found["parts"] == {
        name: list(value) for name, value in part_protocol(points, labels, metrics=["recall@1"]).items()
    }
    assert found["generalisation"]["unseen_recall@1"] == found["recall@1"]


@pytest.mark.slow
def test_wrong_input_is_one_clear_line(vectors):
    cases = [
        (["--model=nowhere.npz"], "there is no file nowhere.npz"),
        (["--model=text.npz"], "text.npz cannot be read as .npz"),
        (["--model=keys.npz"], "keys.npz has no array embeddings; it holds vectors, labels"),
        (["--model=bare.npz"], "has no labels"),
        (["--model=short.npz"], "240 embeddings but labels of shape (239,)"),
        (["--model=nan.npz"], "1 of 240 rows hold NaN or infinite values (the first is row 7)"),
        (["--model=good.npz", *DATA], "holds 240 embeddings, but glyphs (test) has 428 images"),
        (["--model=good.npz", "--metrics=recal"], "recal"),
        (["--model=good.npz", "--report=x/y.html"], "its folder does not exist"),
        (["--model=good.npz", "--json=folder"], "--json=folder is a folder: name a file to write"),
        (["--model=good.npz", "--json=gs://bucket/x.json"], "--json=gs://bucket/x.json: only local"),
        (["--model=good.npz", "--json=/dev/full"], "/dev/full cannot be written: the disk is full"),
        (["--model=good.npz", "--report=y.html"], "name their --dataset"),
        (["--model=roles.npz", "--intervals=parts"], "these images have roles"),
        (["--model=grpc://127.0.0.1:1/cars", *DATA], "cannot be reached, in 5 attempts"),
        (["--model=http://127.0.0.1:1/v1/models/cars", *DATA], "cannot be reached, in 5 attempts"),
        (["--model=grpc://nowhere", *DATA], "write grpc://host:port/name"),
        (["--model=x.tflite", *DATA], "--model=x.tflite: there is no such file"),
        (["--compare=a,b"], "a is no folder"),
        (["--compare=a,b", "--report=c.html"], "a is no folder"),
        (["--compare=a,b", "--model=c"], "--compare takes the place of --model"),
    ]
    before = sorted(path.name for path in vectors.iterdir())
    answers = run_many("evaluate", vectors, [flags for flags, _ in cases])
    for (status, _, error), (flags, says) in zip(answers, cases, strict=True):
        (line,) = [line for line in error.splitlines() if line.startswith("evaluate: error:")]
        assert says in line, (flags, error)
        assert status == 2
        assert "Traceback" not in error
    assert sorted(path.name for path in vectors.iterdir()) == before


@pytest.mark.slow
def test_embeddings_of_other_images_than_the_data_set(forms, tmp_path):
    from tfdml.data import load

    dataset = load("glyphs", split="test", images_per_class=4, size=32)
    points = np.random.default_rng(0).normal(size=(428, 4)).astype(np.float32)
    np.savez(tmp_path / "same.npz", embeddings=points, labels=dataset.labels + 1000)
    np.savez(tmp_path / "bare.npz", embeddings=points)
    np.savez(tmp_path / "other.npz", embeddings=points, labels=np.roll(dataset.labels, 1))
    answers = run_many(
        "evaluate",
        tmp_path,
        [
            ["--model=same.npz", *DATA, "--report=same.html", "--json=same.json"],
            ["--model=bare.npz", *DATA, "--json=bare.json"],
            ["--model=other.npz", *DATA],
            [f"--model={forms['run']}", "--report=run.html", "--intervals=classes"],
            [f"--model={forms['run']}", "--metrics=recall@1", "--generalisation", "--json=general.json"],
        ],
    )
    assert [status for status, _, _ in answers] == [0, 0, 2, 0, 0], [error for _, _, error in answers]
    assert "other classes than glyphs (test)" in answers[2][2]
    same, bare = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("same", "bare"))
    assert {k: v for k, v in same.items() if k != "model"} == {k: v for k, v in bare.items() if k != "model"}
    for page in ("same.html", "run.html"):
        assert "<html" in (tmp_path / page).read_text()[:200]
    general = json.loads((tmp_path / "general.json").read_text())
    assert general["generalisation"]["unseen_recall@1"] == general["recall@1"]
    assert "seen_recall@1" in general["generalisation"]
