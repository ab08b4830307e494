"""Runs in the environment of pytorch-metric-learning: values and gradients of the cases of a JSON file.

    python pml_values.py CASES.json BATCHES.npz VALUES.npz

Imports neither tfdml nor the tests.
"""

import json
import sys

import numpy as np
import torch
from pytorch_metric_learning import distances, losses, miners, reducers
from pytorch_metric_learning.miners import distance_weighted_miner

PARTS = {"distance": distances, "reducer": reducers}


def make(module, name, arguments):
    """A class of the library, of arguments among which [name, arguments] are distances and reducers."""
    made = {
        key: make(PARTS[key], *value) if key in PARTS and isinstance(value, list) else value
        for key, value in arguments.items()
    }
    return getattr(module, name)(**made)


def pairs_of(case, labels, x, dtype):
    """The pairs that a miner keeps, as two masks."""
    found = make(miners, *case["miner"])(torch.tensor(x, dtype=dtype), torch.tensor(labels))
    masks = torch.zeros((2, len(x), len(x)), dtype=torch.bool)
    for mask, anchors, others in zip(masks, found[::2], found[1::2], strict=True):
        mask[anchors, others] = True
    return {"positives": masks[0].numpy(), "negatives": masks[1].numpy()}


def weights_of(case, labels, x, dtype):
    """The probabilities with which a miner draws negatives, which it hands to the function that draws."""
    caught = {}
    helpers = distance_weighted_miner.lmu
    draw, helpers.get_random_triplet_indices = (
        helpers.get_random_triplet_indices,
        lambda labels, ref_labels, weights: caught.update(weights=weights.numpy()) or (labels[:0],) * 3,
    )
    try:
        make(miners, *case["miner"])(torch.tensor(x, dtype=dtype), torch.tensor(labels))
    finally:
        helpers.get_random_triplet_indices = draw
    return caught


def run(case, labels, x, proxies, dtype):
    """The value of one case, and its gradients with respect to the embeddings and the proxies."""
    if case["name"] == "pairs":
        return pairs_of(case, labels, x, dtype)
    if case["name"] == "weights":
        return weights_of(case, labels, x, dtype)
    torch.manual_seed(0)
    options = {} if proxies is None else {"num_classes": int(proxies.shape[0]), "embedding_size": int(x.shape[1])}
    loss = make(losses, case["name"], {**case["arguments"], **options})
    weight = None
    if proxies is not None:
        weight = next(parameter for parameter in loss.parameters())
        flat = torch.tensor(proxies.reshape(-1, x.shape[1]), dtype=dtype)
        weight.data = flat if case["name"] in ("ProxyAnchorLoss", "ProxyNCALoss") else flat.T.contiguous()
    embeddings = torch.tensor(x, dtype=dtype, requires_grad=True)
    labels = torch.tensor(labels)
    pairs = None if case["miner"] is None else make(miners, *case["miner"])(embeddings, labels)
    value = loss(embeddings, labels, pairs)
    if value.requires_grad:
        value.backward()
    result = {"value": value.detach().numpy()}
    result["gradient"] = (torch.zeros_like(embeddings) if embeddings.grad is None else embeddings.grad).numpy()
    if weight is not None:
        gradient = weight.grad.numpy()
        rows = gradient if case["name"] in ("ProxyAnchorLoss", "ProxyNCALoss") else gradient.T
        result["proxies"] = rows.reshape(proxies.shape)
    return result


def main(cases_path, batches_path, values_path):
    batches = np.load(batches_path)
    with open(cases_path) as file:
        cases = json.load(file)
    values = {}
    for index, case in enumerate(cases):
        for batch in case["batches"]:
            proxies = batches[f"{batch}|proxies{case['proxies']}"] if case["proxies"] else None
            try:
                found = run(
                    case, batches[f"{batch}|labels"], batches[f"{batch}|x"], proxies, getattr(torch, case["dtype"])
                )
            except Exception as error:  # what the library raises is part of what is compared
                found = {"error": np.array(f"{type(error).__name__}: {error}"[:300])}
            values.update({f"{index}|{batch}|{key}": value for key, value in found.items()})
    np.savez(values_path, **values)


if __name__ == "__main__":
    main(*sys.argv[1:])
