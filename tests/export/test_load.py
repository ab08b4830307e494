"""Several clients at once, good and bad requests mixed, versions replaced meanwhile: no answer is wrong."""

import shutil
import threading

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.serving_load import Load, client_module, odd_images, offline_embeddings
from tests.serving_double import serving
from tfdml.export import GalleryItem, Retriever


@pytest.fixture(scope="module")
def load(shop):
    images = [*shop.images, *odd_images()]
    return Load(client_module(), images, offline_embeddings(shop.embedder, images), (shop.embeddings, list(shop.ids)))


@pytest.mark.slow
@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("protocol", ["grpc", "rest"])
def test_no_answer_is_wrong(protocol, each, load, shop):
    with serving({"embedder": {1: shop.embedder / "1"}, "retriever": {1: shop.retriever / "1"}}) as double:
        base = f"grpc://127.0.0.1:{double.grpc_port}" if protocol == "grpc" else None
        base = base or f"http://127.0.0.1:{double.rest_port}/v1/models"
        tally = load.run([f"{base}/embedder", f"{base}/retriever"], clients=3, requests=12, each=each)
    assert tally.wrong == 0, tally.notes
    assert tally.requests == 36
    assert min(tally.good, tally.bad, tally.refused) > 3


@pytest.mark.slow
def test_a_wrong_answer_is_counted(load, shop):
    """The load test would notice: expectations that are off by more than its tolerance are all counted as wrong."""
    off = Load(load.client, load.images, load.embeddings + np.float32(2e-5), load.gallery)
    with serving({"embedder": {1: shop.embedder / "1"}, "retriever": {1: shop.retriever / "1"}}) as double:
        base = f"grpc://127.0.0.1:{double.grpc_port}"
        tally = off.run([f"{base}/embedder", f"{base}/retriever"], clients=1, requests=8)
    assert tally.wrong > 0


@pytest.mark.slow
def test_no_search_fails_while_the_served_version_is_replaced(shop, tmp_path, load):
    shutil.copytree(shop.retriever, tmp_path / "versions")
    own = Retriever.load(tmp_path / "versions")
    done, failures, found = threading.Event(), [], []
    with serving({"retriever": {1: own.path}}) as double:

        def ask():
            try:
                with load.client.Client(f"grpc://127.0.0.1:{double.grpc_port}/retriever") as client:
                    while not done.is_set():
                        answers = client.search_embeddings(shop.embeddings.tolist(), 1)
                        assert [answer.values["ids"][0] for answer in answers] == list(shop.ids)
                        found.append(1)
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in (2, 3):
            path = own.add([GalleryItem(f"new {number}", embedding=-shop.embeddings[number])])
            # As TF Serving does: the new version is loaded, and then the old one goes.
            double.models["retriever"][number] = tf.saved_model.load(str(path))
            del double.models["retriever"][number - 1]
        done.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert found
