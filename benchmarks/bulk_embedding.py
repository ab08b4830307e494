"""Bulk embedding compared with a plain loop: images a second, memory, and the embeddings that are read back.

    python -m benchmarks.bulk_embedding --model=models/cars/1/litert/float32.tflite --data_dir=/data/cars196
    python -m benchmarks.bulk_embedding --model=... --data_dir=... --images=2000 --long=0        a quick try

Three parts, on the test images of Cars-196 by turns until there are enough of them:

- speed: seconds of the plain loop (the model called with one batch after another in a process, as `tfdml embed` without
  `--cluster` does: read, decoded and embedded, nothing kept) and of `embed_in_bulk` with 1 and 2 actors, in turns for
  some rounds. Its clock runs from when each actor has written a file to the last file, the start of Ray and of the
  actors apart, which have their own column; that of the plain loop from its second batch on. A ratio is the median over
  rounds. Seconds of the processors, of all processes together, are the fairer measure on a machine with other work.
- memory: the resident memory of this process, of Ray's own processes and of each actor, every half second while --long
  images are embedded, as the peak of each fifth of the pass.
- round trip: Recall@1 of the embeddings of --long images, read back from Parquet, and Recall@1 of the vectors that the
  plain loop holds in memory. Queries are every other photograph, the gallery all copies of the others.
"""

import csv
import os
import pathlib
import statistics
import tempfile
import threading
import time

from tools.numbers import Results, command_line

KINDS = {"driver": "the command itself", "Ray": "Ray's own processes", "actors": "the actors"}


def resident(pid):
    """Return a process's resident memory in MiB, without shared files; 0 after its end."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0.0
    return (int(fields[1]) - int(fields[2])) * 4096 / 2**20


def children(pid):
    """Return the child processes of a process, by kind."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdecimal():
                after = (entry / "stat").read_text().rpartition(")")[2].split()
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                found[int(entry.name)] = (int(after[1]), title)
        except OSError:
            continue
    below, kinds = {pid}, {pid: "driver"}
    while new := {child for child, (parent, _) in found.items() if parent in below} - below:
        below |= new
        kinds |= {child: "actors" if "PartEmbedder" in found[child][1] else "Ray" for child in new}
    return kinds


def processor_seconds():
    """Return the CPU seconds of this process and of its living children."""
    total = 0
    for pid in children(os.getpid()):
        try:
            after = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(after[11]) + int(after[12])
        except OSError:
            continue
    return total / os.sysconf("SC_CLK_TCK")


class Watch(threading.Thread):
    """Records when each part of a bulk pass was written, and the CPU seconds until then.

    Ray reports finished parts late and in bursts; the files appear at once.
    """

    def __init__(self, out):
        super().__init__(daemon=True)
        self.out, self.marks, self._ended = pathlib.Path(out), [], threading.Event()

    def run(self):
        """Look at the folder, ten times a second."""
        while not self._ended.wait(0.1):
            parts = len(list(self.out.glob("part-*.parquet")))
            if parts > (self.marks[-1][0] if self.marks else 0):
                self.marks.append((parts, time.perf_counter(), processor_seconds()))

    def stop(self):
        """End."""
        self._ended.set()
        self.join()


class Memory(threading.Thread):
    """Samples memory by kind of process until it is stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.samples, self.done, self._ended = [], 0, threading.Event()

    def run(self):
        """Sample, twice a second."""
        while not self._ended.wait(0.5):
            sums = {}
            for pid, kind in children(os.getpid()).items():
                sums[kind] = sums.get(kind, 0.0) + resident(pid)
            self.samples.append((self.done, sums))

    def stop(self):
        """End."""
        self._ended.set()
        self.join()


def repeat_rows(paths, labels, count):
    """Return the rows of a list of `count` images, which repeats the photographs."""
    return [(paths[row % len(paths)], int(labels[row % len(paths)])) for row in range(count)]


def write_list(rows, path):
    """Write the list as a CSV file."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *rows])
    return str(path)


def bare_loop(model, paths, batch_size):
    """Images a second of the model alone, images a second of a processor, and its vectors."""
    import numpy as np

    from tfdml.data import FileImages, ImageDataset
    from tfdml.embeddings.backends import load_backend

    backend = load_backend(model)
    dataset = ImageDataset("images", "test", FileImages(tuple(paths)), np.zeros(len(paths), int), {0: ""})
    vectors, started, worked = [], 0.0, 0.0
    for batch in backend.stream(dataset, batch_size):
        started, worked = started or time.perf_counter(), worked or time.process_time()
        vectors.append(batch)
    count = len(paths) - len(vectors[0])
    rates = count / (time.perf_counter() - started), count / (time.process_time() - worked)
    return *rates, np.concatenate(vectors)


def in_bulk(model, source, out, actors, args, memory=None):
    """Images a second once each actor has written a part, images a second of a processor, and seconds until then."""
    from tfdml.cluster.bulk_embedding import BulkRequest, embed_in_bulk

    def progress(done, bad, total):
        if memory is not None:
            memory.done = done

    begun, watch = time.perf_counter(), Watch(out)
    watch.start()
    request = BulkRequest(
        str(model),
        source,
        out,
        actors=actors,
        batch_size=args.batch_size,
        rows_per_file=args.rows_per_file,
    )
    embed_in_bulk(request, progress)
    watch.stop()
    first, last = next(mark for mark in watch.marks if mark[0] >= actors), watch.marks[-1]
    count = (last[0] - first[0]) * args.rows_per_file  # to be a multiple of which the images are chosen
    if not count:
        raise SystemExit("too few images: each actor must write several files (--images, --rows_per_file)")
    return count / (last[1] - first[1]), count / (last[2] - first[2]), first[1] - begun


def speed(args, paths, labels, folder, results):
    """Add the table of the plain loop and the actors."""
    source = write_list(repeat_rows(paths, labels, args.images), folder / "speed.csv")
    rows = [path for path, _ in repeat_rows(paths, labels, args.images)]
    rates: dict = {"bare loop": [], 1: [], 2: []}
    for number in range(args.rounds):
        for contender in [*rates][number % 3 :] + [*rates][: number % 3]:
            if contender == "bare loop":
                rates[contender].append((*bare_loop(args.model, rows, args.batch_size)[:2], 0.0))
            else:
                out = str(folder / f"{number}-{contender}")
                rates[contender].append(in_bulk(args.model, source, out, contender, args))
    columns = ("images/s", "of the bare loop", "images/s of a processor", "of the bare loop", "until the first part, s")
    row = results.table("rates", f"{args.images:,} images, {args.rounds} rounds", *columns)
    for contender, found in rates.items():
        name = contender if contender == "bare loop" else f"{contender} actor{'s' * (contender > 1)}"
        cells = []
        for column in (0, 1):
            mine, theirs = ([rate[column] for rate in each] for each in (found, rates["bare loop"]))
            ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
            cells += [f"{statistics.median(mine):,.0f}", f"{ratio:.2f}"]
        start = statistics.median(rate[2] for rate in found)
        row(name, *cells, f"{start:.1f}")


def long_pass(args, paths, labels, folder, results):
    """Measure the memory of a long pass, and read its embeddings back."""
    import numpy as np

    from tfdml.embeddings import read_embeddings
    from tfdml.evaluation import evaluate_retrieval

    source = write_list(repeat_rows(paths, labels, args.long), folder / "long.csv")
    memory = Memory()
    memory.start()
    rate, _, _ = in_bulk(args.model, source, str(folder / "long"), args.actors, args, memory)
    memory.stop()
    print(f"\n{args.long:,} images by {args.actors} actor(s): {rate:,.0f} a second")
    shares = [f"{20 * part + 20} %" for part in range(5)]
    row = results.table("memory", f"{args.long:,} images, {args.actors} actor(s), peak resident MiB", *shares)
    for kind, name in KINDS.items():
        peaks = []
        for part in range(5):
            within = [
                sums.get(kind, 0) for done, sums in memory.samples if part <= 5 * done / args.long - 1e-9 < part + 1
            ]
            peaks.append(f"{max(within):,.0f}" if within else "")
        row(name, *peaks)
    read = read_embeddings(folder / "long")
    *_, vectors = bare_loop(args.model, paths, args.batch_size)
    photograph = np.arange(args.long) % len(paths)
    query = (photograph % 2 == 0) & (np.arange(args.long) < len(paths))
    gallery = photograph % 2 == 1
    found = {}
    for name, all_vectors in (("Parquet", read.embeddings), ("memory", vectors[photograph])):
        sides = (all_vectors[query], labels[photograph[query]], all_vectors[gallery], labels[photograph[gallery]])
        found[name] = evaluate_retrieval(*sides, metrics=["recall@1"])["recall@1"]
    size = sum(file.stat().st_size for file in (folder / "long").glob("*.parquet"))
    difference = np.abs(read.embeddings - vectors[photograph]).max()
    print(
        f"\nRecall@1 of {query.sum():,} queries among {gallery.sum():,}: {100 * found['Parquet']:.4f} % from Parquet,"
    )
    print(f"{100 * found['memory']:.4f} % from memory; the largest difference of a component is {difference:.1e}")
    print(f"{size / args.long:,.0f} bytes a row of {read.embeddings.shape[1]} numbers")
    return found["Parquet"] != found["memory"]


def main():
    """Parse the command line, measure, print."""
    parser = command_line(__doc__)
    parser.add_argument("--model", required=True, help="a SavedModel, a .tflite file, a run")
    parser.add_argument("--data_dir", required=True, help="Cars-196")
    parser.add_argument("--images", type=int, default=20_000, help="of the part on speed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=int, default=100_000, help="images of the long pass; 0: none")
    parser.add_argument("--actors", type=int, default=1, help="of the long pass")
    parser.add_argument("--batch_size", type=int, default=100)
    parser.add_argument("--rows_per_file", type=int, default=1000)
    parser.add_argument("--folder", default="", help="where to work; by default a temporary folder")
    args = parser.parse_args()
    for name in ("images", "long"):
        if getattr(args, name) % args.rows_per_file:
            parser.error(f"--{name} must be a multiple of --rows_per_file")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from tfdml import data

    dataset = data.load("cars196", args.data_dir, "test")
    paths = [os.path.abspath(dataset.images.name(row)) for row in range(len(dataset))]
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        parts = (args, paths, dataset.labels, pathlib.Path(folder), Results(args.json))
        if args.rounds:
            speed(*parts)
        differs = long_pass(*parts) if args.long else False
    raise SystemExit(differs)


if __name__ == "__main__":
    main()
