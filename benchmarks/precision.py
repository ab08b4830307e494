"""The time of a training step with XLA and bfloat16, by backbone: four ways in turns on the same images.

    python -m benchmarks.precision
    python -m benchmarks.precision --backbones resnet50:224:24 "mobilenetv2(alpha=0.35):96:100" --rounds=5

A backbone is NAME:SIZE:BATCH, size in pixels. A row is the median of the rounds in milliseconds, and its share of the
plain way's; the first step, which compiles, has its own column. The loss is AMSoftmax with --objectives otherwise.
"""

import statistics
import time

import keras
import numpy as np

from benchmarks.learners import make_learner
from tfdml.training.terms import build_objectives
from tools.numbers import Results, command_line

BACKBONES = (
    "conv4:32:100",
    "mobilenetv2(alpha=0.35):96:100",
    "mobilenetv2:192:32",
    "googlenet:224:32",
    "bn_inception:224:24",
    "resnet50:224:24",
)
WAYS = {
    "plain": ("float32", False),
    "XLA": ("float32", True),
    "bfloat16": ("mixed_bfloat16", False),
    "bfloat16, XLA": ("mixed_bfloat16", True),
}
CLASSES = 12


def make_learner_for(backbone, size, objectives, way):
    """Return a learner, compiled in one of `WAYS`."""
    policy, xla = WAYS[way]
    keras.config.set_dtype_policy(policy)
    try:
        learner = make_learner(backbone, size, build_objectives(objectives, CLASSES))
    finally:
        keras.config.set_dtype_policy("float32")
    learner.compile(keras.optimizers.Adam(1e-4), jit_compile=xla)
    return learner


def compare(backbone, size, batch, objectives, rounds):
    """Return for each way the seconds of the first step, and the median of the others."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
    labels = np.arange(batch) % CLASSES
    learners = {way: make_learner_for(backbone, size, objectives, way) for way in WAYS}
    times = {way: [] for way in WAYS}
    for _ in range(2 + rounds):
        for way, learner in learners.items():
            started = time.perf_counter()
            learner.train_on_batch(images, labels)
            times[way].append(time.perf_counter() - started)
    return {way: (seconds[0], statistics.median(seconds[2:])) for way, seconds in times.items()}


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--backbones", nargs="*", default=BACKBONES, help="NAME:SIZE:BATCH")
    parser.add_argument("--objectives", default="am_softmax")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    add = Results(arguments.json).table("table", "backbone, px, batch", *WAYS, "first steps, s")
    for text in arguments.backbones:
        backbone, size, batch = text.rsplit(":", 2)
        row = compare(backbone, int(size), int(batch), arguments.objectives, arguments.rounds)
        plain = row["plain"][1]
        cells = [f"{1000 * median:,.0f} ({median / plain:.2f})" for _, median in row.values()]
        first = " / ".join(f"{seconds:.0f}" for seconds, _ in row.values())
        add(f"`{backbone}`, {size}, {batch}", *cells, first)
        keras.utils.clear_session()


if __name__ == "__main__":
    main()
