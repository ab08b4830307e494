"""Work for clients in threads: `Lanes` bound how much waits, and how long anyone waits for it."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from tfdml.web.settings import WebSettings

# Times the largest request that are read and dropped, so that a client that is still sending reads
# the refusal.
_DROPPED = 8


class Lanes:
    """Computes answers in threads, and refuses what would wait too long.

    Python cannot end a computation. One that is late is answered with 504, and keeps its lane
    until it ends; the other lanes go on.

    Args:
        settings: See `WebSettings`.

    Attributes:
        waiting: How many requests have a place: they are read, computed, or wait for a lane.
    """

    def __init__(self, settings: WebSettings):
        self.settings = settings
        self._threads = concurrent.futures.ThreadPoolExecutor(settings.lanes)
        self._computations: set[concurrent.futures.Future[Any]] = set()
        self.waiting = 0

    @property
    def computing(self) -> int:
        """How many computations are under way, those among them whose answer is late."""
        return sum(computation.running() for computation in list(self._computations))

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Take a place for a request, from before its body is read until its answer.

        Raises:
            HTTPException: 503, too many requests have one.
        """
        if self.waiting >= self.settings.max_waiting:
            raise HTTPException(
                503, f"{self.waiting} requests wait already: try again", {"Retry-After": "1"}
            )
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def read_body(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            HTTPException: 413, it is larger than the limit; 408, it did not arrive in time; 400,
                the client is gone.
        """
        seconds = self.settings.timeout
        try:
            async with asyncio.timeout(seconds):
                return await self._arrived(request)
        except TimeoutError:
            raise HTTPException(408, f"the request did not arrive within {seconds:g} s") from None
        except ClientDisconnect:
            raise HTTPException(400, "the request ended before its body did") from None

    async def _arrived(self, request: Request) -> bytes:
        most = int(self.settings.max_request_mb * 2**20)
        body = bytearray()
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= most:
                body += part
            elif size > _DROPPED * most:
                break
        if size > most:
            limit = f"the limit of {self.settings.max_request_mb:g} MB"
            raise HTTPException(
                413, f"the request is larger than {limit}: send fewer or smaller images"
            )
        return bytes(body)

    async def compute(self, request: Request, work: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns, computed in a lane.

        What has not begun is dropped when its client is gone.

        Args:
            request: The request, whose body was read.
            work: The function.
            *arguments: Its arguments.

        Raises:
            HTTPException: 499, the client is gone; 504, the answer is late.
        """
        computation = self._threads.submit(work, *arguments)
        self._computations.add(computation)
        computation.add_done_callback(self._computations.discard)
        answer = asyncio.wrap_future(computation)
        gone = asyncio.ensure_future(_wait_until_gone(request))
        try:
            done, _ = await asyncio.wait(
                (answer, gone),
                timeout=self.settings.timeout,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            gone.cancel()
            answer.cancel()
        if answer in done:
            return answer.result()
        if done:
            raise HTTPException(499, "the client is gone")
        raise HTTPException(504, f"the model did not answer within {self.settings.timeout:g} s")


async def _wait_until_gone(request: Request) -> None:
    message = await request.receive()
    while message["type"] != "http.disconnect":
        message = await request.receive()
