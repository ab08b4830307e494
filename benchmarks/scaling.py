"""What pairs over all replicas cost: gathering the embeddings, and the B x B work, whole, divided, or around a ring.

    KERAS_BACKEND=jax python -m benchmarks.scaling
    KERAS_BACKEND=jax python -m benchmarks.scaling --parts=predict --local_batch=128 --dim=128

Parts: `work` counts (by XLA) and times one replica's share of losses and objectives; `gather` times the
gathering and its gradient between devices of a process and between two processes, and fits latency + bytes /
bandwidth; `ring` compares gathered columns with columns that go round; `predict` puts the counts together with
published numbers of networks and of a GPU.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

from tools.numbers import Results, command_line

# Of all that is measured: bytes of a float32.
FLOAT = 4
# Batches and dimensions of the table of gathering; the fit counts more.
SHOWN = [(1024, 64), (4096, 64), (4096, 512), (16384, 512)]
# Seconds beyond which one run is enough.
LONG = 1.0
# Bytes a second that one GPU receives, and seconds until the first. Sources: docs/two_hosts.md.
NETWORKS = {
    "NVLink 4, 450 GB/s": (450e9, 10e-6),
    "InfiniBand NDR, 50 GB/s": (50e9, 30e-6),
    "100 Gb/s Ethernet for 8 GPUs, 1.6 GB/s": (12.5e9 / 8, 60e-6),
}
# An H100 SXM: float32 operations and bytes of memory a second, of which half are counted on.
FLOPS, MEMORY = 0.5 * 67e12, 0.5 * 3.35e12


def terms():
    """Losses and objectives by name: functions of `Pairs`. XLA counts no loops, as RankMI has them."""
    from tfdml import losses, objectives

    jrs, ecaml = objectives.JointRepresentationSimilarity("embedding"), objectives.EnergyConfusion()
    return {
        "contrastive": losses.ContrastiveLoss().of_pairs,
        "triplet": losses.TripletLoss().of_pairs,
        "multi_similarity": losses.MultiSimilarityLoss().of_pairs,
        "jrs": lambda pairs: jrs.compute_pairs({"embedding": pairs}),
        "ecaml": lambda pairs: ecaml.compute_pairs({"detached_embedding": pairs}),
    }


def batch(size, dim):
    """Unit vectors of `size` images, four of each class."""
    x = np.random.default_rng(0).normal(size=(size, dim)).astype("float32")
    return x / np.linalg.norm(x, axis=1, keepdims=True), (np.arange(size) // 4).astype("int32")


def seconds(run, rounds):
    """The median of `rounds` runs after a first one; of a long one, that one."""
    started = time.perf_counter()
    run()
    found = [time.perf_counter() - started]
    if found[0] > LONG or not rounds:
        return found[0]
    found.clear()
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def work(arguments, results):
    """One replica's share, for 1 replica and more: operations, bytes moved and held, seconds."""
    import jax

    from tfdml.pairs import Pairs, Rows

    size, dim = arguments.batch, arguments.dim
    x, y = batch(size, dim)
    print(f"\none replica's share of B = {size}, d = {dim}: value and gradient")
    add = results.table("shares", "GFLOP, MB, ms", "whole", "of 2 replicas", "of 4", "of 8")
    counts = {}
    for name, term in terms().items():
        cells = []
        for replicas in (1, 2, 4, 8):
            rows = None if replicas == 1 else Rows(0, size // replicas)

            def share(x, y, rows=rows, term=term, replicas=replicas):
                # This replica stands in for the others.
                return term(Pairs.of_batch(x, y, rows=rows, total=lambda part: replicas * part))

            function = jax.value_and_grad(share)
            compiled = jax.jit(function).lower(x, y).compile()
            cost, memory = compiled.cost_analysis(), compiled.memory_analysis().temp_size_in_bytes
            cost = cost[0] if isinstance(cost, list) else cost
            duration = seconds(functools.partial(_run, compiled, x, y), arguments.rounds)
            if replicas == 1:
                # Per pair of images: operations, bytes moved, bytes held.
                counts[name] = [value / size**2 for value in (cost["flops"], cost["bytes accessed"], memory)]
            cells.append(f"{cost['flops'] / 1e9:.2f}, {memory / 1e6:.1f}, {1000 * duration:.0f}")
        add(f"`{name}`", *cells)
    return counts


def _run(function, *arguments):
    import jax

    jax.block_until_ready(function(*arguments))


def gather(arguments, results):
    """Seconds to gather embeddings and to send their gradient back, against bytes; the fit."""
    columns = [f"{size:,} x {dim} ({size * dim * FLOAT / 1e6:.3g} MB)" for size, dim in SHOWN]
    add = results.table("gather", "between", "fit", *columns)
    for title, processes in (("two devices of a process", 1), ("two processes on loopback (Gloo)", 2)):
        found = _in_children(arguments, processes)
        moved = np.array([size * dim * FLOAT for size, dim, _ in found])
        duration = np.array([value for *_, value in found])
        # Weighted by 1 / seconds: a small batch counts as much as a large one.
        columns = np.stack([np.ones_like(moved), moved], axis=1) / duration[:, None]
        latency, per_byte = np.linalg.lstsq(columns, np.ones_like(duration), rcond=None)[0]
        fit = f"{1e3 * latency:.2f} ms + bytes / {1e-9 / per_byte:.2g} GB/s"
        add(
            title,
            fit,
            *(f"{1e3 * value:,.{0 if value > 0.01 else 2}f} ms" for size, dim, value in found if (size, dim) in SHOWN),
        )


def _in_children(arguments, processes):
    flags = "--xla_force_host_platform_device_count=2" if processes == 1 else ""
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.scaling", "--parts=child", f"--rounds={arguments.rounds}"]
    address = f"localhost:{20000 + os.getpid() % 20000}"
    started = [
        subprocess.Popen(
            [*command, f"--processes={processes}", f"--process={index}", f"--address={address}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for index in range(processes)
    ]
    outputs = [process.communicate()[0] for process in started]
    return json.loads(outputs[0].rpartition("FOUND")[2])


def child(arguments):
    """One of the processes that gather."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    if arguments.processes > 1:
        jax.distributed.initialize(arguments.address, arguments.processes, arguments.process)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))
    by_rows = PartitionSpec("batch")

    def there_and_back(x):
        columns = jax.lax.all_gather(x, "batch", tiled=True)
        return jax.lax.psum_scatter(columns, "batch", tiled=True)

    run = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=by_rows, out_specs=by_rows))
    found = []
    for size in (256, 1024, 4096, 16384):
        for dim in (64, 512):
            part = np.ones((size // arguments.processes, dim), "float32")
            x = jax.make_array_from_process_local_data(NamedSharding(mesh, by_rows), part)
            found.append((size, dim, seconds(functools.partial(_run, run, x), arguments.rounds)))
    print("FOUND" + json.dumps(found))


def ring(arguments, results):
    """The contrastive loss by gathered columns and by columns that go round, on two and four devices."""
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.scaling", "--parts=ring_child", f"--rounds={arguments.rounds}"]
    command += [f"--batch={arguments.batch}", f"--dim={arguments.dim}"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    print(f"\nthe contrastive loss and its gradient, B = {arguments.batch}, d = {arguments.dim}")
    add = results.table("held", "", "replicas", "MB held by each", "ms")
    for cells in json.loads(done.stdout.rpartition("FOUND")[2]):
        add(*cells)


def ring_child(arguments):
    """The process with four devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    x, y = batch(arguments.batch, arguments.dim)
    by_rows = PartitionSpec("batch")
    table = _divided_by_xla(arguments, x, y)
    for replicas in (2, 4):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:replicas]), ("batch",))
        place = NamedSharding(mesh, by_rows)
        rows, labels = jax.device_put(x, place), jax.device_put(y, place)
        gradients = {}
        for name, loss in (("gathered columns", _gathered), ("ring", _ring)):
            local = functools.partial(loss, replicas=replicas)
            whole = jax.shard_map(local, mesh=mesh, in_specs=(by_rows, by_rows), out_specs=PartitionSpec())
            compiled = jax.jit(jax.grad(whole)).lower(rows, labels).compile()
            memory = compiled.memory_analysis().temp_size_in_bytes
            duration = seconds(functools.partial(_run, compiled, rows, labels), arguments.rounds)
            gradients[name] = np.asarray(compiled(rows, labels))
            table.append(_memory_row(name, replicas, memory, duration, gradients[name], gradients["gathered columns"]))
    print("FOUND" + json.dumps(sorted(table, key=lambda row: row[0] == "ring")))


def _memory_row(name, replicas, memory, duration, gradient, expected):
    """Return a row of memory and time; the gradient must be the expected one."""
    np.testing.assert_allclose(gradient, expected, atol=1e-4 * np.abs(expected).max())
    return name, replicas, f"{memory / 1e6:.1f}", f"{1e3 * duration:,.0f}"


def _divided_by_xla(arguments, x, y):
    """Return rows of the library's loss as it is, on a batch that lies on several devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from tfdml import losses

    gradient = jax.jit(jax.grad(lambda x, y: losses.ContrastiveLoss()(y, x)))
    whole, found = np.asarray(gradient(x, y)), []
    for replicas in (1, 2, 4):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:replicas]), ("batch",))
        rows, labels = jax.device_put((x, y), NamedSharding(mesh, PartitionSpec("batch")))
        compiled = gradient.lower(rows, labels).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes
        duration = seconds(functools.partial(_run, compiled, rows, labels), arguments.rounds)
        name = "tfdml, shared out by XLA" if replicas > 1 else "tfdml, one device"
        found.append(_memory_row(name, replicas, memory, duration, np.asarray(compiled(rows, labels)), whole))
    return found


def _block(rows, columns, labels, others):
    """The sums over a block of pairs: of positives and of active hinges (images paired with themselves cost 0)."""
    import jax.numpy as jnp

    squared = jnp.sum(rows**2, 1)[:, None] + jnp.sum(columns**2, 1)[None, :] - 2 * rows @ columns.T
    same = labels[:, None] == others[None, :]
    return jnp.sum(jnp.where(same, squared, jnp.maximum(1.0 - squared, 0.0)))


def _gathered(rows, labels, replicas):
    import jax

    del replicas
    columns, others = (jax.lax.all_gather(a, "batch", tiled=True) for a in (rows, labels))
    return jax.lax.psum(_block(rows, columns, labels, others), "batch")


def _ring(rows, labels, replicas):
    import jax

    to_next = [(i, (i + 1) % replicas) for i in range(replicas)]
    # Computed again in the backward pass, so that no block stays.
    block = jax.checkpoint(_block)

    def step(carry, _):
        columns, others = carry
        value = block(rows, columns, labels, others)
        return tuple(jax.lax.ppermute(a, "batch", to_next) for a in (columns, others)), value

    _, values = jax.lax.scan(step, (rows, labels), None, length=replicas)
    return jax.lax.psum(values.sum(), "batch")


def predict(arguments, counts, results):
    """Milliseconds a step on many GPUs."""
    local, dim = arguments.local_batch, arguments.dim
    print(f"\npredicted for {local} images a GPU, d = {dim}, float32: ms a step and MB held")
    add = results.table("predicted", "", "GPUs", "B", "whole: ms", "GB held", "divided: ms", "MB held")
    for name, (operations, moved, memory) in counts.items():
        for gpus in (64, 512):
            size = gpus * local
            whole = 1e3 * size**2 * (operations / FLOPS + moved / MEMORY)
            divided = f"{whole / gpus:.3f}", f"{size**2 * memory / gpus / 1e6:.1f}"
            add(f"`{name}`", gpus, f"{size:,}", f"{whole:.2f}", f"{size**2 * memory / 1e9:.3g}", *divided)
    print(f"\ngathering B x {dim} and sending the gradient back, ms (the ring: columns twice, their gradient once)")
    columns = [f"{way}, {gpus} GPUs" for way in ("gather", "ring") for gpus in (8, 64, 512)]
    add = results.table("predicted gather", "", *columns)
    for name, (bandwidth, latency) in NETWORKS.items():
        once, around = [], []
        for gpus in (8, 64, 512):
            seconds_received = (gpus - 1) * local * dim * FLOAT / bandwidth
            # NCCL's ring algorithm passes gpus - 1 times; within a tree the latency grows with the logarithm.
            once.append(f"{2e3 * (latency * np.log2(gpus) + seconds_received):.2f}")
            around.append(f"{3e3 * ((gpus - 1) * latency + seconds_received):.2f}")
        add(name, *once, *around)


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--parts", default="work,gather,ring,predict", help="which, with commas")
    parser.add_argument("--batch", type=int, default=1024, help="images of the global batch, for work and ring")
    parser.add_argument("--dim", type=int, default=512, help="size of the embeddings")
    parser.add_argument("--local_batch", type=int, default=64, help="images a GPU, for predict")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each time")
    parser.add_argument("--processes", type=int, default=1, help="of a child")
    parser.add_argument("--process", type=int, default=0, help="of a child")
    parser.add_argument("--address", default="", help="of a child")
    arguments = parser.parse_args()
    if os.environ.get("KERAS_BACKEND") != "jax":
        parser.error("the counts are those of XLA on JAX: set KERAS_BACKEND=jax")
    parts = arguments.parts.split(",")
    for name in ("child", "ring_child"):
        if name in parts:
            globals()[name](arguments)
            return
    results = Results(arguments.json)
    counts = work(arguments, results) if "work" in parts or "predict" in parts else {}
    for name in ("ring", "gather"):
        if name in parts:
            globals()[name](arguments, results)
    if "predict" in parts:
        predict(arguments, counts, results)


if __name__ == "__main__":
    main()
