"""Limits before a request is there: names of this machine, connections, headers and bodies that do
not arrive."""

import contextlib
import http.client
import socket

import pytest

pytest.importorskip("uvicorn")

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tfdml.errors import UserError
from tfdml.web import server
from tfdml.web.lanes import Lanes
from tfdml.web.server import address_of, listen, serving
from tfdml.web.settings import WebSettings

POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhe"


@contextlib.contextmanager
def served(**options):
    """The port of a server with one page, which answers with what is sent."""

    lanes = Lanes(WebSettings(max_request_mb=10 / 2**20, timeout=0.3))

    async def page(request):
        return PlainTextResponse(await lanes.read_body(request))

    app = Starlette(routes=[Route("/", page, methods=["GET", "POST"])])
    with listen("127.0.0.1", 0) as opened, serving(app, opened, **options):
        yield opened.getsockname()[1]


def status(port, host=None, body=b""):
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    ) as connection:
        connection.request("POST", "/", body, headers={} if host is None else {"Host": host})
        return connection.getresponse().status


def begin(port, data):
    opened = socket.create_connection(("127.0.0.1", port), timeout=60)
    opened.sendall(data)
    return opened


def test_connections_without_a_header_do_not_block_the_server():
    with served() as port, contextlib.ExitStack() as stack:
        for start in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
            for _ in range(120):
                stack.enter_context(begin(port, start))
            assert status(port) == 200


def test_a_connection_whose_headers_do_not_arrive_is_closed(monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.5)
    with served() as port, contextlib.ExitStack() as stack:
        unfinished = (b"", b"POST / HTT", POST.partition(b"\r\n\r\n")[0], b"GET / HTTP/1.1\r\nX: ")
        slow = [stack.enter_context(begin(port, start)) for start in unfinished]
        again = stack.enter_context(begin(port, POST + b"llo"))
        assert again.recv(1000).startswith(b"HTTP/1.1 200")
        again.sendall(b"GET / HTTP/1.1\r\n")
        assert [each.recv(1000) for each in (*slow, again)] == [b""] * 5
        assert status(port) == 200


def test_more_connections_than_allowed_are_refused():
    with served(connections=3) as port, begin(port, b"P"), begin(port, b"P"), begin(port, b"P"):
        assert status(port) == 503


def test_only_names_of_this_machine_are_answered():
    with served() as port:
        for host in (
            "localhost",
            f"localhost:{port}",
            f"127.0.0.1:{port}",
            f"[::1]:{port}",
            "LOCALHOST",
        ):
            assert status(port, host) == 200, host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "localhost.evil.example",
            "127.0.0.1.nip.io",
            "",
        ):
            assert status(port, host) == 400, host


def test_bodies_arrive_whole_in_time_or_are_refused():
    with served() as port, begin(port, POST) as whole, begin(port, POST) as half:
        whole.sendall(b"llo")
        assert whole.recv(1000).startswith(b"HTTP/1.1 200")
        assert half.recv(1000).startswith(b"HTTP/1.1 408")
        assert status(port, body=b"x" * 11) == 413


def test_a_taken_port_is_one_line():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UserError, match=r"^port=\d+: 127.0.0.1"),
    ):
        listen("127.0.0.1", taken.getsockname()[1])
    with listen("127.0.0.1", 0) as opened:
        assert address_of(opened, "::1").startswith("http://[::1]:")
