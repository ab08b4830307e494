r"""Bulk embedding compared with a plain loop: images a second, and the embeddings that are read
back.

    python -m benchmarks.bulk_embedding --model=models/cars/1/litert/float32.tflite \
        --data_dir=/data/cars196
    python -m benchmarks.bulk_embedding --model=... --data_dir=... --images=2000 \
        --rounds=1    a quick try

The plain loop calls the model with one batch after another in a process, as `tfdml embed` without
`--cluster` does. `embed_parts` runs with 1 and 2 actors, in turns with the loop. Its clock runs
from when each actor has written a file to the last file; the start of Ray and of the actors has a
column of its own. A ratio is the median over rounds. The images are the test images of Cars-196,
repeated, and the embeddings of the last pass must equal those of the loop.
"""

import csv
import os
import pathlib
import statistics
import tempfile
import time

from benchmarks.timing import in_turns
from tools.numbers import Results, command_line


def bare_loop(model, paths, batch_size):
    """Return images a second of the model alone, no seconds of start, and its vectors."""
    import numpy as np

    from tfdml.data import FileImages, ImageDataset
    from tfdml.embeddings.backends import load_backend

    dataset = ImageDataset(
        "images", "test", FileImages(tuple(paths)), np.zeros(len(paths), int), {0: ""}
    )
    vectors, started = [], 0.0
    for batch in load_backend(model).stream(dataset, batch_size):
        started = started or time.perf_counter()
        vectors.append(batch)
    return (
        (len(paths) - len(vectors[0])) / (time.perf_counter() - started),
        0.0,
        np.concatenate(vectors),
    )


def in_bulk(source, out, actors, args):
    """Return images a second once each actor has written a part, the seconds until then, and the
    embeddings."""
    from tfdml.cluster.bulk_embedding import embed_parts
    from tfdml.data import FileImages, ImageDataset
    from tfdml.embeddings import read_embeddings
    from tfdml.embeddings.backends import load_backend
    from tfdml.embeddings.files import EmbeddingFolder
    from tfdml.embeddings.passes import EmbeddingPass, images_of

    begun = time.time()
    images = images_of(source)
    dataset = ImageDataset("input", "all", FileImages(images.names), images.labels)
    work = EmbeddingPass([dataset], images, args.batch_size, args.rows_per_file, skip_bad=True)
    folder = EmbeddingFolder(out, work.identity(load_backend(args.model)))
    work.run(folder, lambda parts: embed_parts(parts, str(args.model), folder, "local", actors), {})
    # Ray reports finished parts late and in bursts; their files have the right time.
    times = sorted(part.stat().st_mtime for part in pathlib.Path(out).glob("part-*.parquet"))
    if len(times) <= actors:
        raise SystemExit(
            "too few images: each actor must write several files (--images, --rows_per_file)"
        )
    rate = (len(times) - actors) * args.rows_per_file / (times[-1] - times[actors - 1])
    return rate, times[actors - 1] - begun, read_embeddings(out).embeddings


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

    dataset = data.load("cars196", args.data_dir, "test")
    rows = np.arange(args.images - args.images % args.rows_per_file) % len(dataset)
    paths = [os.path.abspath(dataset.images.name(row)) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "list.csv")
        with open(source, "w", newline="") as file:
            csv.writer(file).writerows(
                [("path", "label"), *zip(paths, dataset.labels[rows], strict=True)]
            )
        passes = in_turns(
            {
                "bare loop": lambda: bare_loop(args.model, paths, args.batch_size),
                "1 actor": lambda: in_bulk(source, tempfile.mkdtemp(dir=folder), 1, args),
                "2 actors": lambda: in_bulk(source, tempfile.mkdtemp(dir=folder), 2, args),
            },
            args.rounds,
        )
    row = Results(args.json).table(
        "rates",
        f"{len(paths):,} images, {args.rounds} rounds",
        *("images/s", "of the bare loop", "until the first part, s"),
    )
    for name, measured in passes.items():
        rates, starts, _ = zip(*measured, strict=True)
        ratios = [rate / bare[0] for rate, bare in zip(rates, passes["bare loop"], strict=True)]
        rate, ratio, start = (statistics.median(values) for values in (rates, ratios, starts))
        row(name, f"{rate:,.0f}", f"{ratio:.2f}", f"{start:.1f}")
    difference = np.abs(passes["2 actors"][-1][2] - passes["bare loop"][-1][2]).max()
    print(f"the largest difference of a component is {difference:.1e}")


if __name__ == "__main__":
    main()
