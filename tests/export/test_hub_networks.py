"""Vision transformers in every format that can hold them: the same vectors as the embedder's."""

import keras
import numpy as np
import pytest

from tests.backbones.hub_networks import SIZE, preset
from tests.export.networks import difference, picture
from tests.marks import has_keras_hub
from tfdml import backbones
from tfdml.export import convert_litert, convert_onnx, write_saved_model
from tfdml.models import Embedder

pytestmark = has_keras_hub
OWN = {"dinov2": "cls", "dinov3": "avg", "siglip": "attention", "swin": "gem"}


@pytest.fixture(scope="module")
def embedders(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            name, _ = preset(tmp_path_factory.mktemp("presets") / family, family)
            backbone = backbones.resolve(name, SIZE)
            made[family] = Embedder(backbone, embedding_dim=8, image_size=SIZE, pooling=OWN[family])
            made[family].build((None, SIZE, SIZE, 3))
        return made[family]

    return make


VIEWS = np.random.default_rng(0).integers(0, 256, (5, SIZE, SIZE, 3)).astype(np.uint8)


def cosines(embedder, found):
    return (keras.ops.convert_to_numpy(embedder(VIEWS)) * found).sum(axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN)
def test_a_saved_model_gives_the_embedders_vectors(embedders, family, tmp_path):
    write_saved_model(embedders(family), tmp_path / "1")
    assert difference(embedders(family), tmp_path / "1", [picture(seed) for seed in range(3)]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize(("precision", "near"), [("float32", 1 - 1e-5), ("dynamic_range", 0.98)])
def test_a_litert_file_gives_the_embedders_vectors(embedders, family, precision, near):
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter
    made = interpreter(model_content=convert_litert(embedders(family), precision, VIEWS))
    found = made.get_signature_runner("serving_default")(images=VIEWS)["embedding"]
    assert cosines(embedders(family), found).min() > near


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN)
def test_an_onnx_file_gives_the_embedders_vectors(embedders, family):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("tf2onnx")
    session = runtime.InferenceSession(convert_onnx(embedders(family)), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: VIEWS})
    assert cosines(embedders(family), found).min() > 1 - 1e-5


@pytest.mark.slow
def test_erfc_becomes_one_minus_erf():
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("tf2onnx")
    inputs = keras.Input((4, 4, 3))
    gelu = keras.layers.Activation("gelu")(inputs)
    embedder = Embedder(keras.Model(inputs, gelu), embedding_dim=2, image_size=4)
    embedder.build((None, 4, 4, 3))
    views = VIEWS[:, :4, :4]
    session = runtime.InferenceSession(convert_onnx(embedder), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: views})
    np.testing.assert_allclose(found, embedder(views), atol=1e-5)
