"""Embeds images beyond one machine's patience: parts of a list, over the actors of Ray Data, into Parquet files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from tfdml.cluster.bulk_folder import BulkFolder
from tfdml.cluster.part_embedder import PartEmbedder
from tfdml.cluster.ray_session import as_user_error, import_ray, ray_session
from tfdml.embeddings.parquet import DTYPES
from tfdml.errors import UserError
from tfdml.io.files import require_local

# Ray plans each block of a data set by itself: beyond so many, parts share one.
_MOST_BLOCKS = 10_000
# What Ray passes between processes here are numbers of parts.
_OBJECT_STORE = 2**27
_CPUS_PER_ACTOR = 4


@dataclasses.dataclass(frozen=True)
class BulkRequest:
    """What is to be embedded, by what, and where.

    Args:
        model: See `load_backend`.
        source: The images, see `tfdml.cluster.inputs.listed`.
        folder: A local folder, or one that all machines have mounted at the same place.
        cluster: See `ray_session`.
        actors: How many processes hold the model; 0: one for each GPU, or else for every 4 CPUs.
        batch_size: Images per batch.
        dtype: `"float32"` or `"int8"`.
        rows_per_file: Images of a part: what a kill loses for each actor, and the rows of a file.
        quickest: Whether to take `quickest_on_cpu` of the model where the cluster has no GPU.
        options: Further arguments of `load_backend`.

    Raises:
        UserError: An argument is none of these.
    """

    model: str
    source: str
    folder: str
    cluster: str = "local"
    actors: int = 0
    batch_size: int = 100
    dtype: str = "float32"
    rows_per_file: int = 4096
    quickest: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        require_local(self.folder, "folder")
        for name, least in (("actors", 0), ("batch_size", 1), ("rows_per_file", 1)):
            if getattr(self, name) < least:
                raise UserError(f"`{name}={getattr(self, name)}`: must be at least {least}")
        if self.dtype not in DTYPES:
            raise UserError(f"`dtype={self.dtype}`: one of {', '.join(DTYPES)}")
        if "://" in self.model:
            raise UserError(f"`model={self.model}`: the actors load the model themselves: name a file or a folder")


def embed_in_bulk(
    request: BulkRequest, progress: Callable[[int, int, int], None] | None = None
) -> tuple[dict[str, Any], bool]:
    """Embed the images of a request; begun before, what is left of them.

    A part of the images is embedded and written by one actor at a time; it is done when its file is there, so that a
    second start does nothing twice but the parts that were under way. An actor that is lost is replaced.

    Args:
        request: What, by what, and where.
        progress: Called with the images done, the bad ones among them, and all, first of all with those done before.

    Returns:
        The manifest, and whether anything was done.

    Raises:
        UserError: Ray is missing, there is no image, the folder is of something else, or as `load_backend`.

    Example:
        >>> request = BulkRequest("models/cars_jrd", "photos/**/*.jpg", "embeddings/photos")
        >>> embed_in_bulk(request)[0]["count"]
        12
    """
    import_ray()
    with ray_session(request.cluster, object_store_bytes=_OBJECT_STORE) as ray:
        resources = ray.cluster_resources()
        if request.quickest and not resources.get("GPU"):
            request = dataclasses.replace(request, model=str(_quickest(request.model)))
        identity, about = identity_of(request)
        folder = BulkFolder(request.folder)
        with folder.begun(request.source, identity, request.rows_per_file) as finished:
            if finished:
                return finished, False
            pending = folder.pending()
            if pending:
                workers = _workers(resources, request.actors, len(pending))
                _embed_parts(request, folder, pending, workers, progress)
            return folder.finish(about, identity, request.dtype), True


def _quickest(model: str) -> os.PathLike:
    from tfdml.embeddings.backends import quickest_on_cpu

    return quickest_on_cpu(model)


def identity_of(request: BulkRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a folder must have been begun with to be continued, and what the manifest records of the model.

    Raises:
        UserError: As `load_backend`.
    """
    from tfdml.embeddings.backends import load_backend

    _leave_gpus_to_the_actors()
    backend = load_backend(request.model, **request.options)
    about = {"source": backend.address, "kind": backend.kind, "checksum": backend.checksum()}
    identity = {
        "model": about["checksum"],
        "view": json.dumps(backend.view, sort_keys=True),
        "input": request.source,
        "dtype": request.dtype,
        "rows_per_file": request.rows_per_file,
        "batch_size": request.batch_size,
    }
    return identity, {"model": about, "view": backend.view, "dataset": {"name": request.source}}


def _leave_gpus_to_the_actors() -> None:
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # TensorFlow has looked at them already
        tf.config.set_visible_devices([], "GPU")


def _embed_parts(
    request: BulkRequest,
    folder: BulkFolder,
    pending: list[int],
    workers: dict[str, int],
    progress: Callable[[int, int, int], None] | None,
) -> None:
    import ray.data

    before = folder.done()
    bad, done = before["bad"], before["rows"] + before["bad"]
    report = progress or (lambda *_: None)
    report(done, bad, folder.count)
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):  # its file, in Ray's folder, keeps all
            handler.setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # A worker's UserError comes as it is.
    context.raise_original_map_exception = True
    blocks = min(len(pending), _MOST_BLOCKS)
    parts = ray.data.from_items([{"part": part} for part in pending], override_num_blocks=blocks)
    arguments = {
        "folder": str(folder.folder),
        "model": os.path.abspath(os.path.expanduser(request.model)),
        "options": request.options,
        "batch_size": request.batch_size,
        "dtype": request.dtype,
        "threads": 0 if workers["num_gpus"] else workers["num_cpus"],
    }
    results = parts.map_batches(
        PartEmbedder,
        batch_size=1,
        fn_constructor_kwargs=arguments,
        compute=ray.data.ActorPoolStrategy(size=workers["actors"]),
        num_cpus=workers["num_cpus"],
        num_gpus=workers["num_gpus"],
    )
    try:
        for result in results.iter_rows():
            done += int(result["rows"] + result["bad"])
            bad += int(result["bad"])
            report(done, bad, folder.count)
    except Exception as error:
        raise (as_user_error(error) or error) from None


def _workers(resources: dict[str, float], actors: int, parts: int) -> dict[str, int]:
    """How many actors, and what each takes of the cluster.

    Example:
        >>> _workers({"CPU": 16.0}, 0, 100)
        {'actors': 4, 'num_cpus': 4, 'num_gpus': 0}
        >>> _workers({"CPU": 16.0, "GPU": 2.0}, 0, 100)
        {'actors': 2, 'num_cpus': 8, 'num_gpus': 1}
    """
    cpus, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
    actors = min(actors or gpus or max(1, cpus // _CPUS_PER_ACTOR), parts)
    if actors > cpus:
        raise UserError(f"`actors={actors}`: the cluster has {cpus} CPUs; each actor takes one at least")
    return {"actors": actors, "num_cpus": cpus // actors, "num_gpus": 1 if gpus >= actors else 0}
