"""A served model: requests in TensorFlow Serving's REST format, and batches whose answers are those of each call."""

import base64
import json

import numpy as np
import pytest
import tensorflow as tf

from tests.data.preparations import png
from tests.export.conftest import LIMIT, SEARCHED, shop_dataset
from tests.export.networks import picture, small_embedder
from tfdml.cluster.replica import Call, Replica, ServeSettings, check_pixels, parse_call, write_answer
from tfdml.errors import UserError
from tfdml.export import Retriever
from tfdml.export.saved_model import write_saved_model, write_warm_up

BYTES, PIXELS, K = (
    tf.TensorSpec((None,), tf.string),
    tf.TensorSpec((None, None, None, 3), tf.uint8),
    tf.TensorSpec(None, tf.int32),
)
SPECS = {
    "serving_default": {"image_bytes": BYTES},
    "embed_images": {"images": PIXELS},
    "search_embedding": {"embedding": tf.TensorSpec((None, 2), tf.float32), "k": K},
}
IMAGES = [picture(seed, 40 + seed, 80 - seed) for seed in range(6)]


def b64(data):
    return {"b64": base64.b64encode(data).decode()}


def parsed(**request):
    return parse_call(json.dumps(request).encode(), SPECS, 4)


@pytest.mark.parametrize(
    "request_",
    [
        {"instances": [b64(b"\0\xff"), b64(b"text")]},
        {"instances": [{"image_bytes": b64(b"\0\xff")}, {"image_bytes": b64(b"text")}]},
        {"inputs": [b64(b"\0\xff"), b64(b"text")], "signature_name": "serving_default"},
        {"inputs": {"image_bytes": [b64(b"\0\xff"), b64(b"text")]}},
    ],
)
def test_rows_and_columns_are_the_same_tensors(request_):
    call = parsed(**request_)
    assert call.inputs["image_bytes"].tolist() == [b"\0\xff", b"text"]
    assert call.by_row == ("instances" in request_)


def test_numbers_have_the_types_of_the_signature():
    call = parsed(inputs={"embedding": [[1, 0.5]], "k": 3}, signature_name="search_embedding")
    assert call.inputs["embedding"].dtype == np.float32
    assert call.inputs["embedding"].tolist() == [[1, 0.5]]
    assert (call.inputs["k"].dtype, call.inputs["k"].shape) == (np.int32, ())
    call = parsed(instances=[{"embedding": [1, 2], "k": 3}] * 2, signature_name="search_embedding")
    assert call.inputs["k"].tolist() == [3, 3]
    assert parsed(inputs=[[[[0, 255, 7]]]], signature_name="embed_images").inputs["images"].shape == (1, 1, 1, 3)
    assert parsed(inputs=[]).inputs["image_bytes"].shape == (0,)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({}, "either 'instances' or 'inputs'"),
        ({"instances": ["a"], "signature_name": "other"}, 'signature key "other" not found; there are serving_default'),
        ({"inputs": {"image_bytes": ["a"], "more": 1}}, "must have the keys image_bytes, not image_bytes, more"),
        ({"instances": ["a"] * 5}, "5 instances; at most 4"),
        ({"instances": [{"b64": "?"}]}, "image_bytes: Only base64 data is allowed"),
        ({"instances": [{"b64": "data:image/jpeg;base64,/9j/4AAQ"}]}, "a data URI: send only what follows its comma"),
        ({"instances": [{"b64": "_9j-4AAQ"}]}, r"base64 for URLs, with - and _: send the standard one"),
        ({"instances": ["car.jpg"]}, "not a plain string"),
        (
            {"inputs": {"embedding": [[1, 2]] * 2, "k": [1, 2, 3]}, "signature_name": "search_embedding"},
            "the inputs embedding, k differ in length",
        ),
        ({"inputs": [[[[1, 2, 256]]]], "signature_name": "embed_images"}, "a value is beyond uint8"),
    ],
)
def test_what_is_wrong_with_a_request_is_one_line(request_, says):
    with pytest.raises(UserError, match=says) as error:
        parsed(**request_)
    assert "\n" not in str(error.value)


class Untouchable(list):
    """Rows that fail when anything but their number is asked for."""

    __iter__ = __getitem__ = None


def test_rows_are_counted_before_any_is_touched(monkeypatch):
    rows = Untouchable([1] * 5)
    for request in ({"instances": rows}, {"inputs": rows}, {"inputs": {"image_bytes": rows}}):
        monkeypatch.setattr("tfdml.cluster.replica.parse_json", lambda body, where, request=request: request)
        with pytest.raises(UserError, match="5 instances; at most 4"):
            parse_call(b"", SPECS, 4)


def test_pixels_of_a_request_are_counted_by_headers_and_not_decoded():
    """60 images of one bit a pixel, without any pixel in them, ask for 6 gigapixels."""
    bomb = png(9990, 9990, pixels=b"")
    call = parse_call(json.dumps({"instances": [b64(bomb)] * 60}).encode(), SPECS, 256)
    with pytest.raises(UserError, match=r"5,988.0 megapixels; at most 400 are taken"):
        check_pixels(call, ServeSettings().max_megapixels)
    kinds = [tf.io.encode_jpeg(np.zeros((40, 50, 3), np.uint8)).numpy(), IMAGES[0], b"", b"text", bomb[:20]]
    call = parse_call(json.dumps({"instances": [b64(data) for data in kinds]}).encode(), SPECS, 256)
    check_pixels(call, (40 * 50 + 40 * 80) / 1e6)
    with pytest.raises(UserError, match="megapixels"):
        check_pixels(call, (40 * 50 + 40 * 80 - 1) / 1e6)
    check_pixels(Call("embed_each", {"image_bytes": np.array([png(30_000, 30_000, pixels=b"")], object)}, True), 400)


def test_answers_have_tensorflow_serving_form():
    ids = np.array([[b"a", b"\xff"]], object)
    outputs = {"ids": ids, "distances": np.array([[0.5, 1]], np.float32)}
    rows = [{"ids": ["a", "\ufffd"], "distances": [0.5, 1.0]}]
    assert json.loads(write_answer(outputs, by_row=True)) == {"predictions": rows}
    assert json.loads(write_answer(outputs, by_row=False))["outputs"]["distances"] == [[0.5, 1.0]]
    assert json.loads(write_answer({"ids": ids}, by_row=True)) == {"predictions": [["a", "\ufffd"]]}
    assert json.loads(write_answer({"ids": ids}, by_row=False)) == {"outputs": [["a", "\ufffd"]]}


@pytest.mark.slow
def test_calls_of_one_batch_have_the_answers_that_they_have_alone(tmp_path):
    """Several signatures, sizes of images and `k`, a bad image, a bad `k`, and inputs that differ in length."""
    pytest.importorskip("fastapi")
    write_saved_model(small_embedder(), tmp_path / "embedder" / "1", LIMIT)
    Retriever.build(tmp_path / "embedder", shop_dataset(IMAGES), tmp_path / "retriever", calibration=SEARCHED)
    folder = tmp_path / "retriever" / "1"
    replica, model = Replica(str(folder), ServeSettings()), tf.saved_model.load(str(folder))
    rng = np.random.default_rng(0)

    def texts(*values):
        return np.array(values, object)

    inputs = [
        ("serving_default", {"image_bytes": texts(*IMAGES[:2])}),
        ("serving_default", {"image_bytes": texts(IMAGES[2], b"no image")}),
        ("serving_default", {"image_bytes": texts(IMAGES[3])}),
        ("serving_default", {"image_bytes": texts()}),
        ("embed_each", {"image_bytes": texts(IMAGES[4], b"no image")}),
        ("embed_each", {"image_bytes": texts(IMAGES[5])}),
        *(("embed_images", {"images": rng.integers(0, 255, (1, side, 40, 3), np.uint8)}) for side in (40, 50, 50)),
        *(
            ("search_each", {"image_bytes": texts(*IMAGES[:2]), "k": np.array(k, np.int32)})
            for k in ([1, 3], [3, 3], [0, 2], 2, 3)
        ),
    ]
    calls = [Call(signature, values, by_row=False) for signature, values in inputs]
    answers = replica._answers(calls)
    for (signature, values), answer in zip(inputs, answers, strict=True):
        try:
            tensors = {name: tf.constant(v, tf.string if v.dtype == object else None) for name, v in values.items()}
            expected = {name: value.numpy() for name, value in model.signatures[signature](**tensors).items()}
        except tf.errors.InvalidArgumentError:
            assert isinstance(answer, UserError)
            assert "\n" not in str(answer)
            continue
        assert set(answer) == set(expected)
        for name, value in expected.items():
            if value.dtype.kind == "f":
                np.testing.assert_allclose(answer[name], value, atol=1e-5, err_msg=f"{signature} {name}")
            else:
                np.testing.assert_array_equal(answer[name], value)


@pytest.mark.slow
def test_a_model_that_cannot_answer_is_refused(tmp_path):
    pytest.importorskip("fastapi")
    (tmp_path / "saved_model.pb").write_bytes(b"no model")
    with pytest.raises(UserError, match="cannot be loaded"):
        Replica(str(tmp_path), ServeSettings())
    embedder = small_embedder()
    for weight in embedder.weights:
        weight.assign(np.full(weight.shape, np.nan))
    write_saved_model(embedder, tmp_path / "nan")
    write_warm_up(tmp_path / "nan", tf.saved_model.load(str(tmp_path / "nan")).signatures)
    with pytest.raises(UserError, match="answers a warm-up request with NaN as embedding"):
        Replica(str(tmp_path / "nan"), ServeSettings())
