"""Limits before a request is there: names of this machine, connections, headers and bodies that do
not arrive."""

import contextlib
import http.client
import signal
import socket
import subprocess
import sys

import pytest

pytest.importorskip("uvicorn")

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.support.processes import ROOT
from tfdml.errors import UserError
from tfdml.web import server
from tfdml.web.lanes import Lanes
from tfdml.web.server import address_of, listen, serving
from tfdml.web.settings import WebSettings

# A server whose requests never end: it prints its port, and a line once a request is computed.
ENDLESS = """
import threading
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tfdml.training.interruption import Interruption
from tfdml.web.application import application
from tfdml.web.lanes import Lanes
from tfdml.web.server import listen, serve
from tfdml.web.settings import WebSettings

def work():
    print("begun", flush=True)
    threading.Event().wait()

async def page(request):
    async with lanes.place():
        return PlainTextResponse(await lanes.compute(request, work))

lanes = Lanes(WebSettings(timeout=TIMEOUT))
with Interruption(), listen("127.0.0.1", 0) as opened:
    serve(application([Route("/", page)]), opened, str(opened.getsockname()[1]), lanes, GRACE)
"""
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


def test_of_more_connections_than_allowed_those_without_headers_give_way():
    with served(connections=3) as port, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(begin(port, b"P")) for _ in range(60)]
        assert status(port) == 200
        assert [each.recv(1000) for each in slow[:-2]] == [b""] * 58
        slow[-1].sendall(POST.removeprefix(b"P") + b"llo")
        assert slow[-1].recv(1000).startswith(b"HTTP/1.1 200")


def test_more_requests_than_connections_are_refused():
    with served(connections=3) as port, begin(port, POST), begin(port, POST), begin(port, POST):
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


@contextlib.contextmanager
def endless(timeout, grace):
    """A process that computes an answer that never ends."""
    program = ENDLESS.replace("TIMEOUT", str(timeout)).replace("GRACE", str(grace))
    command = [sys.executable, "-c", program]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **streams) as process:
        try:
            port = int(process.stdout.readline())
            with begin(port, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
                assert process.stdout.readline() == "begun\n"
                yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_computation_that_never_ends_does_not_keep_the_process(number):
    with endless(timeout=0.2, grace=1) as process:
        process.send_signal(number)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert f"ended by {number.name}; computations that did not end in time: 1" in errors


def test_a_second_signal_ends_a_server_that_still_answers():
    with endless(timeout=600, grace=600) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline().startswith("requests that have 600 s to be answered: 1;")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
