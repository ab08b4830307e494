"""Several clients at once, good and bad requests mixed, versions replaced meanwhile: no answer is wrong."""

import pytest

from benchmarks.serving import Load, client_module, odd_images, offline_embeddings
from tests.serving_double import serving


@pytest.fixture(scope="module")
def load(shop):
    images = [*shop.images, *odd_images()]
    return Load(client_module(), images, offline_embeddings(shop.embedder, images), (shop.embeddings, list(shop.ids)))


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "rest"])
def test_no_answer_is_wrong(protocol, load, shop):
    with serving({"embedder": {1: shop.embedder / "1"}, "retriever": {1: shop.retriever / "1"}}) as double:
        base = f"grpc://127.0.0.1:{double.grpc_port}" if protocol == "grpc" else None
        base = base or f"http://127.0.0.1:{double.rest_port}/v1/models"
        tally = load.run([f"{base}/embedder", f"{base}/retriever"], clients=3, requests=12)
    assert tally.wrong == 0, tally.notes
    assert tally.requests == 36
    assert min(tally.good, tally.bad, tally.refused) > 3
