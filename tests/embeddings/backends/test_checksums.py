"""A model that is not the one its card tells of is not loaded, and a file made to do harm is refused in one line."""

import json
import shutil
import zipfile

import pytest

from tests.export import models_on_disk
from tfdml.embeddings.backends import load_backend, load_embedder
from tfdml.embeddings.backends.model_card import compare_with_card, describe_files, view_of_card
from tfdml.errors import UserError


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return models_on_disk.make(tmp_path_factory.mktemp("models"))


@pytest.fixture
def version(models, tmp_path):
    """A version with all forms, and a card that has their checksums."""
    folder = tmp_path / "1"
    shutil.copytree(models.saved_model, folder)
    shutil.copyfile(models.keras, folder / "embedder.keras")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "float32.onnx").write_bytes(b"compared before it is read")
    parts = {
        "onnx_float32": [folder / "onnx" / "float32.onnx"],
        "saved_model": [folder / "saved_model.pb", *(folder / "variables").iterdir()],
        "litert_float32": [folder / "litert" / "float32.tflite"],
        "keras": [folder / "embedder.keras"],
    }
    artefacts = {name: describe_files(folder, paths) for name, paths in parts.items()}
    (folder / "model_card.json").write_text(json.dumps({"view": models_on_disk.VIEW, "artefacts": artefacts}))
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
        ("onnx/float32.onnx", "onnx/float32.onnx"),
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
    ("artefacts", "says"),
    [
        ([], "an object is expected, not a list"),
        ({"litert_float32": 3}, "must be an object"),
        ({"litert_float32": {}}, "has no key files"),
        ({"litert_float32": {"files": {"litert/float32.tflite": {}}}}, "has no key sha256"),
        ({"saved_model": {"files": {"../../etc/passwd": {"sha256": ""}}}}, "outside its folder"),
        ({"saved_model": {"files": {"gone": {"sha256": ""}}}}, "which .* lists, cannot be read"),
    ],
)
def test_a_malformed_list_of_files_is_refused(artefacts, says, version):
    card = {"view": models_on_disk.VIEW, "artefacts": artefacts}
    (version / "model_card.json").write_text(json.dumps(card))
    one_line(lambda: [compare_with_card(version / name) for name in ("litert/float32.tflite", "")], says)


@pytest.mark.parametrize(
    "view",
    [
        {"resize": 60_000, "image_size": 60_000, "resize_mode": "shorter"},
        {"resize": 60_000, "crop": 60_000, "mode": "shorter"},
        {"resize": 40, "image_size": 32, "mode": "shorter"},
        {"resize": 40, "crop": 32, "image_size": 32, "resize_mode": "shorter"},
        {"resize": 40, "image_size": "32", "resize_mode": "shorter"},
        {"resize": 2**70, "crop": 32, "mode": "shorter"},
        {"resize": float("nan"), "crop": 32, "mode": "shorter"},
        {"resize": float("inf"), "crop": 32, "mode": "shorter"},
        {"resize": 40, "crop": -1, "mode": "shorter"},
        {"resize": 40, "crop": True, "mode": "shorter"},
        {"resize": "40", "crop": 32, "mode": "shorter"},
        {"resize": 40, "crop": 32, "mode": ["shorter"]},
        {"resize": 40, "crop": 32, "mode": "sideways"},
        {"resize": 40, "crop": 32, "mode": "pad", "pad_color": 3},
        {"resize": 40, "crop": 32, "mode": "pad", "pad_color": [float("inf"), 0, 0]},
        {"resize": 40, "crop": 32, "mode": "pad", "pad_color": "no such"},
        {"resize": 40},
        [40, 32, "shorter"],
    ],
)
def test_a_view_that_cannot_be_is_refused(view, tmp_path):
    path = tmp_path / "model_card.json"
    path.write_text(json.dumps({"view": view}))
    one_line(lambda: view_of_card(path), r"model_card\.json")
    path.write_text("[" * 100_000)
    one_line(lambda: view_of_card(path), "nested more than")


def rewrite(source, target, **members):
    """A .keras file with other members; what stands under a name is called with the old content."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            change = members.get(name.partition(".")[0])
            new.writestr(name, change(old.read(name)) if change else old.read(name))


def test_keras_files_made_to_do_harm(models, tmp_path):
    def layer(module, name, /, **config):
        return json.dumps({"module": module, "class_name": name, "config": config, "registered_name": name}).encode()

    crafted = {
        "a layer of another package": layer("keras.layers", "FlaxLayer", module=None),
        "a layer of torch": layer("keras.layers", "TorchModuleWrapper", module="x", name="y"),
        "code": layer("keras.layers", "Lambda", function={"class_name": "__lambda__", "config": {"code": "4wE="}}),
        "a function of the system": layer("os", "system", command="touch made"),
        "deep": b'{"a":' * 100_000,
        "no JSON": b"{",
        "a list": b"[]",
        "another model": layer("keras.layers", "Dense", units=3),
    }
    for name, config in crafted.items():
        path = tmp_path / f"{name}.keras"
        rewrite(models.keras, path, config=lambda _, config=config: config)
        one_line(lambda path=path: load_embedder(path), "cannot be loaded|holds a Dense, not an Embedder")
    assert not (tmp_path / "made").exists()


def test_a_flipped_keras_file_without_a_card_is_seen(models, tmp_path):
    path = tmp_path / "embedder.keras"
    shutil.copyfile(models.keras, path)
    load_embedder(path)
    flip(path)
    one_line(lambda: load_embedder(path), "cannot be loaded")
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99))
    one_line(lambda: load_embedder(path), "cannot be loaded: BadZipFile")
