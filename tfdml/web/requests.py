"""Requests in TensorFlow Serving's REST format as tensors, their limits, and answers in the same
form."""

import base64
import binascii
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdml.data.decoding import box_fault, encoded_crop, header_size, shown_size
from tfdml.errors import ERROR_TEXT, UserError, counted, user_errors
from tfdml.io.files import parse_json
from tfdml.names import TEXT, clean

# The kinds of JSON's numbers that a kind of tensor takes; all others take any number.
_KINDS = {"u": "iu", "i": "iu", "b": "b"}
_NUMBERS = "iuf"


@dataclasses.dataclass(frozen=True)
class Call:
    """A request as tensors.

    Args:
        signature: The signature that it calls.
        inputs: Arrays by the names of the inputs.
        by_row: Whether it came as `instances`, rows, and not as `inputs`, columns.
        boxes: Of images, the box of each or None, by the names of the inputs.
    """

    signature: str
    inputs: Mapping[str, np.ndarray]
    by_row: bool
    boxes: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)


def parse_call(
    body: bytes, signatures: Mapping[str, Mapping[str, tf.TensorSpec]], most: int
) -> Call:
    r"""Return the tensors of the body of a predict request.

    Args:
        body: JSON with `instances` or `inputs`, and perhaps `signature_name`.
        signatures: By name, the inputs of each.
        most: Most rows.

    Raises:
        UserError: The request is not as it should be.

    Example:
        >>> spec = {"serving_default": {"image_bytes": tf.TensorSpec((None,), tf.string)}}
        >>> parse_call(b'{"instances": [{"b64": "AAE="}]}', spec, 32).inputs["image_bytes"]
        array([b'\x00\x01'], dtype=object)
    """
    request = parse_json(body, "the request")
    if not isinstance(request, dict) or ("instances" in request) == ("inputs" in request):
        raise UserError("the request must be an object with either 'instances' or 'inputs'")
    name = request.get("signature_name") or "serving_default"
    if not isinstance(name, str) or name not in signatures:
        choices = ", ".join(signatures)
        asked = json.dumps(name)[:80]
        raise UserError(f"Serving signature key {asked} not found; there are {choices}")
    specs = signatures[name]
    by_row = "instances" in request
    if by_row:
        columns = _columns_of_rows(request["instances"], specs, most)
    else:
        columns = _columns(request["inputs"], specs, most)
    inputs = {key: _array(key, columns[key], spec) for key, spec in specs.items()}
    lengths = {len(array) for array in inputs.values() if array.ndim}
    if len(lengths) > 1:
        raise UserError(f"the inputs {', '.join(specs)} differ in length")
    images = [key for key, spec in specs.items() if spec.dtype == tf.string and key != "texts"]
    boxes = {key: _boxes_of(columns[key]) for key in images}
    return Call(name, inputs, by_row, boxes)


def _columns_of_rows(rows: Any, specs: Iterable[str], most: int) -> dict[str, Any]:
    """Return the columns of `instances`: a list of objects, or of values of a single input."""
    if not (isinstance(rows, list) and rows):
        raise UserError("'instances' must be a list of at least one value")
    _check_count(rows, most)
    columns: dict[str, Any] = {key: [] for key in specs}
    for row in rows:
        values = _by_input(row, specs, "each of 'instances'")
        for key, column in columns.items():
            column.append(values[key])
    return columns


def _columns(inputs: Any, specs: Iterable[str], most: int) -> dict[str, Any]:
    """Return the columns of `inputs`: an object of them, or that of a single input."""
    _check_count(inputs, most)
    columns = _by_input(inputs, specs, "'inputs'")
    for column in columns.values():
        _check_count(column, most)
    return columns


def _by_input(value: Any, specs: Iterable[str], what: str) -> dict[str, Any]:
    names = sorted(specs)
    is_alone = not isinstance(value, dict) or "b64" in value
    values = {next(iter(specs)): value} if is_alone else value
    if sorted(values) != names:
        raise UserError(
            f"{what} must have the keys {', '.join(names)}, not {', '.join(sorted(values))}"
        )
    return values


def _check_count(rows: Any, most: int) -> None:
    if isinstance(rows, list) and len(rows) > most:
        raise UserError(
            f"the request has {counted(len(rows), 'instance')}; at most {most:,} are taken: send "
            "several requests"
        )


def check_pixels(call: Call, megapixels: float) -> None:
    """Refuse a request whose images have more pixels than this; what their headers state is read,
    and not decoded.

    An image that has more by itself does not count: the model's own limit refuses it, and the
    others get their answers.

    Raises:
        UserError: They have more.
    """
    total = 0
    for array in call.inputs.values():
        if array.dtype == object:
            sizes = map(_pixels, array.ravel())
            total += sum(size for size in sizes if size <= 1e6 * megapixels)
    if total > 1e6 * megapixels:
        raise UserError(
            f"the images have {total / 1e6:,.1f} megapixels; at most {megapixels:,.10g} are taken: "
            "send several requests"
        )


def crop_boxes(call: Call, megapixels: float) -> None:
    """Put what is in its box in the place of each image that has one.

    Args:
        call: The request.
        megapixels: Most that such an image may have.

    Raises:
        UserError: A box reaches beyond its image, or the image has more, or cannot be decoded.
    """
    for name, boxes in call.boxes.items():
        images = call.inputs[name].reshape(-1)
        for row, box in enumerate(boxes):
            if box is None:
                continue
            with user_errors(tf.errors.OpError, f"{name}[{row}]: {ERROR_TEXT}", keep="last"):
                height, width = shown_size(tf.constant(images[row])).numpy().tolist()
                if height * width > 1e6 * megapixels:
                    raise UserError(f"{name}[{row}]: more than {megapixels:,.10g} megapixels")
                if fault := box_fault(box, height, width):
                    raise UserError(f"{name}[{row}]: {fault}")
                images[row] = encoded_crop(images[row], box).numpy()


def _boxes_of(value: Any) -> list[Any]:
    """Return the box next to the bytes of each image, None where there is none."""
    boxes = [item.get("box") for item in (value if isinstance(value, list) else [value])]
    for box in boxes:
        is_list = isinstance(box, list) and len(box) == 4
        if box is not None and not (is_list and all(type(x) is int for x in box)):
            raise UserError(f"a box must be four whole numbers [x1, y1, x2, y2], not {box!r:.80}")
    return boxes


def _pixels(data: bytes) -> int:
    with contextlib.suppress(tf.errors.OpError):  # the model names what is wrong with it
        return math.prod(header_size(tf.constant(data)).numpy().tolist())
    return 0


def _array(name: str, value: Any, spec: tf.TensorSpec) -> np.ndarray:
    """Return the array of a JSON value."""
    if name == "texts":
        array = _texts_of(value)
    else:
        with user_errors(ValueError, f"{name}: {ERROR_TEXT}"):
            array = _bytes_of(value) if spec.dtype == tf.string else _numbers_of(value, spec.dtype)
    if not spec.shape.is_compatible_with(array.shape):
        expected = tuple(spec.shape.as_list())
        raise UserError(f"{name}: its shape is {array.shape}, and must be {expected}")
    return array


def _bytes_of(value: Any) -> np.ndarray:
    """Return an object array of bytes: (N,) of a list, a scalar of one value."""
    if isinstance(value, list):
        return np.array([_decoded(item) for item in value], object)
    return np.array(_decoded(value), object)


def _texts_of(value: Any) -> np.ndarray:
    """Return the UTF-8 bytes of texts, plain strings or as `_bytes_of`, made plain."""
    written = value if isinstance(value, list) else [value]
    with user_errors(ValueError, f"texts: {ERROR_TEXT}"):
        read = [text if isinstance(text, str) else _decoded(text) for text in written]
    plain = [text.encode() for text in clean(read, TEXT, "texts", lambda row: f"text {row}")]
    return np.array(plain if isinstance(value, list) else plain[0], object)


def _numbers_of(value: Any, dtype: tf.DType) -> np.ndarray:
    """Return numbers or booleans as an array of a type.

    Raises:
        ValueError: They are of another kind, or beyond the type.
    """
    array = np.array(value)
    target = np.dtype(dtype.as_numpy_dtype)
    if array.size and array.dtype.kind not in _KINDS.get(target.kind, _NUMBERS):
        raise ValueError(f"its values must be {dtype.name}")
    with np.errstate(all="ignore"):
        converted = array.astype(target)
    if target.kind in "iu" and (array != converted).any():
        raise ValueError(f"a value is beyond {dtype.name}")
    return converted


def _decoded(value: Any) -> bytes:
    """Return the bytes of `{"b64": "..."}`; line breaks, and padding that is left out, are
    accepted."""
    has_bytes = isinstance(value, dict) and isinstance(value.get("b64"), str)
    if not (has_bytes and set(value) <= {"b64", "box"}):
        hint = ", not a plain string, a path or a URL" if isinstance(value, str) else ""
        raise ValueError('its values must be the bytes of image files as {"b64": "..."}' + hint)
    text = value["b64"]
    if text.startswith("data:"):
        raise ValueError("a data URI: send only what follows its comma")
    if re.search("[-_]", text):
        raise ValueError("base64 for URLs, with - and _: send the standard one, with + and /")
    plain = "".join(text.split()).rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"no base64 of the bytes of a file: {error}") from None


def write_answer(outputs: Mapping[str, np.ndarray], by_row: bool) -> bytes:
    """Return the body of the answer.

    Example:
        >>> write_answer({"embedding": np.ones((1, 2), np.float32)}, by_row=True)
        b'{"predictions": [[1.0, 1.0]]}'
    """
    columns = {name: _json_of(array) for name, array in outputs.items()}
    is_alone = len(columns) == 1
    alone = next(iter(columns.values()))
    if not by_row:
        return json.dumps({"outputs": alone if is_alone else columns}).encode()
    if is_alone:
        return json.dumps({"predictions": alone}).encode()
    rows = zip(*columns.values(), strict=True)
    return json.dumps(
        {"predictions": [dict(zip(columns, row, strict=True)) for row in rows]}
    ).encode()


def _json_of(array: np.ndarray) -> Any:
    if array.dtype != object:
        return array.tolist()
    texts = [text.decode("utf-8", "replace") for text in array.ravel()]
    return np.array(texts, object).reshape(array.shape).tolist()
