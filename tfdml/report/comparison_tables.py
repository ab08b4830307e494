"""Tables of a comparison: the runs, their metrics, and where their settings differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfdml.report.elements import Column, details, escape, scrolling, table
from tfdml.report.metric_text import (
    COUNTS,
    is_fraction,
    metric_change,
    metric_interval,
    metric_name,
    metric_order,
    metric_value,
    numbers,
    plain_intervals,
)
from tfdml.report.runs import Run
from tfdml.report.settings import setting_text

# Where a run lies says nothing about what it did.
_NOT_COMPARED = ("run_dir",)
_SELECTION = "ways to select the embedder"


def warnings(runs: Sequence[Run]) -> str:
    """Why the figures of these runs do not compare, as a note; empty where nothing speaks against it."""
    reasons = []
    for what, values in _conditions(runs).items():
        if _differ(values):
            said = "; ".join(f"{run.name}: {_said(value)}" for run, value in zip(runs, values, strict=True))
            reasons.append(f"<li>Different {what}. {escape(said)}.</li>")
    if not reasons:
        return ""
    return (
        '<div class="warning" role="note"><p><b>These figures do not compare as they stand.</b></p>'
        f"<ul>{''.join(reasons)}</ul></div>"
    )


def same_task(runs: Sequence[Run]) -> bool:
    """Whether all runs were measured on the same images in the same way, so that a difference means something."""
    conditions = _conditions(runs)
    return not any(_differ(conditions[what]) for what in conditions if what != _SELECTION)


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


def runs_table(runs: Sequence[Run]) -> str:
    """What each run is."""
    heads = [
        Column("Run"),
        Column("Data set", css="left"),
        Column("Objectives", css="left"),
        Column("Embedder of", css="left"),
        Column("Epoch"),
        Column("Steps"),
        Column("Training"),
        Column("Images / s"),
    ]
    rows = []
    for run in runs:
        result = run.result
        rows.append(
            [
                f'<span title="{escape(run.path)}">{escape(run.name)}</span>',
                escape(result.get("dataset", "–")),
                escape(run.flags.get("objectives", "–")),
                escape(result.get("selection", "–")),
                _number(result.get("epoch")),
                _number(result.get("steps")),
                _duration(result.get("train_seconds")),
                _number(result.get("images_per_second")),
            ]
        )
    return scrolling(table(heads, rows, caption="The runs", css="runs"), "The runs")


def _number(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else "–"


def _duration(seconds: Any) -> str:
    if not isinstance(seconds, (int, float)):
        return "–"
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"


def metrics_comparison(runs: Sequence[Run]) -> str:
    """Every metric under every run with its interval; on the same task the best, and differences to the first run."""
    comparable = same_task(runs)
    measured = [numbers(run.metrics) for run in runs]
    intervals = [plain_intervals(run.result.get("intervals"), run.metrics) for run in runs]
    keys = metric_order(dict.fromkeys(key for metrics in measured for key in metrics))
    rows = []
    for key in keys:
        best = _best(key, [metrics.get(key) for metrics in measured]) if comparable else set()
        cells = [escape(metric_name(key))]
        for number, (metrics, ends) in enumerate(zip(measured, intervals, strict=True)):
            value = metrics.get(key)
            text = metric_value(key, value)
            if number in best:
                text = f'<span class="winner">best</span> <b>{text}</b>'
            if comparable and number and value is not None:
                text += f'<span class="change">{metric_change(key, measured[0].get(key), value)}</span>'
            if key in ends:
                text += f'<span class="change">{metric_interval(key, ends[key])}</span>'
            cells.append(text)
        rows.append(cells)
    if not rows:
        return "<p>Nothing was measured.</p>"
    heads = [Column("Metric"), *(Column(escape(run.name)) for run in runs)]
    listed = table(heads, rows, caption="Metrics of the runs", css="metrics compared")
    return scrolling(listed, "Metrics of the runs")


def _best(key: str, values: Sequence[float | None]) -> set[int]:
    """Which values are the largest as printed; none where more is not better or all are the same."""
    known = {number: round(100 * value, 1) for number, value in enumerate(values) if value is not None}
    if not is_fraction(key) or len(known) < 2 or len(set(known.values())) < 2:
        return set()
    return {number for number, value in known.items() if value == max(known.values())}


def training_distances(runs: Sequence[Run]) -> str:
    """Mean d+ and d- in the last epoch of each run's training; empty where no run recorded them."""
    rows = []
    for run in runs:
        logs = [record["train"] for record in run.history if isinstance(record.get("train"), dict)]
        last = logs[-1] if logs else {}
        values = [last.get("d_pos"), last.get("d_neg")]
        rows.append([escape(run.name), *(f"{v:.3f}" if isinstance(v, (int, float)) else "–" for v in values)])
    if all(row[1:] == ["–", "–"] for row in rows):
        return ""
    heads = [Column("Run"), Column("d⁺, one class"), Column("d⁻, different classes")]
    return scrolling(table(heads, rows, caption="Mean distances of pairs in training"), "Mean distances of pairs")


def differing_flags(runs: Sequence[Run]) -> str:
    """The flags in which the runs differ, and how many they share."""
    shared = {k for k in runs[0].flags if all(run.flags.get(k) == runs[0].flags[k] for run in runs)}
    every = dict.fromkeys(key for run in runs for key in run.flags)
    names = [name for name in every if name not in shared and name not in _NOT_COMPARED]
    if not any(run.flags for run in runs):
        return "<p>No flags are stored with these runs.</p>"
    if not names:
        return "<p>None: the runs have the same flags, the seed among them.</p>"
    body = _settings([run.name for run in runs], [run.flags for run in runs], names, "Flags that differ")
    same = {name: runs[0].flags[name] for name in runs[0].flags if name in shared}
    rows = [[escape(name), escape(value)] for name, value in same.items()]
    listed = table([Column("Flag"), Column("Value")], rows, caption="Flags that are the same", css="settings")
    return body + details(f"{len(same)} flags that are the same", scrolling(listed, "Flags that are the same"))


def differing_environment(runs: Sequence[Run]) -> str:
    """Where the environments of the runs differ."""
    flat = [_flat(run.environment) for run in runs]
    names = [
        name
        for name in dict.fromkeys(key for values in flat for key in values)
        if len({values.get(name) for values in flat}) > 1
    ]
    if not any(flat):
        return "<p>No environment is stored with these runs.</p>"
    if not names:
        return "<p>The same versions, machine and devices.</p>"
    return _settings([run.name for run in runs], flat, names, "Environments, where they differ")


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, str]:
    result: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{above}{key} ")
        else:
            result[above + str(key)] = setting_text(value)
    return result


def _settings(runs: Sequence[str], values: Sequence[Mapping[str, str]], names: Sequence[str], caption: str) -> str:
    heads = [Column("Name"), *(Column(escape(run)) for run in runs)]
    rows = [[escape(name), *(escape(of_run.get(name, "–")) for of_run in values)] for name in names]
    return scrolling(table(heads, rows, caption=caption, css="settings"), caption)
