"""The part of bin/export that builds a retriever: an embedder with a gallery that it searches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from tfdml.effects import both, needs
from tfdml.errors import UserError

if TYPE_CHECKING:
    from tfdml.export.exporter import ExportOptions
    from tfdml.export.gallery import GalleryItem, UnreadableItem

GALLERY = """
  bin/export --run_dir=runs/cars_jrd --gallery=photos --out=models/cars_retriever
  bin/export --embedder=models/cars --gallery=photos --out=models/cars_retriever
  bin/export --embedder=models/cars --gallery=/data/cars196 --gallery_dataset=cars196 --out=models/cars_retriever

With --gallery, a retriever is written: a SavedModel with the embedder and the gallery's embeddings, ids, labels and
metadata, and the signatures search_bytes, search_embedding and search_each. --gallery is a folder of class folders or
of images, or where --gallery_dataset lies. The embedder is that of a run, compared as above before it is used, or, with
--embedder, one that was exported before."""

flags.DEFINE_string("gallery", "", "Build a retriever of the images here.", module_name=__name__)
flags.DEFINE_string(
    "embedder", "", "With --gallery: an exported version, or a folder of them, in place of a run.", module_name=__name__
)
flags.DEFINE_string(
    "gallery_dataset", "", "With --gallery: a data set, as in bin/train, not a folder of images.", module_name=__name__
)
flags.DEFINE_string("gallery_dataset_options", "", "Its options, as in bin/train.", module_name=__name__)
flags.DEFINE_enum(
    "gallery_split", "test", ["test", "train", "all", "gallery"], "Which of its images.", module_name=__name__
)
flags.DEFINE_enum(
    "gallery_bad_images", "error", ["error", "skip"], "What to do with unreadable images.", module_name=__name__
)
flags.DEFINE_integer(
    "exact_limit", 200_000, "Galleries of more images get a faiss index.", lower_bound=0, module_name=__name__
)
flags.DEFINE_float(
    "index_recall", 0.99, "Recall@10 that such an index is to reach, as a fraction.", module_name=__name__
)

_OF_DATASET = both(needs("gallery"), needs("gallery_dataset"))
EFFECTS = {
    **dict.fromkeys(
        ("embedder", "gallery_dataset", "gallery_bad_images", "exact_limit", "index_recall"), needs("gallery")
    ),
    "gallery_dataset_options": _OF_DATASET,
    "gallery_split": _OF_DATASET,
}


def export_gallery(options: ExportOptions, report: Callable[[str], None]) -> None:
    """Build a retriever as the flags say.

    Args:
        options: How the embedder of a run is exported first.
        report: Called with a line on each step.

    Raises:
        UserError: The flags do not go together, an image is bad, or the folder cannot be written.
    """
    values = flags.FLAGS
    if bool(values.run_dir) == bool(values.embedder):
        raise UserError("--gallery needs the embedder: --run_dir or --embedder, one of the two")
    if "saved_model" not in options.formats:
        raise UserError("--gallery makes a SavedModel: leave --formats alone")
    if not 0 < values.index_recall <= 1:
        raise UserError(f"--index_recall={values.index_recall}: must be a fraction above 0")
    from tfdml.export.retriever import Retriever, newest_version
    from tfdml.io.files import scratch_folder

    items = gallery_items()
    if values.dry_run:
        next(items)
        if values.embedder:
            newest_version(Path(values.embedder))
        print(f"would build a retriever of {values.gallery} in {values.out}; nothing was written (--dry_run)")
        return
    with scratch_folder() as folder:
        embedder = values.embedder
        if values.run_dir:
            from tfdml.export.exporter import export_run

            embedder = export_run(
                values.run_dir, folder, options, values.moment_embedder, values.data_dir, report, whitening()
            )
        built = Retriever.build(
            embedder,
            items,
            values.out,
            exact_limit=values.exact_limit,
            recall=values.index_recall,
            skip_bad=values.gallery_bad_images == "skip",
            report=report,
        )
    index = built.card["index"]
    found = f", faiss index with recall@10 {index['recall@10']:.4f}" if index else ""
    report(f"{len(built):,} items of {built.card['classes']:,} classes, {built.card['kind']}{found}")
    print(f"version: {built.path}")


def whitening() -> dict[str, Any] | None:
    """The arguments of `--whitening`; None where it is not given."""
    from tfdml.training.expressions import parse_arguments

    text = flags.FLAGS.whitening
    return parse_arguments(text, "--whitening") if text else None


def gallery_items() -> Iterator[GalleryItem | UnreadableItem]:
    """The items that the flags mean, read when their turn comes."""
    from tfdml.export.gallery import items_of_dataset, items_of_folder

    values = flags.FLAGS
    if not values.gallery_dataset:
        return items_of_folder(values.gallery)
    from tfdml import data
    from tfdml.training.expressions import parse_arguments

    arguments = parse_arguments(values.gallery_dataset_options, "--gallery_dataset_options")
    splits = ("train", "test") if values.gallery_split == "all" else (values.gallery_split,)
    directory = os.path.expanduser(values.gallery)
    datasets = [data.load(values.gallery_dataset, directory, split, **arguments) for split in splits]
    return (item for dataset in datasets for item in items_of_dataset(dataset, directory))
