"""bin/export: from a run folder to models that are served."""

from __future__ import annotations

import keras
from absl import flags

from tfdml.cli import export_gallery
from tfdml.cli import main as command_line
from tfdml.effects import Effect
from tfdml.errors import UserError
from tfdml.io.files import require_local

USAGE = """
Export the embedder of a run.

  bin/export --run_dir=runs/cars_jrd --out=models/cars
  bin/export --run_dir=runs/cars_jrd --out=models/cars --formats=saved_model,litert
  bin/export --run_dir=runs/cars_jrd --out=models/cars --formats=all --images=0
  bin/export --run_dir=runs/cars_jrd --out=models/cars --whitening='dim=64, power=0.5'
  bin/export --run_dir=runs/cars_jrd --out=models/cars --dry_run

Writes the next version below --out, e.g. models/cars/1, atomically; earlier versions stay. Formats:
saved_model; litert_float32, litert_float16, litert_dynamic_range, litert_int8, or litert for the four; onnx; all.
Each is loaded in a fresh process and compared with the Keras embedder on images of the run's test split; where one
differs by more than its tolerance, nothing is written and the exit status is 2. model_card.json has the figures.
"""
USAGE += export_gallery.GALLERY

flags.DEFINE_string("run_dir", "", "Folder of the run.", module_name=__name__)
flags.DEFINE_string("out", "", "Folder of the exported versions.", module_name=__name__)
flags.DEFINE_list("formats", ["saved_model"], "What to write; see above.", module_name=__name__)
flags.DEFINE_bool(
    "moment_embedder", False, "Export moments.keras, which searches with all moments.", module_name=__name__
)
flags.DEFINE_string(
    "whitening",
    "",
    "Export the embedder with a PCA whitening behind it, fitted to the run's training images: e.g. 'dim=64, power=0.5, "
    "shrinkage=0'; dim=0 keeps all.",
    module_name=__name__,
)
flags.DEFINE_string("data_dir", "", "Where the run's data set lies, if it has moved.", module_name=__name__)
flags.DEFINE_integer(
    "images", 2000, "Test images, as whole classes, to compare on; 0: all.", lower_bound=0, module_name=__name__
)
flags.DEFINE_integer(
    "representative_images",
    500,
    "Training images on which the ranges of litert_int8 are measured.",
    lower_bound=1,
    module_name=__name__,
)
flags.DEFINE_integer(
    "max_pixels",
    100_000_000,
    "The SavedModel refuses images that promise more pixels, before it decodes them.",
    lower_bound=1,
    module_name=__name__,
)
flags.DEFINE_float(
    "min_cosine", None, "Smallest cosine to the Keras embedder, in place of each format's own.", module_name=__name__
)
flags.DEFINE_float(
    "max_recall_drop",
    None,
    "Largest loss of Recall@1, as a fraction (0.01), in place of each format's own.",
    module_name=__name__,
)
flags.DEFINE_bool("dry_run", False, "Check the flags and the run, write nothing.", module_name=__name__)

_FROM_RUN = Effect(lambda given: not given["embedder"], "--run_dir in place of --embedder")
EFFECTS = command_line.Effects(
    {
        **export_gallery.EFFECTS,
        **dict.fromkeys(("moment_embedder", "whitening", "data_dir", "images", "max_pixels"), _FROM_RUN),
        **dict.fromkeys(("min_cosine", "max_recall_drop"), _FROM_RUN),
        "representative_images": Effect(
            lambda given: bool({"litert_int8", "litert", "all"} & set(given["formats"])), "--formats with litert_int8"
        ),
    },
    frozenset({"run_dir", "out", "formats", "gallery", "dry_run"}),
)

# The flags whose names are not those of the arguments that they set.
FLAG_OF = {"folder": "out", "options": "gallery_dataset_options"}


def export() -> None:
    """Export as the flags say."""
    values = flags.FLAGS
    if keras.backend.backend() != "tensorflow":
        raise UserError(
            f"KERAS_BACKEND={keras.backend.backend()}: what is exported is TensorFlow's, whatever trained it; run "
            "KERAS_BACKEND=tensorflow bin/export ..."
        )
    for name in ("out",) if values.gallery else ("run_dir", "out"):
        if not values[name].value:
            raise UserError(f"--{name} is missing")
    require_local(values.out, "out")
    from tfdml.export.exporter import ExportOptions, check_whitening, export_run, load_run

    whitening = export_gallery.whitening()
    check_whitening(whitening or {})
    options = ExportOptions(
        formats=values.formats,
        images=values.images,
        representative_images=values.representative_images,
        max_pixels=values.max_pixels,
        min_cosine=values.min_cosine,
        max_recall_drop=values.max_recall_drop,
    )
    if values.gallery:
        export_gallery.export_gallery(options, lambda line: print(line, flush=True))
        return
    if values.dry_run:
        embedder, _ = load_run(values.run_dir, values.moment_embedder, values.data_dir)
        formats = ", ".join(options.formats)
        behind = " with a whitening" if whitening is not None else ""
        print(f"would export {embedder.name}{behind} of {values.run_dir} to {values.out} as {formats}")
        return
    version = export_run(
        values.run_dir,
        values.out,
        options,
        values.moment_embedder,
        values.data_dir,
        lambda line: print(line, flush=True),
        whitening,
    )
    print(f"version: {version}")
    if "saved_model" not in options.formats:
        print(f"It holds no SavedModel: do not let TF Serving watch {values.out}.")


def main() -> None:
    """Entry point."""
    command_line.run(export, "export", USAGE, flag_of=FLAG_OF, effects=EFFECTS)


if __name__ == "__main__":
    main()
