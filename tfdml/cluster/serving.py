"""An exported model behind HTTP, in TensorFlow Serving's REST format.

Ray Serve runs the replicas, and starts one again that has died. uvicorn answers HTTP: Ray Serve's own proxy limits
neither the size of a request nor the time that one takes to arrive.
"""

import asyncio
import base64
import json
import logging as python_logging
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray.exceptions
import tensorflow as tf
from absl import logging
from ray import serve as ray_serve
from ray.serve._private import replica
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfdml.cluster import LOCAL, ray_session
from tfdml.errors import REASON, UserError, short_message, user_errors
from tfdml.export.saved_model import WARM_UP, warm_up_requests
from tfdml.io.files import parse_json
from tfdml.io.http import address_of, read_body, serving

# Of a local Ray: what waits in shared memory.
_OBJECT_STORE = 512 * 2**20
# Connections at the same time; further requests get 503.
_CONNECTIONS = 100

Signatures = Mapping[str, Mapping[str, tf.TensorSpec]]


def parse_request(body: bytes, signatures: Signatures) -> tuple[str, dict[str, tf.Tensor], bool]:
    r"""Return the signature that a predict request calls, its inputs, and whether they came as `instances`, by row.

    Args:
        body: JSON with `instances` or `inputs`, and perhaps `signature_name`.
        signatures: By name, the inputs of each.

    Raises:
        UserError: The request is not as it should be.

    Example:
        >>> spec = {"serving_default": {"image_bytes": tf.TensorSpec((None,), tf.string)}}
        >>> parse_request(b'{"instances": [{"b64": "AAE="}]}', spec)[1]["image_bytes"].numpy()
        array([b'\x00\x01'], dtype=object)
    """
    request = parse_json(body, "the request")
    if not isinstance(request, dict) or ("instances" in request) == ("inputs" in request):
        raise UserError("the request must be an object with either 'instances' or 'inputs'")
    name = request.get("signature_name") or "serving_default"
    if name not in list(signatures):
        raise UserError(f"Serving signature key {json.dumps(name)[:80]} not found; there are {', '.join(signatures)}")
    specs, by_row = signatures[name], "instances" in request
    values: Any = request["instances" if by_row else "inputs"]
    if by_row and not (isinstance(values, list) and values):
        raise UserError("'instances' must be a list of at least one value")
    rows = values if by_row else [values]
    # The only input of a signature needs no name.
    rows = [row if isinstance(row, dict) and "b64" not in row else {next(iter(specs)): row} for row in rows]
    for row in rows:
        if set(row) != set(specs):
            raise UserError(f"the inputs must be {', '.join(sorted(specs))}, not {', '.join(sorted(row))}")
    columns = {key: [row[key] for row in rows] for key in specs} if by_row else rows[0]
    return name, {key: _tensor(key, columns[key], spec) for key, spec in specs.items()}, by_row


def _tensor(name: str, value: Any, spec: tf.TensorSpec) -> tf.Tensor:
    with user_errors((OverflowError, TypeError, ValueError), f"{name}: {REASON}"):
        if spec.dtype.is_integer:
            np.array(value, spec.dtype.as_numpy_dtype)  # fails beyond its range, where TensorFlow wraps around
        if spec.dtype == tf.string:
            value = [_decoded(text) for text in value] if isinstance(value, list) else _decoded(value)
        tensor = tf.constant(value, spec.dtype)
    if not spec.shape.is_compatible_with(tensor.shape):
        raise UserError(f"{name}: its shape is {tensor.shape}, and must be {spec.shape}")
    return tensor


def _decoded(value: Any) -> bytes:
    if not (isinstance(value, dict) and set(value) == {"b64"} and isinstance(value["b64"], str)):
        raise ValueError('its values must be the bytes of image files as {"b64": "..."}, not paths or URLs')
    return base64.b64decode(value["b64"], validate=True)


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

    Raises:
        UserError: It cannot be loaded, or does not answer its warm-up requests.
    """

    def __init__(self, folder: str):
        # The port for calls between deployments, of which there are none, would be open to all hosts (Ray 2.60).
        replica.add_port_to_grpc_server = lambda server, _: server.add_insecure_port("127.0.0.1:0")
        with user_errors((OSError, tf.errors.OpError, ValueError), f"cannot be loaded: {REASON}", keep="first"):
            # Kept, as its signatures live no longer than it.
            self._model = tf.saved_model.load(folder)
        self._functions = dict(self._model.signatures)
        self._inputs = {name: call.structured_input_signature[1] for name, call in self._functions.items()}
        for name, inputs in warm_up_requests(self._functions if (Path(folder) / WARM_UP).is_file() else {}):
            self._functions[name](**{key: tf.constant(value) for key, value in inputs.items()})

    async def predict(self, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of the answer."""
        return await asyncio.to_thread(self._predicted, body)

    def _predicted(self, body: bytes) -> tuple[int, bytes]:
        try:
            name, inputs, by_row = parse_request(body, self._inputs)
            with user_errors((tf.errors.InvalidArgumentError, TypeError, ValueError), REASON, keep="last"):
                outputs = {key: value.numpy() for key, value in self._functions[name](**inputs).items()}
            return 200, write_answer(outputs, by_row)
        except UserError as error:
            return 400, json.dumps({"error": short_message(error)}).encode()
        except Exception as error:
            logging.exception("a request failed")
            return 500, json.dumps({"error": f"the model failed: {short_message(error, 'last', named=True)}"}).encode()


def start_replicas(folder: Path, name: str, replicas: int) -> Any:
    """Start and warm up the replicas of a version; returns the handle that sends requests to them.

    Args:
        folder: The version, a SavedModel.
        name: What requests call the model.
        replicas: How many processes.

    Raises:
        UserError: It cannot be served.
    """
    deployment = ray_serve.deployment(
        Replica, num_replicas=replicas, max_constructor_retry_count=1, ray_actor_options={"num_cpus": 0}
    )
    try:
        return ray_serve.run(deployment.bind(str(folder)), name=name, route_prefix=None)
    except Exception as error:
        # The reason is in the traceback that Ray Serve keeps.
        status = ray_serve.status().applications.get(name)
        texts = [each.message for each in status.deployments.values()] if status else []
        reasons = [text.strip().splitlines()[-1] for text in texts if "Traceback" in text]
        reason = reasons[0].removeprefix("tfdml.errors.UserError: ") if reasons else short_message(error)
        raise UserError(f"version {folder} is not served: {reason}") from error


def application(handle: Any, name: str, version: str, most_bytes: int, seconds: float) -> Starlette:
    """Return the web application.

    Args:
        handle: Of `start_replicas`.
        name: What requests call the model.
        version: The number of the version.
        most_bytes: Most bytes of a request.
        seconds: How long a request may take to arrive, and the model to answer.
    """

    def check_version(request: Request) -> None:
        if request.path_params.get("version") not in (None, version):
            raise HTTPException(404, f"Servable not found for request: {request.url.path}")

    async def predict(request: Request) -> Response:
        check_version(request)
        body = await read_body(request, most_bytes, seconds)
        try:
            code, answer = await asyncio.wait_for(handle.predict.remote(body), seconds)
        except TimeoutError:
            raise HTTPException(504, f"the model did not answer within {seconds:g} s") from None
        except (ray.exceptions.RayError, RayServeException) as error:
            logging.error("%s", short_message(error, "first", True))
            raise HTTPException(503, "the model is starting again: try again", {"Retry-After": "1"}) from None
        return Response(answer, code, media_type="application/json")

    def status(request: Request) -> Response:
        """Answer with the state of the version, in TF Serving's words."""
        check_version(request)
        runs = ray_serve.status().applications[name].status.value == "RUNNING"
        state = {"state": "AVAILABLE" if runs else "LOADING", "status": {"error_code": "OK", "error_message": ""}}
        return JSONResponse({"model_version_status": [{"version": version, **state}]})

    async def refusal(_: Request, error: Exception) -> Response:
        """Answer with an error in TF Serving's form."""
        if not isinstance(error, HTTPException):
            error = HTTPException(500, "the server failed; its log shows why")
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    routes = []
    for place in (f"/v1/models/{name}", f"/v1/models/{name}/versions/{{version}}"):
        routes += [Route(f"{place}:predict", predict, methods=["POST"]), Route(place, status)]
    return Starlette(routes=routes, exception_handlers={HTTPException: refusal, Exception: refusal})


def serve(
    folder: Path, name: str, listening: socket.socket, replicas: int = 1, most_bytes: int = 2**25, seconds: float = 30.0
) -> None:
    """Serve a version of a model until the process is interrupted; then answer what was begun.

    Args:
        folder: The version, a SavedModel.
        name: What requests call the model.
        listening: The socket.
        replicas: Processes that compute.
        most_bytes: As `application`.
        seconds: As `application`.

    Raises:
        UserError: It cannot be served.
    """
    with ray_session(LOCAL, object_store_bytes=_OBJECT_STORE):
        python_logging.getLogger("ray.serve").setLevel(python_logging.ERROR)
        ray_serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        app = application(start_replicas(folder, name, replicas), name, folder.name, most_bytes, seconds)
        with serving(app, listening, int(2 * seconds), _CONNECTIONS) as thread:
            print(f"serving at {address_of(listening)}/v1/models/{name}", flush=True)
            while thread.is_alive():  # a `join` that a signal ends takes the thread for ended (Python 3.11)
                time.sleep(1)
