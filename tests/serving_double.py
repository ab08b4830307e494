"""A double of TF Serving: the real stubs and the real SavedModels behind a loopback port, and failures on demand."""

import base64
import collections
import concurrent.futures
import contextlib
import http.server
import json
import re
import threading

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

_REST_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class Failure(Exception):
    """What the double answers in place of embeddings."""

    def __init__(self, code, details):
        super().__init__(details)
        self.code = code
        self.details = details


class ServingDouble:
    """Serves SavedModels by name and version.

    Args:
        models: `{name: {version: path of the SavedModel}}`.

    `failures` holds what the next requests meet, first in first out; `requests` counts those for embeddings;
    `grpc_port` and `rest_port` are where it listens.
    """

    def __init__(self, models):
        self.models = {
            name: {int(version): tf.saved_model.load(str(path)) for version, path in versions.items()}
            for name, versions in models.items()
        }
        self.failures = collections.deque()
        self.requests = 0

    def versions(self, name):
        if name not in self.models:
            raise Failure(grpc.StatusCode.NOT_FOUND, f"Could not find any versions of model {name}")
        return sorted(self.models[name])

    def predict(self, name, version, signature, inputs):
        """Runs a signature on tensors by name; `inputs` may be a function of the dtypes that the signature wants."""
        self.requests += 1
        if self.failures:
            failure = self.failures.popleft()
            if callable(failure):
                failure()
            else:
                raise failure
        # A copy: versions may come and go meanwhile, and what a request has begun with it keeps.
        models = dict(self.models[name]) if self.versions(name) else {}
        number = version or max(models)
        if number not in models:
            raise Failure(grpc.StatusCode.NOT_FOUND, f"Servable not found for request: Specific({name}, {version})")
        model = models[number]
        signature = signature or "serving_default"
        if signature not in model.signatures:
            raise Failure(grpc.StatusCode.FAILED_PRECONDITION, f'Serving signature key "{signature}" not found.')
        serve = model.signatures[signature]
        wanted = {key: spec.dtype for key, spec in serve.structured_input_signature[1].items()}
        if callable(inputs):
            inputs = inputs(wanted)
        if set(inputs) != set(wanted):
            reason = f"input size does not match signature: {sorted(inputs)} are not {sorted(wanted)}"
            raise Failure(grpc.StatusCode.INVALID_ARGUMENT, reason)
        try:
            tensors = {
                key: tf.constant(value, tf.string if value.dtype.kind in "OSU" else None)
                for key, value in inputs.items()
            }
            return {key: value.numpy() for key, value in serve(**tensors).items()}
        except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
            raise Failure(grpc.StatusCode.INVALID_ARGUMENT, getattr(error, "message", str(error))) from error


class _Predictions(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, double):
        self.double = double

    def Predict(self, request, context):
        spec = request.model_spec
        try:
            inputs = {key: _array(tensor) for key, tensor in request.inputs.items()}
            outputs = self.double.predict(spec.name, spec.version.value, spec.signature_name, inputs)
        except Failure as failure:
            context.abort(failure.code, failure.details)
        answer = predict_pb2.PredictResponse()
        for key, value in outputs.items():
            answer.outputs[key].CopyFrom(tf.make_tensor_proto(value))
        return answer


class _Models(model_service_pb2_grpc.ModelServiceServicer):
    def __init__(self, double):
        self.double = double

    def GetModelStatus(self, request, context):
        try:
            versions = self.double.versions(request.model_spec.name)
        except Failure as failure:
            context.abort(failure.code, failure.details)
        answer = get_model_status_pb2.GetModelStatusResponse()
        for version in versions:
            answer.model_version_status.add(version=version, state=get_model_status_pb2.ModelVersionStatus.AVAILABLE)
        return answer


def _array(tensor):
    try:
        return tf.make_ndarray(tensor)
    except (TypeError, ValueError) as error:
        raise Failure(grpc.StatusCode.INVALID_ARGUMENT, f"not a tensor: {error}") from error


def _parsed(body):
    try:
        value = json.loads(body)
    except ValueError as error:
        raise Failure(grpc.StatusCode.INVALID_ARGUMENT, f"JSON Parse error: {error}") from error
    if not isinstance(value, dict) or ("instances" in value) == ("inputs" in value):
        raise Failure(grpc.StatusCode.INVALID_ARGUMENT, "Missing 'inputs' or 'instances' key")
    return value


def _columns(body, wanted):
    """The tensors of a JSON request: `instances` are rows, `inputs` columns."""
    if "inputs" in body:
        columns = body["inputs"]
        if not isinstance(columns, dict) or "b64" in columns:
            columns = {next(iter(wanted)): columns}
    else:
        rows = body["instances"]
        if not isinstance(rows, list) or not rows:
            raise Failure(grpc.StatusCode.INVALID_ARGUMENT, "No values in 'instances' array")
        if not all(isinstance(row, dict) and "b64" not in row for row in rows):
            rows = [{next(iter(wanted)): row} for row in rows]
        if any(set(row) != set(wanted) for row in rows):
            reason = f"Failed to process 'instances' list: keys must be equal to: {','.join(sorted(wanted))}"
            raise Failure(grpc.StatusCode.INVALID_ARGUMENT, reason)
        columns = {key: [row[key] for row in rows] for key in wanted}
    return {key: _from_json(value, wanted[key]) for key, value in columns.items() if key in wanted}


def _from_json(value, dtype):
    def leaf(item):
        if isinstance(item, list):
            return [leaf(part) for part in item]
        if isinstance(item, dict) and set(item) == {"b64"} and dtype == tf.string:
            return base64.b64decode(item["b64"])
        kinds = {tf.string: str, tf.int32: int, tf.int64: int, tf.uint8: int}.get(dtype, (int, float))
        if not isinstance(item, kinds) or isinstance(item, bool):
            raise TypeError(f"JSON Value: {item!r} is not of expected type: {dtype.name}")
        return item.encode() if isinstance(item, str) else item

    try:
        return np.array(leaf(value), object if dtype == tf.string else dtype.as_numpy_dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise Failure(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error


def _to_json(array):
    """Strings as they are; outputs whose names end in _bytes would be base64, and none does."""
    return [part.decode() if isinstance(part, bytes) else part for part in array.ravel().tolist()], array.shape


def _nested(flat, shape):
    for length in reversed(shape[1:]):
        flat = [flat[i : i + length] for i in range(0, len(flat), length)] if length else [[]] * shape[0]
    return flat


def _rest_handler(double):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def _send(self, status, value):
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _answer(self, make):
            try:
                self._send(200, make())
            except Failure as failure:
                self._send(_REST_STATUS[failure.code], {"error": failure.details})

        def do_GET(self):
            def status():
                name = self.path.removeprefix("/v1/models/")
                return {
                    "model_version_status": [{"version": str(v), "state": "AVAILABLE"} for v in double.versions(name)]
                }

            self._answer(status)

        def do_POST(self):
            text = self.rfile.read(int(self.headers["Content-Length"]))

            def predictions():
                match = re.fullmatch(r"/v1/models/([^/:]+)(?:/versions/(\d+))?:predict", self.path)
                if not match:
                    raise Failure(grpc.StatusCode.INVALID_ARGUMENT, f"Malformed request: POST {self.path}")
                body = _parsed(text)
                outputs = double.predict(
                    match[1], int(match[2] or 0), body.get("signature_name"), lambda wanted: _columns(body, wanted)
                )
                lists = {key: _nested(*_to_json(value)) for key, value in outputs.items()}
                if "inputs" in body:
                    return {"outputs": lists if len(lists) > 1 else next(iter(lists.values()))}
                if len(lists) == 1:
                    return {"predictions": next(iter(lists.values()))}
                return {
                    "predictions": [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
                }

            self._answer(predictions)

    return Handler


@contextlib.contextmanager
def serving(models):
    """A `ServingDouble` of `models`, listening on `127.0.0.1` until the block ends."""
    double = ServingDouble(models)
    options = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=options)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(_Predictions(double), server)
    model_service_pb2_grpc.add_ModelServiceServicer_to_server(_Models(double), server)
    double.grpc_port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    rest = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _rest_handler(double))
    double.rest_port = rest.server_address[1]
    thread = threading.Thread(target=rest.serve_forever, daemon=True)
    thread.start()
    try:
        yield double
    finally:
        server.stop(None).wait()
        rest.shutdown()
        rest.server_close()
        thread.join()
