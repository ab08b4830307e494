"""TF Serving over gRPC."""

from __future__ import annotations

import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_status_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
)

from tfdml.embeddings.backends.base import ImageRefused, short_reason
from tfdml.embeddings.backends.endpoint import Address, Endpoint, Unavailable
from tfdml.errors import UserError, short_message

_OPTIONS = [
    # A batch of photographs is far beyond the 4 MB that gRPC allows for by default.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Attempts are ours to space out; the channel must then really try again.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_AVAILABLE = get_model_status_pb2.ModelVersionStatus.AVAILABLE
_BUSY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)


class GrpcEndpoint(Endpoint):
    """A model served over gRPC: `PredictionService.Predict` with the signature `serving_default`.

    Args:
        address: Where.
        timeout: Seconds that a request may take.
        pause: As `Endpoint`.

    Raises:
        UserError: As `Endpoint`.
    """

    kind = "grpc"

    def __init__(self, address: Address, timeout: float = 60.0, pause: float = 0.25):
        self._channel = grpc.insecure_channel(address.server, options=_OPTIONS)
        self._predictions = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        super().__init__(address, timeout, pause)

    def _versions(self) -> list[int]:
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = self.at.model
        try:
            answer = self._models.GetModelStatus(request, timeout=self.timeout)
        except grpc.RpcError as error:
            raise self._explained(error, 0) from None
        return [status.version for status in answer.model_version_status if status.state == _AVAILABLE]

    def _predict(self, encoded_images: list[bytes]) -> np.ndarray:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = self.at.model
        request.model_spec.version.value = self.at.version
        request.model_spec.signature_name = "serving_default"
        request.inputs["image_bytes"].CopyFrom(tf.make_tensor_proto(encoded_images, tf.string))
        try:
            answer = self._predictions.Predict(request, timeout=self.timeout)
        except grpc.RpcError as error:
            raise self._explained(error, len(encoded_images)) from None
        except ValueError as error:  # protobuf's limit of 2 GB
            raise self._too_large(len(encoded_images), str(error)) from error
        if "embedding" not in answer.outputs:
            raise UserError(f"{self.address} gives no output embedding, only {', '.join(answer.outputs)}")
        try:
            return tf.make_ndarray(answer.outputs["embedding"])
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.address} does not give one vector per image: {short_message(error)}") from error

    def _explained(self, error: grpc.RpcError, images: int) -> Exception:
        code, details = error.code(), short_reason(error.details() or "no reason given")
        if code in _BUSY:
            return Unavailable(details)
        if code == grpc.StatusCode.INVALID_ARGUMENT and images:
            return ImageRefused(details)
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._too_slow(images)
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            return self._too_large(images, details)
        if code == grpc.StatusCode.NOT_FOUND:
            return self._unknown(details)
        return UserError(f"{self.address} answers {code.name}: {details}")
