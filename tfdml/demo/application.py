"""The web application of a demo: what it shows, who may ask, and how much."""

import dataclasses
import functools
import hmac
import re
from collections.abc import Callable
from typing import Any

import jinja2
import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tfdml.data.dataset import ImageDataset, find_faults
from tfdml.data.images import EncodedImages
from tfdml.data.limits import SERVING_LIMIT
from tfdml.demo.gallery import Gallery
from tfdml.embeddings.backends import EmbeddingBackend
from tfdml.errors import UserError, short_message
from tfdml.evaluation import Calibration
from tfdml.web.lanes import Lanes
from tfdml.web.server import address_of, listen, serving
from tfdml.web.settings import WebSettings

MOST_MB = 20.0
MOST_NEIGHBORS = 200
_PAGE, _PICTURE_SIDE, _PICTURES_KEPT = 24, 256, 1000
_UPLOAD_SECONDS = 30
_COOKIE = "tfdml_demo"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("tfdml.demo"), autoescape=True, undefined=jinja2.StrictUndefined
)


@dataclasses.dataclass
class Demo:
    """A model and a gallery to try it on.

    Args:
        gallery: What is searched.
        embed: From the bytes of an image to its embedding (d,); raises `UserError` where it cannot
            be decoded.
        model: What the model is called.
        calibration: Within which distance an image is of the gallery; None: nobody knows.
        embed_texts: From texts to their embeddings (N, d); None: the model has no tower of texts.
    """

    gallery: Gallery
    embed: Callable[[bytes], np.ndarray]
    model: str = ""
    calibration: Calibration | None = None
    embed_texts: Callable[[list[str]], np.ndarray] | None = None

    def neighbors(self, query: bytes | str | int, k: int) -> list[dict[str, Any]]:
        """Return the k nearest images to an image, a text, or a row without the row itself, as the
        page shows them."""
        if isinstance(query, int):
            pairs = self.gallery.search(self.gallery.embeddings[query], k, query)
        elif isinstance(query, str):
            if self.embed_texts is None:
                raise UserError(
                    f"{self.model or 'the model'} embeds images alone: name a model of images and "
                    "texts"
                )
            pairs = self.gallery.search(self.embed_texts([query])[0], k)
        else:
            images = EncodedImages((query,), ("the image",))
            if faults := find_faults(images, decode=False, max_pixels=SERVING_LIMIT):
                raise UserError(f"this is no image to search by: {faults[0].reason}")
            pairs = self.gallery.search(np.asarray(self.embed(query)), k)
        # The threshold is of images as queries.
        same = None if self.calibration is None or isinstance(query, str) else self.calibration.same
        return [
            {"row": row, "distance": far, "accepted": same and bool(same(far))}
            for row, far in pairs
        ]


def embedder_of(backend: EmbeddingBackend) -> Callable[[bytes], np.ndarray]:
    """Return the function from the bytes of an image to its embedding (d,), as `Demo` takes it."""

    def embed(data: bytes) -> np.ndarray:
        dataset = ImageDataset(
            "upload", "all", EncodedImages((data,), ("the image",)), np.zeros(1, np.int64)
        )
        for _, vectors in backend.stream_readable(dataset, 1):
            return vectors[0]
        raise UserError("the image cannot be decoded: it is damaged")

    return embed


def application(demo: Demo, token: str = "") -> Starlette:
    """Return the web application.

    Args:
        demo: What it shows.
        token: What every request has to know; empty: nothing.

    Example:
        >>> from starlette.testclient import TestClient
        >>> demo = Demo(Gallery("cars", ["a.jpg", "b.jpg"], np.eye(2)),
        ...     embed=lambda data: np.ones(2))
        >>> "b.jpg" in TestClient(application(demo)).get("/?row=0&k=1").text
        True
    """
    gallery = demo.gallery
    lanes = Lanes(WebSettings(max_request_mb=MOST_MB, timeout=_UPLOAD_SECONDS))
    picture_of = functools.lru_cache(_PICTURES_KEPT)(
        lambda row: gallery.picture(row, _PICTURE_SIDE)
    )

    async def page(request: Request) -> Response:
        """Return the page: neighbors of a `row`, a `text` or the image that is sent, and the
        gallery from `first`."""
        options: dict[str, Any] = {"k": 12, "first": 0, "row": None}
        words = request.query_params.get("text", "").strip()
        neighbors, status, error = [], 200, ""
        try:
            for name, text in request.query_params.items():
                if name in options:
                    ends = (1, MOST_NEIGHBORS) if name == "k" else (0, len(gallery) - 1)
                    options[name] = _integer(name, text, *ends)
            query = words or options["row"]
            if request.method == "POST":
                query = await lanes.read_body(request)
            if query is not None:
                neighbors = await run_in_threadpool(demo.neighbors, query, options["k"])
        except HTTPException as refusal:
            status, error = refusal.status_code, refusal.detail
        except UserError as refusal:
            status, error = 400, short_message(refusal)
        rows = range(options["first"], min(options["first"] + _PAGE, len(gallery)))
        shown = {
            "demo": demo,
            "neighbors": neighbors,
            "error": error,
            "rows": rows,
            "page": _PAGE,
            "text": words,
            **options,
        }
        threshold = demo.calibration and f"{demo.calibration.threshold:.4g}"
        return HTMLResponse(
            _TEMPLATES.get_template("index.html").render(shown, threshold=threshold), status
        )

    async def picture(request: Request) -> Response:
        try:
            row = _integer("row", request.path_params["row"], 0, len(gallery) - 1)
            data = await run_in_threadpool(picture_of, row)
        except UserError as error:
            raise HTTPException(404, short_message(error)) from None
        return Response(
            data, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=600"}
        )

    def fits(text: str) -> bool:
        return hmac.compare_digest(text.encode(), token.encode())

    async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
        """Refuse requests from the page of another site, or without the token; add the headers."""
        response: Response
        if (
            request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
            and request.method != "GET"
        ):
            response = PlainTextResponse("the request comes from another page", 403)
        elif token and fits(request.query_params.get("token", "")):
            response = RedirectResponse("/", 303)
            response.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
        elif token and not fits(request.cookies.get(_COOKIE, "")):
            response = PlainTextResponse(
                "open the address that the terminal shows, with its token", 401
            )
        else:
            response = await answer(request)
        for name, text in _HEADERS.items():
            response.headers.setdefault(name, text)
        return response

    files = StaticFiles(
        packages=[(f"tfdml.{package}", "templates") for package in ("demo", "report")]
    )
    routes = [
        Route("/", page, methods=["GET", "POST"]),
        Route("/image/{row}", picture),
        Mount("/files", files),
    ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)])


def _integer(name: str, text: str, least: int, most: int) -> int:
    value = int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
    if not least <= value <= most:
        raise UserError(f"{name} must be an integer from {least} to {most}")
    return value


def serve(demo: Demo, host: str, port: int, token: str) -> None:
    """Print the address of the page, and answer requests until the process is interrupted.

    Args:
        demo: What is shown.
        host: The address to bind.
        port: The port; 0: any.
        token: As `application`.

    Raises:
        UserError: As `tfdml.web.server.listen`.
    """
    with listen(host, port) as opened, serving(application(demo, token), opened) as thread:
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        address = address_of(opened, shown) + (f"/?token={token}" if token else "/")
        print(f"{len(demo.gallery):,} images at {address} (Ctrl-C ends the demo)", flush=True)
        thread.join()
