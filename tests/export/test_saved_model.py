"""The exported SavedModel gives the embedder's vectors, of encoded and of decoded images, in every
view."""

import concurrent.futures
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.export.networks import difference, picture, small_embedder
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import UserError
from tfdml.export import export_saved_model
from tfdml.export.saved_model import (
    _texts_endpoint,
    frozen_module,
    new_version,
    version_numbers,
)
from tfdml.models import ByteTokenizer, Embedder, TextEmbedder, byte_encoder


@pytest.fixture(scope="module")
def embedder():
    return small_embedder()


def pictures():
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        picture(0, 60, 90),
        picture(1, 200, 40),
        picture(2, 33, 33, mode="L"),
        picture(3, 50, 70, mode="CMYK"),
        picture(4, 50, 70, exif=exif.tobytes()),
        picture(5, 48, 64, "PNG", "RGBA"),
        picture(6, 20, 20, "PNG"),
    ]


@pytest.fixture(scope="module")
def version(embedder, tmp_path_factory):
    return export_saved_model(embedder, tmp_path_factory.mktemp("models") / "model")


def test_it_is_the_first_version_and_gives_the_embedders_vectors_of_every_kind_of_image(
    embedder, version
):
    assert [entry.name for entry in version.parent.iterdir()] == ["1"]
    assert difference(embedder, version, pictures()) <= 1e-5
    images = np.random.default_rng(1).integers(0, 255, (3, 70, 50, 3)).astype(np.uint8)
    vectors = tf.saved_model.load(version).signatures["embed_images"](images=tf.constant(images))[
        "embedding"
    ]
    expected = embedder(EvaluationTransform.of(embedder)(tf.constant(images)))
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "color"), [("squash", (0, 0, 0)), ("pad", (255, 255, 255))])
def test_every_form_of_the_evaluation_view_is_in_the_export(mode, color, tmp_path):
    shaped = Embedder(
        "conv4", embedding_dim=8, image_size=28, resize=32, resize_mode=mode, pad_color=color
    )
    shaped.build((None, 28, 28, 3))
    path = export_saved_model(shaped, tmp_path)
    assert EvaluationTransform.of(shaped) == EvaluationTransform(32, 28, mode, color)
    assert (
        difference(shaped, path, [picture(0, 40, 90), picture(1, 70, 30), picture(2, 20, 20)])
        < 1e-5
    )


def test_a_network_that_calls_python_is_refused():
    """It runs here and nowhere else."""

    class Doubling(keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(
                tf.numpy_function(lambda value: 2 * value, [x], tf.float32), x.shape
            )

    inputs = keras.Input((28, 28, 3))
    embedder = Embedder(keras.Model(inputs, Doubling()(inputs)), embedding_dim=4, image_size=28)
    embedder.build((None, 28, 28, 3))
    with pytest.raises(UserError, match="Python function"):
        frozen_module(embedder, embedder.view_shape)


def write(versions, content):
    with new_version(versions) as (hidden, path):
        assert hidden.parent == versions
        assert hidden.name.startswith(".")
        (hidden / "below").mkdir()
        (hidden / "below" / "file").write_text(content)
        folder = os.stat(hidden).st_ino
    assert os.stat(path).st_ino == folder  # renamed into place, which is atomic
    return path


def test_versions_count_up_and_old_ones_stay(tmp_path):
    versions = tmp_path / "models" / "cars"
    assert [write(versions, text).name for text in ("one", "two")] == ["1", "2"]
    assert [(versions / name / "below" / "file").read_text() for name in "12"] == ["one", "two"]
    for name in ("10", "notes", ".partial-x", "7a"):
        (versions / name).mkdir()
    assert write(versions, "new").name == "11"
    assert version_numbers(versions) == [1, 2, 10, 11]


def test_a_failure_leaves_no_version_and_what_was_killed_is_removed_by_the_next(tmp_path):
    with pytest.raises(ZeroDivisionError), new_version(tmp_path / "a" / "b") as (hidden, _):
        (hidden / "half").write_text(str(1 // 0))
    assert not list((tmp_path / "a" / "b").iterdir())
    with pytest.raises(UserError, match=r"cannot be written.*full"), new_version(tmp_path / "c"):
        raise OSError(28, "the disk is full")
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    for process in (killed.pid, os.getppid()):
        (tmp_path / "c" / f".partial-{process}-x").mkdir()
    write(tmp_path / "c", "new")
    assert sorted(entry.name for entry in (tmp_path / "c").iterdir()) == [
        f".partial-{os.getppid()}-x",
        "1",
    ]


def test_exporters_at_once_get_numbers_of_their_own(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda number: write(tmp_path, str(number)), range(24)))
    assert sorted(int(path.name) for path in paths) == list(range(1, 25))
    assert [(path / "below" / "file").read_text() for path in paths] == [
        str(number) for number in range(24)
    ]
    assert len(list(tmp_path.iterdir())) == 24


@pytest.mark.parametrize("truncate", [False, True])
def test_texts_are_embedded_and_refused_as_by_the_embedder(truncate):
    model = TextEmbedder(
        byte_encoder(8, width=2), ByteTokenizer(8), embedding_dim=3, truncate=truncate
    )
    spec = [tf.TensorSpec((None,), tf.string)]
    answer = tf.function(_texts_endpoint(model), input_signature=spec, autograph=False)

    def embedded(texts):
        return answer(tf.constant(texts, tf.string))["embedding"].numpy()

    np.testing.assert_allclose(embedded(["a", "b c"]), model.embed_texts(["a", "b c"]), atol=1e-6)
    assert embedded([]).shape == (0, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"texts\[1\] of 2: is empty"):
        embedded(["a", " "])
    if truncate:
        np.testing.assert_array_equal(embedded(["a" * 9]), embedded(["a" * 8]))
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="does not fit into 8 tokens"):
            embedded(["a" * 8])
