"""Model cards: damaged files and impossible views are refused, and files are compared with their checksums."""

import json
import shutil

import pytest

from tests.export import models_on_disk
from tfdml.embeddings.backends import load_backend
from tfdml.embeddings.model_card import compare_with_card, describe_files, view_of_card
from tfdml.errors import UserError


@pytest.fixture
def version(models, tmp_path):
    """A version with all forms, and a card that has their checksums."""
    folder = tmp_path / "1"
    shutil.copytree(models.saved_model, folder)
    shutil.copyfile(models.keras, folder / "embedder.keras")
    parts = {
        "saved_model": [folder / "saved_model.pb", *(folder / "variables").iterdir()],
        "litert_float32": [folder / "litert" / "float32.tflite"],
        "keras": [folder / "embedder.keras"],
    }
    artifacts = {name: describe_files(folder, paths) for name, paths in parts.items()}
    (folder / "model_card.json").write_text(json.dumps({"view": models_on_disk.VIEW, "artifacts": artifacts}))
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def one_line(look, says):
    with pytest.raises(UserError, match=says) as error:
        look()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("litert/float32.tflite", "litert/float32.tflite"),
        ("embedder.keras", "embedder.keras"),
        ("", "saved_model.pb"),
        ("", "variables/variables.index"),
    ],
)
def test_a_flipped_bit_is_seen(name, file, version):
    compare_with_card(version / name)
    flip(version / file)
    one_line(lambda: load_backend(version / name), r"is damaged: its SHA-256 is not that in .*model_card\.json")


def test_damage_elsewhere_does_not_matter(version, monkeypatch):
    flip(version / "saved_model.pb")
    compare_with_card(version / "litert" / "float32.tflite")
    monkeypatch.chdir(version / "litert")
    compare_with_card(type(version)("float32.tflite"))
    flip(version / "litert" / "float32.tflite")
    one_line(lambda: compare_with_card(type(version)("float32.tflite")), "is damaged")


@pytest.mark.parametrize(
    ("artifacts", "says"),
    [
        ([], "it is no JSON object"),
        ({"saved_model": {"files": {"../../etc/passwd": {"sha256": ""}}}}, "outside its folder"),
        ({"saved_model": {"files": {"gone": {"sha256": ""}}}}, "which .* lists, cannot be read"),
    ],
)
def test_a_malformed_list_of_files_is_refused(artifacts, says, version):
    card = {"view": models_on_disk.VIEW, "artifacts": artifacts}
    (version / "model_card.json").write_text(json.dumps(card))
    one_line(lambda: [compare_with_card(version / name) for name in ("litert/float32.tflite", "")], says)


@pytest.mark.parametrize(
    "view",
    [
        {"resize": 60_000, "image_size": 60_000, "resize_mode": "shorter"},
        {"resize": 40, "image_size": 32, "resize_mode": "sideways"},
        {"resize": 40, "image_size": 32, "resize_mode": "pad", "pad_color": [float("inf"), 0, 0]},
        [40, 32, "shorter"],
    ],
)
def test_a_view_that_cannot_be_is_refused(view, tmp_path):
    path = tmp_path / "model_card.json"
    path.write_text(json.dumps({"view": view}))
    one_line(lambda: view_of_card(path), r"model_card\.json")
    path.write_text("[" * 100_000)
    one_line(lambda: view_of_card(path), "is not JSON")
