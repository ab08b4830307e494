r"""Export the embedder of a run.

  tfdml export --run_dir=runs/cars_jrd --out=models/cars
  tfdml export --run_dir=runs/cars_jrd --out=models/cars --formats=saved_model,litert
  tfdml export --run_dir=runs/cars_jrd --out=models/cars --formats=all --images=0
  tfdml export --run_dir=runs/cars_jrd --out=models/cars --whitening='dim=64, power=0.5'
  tfdml export --run_dir=runs/cars_matryoshka --out=models/cars --truncate_dim=32
  tfdml export --run_dir=runs/head --stack_on=runs/cars_jrd --out=models/cars_head

Writes the next version below --out, e.g. models/cars/1, atomically; earlier versions stay. Formats:
saved_model; litert_float32, litert_float16, litert_dynamic_range, litert_int8, or litert for the
four; onnx; all. Each is run on images of the run's test split and compared with the Keras embedder;
where one differs by more than its tolerance, nothing is written and the exit status is 2.
model_card.json has the numbers.

--calibrate=far=0.001 chooses the Euclidean distance up to which two images are the same, on these
images, for each format by its own vectors. A search meets a whole gallery: for that,
--calibrate=fpir=0.01 chooses the distance within which at most 1 % of the queries of unknown
classes find anything. model_card.json has the threshold.

  tfdml export --run_dir=runs/cars_jrd --gallery=photos --out=models/cars_retriever
  tfdml export --embedder=models/cars --gallery=photos --out=models/cars_retriever
  tfdml export --embedder=models/cars --gallery=/data/cars196 --gallery_dataset=cars196 \
      --out=models/cars_retriever

With --gallery, a retriever is written: a SavedModel with the embedder and the gallery's embeddings,
ids, labels and metadata, and the signatures search_bytes, search_embedding and search_each.
--gallery is a folder of class folders or of images, or where --gallery_dataset lies. The embedder
is that of a run, compared as above before it is used, or, with --embedder, one that was exported
before. By default --calibrate=fpir=0.01 is chosen on the images of the gallery whose classes were
not trained on, where they can show it. Searches then have the outputs accepted and known.
"""

import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfdml import data
from tfdml.cli.command_line import Command, CommandFlags, Flags
from tfdml.cli.model_flags import check_ended
from tfdml.errors import UserError
from tfdml.evaluation import target_of
from tfdml.evaluation.classification import TARGETS
from tfdml.export.exporter import ExportOptions, export_run
from tfdml.export.retriever import Retriever
from tfdml.export.saved_model import check_backend
from tfdml.expressions import parse_arguments
from tfdml.flags import Effect, both, needs
from tfdml.io.files import as_named, require_local
from tfdml.training.settings import choice, not_negative

_FROM_RUN = Effect(lambda values: not values["embedder"], "--run_dir in place of --embedder")
_GALLERY = needs("gallery")
_OF_DATASET = both(_GALLERY, needs("gallery_dataset"))
_INTEGERS = Effect(
    lambda values: bool({"litert_int8", "litert", "all"} & {*values["formats"]}),
    "--formats with litert_int8",
)
_COMPARED = ("images", "max_pixels", "min_cosine", "max_recall_drop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportFlags(CommandFlags):
    """What is exported, and where.

    Args:
        run_dir: Folder of the run.
        unfinished: Take the best embedder so far of a run that has not ended.
        out: Folder of the exported versions.
        moment_embedder: Export moments.keras, which searches with all moments.
        whitening: Add a PCA whitening of the training images: 'dim=64, power=0.5, shrinkage=0'.
        truncate_dim: Keep the first N dimensions of the vector, scaled to length 1; 0: all.
        stack_on: The run of the embedder that a head's vectors come from: export both as one.
        data_dir: Where the data set of the run, or of --stack_on, lies, if it has moved.
        gallery: Build a retriever of the images here.
        embedder: An exported version, or a folder of them, in place of a run.
        gallery_dataset: A data set, as in tfdml train, in place of a folder.
        gallery_dataset_options: Its options, as in tfdml train.
        gallery_split: Which of its images.
        gallery_bad_images: What to do with unreadable images.
    """

    run_dir: str = ""
    unfinished: bool = choice(False, effect=_FROM_RUN)
    out: str
    moment_embedder: bool = choice(False, effect=_FROM_RUN)
    whitening: str = choice("", effect=_FROM_RUN)
    truncate_dim: int = choice(0, check=not_negative, effect=_FROM_RUN)
    stack_on: str = choice("", effect=_FROM_RUN)
    data_dir: str = choice("", effect=_FROM_RUN)
    gallery: str = ""
    embedder: str = choice("", effect=_GALLERY)
    gallery_dataset: str = choice("", effect=_GALLERY)
    gallery_dataset_options: str = choice("", effect=_OF_DATASET)
    gallery_split: str = choice(
        "test", choices=("test", "train", "all", "gallery"), effect=_OF_DATASET
    )
    gallery_bad_images: str = choice("error", choices=("error", "skip"), effect=_GALLERY)


_EFFECTS = {**dict.fromkeys(_COMPARED, _FROM_RUN), "representative_images": _INTEGERS}
FLAGS = Flags(ExportFlags, ExportOptions, effects=_EFFECTS)


def export(values: Flags) -> None:
    """Export as the flags say."""
    flags, options = values.settings(ExportFlags), values.settings(ExportOptions)
    if not (flags.gallery or flags.run_dir):
        raise UserError("--run_dir is missing")
    check_backend()
    require_local(flags.out, "out")
    for folder in (flags.run_dir, flags.stack_on):
        check_ended(folder, flags.unfinished)
    whitening = parse_arguments(flags.whitening, "--whitening") if flags.whitening else None
    report = functools.partial(print, flush=True)
    run, moments, data_dir = flags.run_dir, flags.moment_embedder, flags.data_dir
    changes = whitening, flags.truncate_dim, flags.stack_on
    if flags.gallery:
        if "saved_model" not in options.formats:
            raise UserError("--gallery makes a SavedModel: leave --formats alone")
        if options.calibrate.startswith(TARGETS):
            target_of(options.calibrate, "calibrate", kinds=("fpir",))
        plain = dataclasses.replace(options, calibrate="none")
        _export_gallery(
            flags,
            options.calibrate,
            lambda folder: export_run(run, folder, plain, moments, data_dir, report, *changes),
        )
        return
    version = export_run(run, flags.out, options, moments, data_dir, report, *changes)
    print(f"version: {as_named(version)}")
    if "saved_model" not in options.formats:
        print(f"It holds no SavedModel: do not let TF Serving watch {flags.out}.")


def _export_gallery(
    flags: ExportFlags, calibration: str, export_embedder: Callable[[str], Path]
) -> None:
    """Build a retriever as the flags say.

    Args:
        flags: The flags.
        calibration: As `ExportOptions.calibrate`.
        export_embedder: Exports the embedder of the run to a folder.

    Raises:
        UserError: The flags do not go together, an image is bad, or the folder cannot be written.
    """
    if bool(flags.run_dir) == bool(flags.embedder):
        raise UserError("--gallery needs the embedder: --run_dir or --embedder, one of the two")
    directory = os.path.expanduser(flags.gallery)
    images = _gallery_images(flags, directory)
    options: dict[str, Any] = {
        "directory": directory,
        "skip_bad": flags.gallery_bad_images == "skip",
        "report": print,
    }
    with tempfile.TemporaryDirectory() as folder:
        embedder = flags.embedder or export_embedder(folder)
        built = Retriever.build(embedder, images, flags.out, calibration=calibration, **options)
    print(f"{len(built):,} items of {built.card['classes']:,} classes")
    print(f"version: {as_named(built.path)}")


def _gallery_images(flags: ExportFlags, directory: str) -> list[data.ImageDataset]:
    """Return the images that the flags mean."""
    if not flags.gallery_dataset:
        return [data.load("folder", directory, "all")]
    arguments = parse_arguments(flags.gallery_dataset_options, "--gallery_dataset_options")
    splits = ("train", "test") if flags.gallery_split == "all" else (flags.gallery_split,)
    return [data.load(flags.gallery_dataset, directory, split, **arguments) for split in splits]


COMMAND = Command(
    "export",
    export,
    FLAGS,
    __doc__,
    flag_of={"folder": "out", "options": "gallery_dataset_options"},
)
