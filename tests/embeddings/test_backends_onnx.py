"""An .onnx file of an embedder embeds as the embedder does."""

import json
import sys

import numpy as np
import pytest

from tests.export import models_on_disk
from tfdml import backbones
from tfdml.data import EvaluationTransform, evaluation_batches
from tfdml.embeddings import embed
from tfdml.embeddings.backends import ViewFile, load_backend
from tfdml.errors import UserError
from tfdml.export import convert_onnx
from tfdml.models import Embedder

onnx = pytest.importorskip("onnx", reason="pip install 'tfdml[onnx]'")
for library in ("onnxruntime", "tf2onnx"):
    pytest.importorskip(library, reason="pip install 'tfdml[onnx]'")

DATASET = models_on_disk.pictures()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An embedder and its file, with a model card in the folder above."""
    embedder = Embedder(
        backbones.resolve("conv4", 32, width=4), embedding_dim=6, image_size=32, resize=40
    )
    embedder(np.zeros((1, 32, 32, 3), np.uint8))
    path = tmp_path_factory.mktemp("version") / "onnx" / "model.onnx"
    path.parent.mkdir()
    path.write_bytes(convert_onnx(embedder))
    (path.parent.parent / "model_card.json").write_text(json.dumps({"view": models_on_disk.VIEW}))
    return embedder, path


@pytest.mark.slow
def test_the_embedders_own_vectors_from_any_batch_on_and_one_at_a_time(exported, tmp_path):
    embedder, view = exported[0], EvaluationTransform(**models_on_disk.VIEW)
    expected = embed(
        lambda images: embedder(images, training=False), evaluation_batches(DATASET, view, 11)
    )
    backend = load_backend(exported[1], threads=1)
    assert (backend.kind, backend.view) == ("onnx", models_on_disk.VIEW)
    batches = list(backend.stream(DATASET, 4))
    np.testing.assert_allclose(np.concatenate(batches), expected, atol=1e-5)
    rest = list(backend.stream(DATASET.take(range(4, len(DATASET))), 4, 4))
    np.testing.assert_array_equal(np.concatenate(rest), np.concatenate(batches[1:]))
    rows, vectors = zip(
        *backend.stream_readable(models_on_disk.pictures(broken=[6]), 4), strict=True
    )
    assert np.concatenate(rows).tolist() == [i for i in range(11) if i != 6]
    np.testing.assert_allclose(np.concatenate(vectors), np.delete(expected, 6, axis=0), atol=1e-5)
    model = onnx.load(exported[1])
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "one.onnx")
    with pytest.raises(UserError, match="copy that of its export"):
        load_backend(tmp_path / "one.onnx")
    (tmp_path / "model_card.json").write_text(json.dumps({"view": models_on_disk.VIEW}))
    np.testing.assert_allclose(
        ViewFile(tmp_path / "one.onnx").embed(DATASET, 4), expected, atol=1e-5
    )


def test_what_is_no_such_model_is_refused(exported, tmp_path, monkeypatch):
    (tmp_path / "text.onnx").write_text("not a model")
    model = onnx.load(exported[1])
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    onnx.save(model, tmp_path / "floats.onnx")
    for path in (tmp_path / "text.onnx", tmp_path / "floats.onnx", exported[1].parent):
        with pytest.raises(UserError, match=path.name):
            load_backend(path)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match="onnx"):
        load_backend(exported[1])
