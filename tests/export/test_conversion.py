"""LiteRT files: views in, unit vectors out, near the embedder's in every precision."""

import keras
import numpy as np
import pytest

from tests.export.networks import small_dataset, small_embedder
from tests.models.ensembles import tiny_ensemble
from tests.models.networks import images as uint8_images
from tfdml.data import evaluation_batches
from tfdml.data.transforms import EvaluationTransform
from tfdml.errors import UserError
from tfdml.export import convert_litert, convert_onnx
from tfdml.export.saved_model import in_float32
from tfdml.layers import MomentEmbeddings
from tfdml.models import Embedder, Head, MomentEmbedder

# How near the cosines of a random network of 8 dimensions come; a trained one's are in the model
# card of its export.
NEAREST = {"float32": 1 - 1e-6, "float16": 0.9999, "dynamic_range": 0.995, "int8": 0.99}


@pytest.fixture(scope="module")
def embedder():
    return small_embedder()


@pytest.fixture(scope="module")
def views(embedder):
    dataset = small_dataset("train")
    return np.concatenate(
        [batch for batch, _ in evaluation_batches(dataset, EvaluationTransform.of(embedder), 8)]
    )


def runner(file):
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter
    made = interpreter(model_content=file)
    return made, made.get_signature_runner("serving_default")


def cosines(ours, theirs):
    return [
        float(np.dot(f, g) / np.linalg.norm(f) / np.linalg.norm(g))
        for f, g in zip(ours, theirs, strict=True)
    ]


@pytest.mark.one_quick_case
@pytest.mark.parametrize("precision", NEAREST)
def test_vectors_are_of_length_1_and_near_the_embedders(precision, embedder, views):
    made, run = runner(convert_litert(embedder, precision, views))
    expected = keras.ops.convert_to_numpy(embedder(views))
    # Any number of images.
    for count in (len(views), 1, 3):
        found = run(images=views[:count])["embedding"]
        assert found.dtype == np.float32
        assert min(cosines(expected[:count], found)) >= NEAREST[precision]
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    given = made.get_input_details()[0]
    assert given["dtype"] == np.uint8
    assert given["shape_signature"].tolist() == [-1, 32, 32, 3]
    # Pixels go in as they are.
    assert given["quantization"] in ((0.0, 0), (1.0, 0))


def test_int8_is_integers_up_to_the_projection_with_pixels_as_they_are(embedder, views):
    """Dark representative images must not make 255 mean something else: clients know nothing of
    them."""
    made, run = runner(convert_litert(embedder, "int8", views // 4))
    assert made.get_input_details()[0]["quantization"] == (1.0, 0)
    np.testing.assert_allclose(
        np.linalg.norm(run(images=views)["embedding"], axis=1), 1.0, atol=1e-5
    )
    types = {detail["index"]: detail["dtype"] for detail in made.get_tensor_details()}
    operations = made._get_ops_details()
    floats = {
        op["op_name"]
        for op in operations
        if all(types.get(index) is np.float32 for index in op["outputs"])
    }
    assert floats - {"DELEGATE"} == {"DEQUANTIZE", "SUB", "L2_NORMALIZATION"}


def test_what_int8_cannot_hold_is_refused(embedder, views):
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.LayerNormalization()(keras.layers.Conv2D(8, 4, strides=4)(inputs))
    normalizing = Embedder(keras.Model(inputs, x), embedding_dim=8, image_size=32)
    normalizing.build((None, 32, 32, 3))
    moments = MomentEmbedder(embedder, MomentEmbeddings(orders=2, dim=8))
    for network, images in (
        (embedder, None),
        *((each, views) for each in (moments, normalizing, Head(6, 4))),
    ):
        with pytest.raises(UserError, match="int8"):
            convert_litert(network, "int8", images)


def test_an_ensemble_is_converted():
    ensemble, pixels = tiny_ensemble(), uint8_images(dtype="uint8")
    expected = keras.ops.convert_to_numpy(ensemble(pixels))
    found = runner(convert_litert(ensemble))[1](images=pixels)["embedding"]
    assert min(cosines(expected, found)) >= NEAREST["float32"]


@pytest.mark.one_quick_case
@pytest.mark.parametrize("precision", ["float32", "dynamic_range"])
def test_an_embedder_with_all_moments_is_converted_without_its_loop(precision, views):
    keras.utils.set_random_seed(0)
    # More dimensions than one block of those that are computed one after another.
    moments = MomentEmbeddings(orders=3, dim=600, embedding_dim=8)
    searcher = MomentEmbedder(small_embedder(), moments)
    searcher.build((None, 32, 32, 3))
    searcher.adapt(
        np.concatenate(
            [keras.ops.convert_to_numpy(searcher.features(views[i::3])) for i in range(3)]
        )
    )
    expected = keras.ops.convert_to_numpy(searcher(views))
    made, run = runner(convert_litert(searcher, precision, views))
    found = run(images=views)["embedding"]
    assert min(cosines(expected, found)) >= NEAREST[precision]
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    assert not {detail["op_name"] for detail in made._get_ops_details()} & {"WHILE", "IF"}


def test_an_embedder_of_mixed_precision_is_exported_in_float32(views):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        half = small_embedder(3)
    finally:
        keras.config.set_dtype_policy("float32")
    whole = in_float32(half)
    assert {layer.compute_dtype for layer in whole._flatten_layers()} == {"float32"}
    for ours, theirs in zip(whole.get_weights(), half.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (
        min(
            cosines(
                keras.ops.convert_to_numpy(whole(views)), keras.ops.convert_to_numpy(half(views))
            )
        )
        > 0.99
    )


def test_onnx_gives_the_embedders_vectors(embedder, views):
    for library in ("tf2onnx", "onnx", "onnxruntime"):
        pytest.importorskip(library)
    import onnxruntime

    session = onnxruntime.InferenceSession(
        convert_onnx(embedder), providers=["CPUExecutionProvider"]
    )
    for count in (len(views), 1):
        (found,) = session.run(["embedding"], {"images": views[:count]})
        np.testing.assert_allclose(found, embedder(views[:count]), atol=1e-5)
