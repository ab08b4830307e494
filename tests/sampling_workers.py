"""Writes the batches that this process's replicas get, for every sampler.

    python -m tests.sampling_workers OUT.npz                   two logical devices: the strategy splits the batch
    TF_CONFIG=... python -m tests.sampling_workers OUT.npz     one of two workers, which makes its own rows

The file holds the labels and the pixel sums of every replica under "sampler|step|replica|labels" and "...|sums", how
many images were looked up at a time under "sampler|reads", and what a step over all replicas, or `fit`, adds up to
under "sampler|total".
"""

import dataclasses
import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

from tfdml.data import pipeline
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import ArrayImages
from tfdml.data.sampling import ClassBalancedSampler, HierarchicalSampler, Share, ShuffleSampler, WholeClassSampler
from tfdml.data.transforms import TrainTransform

FIRST_STEP, STEPS, BATCH = 3, 4, 8
TRANSFORMS = [TrainTransform(kind, resize=12, image_size=10) for kind in ("random_crop", "random_resized_crop") * 2]


def made():
    """36 images of 12 classes of 1 to 5 images, of 3 super-classes."""
    counts = np.array([1, 2, 3, 4, 5, 3] * 2)
    images = np.random.default_rng(0).integers(0, 256, (counts.sum(), 12, 14, 3), dtype=np.uint8)
    classes = np.repeat(np.arange(12), counts)
    names = {i: f"class {i}" for i in range(12)}
    return ImageDataset("made", "train", ArrayImages(images, ("",) * len(images)), classes, names, classes // 4)


def samplers(data):
    return {
        "class_balanced": ClassBalancedSampler(data.labels, 4, 2, seed=5),
        "shuffle": ShuffleSampler(len(data), BATCH, seed=5),
        "whole_classes": WholeClassSampler(data.labels, BATCH, seed=5),
        "hierarchical": HierarchicalSampler(data.labels, data.super_labels, 4, 2, 2, seed=5),
    }


class TrainingMonitor(keras.Model):
    """Adds up label times mean pixel over all images that it sees."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.total = keras.metrics.Sum(name="total")

    def call(self, images):
        return self.scale * keras.ops.mean(keras.ops.cast(images, "float32"), axis=(1, 2, 3))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.total.update_state(keras.ops.cast(y, "float32") * keras.ops.stop_gradient(y_pred))
        return keras.ops.mean(y_pred)


def total_by_fit(strategy, given):
    with strategy.scope():
        model = TrainingMonitor()
        model.compile(optimizer=keras.optimizers.SGD(0.0))
    return model.fit(given, epochs=1, verbose=0).history["total"][0]


def total_by_steps(strategy, given):
    """As `fit` cannot: Keras 3 does not support several workers."""

    @tf.function(autograph=False)
    def step(images, labels):
        mean = tf.reduce_mean(tf.cast(images, tf.float32), (1, 2, 3))
        return tf.reduce_sum(mean * tf.cast(labels, tf.float32))

    parts = [strategy.run(step, args=rows) for rows in given]
    return sum(float(strategy.reduce("SUM", part, axis=None)) for part in parts)


def counting_reads(lookup, reads):
    """`Images.lookup`, noting in `reads` how many images are looked up each time."""

    def counted(images):
        source = lookup(images)

        def columns(indices):
            reads.append(len(indices))
            return source.columns(indices)

        return dataclasses.replace(source, columns=columns)

    return counted


def main(path):
    several = "TF_CONFIG" in os.environ
    if several:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        first = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    else:
        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        strategy, first = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), 0
    data, found, reads = made(), {}, []
    ArrayImages.lookup = counting_reads(ArrayImages.lookup, reads)
    for (name, sampler), transform in zip(samplers(data).items(), TRANSFORMS, strict=True):
        if several:

            def rows_of_worker(context, sampler=sampler, transform=transform):
                share = Share(sampler, context.input_pipeline_id, context.num_input_pipelines)
                batches = pipeline.training_batches(data, share, transform, 3, FIRST_STEP, STEPS)
                return batches.rebatch(sampler.batch_size // strategy.num_replicas_in_sync)

            given = list(strategy.distribute_datasets_from_function(rows_of_worker))
            total = total_by_steps(strategy, given)
        else:
            whole = pipeline.training_batches(data, sampler, transform, 3, FIRST_STEP, STEPS)
            total = total_by_fit(strategy, whole)
            given = strategy.experimental_distribute_dataset(whole)
        for step, rows in enumerate(given):
            replicas = zip(*map(strategy.experimental_local_results, rows), strict=True)
            for replica, (images, labels) in enumerate(replicas, first):
                found[f"{name}|{step}|{replica}|labels"] = labels.numpy()
                found[f"{name}|{step}|{replica}|sums"] = images.numpy().sum((1, 2, 3), dtype=np.int64)
        found |= {f"{name}|reads": np.array(reads), f"{name}|total": np.array(total)}
        reads.clear()
    np.savez(path, **found)


if __name__ == "__main__":
    main(sys.argv[1])
