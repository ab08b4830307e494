"""Commands on a model of images and texts: measured in both directions, embedded, searched by
words, exported."""

import json
import pathlib
import re
import shlex

import keras
import numpy as np
import pytest

import tfdml
from tests.docs.pages import ROOT
from tfdml.data import load
from tfdml.embeddings import load_backend, read_embeddings
from tfdml.errors import UserError
from tfdml.evaluation import (
    calibrate,
    class_embeddings,
    evaluate_views,
    evaluate_zero_shot,
    verification,
)
from tfdml.evaluation.views import ViewItems
from tfdml.export import export_model
from tfdml.models import ByteTokenizer, Embedder, TextEmbedder, byte_encoder

GLYPHS = ("--dataset=glyphs", "--dataset_options=texts=true, size=16, images_per_class=2")


@pytest.fixture(scope="module")
def test_split():
    return load("glyphs", split="test", texts=True, size=16, images_per_class=2)


@pytest.fixture(scope="module")
def towers():
    keras.utils.set_random_seed(0)
    image = Embedder(
        tfdml.backbones.resolve("conv4", 16, width=4), embedding_dim=8, image_size=16, resize=16
    )
    text = TextEmbedder(byte_encoder(48, width=4), ByteTokenizer(48), embedding_dim=8)
    image(np.zeros((1, 16, 16, 3), np.uint8))
    text.embed_texts(["a"])
    return image, text


@pytest.fixture(scope="module")
def model(towers, tmp_path_factory):
    """A folder with both towers."""
    folder = tmp_path_factory.mktemp("towers")
    towers[0].save(folder / "embedder.keras")
    towers[1].save(folder / "text_embedder.keras")
    return folder


@pytest.fixture(scope="module")
def vectors(model, test_split):
    items = ViewItems.of(test_split)
    source = load_backend(model)
    return items, source.embed(test_split.take(items.rows), 100), source.embed_texts(items.texts)


def evaluated(commands, model, path, *flags):
    status, said, errors = commands.run(
        "evaluate", f"--model={model}", *GLYPHS, f"--json={path}", *flags
    )
    assert status == 0, errors
    return json.loads(path.read_text()), said


def test_both_directions_are_measured(commands, model, vectors, tmp_path):
    items, images, texts = vectors
    result, said = evaluated(
        commands, model, tmp_path / "metrics.json", "--intervals=classes", "--ks=1,10"
    )
    expected = evaluate_views(images, texts, items.image_labels, items.text_labels, ks=[1, 10])
    for direction, measures in expected.items():
        assert result[direction]["recall@10"] == pytest.approx(measures["recall@10"], abs=1e-3)
        assert result[direction]["intervals"]["map"][0] == pytest.approx(measures["map"], abs=1e-3)
    assert expected["text_to_image"]["chance"]["recall@1"] == pytest.approx(1 / 146)
    assert "292 images of 146 classes, 146 texts" in said


@pytest.mark.slow
def test_pairs_and_classes_are_measured_across_views(
    commands, model, vectors, test_split, tmp_path
):
    items, images, texts = vectors
    flags = ("--task=verification", "--target=far=0.1")
    result, _ = evaluated(commands, model, tmp_path / "pairs.json", *flags)
    labels, text_labels = items.connected()
    both, views = np.concatenate([images, texts]), np.repeat([0, 1], [len(images), len(texts)])
    expected = verification(both, np.concatenate([labels, text_labels]), views=views)
    assert (result["num_same"], result["num_different"]) == (292, 292 * 145)
    assert result["auc"] == pytest.approx(expected.auc, abs=1e-3)

    path = tmp_path / "classes.json"
    flags = ("--task=classification", "--target=fpir=0.1", "--templates=a {},{}")
    result, _ = evaluated(commands, model, path, *flags)
    names = list(
        dict.fromkeys(test_split.class_names[label] for label in sorted(test_split.class_names))
    )
    classes = class_embeddings(load_backend(model).embed_texts, names, ["a {}", "{}"])
    rows = test_split.labels[items.rows] - test_split.labels.min()
    assert result["accuracy@5"] == pytest.approx(
        evaluate_zero_shot(images, rows, classes)["accuracy@5"], abs=4e-3
    )
    threshold = calibrate(
        texts, text_labels, fpir=0.1, gallery=images, gallery_labels=labels
    ).threshold
    assert result["calibration"]["threshold"] == pytest.approx(threshold, abs=1e-4)


@pytest.mark.slow
def test_words_find_images(commands, model, vectors, tmp_path):
    items, images, texts = vectors
    flags = (f"--model={model}", *GLYPHS)
    assert commands.run("embed", *flags, f"--out={tmp_path / 'images'}")[0] == 0
    assert commands.run("embed", *flags, "--texts=column", f"--out={tmp_path / 'texts'}")[0] == 0
    stored = read_embeddings(tmp_path / "texts")
    assert list(stored.names) == list(stored.classes) == items.texts
    np.testing.assert_allclose(stored.embeddings, texts, atol=1e-6)

    gallery = f"--gallery={tmp_path / 'images'}"
    status, said, errors = commands.run(
        "search", gallery, f"--model={model}", f"--text={items.texts[5]}", "--k=1"
    )
    assert status == 0, errors
    nearest = np.linalg.norm(images - texts[5], axis=1).min()
    assert f"1  {nearest:8.4f}  U+" in said
    both = commands.run("search", gallery, f"--queries={tmp_path / 'texts'}", "--k=3")
    assert "Recall@1" in both[1]


def test_what_has_no_words_is_refused(commands, model, towers, vectors, tmp_path):
    towers[0].save(tmp_path / "embedder.keras")
    np.savez(tmp_path / "gallery.npz", embeddings=vectors[1], labels=np.arange(len(vectors[1])))
    (tmp_path / "lines.txt").write_text("letter A\n\nletter B\n")
    calibration = calibrate(np.arange(8.0)[:, None], [0, 0, 1, 1, 2, 2, 3, 3], fpir=0.5)
    (tmp_path / "images.json").write_text(json.dumps({"calibration": calibration.to_dict()}))
    search = "search", f"--gallery={tmp_path / 'gallery.npz'}"
    both, images, out = f"--model={model}", f"--model={tmp_path}", f"--out={tmp_path / 'o'}"
    for arguments, message in (
        ((*search, images, "--text=a"), "images alone"),
        ((*search, both, "--text=a", f"--queries={tmp_path}"), "--queries"),
        ((*search, both, "--text= "), "text, value 1: is empty"),
        ((*search, both, "--text=a", "--max_distance=calibrated"), "images as queries"),
        (
            (*search, both, "--text=a", f"--max_distance={tmp_path / 'images.json'}"),
            "images as queries",
        ),
        (("embed", both, f"--texts={tmp_path / 'lines.txt'}", out), "lines.txt, line 2: is empty"),
        (("embed", images, "--texts=column", *GLYPHS, out), "images alone"),
        (("evaluate", both, *GLYPHS, "--generalization"), "--generalization"),
        (("evaluate", both, *GLYPHS, "--task=classification", "--templates=a letter"), "{}"),
    ):
        status, _, errors = commands.run(*arguments)
        assert (status, message in errors) == (2, True), (arguments, errors)


@pytest.mark.slow
def test_both_towers_are_exported_and_compared(model, towers, vectors, test_split, tmp_path):
    version = export_model(towers[0], tmp_path, test_split, text_embedder=towers[1])
    card = json.loads((version / "model_card.json").read_text())
    assert card["artifacts"]["saved_model"]["acceptance_of_texts"]["max_difference"] < 1e-5
    assert "embed_texts" in card["signatures"]
    served = load_backend(tmp_path)
    np.testing.assert_allclose(served.embed_texts(vectors[0].texts), vectors[2], atol=1e-5)
    assert served.embed_texts([]).shape == (0, 8)
    for texts, message in ((["a", " "], "texts, text 1: is empty"), (["a" * 48], "48 tokens")):
        with pytest.raises(UserError, match=message):
            served.embed_texts(texts)


@pytest.mark.slow
def test_a_projection_of_stored_vectors_of_both_trains(commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    items = rng.normal(size=(60, 6)).repeat(2, axis=0)
    images = items @ rng.normal(size=(6, 12)) + rng.normal(0, 0.1, (120, 12))
    np.savez("images.npz", embeddings=np.float32(images), labels=np.arange(120) // 2)
    np.savez("texts.npz", embeddings=np.float32(items @ rng.normal(size=(6, 10))))
    data = (
        "--features=images.npz",
        '--text_backbone=vectors(path="texts.npz")',
        "--sampling=texts",
        "--batch_size=16",
    )
    how = (
        "--recipe=none",
        "--embedding_dim=8",
        "--learning_rate=0.01",
        "--epochs=2",
        "--steps_per_epoch=50",
    )
    status, _, errors = commands.run(
        "train", *data, *how, "--objectives=clip", "--ks=1,10", "--run_dir=run"
    )
    assert status == 0, errors
    result = json.loads(pathlib.Path("run/result.json").read_text())
    assert (
        result["metrics"]["text_to_image/recall@10"]
        > 0.9
        > 5 * result["metrics_before"]["text_to_image/recall@1"]
    )
    status, said, errors = commands.run("evaluate", "--model=run")
    assert (status, "60 images of 30 classes" in said) == (0, True), errors


@pytest.mark.slow
def test_the_commands_of_the_page_run_from_training_to_a_saved_model(
    commands, tmp_path, monkeypatch
):
    page = (ROOT / "docs" / "texts.md").read_text(encoding="utf-8")
    lines = [shlex.split(line) for line in re.findall(r"^tfdml (.*)", page, re.MULTILINE)]
    monkeypatch.chdir(tmp_path)
    flag_file = f"--flagfile={ROOT / 'configs' / 'small' / 'glyphs_texts.flags'}"
    short = (
        "--dataset_options=texts=true, size=32, images_per_class=4",
        "--epochs=2",
        "--steps_per_epoch=3",
    )
    # One's own captions are planned by tests/docs/test_commands.py.
    lines = [words for words in lines if "--data_dir=captions.csv" not in words]
    for command, *arguments in lines:
        if command == "train":
            arguments = [flag_file, *arguments[1:], *short, "--batch_size=32"]
        if command != "demo":  # which ends with Ctrl-C
            status, _, errors = commands.run(command, *arguments)
            assert status == 0, (command, errors)
    result = json.loads(pathlib.Path("runs/letters/result.json").read_text())
    history = [
        json.loads(line)
        for line in pathlib.Path("runs/letters/metrics.jsonl").read_text().splitlines()
    ]
    best = max(history[1:], key=lambda record: record["validation"]["text_to_image/map"])
    assert result["epoch"] == best["epoch"]
    assert (
        commands.run("evaluate", "--model=runs/letters", "--json=measured.json", "--ks=1,10")[0]
        == 0
    )
    measured = json.loads(pathlib.Path("measured.json").read_text())
    for direction in ("text_to_image", "image_to_text"):
        for name in ("recall@1", "recall@10", "map"):
            key = f"{direction}/{name}"
            assert result["metrics"][key] == pytest.approx(measured[direction][name], abs=2e-3)
            assert best["test"][key] == pytest.approx(result["metrics"][key])
