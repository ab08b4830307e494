"""A double of TF Serving: the real stubs and the real SavedModels behind a loopback port, and failures on demand."""

import collections
import concurrent.futures
import contextlib

import grpc
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc


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

    `failures` holds what the next requests meet, first in first out; `grpc_port` is where it listens.
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


@contextlib.contextmanager
def serving(models):
    """A `ServingDouble` of `models`, listening on `127.0.0.1` until the block ends."""
    double = ServingDouble(models)
    options = [("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)]
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), options=options)
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(_Predictions(double), server)
    double.grpc_port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield double
    finally:
        server.stop(None).wait()
