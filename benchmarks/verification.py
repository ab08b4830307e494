"""Time verification over all pairs, and count how often calibrated thresholds keep to their intervals.

    python -m benchmarks.verification
    python -m benchmarks.verification --embeddings "Cars-196, classes 99 to 196=cars.npz" Omniglot=omniglot.npz
    python -m benchmarks.verification --embeddings Omniglot=omniglot.npz --fpir=0.01

Without `--embeddings`: seconds and memory of 60,000 made embeddings of 128 dimensions. With .npz files (`embeddings`,
`labels`), each after a name: the threshold comes from one random half of the classes, the rates from the other. With
`--fpir` that half is a gallery, and the other half's queries are of unknown classes.
"""

import resource
import time

import numpy as np

from tfdml.evaluation import calibrate, identification_rates, verification
from tfdml.evaluation.verification import accepted_rates
from tools.numbers import Results, command_line


def time_all_pairs(images, dim, results):
    """Print how long all pairs take, and how much memory."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(images // 5), 5)
    centers = rng.normal(size=(images // 5, dim))
    embeddings = (centers[labels] + rng.normal(size=(len(labels), dim))).astype("float32")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    result = verification(embeddings, labels)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    pairs = result.num_same + result.num_different
    row = results.table("pairs", "pairs", "seconds", "MiB more than before")
    row(f"{pairs:,}", f"{time.perf_counter() - start:.0f}", f"{memory:,.0f}")


def covered_splits(embeddings, labels, splits, far):
    """Return the classes of a half, and in how many random halves of the classes the rates lie in their intervals."""
    rng, classes = np.random.default_rng(1), np.unique(labels)
    covered = dict.fromkeys(("far", "tar", "precision"), 0)
    for _ in range(splits):
        half = np.isin(labels, rng.permutation(classes)[: len(classes) // 2])
        calibration = calibrate(embeddings[half], labels[half], far=far)
        accepted = accepted_rates(embeddings[~half], labels[~half], calibration.threshold)
        for name in covered:
            interval = getattr(calibration, name)
            covered[name] += interval.low <= getattr(accepted, name).mean <= interval.high
    return len(classes) // 2, *(f"{count} of {splits}" for count in covered.values())


def covered_searches(embeddings, labels, splits, fpir):
    """Return the classes of a half, how many halves have FPIR and TPIR in their intervals, and the means of both."""
    rng, classes = np.random.default_rng(1), np.unique(labels)
    covered, rates = {"fpir": 0, "tpir": 0}, []
    for _ in range(splits):
        half = np.isin(labels, rng.permutation(classes)[: len(classes) // 2])
        calibration = calibrate(embeddings[half], labels[half], fpir=fpir)
        others, threshold = (embeddings[~half], labels[~half]), calibration.threshold
        sides = {"gallery": embeddings[half], "gallery_labels": labels[half]}
        found = {
            "fpir": identification_rates(*others, threshold, **sides)["fpir"].mean,
            "tpir": identification_rates(*others, threshold)["tpir"].mean,
        }
        rates.append(list(found.values()))
        for name, rate in found.items():
            covered[name] += calibration.rates[name].low <= rate <= calibration.rates[name].high
    means = (f"{100 * mean:.2f} %" for mean in np.mean(rates, axis=0))
    return len(classes) // 2, *(f"{count} of {splits}" for count in covered.values()), *means


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--embeddings", nargs="*", default=[], metavar="NAME=FILE", help="with embeddings and labels")
    parser.add_argument("--splits", type=int, default=100)
    parser.add_argument("--far", type=float, default=1e-3)
    parser.add_argument("--fpir", type=float, default=0.0, help="of searches, in place of --far")
    options = parser.parse_args()
    if options.embeddings:
        rates = ("FPIR", "TPIR") if options.fpir else ("FAR", "TAR", "precision")
        means = ("FPIR, mean", "answered right, mean") if options.fpir else ()
        columns = "data", "classes in each half", *(f"{name} in its interval" for name in rates), *means
        row = Results(options.json).table("searches" if options.fpir else "table", *columns)
        measure, rate = (covered_searches, options.fpir) if options.fpir else (covered_splits, options.far)
        for name, _, path in (text.rpartition("=") for text in options.embeddings):
            with np.load(path) as file:
                row(name, *measure(file["embeddings"], file["labels"], options.splits, rate))
    else:
        time_all_pairs(options.images, options.dim, Results(options.json))
