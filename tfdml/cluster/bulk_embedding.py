"""Embeds parts of many images over the actors of Ray."""

import contextlib
import functools
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdml.cluster.ray_session import as_user_error, ray_session
from tfdml.embeddings.backends import load_backend
from tfdml.embeddings.files import EmbeddingFolder, PartRecord
from tfdml.embeddings.passes import Part
from tfdml.errors import UserError, short_message
from tfdml.io.files import LOCK, in_store, is_file, is_remote
from tfdml.registry import import_modules

# How often a part is begun again whose process is lost on the way, as to an image that takes all
# memory.
_MOST_RETRIES = 3
# What Ray passes between processes here are lists of paths.
_OBJECT_STORE = 2**27
_CPUS_PER_ACTOR = 4


class PartEmbedder:
    """Embeds parts; an actor of Ray, which holds the model. The vectors go from here to their file,
    past Ray.

    Args:
        model: As `load_backend`; a path from the root.
        truncate_dim: As `load_backend`.
        folder: Where to.
        threads: CPUs that it may keep busy; 0: all.
    """

    def __init__(self, model: str, truncate_dim: int, folder: EmbeddingFolder, threads: int = 0):
        self.model = model
        self.truncate_dim = truncate_dim
        self.folder = folder
        self.threads = threads

    @functools.cached_property
    def backend(self) -> Any:
        """The model, loaded with the first part: what is wrong with it then comes as it is."""
        # TensorFlow may have run already, as in a process that is not Ray's.
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(self.threads)
            tf.config.threading.set_inter_op_parallelism_threads(self.threads)
        import_modules()
        return load_backend(self.model, threads=self.threads, truncate_dim=self.truncate_dim)

    def embed(self, part: Part) -> PartRecord:
        """Embed one part.

        Raises:
            UserError: This machine does not see the folder; as `Part.embed`.
        """
        path = self.folder.folder
        if not (is_remote(path) or is_file(self.folder.path(LOCK))):
            advice = "name a folder that every machine of the cluster has mounted at the same place"
            raise UserError(f"a worker on {platform.node()} does not see it; {advice}", folder=path)
        return part.embed(self.backend, self.folder)


def embed_parts(
    parts: Sequence[Part],
    model: str,
    folder: EmbeddingFolder,
    cluster: str,
    actors: int = 0,
    truncate_dim: int = 0,
) -> Iterator[PartRecord]:
    """Embed parts over many processes, and yield the record of each as it is done. A process that
    is lost is replaced.

    Args:
        parts: What.
        model: As `load_backend`; all machines load it.
        folder: Where to, open.
        cluster: As `ray_session`.
        actors: How many processes hold the model; 0: one for each GPU, or else for every 4 CPUs.
        truncate_dim: As `load_backend`.

    Raises:
        UserError: Ray is missing, a process was lost again and again, or as `Part.embed`.

    Example:
        >>> from tfdml.embeddings.passes import EmbeddingPass
        >>> work = EmbeddingPass([test], tfdml.embeddings.ImageTable.of([test]))
        >>> folder = EmbeddingFolder("vectors", work.identity(load_backend("models/cars_jrd")))
        >>> work.run(folder, lambda parts: embed_parts(parts, "models/cars_jrd", folder, "local"),
        ...     {})  # doctest: +SKIP
        True
    """
    if is_remote(model) and not in_store(model):
        raise UserError(
            "the actors load the model themselves: name a file or a folder", model=model
        )
    model = model if is_remote(model) else os.path.abspath(os.path.expanduser(model))
    if not parts:
        return
    with ray_session(cluster, object_store_bytes=_OBJECT_STORE) as ray:
        from ray.util import ActorPool

        workers = _workers(ray.cluster_resources(), actors, len(parts))
        embedder = ray.remote(
            num_cpus=workers.cpus,
            num_gpus=workers.gpus,
            max_restarts=-1,
            max_task_retries=_MOST_RETRIES,
        )(PartEmbedder)
        settings = model, truncate_dim, folder, 0 if workers.gpus else workers.cpus
        pool = ActorPool([embedder.remote(*settings) for _ in range(workers.actors)])
        for part in parts:
            pool.submit(lambda actor, part: actor.embed.remote(part), part)
        while pool.has_next():
            try:
                record = pool.get_next_unordered()
            except ray.exceptions.RayTaskError as error:
                raise (as_user_error(error) or error) from None
            except ray.exceptions.RayActorError as error:
                lost = f"a process was lost {_MOST_RETRIES + 1} times with the same images"
                raise UserError(f"{lost}: {short_message(error)}") from error
            yield record


class _Workers(NamedTuple):
    """How many actors, and what each takes of the cluster."""

    actors: int
    cpus: int
    gpus: int


def _workers(resources: Mapping[str, float], actors: int, parts: int) -> _Workers:
    """Return the actors for the parts.

    Example:
        >>> _workers({"CPU": 16.0}, 0, 100)
        _Workers(actors=4, cpus=4, gpus=0)
        >>> _workers({"CPU": 16.0, "GPU": 2.0}, 0, 100)
        _Workers(actors=2, cpus=8, gpus=1)
    """
    cpus, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
    actors = min(actors or gpus or max(1, cpus // _CPUS_PER_ACTOR), parts)
    if actors > cpus:
        raise UserError(
            f"the cluster has {cpus} CPUs; each actor takes one at least", actors=actors
        )
    return _Workers(actors, cpus // actors, 1 if gpus >= actors else 0)
