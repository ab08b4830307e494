"""A version holds what was asked for, a card that describes it, and requests that warm a server up."""

import dataclasses
import hashlib
import importlib.util
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.export.networks import small_dataset, small_embedder
from tfdml.data import EvaluationTransform, ImageDataset, VectorImages
from tfdml.embeddings import load_backend
from tfdml.embeddings.backends import encoded_image
from tfdml.embeddings.model_card import CARD, fingerprint
from tfdml.errors import UserError
from tfdml.evaluation import Calibration, calibrate
from tfdml.export import Retriever, export_saved_model, exporter
from tfdml.export.conversion import convert_litert
from tfdml.export.exporter import (
    Comparison,
    ExportOptions,
    ExportVerifier,
    Tolerance,
    check_whitening,
    evaluation_views,
    export_model,
    load_run,
    whole_classes,
)
from tfdml.export.saved_model import WARM_UP, prediction_log, read_warm_up
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
    options = ExportOptions(formats=FORMATS, max_pixels=250_000, min_cosine=0.9, calibrate="far=0.05")
    about = {"metrics": {"recall@1": 0.5}, "flags": {"epochs": "3"}}
    return export_model(embedder, versions, small_dataset("test"), small_dataset("train"), options, about)


@pytest.mark.slow
def test_the_version_is_the_next_and_whole(version):
    assert version.name == "5"
    assert (version.parent / "4" / "kept").read_text() == "as it was"
    assert sorted(entry.name for entry in version.parent.iterdir()) == ["4", "5"]
    files = {entry.relative_to(version).as_posix() for entry in version.rglob("*") if entry.is_file()}
    expected = {"saved_model.pb", "litert/float32.tflite", "litert/int8.tflite", "model_card.json", WARM_UP.as_posix()}
    assert expected <= files


@pytest.mark.slow
def test_the_card_describes_what_lies_there(version, embedder):
    card = json.loads((version / "model_card.json").read_text())
    assert card["fingerprint"] == fingerprint(embedder)
    assert EvaluationTransform(**card["view"]) == EvaluationTransform(40, 32, "squash")
    assert card["embedding_dim"] == 8
    assert card["max_pixels"] == 250_000
    assert card["metrics"] == {"recall@1": 0.5}
    assert card["flags"] == {"epochs": "3"}
    assert card["model"] == {"class": "Embedder", "name": embedder.name, "parameters": embedder.count_params()}
    assert card["versions"]["tensorflow"] == tf.__version__
    assert "check both" in card["license"]
    assert set(card["artifacts"]) == set(FORMATS)
    for artifact in card["artifacts"].values():
        total = 0
        for name, described in artifact["files"].items():
            data = (version / name).read_bytes()
            assert described == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            total += len(data)
        assert artifact["bytes"] == total
        measured = artifact["acceptance"]
        assert measured["images"] == 24
        assert (
            artifact["tolerance"]["min_cosine"] == 0.9 <= measured["min_cosine"] <= measured["mean_cosine"] <= 1.00001
        )
        assert measured["recall@1_drop"] == pytest.approx(measured["recall@1_keras"] - measured["recall@1"])
    assert card["artifacts"]["saved_model"]["acceptance"]["max_difference"] < 1e-5


@pytest.mark.slow
def test_the_card_holds_the_threshold_of_each_format(version, embedder):
    """Equal to `calibrate` on the vectors that each file gives here."""
    card, test = json.loads((version / "model_card.json").read_text()), small_dataset("test")
    assert card["calibrated_on"] == {"dataset": "small", "split": "test", "classes": list(range(100, 106))}
    assert "same" in card["signatures"]
    views = evaluation_views(embedder, test)
    vectors = {"": np.asarray(embedder(views))}
    for name in ("float32", "int8"):
        runner = load_backend(version / "litert" / f"{name}.tflite")
        vectors[f"litert_{name}"] = runner.embed(test, 32)
    thresholds = set()
    for name, found in vectors.items():
        stored = card["artifacts"][name]["calibration"] if name else card["calibration"]
        expected = calibrate(found, test.labels, far=0.05, distance="euclidean")
        assert stored["threshold"] == pytest.approx(expected.threshold, abs=1e-5)
        assert stored["rates"]["far"] == pytest.approx(expected.rates["far"], abs=1e-5)
        assert (stored["kind"], stored["rate"]) == ("far", 0.05)
        thresholds.add(round(stored["threshold"], 4))
    assert len(thresholds) == 2  # quantization moves distances
    assert "calibration" not in card["artifacts"]["saved_model"]
    served = tf.saved_model.load(str(version)).signatures["same"]
    encoded = [encoded_image(test.images, row) for row in (0, 1, 20)]
    found = served(image_bytes=tf.constant(encoded), other_image_bytes=tf.constant(encoded[::-1]))
    calibration = Calibration.from_dict(card["calibration"])
    np.testing.assert_array_equal(found["same"], calibration.same(found["distances"]))
    # A retriever of the version has one of its own, for searches: these images are too few for one.
    assert card["trained_on"] == sorted(small_dataset("train").class_names.values())
    assert Retriever.build(version, test, version.parent.parent / "retriever").calibration is None


@pytest.mark.slow
def test_a_threshold_that_cannot_be_had(embedder, tmp_path):
    test = small_dataset("test")
    trained_on = dataclasses.replace(test, split="train")
    file = tmp_path / "threshold.json"
    calibration = calibrate(np.eye(4)[[0, 0, 1, 1]], [0, 0, 1, 1], precision=0.5, distance="cosine")
    for wanted, train, content, says in (
        ("far=0.001", None, {}, "the images cannot show the threshold: far=0.001 needs at least 1,000 pairs"),
        ("far=0.05", trained_on, {}, "6 classes of these images were trained on, such as 100"),
        (str(file), None, {"auc": 1.0}, "has no threshold of held-out classes: write one with tfdml evaluate"),
        (str(file), None, {"split": "train", "calibration": {}}, "has no threshold of held-out classes"),
        (str(file), None, {"calibration": calibration.to_dict()}, "its distance is 'cosine', not 'euclidean'"),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match=says):
            export_model(
                embedder, tmp_path / "models", test, train, ExportOptions(["litert_float32"], calibrate=wanted)
            )
    assert not (tmp_path / "models").exists()


@pytest.mark.slow
def test_a_threshold_from_a_file(embedder, tmp_path):
    file = tmp_path / "threshold.json"
    rng = np.random.default_rng(0)
    calibration = calibrate(rng.normal(size=(40, 3)), np.arange(40) // 4, far=0.01, distance="euclidean")
    about = {"model": "runs/x", "dataset": "sop", "split": "test"}
    file.write_text(json.dumps({**about, "calibration": calibration.to_dict()}))
    options = ExportOptions(formats=["litert_float32"], calibrate=str(file))
    version = export_model(embedder, tmp_path / "models", small_dataset("test"), options=options)
    card = json.loads((version / CARD).read_text())
    assert card["calibration"] == json.loads(json.dumps(calibration.to_dict()))
    assert card["calibrated_on"] == about
    # What a format loses is in its own threshold: the target of the file, on the images of the comparison.
    assert card["artifacts"]["litert_float32"]["calibration"]["kind"] == "far"


@pytest.mark.slow
def test_warm_up_requests_are_what_servers_read_and_the_model_answers(version):
    logs = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    served = tf.saved_model.load(str(version))
    seen, read = [], read_warm_up(version)
    for record in tf.data.TFRecordDataset(str(version / WARM_UP)):
        log = logs.PredictionLog.FromString(record.numpy())
        assert log.WhichOneof("log_type") == "predict_log"
        request = log.predict_log.request
        signature = request.model_spec.signature_name
        inputs = {name: tf.constant(tf.make_ndarray(tensor)) for name, tensor in request.inputs.items()}
        name, arrays = next(read)
        assert (name, set(arrays)) == (signature, set(inputs))
        assert all((arrays[key] == value.numpy()).all() for key, value in inputs.items())
        if signature == "same":
            np.testing.assert_allclose(served.signatures[signature](**inputs)["distances"], 0, atol=1e-5)
            continue
        vectors = served.signatures[signature](**inputs)["embedding"].numpy()
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
        seen.append((signature, len(vectors)))
    assert next(read, None) is None
    names = ("serving_default", "embed_images", "embed_each")
    assert sorted(seen) == sorted((name, size) for name in names for size in (1, 8, 32))


@pytest.mark.slow
def test_a_prediction_log_has_the_bytes_that_protocol_buffers_give_it():
    # PredictionLog{predict_log{request{model_spec{signature_name: "s"} inputs{"x": [b"ab"]}}}}, by the real classes.
    assert prediction_log("s", x=[b"ab"]).hex() == "321a0a180a031a017312110a0178120c080712041202080142026162"
    logs = pytest.importorskip("tensorflow_serving.apis.prediction_log_pb2")
    log = logs.PredictionLog()
    log.predict_log.request.model_spec.signature_name = "s"
    long = [b"ab" * 100]
    log.predict_log.request.inputs["x"].CopyFrom(tf.make_tensor_proto(long))
    assert prediction_log("s", x=long) == log.SerializeToString(deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "says"),
    [(1, "`max_pixels=1`: images are resized to 40 x 40"), (1700, "60 x 40 pixels, more than the limit of 1700")],
)
def test_a_pixel_limit_that_the_images_exceed_is_refused_before_anything_is_written(embedder, limit, says, tmp_path):
    with pytest.raises(UserError, match=says):
        export_model(embedder, tmp_path / "out", small_dataset("test"), options=ExportOptions(max_pixels=limit))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_int8_needs_training_images(embedder, tmp_path):
    with pytest.raises(UserError, match="training images"):
        export_model(embedder, tmp_path, small_dataset("test"), options=ExportOptions(formats=["litert_int8"]))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_another_backend_is_told_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("keras.backend.backend", lambda: "jax")
    for export in (export_model, export_saved_model):
        with pytest.raises(UserError, match=r"KERAS_BACKEND is jax: save the embedder .* KERAS_BACKEND=tensorflow"):
            export(*(None, tmp_path / "models", None)[: 3 if export is export_model else 2])
    assert not list(tmp_path.iterdir())


def test_a_data_dir_that_does_not_exist_is_refused_also_where_the_data_set_needs_none(tmp_path):
    with pytest.raises(UserError, match=r"`data_dir=.*moved`: there is no such folder"):
        load_run(tmp_path, data_dir=str(tmp_path / "moved"))


@pytest.mark.slow
def test_a_head_is_exported_with_vectors_as_its_input(tmp_path):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(24, 6)).astype(np.float32)
    dataset = ImageDataset(images=VectorImages(vectors), labels=np.arange(24) // 4)
    head = Head(6, embedding_dim=4)
    head.build((None, 6))
    formats = ["saved_model", "litert_float32", *(["onnx"] if importlib.util.find_spec("tf2onnx") else [])]
    version = export_model(head, tmp_path / "head", dataset, options=ExportOptions(formats=formats))
    card = json.loads((version / CARD).read_text())
    assert (card["view"], card["signatures"]) == ({"dimension": 6}, ["serving_default"])
    assert all(made["acceptance"]["max_difference"] < 1e-5 for made in card["artifacts"].values())
    served = tf.saved_model.load(str(version)).signatures["serving_default"]
    projected = vectors.astype(float) @ np.array(head.dense.kernel) + np.array(head.dense.bias)
    expected = projected / np.linalg.norm(projected, axis=1, keepdims=True)
    np.testing.assert_allclose(served(vectors=tf.constant(vectors))["embedding"], expected, atol=1e-6)
    assert served(vectors=tf.zeros((0, 6)))["embedding"].shape == (0, 4)
    with pytest.raises(UserError, match="int8 takes no moments, whitening, head"):
        convert_litert(head, "int8", vectors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 1}, "`whitening` has no argument 'alpha'; it has dim, power, shrinkage"),
        ({"dim": 2.5}, "`whitening`: dim must be an integer of at least 0"),
        ({"dim": 4, "power": 1.5}, "`whitening`: power must be at least 0 and at most 1"),
        ({"shrinkage": "much"}, "`whitening`: shrinkage must be a number"),
    ],
)
def test_arguments_of_a_whitening_are_checked(arguments, message):
    check_whitening({"dim": 0, "power": 0.5, "shrinkage": 1})
    with pytest.raises(UserError, match=message):
        check_whitening(arguments)


FINE = Comparison(
    images=400,
    min_cosine=0.99,
    mean_cosine=0.999,
    max_difference=0.01,
    max_length_error=1e-6,
    recall_at_1_keras=0.5,
    recall_at_1=0.495,
)
TOLERANCE = Tolerance(min_cosine=0.98, max_recall_drop=0.01)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"min_cosine": 0.9799}, ["smallest cosine is 0.979900 < 0.980000"]),
        ({"min_cosine": float("nan")}, ["smallest cosine"]),
        ({"max_length_error": 2e-3}, ["length is off"]),
        ({"recall_at_1": 0.4875}, []),  # a point, and the one query of 400 that is forgiven
        ({"recall_at_1": 0.4874}, ["Recall@1 falls from 50.0 to 48.7 %"]),
        ({"recall_at_1": float("nan")}, ["Recall@1"]),
        ({"recall_at_1": 0.6}, []),
        ({"recall_at_1": None, "recall_at_1_keras": None}, []),
        ({"min_cosine": 0.1, "recall_at_1": 0.1}, ["smallest cosine", "Recall@1"]),
    ],
)
def test_faults(changes, says):
    faults = dataclasses.replace(FINE, **changes).faults(TOLERANCE)
    assert len(faults) == len(says)
    for fault, words in zip(faults, says, strict=True):
        assert words in fault


def test_differences_count_only_where_they_have_a_bound():
    assert not FINE.faults(dataclasses.replace(TOLERANCE, max_difference=0.01))
    assert "a component differs" in FINE.faults(dataclasses.replace(TOLERANCE, max_difference=0.0099))[0]


@pytest.mark.slow
def test_figures_are_those_of_a_loop_over_the_images(tmp_path):
    embedder, other = small_embedder(), small_embedder(1)
    dataset = small_dataset("test")
    path = tmp_path / "other.tflite"
    path.write_bytes(convert_litert(other))
    examiner = ExportVerifier(embedder, dataset)
    found = examiner.compare(examiner.exported_vectors("litert_float32", path))
    ours, theirs = (
        keras.ops.convert_to_numpy(model(examiner._views)).astype(np.float64) for model in (embedder, other)
    )
    cosines, hits = [], []
    for i in range(len(ours)):
        cosines.append(sum(a * b for a, b in zip(ours[i], theirs[i], strict=True)))
        distances = [np.inf if j == i else ((theirs[i] - theirs[j]) ** 2).sum() for j in range(len(ours))]
        hits.append(dataset.labels[int(np.argmin(distances))] == dataset.labels[i])
    assert found.images == len(dataset)
    assert found.min_cosine == pytest.approx(min(cosines), abs=1e-6)
    assert found.mean_cosine == pytest.approx(np.mean(cosines), abs=1e-6)
    assert found.max_difference == pytest.approx(np.abs(ours - theirs).max(), abs=1e-5)
    assert found.recall_at_1 == pytest.approx(np.mean(hits))
    assert found.max_length_error < 1e-5
    path.write_bytes(b"no model")
    with pytest.raises(UserError, match="fresh process"):
        examiner.exported_vectors("litert_float32", path)


@pytest.mark.slow
def test_a_format_that_differs_stops_the_whole_export(tmp_path, monkeypatch):
    embedder, other = small_embedder(), small_embedder(1)
    real = exporter.convert_litert

    def convert(model, precision, representative):
        return real(other if precision == "float16" else model, precision, representative)

    monkeypatch.setattr(exporter, "convert_litert", convert)
    lines = []
    options = ExportOptions(formats=["litert_float32", "litert_float16"])
    with pytest.raises(UserError, match=r"no version is written: litert_float16: the smallest cosine is .* < 0.995"):
        export_model(embedder, tmp_path / "models", small_dataset("test"), options=options, report=lines.append)
    assert not list(tmp_path.iterdir())
    assert [line.endswith("REFUSED") for line in lines] == [False, False, True]
    # By default there is a threshold only where the images can show it.
    assert lines[0].startswith("no threshold: the images cannot show the threshold: far=0.001 needs")
    # Knowingly accepted.
    knowing = dataclasses.replace(options, min_cosine=-1.0, max_recall_drop=1.0)
    version = export_model(embedder, tmp_path / "models", small_dataset("test"), options=knowing, report=lines.append)
    assert version == tmp_path / "models" / "1"
    assert json.loads((version / "model_card.json").read_text())["calibration"] is None


def test_options_out_of_range_are_named():
    for changes, says in (
        ({"formats": ["onnxx"]}, "`formats=onnxx`"),
        ({"formats": []}, "`formats`"),
        ({"images": -1}, "`images=-1`"),
        ({"min_cosine": 1.5}, "`min_cosine=1.5`"),
        ({"min_cosine": float("nan")}, "`min_cosine=nan`"),
        ({"max_recall_drop": -0.1}, "`max_recall_drop=-0.1`"),
        ({"max_pixels": 0}, "`max_pixels=0`"),
        ({"representative_images": 0}, "`representative_images=0`"),
        ({"calibrate": "far=2"}, "`calibrate=far=2`: write fpir= or far= or precision= and a number from 0 to 1"),
        ({"calibrate": "precision=high"}, "`calibrate=precision=high`"),
    ):
        with pytest.raises(UserError, match=says):
            ExportOptions(**changes)


def test_whole_classes_are_taken_evenly():
    dataset = small_dataset("test", classes=10, per_class=3)
    chosen = whole_classes(dataset, 9)
    assert chosen.classes.tolist() == [100, 104, 109]
    assert len(chosen) == 9
    assert len(whole_classes(dataset, 1)) == 6  # at least two classes
    assert whole_classes(dataset, 0) is dataset
    assert whole_classes(dataset, 30) is dataset


def test_classes_of_one_image_are_judged_by_cosines_alone(tmp_path):
    embedder, dataset = small_embedder(), small_dataset("test", classes=3, per_class=1)
    assert isinstance(dataset, ImageDataset)
    path = tmp_path / "same.tflite"
    path.write_bytes(convert_litert(embedder))
    verifier = ExportVerifier(embedder, dataset)
    found = verifier.compare(verifier.exported_vectors("litert_float32", path))
    assert found.recall_at_1 is None
    assert not found.faults(Tolerance(1 - 1e-6, 0.0, 1e-5))
