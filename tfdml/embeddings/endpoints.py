"""TF Serving endpoints that embed, over gRPC and REST: addresses, requests, retries, and what a failure means."""

from __future__ import annotations

import base64
import dataclasses
import http.client
import json
import re
import time
import urllib.parse
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from absl import logging

from tfdml.embeddings.base import EncodedImagesBackend, ImageRefused
from tfdml.errors import UserError, short_message
from tfdml.io.manifests import parse_json

_Answer = TypeVar("_Answer")
_FORMS = (
    "grpc://host:port/name, rest://host:port/name or http://host:port/v1/models/name, each optionally with /VERSION"
)
_SERVER = r"(?:\[[^\]/]+\]|[^:\[\]/]+):\d+"
_ADDRESS = re.compile(
    rf"(?:(?P<kind>grpc|rest)://(?P<server>{_SERVER})/|(?P<http>https?)://(?P<http_server>{_SERVER})/v1/models/)"
    r"(?P<model>[^/:]+)(?:/(?:versions/)?(?P<version>\d+))?(?::predict|/)?"
)
_ATTEMPTS = 5
_FIRST_PAUSE = 0.25
_GRPC_OPTIONS = [
    # A batch of photographs is far beyond the 4 MB that gRPC allows for by default.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Attempts are ours to space out; the channel must then really try again.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
# What the codes of gRPC and HTTP mean here.
_BUSY = ("UNAVAILABLE", "ABORTED", 429, 502, 503)
_BAD_IMAGE = ("INVALID_ARGUMENT", 400)
_TOO_SLOW = ("DEADLINE_EXCEEDED", 408, 504)
_TOO_LARGE = ("RESOURCE_EXHAUSTED", 413)
_NOT_SERVED = ("NOT_FOUND", 404)
# More than the embeddings of any batch; a server that never ends its answer must not exhaust the memory.
_LONGEST_ANSWER = 2**30


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a model is served.

    Args:
        scheme: `"grpc"`, `"http"` or `"https"`.
        server: Host and port.
        model: The name under which it is served.
        version: Which version; None for the newest.
    """

    scheme: str
    server: str
    model: str
    version: int | None = None

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address.

        Raises:
            UserError: It is of no form known here.

        Example:
            >>> Address.parse("grpc://localhost:8500/cars/3")
            Address(scheme='grpc', server='localhost:8500', model='cars', version=3)
            >>> Address.parse("http://localhost:8501/v1/models/cars").model
            'cars'
        """
        match = _ADDRESS.fullmatch(text)
        if not match:
            raise UserError(f"`model={text}`: write {_FORMS}")
        scheme = {"grpc": "grpc", "rest": "http"}.get(match["kind"] or "", match["http"])
        version = int(match["version"]) if match["version"] else None
        return cls(scheme, match["server"] or match["http_server"], match["model"], version)

    def __str__(self) -> str:
        version = "" if self.version is None else f"/{self.version}"
        if self.scheme == "grpc":
            return f"grpc://{self.server}/{self.model}{version}"
        return f"{self.scheme}://{self.server}/v1/models/{self.model}{version and '/versions'}{version}"


class Unavailable(Exception):
    """The server did not answer, or is too busy to: a retry may help."""


class Endpoint(EncodedImagesBackend):
    """A model that a server serves; the version is fixed at first contact, so that a set is embedded by one model.

    Args:
        address: Where.
        timeout: Seconds that a request may take.
        pause: Seconds before the second attempt of a request that found the server unavailable; doubled before each
            further one, of five.

    Raises:
        UserError: The server cannot be reached, or does not serve the model.
    """

    def __init__(self, address: Address, timeout: float = 60.0, pause: float = _FIRST_PAUSE):
        if timeout <= 0:
            raise UserError(f"`timeout={timeout}`: must be more than 0 seconds")
        self.timeout = timeout
        self._pause = pause
        self.at = address
        self.address = str(address)
        versions = self._with_retries(self._versions)
        if address.version is None:
            if not versions:
                raise UserError(f"{self.address}: no version of the model is ready to serve")
            self.at = dataclasses.replace(address, version=max(versions))
        elif address.version not in versions:
            ready = f"; it serves {', '.join(map(str, sorted(versions)))}" if versions else ""
            raise UserError(f"{address.server} does not serve version {address.version} of {address.model}{ready}")

    @abstractmethod
    def _versions(self) -> list[int]:
        """Return the versions that are ready to serve."""

    @abstractmethod
    def _predict(self, encoded_images: list[bytes]) -> np.ndarray:
        """One request; raises `Unavailable`, `ImageRefused` or a `UserError`."""

    def checksum(self) -> str:
        """Name and version, all that a server states of a model."""
        return f"{self.at.model} version {self.at.version} at {self.at.server}"

    def request(self, encoded_images: list[bytes]) -> np.ndarray:
        """See `EncodedImagesBackend.request`."""
        return self._with_retries(lambda: self._predict(encoded_images))

    def _with_retries(self, call: Callable[[], _Answer]) -> _Answer:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return call()
            except Unavailable as error:
                if attempt == _ATTEMPTS:
                    raise UserError(
                        f"{self.address} cannot be reached, in {_ATTEMPTS} attempts: {error}; is the server up, and is "
                        "this its port?"
                    ) from error
                pause = self._pause * 2 ** (attempt - 1)
                logging.warning("%s: %s; trying again in %.1f s", self.address, error, pause)
                time.sleep(pause)
        raise AssertionError

    def _failure(self, code: str | int, reason: str, images: int) -> Exception:
        """Return what a failed request of so many images means: 0 images where the versions were asked for."""
        if code in _BUSY:
            return Unavailable(reason)
        if code in _BAD_IMAGE and images:
            return ImageRefused(reason)
        if code in _TOO_SLOW:
            return UserError(
                f"{self.address} gave no answer within {self.timeout:g} s to a request of {images} images; raise "
                "`timeout` or lower `batch_size`"
            )
        if code in _TOO_LARGE:
            return UserError(
                f"{self.address} refuses a request of {images} images ({reason}); lower `batch_size` or raise the "
                "server's limit"
            )
        if code in _NOT_SERVED:
            return UserError(f"{self.at.server} does not serve {self.at.model}: {reason}")
        return UserError(f"{self.address} answers {code}: {reason}")


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
        try:
            import grpc
            from tensorflow_serving.apis import model_service_pb2_grpc, prediction_service_pb2_grpc
        except ImportError as error:
            raise UserError(f"`model={address}` needs gRPC stubs: pip install 'tfdml[serving]' ({error})") from error
        self._rpc_error = grpc.RpcError
        channel = grpc.insecure_channel(address.server, options=_GRPC_OPTIONS)
        self._predictions = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(channel)
        super().__init__(address, timeout, pause)

    def _versions(self) -> list[int]:
        from tensorflow_serving.apis import get_model_status_pb2

        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = self.at.model
        answer = self._call(self._models.GetModelStatus, request, 0)
        ready = get_model_status_pb2.ModelVersionStatus.AVAILABLE
        return [status.version for status in answer.model_version_status if status.state == ready]

    def _predict(self, encoded_images: list[bytes]) -> np.ndarray:
        from tensorflow_serving.apis import predict_pb2

        request = predict_pb2.PredictRequest()
        request.model_spec.name = self.at.model
        request.model_spec.version.value = self.at.version
        request.model_spec.signature_name = "serving_default"
        request.inputs["image_bytes"].CopyFrom(tf.make_tensor_proto(encoded_images, tf.string))
        answer = self._call(self._predictions.Predict, request, len(encoded_images))
        if "embedding" not in answer.outputs:
            raise UserError(f"{self.address} gives no output embedding, only {', '.join(answer.outputs)}")
        try:
            return tf.make_ndarray(answer.outputs["embedding"])
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self.address} does not give one vector per image: {short_message(error, named=True)}"
            ) from error

    def _call(self, method: Callable[..., Any], request: Any, images: int) -> Any:
        try:
            return method(request, timeout=self.timeout)
        except self._rpc_error as error:
            reason = short_message(error.details() or "no reason given", "last")
            raise self._failure(error.code().name, reason, images) from None
        except ValueError as error:  # protobuf's limit of 2 GB
            raise self._failure(_TOO_LARGE[0], str(error), images) from error


class RestEndpoint(Endpoint):
    """A model served over HTTP: `POST /v1/models/NAME/versions/VERSION:predict`.

    Args:
        address: Where.
        timeout: Seconds that a request may take.
        pause: As `Endpoint`.

    Raises:
        UserError: As `Endpoint`.
    """

    kind = "rest"

    def __init__(self, address: Address, timeout: float = 60.0, pause: float = 0.25):
        self._path = f"/v1/models/{urllib.parse.quote(address.model)}"
        connection = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        self._connection = connection(address.server, timeout=timeout)
        super().__init__(address, timeout, pause)

    def _versions(self) -> list[int]:
        answer = self._answer("GET", self._path, None, 0)
        try:
            listed = answer.get("model_version_status", [])
            return [int(status["version"]) for status in listed if status.get("state") == "AVAILABLE"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.address} does not answer as TF Serving does: {short_message(error, named=True)}"
            ) from error

    def _predict(self, encoded_images: list[bytes]) -> np.ndarray:
        instances = [{"image_bytes": {"b64": base64.b64encode(image).decode("ascii")}} for image in encoded_images]
        body = json.dumps({"signature_name": "serving_default", "instances": instances}).encode("ascii")
        path = f"{self._path}/versions/{self.at.version}:predict"
        rows = self._answer("POST", path, body, len(encoded_images)).get("predictions", [])
        try:
            if rows and isinstance(rows[0], dict):  # of several outputs
                if "embedding" not in rows[0]:
                    raise UserError(f"{self.address} gives no output embedding, only {', '.join(rows[0])}")
                rows = [row["embedding"] for row in rows]
            return np.array(rows, np.float32)
        except UserError:
            raise
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise UserError(f"{self.address} does not give one vector per image: {error}") from error

    def _answer(self, method: str, path: str, body: bytes | None, images: int) -> dict[str, Any]:
        try:
            self._connection.request(method, path, body, {"Content-Type": "application/json"})
            response = self._connection.getresponse()
            text = response.read(_LONGEST_ANSWER).decode("utf-8", "replace")
        except TimeoutError as error:
            self._connection.close()
            raise self._failure(_TOO_SLOW[0], "", images) from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise Unavailable(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error
        try:
            answer = parse_json(text, self.address)
        except UserError:
            answer = None
        if response.status != 200 or not isinstance(answer, dict):
            said = answer.get("error", text) if isinstance(answer, dict) else text
            raise self._failure(response.status, short_message(str(said), "last"), images)
        return answer


def open_endpoint(address: str, timeout: float = 60.0) -> Endpoint:
    """Return the endpoint at an address, reached.

    Args:
        address: `grpc://host:port/name`, `rest://host:port/name` or `http(s)://host:port/v1/models/name`; a version
            may follow: `/3`.
        timeout: Seconds that a request may take.

    Raises:
        UserError: The address is of no form known here; tensorflow-serving-api is missing; or as `Endpoint`.

    Example:
        >>> open_endpoint("grpc://localhost:8500/cars").checksum()  # doctest: +SKIP
        'cars version 1 at localhost:8500'
    """
    where = Address.parse(address)
    return (GrpcEndpoint if where.scheme == "grpc" else RestEndpoint)(where, timeout)
