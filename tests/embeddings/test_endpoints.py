"""A served model embeds as its SavedModel does, and what goes wrong on the way is told in one line."""

import sys
import time

import grpc
import numpy as np
import pytest

from tests.export import models_on_disk
from tests.serving_double import Failure, serving
from tfdml.embeddings.backends import load_backend
from tfdml.embeddings.endpoints import Address, GrpcEndpoint, RestEndpoint
from tfdml.errors import UserError

pytestmark = pytest.mark.slow

PROTOCOLS = ("grpc", "rest")


@pytest.fixture(scope="module")
def server(models, other):
    with serving({"pictures": {1: models.saved_model, 2: other.saved_model}}) as double:
        yield double


@pytest.fixture(autouse=True)
def no_failure_left(server):
    yield
    server.failures.clear()


def address(server, protocol, rest="/pictures"):
    return f"{protocol}://127.0.0.1:{server.grpc_port if protocol == 'grpc' else server.rest_port}{rest}"


def connect(text, **options):
    where = Address.parse(text)
    return (GrpcEndpoint if where.scheme == "grpc" else RestEndpoint)(where, pause=0.01, **options)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_equal_to_the_saved_model_exactly(protocol, server, models):
    dataset = models_on_disk.pictures()
    expected = load_backend(models.saved_model).embed(dataset, 4)
    endpoint = load_backend(address(server, protocol, "/pictures/1"))
    assert endpoint.kind == protocol
    np.testing.assert_array_equal(endpoint.embed(dataset, 4), expected)
    rest = np.concatenate(list(endpoint.stream(dataset, 4, first=8)))
    np.testing.assert_array_equal(rest, expected[8:])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_newest_version_is_kept_for_all_of_a_set(protocol, server):
    newest = load_backend(address(server, protocol))
    assert newest.at.version == 2
    assert "version 2" in newest.checksum()
    first = load_backend(address(server, protocol, "/pictures/1"))
    dataset = models_on_disk.pictures(3)
    assert not np.allclose(newest.embed(dataset, 4), first.embed(dataset, 4), atol=1e-3)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_is_not_served(protocol, server):
    with pytest.raises(UserError, match="does not serve cars: Could not find"):
        connect(address(server, protocol, "/cars"))
    with pytest.raises(UserError, match="does not serve version 7 of pictures; it serves 1, 2"):
        connect(address(server, protocol, "/pictures/7"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_version_that_is_withdrawn_meanwhile(protocol, server):
    endpoint = connect(address(server, protocol))
    served = server.models["pictures"].pop(2)
    try:
        with pytest.raises(UserError, match="Servable not found"):
            endpoint.embed(models_on_disk.pictures(2), 4)
    finally:
        server.models["pictures"][2] = served


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_unavailable_server_is_asked_again(protocol, server):
    dataset = models_on_disk.pictures(3)
    endpoint = connect(address(server, protocol))
    expected = endpoint.embed(dataset, 4)
    busy = Failure(grpc.StatusCode.UNAVAILABLE, "The batch scheduling queue is full")
    server.failures.extend([busy] * 4)
    before = server.requests
    np.testing.assert_array_equal(endpoint.embed(dataset, 4), expected)
    assert server.requests - before == 5
    server.failures.extend([busy] * 5)
    with pytest.raises(UserError, match="in 5 attempts: The batch scheduling queue is full"):
        endpoint.embed(dataset, 4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nobody_listens(protocol):
    with pytest.raises(UserError, match="cannot be reached, in 5 attempts") as refused:
        connect(f"{protocol}://127.0.0.1:1/pictures")
    assert "\n" not in str(refused.value)


def test_the_other_protocols_port(server):
    for text in (f"rest://127.0.0.1:{server.grpc_port}/x", f"grpc://127.0.0.1:{server.rest_port}/x"):
        with pytest.raises(UserError, match="is this its port"):
            connect(text)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_answer_in_time(protocol, server):
    endpoint = connect(address(server, protocol), timeout=0.2)
    server.failures.append(lambda: time.sleep(0.8))
    with pytest.raises(UserError, match=r"no answer within 0\.2 s to a request of 3 images"):
        endpoint.embed(models_on_disk.pictures(3), 4)
    with pytest.raises(UserError, match=r"`timeout=0\.0`: must be more than 0"):
        connect(address(server, protocol), timeout=0.0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_image_that_is_refused_is_named(protocol, server):
    with pytest.raises(UserError, match=r"refuses image6\.jpg") as refused:
        connect(address(server, protocol)).embed(models_on_disk.pictures(broken=[6]), 4)
    assert "\n" not in str(refused.value)
    # Alone each of them passes.
    server.failures.append(Failure(grpc.StatusCode.INVALID_ARGUMENT, "too many at once"))
    with pytest.raises(UserError, match=r"refuses the batch of image0\.jpg: too many at once"):
        connect(address(server, protocol)).embed(models_on_disk.pictures(), 4)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_requests_beyond_grpcs_default_of_4_mb(protocol, server):
    import tensorflow as tf

    from tfdml.data import EncodedImages, ImageDataset

    noise = np.random.default_rng(0).integers(0, 255, (1300, 1300, 3)).astype(np.uint8)
    image = tf.io.encode_png(noise).numpy()
    assert len(image) > 4 * 2**20
    dataset = ImageDataset("noise", "test", EncodedImages((image,) * 2, ("a", "b")), np.zeros(2), {0: "0"})
    assert connect(address(server, protocol)).embed(dataset, 2).shape == (2, 6)


def test_a_request_beyond_the_servers_limit(server):
    endpoint = connect(address(server, "grpc"))
    server.failures.append(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max"))
    with pytest.raises(UserError, match="lower `batch_size`"):
        endpoint.embed(models_on_disk.pictures(3), 4)


def test_other_failures_keep_their_name(server):
    server.failures.append(Failure(grpc.StatusCode.PERMISSION_DENIED, "not for you"))
    with pytest.raises(UserError, match="PERMISSION_DENIED: not for you"):
        connect(address(server, "grpc")).embed(models_on_disk.pictures(3), 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("grpc://localhost:8500/cars", Address("grpc", "localhost:8500", "cars")),
        ("grpc://localhost:8500/cars/12", Address("grpc", "localhost:8500", "cars", 12)),
        ("rest://10.0.0.1:8501/cars", Address("http", "10.0.0.1:8501", "cars")),
        ("rest://[::1]:8501/cars/2", Address("http", "[::1]:8501", "cars", 2)),
        ("http://host:8501/v1/models/cars", Address("http", "host:8501", "cars")),
        ("https://host:443/v1/models/cars/versions/3:predict", Address("https", "host:443", "cars", 3)),
    ],
)
def test_addresses(text, expected):
    assert Address.parse(text) == expected
    assert Address.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["grpc://host/cars", "grpc://host:8500", "grpc://host:8500/cars/new", "http://host:8501/cars", "ftp://host:1/cars"],
)
def test_addresses_that_are_none(text):
    with pytest.raises(UserError, match="write grpc://host:port/name"):
        load_backend(text)


def test_missing_stubs_are_told_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_serving.apis", None)
    with pytest.raises(UserError, match=r"pip install 'tfdml\[serving\]'"):
        load_backend("grpc://127.0.0.1:1/cars")
