"""The metrics of pytorch-metric-learning's AccuracyCalculator; `benchmarks.evaluation` runs it in
its environment.

    /path/to/python/with/torch benchmarks/evaluation_peer.py FOLDER

Needs torch, pytorch-metric-learning and faiss, and nothing of tfdml. FOLDER holds `embeddings.npy`
(N, d) and `labels.npy` (N,). Prints one line of JSON: the metrics, and the wall and CPU seconds.
"""

import json
import pathlib
import sys
import time

import numpy as np
import pytorch_metric_learning
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

RETRIEVAL = ("precision_at_1", "r_precision", "mean_average_precision_at_r")


def main(folder):
    """Measure and print."""
    embeddings, labels = (
        torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("embeddings", "labels")
    )
    # As deep as the largest class: without it, r_precision and MAP@R would rank the whole set for
    # every query.
    calculator = AccuracyCalculator(
        include=RETRIEVAL, k="max_bin_count", device=torch.device("cpu")
    )
    calculator.get_accuracy(
        embeddings[:100], torch.arange(100) // 2
    )  # the first call starts threads
    wall, cpu = time.perf_counter(), time.process_time()
    figures = calculator.get_accuracy(embeddings, labels)
    seconds = [time.perf_counter() - wall, time.process_time() - cpu]
    print(
        json.dumps(
            {"version": pytorch_metric_learning.__version__, "seconds": seconds, "figures": figures}
        )
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
