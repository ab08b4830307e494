"""`tfdml serve` under load: requests a second and latencies; or many minutes of it, with updates and memory.

    python -m benchmarks.serving --images=photos --json=docs/numbers/serving.json
    python -m benchmarks.serving --images=photos --minutes=30 --clients 3 --json=docs/numbers/serving_soak.json

The model is a MobileNetV2 0.35 of 96 px with a random projection to 128 dimensions, exported in three versions that
differ in it. `tfdml serve` runs in processes of its own on the same machine as the clients. Every answer is compared
with the SavedModel that is called directly: a good image must have the vector of a version, a request the vectors of
one alone (1e-5), and a bad image an error. A request has one image; with `--minutes`, one to six, of which some are
bad. `--minutes` puts a new version into the folder after each third of the time, and samples the memory of the server
and all its processes: what they hold alone, and their share of what they hold together (PSS).
"""

import contextlib
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import psutil

from benchmarks.serving_load import TOLERANCE, bad_images, client_module
from tools.numbers import Results, command_line

VERSIONS = (1, 2, 3)
LOAD = ("clients", "requests/s", "median, ms", "99th percentile, ms", "requests", "wrong")
COLUMNS = ("minute", "server, MB", "replicas, MB", "Ray, MB", "all (PSS), MB", "files", "threads")


def write_versions(folder, weights):
    """Write three versions with their warm-up requests."""
    import keras
    import tensorflow as tf

    import tfdml
    from tfdml.export.saved_model import write_saved_model, write_warm_up

    for number in VERSIONS:
        keras.utils.set_random_seed(number)
        backbone = tfdml.backbones.resolve("mobilenetv2", image_size=96, alpha=0.35, weights=weights or None)
        embedder = tfdml.models.Embedder(backbone, embedding_dim=128, image_size=96, resize=112)
        embedder.build((None, 96, 96, 3))
        write_saved_model(embedder, folder / str(number))
        write_warm_up(folder / str(number), tf.saved_model.load(str(folder / str(number))).signatures)


def direct(folder, images):
    """Return the (N, d) answers of a SavedModel that is called directly."""
    import tensorflow as tf

    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    return np.concatenate([signature(image_bytes=tf.constant([image]))["embedding"].numpy() for image in images])


@contextlib.contextmanager
def start_server(model, *flags):
    """Start a server of a folder of versions; yield the process and the address, then end it."""
    command = [sys.executable, "-m", "tfdml", "serve", f"--model={model}", "--port=0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            if not line.startswith("serving at "):
                raise SystemExit("the server did not start")
            yield process, line.split()[-1]
        finally:
            process.terminate()


class Clients:
    """Threads that ask one request after another and compare every answer.

    Args:
        url: Of the model.
        images: Good ones.
        expected: Their embeddings by version.
    """

    def __init__(self, url, images, expected):
        self.module, self.url, self.images, self.expected = client_module(), url, images, expected
        self.bad = list(bad_images(images[0]).values())
        self.lock, self.notes = threading.Lock(), []
        self.seconds, self.counts = [], dict.fromkeys(("images", "bad", "wrong", "failed", *VERSIONS), 0)

    def run(self, clients, seconds, most=1, bad=0.0, meanwhile=lambda: None):
        """Ask for so long; `meanwhile` is called every second."""
        self.seconds, self.counts = [], dict.fromkeys(self.counts, 0)
        started = time.monotonic()
        threads = [
            threading.Thread(target=self._ask, args=(number, started + seconds, most, bad)) for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            meanwhile()
            time.sleep(1)
        return time.monotonic() - started

    def _ask(self, seed, end, most, bad):
        rng = random.Random(seed)
        while time.monotonic() < end:
            rows = [rng.randrange(len(self.images)) for _ in range(rng.randint(1, most))]
            if rng.random() < bad:
                rows.insert(rng.randint(0, len(rows)), None)
            batch = [rng.choice(self.bad) if row is None else self.images[row] for row in rows]
            started = time.perf_counter()
            try:
                outputs = self.module.predict(self.url, "embed_each", {"image_bytes": batch})
            except Exception as error:
                self._count(note=f"{error!r}", failed=1)
                continue
            self._judge(rows, outputs, time.perf_counter() - started)

    def _judge(self, rows, outputs, seconds):
        good = [place for place, row in enumerate(rows) if row is not None]
        right = all(bool(error) == (row is None) for row, error in zip(rows, outputs["error"], strict=True))
        version = None
        if right and good:
            found = np.array([outputs["embedding"][place] for place in good])
            places = [rows[place] for place in good]
            fits = [n for n, vectors in self.expected.items() if np.abs(vectors[places] - found).max() <= TOLERANCE]
            right = len(fits) == 1
            version = fits[0] if fits else None
        matches = {} if version is None else {version: 1}
        note = "" if right else f"wrong: {outputs['error']}"
        self._count(note, seconds, images=len(good), bad=len(rows) - len(good), wrong=int(not right), by=matches)

    def _count(self, note="", seconds=None, by=None, **counts):
        with self.lock:
            for name, count in {**counts, **(by or {})}.items():
                self.counts[name] += count
            if note:
                self.notes.append(note)
            if seconds is not None:
                self.seconds.append(seconds)


def megabytes(process):
    """Return the memory of the server, of its replicas and of Ray's other processes: each alone, and PSS of all."""
    sizes = {"server": 0, "replicas": 0, "Ray": 0, "all": 0}
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            memory = each.memory_full_info()
            line = " ".join(each.cmdline())
            part = "server" if each == process else "replicas" if "ServeReplica" in line else "Ray"
            sizes[part] += memory.uss / 1e6
            sizes["all"] += memory.pss / 1e6
    return sizes


def soak(process, clients, made, model, count, minutes, results):
    """Ask for so many minutes, put two new versions into the folder, and sample memory, files and threads."""
    add = results.table(
        "memory", "minute", "server, MB", "replicas, MB", "Ray, MB", "all (PSS), MB", "files", "threads"
    )
    server, started, added = psutil.Process(process.pid), time.monotonic(), [1]
    every = max(1, minutes // 10)
    due = [0.5, *np.arange(every, minutes + 1, every) - 0.05]

    def look():
        now = (time.monotonic() - started) / 60
        if len(added) < len(VERSIONS) and now > minutes * len(added) / len(VERSIONS):
            number = VERSIONS[len(added)]
            shutil.copytree(made / str(number), model / f".{number}")
            (model / f".{number}").rename(model / str(number))
            added.append(number)
        if due and now >= due[0]:
            due.pop(0)
            sizes = megabytes(server)
            cells = [f"{size:,.0f}" for size in sizes.values()]
            add(f"{now:.1f}", *cells, server.num_fds(), server.num_threads())

    seconds = clients.run(count, 60 * minutes, most=6, bad=0.2, meanwhile=look)
    counts = clients.counts
    for key, value in {
        "requests": len(clients.seconds),
        "images": counts["images"],
        "bad images": counts["bad"],
        "failed requests": counts["failed"],
        "wrong answers": counts["wrong"],
        "updates": len(added) - 1,
        "requests by version": ", ".join(f"{counts[number]:,} by {number}" for number in VERSIONS),
        "requests a second": f"{len(clients.seconds) / seconds:.0f}",
        "median, ms": f"{1e3 * np.median(clients.seconds):.0f}",
        "99th percentile, ms": f"{1e3 * np.percentile(clients.seconds, 99):.0f}",
        "longest, ms": f"{1e3 * max(clients.seconds):.0f}",
    }.items():
        results.value(key, value)


def main():
    """Parse the command line, serve, ask, print."""
    parser = command_line(__doc__)
    parser.add_argument("--images", required=True, help="a folder of JPEGs, at any depth")
    parser.add_argument("--weights", default="", help="of the backbone; empty: random")
    parser.add_argument("--count", type=int, default=48, help="images to send, spread over the folder")
    parser.add_argument("--seconds", type=int, default=20, help="of each row of the table")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64], help="clients at once, a row for each")
    parser.add_argument("--minutes", type=int, default=0, help="of load with updates, by the first of --clients")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    paths = sorted(pathlib.Path(args.images).rglob("*.jpg"))
    images = [paths[row].read_bytes() for row in np.unique(np.linspace(0, len(paths) - 1, args.count).astype(int))]
    results = Results(args.json)
    if args.note:
        results.value("note", args.note)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made, model = folder / "made", folder / "cars"
        write_versions(made, args.weights)
        shutil.copytree(made / "1", model / "1")
        expected = {number: direct(made / str(number), images) for number in VERSIONS}
        started = time.monotonic()
        process, url = stack.enter_context(start_server(model, "--poll_seconds=2"))
        results.value("start, s", f"{time.monotonic() - started:.0f}")
        clients = Clients(url, images, expected)
        if args.minutes:
            soak(process, clients, made, model, args.clients[0], args.minutes, results)
        else:
            add = results.table(
                "load", "clients", "requests/s", "median, ms", "99th percentile, ms", "requests", "wrong"
            )
            for count in args.clients:
                seconds = clients.run(count, args.seconds)
                rate, done = len(clients.seconds) / seconds, len(clients.seconds)
                median, high = 1e3 * np.percentile(clients.seconds, [50, 99])
                wrong = clients.counts["wrong"] + clients.counts["failed"]
                add(count, f"{rate:.0f}", f"{median:.0f}", f"{high:.0f}", f"{done:,}", wrong)
    for note in clients.notes[:5]:
        print(note)
    return 1 if clients.notes else 0


if __name__ == "__main__":
    sys.exit(main())
