"""What is exported runs where neither tfdml nor Keras is installed: in environments of a few packages, made here."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from tests.export.networks import picture, small_dataset, small_embedder
from tfdml.data import evaluation_batches, load
from tfdml.data.transforms import EvaluationTransform
from tfdml.export import Retriever, convert_litert

LITERT_ALONE = """
import sys, numpy as np
from ai_edge_litert.interpreter import Interpreter
for file in sys.argv[2:]:
    run = Interpreter(file).get_signature_runner()
    np.save(file + ".npy", run(images=np.load(sys.argv[1]))["embedding"])
"""
TENSORFLOW_ALONE = """
import pathlib, sys, numpy as np
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
ABSENT = """
for absent in {}:
    try:
        __import__(absent)
    except ImportError:
        continue
    raise SystemExit(f"{{absent}} is here")
"""


@pytest.fixture(scope="module")
def embedder():
    return small_embedder()


def environment(folder, package, without=()):
    """A Python of its own with one installed package and what it requires, each a link to this environment's.

    Args:
        folder: Where it is made.
        package: Its name.
        without: Requirements to leave out.

    Returns:
        The path of its interpreter.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = pathlib.Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    pending, done = [package], {*without}
    while pending:
        name = re.sub(r"[-_.]+", "-", pending.pop()).lower()
        if name in done:
            continue
        done.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # required under other conditions than ours
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.exists():
                link.symlink_to(pathlib.Path(str(distribution.locate_file(top))).resolve())
        requirements = [text for text in distribution.requires or () if "extra ==" not in text]
        pending += [re.match(r"[\w.-]+", text)[0] for text in requirements]
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def run(python, script, *arguments):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-P", "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**variables, "TF_CPP_MIN_LOG_LEVEL": "3"})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_litert_files_in_an_environment_with_ai_edge_litert_alone(embedder, tmp_path):
    pytest.importorskip("ai_edge_litert")
    views = next(iter(evaluation_batches(small_dataset("train"), EvaluationTransform.of(embedder), 24)))[0].numpy()
    np.save(tmp_path / "views.npy", views)
    files = {precision: tmp_path / f"{precision}.tflite" for precision in ("float32", "int8")}
    for precision, file in files.items():
        file.write_bytes(convert_litert(embedder, precision, views))
    script = LITERT_ALONE + ABSENT.format(("tensorflow", "keras", "tfdml"))
    run(environment(tmp_path / "env", "ai-edge-litert"), script, tmp_path / "views.npy", *files.values())
    expected = np.asarray(embedder(views))
    for precision, file in files.items():
        cosines = (np.load(f"{file}.npy") * expected).sum(axis=1)
        assert cosines.min() >= (0.99 if precision == "int8" else 0.995)


@pytest.mark.slow
def test_savedmodel_and_retriever_in_an_environment_with_tensorflow_alone(shop, tmp_path):
    photos = tmp_path / "photos"
    for seed in range(4):
        (photos / f"class{seed}").mkdir(parents=True)
        (photos / f"class{seed}" / "photo.jpg").write_bytes(picture(seed))
    version = shop.embedder / "1"
    retriever = Retriever.build(version, load("folder", photos, "all"), tmp_path / "retriever", directory=photos)
    # TensorFlow names Keras among its requirements, and does without it here.
    python = environment(tmp_path / "env", "tensorflow", without=["keras"])
    query = photos / "class2" / "photo.jpg"
    script = TENSORFLOW_ALONE + ABSENT.format(("keras", "tfdml"))
    found = run(python, script, query, version, retriever.path, tmp_path / "vector.npy")
    assert found.strip() == str(pathlib.Path("class2") / "photo.jpg")
    assert np.linalg.norm(np.load(tmp_path / "vector.npy")) == pytest.approx(1.0, abs=1e-5)
