"""bin/evaluate --compare: finished runs query by query, and a page of them side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from tfdml.cli import model_flags
from tfdml.errors import UserError
from tfdml.io.files import write_json

if TYPE_CHECKING:
    from tfdml.report.paired import Paired


def compare_runs(folders: list[str], report: str, json_file: str, split: str, distance: str) -> None:
    """Print how the runs compare with the first, and write the page; with `--dataset`, embed its images by each run.

    Args:
        folders: Folders of finished runs, or of what `bin/train --seeds` wrote.
        report: The HTML file; empty: none.
        json_file: Where the differences are written; empty: nowhere.
        split: Of the data set.
        distance: How embeddings are compared.

    Raises:
        UserError: As `write_comparison`, or a file cannot be written.
    """
    from tfdml.report import write_comparison
    from tfdml.report.comparison import check_number, measured_queries
    from tfdml.report.paired import paired_with_first
    from tfdml.report.runs import read_runs

    check_number(folders)
    runs = read_runs(folders)
    dataset, embeddings, measured = None, None, None
    if flags.FLAGS.dataset:
        dataset = model_flags.chosen_data("").load(split)
        # Of several seeds, the first embeds the images that the page shows.
        models = [str(run.seeds[0].path if run.seeds else run.path) for run in runs]
        embeddings = [model_flags.chosen_source(model).embed(dataset, flags.FLAGS.batch_size) for model in models]
        if not report:
            measured = measured_queries(dataset, embeddings, distance)
    if report:
        try:
            pairs = write_comparison(report, folders, dataset=dataset, embeddings=embeddings, distance=distance)
        except OSError as error:
            raise UserError(f"--report={report} cannot be written: {error.strerror or error}") from error
    else:
        pairs = paired_with_first(runs, measured)
    for pair in pairs:
        _print(pair)
    if json_file:
        write_json(Path(json_file), {"first": folders[0], "differences": [_as_json(pair) for pair in pairs]})
    for written in filter(None, (json_file, report)):
        print(json.dumps({"written": written}))


def _print(pair: Paired) -> None:
    if pair.refused:
        print(f"{pair.name} and {pair.reference} are not compared query by query: {pair.refused}")
        return
    for metric in pair.classes:
        print(pair.sentence(metric))


def _as_json(pair: Paired) -> dict[str, Any]:
    if pair.refused:
        return {"run": pair.name, "refused": pair.refused}
    return {"run": pair.name, "over_classes": pair.classes, "over_seeds": pair.seeds}
