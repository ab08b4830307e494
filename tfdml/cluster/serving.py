"""An exported model behind HTTP, in TensorFlow Serving's REST format: its versions, and the web server.

Ray Serve runs the replicas, puts the requests that wait into batches, and starts a replica again that has died. uvicorn
answers HTTP: Ray Serve's own proxy limits neither the size of a request nor the time that one takes to arrive.
"""

import asyncio
import dataclasses
import logging as python_logging
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
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
from tfdml.cluster.replica import Replica, ServeSettings
from tfdml.errors import UserError, short_message
from tfdml.export.saved_model import version_numbers
from tfdml.io.http import CONNECTIONS, address_of, read_body, serving, while_connected

# Of a local Ray: what waits in shared memory.
_OBJECT_STORE = 512 * 2**20
# Times the largest request that are read and dropped, so that a client that is still sending reads the refusal.
_DROPPED = 8
# What Prometheus reads, next to the metrics of the process.
_REQUESTS = prometheus.Counter("tfdml_serve_requests", "Predict requests by status of the answer", ["code"])
_SECONDS = prometheus.Histogram(
    "tfdml_serve_request_seconds", "From the header of a predict request to its answer, where it has one"
)
_WAITING = prometheus.Gauge("tfdml_serve_waiting_requests", "Requests that are not answered yet")


@dataclasses.dataclass
class Version:
    """A version that is in service, or was.

    Args:
        number: Its number.
        application: Its name in Ray Serve.
        handle: Sends requests to its replicas.
        signatures: As `Replica.signatures`.
    """

    number: int
    application: str
    handle: Any
    signatures: Mapping[str, Any]


class Versions:
    """The versions of a model: the newest that works is in service.

    A new one is loaded and warmed up in replicas of its own before it takes over. Then the one before answers what it
    has begun, and ends. One that cannot be loaded is left out until its files change. Without the folder of the
    version in service, the newest of the others takes over.

    Args:
        folder: Where versions lie, numbered.
        name: The model's.
        settings: See `ServeSettings`.

    Attributes:
        current: The version in service.
        status: By number, the state in TF Serving's words, and an error or empty.
    """

    def __init__(self, folder: Path, name: str, settings: ServeSettings):
        self.folder, self.name, self._settings = folder, name, settings
        self.current: Version | None = None
        self.status: dict[int, tuple[str, str]] = {}
        self._broken: dict[int, Any] = {}
        self._loads = 0

    def update(self) -> None:
        """Put the newest version in service if it is another, and let the one before end."""
        there = {number: files for number in version_numbers(self.folder) if (files := self._files(number))}
        before = self.current
        for number in sorted(there, reverse=True):
            if before and number == before.number:
                break
            if self._broken.get(number) == there[number]:
                continue
            if self._load(number):
                break
            self._broken[number] = there[number]
        numbers = {*there, self.current and self.current.number}
        self.status = {number: state for number, state in self.status.items() if number in numbers}
        if before is not None and before is not self.current:
            self._end(before)

    def _files(self, number: int) -> list[tuple[str, int]]:
        """Return the files of a version with their times, to see that they change; none where it has no SavedModel."""
        folder = self.folder / str(number)
        if not (folder / "saved_model.pb").is_file():
            return []
        return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))

    def _load(self, number: int) -> bool:
        started, self._loads = time.monotonic(), self._loads + 1
        application = f"{number}-{self._loads}"
        self.status[number] = "LOADING", ""
        deployment = ray_serve.deployment(
            Replica,
            num_replicas=self._settings.replicas,
            max_ongoing_requests=self._settings.max_waiting,
            max_constructor_retry_count=1,
            graceful_shutdown_timeout_s=2 * self._settings.timeout,
            ray_actor_options={"num_cpus": 0},
        )
        try:
            bound = deployment.bind(str(self.folder / str(number)), self._settings)
            handle = ray_serve.run(bound, name=application, route_prefix=None)
            version = Version(number, application, handle, handle.signatures.remote().result())
        except Exception as error:
            reason = _reason(application) or short_message(error)
            stays = f"; version {self.current.number} stays in service" if self.current else ""
            logging.error("version %d of %s is not served: %s%s", number, self.name, reason, stays)
            self.status[number] = "END", reason
            ray_serve.delete(application)
            return False
        self.current = version
        self.status[number] = "AVAILABLE", ""
        logging.info("version %d of %s is in service after %.1f s", number, self.name, time.monotonic() - started)
        return True

    def _end(self, version: Version) -> None:
        self.status[version.number] = "UNLOADING", ""
        time.sleep(0.5)  # a request may have chosen it, and not reached it yet
        ray_serve.delete(version.application)  # once it has answered what it has begun
        self.status[version.number] = "END", ""
        logging.info("version %d of %s has ended", version.number, self.name)


def _reason(application: str) -> str:
    """Return why a version could not be loaded, from the traceback that Ray Serve keeps; empty where there is none."""
    status = ray_serve.status().applications.get(application)
    texts = [deployment.message for deployment in status.deployments.values()] if status else []
    last = [text.strip().splitlines()[-1] for text in texts if "Traceback" in text]
    return last[0].removeprefix("tfdml.errors.UserError: ") if last else ""


class _Model:
    """Answers requests about a model.

    Args:
        versions: The model.
        settings: See `ServeSettings`.
    """

    def __init__(self, versions: Versions, settings: ServeSettings):
        self._versions, self._settings, self._waiting = versions, settings, 0

    def _version(self, request: Request) -> Version:
        version, number = self._versions.current, request.path_params.get("version")
        if version is None or number not in (None, str(version.number)):
            raise HTTPException(404, f"Servable not found for request: {request.url.path}")
        return version

    async def predict(self, request: Request) -> Response:
        """Answer a predict request, unless too many wait already."""
        if self._waiting >= self._settings.max_waiting:
            raise HTTPException(503, f"{self._waiting} requests wait already: try again", {"Retry-After": "1"})
        started = time.monotonic()
        self._waiting += 1
        try:
            code, body = await self._answer(request)
        finally:
            self._waiting -= 1
        _SECONDS.observe(time.monotonic() - started)
        _REQUESTS.labels(code).inc()
        return Response(body, code, media_type="application/json")

    async def _answer(self, request: Request) -> tuple[int, bytes]:
        self._version(request)
        settings = self._settings
        body = await read_body(request, int(settings.max_request_mb * 2**20), settings.timeout, _DROPPED)
        version = self._version(request)

        async def predicted() -> tuple[int, bytes]:
            response = version.handle.predict.remote(body)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()  # drops it, where it waits for a batch
                raise

        try:
            return await while_connected(request, predicted(), settings.timeout)
        except TimeoutError:
            raise HTTPException(504, f"the model did not answer within {settings.timeout:g} s") from None
        except (ray.exceptions.RayError, RayServeException) as error:
            reason = short_message(error, "first", True)
            logging.error("version %d of %s: %s", version.number, self._versions.name, reason)
            raise HTTPException(503, "the model is starting again: try again", {"Retry-After": "1"}) from None

    async def status(self, request: Request) -> Response:
        """Answer with the states of the versions, or of one of them."""
        number = request.path_params.get("version")
        states = [
            {"version": str(each), "state": state, "status": {"error_code": code, "error_message": error}}
            for each, (state, error) in sorted(self._versions.status.items(), reverse=True)
            for code in ["UNKNOWN" if error else "OK"]
            if number in (None, str(each))
        ]
        if not states:
            self._version(request)
        return JSONResponse({"model_version_status": states})

    async def metadata(self, request: Request) -> Response:
        """Answer with the signatures of the version in service."""
        version = self._version(request)
        spec = {"name": self._versions.name, "signature_name": "", "version": str(version.number)}
        signatures = {"signature_def": {"signature_def": version.signatures}}
        return JSONResponse({"model_spec": spec, "metadata": signatures})

    def health(self, _: Request) -> Response:
        """Answer whether a version is in service and its replicas run."""
        version = self._versions.current
        application = ray_serve.status().applications.get(version.application) if version else None
        state = application.status.value if application else "NONE"
        return JSONResponse({"status": state}, 200 if state == "RUNNING" else 503)

    async def metrics(self, _: Request) -> Response:
        """Answer with the metrics that Prometheus reads."""
        _WAITING.set(self._waiting)
        return Response(prometheus.generate_latest(), media_type=prometheus.CONTENT_TYPE_LATEST)


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
    if path.endswith(":predict"):
        _REQUESTS.labels(error.status_code).inc()
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def application(versions: Versions, settings: ServeSettings) -> Starlette:
    """Return the web application.

    Args:
        versions: The model.
        settings: See `ServeSettings`.
    """
    model, path = _Model(versions, settings), f"/v1/models/{versions.name}"
    routes = [Route("/healthz", model.health), Route("/monitoring/prometheus/metrics", model.metrics)]
    for place in (path, f"{path}/versions/{{version}}"):
        routes += [
            Route(f"{place}:predict", model.predict, methods=["POST"]),
            Route(f"{place}/metadata", model.metadata),
            Route(place, model.status),
        ]
    return Starlette(routes=routes, exception_handlers=dict.fromkeys((HTTPException, Exception), _refusal))


def serve(folder: Path, name: str, listening: socket.socket, settings: ServeSettings) -> None:
    """Serve the versions of a model until the process is interrupted; then answer what was begun.

    Args:
        folder: Where versions lie, numbered.
        name: What requests call the model.
        listening: The socket.
        settings: See `ServeSettings`.

    Raises:
        UserError: No version of the folder can be served.
    """
    with ray_session(LOCAL, object_store_bytes=_OBJECT_STORE):
        python_logging.getLogger("ray.serve").setLevel(python_logging.ERROR)
        ray_serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
        versions = Versions(folder, name, settings)
        versions.update()
        if versions.current is None:
            reasons = [f"{number}: {reason}" for number, (_, reason) in versions.status.items()]
            raise UserError(f"{folder} has no version that can be served; {'; '.join(reasons) or 'it has none at all'}")
        app, connections = application(versions, settings), settings.max_waiting + CONNECTIONS
        with serving(app, listening, int(2 * settings.timeout), connections) as thread:
            print(f"serving at {address_of(listening)}/v1/models/{name}", flush=True)
            while thread.is_alive():
                time.sleep(settings.poll_seconds)
                try:
                    versions.update()
                except Exception as error:  # a folder that cannot be read: what is in service stays
                    logging.error("no look for new versions: %s", short_message(error, named=True))
