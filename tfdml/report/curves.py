"""Curves of a page, each with its values as a table: Recall@K against K, and a metric along the training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from tfdml.report.figures import Series, legend, line_chart
from tfdml.report.metric_text import metric_name
from tfdml.report.rendering import render

# The K that carry a mark and stand in the table.
_KS = (1, 2, 4, 8, 10, 16, 20, 32, 50, 100, 200, 500, 1000)
_CURVE_POINTS = 80


def recall_curves(
    recalls: Mapping[str, np.ndarray], measured: Mapping[str, Mapping[str, float]] | None = None
) -> Markup:
    """Recall@K against K, K along a logarithmic axis.

    Args:
        recalls: What each curve is called, and its Recall@K for K = 1, 2, ... as fractions.
        measured: Metrics of which only some Recall@K are known, drawn as single points.
    """
    curves = [
        Series(name, _thinned(values), style, marks=frozenset(float(k) for k in _KS))
        for style, (name, values) in enumerate(recalls.items())
        if len(values)
    ]
    if not curves:
        return Markup("<p>No query has an image of its class to find.</p>")
    # What the table says of each curve.
    known = [{k: 100 * value for k, value in enumerate(recalls[curve.name].tolist(), 1)} for curve in curves]
    deepest = max(len(values) for values in known)
    for name, metrics in (measured or {}).items():
        points = sorted((int(k[7:]), 100 * value) for k, value in metrics.items() if re.fullmatch(r"recall@\d+", k))
        points = [(k, y) for k, y in points if k <= deepest]
        if points:
            curves.append(Series(name, points, len(curves), line=False))
            known.append(dict(points))
    ks = sorted({k for k in (*_KS, deepest) if k <= deepest})
    figure = line_chart(curves, name="Recall@K against K", x_label="K", y_label="Recall@K, %", log_x=True)
    return with_table(figure, curves, "Recall@K", "Recall@K, in percent", "K", ks, known)


def _thinned(values: np.ndarray) -> list[tuple[float, float]]:
    """Points of a curve, about equally far apart on a logarithmic axis, those with a mark among them."""
    spread = np.unique(np.round(np.geomspace(1, len(values), _CURVE_POINTS)).astype(int))
    ks = sorted({*spread.tolist(), *(k for k in _KS if k <= len(values))})
    return [(float(k), 100 * float(values[k - 1])) for k in ks]


def training_curves(histories: Mapping[str, Sequence[Mapping[str, Any]]], metric: str) -> Markup:
    """A metric after each epoch.

    Args:
        histories: What each curve is called, and one mapping per epoch with `epoch` and `metric`, a fraction; others
            are skipped.
        metric: What is drawn.
    """
    drawn = {name: (style, _points(history, metric)) for style, (name, history) in enumerate(histories.items())}
    curves = [Series(name, points, style) for name, (style, points) in drawn.items() if points]
    if not curves:
        return Markup("<p>Nothing was measured during training.</p>")
    shown = metric_name(metric)
    notes = []
    if len(histories) == 1:
        x, y = max(curves[0].points, key=lambda point: point[1])
        notes = [(x, y, f"best {y:.1f}")]
    figure = line_chart(curves, name=f"{shown} per epoch", x_label="epoch", y_label=f"{shown}, %", notes=notes)
    epochs = sorted({x for curve in curves for x, _ in curve.points})
    values = [dict(curve.points) for curve in curves]
    label = f"{shown} per epoch"
    return with_table(figure, curves, label, f"{label}, in percent", "Epoch", epochs, values)


def with_table(
    figure: Markup,
    curves: Sequence[Series],
    label: str,
    caption: str,
    x_name: str,
    xs: Sequence[float],
    values: Sequence[Mapping[Any, float]],
    digits: str = ".1f",
) -> Markup:
    """A figure with a legend if it has several curves, and their values as a table.

    Args:
        figure: The figure.
        curves: What is drawn.
        label: What to call the table.
        caption: What it holds.
        x_name: The head of its first column.
        xs: The rows.
        values: Of each curve, by x; where there is none, a dash.
        digits: How they are written.
    """
    rows = [[f"{x:g}", *(format(of[x], digits) if x in of else "–" for of in values)] for x in xs]
    heads = [x_name, *(curve.name for curve in curves)]
    key = legend(curves) if len(curves) > 1 else Markup()
    return render("curve.html", figure=figure + key, label=label, caption=caption, heads=heads, rows=rows)


def _points(history: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[float, float]]:
    points = [
        (float(entry["epoch"]), 100 * float(entry[metric]))
        for entry in history
        if entry.get("epoch") is not None and entry.get(metric) is not None
    ]
    return sorted((x, y) for x, y in points if np.isfinite(x) and np.isfinite(y))
