"""tfdml embed: the embeddings of a data set, on disk."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from tfdml.cli import model_flags
from tfdml.cli.command_line import Command, Flags
from tfdml.cli.main import Progress
from tfdml.effects import Effect, both, needs
from tfdml.errors import UserError
from tfdml.io.files import require_local

if TYPE_CHECKING:
    from tfdml.data.dataset import ImageDataset
    from tfdml.embeddings.base import EmbeddingBackend
    from tfdml.embeddings.reader import ImageTable

USAGE = f"""
Write the embeddings of a data set, with the names, labels and roles of its images.

  tfdml embed --model=runs/cars_jrd --out=embeddings/cars
  tfdml embed --model=models/cars --dataset=cars196 --data_dir=/data/cars196 --split=all --out=embeddings/cars
  tfdml embed --model=http://localhost:8501/v1/models/cars --dataset=folder --data_dir=photos --out=embeddings/photos
  tfdml embed --model=runs/cars_jrd --out=embeddings/cars --dtype=int8
  tfdml embed --model=models/cars --cluster=local --input='/data/**/*.jpg' --out=embeddings/photos
  tfdml embed --model=models/cars --cluster=ray://head:10001 --input=list.parquet --out=/shared/embeddings/photos

{model_flags.SOURCES}

--out gets part-*.parquet, a row per image, and, last of all, manifest.json. Stopped at any moment, the same command
resumes after the last whole file and ends with the same bytes. tfdml evaluate --model=OUT measures the embeddings;
pyarrow.parquet.read_table, pandas and other Parquet tools read them.

With --cluster the images of --input are embedded over many processes, of this machine or of a cluster of Ray. --input
is a path or URL with * and **, a folder, or a list as --dataset=list reads it (*.csv, *.jsonl, *.parquet), of which
only path is required. Images that cannot be read are left out and listed in bad_images.csv.
"""

FLAGS = Flags()
model_flags.define_model_flags(FLAGS)
model_flags.define_data_flags(FLAGS)
FLAGS.define("out", "", "Folder to write: new, empty, or begun by the same command.")
FLAGS.define(
    "split",
    "test",
    "Images of the unseen or the training classes, or both; or one role of the test images.",
    ["test", "train", "all", "query", "gallery"],
)
FLAGS.define("dtype", "float32", "Vectors as they are, or 8 bits with a scale for each row.", ["float32", "int8"])
FLAGS.define("dry_run", False, "Say what would be done, write nothing.")
FLAGS.define("cluster", "", "Embed over Ray: local (processes of this machine), ray://host:10001 or host:6379.")
FLAGS.define("input", "", "With --cluster, which images: see above.")
FLAGS.define(
    "actors", 0, "With --cluster: processes that hold the model; 0: one per GPU, or per 4 CPUs.", lower_bound=0
)
FLAGS.define("rows_per_file", 4096, "Images of a Parquet file; a kill loses the files under way.", lower_bound=1)
FLAGS.define("quickest", True, "With --cluster, on CPUs: use an equal LiteRT or ONNX file next to a SavedModel.")


def embed(values: Flags) -> None:
    """Embed as the flags say."""
    values.require("model", "out")
    require_local(values.out, "out")
    if bool(values.cluster) != bool(values.input):
        missing = "input" if values.cluster else "cluster"
        raise UserError(f"--{missing} is missing: --cluster and --input go together")
    if values.cluster:
        _embed_in_bulk(values)
        return
    from tfdml.embeddings.reader import ImageTable
    from tfdml.embeddings.writer import EmbeddingWriter

    out = os.path.expanduser(values.out)
    choice = model_flags.chosen_data(values)
    source = model_flags.chosen_source(values)
    splits = [choice.load(split) for split in (("train", "test") if values.split == "all" else (values.split,))]
    table = ImageTable.of(splits, os.path.expanduser(choice.directory))
    embedding_writer = EmbeddingWriter(
        out, _identity(source, choice.name, table, values.batch_size), table, values.dtype, values.rows_per_file
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


def _identity(source: EmbeddingBackend, dataset: str, table: ImageTable, batch_size: int) -> dict[str, Any]:
    return {
        "model": source.checksum(),
        "kind of model": source.kind,
        "view": json.dumps(source.view, sort_keys=True),
        "dataset": dataset,
        "images": table.checksum(),
        "batch_size": batch_size,
    }


def _about(source: EmbeddingBackend, choice: model_flags.DataChoice, split: str) -> dict[str, Any]:
    return {
        "model": {"source": source.address, "kind": source.kind, "checksum": source.checksum()},
        "view": source.view,
        "dataset": {"name": choice.name, "options": choice.options, "split": split},
    }


def _stream(source: EmbeddingBackend, splits: list[ImageDataset], batch_size: int, done: int):
    """Yield the embeddings of all splits after the first `done` images; no batch holds images of two splits."""
    for dataset in splits:
        if done < len(dataset):
            yield from source.stream(dataset, batch_size, done)
        done = max(done - len(dataset), 0)


def _embed_in_bulk(values: Flags) -> None:
    """Embed a list of images, or all files of a pattern, over many processes."""
    from tfdml.cluster import bulk_embedding

    view = {name: values[name].value for name in ("resize", "resize_mode", "image_size", "pad_color")}
    out = os.path.expanduser(values.out)
    request = bulk_embedding.BulkRequest(
        model=os.path.expanduser(values.model),
        source=values.input,
        folder=out,
        cluster=values.cluster,
        actors=values.actors,
        batch_size=values.batch_size,
        dtype=values.dtype,
        rows_per_file=values.rows_per_file,
        quickest=values.quickest,
        options={name: value for name, value in view.items() if value},
    )
    if values.dry_run:
        print(f"would embed {values.input} by {values.model} into {out}; nothing was written (--dry_run)")
        return
    line, begun_with = None, 0

    def progress(done: int, bad: int, total: int) -> None:
        nonlocal line, begun_with
        if line is None:
            line, begun_with = Progress(total, done), done
            if done:
                print(f"resuming after {done:,} of {total:,} images")
        line.images(done)

    manifest, worked = bulk_embedding.embed_in_bulk(request, progress)
    if not worked:
        print(f"{out} is finished already: nothing to do")
        return
    count, bad = manifest["count"], manifest["bad_images"]
    seconds = line.seconds if line else 0.0
    rate = (count + bad - begun_with) / max(seconds, 1e-9)
    print(
        f"{count:,} embeddings of {manifest['dimension']} dimensions in {out}, by {manifest['model']['source']}, "
        f"{rate:,.0f} images a second"
    )
    if bad:
        print(f"{bad:,} images could not be read: {out}/bad_images.csv")


_ONE_PROCESS = Effect(lambda given: not given["cluster"], "a command without --cluster, whose images --input names")
COMMAND = Command(
    "embed",
    embed,
    FLAGS,
    USAGE,
    effects={
        **model_flags.EFFECTS,
        **dict.fromkeys(("dataset", "data_dir", "dataset_options", "split", "bad_images"), _ONE_PROCESS),
        "timeout": both(_ONE_PROCESS, model_flags.EFFECTS["timeout"]),
        **dict.fromkeys(("actors", "quickest"), needs("cluster")),
    },
    flag_of={"folder": "out", "source": "input"},
)
