"""`tfdml export`: a retriever of a run, and an embedder that searches with all moments."""

import json
import pathlib
import types

import numpy as np
import pytest
import tensorflow as tf

from tests.cli import commands
from tfdml.export import exporter, retriever

DATA = ["--gallery_dataset=glyphs", "--gallery_dataset_options=images_per_class=4, size=32"]


def test_a_run_is_exported_with_what_it_measured(finished_run, tmp_path):
    said = commands.printed("export", f"--run_dir={finished_run}", f"--out={tmp_path / 'models'}")
    card = json.loads((tmp_path / "models" / "1" / "model_card.json").read_text())
    result = json.loads((finished_run / "result.json").read_text())
    assert card["metrics"]["recall@1"] == result["metrics"]["recall@1"]
    assert (card["flags"]["embedding_dim"], card["embedding_dim"]) == ("16", 16)
    assert [*card["artifacts"]] == ["saved_model"]
    assert card["artifacts"]["saved_model"]["acceptance"]["max_difference"] < 1e-5
    assert str(tmp_path / "models" / "1") in said


@pytest.mark.slow
def test_a_run_becomes_a_retriever_of_a_data_set(finished_run, tmp_path):
    out = tmp_path / "retriever"
    flags = [f"--run_dir={finished_run}", "--gallery=made", *DATA, "--truncate_dim=8"]
    commands.printed("export", *flags, f"--out={out}")
    card = json.loads((out / "1" / "retriever.json").read_text())
    served = tf.saved_model.load(str(out / "1"))
    vectors = served.signatures["search_embedding"].structured_input_signature[1]["embedding"]
    assert vectors.shape[1] == 8
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3)).astype("uint8")
    image = tf.io.encode_png(pixels)[None]
    found = served.signatures["search_bytes"](image_bytes=image, k=tf.constant(3))
    assert found["ids"].shape == (1, 3)
    assert np.all(np.diff(found["distances"].numpy()) >= 0)
    # By default it has the threshold of its own images of unseen classes, each of which searches
    # it.
    assert (card["calibration"]["kind"], card["calibration"]["basis"]["images"]) == (
        "fpir",
        card["items"],
    )
    accepted = found["distances"].numpy() <= np.float32(card["calibration"]["threshold"])
    assert found["accepted"].numpy().tolist() == accepted.tolist()


def test_a_retriever_is_built_as_the_flags_say(tmp_path, monkeypatch):
    commands.write_noise(tmp_path / "photos", "ab", 2)
    built, exported = [], []

    def build(embedder, images, out, **options):
        built.append((embedder, images, out, options))
        return types.SimpleNamespace(card={"items": 4, "classes": 2}, path=tmp_path / "out" / "1")

    def export_run(run, folder, options, **changes):
        exported.append((run, options.calibrate, options.formats, changes["truncate_dim"]))
        return pathlib.Path(folder, "1")

    monkeypatch.setattr(retriever.Retriever, "build", build)
    monkeypatch.setattr(exporter, "export_run", export_run)
    monkeypatch.setattr("tfdml.cli.export.check_ended", lambda *arguments: None)
    flags = [f"--gallery={tmp_path / 'photos'}", f"--out={tmp_path / 'out'}"]
    said = commands.printed("export", *flags, "--embedder=model.tflite", "--calibrate=none")
    embedder, (images,), out, options = built.pop()
    assert (embedder, len(images), out) == ("model.tflite", 4, str(tmp_path / "out"))
    assert options["directory"] == str(tmp_path / "photos")
    assert (options["calibration"], options["per_class"], options["skip_bad"]) == (
        "none",
        "nearest",
        False,
    )
    assert said == f"4 items of 2 classes\nversion: {tmp_path / 'out' / '1'}\n"
    flags[:1] = ["--gallery=made", *DATA, "--gallery_bad_images=skip", "--per_class=mean"]
    said = commands.printed(
        "export", *flags, "--run_dir=run", "--calibrate=fpir=0.02", "--truncate_dim=8"
    )
    embedder, images, _, options = built.pop()
    # The threshold is that of the retriever, not of the embedder in it.
    assert exported == [("run", "none", ("saved_model",), 8)]
    assert embedder.name == "1"
    assert [part.split for part in images] == ["test"]
    assert (options["calibration"], options["skip_bad"]) == ("fpir=0.02", True)
    assert said.startswith("4 items of 2 classes, by per_class=mean\n")
    for wrong, says in (
        ([], "needs the embedder: --run_dir or --embedder, one of the two"),
        (["--run_dir=run", "--embedder=model.tflite"], "one of the two"),
        (["--run_dir=run", "--formats=litert"], "leave --formats alone"),
        (["--run_dir=run", "--calibrate=far=0.1"], "fpir"),
    ):
        status, _, errors = commands.run("export", *flags, *wrong)
        assert (status, says in errors) == (2, True), errors
    assert not built


HORDE = "--objectives=contrastive + horde(loss=contrastive, orders=3, dim=32)"


@pytest.mark.slow
def test_moments_are_written_measured_and_evaluated_alike(tiny_flags, tmp_path):
    run = tmp_path / "run"
    commands.printed("train", *tiny_flags, HORDE, "--moment_embedder", f"--run_dir={run}")
    result = json.loads((run / "result.json").read_text())
    expected, orders = result["metrics_moments"], result["metrics_orders"]
    assert list(orders) == ["1", "2", "3", "all"]
    assert orders["1"]["recall@1"] == result["metrics"]["recall@1"]
    flags = [flag for flag in tiny_flags if "dataset" in flag]
    out = tmp_path / "metrics.json"
    commands.printed("evaluate", f"--model={run / 'moments.keras'}", *flags, f"--json={out}")
    assert json.loads(out.read_text())["recall@1"] == pytest.approx(expected["recall@1"])
    models = tmp_path / "models"
    commands.printed("export", f"--run_dir={run}", "--moment_embedder", f"--out={models}")
    card = json.loads((models / "1" / "model_card.json").read_text())
    assert card["artifacts"]["saved_model"]["acceptance"]["recall@1"] == pytest.approx(
        expected["recall@1"], abs=0.02
    )


def test_the_files_that_serve_a_model_are_written_without_one(tmp_path):
    folder = tmp_path / "export"
    status, output, errors = commands.run("export", f"--examples={folder}")
    assert status == 0, errors
    for name in ("client.py", "models.config", "batching.config", "ray_serve.py"):
        assert (folder / name).read_bytes() == (commands.ROOT / "export" / name).read_bytes()
        assert str(folder / name) in output
    status, _, errors = commands.run("export", f"--examples={folder}")
    assert (status, "has batching.config already" in errors) == (2, True)
    status, _, errors = commands.run("export", f"--examples={folder}", "--out=models")
    assert (status, "stands alone" in errors) == (2, True)
    status, _, errors = commands.run("export", "--run_dir=run")
    assert (status, "--out: is missing" in errors) == (2, True), errors
