"""pytorch-metric-learning's side of `benchmarks.heads`: it imports no tfdml.

    python heads_peer.py THREADS VECTORS.npz DIM EPOCHS CLASSES PER_CLASS RATE

Trains a linear head with `MultiSimilarityLoss` and Adam on the training rows, the same batches of CLASSES x PER_CLASS,
and prints a line of JSON: the seconds of the training, and the last loss.
"""

import json
import sys
import time

import numpy as np


def main(threads, path, dim, epochs, classes, per_class, rate):
    """Train and print."""
    import torch
    from pytorch_metric_learning import losses, samplers

    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    with np.load(path) as stored:
        rows = stored["roles"] == "train"
        vectors, labels = torch.tensor(stored["embeddings"][rows]), torch.tensor(stored["labels"][rows])
    batch = int(classes) * int(per_class)
    sampler = samplers.MPerClassSampler(labels, int(per_class), batch, len(labels) // batch * batch)
    head, loss = torch.nn.Linear(vectors.shape[1], int(dim)), losses.MultiSimilarityLoss()
    optimizer = torch.optim.Adam(head.parameters(), float(rate))
    started = time.perf_counter()
    for _ in range(int(epochs)):
        for chosen in torch.tensor(list(sampler)).split(batch):
            optimizer.zero_grad()
            value = loss(head(vectors[chosen]), labels[chosen])
            value.backward()
            optimizer.step()
    print(json.dumps({"seconds": time.perf_counter() - started, "loss": value.item()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
