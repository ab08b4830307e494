"""A head on the command line: trained on stored vectors, it is measured, embeds new ones and is
searched with."""

import json

import numpy as np
import pytest
from pyarrow.parquet import read_table

from tests.cli.commands import write_embedder
from tfdml.data import load
from tfdml.embeddings.backends import load_backend, load_embedder
from tfdml.embeddings.files import read_embeddings
from tfdml.evaluation import evaluate_retrieval
from tfdml.models import stack

DIMENSIONS = 16  # as the embedding of `finished_run` has


def vectors(classes, seed):
    """Ten noisy vectors of each class."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(classes, DIMENSIONS)).repeat(10, axis=0)
    return centers + rng.normal(size=centers.shape)


@pytest.fixture(scope="module")
def folder(commands, tmp_path_factory):
    """Vectors without roles, the run of a head that was trained on the first half of their classes,
    and new vectors."""
    folder = tmp_path_factory.mktemp("heads")
    np.savez(folder / "vectors.npz", embeddings=vectors(8, 0), labels=np.arange(80) // 10)
    np.savez(
        folder / "new.npz", embeddings=vectors(3, 1), names=[f"{row}.jpg" for row in range(30)]
    )
    np.savez(folder / "short.npz", embeddings=np.ones((4, 5)), labels=[0, 0, 1, 1])
    flags = [
        "--embedding_dim=4",
        "--classes_per_batch=4",
        "--images_per_class=2",
        "--epochs=2",
        "--report=false",
    ]
    features, options = (
        f"--features={folder / 'vectors.npz'}",
        "--dataset_options=test_fraction=0.25",
    )
    status, _, errors = commands.run(
        "train", features, options, *flags, f"--run_dir={folder / 'head'}"
    )
    assert status == 0, errors
    return folder


@pytest.mark.slow
def test_the_vectors_themselves_are_measured_before_a_head(folder):
    result = json.loads((folder / "head" / "result.json").read_text())
    # The last quarter of the classes.
    measured = evaluate_retrieval(vectors(8, 0)[60:], np.arange(20) // 10, distance="cosine")
    for name, value in result["metrics_features"].items():
        assert value == pytest.approx(measured[name], abs=1e-6), name
    assert result["metrics_features"]["map@r"] != result["metrics_before"]["map@r"]


def run(commands, name, *flags):
    """A command that ends well; what it prints."""
    status, said, errors = commands.run(name, *map(str, flags))
    assert status == 0, errors
    return said


@pytest.mark.slow
def test_a_head_is_measured_on_the_split_of_its_training(commands, folder):
    model, file = f"--model={folder / 'head'}", f"--json={folder / 'metrics.json'}"
    said = run(commands, "evaluate", model, file, "--generalization")
    assert "vectors, test: 20 images of 2 classes" in said
    measured, trained = (
        json.loads((folder / name).read_text()) for name in ("metrics.json", "head/result.json")
    )
    assert measured["map@r"] == pytest.approx(trained["metrics"]["map@r"], abs=1e-6)
    assert "h_divergence" in measured["generalization"]
    run(commands, "embed", model, "--split=all", f"--out={folder / 'all'}")
    assert np.bincount(read_embeddings(folder / "all").roles == "train").tolist() == [20, 60]


@pytest.mark.slow
def test_a_head_embeds_new_vectors_and_is_searched_with(commands, folder):
    model, new = f"--model={folder / 'head'}", f"--features={folder / 'new.npz'}"
    assert "30 embeddings of 4 dim" in run(
        commands, "embed", model, new, "--batch_size=7", f"--out={folder / 'new'}"
    )
    stored = read_embeddings(folder / "new")
    expected = load_embedder(folder / "head")(np.load(folder / "new.npz")["embeddings"].astype("f"))
    np.testing.assert_allclose(stored.embeddings, expected, atol=1e-6)
    assert set(stored.roles) == {"test"}
    assert stored.names[:2] == ("0.jpg", "1.jpg")
    asked = f"--queries={folder / 'new.npz'}"
    run(
        commands,
        "search",
        model,
        asked,
        f"--gallery={folder / 'new'}",
        "--k=1",
        f"--out={folder / 'n.parquet'}",
    )
    found = read_table(folder / "n.parquet")
    assert found["id"].to_pylist() == list(stored.names)
    np.testing.assert_allclose(found["distance"].to_numpy(), 0, atol=1e-3)


@pytest.mark.slow
def test_vectors_and_images_are_not_taken_for_each_other(commands, folder):
    head, glyphs = (
        f"--model={folder / 'head'}",
        ["--dataset=glyphs", "--dataset_options=images_per_class=2, size=32"],
    )
    write_embedder(folder / "images.keras")
    images = [f"--model={folder / 'images.keras'}", f"--features={folder / 'new.npz'}"]
    for flags, says in (
        ([head, *glyphs], "glyphs holds images"),
        ([head, f"--features={folder / 'short.npz'}"], "5 dim"),
        (images, "embeds images"),
    ):
        status, _, errors = commands.run("embed", *flags, f"--out={folder / 'refused'}")
        assert (status, says in errors) == (2, True), errors
        assert not list((folder / "refused").glob("*.parquet"))


@pytest.mark.slow
def test_a_head_and_its_embedder_are_exported_as_one(commands, folder, finished_run):
    """As a SavedModel, a LiteRT and an ONNX file, which are accepted against the two, with the
    settings of both."""
    flags = [
        f"--run_dir={folder / 'head'}",
        f"--stack_on={finished_run}",
        f"--out={folder / 'models'}",
        "--images=20",
    ]
    run(commands, "export", *flags, "--formats=saved_model,litert_float32,onnx")
    version = folder / "models" / "1"
    card = json.loads((version / "model_card.json").read_text())
    assert card["model"]["class"] == "StackedEmbedder"
    assert (card["embedding_dim"], card["view"]["image_size"], card["data"]["dataset"]) == (
        4,
        28,
        "glyphs",
    )
    assert (card["head"]["data"]["dataset"], card["head"]["flags"]["embedding_dim"]) == (
        "vectors",
        "4",
    )
    assert all(made["acceptance"]["max_difference"] < 1e-5 for made in card["artifacts"].values())
    images = load("glyphs", split="test", images_per_class=4, size=32).take(range(8))
    embedder, head = (load_embedder(path) for path in (finished_run, folder / "head"))
    whole = stack(embedder, head)
    whole.save(folder / "whole.keras")
    expected = load_backend(folder / "whole.keras").embed(images, 8)
    np.testing.assert_allclose(
        load_backend(folder / "models").embed(images, 8), expected, atol=1e-5
    )
