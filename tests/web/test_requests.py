"""Requests in TensorFlow Serving's REST format as tensors, their limits, and answers."""

import base64
import io
import json

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.data.preparations import png
from tests.export.networks import picture
from tfdml.data import decode_image
from tfdml.errors import UserError
from tfdml.web.requests import Call, check_pixels, crop_boxes, parse_call, write_answer
from tfdml.web.settings import WebSettings

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
    assert parsed(inputs=[[[[0, 255, 7]]]], signature_name="embed_images").inputs[
        "images"
    ].shape == (1, 1, 1, 3)
    assert parsed(inputs=[]).inputs["image_bytes"].shape == (0,)


def test_base64_is_read_with_line_breaks_and_without_padding():
    data = bytes(range(256)) * 2
    text = base64.b64encode(data).decode()
    broken = base64.encodebytes(data).decode()
    forms = [text, broken, broken.replace("\n", "\r\n"), text.rstrip("="), f" {text} "]
    for form in forms:
        assert parsed(instances=[{"b64": form}]).inputs["image_bytes"].tolist() == [data]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        ({}, "instances"),
        ({"instances": ["a"], "signature_name": "other"}, "other"),
        ({"inputs": {"image_bytes": ["a"], "more": 1}}, "more"),
        ({"instances": [{"b64": "?"}]}, "image_bytes: no base64"),
        ({"instances": [{"b64": "AAAAA"}]}, "image_bytes: no base64"),
        ({"instances": [{"b64": "AA=AA"}]}, "image_bytes: no base64"),
        ({"instances": [{"b64": "data:image/jpeg;base64,/9j/4AAQ"}]}, "data URI"),
        ({"instances": [{"b64": "_9j-4AAQ"}]}, "for URLs"),
        ({"instances": ["car.jpg"]}, "plain string"),
        (
            {
                "inputs": {"embedding": [[1, 2]] * 2, "k": [1, 2, 3]},
                "signature_name": "search_embedding",
            },
            "length",
        ),
        ({"inputs": [[[[1, 2, 256]]]], "signature_name": "embed_images"}, "uint8"),
    ],
)
def test_wrong_requests_are_refused(request_, says):
    with pytest.raises(UserError, match=says):
        parsed(**request_)


class Untouchable(list):
    """Rows that fail when anything but their number is asked for."""

    __iter__ = __getitem__ = None


def test_rows_are_counted_before_any_is_touched(monkeypatch):
    rows = Untouchable([1] * 5)
    for request in ({"instances": rows}, {"inputs": rows}, {"inputs": {"image_bytes": rows}}):
        monkeypatch.setattr(
            "tfdml.web.requests.parse_json", lambda body, where, request=request: request
        )
        with pytest.raises(UserError, match="5 instances; at most 4"):
            parse_call(b"", SPECS, 4)


def test_pixels_of_a_request_are_counted_by_headers_and_not_decoded():
    """60 images of one bit a pixel, without any pixel in them, ask for 6 gigapixels."""
    bomb = png(9990, 9990, pixels=b"")
    call = parse_call(json.dumps({"instances": [b64(bomb)] * 60}).encode(), SPECS, 256)
    with pytest.raises(UserError, match="megapixels"):
        check_pixels(call, WebSettings().max_megapixels)
    kinds = [
        tf.io.encode_jpeg(np.zeros((40, 50, 3), np.uint8)).numpy(),
        IMAGES[0],
        b"",
        b"text",
        bomb[:20],
    ]
    call = parse_call(json.dumps({"instances": [b64(data) for data in kinds]}).encode(), SPECS, 256)
    check_pixels(call, (40 * 50 + 40 * 80) / 1e6)
    with pytest.raises(UserError, match="megapixels"):
        check_pixels(call, (40 * 50 + 40 * 80 - 1) / 1e6)
    check_pixels(
        Call(
            "embed_each", {"image_bytes": np.array([png(30_000, 30_000, pixels=b"")], object)}, True
        ),
        400,
    )


def test_answers_have_tensorflow_serving_form():
    ids = np.array([[b"a", b"\xff"]], object)
    outputs = {"ids": ids, "distances": np.array([[0.5, 1]], np.float32)}
    rows = [{"ids": ["a", "\ufffd"], "distances": [0.5, 1.0]}]
    assert json.loads(write_answer(outputs, by_row=True)) == {"predictions": rows}
    assert json.loads(write_answer(outputs, by_row=False))["outputs"]["distances"] == [[0.5, 1.0]]
    assert json.loads(write_answer({"ids": ids}, by_row=True)) == {"predictions": [["a", "\ufffd"]]}
    assert json.loads(write_answer({"ids": ids}, by_row=False)) == {"outputs": [["a", "\ufffd"]]}


def test_boxes_next_to_the_bytes_crop_what_pillow_crops():
    whole = Image.open(io.BytesIO(IMAGES[1]))
    values = [{**b64(IMAGES[1]), "box": [3, 5, 30, 29]}, b64(IMAGES[1])]
    for request in ({"instances": values}, {"inputs": {"image_bytes": values}}):
        call = parsed(**request)
        crop_boxes(call, 1)
        part, same = call.inputs["image_bytes"]
        assert same == IMAGES[1]
        expected = np.asarray(whole.convert("RGB").crop((3, 5, 30, 29)))
        np.testing.assert_array_equal(decode_image(part), expected)


@pytest.mark.parametrize(
    ("data", "box", "message"),
    [
        (IMAGES[1], [1, 2, 3], "four whole numbers"),
        (IMAGES[1], [0, 0, True, 9], "four whole numbers"),
        (IMAGES[1], [0, 0, 1.5, 9], "four whole numbers"),
        (IMAGES[1], [0, 0, 0, 9], r"image_bytes\[0\]: the box 0,0,0,9 reaches beyond"),
        (IMAGES[1], [-1, 0, 4, 9], r"the box -1,0,4,9 reaches beyond"),
        (IMAGES[1], [0, 0, 10**9, 9], "reaches beyond"),
        (b"text", [0, 0, 1, 1], "reaches beyond"),
        (png(3000, 3000), [0, 0, 1, 1], "more than 1 megapixels"),
    ],
)
def test_boxes_that_no_image_has_are_refused(data, box, message):
    with pytest.raises(UserError, match=message):
        crop_boxes(parsed(instances=[{**b64(data), "box": box}]), 1)
