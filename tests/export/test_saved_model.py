"""The exported SavedModel gives the embedder's vectors, of encoded and of decoded images, in every view."""

import io

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.export.networks import difference
from tfdml.data.transforms import EvaluationTransform
from tfdml.export import export_saved_model
from tfdml.models import Embedder


@pytest.fixture(scope="module")
def embedder():
    keras.utils.set_random_seed(0)
    built = Embedder("conv4", embedding_dim=8, image_size=32, resize=40)
    built(np.zeros((1, 32, 32, 3), np.uint8))
    return built


def picture(height, width, mode="RGB", form="JPEG", **options):
    rng = np.random.default_rng(height * width)
    small = rng.integers(0, 255, (8, 8, len(Image.new(mode, (1, 1)).getbands()))).astype(np.uint8)
    image = Image.fromarray(small.squeeze(), mode).resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def pictures():
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        picture(60, 90),
        picture(200, 40),
        picture(33, 33, "L"),
        picture(50, 70, "CMYK"),
        picture(50, 70, exif=exif.tobytes()),
        picture(48, 64, "RGBA", "PNG"),
        picture(20, 20, form="PNG"),
    ]


@pytest.fixture(scope="module")
def version(embedder, tmp_path_factory):
    return export_saved_model(embedder, tmp_path_factory.mktemp("models") / "model")


def test_it_gives_the_embedders_vectors_of_every_kind_of_image(embedder, version):
    assert difference(embedder, version, pictures()) <= 1e-5


def test_it_is_the_first_version_and_whole(version):
    assert version.name == "1"
    assert (version / "saved_model.pb").is_file()
    assert [entry.name for entry in version.parent.iterdir()] == ["1"]


def test_images_of_any_size_through_the_second_signature(embedder, version):
    served = tf.saved_model.load(version)
    images = np.random.default_rng(1).integers(0, 255, (3, 70, 50, 3)).astype(np.uint8)
    vectors = served.signatures["embed_images"](images=tf.constant(images))["embedding"]
    expected = embedder(EvaluationTransform.of(embedder)(tf.constant(images)))
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


@pytest.mark.one_quick_case
@pytest.mark.parametrize(("mode", "color"), [("squash", (0, 0, 0)), ("pad", (0, 0, 0)), ("pad", (255, 255, 255))])
def test_every_form_of_the_evaluation_view_is_in_the_export(mode, color, tmp_path):
    shaped = Embedder("conv4", embedding_dim=8, image_size=28, resize=32, resize_mode=mode, pad_color=color)
    shaped.build((None, 28, 28, 3))
    path = export_saved_model(shaped, tmp_path)
    assert EvaluationTransform.of(shaped) == EvaluationTransform(32, 28, mode, color)
    assert difference(shaped, path, [picture(40, 90), picture(70, 30), picture(20, 20)]) < 1e-5
