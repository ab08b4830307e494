r"""Write the embeddings of a data set into a database, where they are searched.

  tfdml index --embeddings=embeddings/cars --to=lancedb:///data/galleries
  tfdml index --embeddings=embeddings/cars --to='pgvector://user:password@host:5432/shop?distance=cosine'
  tfdml index --embeddings=embeddings/vans --to=lancedb:///data/galleries --prefix=vans/ \
      --truncate_dim=32
  tfdml index --embeddings=embeddings/cars --to=lancedb:///data/galleries --replace --prune
  tfdml index --to=lancedb:///data/galleries --delete='class=bus'
  tfdml index --to=lancedb:///data/galleries --admit=embeddings/aligned
  tfdml index --to=lancedb:///data/galleries --build_index

A row's id is the name of its image, after --prefix. Its texts are path, class, source and model.
Ids that are there from other embeddings are an error, or their rows are replaced (--replace). After
a kill, the same command writes the rest. The flag --gallery of tfdml search takes the same URI.

--to names the database; options follow as ?name=value&name=value, in quotes for the shell:
  table       the table (default gallery)
  distance    euclidean (default), sqeuclidean, cosine or dot, for a new table
A password may also come from the environment (PGPASSWORD) and is never printed.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, ClassVar

from tfdml.cli.command_line import Command, CommandFlags, Flags, Progress
from tfdml.errors import UserError, counted
from tfdml.options import option

if TYPE_CHECKING:
    from tfdml.retrieval import WritableGallery


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexFlags(CommandFlags):
    """What is indexed, and where."""

    title: ClassVar[str] = "What is indexed, and where"

    embeddings: str = option(
        "", help="A folder that tfdml embed wrote, or a Parquet, .npz or .npy file."
    )
    to: str = option(help="The gallery's address, see above.")
    prefix: str = option(
        "",
        requires="embeddings",
        help="Put before the name of each image, for its id, and before classes that are numbers.",
    )
    truncate_dim: int = option(
        0,
        at_least=0,
        requires="embeddings",
        help="Keep the first N dimensions, scaled to length 1; 0: all, as they are.",
    )
    model: str = option(
        "",
        requires="embeddings",
        help="The fingerprint of the model, where the embeddings state none. unknown: nobody knows "
        "it, and they are mixed into a gallery of a known one.",
    )
    replace: bool = option(
        False,
        requires="embeddings",
        help="Replace rows of other embeddings that have the same ids.",
    )
    prune: bool = option(
        False,
        requires="embeddings",
        help="Delete what was indexed before with the same --prefix and is not in the embeddings.",
    )
    admit: str = option(
        "",
        help="Let the vectors of another model search the gallery: its fingerprint, or embeddings "
        "that it made. --to may then be a folder of tfdml embed.",
    )
    delete: str = option(
        "", help="Delete the rows whose column is a text: class=bus, id=a.jpg, path= or source=."
    )
    build_index: bool = option(
        False,
        help="Build an index of the database's own, for tfdml search --approximate.",
    )


def index(flags: IndexFlags) -> None:
    """Index as the flags say."""
    from tfdml.retrieval import WritableGallery, open_gallery

    if not (flags.embeddings or flags.delete or flags.admit or flags.build_index):
        raise UserError("is missing, or --delete, --admit or --build_index", embeddings=...)
    where = _where(flags.delete)
    # The address first: reading names may take a while.
    with open_gallery(flags.to) as gallery:
        if flags.admit:
            model = _model_of(flags.admit)
            gallery.admit(model)
            print(f"{gallery.address} is searched by vectors of {model}, too")
        if not (where or flags.embeddings or flags.build_index):
            return
        if not isinstance(gallery, WritableGallery):
            raise UserError("is no database, the only galleries that are written", to=flags.to)
        if where:
            count = gallery.delete(where=where)
            print(
                f"{counted(count, 'row')} deleted, whose {flags.delete}; {len(gallery):,} are left"
            )
        if flags.embeddings:
            _add(gallery, flags)
        if flags.build_index:
            gallery.build_index()
            print(gallery.measure_index())


def _model_of(text: str) -> str:
    """Return the fingerprint that --admit names."""
    if text.startswith("sha256:"):
        return text
    from tfdml.embeddings.files import read_embeddings

    model = read_embeddings(os.path.expanduser(text)).model
    if not model:
        raise UserError("states no model: name its fingerprint, sha256:...", admit=text)
    return model


def _where(text: str) -> dict[str, str]:
    """Return the column and the text of --delete; nothing where it is not given."""
    name, separator, value = text.partition("=")
    if text and not separator:
        raise UserError("write it as class=bus", delete=text)
    return {name: value} if text else {}


def _add(gallery: WritableGallery, flags: IndexFlags) -> None:
    from tfdml.embeddings.files import read_embeddings

    stored = read_embeddings(os.path.expanduser(flags.embeddings))
    with Progress() as line:
        counts = gallery.add_embeddings(
            stored,
            flags.prefix,
            flags.truncate_dim,
            model=flags.model,
            replace=flags.replace,
            progress=line.images,
        )
    dimension = flags.truncate_dim or stored.embeddings.shape[1]
    place = f"{gallery.address}, {gallery.distance}"
    print(f"{counted(len(stored), 'embedding')} of {dimension} dimensions in {place}: {counts}")
    if not stored.model and not flags.model:
        print(f"{flags.embeddings} states no model, and the gallery knows none")
    if flags.prune:
        print(
            f"{counted(gallery.prune(stored, flags.prefix), 'row')} deleted, not in the embeddings"
        )
    others = len(gallery) - len(stored)
    if others:
        print(f"the gallery holds {counted(others, 'row')} besides, from other folders or files")


COMMAND = Command(
    "index", index, Flags(IndexFlags), __doc__, flag_of={"uri": "to"}, needs_tensorflow=False
)
