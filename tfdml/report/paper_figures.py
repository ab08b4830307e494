"""Figures that the papers of the objectives show, of a run's records: one only where the run has its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from tfdml.report.axes import BOTTOM, HEIGHT, TOP, WIDTH, Axes, svg, ticks
from tfdml.report.curves import with_table
from tfdml.report.figures import Series, draw_curve, legend, outline
from tfdml.report.rendering import element, render

_Records = Sequence[Mapping[str, Any]]
_PAIR_LOSSES = (("positive_loss", "a pair of one class"), ("negative_loss", "a pair of different classes"))
_SPLITS = {"test": "Unseen classes", "validation": "Held-out training classes", "seen": "Seen classes"}


def objectives_html(records: _Records) -> Markup:
    """What the objectives report along the training, and generalisation; empty where there are no numbers.

    Args:
        records: One mapping per epoch, as `metrics.jsonl` holds them: `epoch`, under `train` what `fit` reports, and
            perhaps `generalisation`, what `evaluate_generalisation` gives.
    """
    figures = _along_training([record for record in records if record.get("epoch") is not None])
    return Markup('<div class="several">{}</div>').format(Markup().join(figures)) if figures else Markup()


def _along_training(records: _Records) -> list[Markup]:
    """Each figure along the epochs for which there are numbers."""
    train = [{"epoch": record["epoch"], **record.get("train", {})} for record in records]
    generalisation = [{"epoch": record["epoch"], **record.get("generalisation", {})} for record in records]
    reported = {key for record in train for key in record}
    figures = []
    for name in sorted(reported):
        if {f"{name}_d_avg", f"{name}_target"} <= reported:
            curves = {f"{name}_d_avg": "mean D of the classes", f"{name}_target": "mean target"}
            title = "Density of the classes in training batches"
            figures.append(values_along(title, "squared distance", train, curves, name))
        if f"{name}_energy" in reported:
            curves = {f"{name}_energy": "mean energy of two classes"}
            title = "Energy between classes in training batches"
            figures.append(values_along(title, "squared distance", train, curves, name))
        if {f"{name}_jsd", f"{name}_beta"} <= reported:
            curves = {f"{name}_jsd": "lower bound on the divergence"}
            title = "Divergence of d⁺ and d⁻ in training batches"
            figures.append(values_along(title, "nats, at most 0.693", train, curves, name))
            figures.append(values_along("Where V is zero", "β, a distance", train, {f"{name}_beta": "β"}, name))
    bound = {"lambda": "λ", "h_divergence": "H-divergence"}
    figures.append(values_along("λ and the H-divergence", "λ up to 2, divergence up to 1", generalisation, bound))
    spread = {"unseen_d_avg_mean": "unseen classes", "seen_d_avg_mean": "seen classes"}
    figures.append(values_along("Density of the classes, all images", "mean D", generalisation, spread))
    figures.append(_rates(records))
    return [figure for figure in figures if figure]


def _rates(records: _Records) -> Markup:
    """The learning rate of each part, where one changes, as a share of its highest: they lie decades apart."""
    history = [{"epoch": record["epoch"], **record["rates"]} for record in records if record.get("rates")]
    highest = {part: max(line[part] for line in history) for part in (history[0] if history else {}) if part != "epoch"}
    parts = {part: f"{part}, at most {rate:.3g}" for part, rate in highest.items() if rate}
    if not any(line[part] != highest[part] for line in history for part in parts):
        return Markup()
    shares = [{"epoch": line["epoch"], **{part: line[part] / highest[part] for part in parts}} for line in history]
    return values_along("Learning rates", "share of the highest", shares, parts)


def values_along(
    title: str,
    y_label: str,
    records: _Records,
    names: Mapping[str, str],
    objective: str = "",
    along: str = "epoch",
) -> Markup:
    """Values after each epoch, or along another count, drawn and as a table; empty where there are none.

    Args:
        title: What is drawn.
        y_label: In which unit.
        records: With what `along` names; those without a value are skipped.
        names: What to call the values, by their key.
        objective: Whose values they are.
        along: What is counted.
    """
    series = []
    for style, (key, name) in enumerate(names.items()):
        points = [(float(r[along]), float(r[key])) for r in records if r.get(key) is not None]
        points = [(x, y) for x, y in points if np.isfinite(y)]
        if points:
            series.append(Series(name, points, style))
    if not series:
        return Markup()
    xs = sorted({x for curve in series for x, _ in curve.points})
    ys = [y for curve in series for _, y in curve.points]
    margin = 0.1 * (max(ys) - min(ys)) or 0.1 * abs(ys[0]) or 0.1
    # What cannot be negative has no axis below 0.
    low = min(ys) - margin if min(ys) < 0 else max(min(ys) - margin, 0.0)
    axes = Axes((xs[0], xs[-1]), (low, max(ys) + margin))
    whole = [x for x in ticks(xs[0], xs[-1], 8) if x == round(x)] or [xs[0]]
    body = axes.frame(whole, ticks(*axes.y_range), along, y_label)
    body += Markup().join(draw_curve(curve, axes) for curve in series)
    said = "; ".join(f"{c.name}: {c.points[0][1]:.3g} at first, {c.points[-1][1]:.3g} at last" for c in series)
    label = f"{title}, {objective}, per {along}" if objective else f"{title} per {along}"
    values = [dict(curve.points) for curve in series]
    drawn = with_table(svg(body, f"{label}. {said}"), series, label, label, along.capitalize(), xs, values, ".4g")
    of = element("span", objective) if objective else ""
    return element("div", element("h3", title, " " if objective else "", of), drawn)


def statistics_html(statistics: Mapping[str, Any]) -> Markup:
    """The losses over the histograms, one below the other along the same axis of distances; empty without them.

    Args:
        statistics: What `statistics.json` of a run with RankMI holds.
    """
    if not statistics:
        return Markup()
    beta, margin = float(statistics["beta"]), float(statistics["margin"])
    drawn = {_SPLITS[name]: pairs for name, pairs in statistics["pairs"].items() if name in _SPLITS}
    last = max([float(pairs["edges"][-1]) for pairs in drawn.values()] + [min(beta + 2 * margin, 2.0)])
    return render(
        "statistics.html",
        beta=beta,
        margin=margin,
        has_root=statistics["has_root"],
        losses=_losses(statistics, last),
        histograms=[(name, _histogram(pairs, beta, last), pairs) for name, pairs in drawn.items()],
    )


def _losses(statistics: Mapping[str, Any], last: float) -> Markup:
    distances = np.asarray(statistics["distances"], float)
    shown = distances <= last
    series = [
        Series(name, list(zip(distances[shown], np.asarray(statistics[key], float)[shown], strict=True)), style)
        for style, (key, name) in enumerate(_PAIR_LOSSES)
    ]
    ys = [y for curve in series for _, y in curve.points]
    axes = Axes((0.0, last), (min(ys), max(max(ys), min(ys) + 0.1)))
    body = axes.frame(ticks(0.0, last, 6), ticks(*axes.y_range), "Euclidean distance", "loss of a pair")
    body += Markup().join(draw_curve(curve, axes) for curve in series)
    beta, margin = float(statistics["beta"]), float(statistics["margin"])
    body += Markup().join(_upright(axes, x) for x in (beta - margin, beta + margin) if 0 < x < last)
    body += _upright(axes, beta, "β")
    label = f"Loss of a pair by its distance. Both kinds cost the same at {beta:.3g}"
    return svg(body, label) + legend(series)


def _histogram(pairs: Mapping[str, Any], beta: float, last: float) -> Markup:
    edges = np.asarray(pairs["edges"], float)
    shares = {kind: np.asarray(pairs[kind], float) / max(np.sum(pairs[kind]), 1) for kind in ("negative", "positive")}
    # Per unit of distance, as bins need not be equally wide.
    densities = {kind: share / np.diff(edges) for kind, share in shares.items()}
    axes = Axes((0.0, last), (0.0, 1.12 * max(float(density.max()) for density in densities.values())))
    body = axes.frame(ticks(0.0, last, 6), ticks(*axes.y_range), "Euclidean distance", "density of pairs")
    for kind, density in densities.items():
        body += outline(kind, edges, density, axes)
    body += _upright(axes, beta, "β")
    means = f"mean d⁺ {float(pairs['mean_positive']):.3g}, mean d⁻ {float(pairs['mean_negative']):.3g}"
    return svg(body, f"Densities of the distances of pairs, {means}, β {beta:.3g}")


def _upright(axes: Axes, x: float, name: str = "") -> Markup:
    """A line at x from the axis to the top; dashed, with its value beside it, where it has a name."""
    at = axes.x(x)
    if not name:
        return element("line", css="axis", x1=at, y1=TOP, x2=at, y2=HEIGHT - BOTTOM)
    side, place = ("end", at - 5) if at > WIDTH - 100 else ("start", at + 5)
    line = element("line", css="axis mean", x1=at, y1=TOP - 8, x2=at, y2=HEIGHT - BOTTOM)
    return line + element("text", f"{name} {x:.3g}", css=f"mark {side}", x=place, y=TOP)
