"""Write the embeddings of a data set into a database, where they are searched.

  tfdml index --embeddings=embeddings/cars --to=lancedb:///data/galleries
  tfdml index --embeddings=embeddings/cars --to='pgvector://user:password@host:5432/shop?index=hnsw&links=16'
  tfdml index --embeddings=embeddings/cars --to=qdrant://localhost:6333 --prefix=cars/ --truncate_dim=32

A row's id is the name of its image; path, label, role and source are its attributes. Rows whose id is there are
replaced. The same command resumes after the last whole batch. tfdml search --gallery=URI searches it.

--to names the database; options follow as ?name=value&name=value, in quotes for the shell:
  table       the table or collection (default gallery)
  distance    euclidean (default), sqeuclidean, cosine or dot, for a new table
  index       an approximate index, by the database: ivf, hnsw, and for lancedb ivf_pq; without it the search is exact
  lists, links, bytes, effort, refine    its parameters, see docs/galleries.md
A password may also come from the environment (PGPASSWORD) and is never printed.
"""

import os

from tfdml.cli.command_line import Command, Flags, Progress
from tfdml.retrieval import connect, index_embeddings
from tfdml.retrieval.indexing import EmbeddingsToIndex

FLAGS = Flags()
FLAGS.define("embeddings", "", "A folder that tfdml embed wrote, or a Parquet, .npz or .npy file.")
FLAGS.define("to", "", "The gallery's address, see above.")
FLAGS.define("prefix", "", "Put before the name of each image, for its id.")
FLAGS.define("truncate_dim", 0, "Keep the first N dimensions, scaled to length 1; 0: all, as they are.", lower_bound=0)
FLAGS.define("dry_run", False, "Say what would be done, write nothing.")


def index(values: Flags) -> None:
    """Index as the flags say."""
    values.require("embeddings", "to")

    # The address first: reading names may take a while.
    with connect(values.to) as gallery:
        embeddings = EmbeddingsToIndex.read(os.path.expanduser(values.embeddings), values.prefix, values.truncate_dim)
        where = f"{gallery.address}, {gallery.distance}"
        done, (total, dimension) = embeddings.written_in(gallery), (len(embeddings), embeddings.dimension)
        if values.dry_run:
            print(
                f"would write {total:,} embeddings of {dimension} dimensions, of which {done:,} are there, to {where}"
            )
            print("nothing was written (--dry_run)")
            return
        if 0 < done < total:
            print(f"resuming: {done:,} of {total:,} rows are there")
        with Progress(total, done) as progress_line:
            written = index_embeddings(gallery, embeddings, progress_line.images)
        print(f"{total:,} embeddings of {dimension} dimensions in {where}; {written:,} were written")
        if others := len(gallery) - total:
            print(f"the gallery holds {others:,} more rows, of other embeddings")
        print(f"searched by the index {gallery.address.index}" if gallery.address.index else "searched exactly")


COMMAND = Command("index", index, FLAGS, __doc__, flag_of={"uri": "to"})
