"""Parts of HTTP servers: a socket to listen at, the body of a request, and uvicorn in a thread."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request

from tfdml.errors import REASON, user_errors


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
    with user_errors(OSError, f"`port={port}` of {host} cannot be opened: {REASON}; name another, or 0 for any"):
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def address_of(opened: socket.socket, host: str = "") -> str:
    """Return the URL of a server, by the address that its socket is bound to or by another name of its host."""
    bound, port = opened.getsockname()[:2]
    host = host or bound
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def read_body(request: Request, most: int, dropped: int = 1) -> bytes:
    """Return the body of a request, or answer 413: of a larger one, `dropped` times `most` bytes are read."""
    # A client that is still sending reads no refusal.
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            body += part
        elif size > dropped * most:
            break
    if size > most:
        limit = f"{most / 2**20:g} MB"
        raise HTTPException(413, f"the request is larger than the limit of {limit}: send fewer or smaller images")
    return bytes(body)


@contextlib.contextmanager
def serving(app: Any, opened: socket.socket, grace: int = 0, **options: Any) -> Iterator[threading.Thread]:
    """Serve an application in a thread, so that signals end the main thread as in every other command.

    Args:
        app: A Starlette application.
        opened: The socket, listening.
        grace: Seconds that requests have to end after the block.
        **options: Further ones of `uvicorn.Config`.

    Yields:
        The thread.
    """
    config = uvicorn.Config(
        app, log_level="error", server_header=False, timeout_graceful_shutdown=grace or None, **options
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        server.should_exit, server.force_exit = True, not grace
        thread.join(grace + 5)
