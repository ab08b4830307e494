"""The time that a method adds to a training step: its base loss alone and with it, in turns on the same images.

    python -m benchmarks.step_time
    python -m benchmarks.step_time --backbone=resnet50 --size=224 --batch=40 --rounds=5
    python -m benchmarks.step_time --base=triplet --method="triplet + 10 * density + 0.02 * ecaml"

A row shows the median of the rounds and its excess over the base in percent. RankMI's steps take turns: statistics
of a forward pass alone, then the embedder; the row is the mean of the two, the time of a batch.
"""

import statistics
import time

import keras
import numpy as np

from benchmarks.learners import make_learner
from tfdml.training.terms import build_objectives
from tools.numbers import Results, command_line

CONTRASTIVE = "contrastive(margin=1, distance=sqeuclidean)"
PAIRS = {
    "JRD": ("am_softmax", "am_softmax + jrs"),
    "HORDE, 3 orders of 512": (CONTRASTIVE, f"{CONTRASTIVE} + horde(loss={CONTRASTIVE}, orders=3, dim=512)"),
    "HORDE, 5 orders of 8,192 (the paper's)": (
        "binomial_deviance",
        "binomial_deviance + horde(loss=binomial_deviance, orders=5)",
    ),
    "ECAML": ("binomial_deviance", "binomial_deviance + 0.1 * ecaml"),
    "DML-DA, without its constraint": (CONTRASTIVE, f"{CONTRASTIVE} + density(constraint=none)"),
    "RankMI (mean of its two phases)": ("margin", "rank_mi"),
}
WARM_UP = 4


def compare(arguments, base, idea):
    """Return the median seconds of a step of the base loss, and of base and method."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (arguments.batch, arguments.size, arguments.size, 3), dtype=np.uint8)
    labels = np.arange(arguments.batch) // arguments.per_class
    classes = arguments.batch // arguments.per_class
    terms = [build_objectives(objectives, classes) for objectives in (base, idea)]
    learners = [make_learner(arguments.backbone, arguments.size, objectives) for objectives in terms]
    seconds = [[], []]
    for turn in range(WARM_UP + arguments.rounds):
        for learner, times in zip(learners, seconds, strict=True):
            started = time.perf_counter()
            # Two steps, so that alternating phases are in every measurement alike.
            learner.train_on_batch(images, labels)
            learner.train_on_batch(images, labels)
            if turn >= WARM_UP:
                times.append((time.perf_counter() - started) / 2)
    return [statistics.median(times) for times in seconds]


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone", default="mobilenetv2(alpha=0.35)", help="backbone, with its options")
    parser.add_argument("--size", type=int, default=96, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=100, help="images per batch")
    parser.add_argument("--per_class", type=int, default=10, help="images of each class")
    parser.add_argument("--rounds", type=int, default=10, help="measurements, of two steps each")
    parser.add_argument("--base", help="--objectives of another base loss")
    parser.add_argument("--method", help="--objectives of base and method")
    arguments = parser.parse_args()
    if bool(arguments.base) != bool(arguments.idea):
        parser.error("--base and --method go together")
    pairs = {"as asked": (arguments.base, arguments.idea)} if arguments.base else PAIRS

    print(f"{arguments.backbone}, {arguments.batch} images of {arguments.size} pixels, ms a step")
    row = Results(arguments.json).table("table", "regularizer", "base, ms", "with it, ms", "more")
    for name, (base, idea) in pairs.items():
        alone, together = compare(arguments, base, idea)
        row(name, f"{1000 * alone:.0f}", f"{1000 * together:,.0f}", f"{100 * (together / alone - 1):+,.0f} %")
        keras.backend.clear_session()


if __name__ == "__main__":
    main()
