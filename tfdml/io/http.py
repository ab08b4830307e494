"""Parts of HTTP servers: a socket to listen at, the body of a request, work for clients, and
uvicorn in a thread."""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Iterator
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp

from tfdml.errors import REASON, user_errors

# Connections at the same time, idle ones among them; further requests get 503.
CONNECTIONS = 500


def listen(host: str, port: int) -> socket.socket:
    """Open a port.

    Args:
        host: The address to bind.
        port: The port; 0: any that is free.

    Raises:
        UserError: It cannot be opened.

    Example:
        >>> with listen("127.0.0.1", 0) as opened:
        ...     address_of(opened).startswith("http://127.0.0.1:")
        True
    """
    with user_errors(
        OSError, f"{host} has no such free port: {REASON}; name another, or 0 for any", port=port
    ):
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )


def address_of(opened: socket.socket, host: str = "") -> str:
    """Return the URL of a server, by the address that its socket is bound to or by another name of
    its host."""
    bound, port = opened.getsockname()[:2]
    host = host or bound
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def read_body(request: Request, most: int, seconds: float, dropped: int = 1) -> bytes:
    """Return the body of a request.

    Args:
        request: The request.
        most: Bytes that it may have.
        seconds: How long it may take to arrive.
        dropped: Times `most` that are read of a larger one: a client that is still sending reads no
            refusal.

    Raises:
        HTTPException: 413, it is larger; 408, it did not arrive in time; 400, the client is gone.
    """
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    body += part
                elif size > dropped * most:
                    break
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {seconds:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the request ended before its body did") from None
    if size > most:
        limit = f"{most / 2**20:g} MB"
        raise HTTPException(
            413, f"the request is larger than the limit of {limit}: send fewer or smaller images"
        )
    return bytes(body)


async def while_connected(
    request: Request, work: Awaitable[Any], seconds: float | None = None
) -> Any:
    """Return what work results in; it is cancelled when the client is gone, or after so many
    seconds.

    Args:
        request: The request, whose body was read.
        work: For its answer.
        seconds: None: any time.

    Raises:
        HTTPException: 499, the client is gone.
        TimeoutError: The time is over.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] in done:
            return tasks[0].result()
        raise HTTPException(499, "the client is gone") if done else TimeoutError
    finally:
        for task in tasks:
            task.cancel()


@contextlib.contextmanager
def serving(
    app: ASGIApp, opened: socket.socket, grace: int = 0, connections: int = CONNECTIONS
) -> Iterator[threading.Thread]:
    """Serve an application in a thread, so that signals end the main thread as in every other
    command.

    Args:
        app: A Starlette application. At a socket for this machine alone it answers to names of this
            machine only: by DNS rebinding, a page from elsewhere names itself and reaches this
            machine.
        opened: The socket, listening.
        grace: Seconds that requests have to end after the block.
        connections: How many there may be at once.

    Yields:
        The thread.
    """
    if ipaddress.ip_address(opened.getsockname()[0]).is_loopback:
        app = TrustedHostMiddleware(app, ["localhost", "127.0.0.1", "[::1]"])
    config = uvicorn.Config(
        app,
        lifespan="off",
        log_level="error",
        server_header=False,
        timeout_graceful_shutdown=grace or None,
        limit_concurrency=connections,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        server.should_exit, server.force_exit = True, not grace
        thread.join(grace + 5)
