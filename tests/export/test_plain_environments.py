"""What is exported runs where neither tfdml nor Keras can be imported."""

import numpy as np
import pytest

from tests.export.networks import picture
from tests.support.processes import run_python
from tfdml.data import load
from tfdml.export import Retriever

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
def test_savedmodel_and_retriever_run_with_tensorflow_alone(shop, tmp_path):
    photos = tmp_path / "photos"
    for seed in range(4):
        (photos / f"class{seed}").mkdir(parents=True)
        (photos / f"class{seed}" / "photo.jpg").write_bytes(picture(seed))
    version = shop.embedder / "1"
    retriever = Retriever.build(
        version, load("folder", photos, "all"), tmp_path / "retriever", directory=photos
    )
    query = photos / "class2" / "photo.jpg"
    words = ["-c", TENSORFLOW_ALONE, query, version, retriever.path, tmp_path / "vector.npy"]
    assert run_python(*words, cwd=tmp_path).stdout.strip() == "class2/photo.jpg"
    assert np.linalg.norm(np.load(tmp_path / "vector.npy")) == pytest.approx(1.0, abs=1e-5)
