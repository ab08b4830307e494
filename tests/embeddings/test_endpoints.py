"""A served model embeds as its SavedModel does, and what goes wrong on the way is reported in one line."""

import time

import grpc
import numpy as np
import pytest

from tests.export import models_on_disk
from tests.serving_double import Failure, serving
from tfdml.embeddings.backends import load_backend
from tfdml.embeddings.endpoints import Endpoint
from tfdml.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(models, other):
    with serving({"pictures": {1: models.saved_model, 2: other.saved_model}}) as double:
        yield double


@pytest.fixture(autouse=True)
def no_failure_left(server):
    yield
    server.failures.clear()


def address(server, rest="/pictures"):
    return f"http://127.0.0.1:{server.rest_port}/v1/models{rest}"


def connect(text, **options):
    return Endpoint(text, pause=0.01, **options)


def test_equal_to_the_saved_model_exactly(server, models):
    dataset = models_on_disk.pictures()
    expected = load_backend(models.saved_model).embed(dataset, 4)
    endpoint = load_backend(address(server, "/pictures/versions/1"))
    assert endpoint.kind == "rest"
    np.testing.assert_array_equal(endpoint.embed(dataset, 4), expected)
    rest = np.concatenate(list(endpoint.stream(dataset, 4, first=8)))
    np.testing.assert_array_equal(rest, expected[8:])


def test_the_newest_version_is_kept_for_all_of_a_set(server):
    newest = load_backend(address(server))
    assert newest.version == 2
    assert "version 2" in newest.checksum()
    first = load_backend(address(server, "/pictures/versions/1"))
    dataset = models_on_disk.pictures(3)
    assert not np.allclose(newest.embed(dataset, 4), first.embed(dataset, 4), atol=1e-3)


def test_what_is_not_served(server):
    with pytest.raises(UserError, match="does not serve cars: Could not find"):
        connect(address(server, "/cars"))
    with pytest.raises(UserError, match=r"does not serve version 7 of pictures; it serves \[1, 2\]"):
        connect(address(server, "/pictures/versions/7"))


def test_a_version_that_is_withdrawn_meanwhile(server):
    endpoint = connect(address(server))
    served = server.models["pictures"].pop(2)
    try:
        with pytest.raises(UserError, match="Servable not found"):
            endpoint.embed(models_on_disk.pictures(2), 4)
    finally:
        server.models["pictures"][2] = served


def test_an_unavailable_server_is_asked_again(server):
    dataset = models_on_disk.pictures(3)
    endpoint = connect(address(server))
    expected = endpoint.embed(dataset, 4)
    busy = Failure(grpc.StatusCode.UNAVAILABLE, "The batch scheduling queue is full")
    server.failures.extend([busy] * 4)
    before = server.requests
    np.testing.assert_array_equal(endpoint.embed(dataset, 4), expected)
    assert server.requests - before == 5
    server.failures.extend([busy] * 5)
    with pytest.raises(UserError, match="in 5 attempts: The batch scheduling queue is full"):
        endpoint.embed(dataset, 4)


def test_nobody_listens():
    with pytest.raises(UserError, match="cannot be reached, in 5 attempts") as refused:
        connect("http://127.0.0.1:1/v1/models/pictures")
    assert "\n" not in str(refused.value)


def test_the_other_protocols_port(server):
    with pytest.raises(UserError, match="is this its REST port"):
        connect(f"http://127.0.0.1:{server.grpc_port}/v1/models/x")


def test_no_answer_in_time(server):
    endpoint = connect(address(server), timeout=0.2)
    server.failures.append(lambda: time.sleep(0.8))
    with pytest.raises(UserError, match=r"no answer within 0\.2 s to a request of 3 images"):
        endpoint.embed(models_on_disk.pictures(3), 4)
    with pytest.raises(UserError, match=r"`timeout=0\.0`: must be more than 0"):
        connect(address(server), timeout=0.0)


def test_the_image_that_is_refused_is_named(server):
    with pytest.raises(UserError, match=r"refuses image6\.jpg") as refused:
        connect(address(server)).embed(models_on_disk.pictures(broken=[6]), 4)
    assert "\n" not in str(refused.value)
    # Alone each of them passes.
    server.failures.append(Failure(grpc.StatusCode.INVALID_ARGUMENT, "too many at once"))
    with pytest.raises(UserError, match=r"refuses the batch of image0\.jpg: too many at once"):
        connect(address(server)).embed(models_on_disk.pictures(), 4)


def test_requests_of_many_megabytes(server):
    import tensorflow as tf

    from tfdml.data import EncodedImages, ImageDataset

    noise = np.random.default_rng(0).integers(0, 255, (1300, 1300, 3)).astype(np.uint8)
    image = tf.io.encode_png(noise).numpy()
    assert len(image) > 4 * 2**20
    dataset = ImageDataset("noise", "test", EncodedImages((image,) * 2, ("a", "b")), np.zeros(2), {0: "0"})
    assert connect(address(server)).embed(dataset, 2).shape == (2, 6)


def test_a_request_beyond_the_servers_limit(server):
    assert "lower `batch_size`" in str(connect(address(server))._failure(413, "too long", 3))


@pytest.mark.parametrize(
    "text", ["grpc://host:8500/cars", "rest://host:8501/cars", "http://host/v1/models/x", "http://host:1/cars"]
)
def test_addresses_that_are_none(text):
    with pytest.raises(UserError, match="write http://host:port/v1/models/NAME"):
        load_backend(text)


@pytest.mark.parametrize("suffix", ["", "/", ":predict", "/versions/2", "/versions/2:predict"])
def test_forms_of_an_address(suffix, server):
    assert connect(address(server) + suffix).checksum().startswith("pictures version 2 at 127.0.0.1:")
