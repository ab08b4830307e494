"""Model cards: damaged files and impossible views are refused, and files are compared with their
checksums."""

import json
import shutil

import pytest

import tfdml
from tests.export import models_on_disk
from tfdml.embeddings.backends import load_backend
from tfdml.embeddings.model_card import (
    compare_with_card,
    describe_files,
    view_of,
    view_of_card,
)
from tfdml.errors import UserError
from tfdml.models import Embedder, Head


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["litert/float32.tflite", "embedder.keras", ""])
def test_a_flipped_bit_is_seen_in_what_is_loaded_alone(name, models, tmp_path):
    version = tmp_path / "1"
    shutil.copytree(models.saved_model, version)
    shutil.copyfile(models.keras, version / "embedder.keras")
    parts = {
        "saved_model": [version / "saved_model.pb", *(version / "variables").iterdir()],
        "litert_float32": [version / "litert" / "float32.tflite"],
        "keras": [version / "embedder.keras"],
    }
    artifacts = {kind: describe_files(version, paths) for kind, paths in parts.items()}
    (version / "model_card.json").write_text(
        json.dumps({"view": models_on_disk.VIEW, "artifacts": artifacts})
    )
    flip(version / ("embedder.keras" if name != "embedder.keras" else "saved_model.pb"))
    compare_with_card(version / name)
    flip(version / (name or "variables/variables.index"))
    with pytest.raises(
        UserError, match=r"is damaged: its SHA-256 is not that in .*model_card\.json"
    ) as error:
        load_backend(version / name)
    assert "\n" not in str(error.value)


def test_a_card_states_the_view_of_images_or_the_dimension_of_vectors():
    assert view_of(Head(8, embedding_dim=3)) == {"dimension": 8}
    view = {"resize": 24, "image_size": 16, "resize_mode": "shorter"}
    embedder = Embedder(tfdml.backbones.resolve("conv4", 16, width=2), image_size=16, resize=24)
    assert view_of(embedder) == view


@pytest.mark.parametrize(
    "view", [{"resize": 60_000, "image_size": 60_000, "resize_mode": "shorter"}, [40, 32, "pad"]]
)
def test_a_view_that_cannot_be_is_refused(view, tmp_path):
    path = tmp_path / "model_card.json"
    path.write_text(json.dumps({"view": view}))
    with pytest.raises(UserError, match=r"model_card\.json"):
        view_of_card(path)
