"""The web application of a demo: `Demo`, what it shows; its routes; who may ask, and how much; and the server."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import hmac
import importlib.resources
import io
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tfdml.arguments import integer
from tfdml.data.dataset import ImageDataset
from tfdml.data.decoding import SERVING_LIMIT
from tfdml.data.faults import find_faults
from tfdml.data.images import EncodedImages
from tfdml.data.pipeline import readable_views
from tfdml.demo.gallery import Gallery, combined_query, map_of
from tfdml.embeddings.backends import KerasEmbedder
from tfdml.embeddings.base import EmbeddingBackend
from tfdml.errors import UserError, short_message
from tfdml.evaluation import Calibration
from tfdml.explain import draw
from tfdml.io.manifests import parse_json
from tfdml.retrieval.exact import check_embeddings

MOST_BYTES = 20 * 2**20
MOST_JSON_BYTES = 2**20
MOST_NEIGHBORS = 200
MOST_EXAMPLES = 64
# Values of an attribute that the page offers; others can be typed.
MOST_VALUES = 2000
_PICTURE_SIDE = 256
_PICTURES_KEPT = 1000
# Requests that wait for the model or for pictures; further ones are refused.
_WAITING, _WAITING_PICTURES = 8, 256
_CONNECTIONS = 100
_COOKIE = "tfdml_demo"
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_ANY = ("0.0.0.0", "::")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_FILES = {
    "/": ("tfdml.demo", "demo.html", "text/html"),
    "/demo.js": ("tfdml.demo", "demo.js", "text/javascript"),
    "/demo.css": ("tfdml.demo", "demo.css", "text/css"),
    "/page.css": ("tfdml.report", "page.css", "text/css"),
}


@dataclasses.dataclass
class Demo:
    """A model and a gallery to try it on.

    Args:
        gallery: What is searched.
        embed: From the bytes of an image to its embedding (d,); raises `UserError` where it cannot be decoded.
        model: What the model is called.
        metrics: What was measured of it, by name.
        calibration: When two images are the same; None: nobody knows.
        cache: The folder where the map is kept; empty: there is no map.
        explain: From the bytes of two images to a JPEG of what they have in common; None where the model cannot.
    """

    gallery: Gallery
    embed: Callable[[bytes], np.ndarray]
    model: str = ""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    calibration: Calibration | None = None
    cache: str = ""
    explain: Callable[[bytes, bytes], bytes] | None = None

    def __post_init__(self):
        # (N, 2), None until it is computed; and what is known of it.
        self.places: np.ndarray | None = None
        self.map_state = "computing" if self.cache else "none"

    def compute_map(self) -> None:
        """Compute the map, or read it from the cache."""
        try:
            self.places = map_of(self.gallery, self.cache)
            self.map_state = "none" if self.places is None else "ready"
        except Exception as error:  # the demo is of use without it
            print(f"demo: there is no map: {short_message(error, named=True)}", file=sys.stderr)
            self.map_state = "none"

    def why(self, query: bytes | int, row: int) -> bytes:
        """Return heat maps of what a query, an image or a row, and an image of the gallery have in common, as a JPEG.

        Raises:
            UserError: A row or an image cannot be read, or the model cannot be explained.
        """
        if self.explain is None:
            raise UserError("only a Keras embedder can be explained")
        return self.explain(self.gallery.encoded(query) if isinstance(query, int) else query, self.gallery.encoded(row))

    def about(self) -> dict[str, Any]:
        """Return what the page shows first, for JSON."""
        gallery, calibration = self.gallery, self.calibration
        return {
            "title": gallery.title.rstrip("/").rpartition("/")[2],
            "count": gallery.count,
            "held": len(gallery),
            "dimension": gallery.dimension,
            "distance": gallery.distance,
            "model": self.model,
            "metrics": {name: float(value) for name, value in self.metrics.items()},
            "columns": {
                name: column.values[:MOST_VALUES].tolist()
                for name, column in gallery.columns.items()
                if len(column.values) > 1
            },
            "explains": self.explain is not None,
            "calibration": calibration
            and {"threshold": calibration.threshold, "far": list(calibration.far), "target": calibration.target},
            "limits": {"bytes": MOST_BYTES, "pixels": SERVING_LIMIT, "neighbors": MOST_NEIGHBORS},
        }

    def neighbors(self, asked: Any) -> list[dict[str, Any]]:
        """Return the neighbors of the examples of a request, without the examples.

        Raises:
            UserError: The request is not as it should be.
        """
        if not isinstance(asked, dict) or not {"positives"} <= set(asked) <= {"positives", "negatives", "k", "where"}:
            raise UserError("a search has positives, and may have negatives, k and where")
        positives, negatives = (self._examples(name, asked.get(name, [])) for name in ("positives", "negatives"))
        if not positives:
            raise UserError("positives must name at least one image")
        where = asked.get("where", {})
        if not isinstance(where, dict) or not all(isinstance(value, str) for value in where.values()):
            raise UserError("where must have a text for each attribute")
        try:
            k = integer("k", asked.get("k", 12), at_least=1, at_most=MOST_NEIGHBORS)
        except ValueError as error:
            raise UserError(str(error)) from None
        given = [row for row, _ in (*positives, *negatives) if row is not None]
        vectors = [np.array([vector for _, vector in side]) for side in (positives, negatives)]
        query = vectors[0][0] if len(positives) == 1 and not negatives else combined_query(*vectors)
        found = self.gallery.search(query, k, where, given)
        return [{**self.gallery.describe(row), "distance": far, "same": self._same(far)} for row, far in found]

    def _same(self, distance: float) -> bool | None:
        return None if self.calibration is None else bool(self.calibration.same(distance))

    def _examples(self, name: str, asked: Any) -> list[tuple[int | None, np.ndarray]]:
        """Return the row, where there is one, and the vector of each example."""
        if not isinstance(asked, list) or len(asked) > MOST_EXAMPLES:
            raise UserError(f"{name} must be a list of at most {MOST_EXAMPLES} examples")
        examples: list[tuple[int | None, np.ndarray]] = []
        for example in asked:
            if isinstance(example, dict) and set(example) == {"row"}:
                row = _row(example["row"])
                vector = self.gallery.vector(row)
                examples.append((row, self.embed(self.gallery.encoded(row)) if vector is None else vector))
            elif isinstance(example, dict) and set(example) == {"vector"} and _is_numbers(example["vector"]):
                if len(example["vector"]) != self.gallery.dimension:
                    raise UserError(f"a vector of {name} must have {self.gallery.dimension} numbers")
                examples.append((None, check_embeddings([example["vector"]], f"a vector of {name}")[0]))
            else:
                raise UserError(f"each of {name} must be an object with a row, or with a vector of numbers")
        return examples


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) in (int, float) for number in value)


def _row(value: Any) -> int:
    try:
        return integer("row", value, at_least=0)
    except ValueError as error:
        raise UserError(str(error)) from None


def embedder_of(backend: EmbeddingBackend) -> Callable[[bytes], np.ndarray]:
    """Return the function from the bytes of an image to its embedding (d,), as `Demo` takes it."""

    def embed(data: bytes) -> np.ndarray:
        dataset = ImageDataset("upload", "all", EncodedImages((data,), ("the image",)), np.zeros(1, np.int64))
        for _, vectors in backend.stream_readable(dataset, 1):
            return vectors[0]
        raise UserError("the image cannot be decoded: it is damaged")

    return embed


def explainer_of(backend: EmbeddingBackend) -> Callable[[bytes, bytes], bytes] | None:
    """Return the function from two images to heat maps of both, as `Demo` takes it; None for no Keras embedder."""
    if not isinstance(backend, KerasEmbedder):
        return None

    def explain(first: bytes, second: bytes) -> bytes:
        images = EncodedImages((first, second), ("the query", "the neighbor"))
        views = [view for _, batch in readable_views(images, backend.transform, 2) for view in batch]
        if len(views) < 2:
            raise UserError("one of the images cannot be decoded: it is damaged")
        buffer = io.BytesIO()
        draw(backend.embedder, *views).convert("RGB").save(buffer, "JPEG", quality=90)
        return buffer.getvalue()

    return explain


class _Worker:
    """Threads for what takes long, with a queue that ends.

    Args:
        threads: How many work at once.
        waiting: How many requests may wait.
    """

    def __init__(self, threads: int, waiting: int):
        self._threads = concurrent.futures.ThreadPoolExecutor(threads)
        self._most, self._begun = threads + waiting, 0

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._begun >= self._most:
            raise HTTPException(503, "too many requests wait for the model: try again in a moment")
        self._begun += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        finally:
            self._begun -= 1


def application(demo: Demo, host: str = "127.0.0.1", token: str = "") -> ASGIApp:
    """Return the web application.

    Args:
        demo: What it shows.
        host: The name or address that it is reached by, next to those of this machine.
        token: What every request has to know; empty: nothing.

    Example:
        >>> from starlette.testclient import TestClient
        >>> demo = Demo(Gallery("cars", ["a.jpg", "b.jpg"], np.eye(2), {}), embed=lambda data: np.ones(2))
        >>> client = TestClient(application(demo), "http://localhost")
        >>> client.post("/api/search", json={"positives": [{"row": 0}]}).json()["neighbors"][0]["name"]
        'b.jpg'
    """
    model, pictures = _Worker(1, _WAITING), _Worker(2, _WAITING_PICTURES)
    picture_of = functools.lru_cache(_PICTURES_KEPT)(lambda row: demo.gallery.picture(row, _PICTURE_SIDE))

    async def file(request: Request) -> Response:
        package, name, kind = _FILES[request.url.path]
        text = importlib.resources.files(package).joinpath(f"templates/{name}").read_bytes()
        return Response(text, media_type=kind, headers={"Cache-Control": "no-store"})

    async def about(request: Request) -> Response:
        return JSONResponse(await model.run(demo.about))

    async def rows(request: Request) -> Response:
        """Return some images: those of `rows`, or `count` of those that match the others from `start` on."""
        asked = dict(request.query_params)
        try:
            start, count = int(asked.pop("start", "0")), int(asked.pop("count", "24"))
            named = [int(text) for text in asked.pop("rows").split(",")] if "rows" in asked else None
        except ValueError:
            raise UserError("start, count and rows must be integers") from None
        if start < 0 or not 1 <= count <= MOST_NEIGHBORS or len(named or ()) > MOST_NEIGHBORS:
            raise UserError(f"start must not be negative, and count from 1 to {MOST_NEIGHBORS}")
        matching = np.flatnonzero(demo.gallery.matching(asked)).tolist() if named is None else named
        shown = matching[start : start + count] if named is None else named
        return JSONResponse({"total": len(matching), "images": [demo.gallery.describe(row) for row in shown]})

    async def embed(request: Request) -> Response:
        data = _checked(await _body(request, MOST_BYTES))
        return JSONResponse({"vector": np.asarray(await model.run(demo.embed, data)).tolist()})

    async def search(request: Request) -> Response:
        asked = parse_json(await _body(request, MOST_JSON_BYTES), "the request")
        return JSONResponse({"neighbors": await model.run(demo.neighbors, asked)})

    async def picture(request: Request) -> Response:
        try:
            row = _row(int(request.path_params["row"]))
            data = await pictures.run(picture_of, row)
        except ValueError as error:  # a UserError, or no number
            raise HTTPException(404, short_message(error)) from None
        return Response(data, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=600"})

    async def places(request: Request) -> Response:
        """Return the map: (N,) x and y as uint16, 0 to 65535, one after another."""
        if demo.places is None:
            if demo.map_state == "computing":
                return JSONResponse({"state": demo.map_state}, 202)
            raise HTTPException(404, "there is no map of this gallery")
        return Response(np.rint(demo.places.T * 65535).astype("<u2").tobytes(), media_type="application/octet-stream")

    async def codes(request: Request) -> Response:
        """Return the values of an attribute on the map: (N,) numbers of them as uint32."""
        column = demo.gallery.columns.get(request.path_params["name"])
        if column is None:
            raise HTTPException(404, "the gallery has no such attribute")
        return Response(column.codes.astype("<u4").tobytes(), media_type="application/octet-stream")

    async def icon(request: Request) -> Response:
        return Response(status_code=204)

    async def matching(request: Request) -> Response:
        """Return which images of the map match a filter: (N,) uint8."""
        found = demo.gallery.matching(dict(request.query_params))
        return Response(found.astype("u1").tobytes(), media_type="application/octet-stream")

    async def why(request: Request) -> Response:
        """Return heat maps of the image `row`, and of the image `query` or of the one that is sent."""
        asked, data = dict(request.query_params), await _body(request, MOST_BYTES)
        try:
            row, query = int(asked["row"]), int(asked["query"]) if "query" in asked else _checked(data)
        except (KeyError, ValueError):
            raise UserError("row and query must be integers") from None
        return Response(await model.run(demo.why, query, row), media_type="image/jpeg")

    async def refused(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 400
        message = error.detail if isinstance(error, HTTPException) else short_message(error)
        return JSONResponse({"error": message}, status)

    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "the demo failed at this; its terminal shows why"}, 500)

    routes = [
        *(Route(path, file) for path in _FILES),
        Route("/favicon.ico", icon),
        Route("/api/about", about),
        Route("/api/rows", rows),
        Route("/api/embed", embed, methods=["POST"]),
        Route("/api/search", search, methods=["POST"]),
        Route("/api/map", places),
        Route("/api/codes/{name:path}", codes),
        Route("/api/matching", matching),
        Route("/api/why", why, methods=["POST"]),
        Route("/image/{row}", picture),
    ]
    handlers: dict[Any, Any] = {HTTPException: refused, UserError: refused, Exception: failed}
    return _Guard(Starlette(routes=routes, exception_handlers=handlers), host, token)


def _checked(data: bytes) -> bytes:
    """Return the bytes of an upload, refused where its header and its end are not those of an image."""
    if faults := find_faults(EncodedImages((data,), ("the image",)), decode=False, max_pixels=SERVING_LIMIT):
        raise HTTPException(415, f"this is no image to search by: {faults[0].reason}")
    return data


async def _body(request: Request, most: int) -> bytes:
    """Return the body of a request, of which no more is read than is allowed."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise HTTPException(413, f"at most {most / 2**20:g} MB are taken")
        parts.append(part)
    return b"".join(parts)


class _Guard:
    """Refuses requests by other names, from other pages and without the token; adds headers to all answers.

    A page of elsewhere whose name is made to point here (DNS rebinding) has another Host, and one that sends a form
    has another Origin.

    Args:
        app: What answers the others.
        host: As `application`.
        token: As `application`.
    """

    def __init__(self, app: ASGIApp, host: str, token: str):
        self._app, self._token = app, token
        self._names = None if host in _ANY else {*_LOCAL, host, f"[{host}]"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (self._answer(Request(scope)) or self._app)(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """Return the answer to a request that is not passed on."""
        headers, host = request.headers, request.headers.get("host", "")
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if self._names is not None and name not in self._names:
            return JSONResponse({"error": "the demo is not reached by this name"}, 421)
        if request.method != "GET" and not _same_origin(headers, host):
            return JSONResponse({"error": "the request comes from another page"}, 403)
        if not self._token:
            return None
        if self._knows(request.query_params.get("token", "")):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, self._token, httponly=True, samesite="lax")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._knows(request.cookies.get(_COOKIE, "")) or self._knows(bearer):
            return None
        return JSONResponse({"error": "open the address that the terminal shows, with its token"}, 401)

    def _knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token.encode())


def _same_origin(headers: Headers, host: str) -> bool:
    """Whether a request comes from our own page, or from no page."""
    origin = headers.get("origin")
    return headers.get("sec-fetch-site", "none") in ("same-origin", "none") and (
        origin is None or urlsplit(origin).netloc == host
    )


def serve(demo: Demo, host: str, port: int, token: str, ready: Callable[[str], None] = print) -> None:
    """Answer requests until the process is interrupted.

    Args:
        demo: What is shown.
        host: The address to bind.
        port: The port; 0: any.
        token: As `application`.
        ready: Called with the address of the page.

    Raises:
        UserError: The address cannot be bound, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        opened = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"`port={port}` of {host} cannot be opened: {reason}; name another, or 0 for any") from error
    shown = "127.0.0.1" if host in _ANY else f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        application(demo, host, token),
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="off",
        limit_concurrency=_CONNECTIONS,
    )
    server = uvicorn.Server(config)
    # In a thread, so that signals end the main thread as in every other command.
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()

    def compute_map() -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: those that answer come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        demo.compute_map()

    if demo.cache:
        threading.Thread(target=compute_map, daemon=True).start()
    try:
        ready(f"http://{shown}:{opened.getsockname()[1]}/" + (f"?token={token}" if token else ""))
        thread.join()
    finally:
        server.should_exit = server.force_exit = True
        thread.join(5)
