"""What a run found for each query, kept beside its result so that runs can be compared query by query."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdml.embeddings.reader import ImageTable
from tfdml.errors import UserError, short_message
from tfdml.evaluation.retrieval import dataset_roles
from tfdml.special_files import require_regular
from tfdml.storage import atomic_write

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset

FILE_NAME = "queries.npz"


@dataclasses.dataclass(frozen=True)
class QueryValues:
    """Retrieval metrics of every query of a test set.

    Args:
        ids: (N,) uint64, which image each query is: the first eight bytes of the SHA-256 of its name.
        labels: (N,) int64 class ids of the queries.
        images: Checksum of the names, labels and roles of all test images, so also of what is searched.
        values: Metric name to (N,) values; NaN where a query has nothing to find.

    Raises:
        UserError: They differ in number.

    Example:
        >>> ids, labels = np.array([7, 9], np.uint64), np.array([0, 0])
        >>> one = QueryValues(ids, labels, "sha256:a", {"recall@1": np.array([1.0, 0.0])})
        >>> one.difference_to(dataclasses.replace(one, ids=ids[::-1]))
        'the same queries in another order'
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
        table = ImageTable.of([dataset], directory)
        queries, _ = dataset_roles(dataset)
        names = (table.names[i].encode("utf-8", "surrogateescape") for i in queries)
        ids = np.array([int.from_bytes(hashlib.sha256(name).digest()[:8], "little") for name in names], np.uint64)
        return cls(ids, dataset.labels[queries], table.checksum(), {name: np.asarray(v) for name, v in values.items()})

    @classmethod
    def read(cls, path: str | os.PathLike) -> QueryValues:
        """Those that `write` has written.

        Raises:
            UserError: The file cannot be read, or is of something else.
        """
        try:
            require_regular(path)
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in ("ids", "labels", "images", "metrics", "values")}
        except Exception as error:  # whatever NumPy raises on a damaged file
            raise UserError(f"{path} cannot be read: {short_message(error)}") from error
        metrics, values = arrays["metrics"], arrays["values"]
        kinds = {name: array.dtype.kind for name, array in arrays.items()}
        if kinds != {"ids": "u", "labels": "i", "images": "U", "metrics": "U", "values": "f"} or values.ndim != 2:
            raise UserError(f"{path} is damaged or of something else")
        if metrics.shape != values.shape[:1]:
            raise UserError(f"{path} is damaged: {metrics.shape} metrics for values of shape {values.shape}")
        columns = dict(zip(metrics.tolist(), values.astype(np.float64), strict=True))
        return cls(arrays["ids"], arrays["labels"], str(arrays["images"]), columns)

    def write(self, path: Path) -> None:
        """Write them as a compressed .npz, values in single precision.

        Args:
            path: The file.
        """
        arrays: dict[str, Any] = {
            "ids": self.ids,
            "labels": self.labels,
            "images": np.array(self.images),
            "metrics": np.array(list(self.values)),
            "values": np.stack(list(self.values.values())).astype(np.float32),
        }
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            np.savez_compressed(file, **arrays)

    def difference_to(self, other: QueryValues) -> str:
        """Why the values of another run are not of the same queries, in words; empty where they are.

        Args:
            other: Those of the other run.
        """
        if len(self.ids) != len(other.ids):
            return f"{len(self.ids):,} queries and {len(other.ids):,}"
        if not np.array_equal(self.ids, other.ids):
            shared = len(np.intersect1d(self.ids, other.ids))
            if shared == len(np.unique(self.ids)):
                return "the same queries in another order"
            return f"of {len(self.ids):,} queries {shared:,} are the same images"
        if not np.array_equal(self.labels, other.labels):
            return "the same queries with other classes"
        if self.images != other.images:
            return "the same queries, searched among other images"
        return ""
