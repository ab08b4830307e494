"""The web application: who may ask, what is answered to what is wrong, and counts of both."""

import hmac
import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "tfdml_token"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_METRICS_EXTRA = "counts need the package prometheus-client: pip install 'tfdml[metrics]'"


def application(routes: Sequence[BaseRoute], token: str = "") -> ASGIApp:
    """Return the web application of some routes, such as `rest_routes`.

    `/healthz` answers that it runs, and `/metrics` with counts in Prometheus' form.

    Args:
        routes: What it answers.
        token: What every request has to know; empty: nothing.

    Example:
        >>> from starlette.testclient import TestClient
        >>> TestClient(application(routes=[])).get("/healthz").json()
        {'status': 'RUNNING'}
    """
    counts = Counts()
    own = [Route("/healthz", _health), Route("/metrics", counts.show)]
    handlers = dict.fromkeys((HTTPException, Exception), _refuse)
    app = Starlette(routes=[*own, *routes], exception_handlers=handlers)
    return Guard(app, token, counts)


def _health(_: Request) -> Response:
    return JSONResponse({"status": "RUNNING"})


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer with an error in TensorFlow Serving's form."""
    path = request.url.path
    if not isinstance(error, HTTPException):
        error = HTTPException(500, "the server failed; its log shows why")
    elif error.detail == "Not Found" and path.startswith("/v1/models/"):
        error.detail = f"Servable not found for request: {path}"
    elif error.detail in ("Not Found", "Method Not Allowed"):
        status = 400 if error.status_code == 405 else 404
        error = HTTPException(status, f"Malformed request: {request.method} {path}")
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


class Counts:
    """Counts requests by route and status, and their seconds, where prometheus-client is
    installed."""

    def __init__(self) -> None:
        try:
            import prometheus_client
        except ModuleNotFoundError:
            self._client: Any = None
            return
        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._requests = prometheus_client.Counter(
            "tfdml_requests",
            "Requests that were answered; a status of 400 or more is a refusal.",
            ("route", "status"),
            registry=self._registry,
        )
        self._seconds = prometheus_client.Histogram(
            "tfdml_request_seconds",
            "Seconds from the headers of a request to the end of its answer.",
            ("route",),
            registry=self._registry,
        )

    def add(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        if self._client is not None:
            self._requests.labels(route, status).inc()
            self._seconds.labels(route).observe(seconds)

    async def show(self, _: Request) -> Response:
        """Answer with all counts."""
        if self._client is None:
            return PlainTextResponse(_METRICS_EXTRA, 404)
        text = self._client.generate_latest(self._registry)
        return Response(text, media_type=self._client.CONTENT_TYPE_LATEST)


class Guard:
    """Refuses requests from the page of another site, or without the token; adds the headers that
    keep a page to itself, and counts every answer.

    Args:
        app: What answers the others.
        token: See `application`.
        counts: Where they are counted.
    """

    def __init__(self, app: ASGIApp, token: str, counts: Counts):
        self._app = app
        self._token = token
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":  # the start and the end of the server
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 500

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, text in _HEADERS.items():
                    headers.setdefault(name, text)
            await send(message)

        answer = self._refusal(Request(scope)) or self._app
        try:
            await answer(scope, receive, send_guarded)
        finally:
            self._counts.add(_route_of(scope), status, time.perf_counter() - start)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that may not ask; None where it may."""
        site = request.headers.get("sec-fetch-site", "none")
        if request.method != "GET" and site not in ("same-origin", "none"):
            return PlainTextResponse("the request comes from another page", 403)
        if not self._token:
            return None
        if self._fits(request.query_params.get("token", "")):
            response = RedirectResponse("/", 303)
            response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return response
        if self._fits(request.cookies.get(COOKIE, "")):
            return None
        return PlainTextResponse("open the address that the terminal shows, with its token", 401)

    def _fits(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())


def _route_of(scope: Scope) -> str:
    """Return the name of a request's route, of which there are few; its path would be anything."""
    endpoint = scope.get("endpoint")
    return getattr(endpoint, "__name__", type(endpoint).__name__) if endpoint else "none"
