"""uvicorn in a thread: a socket to listen at, and limits that hold before a request is there."""

import asyncio
import contextlib
import ipaddress
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import h11
import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tfdml.errors import ERROR_TEXT, user_errors
from tfdml.web.lanes import Lanes

# Connections at the same time. A further one takes the place of that which has waited longest for
# its headers; where all have sent theirs, it gets 503.
CONNECTIONS = 500
# In which the headers of a request arrive.
HEADER_SECONDS = 10.0


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
        OSError,
        f"{host} has no such free port: {ERROR_TEXT}; name another, or 0 for any",
        port=port,
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


class _HeadersInTime(H11Protocol):
    """Closes a connection whose headers do not arrive in time, or for which there is no room:
    uvicorn has a limit for idle connections alone, and refuses all where there are too many."""

    _timer: asyncio.TimerHandle | None = None
    _turn = 0
    # A clock may give many connections the same time.
    _turns = itertools.count()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._make_room()
        self._watch()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its headers, where there are as many as
        there may be."""
        if self.limit_concurrency is None or len(self.connections) < self.limit_concurrency:
            return
        waiting: dict[int, _HeadersInTime] = {}
        for each in self.connections:
            if isinstance(each, _HeadersInTime) and each._timer is not None:
                waiting[each._turn] = each
        if waiting:
            waiting[min(waiting)]._drop()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the time where a request's headers are still to come; stop it where they are
        here."""
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._timer is None:
            self._turn = next(self._turns)
            self._timer = self.loop.call_later(HEADER_SECONDS, self._drop)

    def _drop(self) -> None:
        self._stop()
        self.connections.discard(self)  # now, as others are counted before the loop comes to it
        self.transport.close()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@contextlib.contextmanager
def serving(
    app: ASGIApp, opened: socket.socket, grace: int = 0, connections: int = CONNECTIONS
) -> Iterator[threading.Thread]:
    """Serve an application in a thread, so that signals end the main thread as in every other
    command.

    Args:
        app: The application. At a socket for this machine alone it answers to names of this machine
            only: by DNS rebinding, a page from elsewhere names itself and reaches this machine.
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
        http=_HeadersInTime,
        ws="none",
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
        server.should_exit = True
        server.force_exit = not grace
        thread.join(grace + 5)


def serve(
    app: ASGIApp,
    opened: socket.socket,
    announcement: str,
    lanes: Lanes,
    grace: int = 0,
    connections: int = CONNECTIONS,
) -> None:
    """Serve an application until the process is interrupted; then answer what was begun.

    A computation that does not end by then ends with the process, which Python would keep until it
    ends.

    Args:
        app: The application.
        opened: The socket, listening.
        announcement: Printed once requests are answered.
        lanes: Where the application computes.
        grace: Seconds that requests have to end.
        connections: How many there may be at once.
    """
    try:
        with serving(app, opened, grace, connections) as thread:
            print(announcement, flush=True)
            _wait(thread, lanes, grace)
    except KeyboardInterrupt as interrupt:
        if lanes.computing:
            _end_process(lanes, interrupt)
        raise


def _wait(thread: threading.Thread, lanes: Lanes, grace: int) -> None:
    """Wait until the process is interrupted."""
    try:
        # A `join` that a signal ends takes the thread for ended (Python 3.11).
        while thread.is_alive():
            time.sleep(1)
    except KeyboardInterrupt:
        if grace and lanes.waiting:
            left = f"requests that have {grace} s to be answered: {lanes.waiting:,}"
            print(f"{left}; a second signal ends at once", file=sys.stderr, flush=True)
        raise


def _end_process(lanes: Lanes, interrupt: KeyboardInterrupt) -> None:
    number = signal.Signals(getattr(interrupt, "number", signal.SIGINT))
    late = f"computations that did not end in time: {lanes.computing:,}"
    print(f"ended by {number.name}; {late}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + number)
