"""Where the time of a training step goes, and what several steps an execution save.

    python -m benchmarks.steps --json=docs/numbers/steps.json

Glyphs as JPEG files in memory: conv4 at 28 px, and MobileNetV2 alpha 0.35 at 96 px with frozen BatchNorm; AMSoftmax and
JRD, Adam, batches of 8 classes of 4. The first table has the processor's milliseconds of all threads, each part less
those before it. The second has processor and wall time of a step within `fit`, in turns: medians of --rounds fits.
"""

import functools
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tfdml.data import EncodedImages, ImageDataset, TrainTransform
from tfdml.training import build_optimizer
from tools.numbers import Results, command_line

NETWORKS = {
    "conv4, 28 px": ("conv4", 28, "train", {}),
    "mobilenetv2, 96 px": ("mobilenetv2", 96, "frozen", {"alpha": 0.35}),
}
TOGETHER = (1, 4, 16)


def make_learner(network, num_classes, together):
    """A compiled learner."""
    keras.utils.set_random_seed(0)
    name, size, batch_norm, options = NETWORKS[network]
    backbone = tfdml.backbones.resolve(name, image_size=size, **options)
    embedder = tfdml.models.Embedder(backbone, embedding_dim=128, image_size=size, resize=size, batch_norm=batch_norm)
    learner = tfdml.models.MetricLearner(embedder, "am_softmax + 0.4 * jrs", num_classes=num_classes)
    learner.build((None, size, size, 3))
    learner.compile(build_optimizer("adam", learner, 1e-4), steps_per_execution=together)
    return learner


def make_train(size):
    """The training glyphs as JPEG files, of twice the size of a crop."""
    glyphs = tfdml.data.load("glyphs", split="train", images_per_class=20, size=2 * size)
    files = tuple(tf.io.encode_jpeg(image).numpy() for image in glyphs.images.pixels())
    names = tuple(f"{row}.jpg" for row in range(len(files)))
    return ImageDataset("glyphs", "train", EncodedImages(files, names), glyphs.labels, glyphs.class_names)


def per_step(function, steps):
    """Processor and wall milliseconds of one of `steps` steps that a call makes."""
    started = time.process_time(), time.perf_counter()
    function()
    return [
        1000 * (end - start) / steps
        for start, end in zip(started, (time.process_time(), time.perf_counter()), strict=True)
    ]


def parts_of_a_step(learner, batch, steps, rounds):
    """Median processor milliseconds of what a step is made of, by part, each with those before it."""
    images, labels = batch

    def loss():
        return learner.compute_loss(images, labels, learner(images, training=True), training=True)

    def gradients():
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, learner.trainable_variables)

    stages = {
        "forward": lambda: learner(images, training=True)["embedding"],
        "loss": loss,
        "backward": gradients,
        "optimizer and logs": lambda: learner.train_step((images, labels)),
    }
    stages = {name: tf.function(stage, autograph=False) for name, stage in stages.items()}
    times = {name: [] for name in stages}
    for stage in stages.values():
        stage()
    for _ in range(rounds):
        for name, stage in stages.items():
            times[name].append(per_step(lambda stage=stage: [stage() for _ in range(steps)], steps)[0])
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=64, help="of a fit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    arguments = parser.parse_args()
    steps, results = arguments.steps, Results(arguments.json)
    row = results.table(
        "parts", "network", "input", "forward", "loss", "backward", "optimizer and logs", "between steps"
    )
    columns = (f"{n} an execution, processor / wall" for n in TOGETHER)
    row_together = results.table("together", "network", "images", *columns)
    for network in arguments.networks:
        size = NETWORKS[network][1]
        train, view = make_train(size), TrainTransform("random_crop", resize=size * 8 // 7, image_size=size)
        learners = {together: make_learner(network, train.num_classes, together) for together in TOGETHER}
        batches = functools.partial(tfdml.data.class_balanced, train, 8, 4, view)
        parts = parts_of_a_step(learners[1], next(iter(batches())), steps, arguments.rounds)
        times = {(together, cache): [] for together in TOGETHER for cache in (False, True)}
        data = {cache: batches(cache=cache) for cache in (False, True)}
        reads = []
        for turn in range(1 + arguments.rounds):
            reads.append(per_step(lambda data=data: [None for _ in data[False].take(steps)], steps)[0])
            for (together, cache), values in times.items():
                fit = functools.partial(learners[together].fit, data[cache], steps_per_epoch=steps, verbose=0)
                values += [per_step(fit, steps)] if turn else [per_step(fit, steps)][:0]
        medians = {key: np.median(values, axis=0) for key, values in times.items()}
        read = statistics.median(reads[1:])
        each = np.diff([0.0, *parts.values()])
        between = medians[1, False][0] - read - each.sum()
        row(network, *(f"{value:.2f}" for value in (read, *each, between)))
        for cache in (False, True):
            cells = (" / ".join(f"{value:.2f}" for value in medians[n, cache]) for n in TOGETHER)
            row_together(network, "cached" if cache else "decoded each time", *cells)


if __name__ == "__main__":
    main()
