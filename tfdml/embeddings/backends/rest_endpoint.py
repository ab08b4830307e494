"""TF Serving over REST: JSON with base64, for where gRPC does not get through."""

from __future__ import annotations

import base64
import http.client
import json
import urllib.parse
from typing import Any

import numpy as np

from tfdml.embeddings.backends.base import ImageRefused, short_reason
from tfdml.embeddings.backends.endpoint import Address, Endpoint, Unavailable
from tfdml.errors import UserError, short_message
from tfdml.manifests import parse_json

_BUSY = (429, 502, 503)
# More than the embeddings of any batch; a server that never ends its answer must not exhaust the memory.
_LONGEST_ANSWER = 2**30


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
            raise UserError(f"{self.address} does not answer as TF Serving does: {short_message(error)}") from error

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
            raise self._too_slow(images) from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise Unavailable(getattr(error, "strerror", None) or str(error) or type(error).__name__) from error
        try:
            answer = parse_json(text, self.address)
        except UserError:
            answer = None
        if response.status != 200 or not isinstance(answer, dict):
            said = answer.get("error", text) if isinstance(answer, dict) else text
            raise self._explained(response.status, short_reason(str(said)), images)
        return answer

    def _explained(self, status: int, reason: str, images: int) -> Exception:
        if status in _BUSY:
            return Unavailable(reason)
        if status == 400 and images:
            return ImageRefused(reason)
        if status == 404:
            return self._unknown(reason)
        if status in (408, 504):
            return self._too_slow(images)
        if status == 413:
            return self._too_large(images, reason)
        return UserError(f"{self.address} answers {status}, not as TF Serving does: {reason}")
