"""Runs next to TensorFlow Similarity, on Keras 3: its sampler trains our embedder, its Indexer
holds the result.

python similarity_bridge.py FOUND.json
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf
from tensorflow_similarity.indexer import Indexer
from tensorflow_similarity.samplers import MultiShotMemorySampler

import tfdml


def images(classes, each, seed):
    """Noisy stripes: a class is an orientation, unlike in any one pixel."""
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[:16, :16] / 16
    labels = np.repeat(np.arange(classes), each)
    angles = np.pi * labels / classes
    phases = generator.uniform(0, 2 * np.pi, len(labels))
    waves = (
        rows[None] * np.sin(angles)[:, None, None] + columns[None] * np.cos(angles)[:, None, None]
    )
    x = (
        128
        + 100 * np.sin(18 * waves + phases[:, None, None])
        + 40 * generator.normal(size=waves.shape)
    )
    return np.repeat(x[..., None], 3, axis=-1).astype("float32"), labels


def recall_at_1(embeddings, labels):
    """The share of images whose nearest other image is of their class."""
    similarities = embeddings @ embeddings.T
    np.fill_diagonal(similarities, -np.inf)
    return float(np.mean(labels[similarities.argmax(1)] == labels))


def main(path):
    keras.utils.set_random_seed(0)
    x, labels = images(8, 12, seed=0)
    test, test_labels = images(8, 6, seed=1)
    sampler = MultiShotMemorySampler(
        x, labels, classes_per_batch=8, examples_per_class_per_batch=4, steps_per_epoch=10
    )  # fmt: skip
    backbone = keras.Sequential([
        keras.Input((16, 16, 3)), keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"),
    ])  # fmt: skip
    embedder = tfdml.models.Embedder(backbone, embedding_dim=16, image_size=16)
    learner = tfdml.models.MetricLearner(embedder, [tfdml.losses.MultiSimilarityLoss()])
    learner.compile(keras.optimizers.Adam(0.003))
    specs = tuple(tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in sampler[0])
    batches = tf.data.Dataset.from_generator(
        lambda: map(sampler.__getitem__, range(len(sampler))), output_signature=specs
    )
    learner.build((None, *x.shape[1:]))
    before = recall_at_1(learner.predict(test, verbose=0), test_labels)
    history = learner.fit(batches, epochs=6, verbose=0).history
    embeddings = learner.predict(test, verbose=0)

    indexer = Indexer(embeddings.shape[1])
    indexer.batch_add(embeddings, labels=test_labels.tolist(), verbose=0)
    looked_up = indexer.batch_lookup(embeddings, k=3, verbose=0)
    ranks = np.argsort(-embeddings @ embeddings.T, axis=1)[:, :3]
    stored, stored_labels = np.stack(indexer.kv_store.embeddings), indexer.kv_store.labels
    found = {
        "loss": history["loss"],
        "recall@1 before": before,
        "recall@1 after": recall_at_1(embeddings, test_labels),
        "neighbors": [[item.label for item in row] for row in looked_up],
        "expected neighbors": test_labels[ranks].tolist(),
        "read back": bool(
            np.array_equal(stored, embeddings) and np.array_equal(stored_labels, test_labels)
        ),
    }
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
