"""bin/export: from a run folder to a model that is served."""

from __future__ import annotations

from absl import flags

from tfdml.cli import main as command_line
from tfdml.errors import UserError

USAGE = """
Export the embedder of a run.

  bin/export --run_dir=runs/cars_jrd --out=models/cars
  bin/export --run_dir=runs/cars_jrd --out=models/cars --dry_run

Writes the next version below --out, e.g. models/cars/1, whole or not at all; earlier versions stay. The new version
is loaded again and compared with the Keras embedder on images of the run's test split before it gets its number.
"""

FORMATS = ("saved_model",)
# Vectors of length 1 in float32: what decoding and arithmetic in another graph may change.
_TOLERANCE = 1e-5

flags.DEFINE_string("run_dir", "", "Folder of the run.", module_name=__name__)
flags.DEFINE_string("out", "", "Folder of the exported versions.", module_name=__name__)
flags.DEFINE_list("formats", ["saved_model"], f"What to write, of {', '.join(FORMATS)}.", module_name=__name__)
flags.DEFINE_integer("images", 16, "How many test images to compare on.", lower_bound=1, module_name=__name__)
flags.DEFINE_bool("dry_run", False, "Check the flags, write nothing.", module_name=__name__)


def export() -> None:
    """Export as the flags say."""
    values = flags.FLAGS
    for name in ("run_dir", "out"):
        if not values[name].value:
            raise UserError(f"--{name} is missing")
    for chosen in values.formats:
        if chosen not in FORMATS:
            raise UserError(f"--formats={chosen}: must be of {', '.join(FORMATS)}")
    from tfdml.export import compare, export_saved_model
    from tfdml.export.loading import encoded_image, load_embedder
    from tfdml.training import RunFolder, trainer

    embedder = load_embedder(values.run_dir)
    experiment = RunFolder(values.run_dir).load_experiment()
    if values.dry_run:
        print(f"would export {embedder.name} of {values.run_dir} to {values.out} as {', '.join(values.formats)}")
        return
    test = trainer.load_splits(experiment).test
    chosen_images = range(0, len(test), max(1, len(test) // values.images))[: values.images]
    encoded = [encoded_image(test.images, index) for index in chosen_images]

    def accept(version) -> None:
        difference = compare(embedder, version, encoded)
        print(f"largest difference from the Keras embedder on {len(encoded)} test images: {difference:.1e}")
        if not difference <= _TOLERANCE:
            raise UserError(f"the export differs from the embedder by {difference:.1e} > {_TOLERANCE}: not kept")

    version = export_saved_model(embedder, values.out, accept=accept)
    print(f"SavedModel: {version}")


def main() -> None:
    """Entry point."""
    command_line.run(export, "export", USAGE)


if __name__ == "__main__":
    main()
