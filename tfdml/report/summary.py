"""The results of one run: the figures that matter in large, and all of them as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdml.report.elements import Column, details, escape, scrolling, table
from tfdml.report.metric_text import (
    Intervals,
    is_fraction,
    metric_change,
    metric_interval,
    metric_name,
    metric_order,
    metric_value,
    numbers,
    plain_intervals,
)
from tfdml.report.orders import orders_table

Metrics = Mapping[str, float]
_IN_LARGE = ("recall@1", "map@r", "r_precision", "nmi")
_TERMS = (
    ("Recall@K", "Share of queries with at least one image of their class among the K nearest."),
    ("R", "How many images of the query’s class there are to find, the query itself left out."),
    ("MAP@R", "Mean over queries of 1/R times the sum, over the hits among the R nearest, of the precision up to it."),
    ("R-precision", "Mean over queries of the share of hits among the R nearest."),
    (
        "NMI, AMI, pairwise F1",
        "Agreement of the classes with as many k-means clusters of the embeddings. NMI is not corrected for chance; "
        "AMI is.",
    ),
)


def tiles(before: Metrics | None, after: Metrics, intervals: Intervals | None) -> str:
    """The few figures that matter, in large; empty where none is there."""
    parts = []
    for key in [key for key in _IN_LARGE if key in after]:
        notes = []
        if intervals and key in intervals:
            notes.append(metric_interval(key, intervals[key]))
        if before is not None and key in before:
            notes.append(f"{metric_change(key, before[key], after[key])} by training")
        change = "".join(f'<span class="change">{note}</span>' for note in notes)
        value = metric_value(key, after[key])
        parts.append(f"<div><dt>{metric_name(key)}</dt><dd><b>{value}<small>%</small></b>{change}</dd></div>")
    return f'<dl class="tiles">{"".join(parts)}</dl>' if parts else ""


def metrics_table(before: Metrics | None, after: Metrics, intervals: Intervals | None, interval_name: str) -> str:
    """Every metric: before, after, its interval, and the change."""
    columns = [Column("Metric")]
    if before is not None:
        columns.append(Column("Before"))
    columns.append(Column("Value" if before is None else "After"))
    if intervals:
        columns.append(Column(escape(interval_name)))
    if before is not None:
        columns.append(Column("Change"))
    rows = []
    for key in metric_order(after):
        cells = [escape(metric_name(key)) + ("" if is_fraction(key) else ' <span class="soft">(no %)</span>')]
        if before is not None:
            cells.append(metric_value(key, before.get(key)))
        cells.append(f"<b>{metric_value(key, after[key])}</b>")
        if intervals:
            cells.append(metric_interval(key, intervals.get(key)) or "–")
        if before is not None:
            cells.append(metric_change(key, before.get(key), after[key]))
        rows.append(cells)
    if not rows:
        return "<p>Nothing was measured.</p>"
    return scrolling(table(columns, rows, caption="Metrics of the embeddings", css="metrics"), "Metrics")


def counts(metrics: Metrics) -> str:
    """How many queries were compared with how many images."""
    if "num_queries" not in metrics:
        return ""
    text = f"{metrics['num_queries']:,} queries"
    if "num_gallery" in metrics:
        text += f", each compared with {metrics['num_gallery']:,} images"
    text += "."
    alone = metrics.get("queries_without_match", 0)
    if alone:
        text += f" {alone:,} of them have no image of their class to find and are left out of the retrieval means."
    return f'<p class="aside">{text}</p>'


def further_tables(metrics: Mapping[str, Any]) -> str:
    """What was measured besides: means over disjoint parts, and measures of generalisation; empty without them.

    Args:
        metrics: With `parts`, intervals by metric, `moments`, metrics of a `MomentEmbedder`, `orders`, metrics by order
            of HORDE's moments, and `generalisation`, numbers by name, if they were measured.
    """
    tables = ""
    if parts := plain_intervals(metrics.get("parts") or {}, {}):
        rows = [
            [
                escape(metric_name(key)),
                f"<b>{metric_value(key, metrics['parts'][key][0])}</b>",
                metric_interval(key, ends),
            ]
            for key, ends in parts.items()
        ]
        tables += _folded(
            "Means over disjoint parts of the images, in percent", ["Metric", "Mean", "95% interval"], rows
        )
    if moments := numbers(metrics.get("moments") or {}):
        columns = ["Metric", "Value"]
        rows = [
            [escape(metric_name(key)), f"<b>{metric_value(key, moments[key])}</b>"] for key in metric_order(moments)
        ]
        tables += _folded("Searched with all moments, in percent", columns, rows)
    tables += orders_table(metrics.get("orders") or {})
    if measures := numbers(metrics.get("generalisation") or {}):
        rows = [[escape(key), f"{value:,.4g}"] for key, value in measures.items()]
        tables += _folded("Generalisation to the unseen classes", ["Measure", "Value"], rows)
    return tables


def _folded(title: str, heads: list[str], rows: list[list[str]]) -> str:
    return details(title, scrolling(table(heads, rows, caption=title, css="metrics"), title))


def terms() -> str:
    """What the metrics mean."""
    items = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in _TERMS)
    return f'<dl class="terms stacked">{items}</dl>'
