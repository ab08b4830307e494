"""The evaluation at scale: its time and its agreement with pytorch-metric-learning.

    python -m benchmarks.evaluation --torch_python=/path/to/python/with/pytorch-metric-learning
    python -m benchmarks.evaluation --images=6000 --dim=128 --classes=1100 --rounds=1  a quick try

On made embeddings, by default as many as the test images and classes of Stanford Online Products:

- exact: wall and CPU seconds of `evaluate_retrieval`, and of the plain product of the same matrices
  in blocks of the same memory. All run in this process, in turns, for some rounds. A row shows the
  median; a ratio is the median over rounds;
- clustering: seconds of k-means with as many clusters as classes;
- peer: pytorch-metric-learning's AccuracyCalculator on the same arrays, in the environment of
  --torch_python, if given.

Ends with status 1 if a number differs from the peer's by more than `TOLERANCE`.
"""

import json
import os
import pathlib
import subprocess
import tempfile

import numpy as np

from benchmarks.timing import in_turns, time_call
from tools.numbers import Results, command_line

BUDGET = 256 * 2**20
# Rounding of the distances may swap neighbors that are equally near.
TOLERANCE = 1e-4
PEER_NAMES = {
    "recall@1": "precision_at_1",
    "r_precision": "r_precision",
    "map@r": "mean_average_precision_at_r",
}
BARE = "the bare product, in the same blocks"
CONTENDERS = {
    "`recall` at 1, 2, 4, 8": ["recall"],
    "with `map@r` and `r_precision`": ["recall", "map@r", "r_precision"],
}


def made_embeddings(count, dim, classes, seed=0):
    """(N, d) float32 of length 1 and (N,) labels: classes of two images or more, each with a
    scatter of its own."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate(
        [np.repeat(np.arange(classes), 2), rng.integers(0, classes, count - 2 * classes)]
    )
    rng.shuffle(labels)
    centers = rng.normal(size=(classes, dim)).astype(np.float32)
    # At about this scatter images of other classes are as near as those of the class.
    widths = (rng.uniform(0.5, 1.5, (classes, 1)) * dim**0.25 / 2.4).astype(np.float32)
    points = centers[labels] + widths[labels] * rng.standard_normal((count, dim), np.float32)
    return points / np.linalg.norm(points, axis=1, keepdims=True), labels


def bare_product(embeddings):
    """Compute the product of all with all, in blocks, and drop it."""
    from keras import ops

    table = ops.convert_to_tensor(np.ascontiguousarray(embeddings.T))
    rows = max(1, BUDGET // (4 * len(embeddings)))
    for start in range(0, len(embeddings), rows):
        scores = ops.matmul(ops.convert_to_tensor(embeddings[start : start + rows]), table)
        float(scores[0, 0])  # devices that work ahead have finished then


def evaluation(arrays, metrics):
    """Return the call that is measured."""
    from tfdml.evaluation import evaluate_retrieval

    return evaluate_retrieval(*arrays, metrics=metrics, memory_budget=BUDGET)


def exact_part(arrays, rounds, results):
    """Time of the exact evaluation."""
    small = made_embeddings(2000, arrays[0].shape[1], 400)
    bare_product(small[0])
    evaluation(small, ["recall", "map@r"])
    runners = {BARE: lambda: time_call(bare_product, arrays[0])[1:]}
    for name, metrics in CONTENDERS.items():
        runners[name] = lambda metrics=metrics: time_call(evaluation, arrays, metrics)[1:]
    times = {name: np.array(seconds) for name, seconds in in_turns(runners, rounds).items()}
    ratio = "of the bare product"
    row = results.table("exact", "", "seconds", ratio, "processor seconds", ratio)
    for name, seconds in times.items():
        wall, cpu = np.median(seconds, axis=0)
        ratios = np.median(seconds / times[BARE], axis=0)
        row(name, f"{wall:.1f}", f"{ratios[0]:.2f}", f"{cpu:.1f}", f"{ratios[1]:.2f}")


def peer_part(torch_python, arrays, results):
    """Time pytorch-metric-learning, and compare its numbers."""
    with tempfile.TemporaryDirectory() as folder:
        for name, array in zip(("embeddings", "labels"), arrays, strict=True):
            np.save(f"{folder}/{name}.npy", array)
        command = [
            torch_python,
            str(pathlib.Path(__file__).with_name("evaluation_peer.py")),
            folder,
        ]
        theirs = json.loads(
            subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        )
    ours, *seconds = time_call(evaluation, arrays, ["recall@1", "map@r", "r_precision"])
    row = results.table("peer", "retrieval, once, in turns", "seconds", "processor seconds")
    row("tfdml", *(f"{value:.1f}" for value in seconds))
    row("pytorch-metric-learning", *(f"{value:.1f}" for value in theirs["seconds"]))
    row, differences = results.table("agreement", "here", "there", "tfdml", "difference"), []
    for name, there in PEER_NAMES.items():
        differences.append(ours[name] - theirs["figures"][there])
        peer = f"pytorch-metric-learning {theirs['version']}, `{there}`"
        row(f"`{name}`", peer, f"{ours[name]:.8f}", f"{differences[-1]:.0e}")
    if not np.all(np.abs(differences) <= TOLERANCE):
        raise SystemExit("the numbers disagree")


def main():
    """Parse the command line and run."""
    parser = command_line(__doc__)
    parser.add_argument("--images", type=int, default=60_502)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument(
        "--classes", type=int, default=11_316, help="at most half as many as images"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--torch_python", help="a Python that has torch and pytorch-metric-learning"
    )
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from tfdml.evaluation import kmeans

    results, arrays = Results(args.json), made_embeddings(args.images, args.dim, args.classes)
    exact_part(arrays, args.rounds, results)
    _, *seconds = time_call(kmeans, arrays[0], args.classes, iterations=20)
    row = results.table("clustering", "", "seconds", "processor seconds")
    row(f"{args.classes:,} clusters, 20 rounds of k-means", *(f"{value:.1f}" for value in seconds))
    if args.torch_python:
        peer_part(args.torch_python, arrays, results)


if __name__ == "__main__":
    main()
