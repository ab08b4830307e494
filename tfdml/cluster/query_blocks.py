"""The retrieval metrics of every query, over the processes of Ray: blocks of queries each, the same numbers as one."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from tfdml.cluster.ray_session import as_user_error, first_ready, ray_session
from tfdml.evaluation.per_query import RetrievalTask, check_depth, search_depth, values_per_query
from tfdml.memory import require_memory
from tfdml.retrieval.exact import row_blocks

# A block costs a pass over the gallery to prepare it: of fewer queries it would mostly do that.
_LEAST_QUERIES = 4096
_BLOCKS_PER_WORKER = 4


def values_over_ray(cluster: str = "local", workers: int = 0) -> Callable[..., dict[str, np.ndarray]]:
    """Return what computes the metrics of every query over several processes, for `evaluate_retrieval`'s `per_query`.

    Each block of queries is compared with the whole gallery, by the same functions as in one process. The embeddings
    are put into Ray's shared memory once for each machine.

    Args:
        cluster: See `ray_session`.
        workers: How many processes; 0: one for each CPU of the cluster.

    Raises:
        UserError: On the call: Ray is missing or cannot be reached; as `evaluate_retrieval`.

    Example:
        >>> evaluate_retrieval(embeddings, labels, per_query=values_over_ray("local", 2))["recall@1"]
        0.555
    """

    def values(task: RetrievalTask, names: Sequence[str], distance: str, memory_budget: int) -> dict[str, np.ndarray]:
        check_depth(task, names)
        depth, queries = search_depth(task, names), len(task.queries)
        # Ray shares plain arrays between processes, and maps of files it does not.
        gallery = None if task.gallery is None else np.asarray(task.gallery)
        plain = dataclasses.replace(task, queries=np.asarray(task.queries), gallery=gallery)
        size = task.queries.nbytes + (0 if gallery is None else gallery.nbytes)
        require_memory(size, f"a copy of {queries:,} queries and their gallery for Ray", "leave out `cluster`")
        result: dict[str, np.ndarray] = {}
        with ray_session(cluster, cpus=workers or None, object_store_bytes=2 * size + 2**27) as ray:
            cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
            count = min(workers or cpus, cpus)
            shared = ray.put(plain)
            run = ray.remote(num_cpus=cpus // count)(_values_of_block)
            waiting = {
                run.remote(shared, block, list(names), distance, memory_budget, depth): block
                for block in _blocks(queries, count)
            }
            while waiting:
                ready = first_ready(ray, waiting, cpus // count)
                try:
                    found = ray.get(ready)
                except Exception as error:
                    raise (as_user_error(error) or error) from None
                block = waiting.pop(ready)
                for name, column in found.items():
                    result.setdefault(name, np.full(queries, np.nan))[block] = column
        return result

    return values


def _blocks(count: int, workers: int) -> list[slice]:
    """Blocks of queries, a few for each worker where there are many.

    Example:
        >>> _blocks(10, 4)
        [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    per_worker = math.ceil(count / workers)
    size = min(per_worker, max(_LEAST_QUERIES, math.ceil(per_worker / _BLOCKS_PER_WORKER)))
    return row_blocks(count, size)


def _values_of_block(
    task: RetrievalTask, block: slice, names: Sequence[str], distance: str, memory_budget: int, depth: int
) -> dict[str, np.ndarray]:
    """Return what a worker computes: the values of a block of queries."""
    return values_per_query(task.part(block), names, distance, memory_budget, depth=depth)
