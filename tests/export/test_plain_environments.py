"""What is exported runs where neither tfdml nor Keras can be imported."""

import numpy as np
import pytest

from tests.export.networks import picture, small_dataset, small_embedder
from tests.processes import run_python
from tfdml.data import evaluation_batches, load
from tfdml.data.transforms import EvaluationTransform
from tfdml.export import Retriever, convert_litert

LITERT_ALONE = """
import sys
sys.modules.update(dict.fromkeys(("tensorflow", "keras", "tfdml")))  # importing them fails
import numpy as np
from ai_edge_litert.interpreter import Interpreter
for file in sys.argv[2:]:
    run = Interpreter(file).get_signature_runner()
    np.save(file + ".npy", run(images=np.load(sys.argv[1]))["embedding"])
"""
TENSORFLOW_ALONE = """
import sys
sys.modules.update(dict.fromkeys(("keras", "tfdml")))
import pathlib, numpy as np
import tensorflow as tf
image = tf.constant([pathlib.Path(sys.argv[1]).read_bytes()])
embedder, retriever = (tf.saved_model.load(folder) for folder in sys.argv[2:4])
vector = embedder.signatures["serving_default"](image_bytes=image)["embedding"]
np.save(sys.argv[4], vector.numpy())
found = retriever.signatures["search_bytes"](image_bytes=image, k=tf.constant(2))
same = retriever.signatures["search_embedding"](embedding=vector, k=tf.constant(2))
assert found["ids"].numpy().tolist() == same["ids"].numpy().tolist()
print(found["ids"].numpy()[0, 0].decode())
"""


@pytest.mark.slow
def test_litert_files_run_with_ai_edge_litert_alone(tmp_path):
    pytest.importorskip("ai_edge_litert")
    embedder = small_embedder()
    views = next(iter(evaluation_batches(small_dataset("train"), EvaluationTransform.of(embedder), 24)))[0].numpy()
    np.save(tmp_path / "views.npy", views)
    files = {precision: tmp_path / f"{precision}.tflite" for precision in ("float32", "int8")}
    for precision, file in files.items():
        file.write_bytes(convert_litert(embedder, precision, views))
    run_python("-c", LITERT_ALONE, tmp_path / "views.npy", *files.values(), cwd=tmp_path)
    expected = np.asarray(embedder(views))
    for precision, file in files.items():
        cosines = (np.load(f"{file}.npy") * expected).sum(axis=1)
        assert cosines.min() >= (0.99 if precision == "int8" else 0.995)


@pytest.mark.slow
def test_savedmodel_and_retriever_run_with_tensorflow_alone(shop, tmp_path):
    photos = tmp_path / "photos"
    for seed in range(4):
        (photos / f"class{seed}").mkdir(parents=True)
        (photos / f"class{seed}" / "photo.jpg").write_bytes(picture(seed))
    version = shop.embedder / "1"
    retriever = Retriever.build(version, load("folder", photos, "all"), tmp_path / "retriever", directory=photos)
    query = photos / "class2" / "photo.jpg"
    words = ["-c", TENSORFLOW_ALONE, query, version, retriever.path, tmp_path / "vector.npy"]
    assert run_python(*words, cwd=tmp_path).stdout.strip() == "class2/photo.jpg"
    assert np.linalg.norm(np.load(tmp_path / "vector.npy")) == pytest.approx(1.0, abs=1e-5)
