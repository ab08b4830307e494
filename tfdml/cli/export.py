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
--per_class=mean finds classes, by the mean of each, and max_of_means by several means of each.

  tfdml export --examples=export

With --examples, the files that serve a model are written: a client, the models and batches of
TensorFlow Serving, Docker Compose, Kubernetes and Ray Serve.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tfdml.cli.command_line import Command, Flags
from tfdml.cli.model_flags import check_ended
from tfdml.errors import ERROR_TEXT, UserError, counted, user_errors
from tfdml.export.options import ExportOptions
from tfdml.expressions import Arguments
from tfdml.io.files import printable, require_local
from tfdml.options import changed, condition, fields_of, option
from tfdml.registry import PER_CLASS
from tfdml.version import package_folder

if TYPE_CHECKING:
    from tfdml import data

_FROM_RUN = "no embedder"
_OF_DATASET = "gallery and gallery_dataset"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportFlags(ExportOptions):
    """What is exported, and where."""

    title: ClassVar[str] = "What is exported, and where"

    images: int = changed(ExportOptions, "images", requires=_FROM_RUN)
    representative_images: int = changed(
        ExportOptions, "representative_images", requires="quantizes"
    )
    max_pixels: int = changed(ExportOptions, "max_pixels", requires=_FROM_RUN)
    min_cosine: float | None = changed(ExportOptions, "min_cosine", requires=_FROM_RUN)
    max_recall_drop: float | None = changed(ExportOptions, "max_recall_drop", requires=_FROM_RUN)
    run_dir: str = option("", help="Folder of the run.")
    unfinished: bool = option(
        False,
        requires=_FROM_RUN,
        help="Take the best embedder so far of a run that has not ended.",
    )
    out: str = option("", help="Folder of the exported versions.")
    examples: str = option(
        "", help="Write the files that serve a model to this folder, and export nothing."
    )
    moment_embedder: bool = option(
        False,
        requires=_FROM_RUN,
        help="Export moments.keras, which searches with all moments.",
    )
    whitening: Arguments = option(
        Arguments(),
        requires=_FROM_RUN,
        help="Add a PCA whitening of the training images: 'dim=64, power=0.5, shrinkage=0'.",
    )
    truncate_dim: int = option(
        0,
        at_least=0,
        requires=_FROM_RUN,
        help="Keep the first N dimensions of the vector, scaled to length 1; 0: all.",
    )
    stack_on: str = option(
        "",
        requires=_FROM_RUN,
        help="The run of the embedder that a head's vectors come from: export both as one.",
    )
    data_dir: str = option(
        "",
        requires=_FROM_RUN,
        help="Where the data set of the run, or of --stack_on, lies, if it has moved.",
    )
    gallery: str = option("", help="Build a retriever of the images here.")
    embedder: str = option(
        "",
        requires="gallery",
        help="An exported version, or a folder of them, in place of a run.",
    )
    gallery_dataset: str = option(
        "", requires="gallery", help="A data set, as in tfdml train, in place of a folder."
    )
    gallery_dataset_options: Arguments = option(
        Arguments(), requires=_OF_DATASET, help="Its options, as in tfdml train."
    )
    gallery_split: str = option(
        "test",
        words=("test", "train", "all", "gallery"),
        requires=_OF_DATASET,
        help="Which of its images.",
    )
    gallery_bad_images: str = option(
        "error",
        words=("error", "skip"),
        requires="gallery",
        help="What to do with unreadable images.",
    )

    per_class: str = option(
        "nearest",
        words=PER_CLASS,
        requires="gallery",
        help="What stands for a class: each image, or means, which find classes.",
    )

    @condition("--formats with litert_int8")
    def quantizes(self) -> bool:
        """Whether ranges are measured."""
        return not {"litert_int8", "litert", "all"}.isdisjoint(self.formats)


def export(flags: ExportFlags) -> None:
    """Export as the flags say."""
    if flags.examples:
        if flags.run_dir or flags.gallery or flags.out:
            raise UserError("stands alone: it exports nothing", examples=...)
        _write_examples(Path(os.path.expanduser(flags.examples)))
        return
    from tfdml.evaluation import target_of
    from tfdml.evaluation.calibration import TARGETS
    from tfdml.export.exporter import export_run
    from tfdml.export.saved_model import check_backend

    options = ExportOptions(**{name: getattr(flags, name) for name in fields_of(ExportOptions)})
    if not (flags.gallery or flags.run_dir):
        raise UserError("is missing", run_dir=...)
    if not flags.out:
        raise UserError("is missing", out=...)
    check_backend()
    require_local(flags.out, "out")
    for folder in (flags.run_dir, flags.stack_on):
        check_ended(folder, flags.unfinished)
    export_embedder = functools.partial(
        export_run,
        flags.run_dir,
        moments=flags.moment_embedder,
        data_dir=flags.data_dir,
        report=functools.partial(print, flush=True),
        whitening=flags.whitening or None,
        truncate_dim=flags.truncate_dim,
        stack_on=flags.stack_on,
    )
    if flags.gallery:
        if "saved_model" not in options.formats:
            raise UserError("makes a SavedModel: leave --formats alone", gallery=...)
        if options.calibrate.startswith(TARGETS):
            target_of(options.calibrate, "calibrate", kinds=("fpir",))
        # The threshold is that of the retriever.
        plain = dataclasses.replace(options, calibrate="none")
        export_embedder = functools.partial(export_embedder, options=plain)
        _export_gallery(flags, options.calibrate, export_embedder)
        return
    version = export_embedder(flags.out, options)
    print(f"version: {printable(version)}")
    if "saved_model" not in options.formats:
        print(f"It holds no SavedModel: do not let TF Serving watch {flags.out}.")


def _write_examples(folder: Path) -> None:
    """Write the files that serve a model to a folder.

    Raises:
        UserError: One of them is there already, or the folder cannot be written.
    """
    files = sorted(package_folder("serving", "export").iterdir())
    sources = [path for path in files if path.is_file() and path.suffix != ".md"]
    for source in sources:
        if (folder / source.name).exists():
            raise UserError(f"has {source.name} already: name another folder", examples=folder)
    with user_errors(OSError, f"cannot be written ({ERROR_TEXT})", examples=folder):
        folder.mkdir(parents=True, exist_ok=True)
        for source in sources:
            shutil.copyfile(source, folder / source.name)
    for source in sources:
        print(printable(folder / source.name))


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
    from tfdml.export.retriever import Retriever

    if bool(flags.run_dir) == bool(flags.embedder):
        raise UserError("needs the embedder: --run_dir or --embedder, one of the two", gallery=...)
    directory = os.path.expanduser(flags.gallery)
    images = _gallery_images(flags, directory)
    options: dict[str, Any] = {
        "directory": directory,
        "skip_bad": flags.gallery_bad_images == "skip",
        "per_class": flags.per_class,
        "report": print,
    }
    with tempfile.TemporaryDirectory() as folder:
        embedder = flags.embedder or export_embedder(folder)
        built = Retriever.build(embedder, images, flags.out, calibration=calibration, **options)
    rule = "" if flags.per_class == "nearest" else f", by per_class={flags.per_class}"
    print(f"{counted(built.card['items'], 'item')} of {built.card['classes']:,} classes{rule}")
    print(f"version: {printable(built.path)}")


def _gallery_images(flags: ExportFlags, directory: str) -> list[data.ImageDataset]:
    """Return the images that the flags mean."""
    from tfdml import data

    if not flags.gallery_dataset:
        return [data.load("folder", directory, "all")]
    arguments = flags.gallery_dataset_options
    splits = ("train", "test") if flags.gallery_split == "all" else (flags.gallery_split,)
    return [data.load(flags.gallery_dataset, directory, split, **arguments) for split in splits]


COMMAND = Command(
    "export",
    export,
    Flags(ExportFlags),
    __doc__,
    flag_of={"folder": "out", "options": "gallery_dataset_options"},
)
