r"""Write the embeddings of a data set into a database, where they are searched.

  tfdml index --embeddings=embeddings/cars --to=lancedb:///data/galleries
  tfdml index --embeddings=embeddings/cars --to='pgvector://user:password@host:5432/shop?distance=cosine'
  tfdml index --embeddings=embeddings/vans --to=lancedb:///data/galleries --prefix=vans/ \
      --truncate_dim=32

A row's id is the name of its image, after --prefix. Its texts are path, class, role and source. Ids
that are there from other embeddings are an error, or their rows are replaced (--replace). After a
kill, the same command writes the rest. The flag --gallery of tfdml search takes the same URI.

--to names the database; options follow as ?name=value&name=value, in quotes for the shell:
  table       the table (default gallery)
  distance    euclidean (default), sqeuclidean, cosine or dot, for a new table
A password may also come from the environment (PGPASSWORD) and is never printed.
"""

import dataclasses
import os
from typing import ClassVar

from tfdml.cli.command_line import Command, CommandFlags, Flags, Progress
from tfdml.options import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexFlags(CommandFlags):
    """What is indexed, and where."""

    title: ClassVar[str] = "What is indexed, and where"

    embeddings: str = option(
        help="A folder that tfdml embed wrote, or a Parquet, .npz or .npy file."
    )
    to: str = option(help="The gallery's address, see above.")
    prefix: str = option("", help="Put before the name of each image, for its id.")
    truncate_dim: int = option(
        0, at_least=0, help="Keep the first N dimensions, scaled to length 1; 0: all, as they are."
    )
    replace: bool = option(False, help="Replace rows of other embeddings that have the same ids.")


def index(flags: IndexFlags) -> None:
    """Index as the flags say."""
    from tfdml.embeddings import read_embeddings
    from tfdml.retrieval import connect, index_embeddings

    # The address first: reading names may take a while.
    with connect(flags.to) as gallery:
        stored = read_embeddings(os.path.expanduser(flags.embeddings))
        if not stored.model:
            print(
                f"{flags.embeddings} states no model: it is not compared with that of the gallery"
            )
        with Progress() as line:
            options = flags.prefix, flags.truncate_dim, flags.replace
            counts = index_embeddings(gallery, stored, *options, progress=line.images)
        total, dimension = len(stored), flags.truncate_dim or stored.embeddings.shape[1]
        changes = (
            f"{counts.added:,} added, {counts.replaced:,} replaced, {counts.present:,} there "
            "already"
        )
        print(
            f"{total:,} embeddings of {dimension} dimensions in {gallery.address}, "
            f"{gallery.distance}: {changes}"
        )
        if others := len(gallery) - total:
            print(f"the gallery holds {others:,} more rows, of other embeddings")


COMMAND = Command(
    "index", index, Flags(IndexFlags), __doc__, flag_of={"uri": "to"}, needs_tensorflow=False
)
