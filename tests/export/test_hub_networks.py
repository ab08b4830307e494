"""Vision transformers in every format that can hold them: the same vectors as the embedder's."""

import keras
import numpy as np
import pytest

from tests.backbones.hub_networks import SIZE, preset
from tests.support.marks import has_keras_hub
from tfdml import backbones
from tfdml.export import convert_litert, convert_onnx
from tfdml.models import Embedder

pytestmark = has_keras_hub
OWN = {"dinov2": "cls", "dinov3": "avg", "siglip": "attention", "swin": "gem"}
VIEWS = np.random.default_rng(0).integers(0, 256, (5, SIZE, SIZE, 3)).astype(np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize("family", OWN)
def test_litert_and_onnx_files_give_the_embedders_vectors(tmp_path, family):
    name, _ = preset(tmp_path / family, family)
    embedder = Embedder(
        backbones.resolve(name, SIZE), embedding_dim=8, image_size=SIZE, pooling=OWN[family]
    )
    embedder.build((None, SIZE, SIZE, 3))
    expected = keras.ops.convert_to_numpy(embedder(VIEWS))
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter
    precisions = {"float32": 1 - 1e-5, **({"dynamic_range": 0.98} if family == "dinov3" else {})}
    for precision, near in precisions.items():
        made = interpreter(model_content=convert_litert(embedder, precision, VIEWS))
        found = made.get_signature_runner("serving_default")(images=VIEWS)["embedding"]
        assert (expected * found).sum(axis=1).min() > near
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("tf2onnx")
    session = runtime.InferenceSession(convert_onnx(embedder), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: VIEWS})
    assert (expected * found).sum(axis=1).min() > 1 - 1e-5
