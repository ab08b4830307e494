"""The page to try a model on: what it shows for an image, for words, or for a row."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jinja2
import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from tfdml.data.dataset import ImageDataset
from tfdml.data.faults import find_faults
from tfdml.data.images import EncodedImages
from tfdml.data.limits import SERVING_LIMIT
from tfdml.embeddings.backends import EmbeddingBackend
from tfdml.errors import UserError, short_message
from tfdml.evaluation import Calibration
from tfdml.names import TEXT, clean
from tfdml.web.lanes import Lanes
from tfdml.web.pictures import Pictures

MOST_NEIGHBORS = 200
_PAGE = 24
_PICTURE_SIDE = 256
_PICTURES_KEPT = 1000
# A request may have no words.
_WORDS = dataclasses.replace(TEXT, may_be_empty=True)
_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("tfdml.web"), autoescape=True, undefined=jinja2.StrictUndefined
)


class Neighbor(NamedTuple):
    """A neighbor of a query.

    Args:
        row: Its row in the gallery.
        distance: How far it is.
        is_accepted: Whether it is within the threshold; None: there is none.
    """

    row: int
    distance: float
    is_accepted: bool | None = None


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

    gallery: Pictures
    embed: Callable[[bytes], np.ndarray]
    model: str = ""
    calibration: Calibration | None = None
    embed_texts: Callable[[list[str]], np.ndarray] | None = None

    def neighbors(self, query: bytes | str | int, k: int) -> list[Neighbor]:
        """Return the k nearest images, nearest first.

        Args:
            query: The bytes of an image, a text, or a row, without the row itself.
            k: How many.

        Raises:
            UserError: The image cannot be decoded, or the model embeds no texts.
        """
        if isinstance(query, int):
            pairs = self.gallery.search(self.gallery.embeddings[query], k, query)
        else:
            pairs = self.gallery.search(self._embedded(query), k)
        # The threshold is of images as queries.
        if self.calibration is None or isinstance(query, str):
            return [Neighbor(row, distance) for row, distance in pairs]
        same = self.calibration.same
        return [Neighbor(row, distance, bool(same(distance))) for row, distance in pairs]

    def _embedded(self, query: bytes | str) -> np.ndarray:
        if isinstance(query, bytes):
            images = EncodedImages((query,), ("the image",))
            if faults := find_faults(images, decode=False, max_pixels=SERVING_LIMIT):
                raise UserError(f"this is no image to search by: {faults[0].reason}")
            return np.asarray(self.embed(query))
        if self.embed_texts is None:
            model = self.model or "the model"
            raise UserError(f"{model} embeds images alone: name a model of images and texts")
        return self.embed_texts([query])[0]


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


def page_routes(demo: Demo, lanes: Lanes) -> list[BaseRoute]:
    """Return the routes of the page.

    Args:
        demo: What it shows.
        lanes: Where it computes.

    Example:
        >>> from starlette.testclient import TestClient
        >>> from tfdml.web.application import application
        >>> from tfdml.web.settings import WebSettings
        >>> demo = Demo(Pictures("cars", ["a.jpg", "b.jpg"], np.eye(2)),
        ...     embed=lambda data: np.ones(2))
        >>> app = application(page_routes(demo, Lanes(WebSettings())))
        >>> "b.jpg" in TestClient(app).get("/?row=0&k=1").text
        True
    """
    template = _TEMPLATES.get_template("index.html")

    @functools.lru_cache(_PICTURES_KEPT)
    def picture_of(row: int) -> bytes:
        return demo.gallery.picture(row, _PICTURE_SIDE)

    async def page(request: Request) -> Response:
        """Return the page: neighbors of a `row`, a `text` or the image that is sent, and the
        gallery from `first`."""
        shown = Shown(demo)
        status = 200
        try:
            async with lanes.place():
                shown.read_options(request)
                await search(request, shown)
        except HTTPException as refusal:
            status = refusal.status_code
            shown.error = refusal.detail
        except UserError as refusal:
            status = 400
            shown.error = short_message(refusal)
        return HTMLResponse(template.render(page=shown, demo=demo), status)

    async def search(request: Request, shown: Shown) -> None:
        query: Any = shown.text or shown.row
        if request.method == "POST":
            query = await lanes.read_body(request)
        if query is not None:
            shown.neighbors = await lanes.compute(request, demo.neighbors, query, shown.k)

    async def picture(request: Request) -> Response:
        last = len(demo.gallery) - 1
        try:
            row = _integer("row", request.path_params["row"], 0, last)
            data = await lanes.compute(request, picture_of, row)
        except UserError as error:
            raise HTTPException(404, short_message(error)) from None
        headers = {"Cache-Control": "private, max-age=600"}
        return Response(data, media_type="image/jpeg", headers=headers)

    packages: list[Any] = [(f"tfdml.{package}", "templates") for package in ("web", "report")]
    return [
        Route("/", page, methods=["GET", "POST"]),
        Route("/image/{row}", picture),
        Mount("/files", StaticFiles(packages=packages)),
    ]


@dataclasses.dataclass
class Shown:
    """What the page shows.

    Args:
        demo: The model and the gallery.
        k: How many neighbors.
        first: The first row of the gallery that is listed.
        row: The row whose neighbors are shown; None: there is none.
        text: What the neighbors show, in words.
        neighbors: As `Demo.neighbors`.
        error: Why there are none.
    """

    demo: Demo
    k: int = 12
    first: int = 0
    row: int | None = None
    text: str = ""
    neighbors: list[Neighbor] = dataclasses.field(default_factory=list)
    error: str = ""

    def read_options(self, request: Request) -> None:
        """Take over what the address says.

        Raises:
            UserError: A number is none, or out of range; the text is none.
        """
        options = request.query_params
        last = len(self.demo.gallery) - 1
        (self.text,) = clean([options.get("text", "")], _WORDS, "text")
        if "k" in options:
            self.k = _integer("k", options["k"], 1, MOST_NEIGHBORS)
        if "first" in options:
            self.first = _integer("first", options["first"], 0, last)
        if "row" in options:
            self.row = _integer("row", options["row"], 0, last)

    @property
    def rows(self) -> range:
        """The rows of the gallery that are listed."""
        return range(self.first, min(self.first + _PAGE, len(self.demo.gallery)))

    @property
    def before(self) -> int:
        """The first row of the page before."""
        return max(self.first - _PAGE, 0)

    @property
    def threshold(self) -> str:
        """The threshold, for people; empty where there is none."""
        calibration = self.demo.calibration
        return f"{calibration.threshold:.4g}" if calibration else ""


def _integer(name: str, text: str, least: int, most: int) -> int:
    value = int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
    if not least <= value <= most:
        raise UserError(f"{name} must be an integer from {least} to {most}")
    return value
