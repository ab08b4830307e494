"""The REST API: what it answers under load and to what is wrong, and `tfdml serve` in a process of
its own."""

import contextlib
import http.client
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import psutil
import pytest
import tensorflow as tf
from PIL import Image

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from benchmarks.serving import Load, bomb, client_module, odd_images
from tests.data.preparations import encoded
from tests.export.conftest import LIMIT, SEARCHED, shop_dataset
from tests.export.networks import small_embedder
from tests.web.test_requests import IMAGES, b64
from tfdml.errors import UserError
from tfdml.export import Retriever
from tfdml.export.saved_model import write_saved_model, write_warm_up
from tfdml.web.application import application
from tfdml.web.lanes import Lanes
from tfdml.web.rest import ServedModel, rest_routes
from tfdml.web.server import address_of, listen, serving
from tfdml.web.settings import WebSettings

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREDICT = "/v1/models/shop:predict"
MOST_WAITING = 6
SETTINGS = WebSettings(max_waiting=MOST_WAITING, max_instances=40, max_request_mb=0.5, timeout=20)


class Held:
    """A model whose answers wait until they are let go."""

    name, version = "shop", "1"

    def __init__(self):
        self.begun, self.free, self.bodies = threading.Semaphore(0), threading.Event(), []

    def answer(self, body, settings):
        self.begun.release()
        self.free.wait(60)
        self.bodies.append(body)
        return 200, b'{"predictions": []}'


@contextlib.contextmanager
def held(**settings):
    """The port of a server of a `Held` model, and the model."""
    model = Held()
    model.lanes = Lanes(WebSettings(**settings))
    app = application(rest_routes(model, model.lanes))
    with listen("127.0.0.1", 0) as opened, serving(app, opened, grace=1):
        try:
            yield opened.getsockname()[1], model
        finally:
            model.free.set()


def post(port, body=b"{}"):
    """Send a request; return its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", PREDICT, body)
    return connection


def test_a_late_answer_is_504_and_holds_up_its_own_lane_alone():
    with held(timeout=0.3, lanes=2) as (port, model):
        assert post(port, b"late").getresponse().status == 504
        assert model.bodies == []
        model.free.set()
        assert post(port, b"next").getresponse().status == 200


def test_work_that_has_not_begun_is_dropped_with_its_client():
    with held(lanes=1) as (port, model):
        first = post(port, b"first")
        assert model.begun.acquire(timeout=60)
        gone = post(port, b"gone")
        wait_until(lambda: model.lanes.waiting == 2)
        gone.close()
        wait_until(lambda: model.lanes.waiting == 1)
        last = post(port, b"last")
        model.free.set()
        assert [first.getresponse().status, last.getresponse().status] == [200, 200]
        assert model.bodies == [b"first", b"last"]


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_overload_is_refused_early_and_what_was_taken_is_answered():
    with held(lanes=1, max_waiting=3) as (port, model):
        taken = [post(port) for _ in range(3)]
        wait_until(lambda: model.lanes.waiting == 3)
        answer = post(port).getresponse()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        model.free.set()
        assert [each.getresponse().status for each in taken] == [200] * 3


def is_open(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset while it is being closed
        return False
    return True


def client_of(model=None, token=""):
    app = application(rest_routes(model or Held(), Lanes(SETTINGS)), token)
    return TestClient(app, "http://localhost", raise_server_exceptions=False)


def test_requests_and_refusals_are_counted():
    pytest.importorskip("prometheus_client")
    model = Held()
    model.free.set()
    client = client_of(model)
    for _ in range(3):
        client.post(PREDICT, content=b"{}")
    client.get("/etc/passwd")
    counts = client.get("/metrics").text
    assert 'tfdml_requests_total{route="predict",status="200"} 3.0' in counts
    assert 'tfdml_requests_total{route="none",status="404"} 1.0' in counts
    assert 'tfdml_request_seconds_count{route="predict"} 3.0' in counts
    assert "passwd" not in counts


def test_a_fault_of_the_server_is_one_line_with_the_headers_of_all(monkeypatch):
    model = Held()
    monkeypatch.setattr(model, "answer", None)
    answer = client_of(model).post(PREDICT, content=b"{}")
    assert (answer.status_code, "log" in answer.json()["error"]) == (500, True)
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_pages_of_other_sites_and_clients_without_the_token_are_refused():
    for site in ("cross-site", "same-site"):
        headers = {"sec-fetch-site": site}
        assert client_of().post(PREDICT, content=b"{}", headers=headers).status_code == 403
    for asked in ({}, {"params": {"token": "sécret"}}, {"cookies": {"tfdml_token": "x"}}):
        assert client_of(token="secret").get("/healthz", **asked).status_code == 401
    visitor = client_of(token="secret")
    assert visitor.get("/?token=secret", follow_redirects=False).headers["location"] == "/"
    assert visitor.get("/healthz").status_code == 200


class Shop:
    """A server of a retriever, and what it should answer."""

    def __init__(self, folder):
        self.folder = folder / "shop"
        write_saved_model(small_embedder(), folder / "embedder" / "1", LIMIT)
        dataset = shop_dataset(IMAGES)
        Retriever.build(folder / "embedder", dataset, self.folder, calibration=SEARCHED)
        self.model = tf.saved_model.load(str(self.folder / "1"))
        self.images = [*IMAGES, *odd_images()]
        self.vectors = self.direct("serving_default")["embedding"]
        self.url = ""

    def direct(self, signature, **more):
        outputs = self.model.signatures[signature](image_bytes=tf.constant(self.images), **more)
        return {name: value.numpy() for name, value in outputs.items()}

    def ask(self, path, body=None):
        """The status, and the body of an answer."""
        host = self.url.split("/")[2]
        connection = http.client.HTTPConnection(host, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET" if body is None else "POST", path, body)
            response = connection.getresponse()
            return response.status, response.read()

    def predict(self, **request):
        status, body = self.ask(PREDICT, json.dumps(request).encode())
        return status, json.loads(body)


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    shop = Shop(tmp_path_factory.mktemp("served"))
    app = application(rest_routes(ServedModel(shop.folder / "1", "shop"), Lanes(SETTINGS)))
    with listen("127.0.0.1", 0) as opened, serving(app, opened, grace=1):
        shop.url = f"{address_of(opened)}/v1/models/shop"
        yield shop


@pytest.mark.slow
def test_answers_are_those_of_the_saved_model_in_both_forms(shop):
    images = [b64(image) for image in shop.images]
    expected = shop.direct("search_each", k=tf.constant(3))
    inputs = {"image_bytes": images, "k": 3}
    status, answer = shop.predict(signature_name="search_each", inputs=inputs)
    assert status == 200
    outputs = answer["outputs"]
    assert set(outputs) == set(expected)
    assert [[text.encode() for text in row] for row in outputs["ids"]] == expected["ids"].tolist()
    np.testing.assert_allclose(outputs["distances"], expected["distances"], atol=1e-5)
    rows = [{"image_bytes": image, "k": 3} for image in images]
    by_row = shop.predict(signature_name="search_each", instances=rows)[1]["predictions"]
    assert [row["ids"] for row in by_row] == outputs["ids"]
    for request in ({"instances": images}, {"inputs": {"image_bytes": images}}):
        (vectors,) = shop.predict(**request)[1].values()
        np.testing.assert_allclose(vectors, shop.vectors, atol=1e-5)
    boxed = {**images[0], "box": [1, 2, 31, 33]}
    part = Image.open(io.BytesIO(IMAGES[0])).convert("RGB").crop(boxed["box"])
    whole, alone = ({"instances": [image]} for image in (boxed, b64(encoded(part, "PNG"))))
    assert shop.predict(**whole)[1] == shop.predict(**alone)[1]
    (state,) = json.loads(shop.ask("/v1/models/shop")[1])["model_version_status"]
    assert (state["version"], state["state"]) == ("1", "AVAILABLE")


@pytest.mark.slow
def test_no_answer_is_wrong_under_concurrency(shop):
    """By the client that ships with `export/`, as it is."""
    gallery = shop.vectors[: len(IMAGES)], list(shop_dataset(IMAGES).names)
    load = Load(client_module(), shop.images, shop.vectors, gallery)
    tally = load.run([shop.url, shop.url], clients=5, requests=20)
    assert not tally.wrong
    assert min(tally.items.count(kind) for kind in ("good", "bad", "refused")) > 3


@pytest.mark.slow
def test_bad_requests_are_refused_and_fail_no_other(shop):
    image = b64(IMAGES[0])
    bad = [
        (PREDICT, b"[" * 10_000, 400, "JSON"),
        (PREDICT, {"instances": [image] * 41}, 400, "41 instances"),
        (PREDICT, {"instances": [image, b64(b"")]}, 400, "image_bytes[1] of 2"),
        (PREDICT, {"instances": [b64(bomb())]}, 400, "30000 x 30000 pixels"),
        (
            PREDICT,
            {"inputs": {"embedding": [[1, 2]], "k": 1}, "signature_name": "search_embedding"},
            400,
            "shape",
        ),
        (PREDICT, b" " * 2**20, 413, "0.5 MB"),
        (PREDICT, b" " * 2**23, 413, "0.5 MB"),
        (PREDICT, None, 400, "GET"),
        ("/v1/models/other:predict", {"instances": [image]}, 404, "Servable not found"),
        ("/v1/models/shop/versions/7:predict", {"instances": [image]}, 404, "versions/7"),
        ("/v1/models/shop/versions/7", None, 404, "versions/7"),
        ("/elsewhere", None, 404, "/elsewhere"),
    ]
    good, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            status, answer = shop.predict(instances=[image])
            difference = np.abs(answer["predictions"] - shop.vectors[0]).max()
            good.append(status == 200 and difference < 1e-5)

    thread = threading.Thread(target=ask)
    thread.start()
    for path, request, status, says in bad:
        body = json.dumps(request).encode() if isinstance(request, dict) else request
        answered, text = shop.ask(path, body)
        assert (answered, says in json.loads(text)["error"]) == (status, True), (path, text)
    stop.set()
    thread.join()
    assert good
    assert all(good)


class Served(tf.Module):
    """A model of two features a row, or of one for each image."""

    @tf.function(input_signature=[tf.TensorSpec((None, 2), tf.float32, "features")])
    def double(self, features):
        with tf.control_dependencies([tf.debugging.assert_less(features, 9.0, "not below 9")]):
            return {"embedding": 2 * features}

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string, "image_bytes")])
    def nothing(self, image_bytes):
        return {"embedding": tf.fill((tf.shape(image_bytes)[0], 2), np.nan)}


def test_a_signature_answers_or_says_why_not(tmp_path, monkeypatch):
    served = Served()
    tf.saved_model.save(served, tmp_path / "7", {"serving_default": served.double})
    model = ServedModel(tmp_path / "7", "shop")
    assert (model.name, model.version) == ("shop", "7")

    def answer(rows):
        status, body = model.answer(json.dumps({"instances": rows}).encode(), WebSettings())
        return status, json.loads(body)

    assert answer([[1, 2], [3, 4]]) == (200, {"predictions": [[2, 4], [6, 8]]})
    for rows, says in (([[1, 2, 3]], "shape"), ([[1, 9]], "not below 9")):
        status, said = answer(rows)
        assert (status, says in said["error"]) == (400, True), said

    def fail(call):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "compute", fail)
    assert answer([[1, 2]]) == (500, {"error": "the model failed: RuntimeError: out of memory"})


def test_a_model_that_cannot_answer_is_refused(tmp_path):
    served = Served()
    tf.saved_model.save(served, tmp_path / "nan", {"serving_default": served.nothing})
    # Without requests it is not asked.
    assert ServedModel(tmp_path / "nan", "shop").inputs["serving_default"].keys() == {"image_bytes"}
    write_warm_up(tmp_path / "nan", tf.saved_model.load(str(tmp_path / "nan")).signatures)
    with pytest.raises(UserError, match=r"nan is not served: its signature serving_default .* NaN"):
        ServedModel(tmp_path / "nan", "shop")
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "saved_model.pb").write_bytes(b"broken")
    with pytest.raises(UserError, match="3 is not served: cannot be loaded"):
        ServedModel(tmp_path / "3", "shop")


@pytest.mark.slow
def test_the_command_serves_this_machine_alone_and_answers_what_was_begun(shop, tmp_path):
    command = [sys.executable, "-m", "tfdml", "serve", f"--model={shop.folder}", "--port=0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    log = tmp_path / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment
        )
    with process:
        assert process.stdout.readline().startswith("loading version 1 of ")
        line = process.stdout.readline()
        assert line.startswith("serving at http://127.0.0.1:"), log.read_text()
        address = line.split()[-1]
        port = int(address.split(":")[2].partition("/")[0])
        connections = psutil.Process(process.pid).net_connections("inet")
        listening = [place.laddr.ip for place in connections if place.status == "LISTEN"]
        assert listening == ["127.0.0.1"]
        files = tmp_path / "a.png", tmp_path / "b.jpg"
        files[0].write_bytes(IMAGES[0])
        files[1].write_bytes(b"no image")
        script = [ROOT / "export" / "client.py", f"--url={address}", *files]
        client = [sys.executable, "-I", "-S", *script]  # without installed packages
        done = subprocess.run(client, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1, done.stderr
        lines = {entry["image"]: entry for entry in map(json.loads, done.stdout.splitlines())}
        np.testing.assert_allclose(lines[str(files[0])]["embedding"], shop.vectors[0], atol=1e-5)
        assert "not a JPEG" in lines[str(files[1])]["error"]
        body = json.dumps({"instances": [b64(IMAGES[0])]}).encode()
        head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % PREDICT.encode()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as opened:
            opened.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1])
            health = f"http://127.0.0.1:{port}/healthz"
            assert urllib.request.urlopen(health, timeout=60).status == 200  # the other is begun
            process.send_signal(signal.SIGTERM)
            while is_open(port):
                pass
            opened.sendall(body[-1:])
            answer = b"".join(iter(lambda: opened.recv(2**16), b""))
        assert b" 200 OK" in answer
        assert process.wait(60) == 128 + signal.SIGTERM
    assert log.read_text().splitlines()[-1] == "serve: ended by SIGTERM"


@pytest.mark.slow
def test_the_example_runs_the_same_application_in_ray_serve(shop, tmp_path):
    pytest.importorskip("ray.serve")
    with listen("127.0.0.1", 0) as opened:
        port = opened.getsockname()[1]
    script = ROOT / "export" / "ray_serve.py"
    command = [sys.executable, script, shop.folder, "--replicas=1", f"--port={port}"]
    # Ray kills a proxy that is not ready within three times this, 5 by default.
    patience = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **patience}
    log = tmp_path / "log"
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        url = f"http://127.0.0.1:{port}/v1/models/shop"
        until = time.monotonic() + 200
        while not is_ready(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        inputs = {"image_bytes": list(shop.images)}
        vectors = client_module().predict(url, "serving_default", inputs)["embedding"]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
    np.testing.assert_allclose(vectors, shop.vectors, atol=1e-5)


def is_ready(url):
    try:
        return urllib.request.urlopen(url, timeout=60).status == 200
    except OSError:
        return False
