"""In what runs differ: what speaks against comparing them, their metrics, settings and environments."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdml.report.metric_text import COUNTS, is_fraction, metric_change, metric_interval, metric_order, metric_value
from tfdml.report.rendering import setting_text
from tfdml.report.runs import Run

# Where a run lies says nothing about what it did.
_NOT_COMPARED = ("run_dir",)
_SELECTION = "ways to select the embedder"


def reservations(runs: Sequence[Run]) -> dict[str, str]:
    """Why the figures of these runs do not compare: what differs, and what it is in each; empty where nothing does."""
    return {
        what: "; ".join(f"{run.name}: {_said(value)}" for run, value in zip(runs, values, strict=True))
        for what, values in _conditions(runs).items()
        if _differ(values)
    }


def same_task(runs: Sequence[Run]) -> bool:
    """Whether all runs were measured on the same images in the same way, so that a difference means something."""
    return not reservations(runs).keys() - {_SELECTION}


def _conditions(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """What the figures depend on besides the model, for each run."""
    return {
        "data sets": [run.result.get("dataset") for run in runs],
        "protocols": [run.result.get("protocol") for run in runs],
        "options of the data set": [run.flags.get("dataset_options") for run in runs],
        "numbers of images": [tuple(run.metrics.get(key) for key in COUNTS[:2]) for run in runs],
        _SELECTION: [run.result.get("selection") for run in runs],
    }


def _differ(values: Sequence[Any]) -> bool:
    return len({str(value) for value in values}) > 1


def _said(value: Any) -> str:
    if isinstance(value, tuple):
        queries, gallery = ("?" if part is None else f"{part:,}" for part in value)
        return f"{queries} queries, each compared with {gallery}"
    return "not stated" if value in (None, "") else str(value)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A metric of one run in print.

    Args:
        value: In percent where it is a share.
        notes: Its difference to the first run and its interval, where they are known.
        best: Whether it is the best of the runs.
    """

    value: str
    notes: list[str]
    best: bool


def metric_rows(runs: Sequence[Run]) -> dict[str, list[Figure]]:
    """Every metric under every run; on the same task with differences to the first run, and the best."""
    comparable = same_task(runs)
    rows: dict[str, list[Figure]] = {}
    for key in metric_order(dict.fromkeys(key for run in runs for key in run.metrics)):
        values = [run.metrics.get(key) for run in runs]
        best = _best(key, values) if comparable else set()
        rows[key] = []
        for number, (run, value) in enumerate(zip(runs, values, strict=True)):
            notes = [metric_change(key, values[0], value)] if comparable and number and value is not None else []
            notes += [metric_interval(key, run.intervals[key])] if key in run.intervals else []
            rows[key].append(Figure(metric_value(key, value), notes, number in best))
    return rows


def _best(key: str, values: Sequence[float | None]) -> set[int]:
    """Which values are the largest as printed; none where more is not better or all are the same."""
    known = {number: round(100 * value, 1) for number, value in enumerate(values) if value is not None}
    if not is_fraction(key) or len(known) < 2 or len(set(known.values())) < 2:
        return set()
    return {number for number, value in known.items() if value == max(known.values())}


def training_distances(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Mean d+ and d- in the last epoch of each run's training; empty where no run recorded them."""
    rows = {}
    for run in runs:
        logs = [record["train"] for record in run.history if isinstance(record.get("train"), dict)]
        last = logs[-1] if logs else {}
        rows[run.name] = [last.get("d_pos"), last.get("d_neg")]
    return rows if any(value is not None for row in rows.values() for value in row) else {}


def split_flags(runs: Sequence[Run]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The flags in which the runs differ, a value for each run, and those that they share."""
    differing, shared = _split([{key: setting_text(value) for key, value in run.flags.items()} for run in runs])
    return {name: values for name, values in differing.items() if name not in _NOT_COMPARED}, shared


def differing_environment(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Where the environments of the runs differ, a value for each run."""
    return _split([_flat(run.environment) for run in runs])[0]


def _split(settings: Sequence[Mapping[str, str]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    names = dict.fromkeys(name for values in settings for name in values)
    rows = {name: [values.get(name, "–") for values in settings] for name in names}
    differing = {name: row for name, row in rows.items() if len(set(row)) > 1}
    return differing, {name: row[0] for name, row in rows.items() if name not in differing}


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    result: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{above}{key} ")
        else:
            result[above + str(key)] = setting_text(value)
    return result
