"""Write the embeddings of a data set, with the names, labels, roles and groups of its images.

  tfdml embed --model=runs/cars_jrd --out=embeddings/cars
  tfdml embed --model=models/cars --dataset=cars196 --data_dir=/data/cars196 --split=all --out=embeddings/cars
  tfdml embed --model=runs/cars_jrd --truncate_dim=32 --out=embeddings/cars32
  tfdml embed --model=runs/head --features=new.parquet --out=embeddings/new
  tfdml embed --model=models/cars --cluster=local --input='/data/**/*.jpg' --out=embeddings/photos

--out gets part-*.parquet, a row per image, and, last of all, manifest.json. The same command resumes after the last
whole file and ends with the same bytes. tfdml evaluate --model=OUT measures the embeddings.

With --cluster the images of --input are embedded over many processes: files, paths or URLs with * and **, folders (the
flag may be repeated), or one list as --dataset=list reads it, of which only path is required. Bad images are listed in
bad_images.csv.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from tfdml.cli.command_line import Command, Flags, Progress
from tfdml.cli.model_flags import DataFlags, data_choice, load_source
from tfdml.cluster import bulk_embedding
from tfdml.effects import Effect, needs
from tfdml.embeddings.files import EmbeddingWriter, ImageTable
from tfdml.errors import UserError
from tfdml.io.files import as_named
from tfdml.training.settings import choice, not_negative, positive

_ONE_PROCESS = Effect(lambda values: not values["cluster"], "a command without --cluster, whose images --input names")
_OF_DATA = ("dataset", "features", "data_dir", "dataset_options", "bad_images")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedFlags(DataFlags):
    """What embeds which images, and where the embeddings are written.

    Args:
        out: Folder to write: new, empty, or begun by the same command.
        split: Images of unseen or training classes, or both; or one role of the test images.
        dtype: Vectors as they are, or 8 bits with a scale for each row.
        dry_run: Say what would be done, write nothing.
        cluster: Embed over Ray: local (processes of this machine), ray://host:10001 or host:6379.
        input: With --cluster, which images: see above.
        actors: Processes with the model; 0: one per GPU, or per 4 CPUs.
        rows_per_file: Images of a Parquet file; a kill loses the files under way.
    """

    model: str = choice(dataclasses.MISSING)
    out: str
    split: str = choice("test", choices=("test", "train", "all", "query", "gallery"), effect=_ONE_PROCESS)
    dtype: str = choice("float32", choices=("float32", "int8"))
    dry_run: bool = False
    cluster: str = ""
    input: Sequence[str] = choice((), paths=True)
    actors: int = choice(0, check=not_negative, effect=needs("cluster"))
    rows_per_file: int = choice(4096, check=positive)


def embed(values: Flags) -> None:
    """Embed as the flags say."""
    flags = values.settings(EmbedFlags)
    if bool(flags.cluster) != bool(flags.input):
        missing = "input" if flags.cluster else "cluster"
        raise UserError(f"--{missing} is missing: --cluster and --input go together")
    out = os.path.expanduser(flags.out)
    if flags.cluster:
        _embed_in_bulk(flags, out)
        return
    choice = data_choice(flags)
    source = load_source(flags)
    splits = choice.parts(flags.split)
    table = ImageTable.of(splits, os.path.expanduser(choice.directory))
    identity = {
        "model": source.checksum(),
        "kind of model": source.kind,
        "view": json.dumps(source.view, sort_keys=True),
        "dataset": choice.name,
        "images": table.checksum(),
        "batch_size": flags.batch_size,
    }
    embedding_writer = EmbeddingWriter(out, identity, table, flags.dtype, flags.rows_per_file)
    if flags.dry_run:
        embedding_writer.read()
        images, model = f"{len(table):,} images of {choice.name}, {flags.split}", as_named(source.address)
        print(f"would write embeddings of {images}, by {model} to {out}; nothing was written (--dry_run)")
        return
    with embedding_writer as writer:
        if writer.manifest:
            print(f"{out} is finished already: nothing to do")
            return
        with _resumed(len(table), skipped := writer.rows) as progress:
            for dataset in splits:  # no batch holds images of two splits
                if skipped < len(dataset):
                    for vectors in source.stream(dataset, flags.batch_size, skipped):
                        writer.append(vectors)
                        progress.images(writer.rows)
                skipped = max(skipped - len(dataset), 0)
            rate = progress.rate(writer.rows)
        names = {"source": source.address, "kind": source.kind}
        by = {**names, "checksum": source.checksum(), "fingerprint": source.fingerprint()}
        about = {"name": choice.name, "options": choice.options, "split": flags.split}
        manifest = writer.finish({"model": by, "view": source.view, "dataset": about})
    print(f"{manifest['count']:,} embeddings of {manifest['dimension']} dimensions in {out}, {rate}")


def _resumed(total: int, done: int) -> Progress:
    if done:
        print(f"resuming after {done:,} of {total:,} images")
    return Progress(total, done)


def _embed_in_bulk(flags: EmbedFlags, out: str) -> None:
    """Embed the images of `--input` over many processes."""
    names = ("cluster", "actors", "batch_size", "dtype", "rows_per_file", "truncate_dim")
    options: dict[str, Any] = {name: getattr(flags, name) for name in names}
    source = flags.input[0] if len(flags.input) == 1 else flags.input
    request = bulk_embedding.BulkRequest(as_named(os.path.expanduser(flags.model)), source, out, **options)
    if flags.dry_run:
        images = f"{len(bulk_embedding.images_of(source)):,} images of {','.join(flags.input)}"
        print(f"would embed {images} by {as_named(flags.model)} into {out}; nothing was written (--dry_run)")
        return
    lines: list[Progress] = []

    def progress(done: int, bad: int, total: int) -> None:
        if not lines:
            lines.append(_resumed(total, done))
        lines[0].images(done, total, bad)

    manifest, worked = bulk_embedding.embed_in_bulk(request, progress)
    if not worked:
        print(f"{out} is finished already: nothing to do")
        return
    count, bad = manifest["count"], manifest["bad_images"]
    by = f"by {manifest['model']['source']}, {lines[0].rate(count + bad) if lines else 'all was done before'}"
    print(f"{count:,} embeddings of {manifest['dimension']} dimensions in {out}, {by}")
    if bad:
        print(f"{bad:,} images could not be read: {out}/bad_images.csv")


COMMAND = Command(
    "embed",
    embed,
    Flags(EmbedFlags, effects=dict.fromkeys(_OF_DATA, _ONE_PROCESS)),
    __doc__,
    flag_of={"folder": "out", "source": "input"},
)
