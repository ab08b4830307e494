"""The client that ships with `export/`, over gRPC; tests/web/test_rest.py asks with it over
REST."""

import concurrent.futures

import grpc
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from benchmarks.serving import client_module

pytestmark = pytest.mark.slow
client = client_module()


class Double(prediction_service_pb2_grpc.PredictionServiceServicer):
    """In place of TF Serving: its stubs, and the signatures of one SavedModel."""

    def __init__(self, version):
        self.model = tf.saved_model.load(str(version))

    def Predict(self, request, context):
        inputs = {
            name: tf.constant(tf.make_ndarray(value)) for name, value in request.inputs.items()
        }
        try:
            outputs = self.model.signatures[request.model_spec.signature_name](**inputs)
        except tf.errors.InvalidArgumentError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        tensors = {name: tf.make_tensor_proto(value.numpy()) for name, value in outputs.items()}
        return predict_pb2.PredictResponse(outputs=tensors)


@pytest.fixture(scope="module")
def url(shop):
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(
        Double(shop.retriever / "1"), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}/retriever"
    server.stop(None).wait()


def test_every_query_of_a_mixed_batch_has_its_answer_or_its_error(url, shop):
    found = client.predict(url, "search_each", {"image_bytes": [shop.images[4], b""], "k": [3, 3]})
    by_vector = client.predict(
        url, "search_embedding", {"embedding": shop.embeddings[[4]].tolist(), "k": [3]}
    )
    assert found["ids"][0] == by_vector["ids"][0]
    assert found["ids"][0][0] == "item 4"
    assert found["error"] == ["", "no bytes"]
    outputs = client.predict(f"{url}/1", "embed_each", {"image_bytes": shop.images[:3]})
    np.testing.assert_allclose(np.array(outputs["embedding"]), shop.embeddings[:3], atol=1e-6)


def test_what_has_no_answer_is_one_line(url, shop, capsys):
    for address, images in ((url, [shop.images[0], b""]), ("grpc://127.0.0.1:1/x", [b""])):
        with pytest.raises(client.ServerError) as caught:
            client.predict(address, "serving_default", {"image_bytes": images})
        assert "\n" not in str(caught.value)
    assert client.main(["--url=nowhere", "a.png"]) == 2
