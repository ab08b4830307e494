"""The client that ships with `export/`, over gRPC; tests/cluster/test_serving.py asks with it over REST."""

import json

import grpc
import numpy as np
import pytest

from benchmarks.serving import client_module
from tests.export.networks import picture
from tests.serving_double import Failure, serving

pytestmark = pytest.mark.slow

client = client_module()


@pytest.fixture(scope="module")
def server(shop):
    with serving({"embedder": {1: shop.embedder / "1"}, "retriever": {1: shop.retriever / "1"}}) as double:
        yield double


def url(server, model="embedder", version=""):
    return f"grpc://127.0.0.1:{server.grpc_port}/{model}{version}"


def test_every_query_of_a_mixed_batch_has_its_answer_or_its_error(server, shop):
    batch = [shop.images[0], b"", *shop.images[1:3], b"text"]
    outputs = client.predict(url(server, version="/1"), "embed_each", {"image_bytes": batch})
    assert [bool(error) for error in outputs["error"]] == [False, True, False, False, True]
    assert outputs["error"][1] == "no bytes"
    good = np.array(outputs["embedding"])[[0, 2, 3]]
    np.testing.assert_allclose(good, shop.embeddings[:3], atol=1e-6)
    address = url(server, "retriever")
    by_image = client.predict(address, "search_each", {"image_bytes": [shop.images[4], b""], "k": [3, 3]})
    by_vector = client.predict(address, "search_embedding", {"embedding": shop.embeddings[[4]].tolist(), "k": [3]})
    assert by_image["ids"][0] == by_vector["ids"][0]
    assert by_image["ids"][0][0] == "item 4"
    assert json.loads(by_image["metadata"][0][0]) == {"class": "class 1", "path": "item 4"}
    assert by_image["error"] == ["", "no bytes"]


def test_what_has_no_answer_is_one_line(server, shop):
    one = {"image_bytes": [shop.images[0]]}
    cases = [
        (url(server), "serving_default", {"image_bytes": [shop.images[0], b""]}, "no bytes"),
        (url(server, "nobody"), "embed_each", one, "nobody"),
        (url(server, version="/7"), "embed_each", one, "7"),
        ("grpc://127.0.0.1:1/x", "x", {}, ""),
    ]
    for address, signature, inputs, says in cases:
        with pytest.raises(client.ServerError, match=says) as caught:
            client.predict(address, signature, inputs)
        assert "\n" not in str(caught.value)
    server.failures.append(Failure(grpc.StatusCode.UNAVAILABLE, "The batch scheduling queue is full"))
    with pytest.raises(client.ServerError, match=r"^UNAVAILABLE: The batch scheduling queue is full$"):
        client.predict(url(server), "embed_each", one)


def test_its_command_line(server, shop, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(picture(3))
    path = str(tmp_path / "a.png")
    assert client.main([f"--url={url(server, 'retriever')}", "--k=2", path]) == 0
    assert len(json.loads(capsys.readouterr().out)["ids"]) == 2
    for words in (["--url=nowhere", path], [f"--url={url(server)}", str(tmp_path / "gone.png")]):
        assert client.main(words) == 2
