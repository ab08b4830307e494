"""A served model in a process of Ray Serve: requests in TensorFlow Serving's REST format."""

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.cluster.settings import ServeSettings
from tfdml.data.decoding import header_size
from tfdml.errors import REASON, UserError, short_message, user_errors
from tfdml.export.saved_model import WARM_UP, warm_up_requests
from tfdml.io.files import parse_json


@dataclasses.dataclass(frozen=True)
class Call:
    """A request as tensors.

    Args:
        signature: The signature that it calls.
        inputs: Arrays by the names of the inputs.
        by_row: Whether it came as `instances`, rows, and not as `inputs`, columns.
    """

    signature: str
    inputs: Mapping[str, np.ndarray]
    by_row: bool


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
        raise UserError(
            f"Serving signature key {json.dumps(name)[:80]} not found; there are "
            f"{', '.join(signatures)}"
        )
    specs, by_row = signatures[name], "instances" in request
    values: Any = request["instances" if by_row else "inputs"]
    if by_row and not (isinstance(values, list) and values):
        raise UserError("'instances' must be a list of at least one value")
    _check_count(values, most)
    first, rows = next(iter(specs)), values if by_row else [values]
    rows = [row if isinstance(row, dict) and "b64" not in row else {first: row} for row in rows]
    for row in rows:
        if set(row) != set(specs):
            what = "each of 'instances'" if by_row else "'inputs'"
            raise UserError(
                f"{what} must have the keys {', '.join(sorted(specs))}, not "
                f"{', '.join(sorted(row))}"
            )
    columns = {key: [row[key] for row in rows] for key in specs} if by_row else rows[0]
    for column in columns.values():
        _check_count(column, most)
    inputs = {key: _array(key, columns[key], spec) for key, spec in specs.items()}
    if len({len(value) for value in inputs.values() if value.ndim}) > 1:
        raise UserError(f"the inputs {', '.join(specs)} differ in length")
    return Call(name, inputs, by_row)


def _check_count(rows: Any, most: int) -> None:
    if isinstance(rows, list) and len(rows) > most:
        raise UserError(
            f"the request has {len(rows):,} instances; at most {most:,} are taken: send several "
            "requests"
        )


def check_pixels(call: Call, megapixels: float) -> None:
    """Refuse a request whose images have more pixels than this; what their headers state is read,
    and not decoded.

    An image that has more by itself does not count: the model's own limit refuses it, and the
    others get their answers.

    Raises:
        UserError: They have more.
    """
    images = [
        data for value in call.inputs.values() if value.dtype == object for data in value.ravel()
    ]
    count = sum(pixels for pixels in map(_pixels, images) if pixels <= 1e6 * megapixels) / 1e6
    if count > megapixels:
        raise UserError(
            f"the images have {count:,.1f} megapixels; at most {megapixels:,.10g} are taken: send "
            "several requests"
        )


def _pixels(data: bytes) -> int:
    with contextlib.suppress(tf.errors.OpError):  # the model names what is wrong with it
        return math.prod(header_size(tf.constant(data)).numpy().tolist())
    return 0


def _array(name: str, value: Any, spec: tf.TensorSpec) -> np.ndarray:
    """Return the array of a JSON value."""
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    with user_errors(ValueError, f"{name}: {REASON}"):
        if spec.dtype == tf.string:
            array = np.array(
                list(map(_decoded, value)) if isinstance(value, list) else _decoded(value), object
            )
        else:
            array = np.array(value)
            if array.size and array.dtype.kind not in {"u": "iu", "i": "iu", "b": "b"}.get(
                dtype.kind, "iuf"
            ):
                raise ValueError(f"its values must be {spec.dtype.name}")
            with np.errstate(all="ignore"):
                original, array = array, array.astype(dtype)
            if dtype.kind in "iu" and (original != array).any():
                raise ValueError(f"a value is beyond {spec.dtype.name}")
    if not spec.shape.is_compatible_with(array.shape):
        raise UserError(
            f"{name}: its shape is {array.shape}, and must be {tuple(spec.shape.as_list())}"
        )
    return array


def _decoded(value: Any) -> bytes:
    if not (isinstance(value, dict) and set(value) == {"b64"} and isinstance(value["b64"], str)):
        hint = ", not a plain string, a path or a URL" if isinstance(value, str) else ""
        raise ValueError('its values must be the bytes of image files as {"b64": "..."}' + hint)
    text = value["b64"]
    if text.startswith("data:"):
        raise ValueError("a data URI: send only what follows its comma")
    if re.search("[-_]", text):
        raise ValueError("base64 for URLs, with - and _: send the standard one, with + and /")
    return base64.b64decode(text, validate=True)


def write_answer(outputs: Mapping[str, np.ndarray], by_row: bool) -> bytes:
    """Return the body of the answer.

    Example:
        >>> write_answer({"embedding": np.ones((1, 2), np.float32)}, by_row=True)
        b'{"predictions": [[1.0, 1.0]]}'
    """

    texts = np.vectorize(lambda text: text.decode("utf-8", "replace"), otypes=[object])
    columns: dict[str, Any] = {
        name: (texts(value) if value.dtype == object else value).tolist()
        for name, value in outputs.items()
    }
    alone = next(iter(columns.values())) if len(columns) == 1 else None
    if not by_row:
        return json.dumps({"outputs": columns if alone is None else alone}).encode()
    if alone is None:
        alone = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
    return json.dumps({"predictions": alone}).encode()


class Replica:
    """A version of a model in a process of Ray Serve.

    Args:
        folder: The SavedModel.
        settings: See `ServeSettings`.

    Raises:
        UserError: It cannot be loaded, or does not answer its warm-up requests.
    """

    def __init__(self, folder: str, settings: ServeSettings):
        from ray.serve._private import replica

        # The port for calls between deployments, of which there are none, would be open to all
        # hosts (Ray 2.60).
        replica.add_port_to_grpc_server = lambda server, _: server.add_insecure_port("127.0.0.1:0")
        with user_errors(
            (OSError, tf.errors.OpError, ValueError), f"cannot be loaded: {REASON}", keep="first"
        ):
            # Kept, as its signatures live no longer than it.
            self._model = tf.saved_model.load(folder)
        self._functions = dict(self._model.signatures)
        self._inputs = {
            name: call.structured_input_signature[1] for name, call in self._functions.items()
        }
        self._settings, self._thread = settings, concurrent.futures.ThreadPoolExecutor(1)
        for name, inputs in warm_up_requests(
            self._functions if (Path(folder) / WARM_UP).is_file() else {}
        ):
            for output, value in self._compute(name, inputs).items():
                if value.dtype.kind == "f" and np.isnan(value).any():
                    raise UserError(
                        f"its signature {name} answers a warm-up request with NaN as {output}"
                    )

    async def predict(self, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of the answer."""
        settings = self._settings
        try:
            call = await asyncio.to_thread(parse_call, body, self._inputs, settings.max_instances)
            await asyncio.to_thread(check_pixels, call, settings.max_megapixels)
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(
                self._thread, self._compute, call.signature, call.inputs
            )
            return 200, await asyncio.to_thread(write_answer, answer, call.by_row)
        except UserError as error:
            return 400, _error(short_message(error))
        except Exception as error:
            logging.exception("a request failed")
            return 500, _error(f"the model failed: {short_message(error, 'last', named=True)}")

    def _compute(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = {
            name: tf.constant(value, tf.string if value.dtype == object else None)
            for name, value in inputs.items()
        }
        with user_errors(
            (tf.errors.InvalidArgumentError, TypeError, ValueError), REASON, keep="last"
        ):
            return {
                name: value.numpy() for name, value in self._functions[signature](**tensors).items()
            }


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()
