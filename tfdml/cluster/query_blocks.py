"""The retrieval metrics of every query, over the processes of Ray: blocks of queries each, the same numbers as one."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdml.cluster.ray_session import as_user_error, ray_session
from tfdml.evaluation.per_query import RetrievalTask, check_depth, search_depth, values_per_query
from tfdml.retrieval.exact import Progress, is_memory_mapped

# A block costs a pass over the gallery to prepare it: of fewer queries it would mostly do that.
_LEAST_QUERIES = 4096
_BLOCKS_PER_WORKER = 4

ValuesPerQuery = Callable[[RetrievalTask, Sequence[str], str, int, Progress | None], dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A part of a file that each process maps for itself; the file must be at the same place on each machine."""

    path: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    def open(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)


def values_over_ray(cluster: str = "local", workers: int = 0) -> ValuesPerQuery:
    """Return what computes the metrics of every query over several processes, for `evaluate_retrieval`'s `per_query`.

    Each block of queries is compared with the whole gallery, by the same functions as in one process. Embeddings of
    an .npy file are memory-mapped by each worker; others are put into Ray's shared memory once for each machine.

    Args:
        cluster: See `ray_session`.
        workers: How many processes; 0: one for each CPU of the cluster.

    Raises:
        UserError: On the call: Ray is missing or cannot be reached; as `evaluate_retrieval`.

    Example:
        >>> evaluate_retrieval(embeddings, labels, per_query=values_over_ray("local", 2))["recall@1"]
        0.555
    """

    def values(
        task: RetrievalTask, names: Sequence[str], distance: str, memory_budget: int, progress: Progress | None = None
    ) -> dict[str, np.ndarray]:
        check_depth(task, names)
        size = task.queries.nbytes + (0 if task.gallery is None else task.gallery.nbytes)
        with ray_session(cluster, cpus=workers or None, object_store_bytes=2 * size + 2**27) as ray:
            cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
            count = min(workers or cpus, cpus)
            shared = {name: _shared(ray, getattr(task, name)) for name in _SHARED}
            run = ray.remote(num_cpus=cpus // count)(_values_of_block)
            blocks = _blocks(len(task.labels), count)
            arguments = (list(names), distance, memory_budget, search_depth(task, names))
            waiting = {run.remote(shared, block, *arguments): block for block in blocks}
            return _gathered(ray, waiting, task, names, progress)

    return values


_SHARED = ("queries", "labels", "gallery", "targets", "own_rows", "matches")


def _gathered(
    ray: Any, waiting: dict[Any, slice], task: RetrievalTask, names: Sequence[str], progress: Progress | None
) -> dict[str, np.ndarray]:
    values = {name: np.full(len(task.labels), np.nan) for name in names}
    done = 0
    while waiting:
        (ready,), _ = ray.wait(list(waiting), num_returns=1)
        try:
            found = ray.get(ready)
        except Exception as error:
            raise (as_user_error(error) or error) from None
        block = waiting.pop(ready)
        for name in names:
            values[name][block] = found[name]
        done += block.stop - block.start
        if progress is not None:
            progress("neighbours", done, len(task.labels))
    return values


def _blocks(count: int, workers: int) -> list[slice]:
    """Blocks of queries, a few for each worker where there are many.

    Example:
        >>> _blocks(10, 4)
        [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    per_worker = math.ceil(count / workers)
    size = max(1, min(per_worker, max(_LEAST_QUERIES, math.ceil(per_worker / _BLOCKS_PER_WORKER))))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _shared(ray: Any, array: np.ndarray | None) -> Any:
    """How workers come by an array: the part of a file, or a reference into Ray's memory."""
    if array is None or not is_memory_mapped(array) or not array.flags["C_CONTIGUOUS"]:
        return ray.put(array)
    root: Any = array
    while not (isinstance(root, np.memmap) and not isinstance(root.base, np.ndarray)):
        root = root.base
    if not root.filename or not os.path.exists(root.filename):
        # Embeddings of large Parquet files are mapped from a file without a name.
        return ray.put(np.asarray(array))
    offset = root.offset + array.ctypes.data - root.ctypes.data
    return ray.put(_Mapped(str(root.filename), offset, array.shape, array.dtype.str))


def _values_of_block(
    shared: dict[str, Any], block: slice, names: list[str], distance: str, memory_budget: int, depth: int
) -> dict[str, np.ndarray]:
    """Return what a worker computes: the values of a block of queries."""
    import ray

    held = {name: ray.get(reference) for name, reference in shared.items()}
    held = {name: array.open() if isinstance(array, _Mapped) else array for name, array in held.items()}
    part = part_of_task(RetrievalTask(**held), block)
    return values_per_query(part, names, distance, memory_budget, depth=depth)


def part_of_task(task: RetrievalTask, block: slice) -> RetrievalTask:
    """Return the task of a block of queries alone, searched in the same gallery.

    Example:
        >>> from tfdml.evaluation.per_query import retrieval_task
        >>> task = retrieval_task(np.eye(4), [0, 0, 1, 1])
        >>> part_of_task(task, slice(2, 4)).own_rows
        array([2, 3])
    """
    own = np.arange(len(task.labels)) if task.gallery is None else task.own_rows
    return dataclasses.replace(
        task,
        queries=task.queries[block],
        labels=task.labels[block],
        gallery=task.queries if task.gallery is None else task.gallery,
        own_rows=None if own is None else own[block],
        matches=task.matches[block],
    )
