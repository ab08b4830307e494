"""The client that ships with `export/`: it runs alone, tries again, and finds the bad image of a batch."""

import json
import subprocess
import sys
import threading

import grpc
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.serving_load import ROOT, client_module
from tests.export.conftest import CALIBRATION
from tests.export.networks import picture
from tests.serving_double import Failure, serving

pytestmark = pytest.mark.slow

client = client_module()
FAST = client.Limits(pause=0.01)
PROTOCOLS = ("grpc", "rest")


@pytest.fixture(scope="module")
def server(shop):
    with serving({"embedder": {1: shop.embedder / "1"}, "retriever": {1: shop.retriever / "1"}}) as double:
        yield double


@pytest.fixture(autouse=True)
def no_failure_left(server):
    yield
    server.failures.clear()


def url(server, protocol, model="embedder", version=""):
    if protocol == "grpc":
        return f"grpc://127.0.0.1:{server.grpc_port}/{model}{version}"
    return f"http://127.0.0.1:{server.rest_port}/v1/models/{model}{version and '/versions'}{version}"


def connect(server, protocol, model="embedder", limits=FAST, **options):
    return client.Client(url(server, protocol, model), limits, **options)


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_image_of_a_mixed_batch_has_its_vector_or_its_error(protocol, each, server, shop):
    images = list(shop.images[:5])
    bad = {1: b"", 4: images[0][:50], 6: b"text"}
    batch = list(images)
    for place, image in sorted(bad.items()):
        batch.insert(place, image)
    with connect(server, protocol, each=each) as opened:
        answers = opened.embed(batch)
    good = iter(shop.embeddings)
    for place, answer in enumerate(answers):
        if place in bad:
            assert answer.error
            assert answer.values is None
            assert "\n" not in answer.error
        else:
            assert not answer.error
            np.testing.assert_allclose(answer.values["embedding"], next(good), atol=1e-6)
    assert "no bytes" in answers[1].error


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_searches_by_images_and_by_embeddings(protocol, server, shop):
    with connect(server, protocol, "retriever") as opened:
        by_image = opened.search([shop.images[4], b"", shop.images[7]], 3)
        by_vector = opened.search_embeddings(shop.embeddings[[4, 7]].tolist(), 3)
        everything = opened.search([shop.images[4]], 100)
        nothing = opened.embed([])
    assert [answer.values and answer.values["ids"][0] for answer in by_image] == ["item 4", None, "item 7"]
    assert by_image[1].error == "no bytes"
    assert json.loads(by_image[0].values["metadata"][0]) == {"class": "class 1", "path": "4.jpg"}
    assert by_image[0].values["labels"][0] == 1
    for image, vector in ((by_image[0], by_vector[0]), (by_image[2], by_vector[1])):
        assert image.values["ids"] == vector.values["ids"]
        np.testing.assert_allclose(image.values["distances"], vector.values["distances"], atol=1e-6)
    assert sorted(everything[0].values["ids"]) == sorted(shop.ids)
    assert nothing == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_the_same_and_of_which_class(protocol, server, shop):
    with connect(server, protocol, "retriever", client.Limits(batch_images=2)) as opened:
        classes = opened.classify([shop.images[4], b"", shop.images[7]], 3)
    assert [answer.values and answer.values["classes"] for answer in classes] == ["class 1", None, "class 2"]
    assert classes[0].values["labels"] == 1
    assert classes[1].error == "no bytes"
    with connect(server, protocol) as opened:
        pairs = opened.same([shop.images[4], shop.images[4], b""], [shop.images[4], shop.images[9], shop.images[0]])
        with pytest.raises(ValueError, match="there are 1 images, and 0 others"):
            opened.same([shop.images[4]], [])
    distance = np.linalg.norm(shop.embeddings[4] - shop.embeddings[9])
    assert pairs[0].values["same"] is True
    assert pairs[1].values["same"] is bool(distance <= CALIBRATION.threshold)
    assert pairs[1].values["distances"] == pytest.approx(distance, abs=1e-6)
    assert pairs[1].values["probabilities"] == pytest.approx(CALIBRATION.probability(distance), abs=1e-6)
    assert pairs[2].error == "image_bytes: no bytes"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_bad_embedding_is_found_among_good_ones(protocol, server, shop):
    vectors = shop.embeddings[:4].tolist()
    vectors[2] = [float("nan")] * 8
    with connect(server, protocol, "retriever") as opened:
        answers = opened.search_embeddings(vectors, 1)
    assert [answer.values and answer.values["ids"] for answer in answers] == [["item 0"], ["item 1"], None, ["item 3"]]
    assert "embedding[0] of 1: holds NaN" in answers[2].error


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_images_go_out_in_batches_bounded_by_number_and_bytes(protocol, server, shop):
    images = list(shop.images[:6])
    before = server.requests
    with connect(server, protocol, limits=client.Limits(batch_images=4)) as opened:
        answers = opened.embed(images)
    assert server.requests - before == 2
    np.testing.assert_allclose([answer.values["embedding"] for answer in answers], shop.embeddings[:6], atol=1e-6)
    before = server.requests
    with connect(server, protocol, limits=client.Limits(batch_bytes=1)) as opened:
        opened.embed(images[:3])
    assert server.requests - before == 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_busy_server_is_asked_again_and_given_up_at_last(protocol, server, shop):
    busy = Failure(grpc.StatusCode.UNAVAILABLE, "The batch scheduling queue is full")
    server.failures.extend([busy] * 4)
    with connect(server, protocol) as opened:
        assert opened.embed(shop.images[:1])[0].values
        server.failures.extend([busy] * 5)
        before = server.requests
        with pytest.raises(client.ServerError, match=r"no answer in 5 attempts: .*queue is full"):
            opened.embed(shop.images[:1])
    assert server.requests - before == 5


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_attempt_ends_at_its_timeout(protocol, server, shop):
    """The server answers only after the client has given up; without a timeout, the client would wait for it."""
    given_up = threading.Event()
    server.failures.append(lambda: given_up.wait(20))
    with (
        connect(server, protocol, limits=client.Limits(timeout=0.2, attempts=1)) as opened,
        pytest.raises(client.ServerError, match="no answer in 1 attempts"),
    ):
        opened.embed(shop.images[:1])
    given_up.set()


class Clock:
    """Stands in for `time`: it moves only when somebody waits."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("slow", [1, 9])
def test_attempts_are_repeated_within_the_deadline(slow, protocol, server, shop, monkeypatch):
    """Every attempt takes its whole timeout; the last one has what is left of the deadline."""
    clock, timeouts = Clock(), []
    monkeypatch.setattr(client, "time", clock)
    with connect(server, protocol, limits=client.Limits(timeout=2.0, deadline=5.0, pause=0.01)) as opened:
        answer = opened._transport.predict

        def predict(signature, inputs, timeout):
            timeouts.append(timeout)
            if len(timeouts) > slow:
                return answer(signature, inputs, 60)
            clock.sleep(timeout)
            raise client._Busy("too slow")

        opened._transport.predict = predict
        if slow == 1:
            assert opened.embed(shop.images[:1])[0].values
            assert timeouts == [2.0, 2.0]
        else:
            with pytest.raises(client.ServerError, match="no answer in 3 attempts: too slow"):
                opened.embed(shop.images[:1])
            assert timeouts[:2] == [2.0, 2.0]
            assert clock.now == pytest.approx(105.0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_not_served_is_an_error_at_once(protocol, server, shop):
    before = server.requests
    with connect(server, protocol, "nobody") as opened, pytest.raises(client.ServerError, match="nobody"):
        opened.embed(shop.images[:1])
    assert server.requests - before == 1
    with pytest.raises(client.ServerError, match="no answer in 2 attempts"):
        client.Client("http://127.0.0.1:1/v1/models/x", client.Limits(attempts=2, pause=0.01)).embed([b"x"])


def test_a_request_that_is_too_large_is_divided(server, shop):
    server.failures.append(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max"))
    before = server.requests
    with connect(server, "grpc") as opened:
        answers = opened.embed(shop.images[:4])
    assert all(answer.values for answer in answers)
    assert server.requests - before == 3


def test_addresses():
    for text in ("host:8500/x", "grpc://host:8500", "http://host:8501/x", "ftp://a/b"):
        with pytest.raises(ValueError, match="write grpc://"):
            client.Client(text)


def test_tensors_of_every_form_are_unpacked():
    for array in (
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(4, dtype=np.int64),
        np.array([[-1, -1], [-1, -1]], np.int32),
        np.array([[b"a", b"\xc3\xa9"]], object),
        np.zeros((2, 0), np.float32),
        np.zeros((0, 3), np.float32),
    ):
        expected = [[text.decode() for text in row] for row in array] if array.dtype == object else array.tolist()
        proto = tf.make_tensor_proto(array, tf.string if array.dtype == object else None)
        assert client._unpack(proto) == expected
    proto = tf.make_tensor_proto(np.array([1, 2, 2, 2], np.int32))
    proto.tensor_content = b""
    proto.int_val.extend([1, 2])  # TensorFlow sends equal values at the end once
    assert client._unpack(proto) == [1, 2, 2, 2]


REST_ALONE = """
import sys
for name in ("tfdml", "tensorflow", "keras", "numpy", "grpc", "tensorflow_serving"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_over_rest_it_needs_python_alone(server, shop, tmp_path):
    (tmp_path / "a.png").write_bytes(shop.images[0])
    (tmp_path / "b.jpg").write_bytes(b"no image")
    script = str(ROOT / "export" / "client.py")
    command = [sys.executable, "-I", "-c", REST_ALONE, script, f"--url={url(server, 'rest')}"]
    files = [str(tmp_path / "a.png"), str(tmp_path / "b.jpg"), str(tmp_path / "c.jpg")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    lines = {entry["image"]: entry for entry in map(json.loads, done.stdout.splitlines())}
    np.testing.assert_allclose(lines[files[0]]["embedding"], shop.embeddings[0], atol=1e-6)
    assert "not a JPEG" in lines[files[1]]["error"]
    assert "cannot be read" in lines[files[2]]["error"]


def test_its_command_line(server, shop, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(picture(3))
    path = str(tmp_path / "a.png")
    assert client.main([f"--url={url(server, 'grpc', 'retriever')}", "--k=2", path]) == 0
    assert len(json.loads(capsys.readouterr().out)["ids"]) == 2
    assert client.main([f"--url={url(server, 'rest', 'retriever')}", "--classify", path]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == "class 1"
    assert client.main([f"--url={url(server, 'rest')}", f"--same={path}", path]) == 0
    assert json.loads(capsys.readouterr().out)["same"] is True
    assert client.main(["--url=nowhere", path]) == 2
    assert "write grpc://" in capsys.readouterr().err


@pytest.mark.parametrize("protocol", ["grpc", "rest"])
def test_an_image_that_is_not_bytes_is_named(protocol, server, shop):
    with client.Client(url(server, protocol)) as connected:
        for bad in ("photo.jpg", bytearray(b"x"), None):
            with pytest.raises(TypeError, match=r"images\[1\] must be the bytes of an image file, not"):
                connected.embed([shop.images[0], bad])
        with pytest.raises(TypeError, match=r"images\[0\] must be the bytes .* not str: read the file first"):
            connected.search(["photo.jpg"], 2)
