"""tfdml index: embeddings into a gallery, where it lives."""

from __future__ import annotations

import os
import time

from tfdml.cli.command_line import Command, Flags
from tfdml.cli.main import Progress

USAGE = """
Write the embeddings of a data set into a database, where they are searched.

  tfdml index --embeddings=embeddings/cars --to=lancedb:///data/galleries
  tfdml index --embeddings=embeddings/cars --to='lancedb:///data/galleries?table=cars&index=ivf_pq&lists=256&effort=20'
  tfdml index --embeddings=embeddings/cars --to='pgvector://user:password@host:5432/shop?index=hnsw&links=16'
  tfdml index --embeddings=embeddings/cars --to=qdrant://localhost:6333 --prefix=cars/
  tfdml index --embeddings=vectors.npz --to='lancedb:///data/galleries?distance=cosine&index=ivf&effort=32'

--embeddings is a folder that tfdml embed wrote, or a Parquet, .npz or .npy file. A row's id is the name of its image;
path, label, role and source (which embeddings it is of) are its attributes. Rows whose id is there are replaced.
Stopped at any moment, the same command resumes after the last whole batch.

--to names the database; options follow as ?name=value&name=value, in quotes for the shell:
  table       the table or collection (default gallery)
  distance    euclidean (default), sqeuclidean, cosine or dot, for a new table
  index       an approximate index, by the database: ivf, hnsw, and for lancedb ivf_pq; without it the search is exact
  lists, links, bytes, effort, refine    its parameters, see docs/galleries.md
A password may also come from the environment (PGPASSWORD) and is never printed.

What a search of the gallery finds is measured by tfdml evaluate --model=URI.
"""

FLAGS = Flags()
FLAGS.define("embeddings", "", "A folder that tfdml embed wrote, or a Parquet, .npz or .npy file.")
FLAGS.define("to", "", "The gallery's address, see above.")
FLAGS.define("prefix", "", "Put before the name of each image, for its id.")
FLAGS.define("dry_run", False, "Say what would be done, write nothing.")


def index(values: Flags) -> None:
    """Index as the flags say."""
    values.require("embeddings", "to")
    from tfdml.retrieval import connect, index_embeddings
    from tfdml.retrieval.indexing import EmbeddingsToIndex

    # The address first: reading names may take a while.
    with connect(values.to) as gallery:
        embeddings = EmbeddingsToIndex.read(os.path.expanduser(values.embeddings), values.prefix)
        where = f"{gallery.address}, {gallery.distance}"
        done, total = embeddings.written_in(gallery), len(embeddings)
        if values.dry_run:
            print(
                f"would write {total:,} embeddings of {embeddings.stored.embeddings.shape[1]} dimensions, of which "
                f"{done:,} are there, to {where}; nothing was written (--dry_run)"
            )
            return
        if 0 < done < total:
            print(f"going on: {done:,} of {total:,} rows are there")
        started = time.monotonic()
        with Progress(total, done) as progress_line:
            written = index_embeddings(gallery, embeddings, progress_line.images)
        seconds = time.monotonic() - started
        print(
            f"{total:,} embeddings of {embeddings.stored.embeddings.shape[1]} dimensions in {where}; "
            + (f"{written:,} were written, in {seconds:,.1f} s" if written else "all were there")
        )
        others = len(gallery) - total
        if others:
            print(f"the gallery holds {others:,} more rows, of other embeddings")
        kind = gallery.address.index
        print(f"searched by the index {kind}" if kind else "searched exactly")


COMMAND = Command("index", index, FLAGS, USAGE, flag_of={"uri": "to"})
