"""The web application of a demo: `Demo`, what it shows; its routes; who may ask, and how much; and the server."""

import asyncio
import concurrent.futures
import dataclasses
import functools
import hmac
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tfdml.data.dataset import ImageDataset, find_faults
from tfdml.data.decoding import SERVING_LIMIT
from tfdml.data.images import EncodedImages
from tfdml.data.pipeline import readable_views
from tfdml.demo.gallery import Gallery, combined_query, map_of
from tfdml.embeddings.backends import EmbeddingBackend, KerasEmbedder
from tfdml.errors import UserError, short_message, user_errors
from tfdml.evaluation import Calibration
from tfdml.explain import draw
from tfdml.io.http import address_of, listen, read_body, serving
from tfdml.io.manifests import parse_json
from tfdml.retrieval.exact import check_embeddings

MOST_BYTES, MOST_JSON_BYTES = 20 * 2**20, 2**20
MOST_NEIGHBORS = 200
MOST_EXAMPLES = 64
# Values of an attribute that the page offers; others can be typed.
MOST_VALUES = 2000
_PICTURE_SIDE, _PICTURES_KEPT = 256, 1000
# What a search asks for, and what it asks for where it says nothing of it.
_SEARCH: dict[str, Any] = {"positives": [], "negatives": [], "where": {}, "k": 12}
# Requests that wait for the model or for pictures; further ones are refused.
_WAITING, _WAITING_PICTURES = 8, 256
_CONNECTIONS = 100
_COOKIE = "tfdml_demo"
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_ANY = ("0.0.0.0", "::")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
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
        self.places: np.ndarray | None = None  # (N, 2)
        self.map_awaited = bool(self.cache)

    def compute_map(self) -> None:
        """Compute the map, or read it from the cache."""
        try:
            self.places = map_of(self.gallery, self.cache)
        except Exception as error:  # the demo is of use without it
            print(f"demo: there is no map: {short_message(error, named=True)}", file=sys.stderr)
        self.map_awaited = False

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
        several = {name: column.values for name, column in gallery.columns.items() if len(column.values) > 1}
        return {
            "title": gallery.title.rstrip("/").rpartition("/")[2],
            "count": gallery.count,
            "dimension": gallery.dimension,
            "distance": gallery.distance,
            "model": self.model,
            "metrics": dict(self.metrics),
            "columns": {name: values[:MOST_VALUES].tolist() for name, values in several.items()},
            "explains": self.explain is not None,
            "calibration": calibration and {"threshold": calibration.threshold, "far": list(calibration.far)},
            "most_bytes": MOST_BYTES,
        }

    def neighbors(self, asked: Any) -> list[dict[str, Any]]:
        """Return the neighbors of the examples of a request, without the examples.

        Raises:
            UserError: The request is not as it should be.
        """
        if not isinstance(asked, dict) or not set(asked) <= set(_SEARCH):
            raise UserError("a search has positives, and may have negatives, k and where")
        positives, negatives, where, k = (asked.get(name, usual) for name, usual in _SEARCH.items())
        vectors = [self._vectors("positives", positives), self._vectors("negatives", negatives)]
        if not positives:
            raise UserError("positives must name at least one image")
        if not isinstance(where, dict) or not all(isinstance(value, str) for value in where.values()):
            raise UserError("where must have a text for each attribute")
        if type(k) is not int or not 1 <= k <= MOST_NEIGHBORS:
            raise UserError(f"k must be an integer from 1 to {MOST_NEIGHBORS}")
        given = [example["row"] for example in (*positives, *negatives) if "row" in example]
        found = self.gallery.search(combined_query(*vectors), k, where, given)
        same = self.calibration and self.calibration.same
        return [{**self.gallery.describe(row), "distance": far, "same": same and bool(same(far))} for row, far in found]

    def _vectors(self, side: str, examples: Any) -> np.ndarray:
        """Return the embeddings (M, d) of the examples of one side of a request."""
        if not isinstance(examples, list) or len(examples) > MOST_EXAMPLES:
            raise UserError(f"{side} must be a list of at most {MOST_EXAMPLES} examples")
        return np.array([self._vector(side, example) for example in examples])

    def _vector(self, side: str, example: Any) -> np.ndarray:
        match example:
            case {"row": row} if len(example) == 1:
                vector = self.gallery.vector(row)
                return self.embed(self.gallery.encoded(row)) if vector is None else vector
            case {"vector": [*numbers]} if len(example) == 1 and all(type(each) in (int, float) for each in numbers):
                if len(numbers) != self.gallery.dimension:
                    raise UserError(f"a vector of {side} must have {self.gallery.dimension} numbers")
                return check_embeddings([numbers], f"a vector of {side}")[0]
        raise UserError(f"each of {side} must be an object with a row, or with a vector of numbers")


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
        return tf.io.encode_jpeg(np.asarray(draw(backend.embedder, *views).convert("RGB")), quality=90).numpy()

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


def application(demo: Demo, host: str = "127.0.0.1", token: str = "") -> Starlette:
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
    names = set() if host in _ANY else {*_LOCAL, host, f"[{host}]"}

    async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
        response = _refusal(request, names, token) or await answer(request)
        for name, text in _HEADERS.items():
            response.headers.setdefault(name, text)
        return response

    async def about(request: Request) -> Response:
        return JSONResponse(demo.about())

    async def rows(request: Request) -> Response:
        """Return `count` images from `start` on: of `rows`, or of those that match the other attributes."""
        asked = dict(request.query_params)
        start, count = _integer(asked.pop("start", "0")), _integer(asked.pop("count", "24"))
        if start < 0 or not 1 <= count <= MOST_NEIGHBORS:
            raise UserError(f"start must not be negative, and count from 1 to {MOST_NEIGHBORS}")
        if "rows" in asked:
            matching = [_integer(text) for text in asked["rows"].split(",")]
        else:
            matching = np.flatnonzero(demo.gallery.matching(asked)).tolist()
        images = [demo.gallery.describe(row) for row in matching[start : start + count]]
        return JSONResponse({"total": len(matching), "images": images})

    async def embed(request: Request) -> Response:
        data = _checked(await read_body(request, MOST_BYTES))
        return JSONResponse({"vector": np.asarray(await model.run(demo.embed, data)).tolist()})

    async def search(request: Request) -> Response:
        asked = parse_json(await read_body(request, MOST_JSON_BYTES), "the request")
        return JSONResponse({"neighbors": await model.run(demo.neighbors, asked)})

    async def picture(request: Request) -> Response:
        try:
            data = await pictures.run(picture_of, _integer(request.path_params["row"]))
        except UserError as error:
            raise HTTPException(404, short_message(error)) from None
        return Response(data, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=600"})

    async def places(request: Request) -> Response:
        """Return the map: (N,) x and y as uint16, 0 to 65535, one after another."""
        if demo.places is None:
            return JSONResponse({"error": "there is no map of this gallery"}, 202 if demo.map_awaited else 404)
        return Response(np.rint(demo.places.T * 65535).astype("<u2").tobytes())

    async def codes(request: Request) -> Response:
        """Return the values of an attribute on the map: (N,) int32 codes, -1 where a filter does not match."""
        column = demo.gallery.columns.get(request.path_params["name"])
        if column is None:
            raise HTTPException(404, "the gallery has no such attribute")
        shown = demo.gallery.matching(dict(request.query_params))
        return Response(np.where(shown, column.codes, -1).astype("<i4").tobytes())

    async def why(request: Request) -> Response:
        """Return heat maps of the image `row`, and of the image `query` or of the one that is sent."""
        asked = request.query_params
        row = _integer(asked.get("row", ""))
        query = _integer(asked["query"]) if "query" in asked else _checked(await read_body(request, MOST_BYTES))
        return Response(await model.run(demo.why, query, row), media_type="image/jpeg")

    api = [
        Route("/about", about),
        Route("/rows", rows),
        Route("/embed", embed, methods=["POST"]),
        Route("/search", search, methods=["POST"]),
        Route("/map", places),
        Route("/codes/{name:path}", codes),
        Route("/why", why, methods=["POST"]),
    ]
    files = StaticFiles(packages=[(f"tfdml.{package}", "templates") for package in ("demo", "report")], html=True)
    return Starlette(
        routes=[Mount("/api", routes=api), Route("/image/{row}", picture), Mount("/", files)],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)],
        exception_handlers=dict.fromkeys((HTTPException, UserError, Exception), _refused),
    )


async def _refused(request: Request, error: Exception) -> Response:
    """Return the answer to a request that fails: one line, and nothing of the inside of the demo."""
    status, message = 500, "the demo failed at this; its terminal shows why"
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, UserError):
        status, message = 400, short_message(error)
    return JSONResponse({"error": message}, status, _HEADERS)


def _integer(text: str) -> int:
    with user_errors(ValueError, "row, rows, query, start and count must be integers"):
        return int(text)


def _checked(data: bytes) -> bytes:
    """Return the bytes of an upload, refused where its header and its end are not those of an image."""
    if faults := find_faults(EncodedImages((data,), ("the image",)), decode=False, max_pixels=SERVING_LIMIT):
        raise HTTPException(415, f"this is no image to search by: {faults[0].reason}")
    return data


def _refusal(request: Request, names: set[str], token: str) -> Response | None:
    """Return the answer to a request by another name, from another page or without the token; None for all others.

    A page of elsewhere whose name is made to point here (DNS rebinding) has another Host, and one that sends a form
    has another Origin.

    Args:
        request: The request.
        names: Hosts that it may name; none: any.
        token: As `application`.
    """

    def fits(text: str) -> bool:
        return hmac.compare_digest(text.encode(), token.encode())

    headers, host = request.headers, request.headers.get("host", "")
    if names and re.sub(r":\d+$", "", host) not in names:
        return JSONResponse({"error": "the demo is not reached by this name"}, 421)
    ours = headers.get("origin") in (None, f"http://{host}", f"https://{host}")
    if request.method != "GET" and not (ours and headers.get("sec-fetch-site", "none") in ("same-origin", "none")):
        return JSONResponse({"error": "the request comes from another page"}, 403)
    if token and fits(request.query_params.get("token", "")):
        answer = RedirectResponse("/", 303)
        answer.set_cookie(_COOKIE, token, httponly=True, samesite="lax")
        return answer
    bearer = headers.get("authorization", "").removeprefix("Bearer ")
    if token and not fits(request.cookies.get(_COOKIE, "")) and not fits(bearer):
        return JSONResponse({"error": "open the address that the terminal shows, with its token"}, 401)
    return None


def serve(demo: Demo, host: str, port: int, token: str) -> None:
    """Print the address of the page, and answer requests until the process is interrupted.

    Args:
        demo: What is shown.
        host: The address to bind.
        port: The port; 0: any.
        token: As `application`.

    Raises:
        UserError: As `tfdml.io.http.listen`.
    """
    app = application(demo, host, token)

    def compute_map() -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: those that answer come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        demo.compute_map()

    with listen(host, port) as opened, serving(app, opened, limit_concurrency=_CONNECTIONS) as thread:
        if demo.cache:
            threading.Thread(target=compute_map, daemon=True).start()
        address = address_of(opened, "127.0.0.1" if host in _ANY else host) + (f"/?token={token}" if token else "/")
        print(f"{demo.gallery.count:,} images at {address} (Ctrl-C ends the demo)", flush=True)
        thread.join()
