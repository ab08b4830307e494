"""A version holds what was asked for, a card that describes it, and requests that warm a server
up."""

import dataclasses
import hashlib
import importlib.util
import json

import numpy as np
import pytest
import tensorflow as tf

from tests.export.networks import small_dataset, small_embedder
from tfdml.data import EvaluationTransform, ImageDataset
from tfdml.embeddings.model_card import CARD, fingerprint
from tfdml.errors import UserError
from tfdml.evaluation import calibrate
from tfdml.export import ExportOptions, export_model, export_saved_model, exporter
from tfdml.export.exporter import (
    Tolerance,
    _calibration,
    _moved_calibration,
    compare_vectors,
    evaluation_views,
    faults_of,
    trained_classes,
    whole_classes,
)
from tfdml.export.saved_model import WARM_UP
from tfdml.models import Head

FORMATS = ("saved_model", "litert_float32", "litert_int8")


@pytest.fixture(scope="module")
def embedder():
    return small_embedder(resize_mode="squash")


@pytest.fixture(scope="module")
def version(embedder, tmp_path_factory):
    versions = tmp_path_factory.mktemp("models") / "small"
    (versions / "4").mkdir(parents=True)
    (versions / "4" / "kept").write_text("as it was")
    options = ExportOptions(
        formats=FORMATS, max_pixels=250_000, min_cosine=0.9, calibrate="far=0.05"
    )
    about = {"metrics": {"recall@1": 0.5}, "flags": {"epochs": "3"}}
    return export_model(
        embedder, versions, small_dataset("test"), small_dataset("train"), options, about
    )


def test_the_version_is_the_next_and_its_card_describes_its_files(version, embedder):
    assert version.name == "5"
    assert (version.parent / "4" / "kept").read_text() == "as it was"
    assert sorted(entry.name for entry in version.parent.iterdir()) == ["4", "5"]
    files = {
        entry.relative_to(version).as_posix() for entry in version.rglob("*") if entry.is_file()
    }
    assert {
        "saved_model.pb",
        "litert/float32.tflite",
        "litert/int8.tflite",
        CARD,
        WARM_UP.as_posix(),
    } <= files
    card = json.loads((version / CARD).read_text())
    assert card["fingerprint"] == fingerprint(embedder)
    assert EvaluationTransform(**card["view"]) == EvaluationTransform(40, 32, "squash")
    assert (card["embedding_dim"], card["max_pixels"]) == (8, 250_000)
    assert (card["metrics"], card["flags"]) == ({"recall@1": 0.5}, {"epochs": "3"})
    assert card["trained_on"] == sorted(small_dataset("train").class_names.values())
    assert set(card["artifacts"]) == set(FORMATS)
    for artifact in card["artifacts"].values():
        for name, described in artifact["files"].items():
            data = (version / name).read_bytes()
            assert described == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        measured = artifact["acceptance"]
        assert measured["images"] == 24
        assert (
            artifact["tolerance"]["min_cosine"]
            == 0.9
            <= measured["min_cosine"]
            <= measured["mean_cosine"]
        )
    assert card["artifacts"]["saved_model"]["acceptance"]["max_difference"] < 1e-5


def test_the_card_holds_a_threshold_of_each_format_where_its_vectors_show_one(version, embedder):
    card, test = json.loads((version / CARD).read_text()), small_dataset("test")
    own = np.asarray(embedder(evaluation_views(embedder, test)))
    expected = calibrate(own, test.labels, far=0.05, distance="euclidean")
    stored = card["calibration"]
    assert stored["threshold"] == pytest.approx(expected.threshold, abs=1e-5)
    assert (stored["basis"]["gallery"], stored["basis"]["model"]) == (
        "small, test",
        card["fingerprint"],
    )
    exact = card["artifacts"]["litert_float32"]["calibration"]
    assert exact["threshold"] == stored["threshold"]
    # 24 images of 6 classes are too few to show by how much quantization moves it.
    assert card["artifacts"]["litert_int8"]["calibration"] is None


def test_a_file_has_the_threshold_that_its_vectors_move_or_none():
    """Also of images of trained classes: no rate is measured on these."""
    rng, lines = np.random.default_rng(2), []
    labels = np.arange(400) // 20
    vectors = rng.normal(size=(20, 8))[labels] + 0.8 * rng.normal(size=(400, 8))
    dataset = ImageDataset("made", "train", labels=labels, vectors=vectors.astype("float32"))
    other = vectors + 0.3 * rng.normal(size=vectors.shape)
    elsewhere = rng.normal(size=(30, 8))[np.arange(600) // 20] + 0.8 * rng.normal(size=(600, 8))
    calibration = calibrate(elsewhere, np.arange(600) // 20, far=0.02)
    moved = _moved_calibration(calibration, "int8", (vectors, other), dataset, lines.append)
    assert moved.rates == calibration.rates
    assert moved.basis == calibration.basis
    assert moved.moved.low < moved.threshold < moved.moved.high
    assert moved.threshold > calibration.threshold
    assert "moved to the vectors of a file" in lines[0]
    few = dataset.select_classes(dataset.classes[:6]), slice(0, 120)
    pairs = vectors[few[1]], other[few[1]]
    assert _moved_calibration(calibration, "int8", pairs, few[0], lines.append) is None
    assert lines[1].startswith("int8: no threshold: ")


def test_a_threshold_is_measured_read_from_a_file_or_refused(tmp_path):
    test, file = small_dataset("test"), tmp_path / "threshold.json"
    vectors = np.random.default_rng(0).normal(size=(len(test), 3)).astype("float32")
    near = calibrate(vectors, test.labels, far=0.05, distance="euclidean")
    cosine = calibrate(vectors, test.labels, far=0.05, distance="cosine").to_dict()
    lines = []

    def choose(option, content=None, trained=()):
        file.write_text(json.dumps(content))
        return _calibration(option, vectors, test, trained, "sha256:a", lines.append)

    measured = choose("far=0.05")
    assert measured.to_dict() == near.measured_on(gallery="small, test", model="sha256:a").to_dict()
    calibration = choose(str(file), {"calibration": near.measured_on(model="b").to_dict()})
    assert calibration.threshold == near.threshold
    assert "of another model" in lines[-1]
    trained = trained_classes(test, dataclasses.replace(test, split="train"))
    assert trained == sorted(test.class_names.values())
    assert trained_classes(test, small_dataset("train")) == trained_classes(test, None) == []
    assert choose("none") is choose("auto", trained=trained) is None
    assert "were trained on" in lines[-1]
    for option, content, message in (
        ("far=0.001", None, "cannot show the threshold"),
        (str(file), {"recall@1": 0.5}, "has no threshold"),
        (str(file), {"calibration": cosine}, "cosine"),
    ):
        with pytest.raises(UserError, match=message):
            choose(option, content)


def test_what_cannot_be_exported_is_refused_and_leaves_no_version(embedder, tmp_path, monkeypatch):
    test = small_dataset("test")
    for options, message in (
        (ExportOptions(max_pixels=1), "max_pixels"),
        (ExportOptions(formats=["litert_int8"]), "training images"),
    ):
        with pytest.raises(UserError, match=message):
            export_model(embedder, tmp_path / "out", test, options=options)
    assert not list(tmp_path.rglob("*.*"))
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    for export in (
        lambda: export_model(None, tmp_path, test),
        lambda: export_saved_model(None, tmp_path),
    ):
        with pytest.raises(UserError, match="KERAS_BACKEND"):
            export()


def test_a_head_is_exported_with_vectors_as_its_input(tmp_path):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(24, 6)).astype(np.float32)
    dataset = ImageDataset(vectors=vectors, labels=np.arange(24) // 4)
    head = Head(6, embedding_dim=4)
    head.build((None, 6))
    formats = [
        "saved_model",
        "litert_float32",
        *(["onnx"] if importlib.util.find_spec("tf2onnx") else []),
    ]
    version = export_model(head, tmp_path / "head", dataset, options=ExportOptions(formats=formats))
    card = json.loads((version / CARD).read_text())
    assert (card["view"], card["signatures"]) == ({"dimension": 6}, ["serving_default"])
    assert all(
        artifact["acceptance"]["max_difference"] < 1e-5 for artifact in card["artifacts"].values()
    )
    served = tf.saved_model.load(str(version)).signatures["serving_default"]
    projected = vectors.astype(float) @ np.array(head.dense.kernel) + np.array(head.dense.bias)
    expected = projected / np.linalg.norm(projected, axis=1, keepdims=True)
    np.testing.assert_allclose(
        served(vectors=tf.constant(vectors))["embedding"], expected, atol=1e-6
    )
    assert served(vectors=tf.zeros((0, 6)))["embedding"].shape == (0, 4)


def test_faults():
    fine = {
        "images": 400,
        "min_cosine": 0.99,
        "max_difference": 0.01,
        "max_length_error": 1e-6,
        "recall@1_drop": 0.005,
    }
    for changes, names in (
        ({}, []),
        ({"min_cosine": 0.9799}, ["min_cosine"]),
        ({"min_cosine": float("nan")}, ["min_cosine"]),
        ({"max_length_error": 2e-3}, ["max_length_error"]),
        ({"max_difference": 0.2}, ["max_difference"]),
        ({"recall@1_drop": 0.0125}, []),  # a point, and the one query of 400 that is forgiven
        ({"recall@1_drop": 0.0126}, ["recall@1_drop"]),
        ({"recall@1_drop": None}, []),
    ):
        faults = faults_of(
            {**fine, **changes},
            Tolerance(min_cosine=0.98, max_recall_drop=0.01, max_difference=0.1),
        )
        assert [fault.split()[0] for fault in faults] == names


def test_measures_are_those_of_a_loop_over_the_images():
    dataset, rng = small_dataset("test"), np.random.default_rng(0)
    ours, theirs = (
        x / np.linalg.norm(x, axis=1, keepdims=True) for x in rng.normal(size=(2, len(dataset), 8))
    )
    measures = compare_vectors(ours, theirs, dataset)
    cosines, hits = [], []
    for i in range(len(ours)):
        cosines.append(sum(float(a) * float(b) for a, b in zip(ours[i], theirs[i], strict=True)))
        distances = [
            np.inf if j == i else ((theirs[i] - theirs[j]) ** 2).sum() for j in range(len(ours))
        ]
        hits.append(dataset.labels[int(np.argmin(distances))] == dataset.labels[i])
    assert measures["images"] == len(dataset)
    assert measures["min_cosine"] == pytest.approx(min(cosines), abs=1e-6)
    assert measures["mean_cosine"] == pytest.approx(np.mean(cosines), abs=1e-6)
    assert measures["max_difference"] == pytest.approx(np.abs(ours - theirs).max(), abs=1e-5)
    assert measures["recall@1"] == pytest.approx(np.mean(hits))
    assert measures["max_length_error"] < 1e-5


def test_vectors_of_zeros_not_numbers_or_another_size():
    dataset = small_dataset("test", classes=2, per_class=1)
    ours = np.array([[0.0, 0.0], [1.0, 0.0]], np.float32)
    same = compare_vectors(ours, ours, dataset)
    assert (same["min_cosine"], same["max_length_error"], same["recall@1"]) == (1.0, 0.0, None)
    assert not faults_of(same, Tolerance(1 - 1e-6, 0.0, 1e-5))
    for vectors in (np.zeros((2, 2), np.float32), np.full((2, 2), np.nan, np.float32)):
        assert faults_of(compare_vectors(ours, vectors, dataset), Tolerance(0.5, 1.0))
    with pytest.raises(UserError, match=r"the export gives \(2, 1\), the embedder \(2, 2\)"):
        compare_vectors(ours, ours[:, :1], dataset)


@pytest.mark.slow
def test_a_format_that_differs_stops_the_whole_export(tmp_path, monkeypatch):
    real, other = exporter.convert_litert, small_embedder(1)
    converted = real(other)
    monkeypatch.setattr(exporter, "convert_litert", lambda *_: converted)
    models, test, options = (
        tmp_path / "models",
        small_dataset("test"),
        ExportOptions(formats=["litert_float16"]),
    )
    with pytest.raises(UserError, match="litert_float16: min_cosine"):
        export_model(small_embedder(), models, test, options=options)
    assert not list(models.iterdir())
    # Knowingly accepted.
    knowing = dataclasses.replace(options, min_cosine=-1.0, max_recall_drop=1.0)
    version = export_model(small_embedder(), models, test, options=knowing)
    assert version == models / "1"
    # By default there is a threshold only where the images can show it.
    assert json.loads((version / CARD).read_text())["calibration"] is None


def test_options_out_of_range_are_named():
    for name, value in (
        ("formats", ["onnxx"]),
        ("min_cosine", float("nan")),
        ("calibrate", "far=2"),
    ):
        with pytest.raises(UserError, match=f"^{name}"):
            ExportOptions(**{name: value})
    assert ExportOptions(["onnx", "litert_int8", "litert_int8"]).formats == ("litert_int8", "onnx")
    assert len(ExportOptions(["all"]).formats) == 6


def test_whole_classes_are_taken_evenly():
    dataset = small_dataset("test", classes=10, per_class=3)
    chosen = whole_classes(dataset, 9)
    assert chosen.classes.tolist() == [100, 104, 109]
    assert len(chosen) == 9
    assert len(whole_classes(dataset, 1)) == 6  # at least two classes
    assert whole_classes(dataset, 0) is dataset
    assert whole_classes(dataset, 30) is dataset
