"""bin/embed --cluster: the embeddings of a list of images or of all files of a pattern, over many processes."""

from __future__ import annotations

import os

from absl import flags

from tfdml.cli.progress import Progress
from tfdml.errors import UserError

flags.DEFINE_string(
    "cluster",
    "",
    "Embed over Ray: local (processes of this machine), ray://host:10001 or host:6379 (a cluster that runs).",
    module_name=__name__,
)
flags.DEFINE_string(
    "input",
    "",
    "With --cluster, which images: paths or URLs with * and **, a folder, or a list, *.parquet or *.csv, with the "
    "column path and, where known, label and role.",
    module_name=__name__,
)
flags.DEFINE_integer(
    "actors",
    0,
    "With --cluster: how many processes hold the model; 0: one for each GPU, else one for every 4 CPUs.",
    lower_bound=0,
    module_name=__name__,
)
flags.DEFINE_integer(
    "rows_per_file",
    4096,
    "Images of a Parquet file, which one process embeds at a time; a kill loses the files under way.",
    lower_bound=1,
    module_name=__name__,
)
flags.DEFINE_bool(
    "quickest",
    True,
    "With --cluster, on CPUs: in place of a SavedModel take the LiteRT file beside it, or else the ONNX file, of which "
    "the model card says that it gives the same vectors.",
    module_name=__name__,
)


def asked_for() -> bool:
    """Whether the flags ask for a bulk pass.

    Raises:
        UserError: They ask for half of one.
    """
    values = flags.FLAGS
    if bool(values.cluster) != bool(values.input):
        missing = "input" if values.cluster else "cluster"
        raise UserError(f"--{missing} is missing: --cluster and --input go together")
    return bool(values.cluster)


def embed_in_bulk() -> None:
    """Embed as the flags say."""
    from tfdml.cluster import bulk_embedding

    values = flags.FLAGS
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
