"""The demo of galleries of several sizes: how long it takes to start and to answer, and its memory.

    python -m benchmarks.demo --json=docs/numbers/demo.json
    python -m benchmarks.demo --images=1000 --requests=20           a quick try

Each gallery is made: 128-d embeddings in classes of ten, written as `tfdml embed` writes them. The model is a
MobileNetV2 0.35 of 160 px with random weights; the uploads are JPEGs of 640 x 480 px. `tfdml demo` runs in a process of
its own, and is asked over HTTP, one request after another: by an upload (its embedding, then 12 neighbors), and by an
image of the gallery (12 neighbors). `first` is the first upload, while the map is being computed; the others follow
when the map is done. `CPU` is the time that the process computes for a request, on average: other work on the machine
lengthens the latencies, and hardly this. `own memory` is what the process holds at the end; `with libraries` is the
most that it has held together with the mapped files of libraries, such as TensorFlow's.
"""

import contextlib
import io
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import psutil

from benchmarks.retriever import make_vectors
from tools.numbers import Results, command_line

DIMENSIONS, RANK, NEIGHBORS = 128, 16, 12
COLUMNS = (
    "images",
    "start, s",
    "first, ms",
    "upload, median ms",
    "upload, p99 ms",
    "upload, CPU ms",
    "click, median ms",
    "click, p99 ms",
    "click, CPU ms",
    "map, s",
    "own memory, MB",
    "with libraries, MB",
)


def write_model(path):
    """Write the embedder."""
    import tfdml

    backbone = tfdml.backbones.resolve("mobilenetv2", image_size=160, alpha=0.35, weights=None)
    embedder = tfdml.models.Embedder(backbone, embedding_dim=DIMENSIONS, image_size=160, resize=176)
    embedder.build((None, 160, 160, 3))
    embedder.save(path)


def write_gallery(folder, count):
    """Write the embeddings."""
    from tfdml.embeddings.reader import ImageTable
    from tfdml.embeddings.writer import EmbeddingWriter

    labels = np.arange(count) // 10
    names = tuple(f"{row:07d}.jpg" for row in range(count))
    table = ImageTable(names, labels, np.full(count, "test"))
    with EmbeddingWriter(folder, {"images": count}, table, rows_per_file=100_000) as writer:
        vectors = make_vectors(count, DIMENSIONS, RANK, seed=2)
        for first in range(0, count, 100_000):
            writer.append(vectors[first : first + 100_000])
        writer.finish()


def uploads(count):
    """Return the bytes of JPEGs: blurred noise, about 40 kB each."""
    from PIL import Image

    rng, images = np.random.default_rng(0), []
    for _ in range(count):
        pixels = rng.integers(0, 255, (48, 64, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        images.append(buffer.getvalue())
    return images


@contextlib.contextmanager
def start_demo(*flags):
    """The demo's process, and the address that it prints."""
    command = [sys.executable, "-m", "tfdml", "demo", *flags, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            address = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
            yield process, address.rstrip("/")
        finally:
            process.terminate()


def memory(process):
    """Return the memory of a process in MB: its own, and with the files that are mapped."""
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
    fields = {line.split()[0].rstrip(":"): line.split()[1] for line in status if line.startswith(("Vm", "Rss"))}
    return [f"{int(fields[name]) / 1024:,.0f}" for name in ("RssAnon", "VmHWM")]


def measure(folder, model, count, requests):
    """Return a row of the table."""
    import requests as http

    gallery = folder / f"gallery{count}"
    write_gallery(gallery, count)
    images, session = uploads(min(requests, 16)), http.Session()

    def milliseconds(function, *values):
        begun = time.perf_counter()
        function(*values)
        return 1e3 * (time.perf_counter() - begun)

    def search(example):
        payload = {"positives": [example], "k": NEIGHBORS}
        found = session.post(f"{address}/api/search", json=payload).json()["neighbors"]
        assert len(found) == NEIGHBORS

    def upload(data):
        search(session.post(f"{address}/api/embed", data=data).json())

    begun = time.perf_counter()
    with start_demo(f"--model={model}", f"--gallery={gallery}", f"--cache={folder / 'cache'}") as (process, address):
        session.get(f"{address}/api/about").raise_for_status()
        start = time.perf_counter() - begun
        first = milliseconds(upload, images[0])
        while session.get(f"{address}/api/map").status_code == 202:
            time.sleep(0.2)
        mapped = time.perf_counter() - begun - start
        used = [sum(psutil.Process(process.pid).cpu_times()[:2])]
        uploaded = [milliseconds(upload, images[i % len(images)]) for i in range(requests)]
        used.append(sum(psutil.Process(process.pid).cpu_times()[:2]))
        clicked = [milliseconds(search, {"row": i * 997 % count}) for i in range(requests)]
        used.append(sum(psutil.Process(process.pid).cpu_times()[:2]))
        fields = memory(process)
    row = [f"{count:,}", f"{start:.0f}", f"{first:.0f}"]
    for times, seconds in zip((uploaded, clicked), np.diff(used), strict=True):
        row += [f"{statistics.median(times):.0f}", f"{np.percentile(times, 99):.0f}", f"{1e3 * seconds / requests:.0f}"]
    return [*row, f"{mapped:.0f}", *fields]


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--requests", type=int, default=100)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    add = Results(arguments.json).table("table", *COLUMNS)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_model(folder / "model.keras")
        for count in arguments.images:
            add(*measure(folder, folder / "model.keras", count, arguments.requests))


if __name__ == "__main__":
    main()
