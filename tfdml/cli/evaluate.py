"""bin/evaluate: measure a trained or exported embedder on a data set."""

from __future__ import annotations

import json
from pathlib import Path

from absl import flags

from tfdml.cli import main as command_line
from tfdml.errors import UserError

USAGE = """
Measure an embedder: Recall@K, MAP@R, R-precision, NMI, AMI, pairwise F1.

  bin/evaluate --model=runs/cars_jrd --dataset=cars196 --data_dir=/data/cars196
  bin/evaluate --model=models/cars --dataset=cars196 --data_dir=/data/cars196
  bin/evaluate --model=embedder.keras --dataset=folder --data_dir=photos --json=metrics.json

--model is a run folder, a .keras file, a SavedModel, or a folder of SavedModel versions (the newest is taken). For a
run folder, the data flags default to the run's own.
"""

flags.DEFINE_string("model", "", "Run folder, .keras file or SavedModel.", module_name=__name__)
flags.DEFINE_string("dataset", "", "Data set, as in bin/train.", module_name=__name__)
flags.DEFINE_string("data_dir", "", "Where the unpacked data set lies.", module_name=__name__)
flags.DEFINE_string("dataset_options", "", "Options of the data set, as in bin/train.", module_name=__name__)
flags.DEFINE_enum("split", "test", ["test", "train"], "Which classes to measure on.", module_name=__name__)
flags.DEFINE_enum("bad_images", "error", ["error", "skip"], "What to do with unreadable images.", module_name=__name__)
flags.DEFINE_list("ks", ["1", "2", "4", "8"], "The K of Recall@K.", module_name=__name__)
flags.DEFINE_integer("batch_size", 100, "Images per batch.", lower_bound=1, module_name=__name__)
flags.DEFINE_string("json", "", "File to write the metrics to, as fractions.", module_name=__name__)


def evaluate() -> None:
    """Evaluate as the flags say."""
    values = flags.FLAGS
    if not values.model:
        raise UserError("--model is missing")
    try:
        ks = tuple(int(k) for k in values.ks)
    except ValueError as error:
        raise UserError(f"--ks={','.join(values.ks)}: write integers with commas, e.g. 1,2,4") from error
    if values.json and not Path(values.json).resolve().parent.is_dir():
        raise UserError(f"--json={values.json}: its folder does not exist")

    from tfdml import data
    from tfdml.data import inspection
    from tfdml.evaluation import evaluate_dataset
    from tfdml.export.loading import load_model
    from tfdml.training.files import write_json
    from tfdml.training.spec import parse_arguments

    name, directory, options = _data_flags()
    model = load_model(values.model)
    arguments = parse_arguments(options, "--dataset_options")
    dataset = inspection.check(data.load(name, directory or None, values.split, **arguments), values.bad_images)
    embeddings = model.embed(dataset, values.batch_size)
    metrics = evaluate_dataset(embeddings, dataset, ks=ks)
    print(f"{values.model} on {name}, {values.split}: {len(dataset):,} images of {dataset.num_classes:,} classes")
    for key, value in metrics.items():
        print(f"  {key:<24}{100 * value:6.2f} %" if isinstance(value, float) else f"  {key:<24}{value:>6}")
    if values.json:
        write_json(Path(values.json), {"model": values.model, "dataset": name, "split": values.split, **metrics})
        print(json.dumps({"written": values.json}))


def _data_flags() -> tuple[str, str, str]:
    values = flags.FLAGS
    if values.dataset:
        return values.dataset, values.data_dir, values.dataset_options
    from tfdml.training import RunFolder

    if not (Path(values.model) / "flags.txt").is_file():
        raise UserError("--dataset is missing: only a run folder knows its own")
    stored = RunFolder(values.model).load_experiment()
    return stored.dataset, values.data_dir or stored.data_dir, values.dataset_options or stored.dataset_options


def main() -> None:
    """Entry point."""
    command_line.run(evaluate, "evaluate", USAGE)


if __name__ == "__main__":
    main()
