"""Addresses of galleries: of databases, and what else a gallery may be."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from pathlib import Path

from tfdml.embeddings.files import holds_embeddings
from tfdml.embeddings.model_card import served_version
from tfdml.errors import ERROR_TEXT, UserError, check_choice, redact, user_errors
from tfdml.io.files import in_store, is_remote
from tfdml.registry import DISTANCES

# Each is also the extra and the beginning of the module's name.
SCHEMES = ("lancedb", "pgvector")
#: Is in each version of a retriever.
RETRIEVER_CARD = "retriever.json"
_FORMS = "lancedb:///folder or pgvector://user:password@host:port/database"
_TABLE = "[a-z][a-z0-9_]{0,59}"


def is_database(text: str) -> bool:
    """Whether a text is the address of a gallery in a database, by its scheme.

    Example:
        >>> is_database("lancedb:///data/cars"), is_database("http://localhost:8501/v1/models/cars")
        (True, False)
    """
    return text.partition("://")[0] in SCHEMES and "://" in text


def kind_of_gallery(address: str) -> str:
    """Return what a gallery is: a `database`, which is any address of a server; stored
    `embeddings`; a `retriever`; or another folder, of `images`.

    Example:
        >>> kind_of_gallery("lancedb:///data/cars"), kind_of_gallery("vectors.npz")
        ('database', 'embeddings')
    """
    if is_database(address) or (is_remote(address) and not in_store(address)):
        return "database"
    path = Path(address).expanduser()
    if not path.is_dir() or holds_embeddings(path):
        return "embeddings"
    version = served_version(path)
    if version is not None and (version / RETRIEVER_CARD).is_file():
        return "retriever"
    return "images"


@dataclasses.dataclass(frozen=True)
class Address:
    """The parts of an address.

    Args:
        uri: The address itself, which may hold a password; `str()` leaves it out.
        parts: Scheme, host, port, user, password and path.
        path: A folder, or the name of a database after a slash.
        table: The table that holds the gallery.
        distance: Of a new gallery; empty for any.
    """

    uri: str = dataclasses.field(repr=False)
    parts: urllib.parse.SplitResult = dataclasses.field(repr=False)
    path: str
    table: str = "gallery"
    distance: str = ""

    def __str__(self) -> str:
        return redact(self.uri)


def parse(uri: str) -> Address:
    """Read the address of a database.

    Raises:
        UserError: It is none. The message holds no user and no password.

    Example:
        >>> address = parse("lancedb:///data/cars?table=vans")
        >>> address.path, address.table
        ('/data/cars', 'vans')
    """
    shown = redact(uri)
    if not is_database(uri):
        raise UserError(f"write {_FORMS}", uri=shown)
    try:
        parts = urllib.parse.urlsplit(uri)
        options = _options(parts)
        is_empty = not (parts.path.strip("/") or parts.hostname)
        has_host_in_vain = bool(parts.netloc) and parts.scheme == "lancedb"
        # As `urlsplit` does, and the port where it is no number.
        if is_empty or has_host_in_vain or parts.fragment or parts.port == 0:
            raise ValueError
    except ValueError:
        advice = "options as ?name=value&name=value, and %2F, %40, %23, %3F in a password"
        # Python's message may quote a part of the password.
        raise UserError(f"cannot be read: write {_FORMS}, {advice}", uri=shown) from None
    with user_errors(UserError, ERROR_TEXT, uri=shown):
        for name in options:
            check_choice("option", name, ("table", "distance"))
        check_choice("distance", options.get("distance", "euclidean"), DISTANCES)
        if not re.fullmatch(_TABLE, options.get("table", "gallery")):
            raise UserError("the name of a table is made of a-z, 0-9 and _, a letter first")
    return Address(uri, parts, urllib.parse.unquote(parts.path), **options)


def _options(parts: urllib.parse.SplitResult) -> dict[str, str]:
    pairs = urllib.parse.parse_qsl(
        parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)
    )
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ValueError
    return options
