r"""Measure what queries of a new model find in an old gallery by maps without training.

    python -m benchmarks.upgrade --features=features --data=DATA --old_weights=MNV2_035.weights.h5 \
        --new_weights=MNV2_100.weights.h5
    python -m benchmarks.upgrade --features=features --json=docs/numbers/upgrade.json

The first command stores pooled features. The old model is those of MobileNetV2 0.35 at 112 px, the
new one those of 1.0 at 192 px, both whitened to 128 dimensions on the training classes. Maps are
fitted on training classes too, and unseen classes are measured. The second command is NumPy alone.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np

from tfdml.evaluation import calibrate, paired_differences, retrieval_per_query
from tfdml.evaluation.identification import Searches
from tfdml.retrieval.exact import unit_rows
from tools.numbers import Results, command_line

# Of a data set one of how many classes is taken.
SETS = {"cars196": 1, "omniglot": 3}
# Of each model: the network, and the size of its images after and before the crop.
NETWORKS = {"old": ("mobilenetv2(alpha=0.35)", 112, 128), "new": ("mobilenetv2", 192, 192)}
DIM, POWER, SHRINKAGE = 128, 0.5, 0.1
FPIR = 0.05
RIDGE = 0.1
COLUMNS = ("queries", "new-old", "less old-old", "less plain", "new-new", "TPIR", "FPIR of old-old")


def store_features(flags: Any, name: str) -> None:
    """Write the pooled features of a data set by both networks, unless they are there."""
    import tfdml
    from benchmarks.study import part_of_set, store

    splits = functools.partial(part_of_set, name, flags.data / name, every=SETS[name])
    weights = {"old": flags.old_weights, "new": flags.new_weights}
    for model, (network, size, resize) in NETWORKS.items():
        backbone = tfdml.backbones.resolve(network, size, weights[model])
        embedder = tfdml.models.Embedder(backbone, 0, image_size=size, resize=resize)
        view = tfdml.data.EvaluationTransform.of(embedder)
        pooled = functools.partial(pooled_features, embedder)
        store(flags.features / f"{name}_{model}.npz", splits, view, pooled)


def pooled_features(embedder: Any, pixels: Any) -> np.ndarray:
    """Return the pooled features of images."""
    return np.asarray(embedder.represent(pixels, training=False)["pooled"])


def whitened(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return features in their first principal components on the training images, scaled by their
    deviations to a power, and to length 1."""
    mean = train.mean(axis=0, dtype=np.float64)
    variances, axes = np.linalg.eigh(np.cov(train.T - mean[:, None]))
    largest = np.argsort(-variances)[:DIM]
    shrunk = (1 - SHRINKAGE) * variances[largest] + SHRINKAGE * variances.mean()
    components = axes[:, largest] * shrunk ** (-POWER / 2)
    first, second = (unit_rows((side - mean) @ components) for side in (train, test))
    return first.astype(np.float32), second.astype(np.float32)


def rotated(source: np.ndarray, targets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return vectors by the rotation that turns sources nearest to targets."""
    left, _, right = np.linalg.svd(source.T.astype(np.float64) @ targets)
    return (vectors @ (left @ right)).astype(np.float32)


def mapped(source: np.ndarray, targets: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return vectors of length 1 by the linear map of least squares, with a ridge in units of the
    mean variance."""
    mean = source.mean(axis=0, dtype=np.float64)
    offset = targets.mean(axis=0, dtype=np.float64)
    products = (source - mean).T @ (source - mean)
    products += RIDGE * np.trace(products) / len(products) * np.eye(len(products))
    kernel = np.linalg.solve(products, (source - mean).T @ (targets - offset))
    return unit_rows((vectors - mean) @ kernel + offset).astype(np.float32)


def read(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the features of training images and of unseen classes, and their classes."""
    with np.load(path) as stored:
        sides = [stored[name].reshape(len(stored[name]), -1) for name in ("train", "test")]
        return sides[0], sides[1], stored["test_labels"]


def measure(folder: pathlib.Path, name: str, add: Any) -> None:
    """Write a row of each search of a data set."""
    *features, labels = read(folder / f"{name}_old.npz")
    targets, old = whitened(*features)
    train, test, _ = read(folder / f"{name}_new.npz")
    source, plain = whitened(train, test)
    queries = {"old": old, "new, plain": plain}
    queries["new, rotated"] = rotated(source, targets, plain)
    queries["new, least squares"] = mapped(source, targets, plain)
    queries["new, least squares of pooled features"] = mapped(train, targets, test)
    sides = {"gallery": old, "gallery_labels": labels, "own_rows": np.arange(len(labels))}
    threshold = calibrate(old, labels, **sides, fpir=FPIR).threshold
    finds = {}
    for row, vectors in queries.items():
        finds[row] = retrieval_per_query(vectors, labels, **sides, metrics=["recall@1"])
        itself = retrieval_per_query(vectors, labels, metrics=["recall@1"])["recall@1"]
        cells = [f"{100 * finds[row]['recall@1'].mean():.1f}"]
        for other in ("old", "new, plain"):
            differs = row != other and other in finds
            cells.append(difference(finds[row], finds[other], labels) if differs else "")
        rates = calibrate(vectors, labels, **sides, fpir=FPIR).rates["tpir"]
        there = Searches(vectors, labels, **sides).rates(threshold, 0.95, True)["fpir"]
        cells += [f"{100 * value:.1f}" for value in (itself.mean(), rates.mean, there.mean)]
        add(f"{name}, {row}", *cells)


def difference(first: Any, second: Any, labels: np.ndarray) -> str:
    """Return how much better the first is, in points, with an interval over classes."""
    interval = paired_differences(first, second, labels)["recall@1"]
    ends = f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"
    return f"{100 * interval.mean:+.1f} ({ends})"


def main() -> None:
    """Store features, or print the table and write it to `--json`."""
    parser = command_line(__doc__)
    parser.add_argument("--features", type=pathlib.Path, required=True, help="their folder")
    parser.add_argument("--data", type=pathlib.Path, help="the folder of the data sets")
    parser.add_argument("--old_weights", default="", help="of MobileNetV2 0.35")
    parser.add_argument("--new_weights", default="", help="of MobileNetV2 1.0")
    flags = parser.parse_args()
    if flags.data:
        for name in SETS:
            store_features(flags, name)
        return
    add = Results(flags.json).table("table", *COLUMNS)
    for name in SETS:
        measure(flags.features, name, add)


if __name__ == "__main__":
    main()
