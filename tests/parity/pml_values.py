"""Runs in the environment of pytorch-metric-learning: values and gradients of the cases of a JSON
file.

    python pml_values.py CASES.json BATCHES.npz VALUES.npz

Imports neither tfdml nor the tests.
"""

import sys

import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from pytorch_metric_learning.miners import distance_weighted_miner
from there import run_cases

PARTS = {"distance": distances, "reducer": reducers}


def make(module, name, arguments):
    """A class of the library. Distances and reducers among its arguments are [name, arguments]."""
    made = {
        key: make(PARTS[key], *value) if key in PARTS and isinstance(value, list) else value
        for key, value in arguments.items()
    }
    return getattr(module, name)(**made)


def pairs_of(case, labels, x):
    """The pairs that a miner keeps, as two masks."""
    found = make(miners, *case["miner"])(torch.tensor(x), torch.tensor(labels))
    masks = torch.zeros((2, len(x), len(x)), dtype=torch.bool)
    for mask, anchors, others in zip(masks, found[::2], found[1::2], strict=True):
        mask[anchors, others] = True
    return {"positives": masks[0].numpy(), "negatives": masks[1].numpy()}


def weights_of(case, labels, x):
    """The probabilities with which a miner draws negatives, which it hands to the function that
    draws."""
    caught = {}
    helpers = distance_weighted_miner.lmu
    draw, helpers.get_random_triplet_indices = (
        helpers.get_random_triplet_indices,
        lambda labels, ref_labels, weights: (
            caught.update(weights=weights.numpy()) or (labels[:0],) * 3
        ),
    )
    try:
        make(miners, *case["miner"])(torch.tensor(x), torch.tensor(labels))
    finally:
        helpers.get_random_triplet_indices = draw
    return caught


def run(case, labels, x, proxies):
    """The value of one case, and its gradients with respect to the embeddings and the proxies."""
    if case["name"] == "pairs":
        return pairs_of(case, labels, x)
    if case["name"] == "weights":
        return weights_of(case, labels, x)
    torch.manual_seed(0)
    options = (
        {}
        if proxies is None
        else {"num_classes": int(proxies.shape[0]), "embedding_size": int(x.shape[1])}
    )
    loss = make(losses, case["name"], {**case["arguments"], **options})
    weight = None
    if proxies is not None:
        weight = next(parameter for parameter in loss.parameters())
        flat = torch.tensor(proxies.reshape(-1, x.shape[1]))
        weight.data = (
            flat if case["name"] in ("ProxyAnchorLoss", "ProxyNCALoss") else flat.T.contiguous()
        )
    embeddings = torch.tensor(x, requires_grad=True)
    labels = torch.tensor(labels)
    pairs = None if case["miner"] is None else make(miners, *case["miner"])(embeddings, labels)
    value = loss(embeddings, labels, pairs)
    if value.requires_grad:
        value.backward()
    result = {"value": value.detach().numpy()}
    result["gradient"] = (
        torch.zeros_like(embeddings) if embeddings.grad is None else embeddings.grad
    ).numpy()
    if weight is not None:
        gradient = weight.grad.numpy()
        rows = gradient if case["name"] in ("ProxyAnchorLoss", "ProxyNCALoss") else gradient.T
        result["proxies"] = rows.reshape(proxies.shape)
    return result


def of_batch(case, batch, batches):
    """What is found of a case on a batch of the file."""
    proxies = batches[f"{batch}|proxies{case['proxies']}"] if case["proxies"] else None
    return run(case, batches[f"{batch}|labels"], batches[f"{batch}|x"], proxies)


def main(*paths):
    run_cases(*paths, of_batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
