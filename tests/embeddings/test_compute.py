import keras
import numpy as np
import pytest

from tfdml.embeddings import embed
from tfdml.errors import UserError


def images(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size=(count, 8, 8, 3), dtype=np.uint8)


def model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 3)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(5),
        ]
    )


def batches(data, size):
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 4, 11])
def test_keras_model_in_order_whatever_the_batches(size):
    net, data = model(), images(11)
    expected = keras.ops.convert_to_numpy(net(data, training=False))
    result = embed(net, batches(data, size))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_one_shape_for_every_batch():
    """A smaller last batch would be traced again; it is filled up and cut."""
    shapes = []

    def embedder(x):
        shapes.append(x.shape)
        return {"pooled": x, "embedding": np.asarray(x, np.float64).reshape(len(x), -1)}

    data = images(10)
    result = embed(embedder, batches(data, 4))
    assert shapes == [(4, 8, 8, 3)] * 3
    np.testing.assert_array_equal(result, data.reshape(10, -1).astype(np.float32))


@pytest.mark.parametrize(
    ("embedder", "data", "message"),
    [
        (lambda x: x[:1, 0, 0], [images(3)], r"\(1, 3\)"),
        (lambda x: {"output_0": x}, [images(3)], "embedding"),
        (lambda x: x[:, 0, 0, : 1 + len(x)], [images(1), images(2)], "dimensions"),
    ],
)
def test_bad_embedders_say_what_is_wrong(embedder, data, message):
    with pytest.raises(UserError, match=message):
        embed(embedder, data)
