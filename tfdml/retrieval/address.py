"""Where a gallery lives: a URI with the table, the distance and the parameters of an index."""

import dataclasses
import re
import urllib.parse
from collections.abc import Mapping

from tfdml.arguments import integer
from tfdml.errors import REASON, UserError, user_errors
from tfdml.pairwise import DISTANCES

TABLE = "gallery"
_TABLE = re.compile(r"[a-z][a-z0-9_]{0,59}")
# The options that every database takes; those of the kinds of index are integers.
_COMMON = ("table", "distance", "index")


@dataclasses.dataclass(frozen=True)
class Form:
    """What the URIs of one database may say.

    Args:
        place: How its address is written, for messages.
        indexes: The options of each kind of index that it has.
        has_host: Whether it may lie on a server, where the path is the name of a database; else in a file or folder.
        further: Options of its own, texts.
    """

    place: str
    indexes: Mapping[str, tuple[str, ...]]
    has_host: bool = False
    further: tuple[str, ...] = ()


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


def is_gallery(text: str) -> bool:
    """Whether a text is the URI of a gallery, by its scheme.

    Example:
        >>> is_gallery("lancedb:///data/cars"), is_gallery("http://localhost:8501/v1/models/cars")
        (True, False)
    """
    return text.partition("://")[0] in SCHEMES and "://" in text


@dataclasses.dataclass(frozen=True)
class Address:
    """A URI, read.

    Args:
        scheme: Which database.
        host: The server; empty for files.
        port: Its port; None for the database's own.
        user: Who asks; empty for nobody in particular.
        password: Its password or key; in no text that is made of this.
        path: A file or folder, or the name of a database on the server.
        table: The table, collection or file that holds the gallery.
        distance: What near means; None: as in the gallery, and `euclidean` where it is new.
        index: The kind of approximate index; empty for exact search.
        options: The index's parameters, integers.
        further: Options of the database's own.

    `str()` gives the URI without user, password and options.
    """

    scheme: str
    host: str = ""
    port: int | None = None
    user: str = dataclasses.field(default="", repr=False)
    password: str = dataclasses.field(default="", repr=False)
    path: str = ""
    table: str = TABLE
    distance: str | None = None
    index: str = ""
    options: Mapping[str, int] = dataclasses.field(default_factory=dict)
    further: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}" + ("" if self.table == TABLE else f"?table={self.table}")

    def option(self, name: str, default: int) -> int:
        """Return a parameter of the index."""
        return self.options.get(name, default)


def shown(uri: str) -> str:
    """Return a URI as messages may show it: without user, password and options, however wrong it is.

    Example:
        >>> shown("pgvector://me:se@cret@db/cars?key=1")
        'pgvector://db/cars'
    """
    scheme, mark, rest = str(uri).partition("://")
    return scheme + mark + rest.rpartition("@")[2].partition("?")[0] if mark else "the address"


def parse(uri: str) -> Address:
    """Read a URI.

    Args:
        uri: Such as `pgvector://user:password@host/db?index=hnsw&links=16`.

    Raises:
        UserError: It says something else. The message has no part of it that may be secret.

    Example:
        >>> address = parse("lancedb:///data/cars?index=ivf&lists=100")
        >>> address.path, address.index, address.options
        ('/data/cars', 'ivf', {'lists': 100})
    """
    where = f"`uri={shown(uri)}`"
    scheme = str(uri).partition("://")[0]
    if "://" not in str(uri) or scheme not in _FORMS:
        places = ", ".join(form.place for form in _FORMS.values())
        raise UserError(f"{where}: unknown database; write one of {places}")
    form = _FORMS[scheme]
    try:
        parts = urllib.parse.urlsplit(uri)
        host, port = parts.hostname or "", parts.port
        user, password = (urllib.parse.unquote(text or "") for text in (parts.username, parts.password))
        given = urllib.parse.parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        if parts.fragment or "@" in parts.query:
            raise ValueError
    except ValueError:
        # What Python says of it may quote a password that holds a /, ? or #.
        advice = "with %2F, %40 and the like for signs of a password, and options as ?name=value&name=value"
        raise UserError(f"{where} cannot be read: write {form.place}, {advice}") from None
    path = urllib.parse.unquote(parts.path)
    if (parts.netloc and not form.has_host) or (not host and path in ("", "/")):
        raise UserError(f"{where}: write {form.place}")
    if twice := sorted(name for name, values in given.items() if len(values) > 1):
        raise UserError(f"{where}: the option {twice[0]} is there twice")
    options = {name: value for name, (value,) in given.items()}
    table, distance, index = options.get("table", TABLE), options.get("distance"), options.get("index", "")
    if not _TABLE.fullmatch(table):
        raise UserError(f"{where}: a table's name is of a .. z, 0 .. 9 and _, a letter first, at most 60 of them")
    if distance is not None and distance not in DISTANCES:
        raise UserError(f"{where}: unknown distance {distance!r}; one of {', '.join(DISTANCES)}")
    if index and index not in form.indexes:
        known = f"{scheme} has {', '.join(form.indexes)}; leave it out for exact search"
        raise UserError(f"{where}: unknown index {index!r}; {known}")
    own = form.indexes.get(index, ())
    allowed = (*_COMMON, *own, *form.further)
    for name in options:
        if name not in allowed:
            raise UserError(f"{where}: unknown option {name!r:.40}; here it may be {', '.join(allowed)}")
    with user_errors(ValueError, f"{where}: {REASON}"):
        numbers = {name: integer(name, _as_number(options[name]), at_least=1) for name in own if name in options}
    further = {name: options[name] for name in form.further if name in options}
    return Address(scheme, host, port, user, password, path, table, distance, index, numbers, further)


def _as_number(text: str) -> int | str:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else text
