"""On JAX: representations by chunks, of a batch that devices share and chunks do not divide, and of
one that devices do not divide."""

import keras
import numpy as np

from tests.models.networks import SIZE, tiny_embedder
from tfdml import losses
from tfdml.models import MetricLearner
from tfdml.models.chunks import represent_in_chunks
from tfdml.models.inference import compiled

if __name__ == "__main__":
    assert keras.backend.backend() == "jax"
    model = MetricLearner(tiny_embedder(batch_norm="frozen"), losses.ContrastiveLoss())
    model.build((None, SIZE, SIZE, 3))
    x = np.random.default_rng(0).uniform(0, 255, (10, SIZE, SIZE, 3)).astype("float32")
    whole = model(x, training=False)["embedding"]
    # On each of two devices two chunks of two images, and one image that is left.
    parts = represent_in_chunks(model, x, 2, 2)["embedding"]
    np.testing.assert_allclose(parts, whole, atol=1e-5)
    run = compiled(model.embedder, model.embedder.represent)
    np.testing.assert_allclose(run(x[:9])["embedding"], whole[:9], atol=1e-5)
