"""bin/evaluate --compare: a page of finished runs side by side."""

from __future__ import annotations

import json

from absl import flags

from tfdml.cli import model_flags
from tfdml.errors import UserError


def compare_runs(runs: list[str], report: str, split: str, distance: str) -> None:
    """Write the page; with `--dataset`, embed its images by each run's embedder, too.

    Args:
        runs: Folders of finished runs.
        report: The HTML file.
        split: Of the data set.
        distance: How embeddings are compared.
    """
    from tfdml.report import write_comparison

    dataset, embeddings = None, None
    if flags.FLAGS.dataset:
        dataset = model_flags.chosen_data("").load(split)
        embeddings = [model_flags.chosen_source(run).embed(dataset, flags.FLAGS.batch_size) for run in runs]
    try:
        write_comparison(report, runs, dataset=dataset, embeddings=embeddings, distance=distance)
    except OSError as error:
        raise UserError(f"--report={report} cannot be written: {error.strerror or error}") from error
    print(json.dumps({"written": report}))
