"""From a URI to the database that it names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tfdml.errors import UserError, short_message
from tfdml.retrieval.address import Form, parse

if TYPE_CHECKING:
    from tfdml.retrieval.database import GalleryDatabase

_IVF, _HNSW = ("lists", "effort"), ("links", "effort")
_FORMS = {
    "lancedb": Form(
        "lancedb:///folder",
        {"ivf": _IVF, "ivf_pq": ("lists", "bytes", "effort", "refine"), "hnsw": ("lists", "links", "effort")},
    ),
    "pgvector": Form(
        "pgvector://user:password@host:port/database",
        {"ivf": _IVF, "hnsw": _HNSW},
        has_host=True,
        further=("socket",),
    ),
    "qdrant": Form("qdrant://:key@host:port or qdrant:///folder", {"hnsw": _HNSW}, has_host=True, further=("tls",)),
}
SCHEMES = tuple(_FORMS)
# By scheme, which is also the extra and the beginning of the module's name.
_CLASSES = {"lancedb": "LanceGallery", "pgvector": "PostgresGallery", "qdrant": "QdrantGallery"}


def is_gallery(text: str) -> bool:
    """Whether a text is the URI of a gallery, by its scheme.

    Example:
        >>> is_gallery("lancedb:///data/cars"), is_gallery("grpc://localhost:8500/cars")
        (True, False)
    """
    return text.partition("://")[0] in SCHEMES and "://" in text


def connect(uri: str) -> GalleryDatabase:
    """Open a gallery where it lives.

    `lancedb:///folder`, `pgvector://user:password@host:port/database`, `qdrant://:key@host:port` (or
    `qdrant:///folder`, its client's local mode). Options follow as `?name=value&name=value`: `table` (`gallery`),
    `distance` (`euclidean`, for a new gallery) and, for approximate search, `index` with the parameters of its kind;
    without it the search is exact, whatever indexes are there.
    Nothing is written yet: the first `upsert` makes the table.

    Args:
        uri: The address.

    Returns:
        The gallery; close it, or use it in a `with`.

    Raises:
        UserError: The address is none of these; its client is not installed; the server cannot be reached or refuses;
            the table is of something else, or was made with another distance. No message holds a password.

    Example:
        >>> import tempfile, numpy as np
        >>> with tempfile.TemporaryDirectory() as folder, connect(f"lancedb://{folder}/cars") as gallery:
        ...     gallery.upsert(["a", "b"], np.array([[0.0, 1.0], [1.0, 0.0]]), {"label": [3, 8]})
        ...     found = gallery.search(np.array([[0.9, 0.1]]), k=1)
        >>> found.ids.tolist(), found.attributes["label"].tolist()
        ([['b']], [[8]])
    """
    address = parse(uri, _FORMS)
    try:
        module = importlib.import_module(f"tfdml.retrieval.{address.scheme}_gallery")
        made = getattr(module, _CLASSES[address.scheme])
    except ImportError as error:
        if (error.name or "").startswith("tfdml"):
            raise
        raise UserError(f"`uri={address}` needs {_what(error)}: pip install 'tfdml[{address.scheme}]'") from error
    return made(address)


def _what(error: ImportError) -> str:
    return f"the package {error.name}" if isinstance(error, ModuleNotFoundError) else short_message(error)
