"""Parts of HTTP servers: connections that send no header, other names of this machine, work whose client is gone."""

import asyncio
import contextlib
import http.client
import socket
import threading

import pytest

pytest.importorskip("uvicorn")

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tfdml.errors import UserError
from tfdml.io import http as module
from tfdml.io.http import address_of, listen, read_body, serving, while_connected


@contextlib.contextmanager
def served(endpoint, **options):
    """The port of a server with one page."""
    app = Starlette(routes=[Route("/", endpoint, methods=["GET", "POST"])])
    with listen("127.0.0.1", 0) as opened, serving(app, opened, **options):
        yield opened.getsockname()[1]


POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhe"


async def hello(request):
    return PlainTextResponse("hello")


def status(port, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/", headers={} if host is None else {"Host": host})
        return connection.getresponse().status


def begin(port, data):
    opened = socket.create_connection(("127.0.0.1", port), timeout=60)
    opened.sendall(data)
    return opened


def test_connections_without_a_header_neither_block_the_server_nor_stay(monkeypatch):
    monkeypatch.setattr(module, "HEADER_SECONDS", 0.3)
    with served(hello) as port, contextlib.ExitStack() as stack:
        for start in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
            opened = [stack.enter_context(begin(port, start)) for _ in range(120)]
            assert status(port) == 200
            assert all(each.recv(100) == b"" for each in opened)
        # Nor one that has had an answer before.
        again = stack.enter_context(begin(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"))
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET / HTTP/1.1\r\n")
        assert b"".join(iter(lambda: again.recv(1000), b"")) in (b"", b"hello")


def test_a_request_that_takes_longer_than_a_header_is_answered(monkeypatch):
    monkeypatch.setattr(module, "HEADER_SECONDS", 0.05)

    async def slow(request):
        await asyncio.sleep(0.5)
        return PlainTextResponse(await read_body(request, 10, seconds=60))

    with (
        served(slow) as port,
        begin(port, POST) as opened,
    ):
        opened.sendall(b"llo")
        assert opened.recv(1000).startswith(b"HTTP/1.1 200")


def test_more_connections_than_allowed_are_refused():
    with served(hello, connections=3) as port, begin(port, b"x"), begin(port, b"x"), begin(port, b"x"):
        assert status(port) == 503


def test_only_names_of_this_machine_are_answered():
    with served(hello) as port:
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST"):
            assert status(port, host) == 200, host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.nip.io",
            "",
            "x@localhost",
        ):
            assert status(port, host) == 421, host


def test_work_whose_client_is_gone_is_cancelled():
    ends, begun = [], threading.Event()
    ended = threading.Event()

    async def work():
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ends.append("cancelled")
            ended.set()
            raise

    async def page(request):
        await read_body(request, 10, seconds=60)
        return PlainTextResponse(await while_connected(request, work()))

    with served(page) as port:
        opened = begin(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert begun.wait(60)
        opened.close()
        assert ended.wait(60)
    assert ends == ["cancelled"]


def test_a_body_that_does_not_arrive_is_refused():
    async def page(request):
        return PlainTextResponse(await read_body(request, 10, seconds=0.2))

    with (
        served(page) as port,
        begin(port, POST) as opened,
    ):
        assert opened.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_taken_port_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match=r"`port=\d+` of 127.0.0.1"):
        listen("127.0.0.1", taken.getsockname()[1])
    with listen("127.0.0.1", 0) as opened:
        assert address_of(opened, "::1").startswith("http://[::1]:")
