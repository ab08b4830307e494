"""Which file of an export stands in for its SavedModel on a CPU."""

import json

import pytest

from tfdml.embeddings.backends import quickest_on_cpu


def export(folder, version="1", **acceptance):
    """A version whose card states an acceptance for each format; the files are empty."""
    place = folder / version
    (place / "litert").mkdir(parents=True)
    (place / "saved_model.pb").write_bytes(b"")
    for name in acceptance:
        (place / "litert" / f"{name}.tflite").write_bytes(b"")
    card = {"artefacts": {f"litert_{name}": {"acceptance": each} for name, each in acceptance.items()}}
    (place / "model_card.json").write_text(json.dumps(card))
    return folder


EXACT = {"min_cosine": 1.0, "recall@1_drop": 0.0}
CLOSE = {"min_cosine": 0.9995, "recall@1_drop": 0.0005}


@pytest.mark.parametrize(
    ("acceptance", "taken"),
    [
        ({"float32": EXACT}, "litert/float32.tflite"),
        ({"float32": EXACT, "float16": CLOSE}, "litert/float16.tflite"),
        ({"float32": EXACT, "float16": CLOSE, "int8": {**CLOSE, "min_cosine": 0.89}}, "litert/float16.tflite"),
        ({"float32": EXACT, "float16": {**CLOSE, "recall@1_drop": 0.002}}, "litert/float32.tflite"),
        ({"float16": {"min_cosine": 0.9995, "recall@1_drop": None}}, "litert/float16.tflite"),
        ({"float16": {"min_cosine": None}}, None),
        ({"dynamic_range": EXACT}, None),
        ({}, None),
    ],
)
def test_the_quickest_whose_vectors_are_the_same(acceptance, taken, tmp_path):
    pytest.importorskip("ai_edge_litert", reason="pip install 'tfdml[litert]'")
    folder = export(tmp_path / "models", **acceptance)
    expected = folder if taken is None else folder / "1" / taken
    assert quickest_on_cpu(folder) == expected
    assert quickest_on_cpu(folder / "1") == (folder / "1" if taken is None else expected)


def test_of_the_newest_version_and_of_nothing_else(tmp_path):
    pytest.importorskip("ai_edge_litert", reason="pip install 'tfdml[litert]'")
    folder = export(tmp_path / "models", float32=EXACT)
    export(folder, "12")
    assert quickest_on_cpu(folder) == folder
    file = folder / "1" / "litert" / "float32.tflite"
    assert quickest_on_cpu(file) == file
    (folder / "1" / "model_card.json").unlink()
    assert quickest_on_cpu(folder / "1") == folder / "1"
    assert quickest_on_cpu(tmp_path / "run") == tmp_path / "run"
