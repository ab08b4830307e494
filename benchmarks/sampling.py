"""The time to compose a batch: every sampler at 100, 10,000 and 1,000,000 classes, and a naive pipeline.

    python -m benchmarks.sampling
    python -m benchmarks.sampling --classes 100 1000 --batches 50 --naive 10

Each row runs in a process of its own, on shuffled labels of `--images` images per class on average (so 10,000,000
images of 1,000,000 classes), and of 4 super-classes. Only indices are drawn: nothing is read or decoded.

- construction: from the labels to a sampler;
- first: the first batch, with the plan of a pass where the sampler has one;
- batch: the median of the batches that follow;
- memory: the highest resident memory from before the labels were made until after the last batch, over what the
  process with its libraries had before, so the labels themselves (8 bytes an image) and the super-labels count;
- naive: a `tf.data.Dataset` per class, shuffled and repeated, through `choose_from_datasets`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from tools.numbers import Results, command_line

SAMPLERS = ("shuffle", "class_balanced", "hierarchical", "whole_classes")
SUPER_CLASSES = 4


def resident(field):
    """Return a memory field of this process in MiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def forget_peak():
    """Reset the kernel's peak, since importing TensorFlow has a peak of its own."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def make_sampler(what, labels, classes_per_batch, images_per_class):
    """The sampler, with batches of one size whatever it is."""
    from tfdml.data import sampling

    size = classes_per_batch * images_per_class
    if what == "shuffle":
        return sampling.ShuffleSampler(len(labels), size)
    if what == "whole_classes":
        return sampling.WholeClassSampler(labels, size)
    if what == "class_balanced":
        return sampling.ClassBalancedSampler(labels, classes_per_batch, images_per_class)
    kinds = labels % SUPER_CLASSES
    return sampling.HierarchicalSampler(labels, kinds, classes_per_batch, images_per_class, 2)


def naive_batches(labels, classes_per_batch, images_per_class):
    """An iterator over batches of indices, drawn from a dataset per class."""
    import numpy as np
    import tensorflow as tf

    by_class = np.split(np.argsort(labels, kind="stable"), np.flatnonzero(np.diff(np.sort(labels))) + 1)
    datasets = [tf.data.Dataset.from_tensor_slices(rows).shuffle(len(rows)).repeat() for rows in by_class]
    count = len(datasets)

    def chosen(_):
        classes = tf.random.shuffle(tf.range(count, dtype=tf.int64))[:classes_per_batch]
        return tf.data.Dataset.from_tensor_slices(tf.repeat(classes, images_per_class))

    choices = tf.data.Dataset.range(2**62).flat_map(chosen)
    batches = tf.data.Dataset.choose_from_datasets(datasets, choices).batch(classes_per_batch * images_per_class)
    return iter(batches)


def measure(what, classes, arguments):
    """One row of the table."""
    import numpy as np

    import tfdml.data  # noqa: F401  before memory is measured

    before = resident("VmRSS")
    forget_peak()
    labels = np.random.default_rng(0).integers(0, classes, arguments.images * classes)
    times = [time.perf_counter()]
    if what == "naive":
        iterator = naive_batches(labels, arguments.classes_per_batch, arguments.images_per_class)
        draw = lambda step: next(iterator)  # noqa: E731
    else:
        sampler = make_sampler(what, labels, arguments.classes_per_batch, arguments.images_per_class)
        draw = sampler.batch
    for step in range(arguments.batches + 2):
        times.append(time.perf_counter())
        draw(step)
    times.append(time.perf_counter())
    seconds = np.diff(times)
    return {
        "construction": seconds[0],
        "first": seconds[1],
        "batch": statistics.median(seconds[2:].tolist()),
        "memory": resident("VmHWM") - before,
    }


def in_a_process(what, classes, arguments):
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.sampling", "--only", what, str(classes)]
    for name in ("images", "batches", "classes_per_batch", "images_per_class"):
        command += [f"--{name}", str(getattr(arguments, name))]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main():
    """Print the table, or, as a child, one row as JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--classes", type=int, nargs="+", default=[100, 10_000, 1_000_000])
    parser.add_argument("--naive", type=int, nargs="*", default=[100, 1000], help="classes of the naive way")
    parser.add_argument("--images", type=int, default=10, help="images per class, on average")
    parser.add_argument("--classes_per_batch", type=int, default=20)
    parser.add_argument("--images_per_class", type=int, default=5)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--only", nargs=2, metavar=("WHAT", "CLASSES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        what, classes = arguments.only
        print(json.dumps(measure(what, int(classes), arguments)))
        return
    size = arguments.classes_per_batch * arguments.images_per_class
    print(f"batches of {size} images")
    columns = ("classes", "images", "construction, s", "first batch, ms", "a batch, ms", "of the fewest", "MB")
    add = Results(arguments.json).table("table", "sampler", *columns)
    smallest = {}
    rows = [(what, classes) for what in SAMPLERS for classes in arguments.classes]
    for what, classes in rows + [("naive", classes) for classes in arguments.naive]:
        row = in_a_process(what, classes, arguments)
        ratio = row["batch"] / smallest.setdefault(what, row["batch"])
        times = f"{row['construction']:.3f}", f"{1e3 * row['first']:.2f}", f"{1e3 * row['batch']:.3f}"
        add(what, f"{classes:,}", f"{classes * arguments.images:,}", *times, f"{ratio:.2f}", f"{row['memory']:.0f}")


if __name__ == "__main__":
    main()
