"""An exported model behind HTTP, in TensorFlow Serving's REST format.

Ray Serve runs the replicas, and starts one again that has died. uvicorn answers HTTP: Ray Serve's
own proxy limits neither the size of a request nor the time that one takes to arrive.
"""

import asyncio
import dataclasses
import logging as python_logging
import socket
import time
from pathlib import Path
from typing import Any

import ray.exceptions
from absl import logging
from ray import serve as ray_serve
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tfdml.cluster.ray_session import LOCAL, ray_session
from tfdml.cluster.replica import Replica
from tfdml.cluster.settings import ServeSettings
from tfdml.errors import UserError, short_message
from tfdml.io.http import CONNECTIONS, address_of, read_body, serving, while_connected

# Of a local Ray: what waits in shared memory.
_OBJECT_STORE = 512 * 2**20
# Times the largest request that are read and dropped, so that a client that is still sending reads
# the refusal.
_DROPPED = 8


@dataclasses.dataclass(frozen=True)
class Version:
    """The version of a model that is served.

    Args:
        model: What requests call the model.
        number: Its number.
        handle: Sends requests to its replicas.
    """

    model: str
    number: str
    handle: Any


def start_version(folder: Path, model: str, settings: ServeSettings) -> Version:
    """Start the replicas of a version, and warm them up.

    Args:
        folder: The version, a SavedModel.
        model: What requests call the model.
        settings: See `ServeSettings`.

    Raises:
        UserError: It cannot be served.
    """
    deployment = ray_serve.deployment(
        Replica,
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_waiting,
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=2 * settings.timeout,
        ray_actor_options={"num_cpus": 0},
    )
    try:
        handle = ray_serve.run(
            deployment.bind(str(folder), settings), name=model, route_prefix=None
        )
        return Version(model, folder.name, handle)
    except Exception as error:
        reason = _reason(model) or short_message(error)
        raise UserError(f"version {folder} is not served: {reason}") from error


def _reason(application: str) -> str:
    """Return why a version could not be loaded, from the traceback that Ray Serve keeps; empty
    where there is none."""
    status = ray_serve.status().applications.get(application)
    texts = [deployment.message for deployment in status.deployments.values()] if status else []
    last = [text.strip().splitlines()[-1] for text in texts if "Traceback" in text]
    return last[0].removeprefix("tfdml.errors.UserError: ") if last else ""


class _Model:
    """Answers requests about a model.

    Args:
        version: What is served.
        settings: See `ServeSettings`.
    """

    def __init__(self, version: Version, settings: ServeSettings):
        self._version, self._settings, self._waiting = version, settings, 0

    def _check_version(self, request: Request) -> None:
        if request.path_params.get("version") not in (None, self._version.number):
            raise HTTPException(404, f"Servable not found for request: {request.url.path}")

    async def predict(self, request: Request) -> Response:
        """Answer a predict request, unless too many wait already."""
        if self._waiting >= self._settings.max_waiting:
            raise HTTPException(
                503, f"{self._waiting} requests wait already: try again", {"Retry-After": "1"}
            )
        self._waiting += 1
        try:
            code, body = await self._answer(request)
        finally:
            self._waiting -= 1
        return Response(body, code, media_type="application/json")

    async def _answer(self, request: Request) -> tuple[int, bytes]:
        self._check_version(request)
        settings = self._settings
        body = await read_body(
            request, int(settings.max_request_mb * 2**20), settings.timeout, _DROPPED
        )

        async def predicted() -> tuple[int, bytes]:
            response = self._version.handle.predict.remote(body)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()  # drops it, where it has not begun
                raise

        try:
            return await while_connected(request, predicted(), settings.timeout)
        except TimeoutError:
            raise HTTPException(
                504, f"the model did not answer within {settings.timeout:g} s"
            ) from None
        except (ray.exceptions.RayError, RayServeException) as error:
            reason = short_message(error, "first", True)
            logging.error("%s", reason)
            raise HTTPException(
                503, "the model is starting again: try again", {"Retry-After": "1"}
            ) from None

    async def status(self, request: Request) -> Response:
        """Answer with the state of the version, in TF Serving's words."""
        self._check_version(request)
        state = {"state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        return JSONResponse({"model_version_status": [{"version": self._version.number, **state}]})

    def health(self, _: Request) -> Response:
        """Answer whether the replicas run."""
        application = ray_serve.status().applications.get(self._version.model)
        state = application.status.value if application else "NONE"
        return JSONResponse({"status": state}, 200 if state == "RUNNING" else 503)


async def _refusal(request: Request, error: Exception) -> Response:
    """Answer with an error in TF Serving's form."""
    path = request.url.path
    if not isinstance(error, HTTPException):
        error = HTTPException(500, "the server failed; its log shows why")
    elif error.detail == "Not Found" and path.startswith("/v1/models/"):
        error.detail = f"Servable not found for request: {path}"
    elif error.detail in ("Not Found", "Method Not Allowed"):
        status = 400 if error.status_code == 405 else 404
        error = HTTPException(status, f"Malformed request: {request.method} {path}")
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def application(version: Version, settings: ServeSettings) -> Starlette:
    """Return the web application.

    Args:
        version: What is served.
        settings: See `ServeSettings`.
    """
    model, path = _Model(version, settings), f"/v1/models/{version.model}"
    routes = [Route("/healthz", model.health)]
    for place in (path, f"{path}/versions/{{version}}"):
        routes += [
            Route(f"{place}:predict", model.predict, methods=["POST"]),
            Route(place, model.status),
        ]
    return Starlette(
        routes=routes, exception_handlers=dict.fromkeys((HTTPException, Exception), _refusal)
    )


def serve(folder: Path, name: str, listening: socket.socket, settings: ServeSettings) -> None:
    """Serve a version of a model until the process is interrupted; then answer what was begun.

    Args:
        folder: The version, a SavedModel.
        name: What requests call the model.
        listening: The socket.
        settings: See `ServeSettings`.

    Raises:
        UserError: It cannot be served.
    """
    with ray_session(LOCAL, object_store_bytes=_OBJECT_STORE):
        python_logging.getLogger("ray.serve").setLevel(python_logging.ERROR)
        ray_serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        app = application(start_version(folder, name, settings), settings)
        with serving(
            app, listening, int(2 * settings.timeout), settings.max_waiting + CONNECTIONS
        ) as thread:
            print(f"serving at {address_of(listening)}/v1/models/{name}", flush=True)
            while (
                thread.is_alive()
            ):  # a `join` that a signal ends takes the thread for ended (Python 3.11)
                time.sleep(1)
