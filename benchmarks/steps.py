"""Where the time of a training step goes, and what several steps an execution save.

    python -m benchmarks.steps --json=docs/numbers/steps.json

Glyphs as JPEG files in memory, conv4 at 28 px, AMSoftmax and JRD, Adam, batches of 8 classes of 4.
The first table has the processor's milliseconds of all threads, each part less those before it. The
second has processor and wall time of a step within `fit`, in turns: medians of --rounds fits.
"""

import functools
import statistics

import keras
import numpy as np
import tensorflow as tf

import tfdml
from benchmarks.timing import in_turns, time_call
from tfdml.data import EncodedImages, ImageDataset, TrainTransform
from tfdml.training import build_optimizer
from tools.numbers import Results, command_line

NETWORK, SIZE = "conv4", 28
TOGETHER = (1, 4, 16)


def make_learner(num_classes, together):
    """A compiled learner."""
    keras.utils.set_random_seed(0)
    backbone = tfdml.backbones.resolve(NETWORK, image_size=SIZE)
    embedder = tfdml.models.Embedder(
        backbone, embedding_dim=128, image_size=SIZE, resize=SIZE, batch_norm="train"
    )
    learner = tfdml.models.MetricLearner(
        embedder, "am_softmax + 0.4 * jrs", num_classes=num_classes
    )
    learner.build((None, SIZE, SIZE, 3))
    learner.compile(build_optimizer("adam", learner, 1e-4), steps_per_execution=together)
    return learner


def make_train():
    """The training glyphs as JPEG files, of twice the size of a crop."""
    glyphs = tfdml.data.load("glyphs", split="train", images_per_class=20, size=2 * SIZE)
    files = tuple(tf.io.encode_jpeg(image).numpy() for image in glyphs.images.pixels())
    names = tuple(f"{row}.jpg" for row in range(len(files)))
    return ImageDataset(
        "glyphs", "train", EncodedImages(files, names), glyphs.labels, glyphs.class_names
    )


def per_step(function, steps):
    """Processor and wall milliseconds of one of `steps` steps that a call makes."""
    _, wall, processor = time_call(function)
    return 1000 * processor / steps, 1000 * wall / steps


def parts_of_a_step(learner, batch, steps, rounds):
    """Median processor milliseconds of what a step is made of, by part, each with those before
    it."""
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
    runners = {}
    for name, stage in stages.items():
        compiled = tf.function(stage, autograph=False)
        compiled()
        runners[name] = lambda compiled=compiled: per_step(
            lambda: [compiled() for _ in range(steps)], steps
        )[0]
    return {name: statistics.median(times) for name, times in in_turns(runners, rounds).items()}


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=64, help="of a fit")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    steps, results = arguments.steps, Results(arguments.json)
    train, view = make_train(), TrainTransform("random_crop", resize=SIZE * 8 // 7, image_size=SIZE)
    batches = functools.partial(tfdml.data.class_balanced, train, 8, 4, view)
    data = {"decoded each time": batches(cache=False), "cached": batches(cache=True)}
    learners = {together: make_learner(train.num_classes, together) for together in TOGETHER}
    parts = parts_of_a_step(learners[1], next(iter(batches())), steps, arguments.rounds)
    runners = {"input": lambda: [None for _ in data["decoded each time"].take(steps)]}
    for together, learner in learners.items():
        for images, source in data.items():
            runners[together, images] = functools.partial(
                learner.fit, source, steps_per_epoch=steps, verbose=0
            )
    timed = {name: functools.partial(per_step, runner, steps) for name, runner in runners.items()}
    # The first round compiles and fills the cache.
    in_turns(timed, 1)
    medians = {
        name: np.median(times, axis=0) for name, times in in_turns(timed, arguments.rounds).items()
    }
    read, whole = medians["input"][0], medians[1, "decoded each time"][0]
    columns = ("input", "forward", "loss", "backward", "optimizer and logs", "between steps")
    row = results.table("parts", "network", *columns)
    cells = [read, *np.diff([0.0, *parts.values()]), whole - read - list(parts.values())[-1]]
    row(f"{NETWORK}, {SIZE} px", *(f"{value:.2f}" for value in cells))
    columns = (f"{together} an execution, processor / wall" for together in TOGETHER)
    row = results.table("together", "network", "images", *columns)
    for images in data:
        cells = (
            " / ".join(f"{value:.2f}" for value in medians[together, images])
            for together in TOGETHER
        )
        row(f"{NETWORK}, {SIZE} px", images, *cells)


if __name__ == "__main__":
    main()
