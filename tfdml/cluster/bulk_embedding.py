"""Embeds images beyond one machine's patience: parts of a list, over the actors of Ray, into Parquet files."""

import contextlib
import csv
import dataclasses
import functools
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from tfdml.cluster.ray_session import as_user_error, next_result, ray_session
from tfdml.data.dataset import ImageDataset
from tfdml.data.images import FileImages
from tfdml.data.preparation import Progress
from tfdml.data.readers.own_images import class_ids, read_rows
from tfdml.data.readers.tables import LIST_EXTENSIONS, images_named
from tfdml.embeddings.backends import embed_readable, load_backend
from tfdml.embeddings.files import DTYPES, PROGRESS, EmbeddingFolder, require_utf8, table_of
from tfdml.errors import UserError, check_choice, check_not_negative, check_positive, short_message
from tfdml.io.files import atomic_write, in_store, is_file, is_remote, read_bytes, remove

# How often a part is begun again whose process is lost on the way, as to an image that takes all memory.
_MOST_RETRIES = 3
# What Ray passes between processes here are lists of paths.
_OBJECT_STORE = 2**27
_CPUS_PER_ACTOR = 4
BAD_IMAGES = "bad_images.csv"
_IMAGES = "images.parquet"


def images_of(source: str | Sequence[str]) -> pa.Table:
    """Return the images that a source names.

    Args:
        source: Files, folders and patterns of paths or of URLs, see
            `tfdml.data.readers.tables.images_named`; or one list, see
            `tfdml.data.readers.own_images.read_list`, of which only `path` is required.

    Returns:
        `id`, `path`, `label`, `class` and `role` of each, null where nothing is known, and `group` of a list with it.

    Raises:
        UserError: It names no image, or the list is not as it should be.

    Example:
        >>> len(images_of("photos/**/*.jpg"))
        12
    """
    columns: dict[str, list] = {}
    ids = groups = None
    sources = [source] if isinstance(source, str) else source
    if len(sources) == 1 and sources[0].lower().endswith(LIST_EXTENSIONS):
        table = read_rows(sources[0] if is_remote(sources[0]) else os.path.abspath(sources[0]), required=("path",))
        columns = table.columns
        ids, groups = (class_ids(table, name)[0] if name in columns else None for name in ("label", "group"))
    else:
        columns["path"] = [path for pattern in sources for path in images_named("input", pattern)]
    paths = columns["path"]
    if not paths:
        raise UserError(f"`input={','.join(sources)}` names no image")
    require_utf8(paths)
    nothing = [None] * len(paths)
    return pa.table(
        {
            "id": range(len(paths)),
            "path": paths,
            "label": pa.array(nothing if ids is None else ids, pa.int64()),
            "class": pa.array(columns.get("label", nothing), pa.string()),
            "role": pa.array(columns.get("split", nothing), pa.string()),
            **({} if groups is None else {"group": groups}),
        }
    )


class BulkFolder(EmbeddingFolder):
    """The folder of a bulk pass; the driver and the workers each have one.

    `images.parquet` lists the images, once, so that a later start embeds the same ones.

    Args:
        folder: A local folder, or one that all machines have mounted at the same place.
        identity: What decides the embeddings; workers need none.
    """

    def __init__(self, folder: str | os.PathLike, identity: Mapping[str, Any] | None = None):
        super().__init__(folder if is_remote(folder) else os.path.abspath(folder), identity or {})

    def list_images(self, source: str | Sequence[str]) -> pa.Table:
        """Return the images, listed by the first start.

        Args:
            source: See `images_of`.

        Raises:
            UserError: There is no image.
        """
        if not is_file(self.path(_IMAGES)):
            images = images_of(source)
            self.begin()
            with atomic_write(self.path(_IMAGES)) as temporary:
                pq.write_table(images, temporary)
        return pq.read_table(pa.BufferReader(read_bytes(self.path(_IMAGES))))

    def pending(self, count: int) -> list[int]:
        """Return those of so many parts that are not done, or whose file is gone or cut."""
        done = self.parts()
        return [part for part in range(count) if part not in done]

    def finish_bulk(self, about: Mapping[str, Any], dtype: str, count: int) -> dict[str, Any]:
        """Write the list of bad images and, last of all, the manifest.

        Raises:
            UserError: No image could be read.
        """
        bad = [image for part in self.parts().values() for image in part["bad"]]
        if len(bad) == count:
            raise UserError(f"none of the {count:,} images can be read; the first: {bad[0][1]}: {bad[0][2]}")
        with (
            atomic_write(self.path(BAD_IMAGES)) as temporary,
            open(temporary, "w", encoding="utf-8", newline="") as file,
        ):
            csv.writer(file, lineterminator="\n").writerows([["id", "path", "reason"], *bad])
        return self.finish_parts(dtype, {"bad_images": len(bad), **about}, [BAD_IMAGES])

    def discard(self) -> None:
        """See `EmbeddingFolder.discard`."""
        remove(self.path(_IMAGES))
        super().discard()


class PartEmbedder:
    """Embeds parts of a list of images; an actor of Ray, which holds the model.

    The vectors go from here to their file, past Ray.

    Args:
        request: What, by what, and where; with paths from the root.
        threads: CPUs that it may keep busy; 0: all.
    """

    def __init__(self, request: "BulkRequest", threads: int = 0):
        self.request, self.threads = request, threads
        self.folder = BulkFolder(request.folder)

    @functools.cached_property
    def backend(self) -> Any:
        """The model, loaded with the first part: what is wrong with it then comes as it is."""
        with contextlib.suppress(RuntimeError):  # TensorFlow has run already, as in a process that is not Ray's
            tf.config.threading.set_intra_op_parallelism_threads(self.threads)
            tf.config.threading.set_inter_op_parallelism_threads(self.threads)
        return load_backend(self.request.model, threads=self.threads, truncate_dim=self.request.truncate_dim)

    def embed(self, part: int, images: Mapping[str, list]) -> dict[str, Any]:
        """Embed one part, of these rows of `images_of`; see `EmbeddingFolder.write_part`.

        Raises:
            UserError: This machine does not see the folder.
        """
        if not is_file(self.folder.path(PROGRESS)):
            advice = "name a folder that every machine of the cluster has mounted at the same place"
            raise UserError(f"`folder={self.folder.folder}`: a worker on {platform.node()} does not see it; {advice}")
        count = len(images["path"])
        dataset = ImageDataset("input", "test", FileImages(tuple(images["path"])), np.zeros(count, np.int64), {0: ""})
        rows, vectors, faults = embed_readable(self.backend, dataset, self.request.batch_size)
        bad = [[images["id"][fault.index], images["path"][fault.index], fault.reason] for fault in faults]
        readable = {name: [values[row] for row in rows] for name, values in images.items()}
        table = table_of(readable, vectors, self.request.dtype) if len(rows) else None
        return self.folder.write_part(part, table, bad=bad)


@dataclasses.dataclass(frozen=True)
class BulkRequest:
    """What is to be embedded, by what, and where.

    Args:
        model: See `load_backend`.
        source: The images, see `images_of`.
        folder: A local folder, or one that all machines have mounted at the same place.
        cluster: See `ray_session`.
        actors: How many processes hold the model; 0: one for each GPU, or else for every 4 CPUs.
        batch_size: Images per batch.
        dtype: `"float32"` or `"int8"`.
        rows_per_file: Images of a part: what a kill loses for each actor, and the rows of a file.
        truncate_dim: See `load_backend`.

    Raises:
        UserError: An argument is none of these.
    """

    model: str
    source: str | Sequence[str]
    folder: str
    cluster: str = "local"
    actors: int = 0
    batch_size: int = 100
    dtype: str = "float32"
    rows_per_file: int = 4096
    truncate_dim: int = 0

    def __post_init__(self):
        check_not_negative(actors=self.actors)
        check_positive(batch_size=self.batch_size, rows_per_file=self.rows_per_file)
        check_choice("`dtype`", self.dtype, DTYPES)
        if is_remote(self.model) and not in_store(self.model):
            raise UserError(f"`model={self.model}`: the actors load the model themselves: name a file or a folder")


def embed_in_bulk(request: BulkRequest, progress: Progress = lambda *_: None) -> tuple[dict[str, Any], bool]:
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
    with ray_session(request.cluster, object_store_bytes=_OBJECT_STORE) as ray:
        identity, about = identity_of(request)
        folder = BulkFolder(request.folder, identity)
        with folder.opened():
            if folder.manifest:
                return folder.manifest, False
            images = folder.list_images(request.source)
            _embed_parts(ray, request, folder, images, progress)
            return folder.finish_bulk(about, request.dtype, len(images)), True


def identity_of(request: BulkRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a folder must have been begun with to be continued, and what the manifest records of the model.

    Raises:
        UserError: As `load_backend`.
    """
    with contextlib.suppress(RuntimeError):  # TensorFlow has looked at them already
        tf.config.set_visible_devices([], "GPU")  # they are left to the actors
    backend = load_backend(request.model, truncate_dim=request.truncate_dim)
    about = {"source": backend.address, "kind": backend.kind, "checksum": backend.checksum()}
    about["fingerprint"] = backend.fingerprint()
    identity = {
        "model": about["checksum"],
        "view": json.dumps(backend.view, sort_keys=True),
        "input": request.source,
        "dtype": request.dtype,
        "rows_per_file": request.rows_per_file,
        "batch_size": request.batch_size,
    }
    return identity, {"model": about, "view": backend.view, "dataset": {"name": str(request.source)}}


def _embed_parts(ray: Any, request: BulkRequest, folder: BulkFolder, images: pa.Table, report: Progress) -> None:
    """Embed the parts that are not done; Ray starts an actor that is lost again, with the part that it had."""
    from ray.util import ActorPool

    rows = request.rows_per_file
    pending, before = folder.pending(math.ceil(len(images) / rows)), folder.parts().values()
    bad = sum(len(part["bad"]) for part in before)
    done = bad + sum(part["rows"] for part in before)
    report(done, bad, len(images))
    if not pending:
        return
    workers = _workers(ray.cluster_resources(), request.actors, len(pending))
    model = request.model if is_remote(request.model) else os.path.abspath(os.path.expanduser(request.model))
    request = dataclasses.replace(request, model=model, folder=folder.folder)
    options = {
        "num_cpus": workers.cpus,
        "num_gpus": workers.gpus,
        "max_restarts": -1,
        "max_task_retries": _MOST_RETRIES,
    }
    embedder, threads = ray.remote(**options)(PartEmbedder), 0 if workers.gpus else workers.cpus
    pool = ActorPool([embedder.remote(request, threads) for _ in range(workers.actors)])
    for number in pending:
        pool.submit(lambda actor, part: actor.embed.remote(part, images.slice(part * rows, rows).to_pydict()), number)
    while pool.has_next():
        try:
            record = next_result(ray, pool, workers.cpus)
        except ray.exceptions.RayTaskError as error:
            raise (as_user_error(error) or error) from None
        except ray.exceptions.RayActorError as error:
            lost = f"a process was lost {_MOST_RETRIES + 1} times with the same images"
            raise UserError(f"{lost}: {short_message(error)}") from error
        done += record["rows"] + len(record["bad"])
        bad += len(record["bad"])
        report(done, bad, len(images))


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
        raise UserError(f"`actors={actors}`: the cluster has {cpus} CPUs; each actor takes one at least")
    return _Workers(actors, cpus // actors, 1 if gpus >= actors else 0)
