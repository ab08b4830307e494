"""pytorch-metric-learning's side of `benchmarks.losses`: it runs in that library's environment, and
imports no tfdml.

    python losses_peer.py THREADS DEVICE

Reads a line of JSON for each request, {"case", "batch", "dim", "per_class"}, and answers with one:
the value of the loss, the seconds of its forward and backward pass, and the MiB that the process
has held at most beyond what it did when all was imported.
"""

import json
import pathlib
import re
import statistics
import sys
import time

import numpy as np


def status(field):
    """MiB of a field of Linux's account of this process; 0 elsewhere."""
    path = pathlib.Path("/proc/self/status")
    return (
        int(re.search(rf"{field}:\s+(\d+)", path.read_text())[1]) / 1024 if path.exists() else 0.0
    )


def made_batch(batch, dim, per_class):
    """Labels and unit vectors in classes that overlap, and a center for each class: the same on
    both sides."""
    generator = np.random.default_rng(batch)
    labels = np.arange(batch) // per_class
    centers = generator.normal(size=(int(labels[-1]) + 1, dim)).astype("float32")
    vectors = centers[labels] + 1.5 * generator.normal(size=(batch, dim)).astype("float32")
    return labels, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), centers


def serve(prepare, threads):
    """Answer requests until they end; `prepare(request)` returns a function that runs one pass and
    gives its value."""
    prepared, began = {}, status("VmRSS")
    # Of one thread the processor's time, which other work on the machine hardly changes.
    clock = time.process_time if threads == 1 else time.perf_counter
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if line not in prepared:
                prepared.clear()
                prepared[line] = prepare(request)
                prepared[line]()  # the first pass compiles
            # As in training, many passes follow one another.
            times = []
            while sum(times) < 0.3:
                started = clock()
                value = prepared[line]()
                times.append(clock() - started)
            answer = {
                "seconds": statistics.median(times),
                "mib": status("VmHWM") - began,
                "value": value,
            }
        except Exception as error:  # what a library cannot do is a part of the comparison
            no_memory = "allocate memory" in str(error)
            answer = {
                "error": "no memory" if no_memory else f"{type(error).__name__}: {error}"[:200]
            }
        print(json.dumps(answer), flush=True)


def main(threads, device):
    """Serve with pytorch-metric-learning, on `device`: cpu or cuda."""
    import torch
    from pytorch_metric_learning import losses, miners

    torch.set_num_threads(threads)

    def prepare(request):
        case = request["case"]
        labels, vectors, centers = made_batch(
            request["batch"], request["dim"], request["per_class"]
        )
        arguments = dict(case["arguments"])
        if case["proxies"]:
            arguments |= {"num_classes": len(centers), "embedding_size": request["dim"]}
        loss = getattr(losses, case["name"])(**arguments)
        loss.to(device)
        miner = getattr(miners, case["miner"][0])(**case["miner"][1]) if case["miner"] else None
        for weight in loss.parameters():
            # Either a row or some columns for each class.
            columns = centers.repeat(weight.shape[1] // len(centers), axis=0).T.copy()
            weight.data = torch.tensor(
                centers if weight.shape[0] == len(centers) else columns, device=device
            )
        labels = torch.tensor(labels, device=device)
        vectors = torch.tensor(vectors, device=device, requires_grad=True)

        def run():
            vectors.grad = None
            value = loss(vectors, labels, miner(vectors, labels) if miner else None)
            value.backward()
            # On a GPU it waits for the gradients too, which come before it.
            return value.item()

        return run

    serve(prepare, threads)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
