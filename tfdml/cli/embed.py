"""bin/embed: the embeddings of a data set, on disk."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from absl import flags

from tfdml.cli import bulk, model_flags
from tfdml.cli import main as command_line
from tfdml.cli.progress import Progress
from tfdml.effects import Effect, both, needs
from tfdml.errors import UserError
from tfdml.io.files import require_local

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset
    from tfdml.embeddings.backends import EmbeddingBackend
    from tfdml.embeddings.reader import ImageTable

USAGE = f"""
Write the embeddings of a data set, with the names, labels and roles of its images.

  bin/embed --model=runs/cars_jrd --out=embeddings/cars
  bin/embed --model=models/cars --dataset=cars196 --data_dir=/data/cars196 --split=all --out=embeddings/cars
  bin/embed --model=grpc://localhost:8500/cars --dataset=folder --data_dir=photos --out=embeddings/photos
  bin/embed --model=runs/cars_jrd --out=embeddings/cars --dtype=int8
  bin/embed --model=models/cars --cluster=local --input='/data/**/*.jpg' --out=embeddings/photos
  bin/embed --model=models/cars --cluster=ray://head:10001 --input=list.parquet --out=/shared/embeddings/photos

{model_flags.SOURCES}

--out gets part-*.parquet, a row per image, and, last of all, manifest.json. Stopped at any moment, the same command
resumes after the last whole file and ends with the same bytes. bin/evaluate --model=OUT measures the embeddings;
pyarrow.parquet.read_table, pandas and other Parquet tools read them.

With --cluster the images of --input are embedded over many processes, of this machine or of a cluster of Ray. Images
that cannot be read are left out and listed in bad_images.csv.
"""

flags.DEFINE_string("out", "", "Folder to write: new, empty, or begun by the same command.", module_name=__name__)
flags.DEFINE_enum(
    "split",
    "test",
    ["test", "train", "all", "query", "gallery"],
    "Which images: of the unseen classes, of the training classes, or both; or one role of the test images.",
    module_name=__name__,
)
flags.DEFINE_enum(
    "dtype",
    "float32",
    ["float32", "int8"],
    "Of the vectors: as they are, or 8 bits with a scale for each row, in a quarter of the space.",
    module_name=__name__,
)
flags.DEFINE_bool("dry_run", False, "Say what would be done, write nothing.", module_name=__name__)

_ONE_PROCESS = Effect(lambda given: not given["cluster"], "a command without --cluster, whose images --input names")
EFFECTS = command_line.Effects(
    {
        **model_flags.EFFECTS,
        **dict.fromkeys(("dataset", "data_dir", "dataset_options", "split", "bad_images"), _ONE_PROCESS),
        "timeout": both(_ONE_PROCESS, model_flags.EFFECTS["timeout"]),
        **dict.fromkeys(("actors", "quickest"), needs("cluster")),
    },
    frozenset({"model", "out", "dtype", "batch_size", "rows_per_file", "cluster", "input", "dry_run"}),
)

# The flags whose names are not those of the arguments that they set.
FLAG_OF = {"folder": "out", "source": "input"}


def embed() -> None:
    """Embed as the flags say."""
    values = flags.FLAGS
    for name in ("model", "out"):
        if not values[name].value:
            raise UserError(f"--{name} is missing")
    require_local(values.out, "out")
    if bulk.asked_for():
        bulk.embed_in_bulk()
        return
    from tfdml.embeddings.reader import ImageTable
    from tfdml.embeddings.writer import EmbeddingWriter

    out = os.path.expanduser(values.out)
    choice = model_flags.chosen_data(values.model)
    source = model_flags.chosen_source(values.model)
    splits = [choice.load(split) for split in (("train", "test") if values.split == "all" else (values.split,))]
    table = ImageTable.of(splits, os.path.expanduser(choice.directory))
    embedding_writer = EmbeddingWriter(
        out, _identity(source, choice.name, table), table, values.dtype, values.rows_per_file
    )
    written = embedding_writer.written()
    if values.dry_run:
        begun = f", of which {written:,} are written" if written else ""
        print(
            f"{out} is finished already: nothing would be done (--dry_run)"
            if written == len(table)
            else f"would write embeddings of {len(table):,} images of {choice.name}, {values.split}{begun}, by "
            f"{source.address} to {out}; nothing was written (--dry_run)"
        )
        return
    with embedding_writer as writer:
        if writer.manifest:
            print(f"{out} is finished already: nothing to do")
            return
        if writer.rows:
            print(f"resuming after {writer.rows:,} of {len(table):,} images")
        begun_with = writer.rows
        with Progress(len(table), begun_with) as progress_line:
            for vectors in _stream(source, splits, values.batch_size, begun_with):
                writer.append(vectors)
                progress_line.images(writer.rows)
            seconds = progress_line.seconds
        manifest = writer.finish(_about(source, choice, values.split))
    rate = (len(table) - begun_with) / max(seconds, 1e-9)
    print(
        f"{manifest['count']:,} embeddings of {manifest['dimension']} dimensions in {out}, {rate:,.0f} images a second"
    )


def _identity(source: EmbeddingBackend, dataset: str, table: ImageTable) -> dict[str, Any]:
    return {
        "model": source.checksum(),
        "kind of model": source.kind,
        "view": json.dumps(source.view, sort_keys=True),
        "dataset": dataset,
        "images": table.checksum(),
        "batch_size": flags.FLAGS.batch_size,
    }


def _about(source: EmbeddingBackend, choice: model_flags.DataChoice, split: str) -> dict[str, Any]:
    return {
        "model": {"source": source.address, "kind": source.kind, "checksum": source.checksum()},
        "view": source.view,
        "dataset": {"name": choice.name, "options": choice.options, "split": split},
    }


def _stream(source: EmbeddingBackend, splits: list[ImageDataset], batch_size: int, done: int):
    """The embeddings of all splits after the first `done` images; no batch holds images of two splits."""
    for dataset in splits:
        if done < len(dataset):
            yield from source.stream(dataset, batch_size, done)
        done = max(done - len(dataset), 0)


def main() -> None:
    """Entry point."""
    command_line.run(embed, "embed", USAGE, flag_of=FLAG_OF, effects=EFFECTS)


if __name__ == "__main__":
    main()
