"""A TF Serving endpoint as a source of embeddings: addresses, retries, and what a failure means."""

from __future__ import annotations

import dataclasses
import re
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from absl import logging

from tfdml.embeddings.backends.base import EncodedImagesBackend
from tfdml.errors import UserError

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
        """The versions that are ready to serve."""

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

    def _too_slow(self, images: int) -> UserError:
        return UserError(
            f"{self.address} gave no answer within {self.timeout:g} s to a request of {images} images; raise `timeout` "
            "or lower `batch_size`"
        )

    def _too_large(self, images: int, reason: str) -> UserError:
        return UserError(
            f"{self.address} refuses a request of {images} images ({reason}); lower `batch_size` or raise the "
            "server's limit"
        )

    def _unknown(self, reason: str) -> UserError:
        return UserError(f"{self.at.server} does not serve {self.at.model}: {reason}")
