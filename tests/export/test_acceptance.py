"""An exported file that does not give the embedder's vectors is refused, with figures."""

import dataclasses
import json

import keras
import numpy as np
import pytest

from tests.export.networks import small_dataset, small_embedder
from tfdml.data import ImageDataset
from tfdml.errors import UserError
from tfdml.export import convert_litert, exporter
from tfdml.export.acceptance import Comparison, ExportVerifier, Tolerance
from tfdml.export.exporter import ExportOptions, export_model, whole_classes

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
    assert lines[0].startswith("no threshold for 'the same': the images cannot show the threshold: far=0.001 needs")
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
        ({"calibrate": "far=2"}, "`calibrate=far=2`: write far= or precision= and a number from 0 to 1"),
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
