"""The page of an experiment that was trained with several seeds."""

from __future__ import annotations

import os
from typing import Any

from tfdml.errors import UserError
from tfdml.report.curves import training_curves
from tfdml.report.figures import STYLES
from tfdml.report.metric_text import metric_order, plain_intervals
from tfdml.report.rendering import render, write_page
from tfdml.report.runs import Run


def write_seeds_report(path: str | os.PathLike, run: Run, *, curve_metric: str = "recall@1") -> None:
    """Write the page: the mean of each metric with its intervals over classes and over seeds, each seed, the curves.

    Args:
        path: Where to write; the folder is made if it is missing.
        run: `read_run` of a folder of several seeds.
        curve_metric: What the training curves show.

    Raises:
        UserError: The run is that of a single seed.
        OSError: The page cannot be written.

    Example:
        >>> write_seeds_report("seeds.html", read_run("runs/cars_of_three_seeds"))
    """
    if not run.seeds:
        raise UserError(f"{run.name} is a run of a single seed: use write_report")
    histories = {one.name: one.measured for one in run.seeds}
    # Of more seeds than a figure has styles for, their mean.
    curves = histories if len(histories) <= STYLES else {f"mean of {len(histories)} seeds": run.measured}
    rows: list[dict[str, Any]] = [{"name": one.name, "path": one.path, "run": one} for one in run.seeds]
    write_page(
        path,
        "seeds.html",
        title=": ".join(str(part) for part in (run.name, run.result.get("dataset")) if part),
        run=run,
        keys=metric_order(run.metrics),
        over_seeds=plain_intervals(run.result.get("intervals_seeds") or {}, {}),
        rows=rows,
        training=training_curves(curves, curve_metric),
        settings=render("settings.html", groups=[("Flags", run.flags), ("Environment", run.environment)]),
    )
