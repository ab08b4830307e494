"""A served model in a process of Ray Serve: requests in TensorFlow Serving's REST format, computed in batches."""

import asyncio
import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.data.decoding import format_of
from tfdml.data.images import read_header
from tfdml.errors import REASON, UserError, short_message, user_errors
from tfdml.export.saved_model import WARM_UP, warm_up_requests
from tfdml.io.files import parse_json
from tfdml.training.settings import Settings, choice, not_negative, positive


@dataclasses.dataclass(frozen=True)
class ServeSettings(Settings):
    """How a model is served.

    Args:
        replicas: Processes that compute.
        max_batch_size: Most images of a batch that the model computes at once.
        batch_timeout_ms: Milliseconds that an incomplete batch waits for further requests.
        max_waiting: Most requests that are not answered yet. Further ones are refused with 503.
        max_instances: Most images of a request.
        max_request_mb: Most megabytes of a request.
        max_megapixels: Most megapixels of the images of a request, as their headers state them.
        timeout: Seconds that a request may take to arrive, and the model to answer.

    Raises:
        UserError: A value is out of range.
    """

    replicas: int = choice(1, check=positive)
    max_batch_size: int = choice(32, check=positive)
    batch_timeout_ms: float = choice(2.0, check=not_negative)
    max_waiting: int = choice(100, check=positive)
    max_instances: int = choice(256, check=positive)
    max_request_mb: float = choice(32.0, check=positive)
    max_megapixels: float = choice(400.0, check=positive)
    timeout: float = choice(30.0, check=positive)


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

    @property
    def rows(self) -> int:
        """Return the number of images or embeddings."""
        return max((len(value) for value in self.inputs.values() if value.ndim), default=1)

    @property
    def key(self) -> tuple:
        """Return what calls have in common that may be computed as one."""
        # A retriever answers with as many columns as the largest `k` asks for.
        most = {name: value.max(initial=0) for name, value in self.inputs.items() if value.dtype.kind == "i"}
        alone = {name: value.item() for name, value in self.inputs.items() if not value.ndim}
        shapes = {name: value.shape[1:] for name, value in self.inputs.items()}
        return self.signature, *((*part.items(),) for part in (most, alone, shapes))


def parse_call(body: bytes, signatures: Mapping[str, Mapping[str, tf.TensorSpec]], most: int) -> Call:
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
        raise UserError(f"Serving signature key {json.dumps(name)[:80]} not found; there are {', '.join(signatures)}")
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
            raise UserError(f"{what} must have the keys {', '.join(sorted(specs))}, not {', '.join(sorted(row))}")
    columns = {key: [row[key] for row in rows] for key in specs} if by_row else rows[0]
    for column in columns.values():
        _check_count(column, most)
    inputs = {key: _array(key, columns[key], spec) for key, spec in specs.items()}
    if len({len(value) for value in inputs.values() if value.ndim}) > 1:
        raise UserError(f"the inputs {', '.join(specs)} differ in length")
    return Call(name, inputs, by_row)


def _check_count(rows: Any, most: int) -> None:
    if isinstance(rows, list) and len(rows) > most:
        raise UserError(f"the request has {len(rows):,} instances; at most {most:,} are taken: send several requests")


def check_pixels(call: Call, megapixels: float) -> None:
    """Refuse a request whose images have more pixels than this; what their headers state is read, and not decoded.

    An image that has more by itself does not count: the model's own limit refuses it, and the others get their answers.

    Raises:
        UserError: They have more.
    """
    images = [data for value in call.inputs.values() if value.dtype == object for data in value.ravel()]
    count = sum(pixels for pixels in map(_pixels, images) if pixels <= 1e6 * megapixels) / 1e6
    if count > megapixels:
        raise UserError(
            f"the images have {count:,.1f} megapixels; at most {megapixels:,.10g} are taken: send several requests"
        )


def _pixels(data: bytes) -> int:
    kind = format_of(data[:16])
    with contextlib.suppress(Exception):  # the model names what is wrong with it
        return math.prod(read_header(io.BytesIO(data), kind).size) if kind else 0
    return 0


def _array(name: str, value: Any, spec: tf.TensorSpec) -> np.ndarray:
    """Return the array of a JSON value."""
    dtype = np.dtype(spec.dtype.as_numpy_dtype)
    with user_errors(ValueError, f"{name}: {REASON}"):
        if spec.dtype == tf.string:
            array = np.array(list(map(_decoded, value)) if isinstance(value, list) else _decoded(value), object)
        else:
            array = np.array(value)
            if array.size and array.dtype.kind not in {"u": "iu", "i": "iu", "b": "b"}.get(dtype.kind, "iuf"):
                raise ValueError(f"its values must be {spec.dtype.name}")
            with np.errstate(all="ignore"):
                original, array = array, array.astype(dtype)
            if dtype.kind in "iu" and (original != array).any():
                raise ValueError(f"a value is beyond {spec.dtype.name}")
    if not spec.shape.is_compatible_with(array.shape):
        raise UserError(f"{name}: its shape is {array.shape}, and must be {tuple(spec.shape.as_list())}")
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
        name: (texts(value) if value.dtype == object else value).tolist() for name, value in outputs.items()
    }
    alone = next(iter(columns.values())) if len(columns) == 1 else None
    if not by_row:
        return json.dumps({"outputs": columns if alone is None else alone}).encode()
    if alone is None:
        alone = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
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
        from ray import serve
        from ray.serve._private import replica

        # The port for calls between deployments, of which there are none, would be open to all hosts (Ray 2.60).
        replica.add_port_to_grpc_server = lambda server, _: server.add_insecure_port("127.0.0.1:0")
        with user_errors((OSError, tf.errors.OpError, ValueError), f"cannot be loaded: {REASON}", keep="first"):
            # Kept, as its signatures live no longer than it.
            self._model = tf.saved_model.load(folder)
        self._functions = dict(self._model.signatures)
        self._inputs = {name: call.structured_input_signature[1] for name, call in self._functions.items()}
        self._settings, self._thread = settings, concurrent.futures.ThreadPoolExecutor(1)
        for name, inputs in warm_up_requests(self._functions if (Path(folder) / WARM_UP).is_file() else {}):
            for output, value in self._compute(name, inputs).items():
                if value.dtype.kind == "f" and np.isnan(value).any():
                    raise UserError(f"its signature {name} answers a warm-up request with NaN as {output}")
        most = settings.max_batch_size
        self._batched = serve.batch(
            max_batch_size=most,
            batch_wait_timeout_s=settings.batch_timeout_ms / 1e3,
            batch_size_fn=lambda calls: sum(min(call.rows, most) for call in calls),
        )(self._together)

    async def predict(self, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of the answer."""
        settings = self._settings
        try:
            call = await asyncio.to_thread(parse_call, body, self._inputs, settings.max_instances)
            await asyncio.to_thread(check_pixels, call, settings.max_megapixels)
            answer = await self._batched(call)
            if isinstance(answer, Exception):
                raise answer
            return 200, await asyncio.to_thread(write_answer, answer, call.by_row)
        except UserError as error:
            return 400, _error(short_message(error))
        except Exception as error:
            logging.exception("a request failed")
            return 500, _error(f"the model failed: {short_message(error, 'last', named=True)}")

    async def _together(self, calls: list[Call]) -> list[Any]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answers, calls)

    def _answers(self, calls: Sequence[Call]) -> list[Any]:
        """Return for each call its outputs or the error."""
        alike: dict[tuple, list[int]] = collections.defaultdict(list)
        for place, call in enumerate(calls):
            alike[call.key].append(place)
        answers: list[Any] = [None] * len(calls)
        for places in alike.values():
            group = [calls[place] for place in places]
            outputs = self._of_alike(group) or [self._alone(call) for call in group]
            for place, answer in zip(places, outputs, strict=True):
                answers[place] = answer
        return answers

    def _of_alike(self, calls: Sequence[Call]) -> list[dict[str, np.ndarray]]:
        """Return the outputs of calls that are computed as one; none where that fails."""
        columns = {name: [call.inputs[name] for call in calls] for name in calls[0].inputs}
        merged = {name: np.concatenate(parts) if parts[0].ndim else parts[0] for name, parts in columns.items()}
        ends = np.cumsum([call.rows for call in calls])
        with contextlib.suppress(UserError, tf.errors.OpError):
            outputs = self._compute(calls[0].signature, merged)
            if all(value.ndim and len(value) == ends[-1] for value in outputs.values()):
                parts = zip(*(np.split(value, ends[:-1]) for value in outputs.values()), strict=True)
                return [dict(zip(outputs, part, strict=True)) for part in parts]
        return []

    def _alone(self, call: Call) -> Any:
        """Return the outputs of a call, or its error: what is bad in one fails no other."""
        try:
            return self._compute(call.signature, call.inputs)
        except (UserError, tf.errors.OpError) as error:
            return error

    def _compute(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = {
            name: tf.constant(value, tf.string if value.dtype == object else None) for name, value in inputs.items()
        }
        with user_errors((tf.errors.InvalidArgumentError, TypeError, ValueError), REASON, keep="last"):
            return {name: value.numpy() for name, value in self._functions[signature](**tensors).items()}


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()
