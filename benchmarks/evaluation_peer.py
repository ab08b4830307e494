"""The metrics of pytorch-metric-learning's AccuracyCalculator; `benchmarks.evaluation` runs it in its environment.

    /path/to/python/with/torch benchmarks/evaluation_peer.py FOLDER

Needs torch, pytorch-metric-learning, faiss and scikit-learn, and nothing of tfdml. FOLDER holds `embeddings.npy`
(N, d), `labels.npy` (N,) and `clusters.npy` (N,). Prints one line of JSON: the metrics, and the seconds of each part.
"""

import argparse
import json
import os
import time

RETRIEVAL = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
CLUSTERING = ("NMI", "AMI")


def time_metrics(calculator, embeddings, labels, include):
    """Return the metrics, the wall seconds and the CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    figures = calculator.get_accuracy(embeddings, labels, include=include)
    return figures, [time.perf_counter() - wall, time.process_time() - cpu]


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    args = parser.parse_args()
    import numpy as np
    import pytorch_metric_learning
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    arrays = {name: np.load(os.path.join(args.folder, f"{name}.npy")) for name in ("embeddings", "labels", "clusters")}
    embeddings, labels, clusters = (torch.from_numpy(arrays[name]) for name in ("embeddings", "labels", "clusters"))
    cpu = torch.device("cpu")
    # As deep as the largest class: without it, r_precision and MAP@R would rank the whole set for every query.
    searching = AccuracyCalculator(include=RETRIEVAL, k="max_bin_count", device=cpu)
    given = AccuracyCalculator(include=CLUSTERING, device=cpu, kmeans_func=lambda embeddings, count: clusters)
    time_metrics(searching, embeddings[:100], torch.arange(100) // 2, RETRIEVAL)  # the first call starts threads

    figures, seconds = time_metrics(searching, embeddings, labels, RETRIEVAL)
    result = {"version": pytorch_metric_learning.__version__, "seconds": {"retrieval": seconds}}
    agreement, result["seconds"]["clustering"] = time_metrics(given, embeddings, labels, CLUSTERING)
    result["figures"] = {**figures, **agreement}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
