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
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

_REST_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
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

    `failures` holds what the next requests meet, first in first out; `grpc_port` and `rest_port` are where it listens.
    """

    def __init__(self, models):
        self.models = {
            name: {int(version): tf.saved_model.load(str(path)) for version, path in versions.items()}
            for name, versions in models.items()
        }
        self.failures = collections.deque()

    def predict(self, name, version, signature, inputs):
        """Runs a signature on columns by name."""
        if self.failures:
            raise self.failures.popleft()
        versions = self.models.get(name, {})
        model = versions.get(version or max(versions, default=None))
        if model is None:
            raise Failure(grpc.StatusCode.NOT_FOUND, f"Servable not found for request: Specific({name}, {version})")
        if signature not in model.signatures:
            raise Failure(grpc.StatusCode.FAILED_PRECONDITION, f'Serving signature key "{signature}" not found.')
        serve = model.signatures[signature]
        dtypes = {key: spec.dtype for key, spec in serve.structured_input_signature[1].items()}
        if set(inputs) != set(dtypes):
            reason = f"input size does not match signature: {sorted(inputs)} are not {sorted(dtypes)}"
            raise Failure(grpc.StatusCode.INVALID_ARGUMENT, reason)
        try:
            tensors = {key: tf.constant(value, dtypes[key]) for key, value in inputs.items()}
            return {key: value.numpy() for key, value in serve(**tensors).items()}
        except (tf.errors.InvalidArgumentError, TypeError, ValueError) as error:
            raise Failure(grpc.StatusCode.INVALID_ARGUMENT, getattr(error, "message", str(error))) from error


class _Predictions(prediction_service_pb2_grpc.PredictionServiceServicer):
    def __init__(self, double):
        self.double = double

    def Predict(self, request, context):
        spec = request.model_spec
        try:
            inputs = {key: tf.make_ndarray(tensor) for key, tensor in request.inputs.items()}
            outputs = self.double.predict(spec.name, spec.version.value, spec.signature_name, inputs)
        except Failure as failure:
            context.abort(failure.code, failure.details)
        answer = predict_pb2.PredictResponse()
        for key, value in outputs.items():
            answer.outputs[key].CopyFrom(tf.make_tensor_proto(value))
        return answer


def _from_json(value):
    """A column of a request, whose bytes are {"b64": text}."""
    if isinstance(value, list):
        return [_from_json(part) for part in value]
    return base64.b64decode(value["b64"]) if isinstance(value, dict) else value


def _to_json(array):
    """Rows of an output; strings as they are, as no output's name ends in _bytes."""
    if array.dtype != object:
        return array
    return np.array([part.decode() for part in array.ravel()], object).reshape(array.shape)


def _rest_handler(double):
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name, version = re.fullmatch(r"/v1/models/([^/:]+)(?:/versions/(\d+))?:predict", self.path).groups()
            inputs = {key: _from_json(value) for key, value in body["inputs"].items()}
            try:
                outputs = double.predict(name, int(version or 0), body["signature_name"], inputs)
                columns = {key: _to_json(value).tolist() for key, value in outputs.items()}
                status, answer = 200, {"outputs": columns if len(columns) > 1 else next(iter(columns.values()))}
            except Failure as failure:
                status, answer = _REST_STATUS[failure.code], {"error": failure.details}
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return Handler


@contextlib.contextmanager
def serving(models):
    """A `ServingDouble` of `models`, listening on `127.0.0.1` until the block ends."""
    double = ServingDouble(models)
    options = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=options)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(_Predictions(double), server)
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
