"""Whether one run is better than another: the metrics of each query in a file, and runs compared query by query."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.embeddings.files import ImageTable
from tfdml.errors import REASON, UserError, user_errors
from tfdml.evaluation.intervals import Interval, paired_differences, seed_difference
from tfdml.evaluation.relevance import dataset_roles
from tfdml.io.files import atomic_write

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset

QUERIES_FILE = "queries.npz"


@dataclasses.dataclass(frozen=True)
class QueryValues:
    """Retrieval metrics of every query of a test set.

    Args:
        ids: (N,) uint64, which image each query is: the first eight bytes of the SHA-256 of its name.
        labels: (N,) int64 class ids of the queries.
        images: Checksums of the names, labels, roles and groups of all test images, so also of what is searched, and of
            the images themselves, unless they are stored vectors.
        values: Metric name to (N,) values; NaN where a query has nothing to find.

    Raises:
        UserError: They differ in number.

    Example:
        >>> ids, labels = np.array([7, 9], np.uint64), np.array([0, 0])
        >>> one = QueryValues(ids, labels, "sha256:a", {"recall@1": np.array([1.0, 0.0])})
        >>> one.difference_to(dataclasses.replace(one, ids=ids[::-1]))
        'other queries, or in another order'
    """

    ids: np.ndarray
    labels: np.ndarray
    images: str
    values: Mapping[str, np.ndarray]

    def __post_init__(self):
        for name, column in {"labels": self.labels, **self.values}.items():
            if np.shape(column) != np.shape(self.ids) or np.ndim(column) != 1:
                raise UserError(f"{name} of shape {np.shape(column)} for ids of shape {np.shape(self.ids)}")

    @classmethod
    def of(cls, dataset: ImageDataset, values: Mapping[str, Any], directory: str | os.PathLike = "") -> QueryValues:
        """Those of a data set.

        Args:
            dataset: The images; with roles its queries alone have values.
            values: As `retrieval_per_query` returns them.
            directory: Where the data set lies: names count from there.
        """
        from tfdml.data.images import VectorImages, images_checksum  # needs TensorFlow, which measuring alone does not

        table = ImageTable.of([dataset], directory)
        queries, _ = dataset_roles(dataset)
        names = (table.names[i].encode("utf-8", "surrogateescape") for i in queries)
        ids = np.array([int.from_bytes(hashlib.sha256(name).digest()[:8], "little") for name in names], np.uint64)
        checksum = table.checksum()
        if not isinstance(dataset.images, VectorImages):
            checksum += f" {images_checksum(dataset.images)}"
        return cls(ids, dataset.labels[queries], checksum, {name: np.asarray(v) for name, v in values.items()})

    @classmethod
    def read(cls, path: str | os.PathLike) -> QueryValues:
        """Those that `write` has written.

        Raises:
            UserError: The file cannot be read, or is of something else.
        """
        with user_errors(Exception, f"{path} cannot be read: {REASON}"):  # whatever NumPy raises on a damaged file
            with np.load(path, allow_pickle=False) as file:
                columns = {name: file[name] for name in file.files}
            ids, labels, images = (columns.pop(name) for name in ("ids", "labels", "images"))
            return cls(ids, labels, str(images), {name: column.astype(np.float64) for name, column in columns.items()})

    def write(self, path: Path) -> None:
        """Write them as a compressed .npz, values in single precision.

        Args:
            path: The file.
        """
        columns: dict[str, Any] = {name: values.astype(np.float32) for name, values in self.values.items()}
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, ids=self.ids, labels=self.labels, images=self.images, **columns)

    def difference_to(self, other: QueryValues) -> str:
        """Why the values of another run are not of the same queries, in words; empty where they are.

        Args:
            other: Those of the other run.
        """
        comparisons = {
            "other queries, or in another order": np.array_equal(self.ids, other.ids),
            "the same queries with other classes": np.array_equal(self.labels, other.labels),
            "queries of the same names, of other images or searched among others": self.images == other.images,
        }
        return next((difference for difference, same in comparisons.items() if not same), "")


@dataclasses.dataclass(frozen=True)
class Differences:
    """How much better one model is than another, by metric; positive where it is.

    Args:
        classes: With intervals over classes, see `paired_differences`.
        seeds: With intervals over seeds, see `seed_difference`; empty where a side has one run alone.
    """

    classes: Mapping[str, Interval]
    seeds: Mapping[str, Interval]


def compare_queries(first: Sequence[QueryValues], second: Sequence[QueryValues], *, seeds: bool = True) -> Differences:
    """Compare two models on the same queries.

    Args:
        first: Of each run of the first model, one for each seed.
        second: Of each run of the second.
        seeds: Whether the runs differ by their seeds, so that intervals over seeds mean something.

    Raises:
        UserError: A side has no run, the queries are not the same, or no metric is common to all runs.

    Example:
        >>> ids, labels = np.arange(4, dtype=np.uint64), np.array([0, 0, 1, 1])
        >>> sides = [[QueryValues(ids, labels, "", {"recall@1": np.full(4, value)})] for value in (1.0, 0.5)]
        >>> compare_queries(*sides).classes["recall@1"].mean
        0.5
    """
    runs = [*first, *second]
    if difference := next(filter(None, (runs[0].difference_to(other) for other in runs[1:])), ""):
        raise UserError(f"their queries are not the same: {difference}")
    sides = [[run.values for run in side] for side in (first, second)]
    classes = paired_differences(sides[0], sides[1], runs[0].labels)
    over_seeds = {}
    if seeds and min(map(len, sides)) > 1:
        for name in classes:
            ours, theirs = ([float(np.nanmean(values[name])) for values in side] for side in sides)
            over_seeds[name] = seed_difference(ours, theirs)
    return Differences(classes, over_seeds)
