"""Group images of classes that nobody has counted, next to plain clusterings.

  python -m benchmarks.groups --data "Cars-196, a head=cars_head.npz" Omniglot=omniglot.npz
  python -m benchmarks.groups --time 20000 100000

Each file has `embeddings`, `labels` and `held_out`: true for the classes that choose the cut, the
others are grouped. Neither were trained on. `--time` measures made vectors of 128 dimensions, 20
images a class. NumPy, SciPy and scikit-learn alone.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Iterator

import numpy as np

from tfdml.errors import UserError
from tfdml.evaluation import average_linkage, calibrate, evaluate_groups, group, kmeans
from tfdml.evaluation.clustering import PairRates, cut_linkage
from tfdml.retrieval.exact import unit_rows
from tools.numbers import Results, command_line

COLUMNS = ("images to group", "method", "ARI", "pair precision", "pair recall", "groups", "alone")


@dataclasses.dataclass(frozen=True)
class Side:
    """Images of one side: unit vectors and classes."""

    vectors: np.ndarray
    labels: np.ndarray

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(np.unique(self.labels))

    def part(self, rows: np.ndarray) -> Side:
        """Return some of the images."""
        return Side(self.vectors[rows], self.labels[rows])


def read(path: str) -> tuple[Side, Side]:
    """Return held-out images and images to group."""
    with np.load(path) as stored:
        side = Side(np.asarray(unit_rows(stored["embeddings"]), np.float32), stored["labels"])
        held_out = stored["held_out"]
    return side.part(held_out), side.part(~held_out)


def cases(side: Side) -> Iterator[tuple[str, Side]]:
    """Yield all images to group, those of a few classes, and a long tail of them."""
    yield f"{side.classes} classes", side
    rng = np.random.default_rng(3)
    classes = rng.permutation(np.unique(side.labels))
    few = max(8, len(classes) // 10)
    yield f"{few} classes", side.part(np.isin(side.labels, classes[:few]))
    rows = [rng.permutation(np.flatnonzero(side.labels == label)) for label in classes]
    kept = [part[: max(2, len(part) // (1 + place // 8))] for place, part in enumerate(rows)]
    yield f"{side.classes} classes, long tail", side.part(np.concatenate(kept))


def density_groups(vectors: np.ndarray, smallest: int) -> np.ndarray:
    """Return the groups of HDBSCAN; each image that it calls noise is alone."""
    from sklearn.cluster import HDBSCAN

    found = HDBSCAN(min_cluster_size=smallest, copy=True).fit_predict(vectors)
    alone = found < 0
    found[alone] = found.max() + 1 + np.arange(alone.sum())
    return found


def component_groups(vectors: np.ndarray, distance: float) -> np.ndarray:
    """Return the connected components of pairs within a cosine distance."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    near = csr_array(1 - vectors @ vectors.T <= distance)
    return connected_components(near, directed=False)[1]


def pair_threshold(held_out: Side, prior: float) -> float:
    """Return the cosine distance of pairs with a precision of 95 %, or the nearest that there
    is."""
    for precision in (0.95, 0.9, 0.8, 0.5):
        try:
            target = {"precision": precision, "prior": prior, "distance": "cosine"}
            return calibrate(held_out.vectors, held_out.labels, **target).threshold
        except UserError:
            continue
    return 0.0


def best_of(held_out: Side, grouped, values) -> float:
    """Return the setting of a baseline that is best on held-out classes."""
    aris = []
    for value in values:
        numbers = grouped(held_out.vectors, value)
        aris.append(evaluate_groups(held_out.labels, numbers)["ari"].mean)
    return values[int(np.argmax(aris))]


def methods(held_out: Side, images: Side) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the groups of each method."""
    side = (images.vectors, held_out.vectors, held_out.labels)
    estimated = group(*side, min_ari=-1)
    yield "`group`", estimated.numbers
    told = group(*side, expected_classes=images.classes, min_ari=-1)
    yield "`group`, told the number", told.numbers
    linkage = average_linkage(images.vectors)
    rates = PairRates.of(average_linkage(held_out.vectors), held_out.labels)
    own = PairRates.of(linkage, images.labels)
    cut = rates.distances[rates.best(prior(held_out.labels))]
    yield "the same cut without the prior", cut_linkage(linkage, cut)
    cut = own.distances[own.best(prior(images.labels))]
    yield "average linkage, best cut in hindsight", cut_linkage(linkage, cut)
    yield "k-means, told the number", kmeans(images.vectors, images.classes, distance="cosine")
    yield "HDBSCAN, 5 images", density_groups(images.vectors, 5)
    smallest = best_of(held_out, density_groups, (2, 5, 10))
    yield "HDBSCAN, tuned on held-out classes", density_groups(images.vectors, smallest)
    threshold = pair_threshold(held_out, estimated.prior)
    yield "pairs of 95 % precision, average linkage", cut_linkage(linkage, threshold)
    yield "pairs of 95 % precision, components", component_groups(images.vectors, threshold)


def prior(labels: np.ndarray) -> float:
    """Return the share of pairs of one class."""
    sizes = np.unique(labels, return_counts=True)[1].astype(float)
    return float((sizes * (sizes - 1)).sum() / (len(labels) * (len(labels) - 1)))


def cells_of(labels: np.ndarray, numbers: np.ndarray) -> list:
    """Return the measures of groups, with intervals over classes."""
    cells = []
    for rate in evaluate_groups(labels, numbers).values():
        cells.append(f"{100 * rate.mean:.1f} [{100 * rate.low:.1f}, {100 * rate.high:.1f}]")
    sizes = np.unique(numbers, return_counts=True)[1]
    return [*cells, int(np.sum(sizes > 1)), int(np.sum(sizes == 1))]


def measure_time(results: Results, counts: list[int]) -> None:
    """Measure the clustering of made vectors."""
    add = results.table("time", "images", "seconds", "largest memory, MB")
    for count in counts:
        rng = np.random.default_rng(0)
        centers = rng.normal(size=(count // 20, 128)).astype(np.float32)
        noise = rng.normal(size=(count, 128)).astype(np.float32)
        vectors = centers[np.arange(count) % len(centers)] + np.float32(0.7) * noise
        start = time.perf_counter()
        average_linkage(vectors)
        seconds = time.perf_counter() - start
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        add(f"{count:,}", f"{seconds:.0f}", f"{megabytes:,}")


def main() -> None:
    """Print the tables, and write them to `--json`."""
    parser = command_line(__doc__)
    parser.add_argument("--data", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument("--time", nargs="+", type=int, default=[], metavar="IMAGES")
    flags = parser.parse_args()
    results = Results(flags.json)
    measure_time(results, flags.time)
    expectations = results.table("held out", "data", "held-out classes", "ARI to expect")
    add = results.table("table", *COLUMNS)
    for text in flags.data:
        name, _, path = text.rpartition("=")
        held_out, images = read(path)
        for case, part in cases(images):
            try:
                groups = group(part.vectors, held_out.vectors, held_out.labels, min_ari=-1)
            except UserError as error:
                expectations(f"{name}, {case}", held_out.classes, f"refused: {error}")
                continue
            ari = f"{100 * groups.expected['ari']:.1f}"
            expectations(f"{name}, {case}", held_out.classes, ari)
            for method, numbers in methods(held_out, part):
                add(f"{name}, {case}", method, *cells_of(part.labels, numbers))


if __name__ == "__main__":
    main()
