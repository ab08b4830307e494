"""Time of a step of RankMI in each of its phases, compared with a step of the contrastive loss.

    python -m benchmarks.rankmi_phases
    python -m benchmarks.rankmi_phases --backbone="conv4(width=16)" --size=28 --batch=40 --rounds=5

The phases take turns on the same images; a row shows the median of the rounds and its ratio to the contrastive step,
which is a forward and a backward pass of the embedder and next to nothing besides. A step of the statistics has no
backward pass, so that with k = 1 two batches cost less than two steps of the contrastive loss.
"""

import statistics
import time

import numpy as np

from benchmarks.learners import make_learner
from tfdml import losses, objectives
from tools.numbers import Results, command_line


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone", default="mobilenetv2(alpha=0.35)", help="backbone, with its options")
    parser.add_argument("--size", type=int, default=96, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=120, help="images per batch, five of each class")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each kind")
    arguments = parser.parse_args()

    x = np.random.default_rng(0).integers(0, 256, (arguments.batch, arguments.size, arguments.size, 3)).astype("uint8")
    labels = np.arange(arguments.batch) // 5
    plain, mutual = (
        make_learner(arguments.backbone, arguments.size, objective)
        for objective in (losses.ContrastiveLoss(), objectives.RankMI())
    )
    # RankMI's steps take turns, beginning with the embedder's.
    kinds = {"contrastive": plain, "RankMI, embedder": mutual, "RankMI, statistics": mutual}
    seconds = {name: [] for name in kinds}
    for turn in range(arguments.rounds + 2):
        for name, learner in kinds.items():
            started = time.perf_counter()
            learner.train_on_batch(x, labels)
            if turn >= 2:
                seconds[name].append(time.perf_counter() - started)
    base = statistics.median(seconds["contrastive"])
    print(f"{arguments.backbone}, {arguments.batch} images of {arguments.size} pixels")
    row = Results(arguments.json).table("table", "step", "ms", "of the contrastive step")
    for name, values in seconds.items():
        median = statistics.median(values)
        row(name, f"{1000 * median:.0f}", f"{median / base:.2f}")


if __name__ == "__main__":
    main()
