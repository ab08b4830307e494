"""Several clients at once, good and bad requests mixed: no answer is wrong."""

import pytest

from benchmarks.serving import Load, client_module, odd_images, offline_embeddings
from tests.serving_double import serving


@pytest.mark.slow
def test_no_answer_is_wrong(shop):
    images = [*shop.images, *odd_images()]
    vectors = offline_embeddings(shop.embedder, images)
    load = Load(client_module(), images, vectors, (shop.embeddings, list(shop.ids)))
    models = {"embedder": {1: shop.embedder / "1"}, "retriever": {1: shop.retriever / "1"}}
    with serving(models) as double:
        tally = load.run([f"grpc://127.0.0.1:{double.grpc_port}/{name}" for name in models], clients=3, requests=12)
    assert tally.wrong == 0, tally.notes
    assert tally.requests == 36
    assert min(tally.good, tally.bad, tally.refused) > 3
