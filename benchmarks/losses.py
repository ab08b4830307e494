"""Time and memory of losses, forward and backward, in turns with pytorch-metric-learning.

    make parity-pml                                        once: makes the environment with PyTorch
    python -m benchmarks.losses
    python -m benchmarks.losses --batches 128 --losses triplet --rounds=3
    python -m benchmarks.losses --device=cuda              on a GPU, which both sides share

Both sides get the same float32 vectors, classes of --per_class images, and as many threads; tfdml's
loss is the equal of theirs in `benchmarks.pml_losses`, on TensorFlow, in a graph as `model.fit`
runs it. A line states the median of the rounds, each of which is the median of passes that follow
one another for 0.3 s; and the most memory that a process has taken for it (none with
--device=cuda), graph and smaller batches included; and ours divided by theirs: below 1 ours is
quicker, or smaller. A side that takes more than --limit seconds or --memory GiB is stopped, and its
cell shows that. A second table has the least and the largest share at each batch.
"""

import json
import os
import pathlib
import select
import statistics
import subprocess
import sys
import time

from benchmarks.losses_peer import made_batch, serve
from tools.numbers import Results, command_line

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Names of `benchmarks.pml_losses.CASES`.
NAMES = (
    *(
        "contrastive",
        "triplet",
        "triplet hard",
        "margin weighted",
        "multi-similarity",
        "multi-similarity mined",
    ),
    *(
        "nt xent",
        "sup con",
        "circle",
        "tuplet margin",
        "lifted",
        "generalized lifted",
        "angular",
        "histogram",
    ),
    *(
        "fast ap",
        "arc face",
        "cos face",
        "normalized softmax",
        "proxy nca",
        "proxy anchor",
        "soft triple",
    ),
    "sub-center arc face",
)


class Side:
    """A process that answers requests; it is started again after a stop."""

    def __init__(self, command, variables, limit, memory):
        self.command, self.variables, self.limit, self.memory = command, variables, limit, memory
        self.process = None

    def ask(self, request):
        """The answer, or {"error"}."""
        if self.process is None:
            environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **self.variables}
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=environment,
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self.process.stdout.readline()  # when it has imported everything
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        started, why = time.perf_counter(), ""
        while not why and not select.select([self.process.stdout], [], [], 0.05)[0]:
            if time.perf_counter() - started > self.limit:
                why = f"> {1000 * self.limit:,.0f}"
            elif resident_memory(self.process.pid) > self.memory:
                why = "no memory"
        line = "" if why else self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.close()
        return {"error": why or "it ended"}

    def close(self):
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def resident_memory(pid):
    """Return a process's memory in GiB."""
    path = pathlib.Path(f"/proc/{pid}/statm")
    return (
        int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
        if path.exists()
        else 0.0
    )


def ours(request):
    """Labels, vectors, tfdml's loss as a function of vectors and labels, and the variables that it
    trains."""
    from benchmarks.pml_losses import CASES

    case = CASES[request["name"]]
    labels, vectors, centers = made_batch(request["batch"], request["dim"], request["per_class"])
    if not case.proxies:
        return labels, vectors, lambda x, y: case.ours(y, x), []
    objective = case.objective(len(centers))
    objective.build({"embedding": vectors.shape})
    proxies = objective.class_proxies.proxies
    start = centers if case.proxies == 1 else centers[:, None].repeat(case.proxies, axis=1)
    proxies.assign(start)
    return labels, vectors, lambda x, y: objective({"embedding": x}, y), [proxies]


def serve_ours(threads):
    """Answer requests with tfdml's losses on TensorFlow."""
    import tensorflow as tf

    from benchmarks import pml_losses  # noqa: F401  (imported before memory is counted)

    tf.config.threading.set_intra_op_parallelism_threads(threads)

    def prepare(request):
        labels, vectors, loss, proxies = ours(request)
        labels, vectors = tf.constant(labels), tf.constant(vectors)
        watched = [variable.value for variable in proxies]

        @tf.function
        def step(labels, vectors):
            with tf.GradientTape() as tape:
                tape.watch(vectors)
                value = loss(vectors, labels)
            return value, tape.gradient(value, [vectors, *watched])

        def run():
            value, gradients = step(labels, vectors)
            gradients[0].numpy()
            return float(value)

        return run

    serve(prepare, threads)


def column(answers):
    """(milliseconds, MiB) of a side, or None and why not."""
    if "error" in answers[-1]:
        return None
    return 1000 * statistics.median(answer["seconds"] for answer in answers), max(
        answer["mib"] for answer in answers
    )


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--torch_python", default=str(ROOT / ".venv-pml" / "bin" / "python"))
    parser.add_argument("--batches", type=int, nargs="*", default=[128, 512, 1024, 4096])
    parser.add_argument("--losses", nargs="*", default=NAMES, help="of `NAMES`; by default all")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--per_class", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=60, help="seconds that a pass may take")
    parser.add_argument("--memory", type=float, default=12, help="GiB that a side may hold")
    parser.add_argument("--device", default="cpu", help="of the other side: cpu or cuda")
    arguments = parser.parse_args()
    from benchmarks.pml_losses import CASES

    threads = str(arguments.threads)
    own = [sys.executable, "-m", "benchmarks.losses", "--serve", threads]
    peer = [
        arguments.torch_python,
        str(ROOT / "benchmarks" / "losses_peer.py"),
        threads,
        arguments.device,
    ]
    variables = {
        "OMP_NUM_THREADS": threads,
        "KERAS_BACKEND": "tensorflow",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    sides = [Side(command, variables, arguments.limit, arguments.memory) for command in (own, peer)]
    results = Results(arguments.json)
    on_gpu = arguments.device != "cpu"
    columns = [
        *(f"{batch:,}" for batch in arguments.batches),
        *[f"MiB at {arguments.batches[-1]:,}"] * (not on_gpu),
    ]
    row = results.table("table", "loss", *columns)
    shares = {batch: [] for batch in arguments.batches}
    try:
        for name in arguments.losses:
            case = CASES[name].there()
            cells = [f"`{case['name']}`" + (f", {case['miner'][0]}" if case["miner"] else "")]
            for batch in arguments.batches:
                sizes = {"batch": batch, "dim": arguments.dim, "per_class": arguments.per_class}
                request = {"name": name, "case": case, **sizes}
                answers = [[], []]
                for _ in range(arguments.rounds):
                    for side, found in zip(sides, answers, strict=True):
                        if not found or "error" not in found[-1]:
                            found.append(side.ask(request))
                sides_found = [column(found) for found in answers]
                cells.append(beside(sides_found, answers, 0, ",.1f"))
                shares[batch] += [sides_found[0][0] / sides_found[1][0]] if all(sides_found) else []
            row(*cells, *[beside(sides_found, answers, 1, ",.0f")] * (not on_gpu))
            if not on_gpu:
                # The next loss begins with the memory of a new process.
                for side in sides:
                    side.close()
    finally:
        for side in sides:
            side.close()
    row = results.table("shares", "batch", "least", "most")
    for batch, found in shares.items():
        row(f"{batch:,}", *(f"{end(found):.2f}" if found else "" for end in (min, max)))


def beside(sides, answers, place, unit):
    """A cell: ours / theirs = share, of the time (0) or the memory (1)."""
    cells = [
        format(found[place], unit) if found else why[-1]["error"] * (not place)
        for found, why in zip(sides, answers, strict=True)
    ]
    share = (
        f" = {sides[0][place] / sides[1][place]:.2f}" if all(sides) and sides[1][place] > 0 else ""
    )
    return (" / ".join(cells) + share).strip()


if __name__ == "__main__":
    if "--serve" in sys.argv:
        serve_ours(int(sys.argv[-1]))
    else:
        main()
