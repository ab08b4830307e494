"""Bulk embedding compared with a plain loop: images a second, and the embeddings that are read back.

    python -m benchmarks.bulk_embedding --model=models/cars/1/litert/float32.tflite --data_dir=/data/cars196
    python -m benchmarks.bulk_embedding --model=... --data_dir=... --images=2000 --rounds=1        a quick try

The plain loop calls the model with one batch after another in a process, as `tfdml embed` without `--cluster` does.
`embed_parts` runs with 1 and 2 actors, in turns with the loop. Its clock runs from when each actor has written a file
to the last file; the start of Ray and of the actors has a column of its own. A ratio is the median over rounds. The
images are the test images of Cars-196, repeated, and the embeddings of the last pass must equal those of the loop.
"""

import csv
import os
import pathlib
import statistics
import tempfile
import threading
import time

from tools.numbers import Results, command_line


class Watch(threading.Thread):
    """Records when each part of a bulk pass was written: Ray reports finished parts late and in bursts."""

    def __init__(self, out):
        super().__init__(daemon=True)
        self.out, self.marks, self._ended = pathlib.Path(out), [], threading.Event()

    def run(self):
        """Look at the folder, ten times a second."""
        while not self._ended.wait(0.1):
            parts = len(list(self.out.glob("part-*.parquet")))
            if parts > (self.marks[-1][0] if self.marks else 0):
                self.marks.append((parts, time.perf_counter()))

    def stop(self):
        """End."""
        self._ended.set()
        self.join()


def bare_loop(model, paths, batch_size):
    """Return images a second of the model alone, and its vectors."""
    import numpy as np

    from tfdml.data import FileImages, ImageDataset
    from tfdml.embeddings.backends import load_backend

    dataset = ImageDataset("images", "test", FileImages(tuple(paths)), np.zeros(len(paths), int), {0: ""})
    vectors, started = [], 0.0
    for batch in load_backend(model).stream(dataset, batch_size):
        started = started or time.perf_counter()
        vectors.append(batch)
    return (len(paths) - len(vectors[0])) / (time.perf_counter() - started), np.concatenate(vectors)


def in_bulk(source, out, actors, args):
    """Return images a second once each actor has written a part, and the seconds until then."""
    from tfdml.cluster.bulk_embedding import embed_parts
    from tfdml.data import FileImages, ImageDataset
    from tfdml.embeddings.backends import load_backend
    from tfdml.embeddings.files import EmbeddingFolder
    from tfdml.embeddings.passes import EmbeddingPass, images_of

    begun, watch = time.perf_counter(), Watch(out)
    watch.start()
    images = images_of(source)
    dataset = ImageDataset("input", "all", FileImages(images.names), images.labels)
    work = EmbeddingPass([dataset], images, args.batch_size, args.rows_per_file, skip_bad=True)
    folder = EmbeddingFolder(out, work.identity(load_backend(args.model)))
    work.run(folder, lambda parts: embed_parts(parts, str(args.model), folder, "local", actors), {})
    watch.stop()
    first, last = next(mark for mark in watch.marks if mark[0] >= actors), watch.marks[-1]
    count = (last[0] - first[0]) * args.rows_per_file
    if not count:
        raise SystemExit("too few images: each actor must write several files (--images, --rows_per_file)")
    return count / (last[1] - first[1]), first[1] - begun


def main():
    """Parse the command line, measure, print."""
    parser = command_line(__doc__)
    parser.add_argument("--model", required=True, help="a SavedModel, a .tflite file, a run")
    parser.add_argument("--data_dir", required=True, help="Cars-196")
    parser.add_argument("--images", type=int, default=20_000, help="a multiple of --rows_per_file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=100)
    parser.add_argument("--rows_per_file", type=int, default=1000)
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import numpy as np

    from tfdml import data
    from tfdml.embeddings import read_embeddings

    dataset = data.load("cars196", args.data_dir, "test")
    rows = np.arange(args.images - args.images % args.rows_per_file) % len(dataset)
    paths = [os.path.abspath(dataset.images.name(row)) for row in rows]
    rates: dict = {"bare loop": [], 1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "list.csv")
        with open(source, "w", newline="") as file:
            csv.writer(file).writerows([("path", "label"), *zip(paths, dataset.labels[rows], strict=True)])
        for number in range(args.rounds):
            for contender in [*rates][number % 3 :] + [*rates][: number % 3]:
                if contender == "bare loop":
                    rate, vectors = bare_loop(args.model, paths, args.batch_size)
                    rates[contender].append((rate, 0.0))
                else:
                    rates[contender].append(in_bulk(source, f"{folder}/{number}-{contender}", contender, args))
        embeddings = read_embeddings(f"{folder}/{number}-2").embeddings
        difference = float(np.abs(embeddings - vectors).max())
    row = Results(args.json).table(
        "rates",
        f"{len(paths):,} images, {args.rounds} rounds",
        *("images/s", "of the bare loop", "until the first part, s"),
    )
    for contender, measured in rates.items():
        name = contender if contender == "bare loop" else f"{contender} actor{'s' * (contender > 1)}"
        ratios = [mine / theirs for (mine, _), (theirs, _) in zip(measured, rates["bare loop"], strict=True)]
        rate, start = (statistics.median(column) for column in zip(*measured, strict=True))
        row(name, f"{rate:,.0f}", f"{statistics.median(ratios):.2f}", f"{start:.1f}")
    print(f"the largest difference of a component is {difference:.1e}")


if __name__ == "__main__":
    main()
