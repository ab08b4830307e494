"""What a report shows of a run: its result, history, flags and environment; read from its folder without TensorFlow."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfdml.errors import REASON, UserError, user_errors
from tfdml.io.files import fields, parse_flags, parse_json, read_json
from tfdml.report.metric_text import numbers, order_name, plain_intervals
from tfdml.report.plots import STYLES


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run, or whatever else was measured: only `name` and the metrics of `result` need to be known.

    Args:
        name: What a page calls it.
        result: What `result.json` holds: `metrics` as `evaluate_retrieval` gives them, fractions, with `intervals` of
            `confidence_intervals` among them or next to them; if measured, `metrics_before` the training,
            `metrics_moments` of a `MomentEmbedder`, `metrics_orders` by order of HORDE's moments; among the metrics
            `parts` as `part_protocol` gives them; among or next to them `generalization` as `evaluate_generalization`
            does; `dataset`, `protocol` and `selection` in words.
        history: One mapping per epoch, what `metrics.jsonl` holds: `epoch`, metrics of unseen classes as `test`, and
            perhaps of `seen` classes, `orders`, `generalization`, and what `fit` reports as `train`; empty where there
            is no such file.
        flags: Its flags by name; empty where there is no `flags.txt`.
        environment: What `environment.json` holds; empty where there is no such file.
        path: Its folder; None: it has none.
        seeds: Of what was trained with several seeds or folds, the run of each; its metrics are then their means.
        watch: What `watch.json` holds, alarms and sampled batches; empty where there is no such file.

    Example:
        >>> run = Run("cars", {"metrics": {"recall@1": 0.5}, "metrics_before": {"recall@1": 0.25}})
        >>> run.metrics, run.intervals
        ({'recall@1': 0.5}, {})
    """

    name: str
    result: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]] = ()
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: Path | None = None
    seeds: Sequence[Run] = ()
    watch: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the result that are numbers."""
        return numbers(self.result["metrics"])

    @property
    def before(self) -> dict[str, float] | None:
        """The metrics before training; None: they were not measured."""
        measured = self.result.get("metrics_before")
        return None if measured is None else numbers(measured)

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The ends of the intervals that are known, by metric."""
        return plain_intervals(self.result.get("intervals"), self.result["metrics"])

    @property
    def generalization(self) -> dict[str, float]:
        """The measures of generalization."""
        return numbers(self.result.get("generalization") or self.result["metrics"].get("generalization") or {})

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The metrics on the unseen classes after each epoch, with `epoch`."""
        return [{"epoch": record.get("epoch"), **record.get("test", {})} for record in self.history]

    @property
    def histories(self) -> dict[str, list[dict[str, Any]]]:
        """As `measured`, by name: this run, seen classes if measured, and HORDE's other orders if more than once."""
        seen = [{"epoch": record.get("epoch"), **record["seen"]} for record in self.history if record.get("seen")]
        found = {"unseen classes": self.measured, "seen classes": seen} if seen else {"this run": self.measured}
        records = [record for record in self.history if record.get("orders")]
        for order in records[-1]["orders"] if len(records) > 1 else ():
            if order != "1":  # the run itself
                found[order_name(order)] = [
                    {"epoch": record["epoch"], **record["orders"].get(order, {})} for record in records
                ]
        return found


def read_runs(folders: Sequence[str | os.PathLike], names: Sequence[str] | None = None) -> list[Run]:
    """Read the runs of a comparison.

    Args:
        folders: Their folders.
        names: What to call them; None: as their folders, with the folder above where two are called the same.

    Raises:
        UserError: As `read_run`; fewer than 2 runs or more than 8; a folder twice; not one name per folder, or a name
            twice.
    """
    if not 2 <= len(folders) <= STYLES:
        raise UserError(f"a comparison needs 2 to {STYLES} runs; got {len(folders)}")
    paths = [Path(folder) for folder in folders]
    resolved = [path.resolve() for path in paths]
    for path, real in zip(paths, resolved, strict=True):
        if resolved.count(real) > 1:
            raise UserError(f"{path} is named twice; compare different runs")
    if names is None:
        names = [Path(os.path.abspath(path)).name for path in paths]
        if len(set(names)) < len(names):
            names = ["/".join(path.parts[-2:]) for path in resolved]
        if len(set(names)) < len(names):
            names = [str(path) for path in resolved]
    if len(names) != len(paths):
        raise UserError(f"{len(names)} names for {len(paths)} runs; give one each")
    if len(set(names)) < len(names):
        raise UserError(f"runs need different names; got {', '.join(names)}")
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_run(path: str | os.PathLike, name: str = "") -> Run:
    """Read the folder of a finished run.

    Args:
        path: The folder.
        name: What to call the run; empty: as the folder.

    Raises:
        UserError: There is no such folder, the run in it has not ended, or one of its files is damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path} is no folder; name the folder of a finished run")
    if not (path / "result.json").is_file():
        started = (path / "flags.txt").is_file()
        raise UserError(
            f"{path} holds a run that has not ended: there is no result.json; resume it and let it finish"
            if started
            else f"{path} is not the folder of a run: there is no result.json in it"
        )
    result = read_json(path / "result.json", {"metrics": dict}, "was it written by another program?")
    environment, watch = (
        read_json(file) if (file := path / name).is_file() else {} for name in ("environment.json", "watch.json")
    )
    seeds = _seeds(path, result)
    return Run(
        name=name or Path(os.path.abspath(path)).name,
        result=result,
        history=_mean_history(seeds) if seeds else _lines(path / "metrics.jsonl"),
        flags=parse_flags(_text(path / "flags.txt")),
        environment=seeds[0].environment if seeds else environment,
        watch=watch,
        path=path,
        seeds=seeds,
    )


def _seeds(path: Path, result: Mapping[str, Any]) -> list[Run]:
    """Return the runs of a folder of several seeds or folds."""
    rows = result.get("runs", [])
    if not isinstance(rows, list):
        raise UserError(f"{path / 'result.json'} is damaged: runs must be a list")
    names = [fields(row, {"run": str}, f"{path / 'result.json'}: runs")["run"] for row in rows]
    return [read_run(path / os.path.basename(name), name.replace("_", " ")) for name in names]


def _mean_history(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the mean of the metrics on the unseen classes after each epoch that all runs have measured."""
    measured = [{record["epoch"]: numbers(record) for record in run.measured} for run in runs]
    records = []
    for epoch in sorted(set.intersection(*(set(of) for of in measured))):
        names = [name for name in measured[0][epoch] if all(name in of[epoch] for of in measured)]
        means = {name: sum(of[epoch][name] for of in measured) / len(measured) for name in names if name != "epoch"}
        records.append({"epoch": epoch, "test": means})
    return records


def _text(path: Path) -> str:
    """Return what a file holds; empty where there is none."""
    with user_errors((OSError, UnicodeDecodeError), f"{path} cannot be read: {REASON}"):
        return path.read_text(encoding="utf-8") if path.is_file() else ""


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = enumerate(_text(path).splitlines(), 1)
    records = (parse_json(line, f"{path}, line {number},") for number, line in lines if line.strip())
    return [record for record in records if isinstance(record, dict)]
