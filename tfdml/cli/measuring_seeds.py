"""bin/evaluate of what bin/train --seeds wrote: each seed's embedder, and their means."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from tfdml.errors import UserError
from tfdml.io.files import write_json
from tfdml.io.manifests import read_json


def holds_seeds(model: str) -> bool:
    """Whether a path is the folder of a finished `bin/train --seeds`."""
    path = os.path.join(model, "result.json")
    if "://" in model or not os.path.isfile(path):
        return False
    try:
        return "seeds" in read_json(path)
    except UserError:
        return False  # the embedder of a run can be measured whatever its result says


def measure_seeds(model: str, measure: Callable[[], None]) -> None:
    """Measure the embedder of each seed as the flags say, then print the means over the seeds with their intervals.

    Args:
        model: The folder.
        measure: Measures the model that `--model` names and writes `--json`.

    Raises:
        UserError: The folder is damaged, or a page is asked for.
    """
    from tfdml.evaluation import student_interval
    from tfdml.report.runs import read_run

    values: Any = flags.FLAGS
    if values.report:
        raise UserError(f"--report shows one embedder: name that of one seed, such as --model={model}/seed_0")
    run, wanted = read_run(model), values.json
    measured: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for one in run.seeds:
                values.model, values.json = str(one.path), str(Path(scratch) / "metrics.json")
                measure()
                measured[one.name] = read_json(values.json)
        finally:
            values.model, values.json = model, wanted
    every = list(measured.values())
    names = [name for name, value in every[0].items() if isinstance(value, float)]
    means = {name: student_interval([of[name] for of in every]) for name in names}
    print(f"{model}: means over {len(every)} seeds, with 95 % intervals over seeds")
    for name, (mean, low, high, _) in means.items():
        print(f"  {name:<24}{100 * mean:6.2f} %  [{100 * low:.2f}, {100 * high:.2f}]")
    if wanted:
        metrics = {name: interval.mean for name, interval in means.items()}
        write_json(Path(wanted), {"model": model, **metrics, "intervals_seeds": means, "seeds": measured})
        print(json.dumps({"written": wanted}))
