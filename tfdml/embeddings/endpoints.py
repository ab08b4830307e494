"""TF Serving endpoints that embed, over REST: addresses, requests, retries, and what a failure means."""

import base64
import http.client
import json
import re
import time
from typing import Any

import numpy as np
from absl import logging

from tfdml.embeddings.base import EncodedImagesBackend, ImageRefused
from tfdml.errors import REASON, UserError, short_message, user_errors
from tfdml.io.manifests import parse_json

_ADDRESS = re.compile(
    r"(?P<scheme>https?)://(?P<server>(?:\[[^\]/]+\]|[^:\[\]/]+):\d+)(?P<path>/v1/models/(?P<model>[\w.-]+))"
    r"(?:/versions/(?P<version>\d+))?(?::predict|/)?",
    re.ASCII,
)
_ATTEMPTS = 5
_FIRST_PAUSE = 0.25
# What HTTP's codes mean here.
_BUSY, _TOO_SLOW, _BAD_IMAGE, _TOO_LARGE, _NOT_SERVED = (429, 502, 503), (408, 504), 400, 413, 404
# More than the embeddings of any batch; a server that never ends its answer must not exhaust the memory.
_LONGEST_ANSWER = 2**30


class Unavailable(Exception):
    """The server did not answer, or is too busy to: a retry may help."""


class Endpoint(EncodedImagesBackend):
    """A model that a server serves; the version is fixed at first contact, so that a set is embedded by one model.

    Args:
        address: `http://host:port/v1/models/NAME` or `https://...`; `/versions/VERSION` may follow.
        timeout: Seconds that a request may take.
        pause: Seconds before the second attempt of a request that found the server unavailable; doubled before each
            further one, of five.

    Attributes:
        version: The version that is asked.

    Raises:
        UserError: The address is of another form, the server cannot be reached, or it does not serve the model.

    Example:
        >>> Endpoint("http://localhost:8501/v1/models/cars").checksum()  # doctest: +SKIP
        'cars version 1 at localhost:8501'
    """

    kind = "rest"

    def __init__(self, address: str, timeout: float = 60.0, pause: float = _FIRST_PAUSE):
        if not 0 < timeout < float("inf"):
            raise UserError(f"`timeout={timeout}`: must be more than 0 seconds, and finite")
        match = _ADDRESS.fullmatch(address)
        if not match:
            raise UserError(f"`model={address}`: write http://host:port/v1/models/NAME, or with /versions/VERSION")
        self.address, self.timeout, self._pause = address, timeout, pause
        self._server, self._model, self._path = match["server"], match["model"], match["path"]
        connection = http.client.HTTPSConnection if match["scheme"] == "https" else http.client.HTTPConnection
        self._connection = connection(self._server, timeout=timeout)
        versions = self._versions()
        if not versions:
            raise UserError(f"{address}: no version of the model is ready to serve")
        self.version = int(match["version"] or max(versions))
        if self.version not in versions:
            wanted = f"version {self.version} of {self._model}"
            raise UserError(f"{self._server} does not serve {wanted}; it serves {sorted(versions)}")

    def checksum(self) -> str:
        """Name and version, all that a server states of a model."""
        return f"{self._model} version {self.version} at {self._server}"

    def _versions(self) -> list[int]:
        """Return the versions that are ready to serve."""
        listed = self._answer("GET", self._path, None, 0).get("model_version_status", [])
        kinds = (AttributeError, KeyError, TypeError, ValueError)
        with user_errors(kinds, f"{self.address} does not answer as TF Serving does: {REASON}", named=True):
            return [int(status["version"]) for status in listed if status.get("state") == "AVAILABLE"]

    def request(self, encoded_images: list[bytes]) -> np.ndarray:
        """See `EncodedImagesBackend.request`."""
        instances = [{"image_bytes": {"b64": base64.b64encode(image).decode("ascii")}} for image in encoded_images]
        body = json.dumps({"signature_name": "serving_default", "instances": instances}).encode("ascii")
        path = f"{self._path}/versions/{self.version}:predict"
        rows = self._answer("POST", path, body, len(encoded_images)).get("predictions", [])
        kinds = (KeyError, OverflowError, TypeError, ValueError)
        with user_errors(kinds, f"{self.address} does not give one vector per image: {REASON}"):
            if rows and isinstance(rows[0], dict):  # of several outputs
                if "embedding" not in rows[0]:
                    raise UserError(f"{self.address} gives no output embedding, only {', '.join(rows[0])}")
                rows = [row["embedding"] for row in rows]
            return np.array(rows, np.float32)

    def _answer(self, *request: Any) -> dict[str, Any]:
        """Return the answer to a request, which is sent again while the server is away; see `_answer_once`."""
        for pause in [self._pause * 2**attempt for attempt in range(_ATTEMPTS - 1)]:
            try:
                return self._answer_once(*request)
            except Unavailable as error:
                logging.warning("%s: %s; trying again in %.1f s", self.address, error, pause)
                time.sleep(pause)
        why = f"{REASON}; is the server up, and is this its REST port?"
        with user_errors(Unavailable, f"{self.address} cannot be reached, in {_ATTEMPTS} attempts: {why}"):
            return self._answer_once(*request)

    def _answer_once(self, method: str, path: str, body: bytes | None, images: int) -> dict[str, Any]:
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

    def _failure(self, status: int, reason: str, images: int) -> Exception:
        """Return what a failed request of so many images means: 0 images where the versions were asked for."""
        if status in _BUSY:
            return Unavailable(reason)
        if status == _BAD_IMAGE and images:
            return ImageRefused(reason)
        if status in _TOO_SLOW:
            asked = f"{self.timeout:g} s to a request of {images} images"
            return UserError(f"{self.address} gave no answer within {asked}; raise `timeout` or lower `batch_size`")
        if status == _TOO_LARGE:
            return UserError(f"{self.address} refuses a request of {images} images ({reason}); lower `batch_size`")
        if status == _NOT_SERVED:
            return UserError(f"{self._server} does not serve {self._model}: {reason}")
        return UserError(f"{self.address} answers {status}: {reason}")
