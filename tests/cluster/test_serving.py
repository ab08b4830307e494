"""`tfdml serve` in processes of its own: every test asks one server, in the order of the file; the
last one ends it."""

import asyncio
import contextlib
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import tensorflow as tf

from benchmarks.serving import Load, bomb, client_module, odd_images
from tests.cluster.test_replica import IMAGES, b64
from tests.export.conftest import LIMIT, SEARCHED, shop_dataset
from tests.export.networks import small_embedder
from tests.worker_processes import descendants
from tfdml.cluster.settings import ServeSettings
from tfdml.export import Retriever
from tfdml.export.saved_model import write_saved_model

pytest.importorskip("fastapi")
from tfdml.cluster.serving import Version, application
from tfdml.io.http import listen, serving

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST_WAITING = 6
FLAGS = ["--name=shop", "--port=0", f"--max_waiting={MOST_WAITING}"]
FLAGS += ["--max_instances=40", "--max_request_mb=0.5", "--timeout=20"]


def start(folder, log):
    """A process that serves the newest version in a folder."""
    command = [sys.executable, "-m", "tfdml", "serve", f"--model={folder}", *FLAGS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(log, "w") as file:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment
        )


class Server:
    """A server of a retriever."""

    def __init__(self, folder):
        self.folder, self.log = folder / "shop", folder / "log"
        write_saved_model(small_embedder(), folder / "embedder" / "1", LIMIT)
        Retriever.build(
            folder / "embedder", shop_dataset(IMAGES), self.folder, calibration=SEARCHED
        )
        (self.folder / "2").mkdir()  # an export without a SavedModel
        self.model = tf.saved_model.load(str(self.folder / "1"))
        self.images = [*IMAGES, *odd_images()]
        self.vectors = self.direct("serving_default")["embedding"]
        self.process = start(self.folder, self.log)
        line = self.process.stdout.readline()
        assert line.startswith("serving at http://127.0.0.1:"), self.log.read_text()
        self.url = line.split()[-1]
        self.port = int(self.url.split(":")[2].partition("/")[0])

    def direct(self, signature, **more):
        outputs = self.model.signatures[signature](image_bytes=tf.constant(self.images), **more)
        return {name: value.numpy() for name, value in outputs.items()}

    def ask(self, path, body=None):
        """The status, the headers, and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, body)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def predict(self, **request):
        status, _, body = self.ask("/v1/models/shop:predict", json.dumps(request).encode())
        return status, json.loads(body)

    def wait_for(self, condition, seconds=200):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.1)

    def begin(self, body):
        """Send a request without its last byte."""
        opened = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        opened.sendall(
            b"POST /v1/models/shop:predict HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        )
        opened.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
        return opened

    @staticmethod
    def finish(opened, body):
        """Send the last byte, and return the answer."""
        with opened:
            opened.sendall(body[-1:])
            return b"".join(iter(lambda: opened.recv(2**16), b""))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("served"))
    yield server
    server.process.kill()
    server.process.wait()


class Endless:
    """Stands in for the handle of a version, whose answers never come."""

    def __init__(self):
        self.begun, self.cancelled = threading.Event(), threading.Event()
        self.predict = self

    def remote(self, body):
        self.begun.set()
        return self

    def __await__(self):
        return asyncio.sleep(600).__await__()

    def cancel(self):
        self.cancelled.set()


def test_work_whose_client_is_gone_is_dropped():
    handle = Endless()
    with (
        listen("127.0.0.1", 0) as opened,
        serving(application(Version("shop", "1", handle), ServeSettings()), opened),
    ):
        start = b"POST /v1/models/shop:predict HTTP/1.1\r\nHost: localhost\r\n"
        request = start + b"Content-Length: 2\r\n\r\n{}"
        with socket.create_connection(opened.getsockname(), timeout=60) as client:
            client.sendall(request)
            assert handle.begun.wait(60)
        assert handle.cancelled.wait(60)


def test_a_version_that_cannot_be_served_ends_the_command_with_its_reason(tmp_path):
    (tmp_path / "shop" / "3").mkdir(parents=True)
    (tmp_path / "shop" / "3" / "saved_model.pb").write_bytes(b"broken")
    assert start(tmp_path / "shop", tmp_path / "log").wait(200) == 2
    *_, line = (tmp_path / "log").read_text().splitlines()
    assert "shop/3 is not served: cannot be loaded" in line


def test_answers_are_those_of_the_saved_model_in_both_forms(server):
    images = [b64(image) for image in server.images]
    expected = server.direct("search_each", k=tf.constant(3))
    status, found = server.predict(
        signature_name="search_each", inputs={"image_bytes": images, "k": 3}
    )
    assert status == 200
    assert set(found["outputs"]) == set(expected)
    assert [[text.encode() for text in row] for row in found["outputs"]["ids"]] == expected[
        "ids"
    ].tolist()
    np.testing.assert_allclose(found["outputs"]["distances"], expected["distances"], atol=1e-5)
    rows = [{"image_bytes": image, "k": 3} for image in images]
    by_row = server.predict(signature_name="search_each", instances=rows)[1]["predictions"]
    assert [row["ids"] for row in by_row] == found["outputs"]["ids"]
    for request in ({"instances": images}, {"inputs": {"image_bytes": images}}):
        (vectors,) = server.predict(**request)[1].values()
        np.testing.assert_allclose(vectors, server.vectors, atol=1e-5)


def test_the_client_needs_python_alone(server, tmp_path):
    (tmp_path / "a.png").write_bytes(IMAGES[0])
    (tmp_path / "b.jpg").write_bytes(b"no image")
    files = [str(tmp_path / "a.png"), str(tmp_path / "b.jpg")]
    script = [ROOT / "export" / "client.py", f"--url={server.url}", *files]
    command = [sys.executable, "-I", "-S", *script]  # without installed packages
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    lines = {entry["image"]: entry for entry in map(json.loads, done.stdout.splitlines())}
    np.testing.assert_allclose(lines[files[0]]["embedding"], server.vectors[0], atol=1e-5)
    assert "not a JPEG" in lines[files[1]]["error"]


def test_no_answer_is_wrong_under_concurrency(server):
    """By the client that ships with `export/`, as it is."""
    gallery = server.vectors[: len(IMAGES)], list(shop_dataset(IMAGES).names)
    load = Load(client_module(), server.images, server.vectors, gallery)
    tally = load.run([server.url, server.url], clients=5, requests=20)
    assert not tally.wrong
    assert min(tally.items.count(kind) for kind in ("good", "bad", "refused")) > 3
    (state,) = json.loads(server.ask("/v1/models/shop")[2])["model_version_status"]
    assert (state["version"], state["state"], state["status"]["error_code"]) == (
        "1",
        "AVAILABLE",
        "OK",
    )


def test_bad_requests_are_refused_and_fail_no_other(server):
    path, image = "/v1/models/shop:predict", b64(IMAGES[0])
    bad = [
        (path, b"[" * 10_000, 400, "JSON"),
        (path, {"instances": [image] * 41}, 400, "41 instances"),
        (path, {"instances": [image, b64(b"")]}, 400, "image_bytes[1] of 2"),
        (path, {"instances": [b64(bomb())]}, 400, "30000 x 30000 pixels"),
        (
            path,
            {"inputs": {"embedding": [[1, 2]], "k": 1}, "signature_name": "search_embedding"},
            400,
            "shape",
        ),
        (path, b" " * 2**20, 413, "0.5 MB"),
        (path, b" " * 2**23, 413, "0.5 MB"),
        (path, None, 400, "GET"),
        ("/v1/models/other:predict", {"instances": [image]}, 404, "Servable not found"),
        ("/v1/models/shop/versions/7:predict", {"instances": [image]}, 404, "versions/7"),
        ("/v1/models/shop/versions/7", None, 404, "versions/7"),
        ("/elsewhere", None, 404, "/elsewhere"),
    ]
    good, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            status, found = server.predict(instances=[image])
            good.append(
                status == 200 and np.abs(found["predictions"] - server.vectors[0]).max() < 1e-5
            )

    thread = threading.Thread(target=ask)
    thread.start()
    for place, body, status, says in bad:
        found, _, text = server.ask(
            place, json.dumps(body).encode() if isinstance(body, dict) else body
        )
        assert (found, says in json.loads(text)["error"]) == (status, True), (place, found, text)
    stop.set()
    thread.join()
    assert good
    assert all(good)


def test_overload_is_refused_early_and_what_was_taken_is_answered(server):
    body = json.dumps({"instances": [b64(IMAGES[0])]}).encode()
    opened = [server.begin(body) for _ in range(MOST_WAITING)]

    def refused():
        status, headers, _ = server.ask("/v1/models/shop:predict", body)
        assert status != 503 or headers["Retry-After"] == "1"
        return status == 503

    server.wait_for(refused, 10)
    assert server.ask("/healthz")[0] == 200
    assert [server.finish(each, body).partition(b"\r\n")[0] for each in opened] == [
        b"HTTP/1.1 200 OK"
    ] * MOST_WAITING
    for _ in range(MOST_WAITING):  # what ends without its last byte takes no place
        server.begin(body).close()
    server.wait_for(lambda: server.predict(instances=[b64(IMAGES[0])])[0] == 200, 10)
    assert "Traceback" not in server.log.read_text()


def test_only_this_machine_can_connect(server):
    processes = [psutil.Process(server.process.pid)]
    processes += processes[0].children(recursive=True)
    open_ = [
        place
        for each in processes
        for place in each.net_connections("inet")
        if place.status == "LISTEN"
    ]
    assert len(open_) > 3
    assert {place.laddr.ip.removeprefix("::ffff:") for place in open_} <= {"127.0.0.1", "::1"}


def test_a_killed_replica_is_started_again(server):
    (replica,) = descendants("ServeReplica", server.process.pid)
    os.kill(replica, signal.SIGKILL)
    server.wait_for(lambda: server.predict(instances=[b64(IMAGES[0])])[0] == 200)
    assert server.process.poll() is None


def test_sigterm_answers_what_was_begun_and_ends_all_processes(server):
    body = json.dumps({"instances": [b64(IMAGES[0])]}).encode()
    processes = psutil.Process(server.process.pid).children(recursive=True)
    opened = server.begin(body)
    assert server.ask("/healthz")[0] == 200  # what came before is begun
    server.process.send_signal(signal.SIGTERM)
    until = time.monotonic() + 20
    while time.monotonic() < until:  # new requests are refused, soon
        try:
            server.ask("/healthz")
        except OSError:
            break
    answer = server.finish(opened, body)
    assert b" 200 OK" in answer
    found = json.loads(answer.partition(b"\r\n\r\n")[2])["predictions"]
    np.testing.assert_allclose(found[0], server.vectors[0], atol=1e-5)
    assert server.process.wait(30) == 128 + signal.SIGTERM
    assert server.log.read_text().splitlines()[-1] == "serve: ended by SIGTERM"
    psutil.wait_procs(processes, 10)
    assert not [each for each in processes if each.is_running()]
