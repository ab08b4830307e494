"""Figures of a report, drawn by matplotlib as inline SVG in the style sheet's colors: curves and histograms."""

from __future__ import annotations

import io
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from tfdml.evaluation.generalization import overlap_coefficient
from tfdml.evaluation.verification import OperatingPoint, PairHistogram, Verification, probability_nearer
from tfdml.report.rendering import csv_link, render

if TYPE_CHECKING:  # slow to import, so only where something is drawn
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Sequence[Mapping[str, Any]]
Curve = Mapping[float, float]
# A title, the unit, the records, and what to call their values by key.
_Figure = tuple[str, str, Records, Mapping[str, str]]

# Kinds of points and lines, distinguished by color, shape and dashes.
STYLES = 8
MARKS = "os^vDPX*"
_DASHES = ("-", *((0, dash) for dash in ((4, 2), (1, 2), (5, 2, 1, 2), (2, 2), (7, 2), (1, 1, 3, 1), (3, 1, 1, 1))))
# Colors are drawn as #000001, #000002 ... and become the style sheet's variables of these names, so that a figure is
# light or dark as the report is.
_COLORS = ("", "ink", "soft", "line", "card", "dot", *(f"s{style}" for style in range(STYLES)))
_SIZE = 480.0, 300.0
# Beyond this many points on a curve, marks on each would run into one another.
_MARKED_POINTS = 60
# The K that carry a mark and stand in the table.
_KS = (1, 2, 4, 8, 10, 16, 20, 32, 50, 100, 200, 500, 1000)
_BINS = 48
DISTANCE_NAMES = {
    "euclidean": "Euclidean distance",
    "sqeuclidean": "squared Euclidean distance",
    "cosine": "cosine distance",
    "dot": "negative inner product",
}


def color(name: str) -> str:
    """Return the placeholder of a variable of the style sheet."""
    return f"#0000{_COLORS.index(name):02d}"


def draw(plot: Callable[[Figure], None], label: str, width: float, height: float) -> Markup:
    """Draw a figure as an inline `<svg>`.

    Args:
        plot: Draws it.
        label: What a screen reader says in its place; no other figure of the report may have the same.
        width: In units of its view box, of which text is 13 high.
        height: The same.
    """
    import matplotlib
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with matplotlib.rc_context(
        {"svg.hashsalt": label}, pathlib.Path(__file__).with_name("templates") / "figures.mplstyle"
    ):
        figure = Figure((width / 72, height / 72))
        plot(figure)
        figure.savefig(stream, format="svg", transparent=True)
    match = re.search(r"<g id=.*(?=</svg>)", stream.getvalue(), re.DOTALL)
    assert match is not None
    # Ids that are referred to are hashes of the label; those of groups are counted, alike in all figures.
    body = re.sub(r' id="[^"]*_\d+"', "", match[0])
    body = re.sub(r": #0000(\d\d)", lambda number: f": var(--{_COLORS[int(number[1])]})", body)
    start = Markup('<svg class="figure" viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">')
    return start.format(width, height, label) + Markup(body + "</svg>")  # noqa: S704 - matplotlib escapes text


def _draw_axes(
    plot: Callable[[Axes], None],
    label: str,
    x_label: str,
    y_label: str,
    values: tuple[str, Sequence[str], Iterable[Sequence[Any]]],
    key_rows: int = 0,
) -> Markup:
    """Return a figure of one pair of axes, the y label above its axis, and its `values` as `csv_link` takes them."""

    def plot_figure(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        axes.set_xlabel(x_label)
        axes.set_title(y_label)
        plot(axes)

    width, height = _SIZE
    return draw(plot_figure, label, width, height + 20 * key_rows) + csv_link(*values)


# Curves


def curves_html(
    title: str,
    curves: Mapping[str, Curve],
    x_label: str,
    y_label: str,
    *,
    percent: bool = False,
    rows: Sequence[float] | None = None,
    log_x: bool = False,
    points: str = "",
    best: bool = False,
) -> Markup:
    """Curves over one pair of axes, and their values as a table; empty where there is no value.

    Args:
        title: What is drawn.
        curves: y by x of each curve, by its name; the order chooses its style.
        x_label: Under the axis.
        y_label: Above the axis.
        percent: Whether y is in percent.
        rows: The x that carry a mark and stand in the table; None: all.
        log_x: Whether equal steps along the axis are equal ratios of x.
        points: The name of a curve that is drawn as single points.
        best: Whether the highest point is ringed and labeled.
    """
    shown = {name: (style % STYLES, curve) for style, (name, curve) in enumerate(curves.items()) if curve}
    if not shown:
        return Markup()
    rows = sorted({x for _, curve in shown.values() for x in curve}) if rows is None else rows
    digits = ".1f" if percent else ".4g"
    columns = 1 if max(map(len, shown)) > 26 else 2
    key_rows = -(-len(shown) // columns) if len(shown) > 1 else 0

    def plot(axes: Axes) -> None:
        from matplotlib import ticker

        for name, (style, curve) in shown.items():
            look: dict[str, Any] = {"color": color(f"s{style}"), "linestyle": "" if name == points else _DASHES[style]}
            marked = [place for place, x in enumerate(curve) if x in rows or name == points]
            if 0 < len(marked) <= _MARKED_POINTS:
                look |= {"marker": MARKS[style], "markevery": marked}
            label = name if len(name) <= 50 else name[:49] + "…"
            axes.plot(list(curve), list(curve.values()), label=label, clip_on=False, **look)
        axes.margins(y=0.12)
        low, high = axes.get_ylim()
        # What cannot be negative has no axis below 0.
        nonnegative = all(y >= 0 for _, curve in shown.values() for y in curve.values())
        axes.set_ylim(max(low, 0) if nonnegative else low, min(high, 100) if percent else high)
        whole = all(float(x).is_integer() for x in rows)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(8, steps=[1, 2, 5, 10], integer=whole))
        axes.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 5, 10]))
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if max(rows) < 100 else (1,)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(ticker.NullLocator())
        if best:
            ((_, curve),) = shown.values()
            x = max(curve, key=lambda at: curve[at])
            axes.plot(x, curve[x], "o", ms=9, mec=color("s0"), mfc=color("card"), mew=2.5, clip_on=False)
            side, aside = ("right", -8) if 2 * x > min(curve) + max(curve) else ("left", 8)
            note = f"best {curve[x]:{digits}}"
            axes.annotate(note, (x, curve[x]), (aside, 7), textcoords="offset points", ha=side, weight="bold")
        if key_rows:
            axes.figure.legend(loc="outside lower left", ncols=columns)

    described = "; ".join(_described(name, curve, x_label, digits) for name, (_, curve) in shown.items())
    table = [[f"{x:g}", *(f"{of[x]:{digits}}" if x in of else "–" for _, of in shown.values())] for x in rows]
    every = sorted({x for _, curve in shown.values() for x in curve})
    values = title, [x_label, *shown], ([x, *(curve.get(x, "") for _, curve in shown.values())] for x in every)
    figure = _draw_axes(plot, f"{title}. {described}", x_label, y_label, values, key_rows)
    return render("curve.html", figure=figure, caption=title, heads=[x_label.capitalize(), *shown], rows=table)


def _described(name: str, curve: Curve, x_label: str, digits: str) -> str:
    first, last, top = min(curve), max(curve), max(curve, key=lambda x: curve[x])
    return (
        f"{name}: {curve[first]:{digits}} at {x_label} {first:g}, highest {curve[top]:{digits}} at {top:g}, "
        f"last {curve[last]:{digits}} at {last:g}"
    )


def _plot_line(axes: Axes, x: float, text: str, line: str, left: bool = False) -> None:
    """Draw a dashed upright line at x, with text next to it."""
    axes.axvline(x, color=color(line), ls="--", lw=2)
    low, high = axes.get_xlim()
    place = (x - low) / (high - low)
    # Unless there is no room between it and the edge.
    side, aside = ("right", -5) if (left and place > 0.2) or place > 0.8 else ("left", 5)
    top = axes.get_xaxis_transform()
    axes.annotate(text, (x, 1), (aside, -2), top, "offset points", ha=side, va="top", weight="bold")


def recall_curves(recalls: Mapping[str, np.ndarray], before: Mapping[str, float] | None = None) -> Markup:
    """Recall@K against K, K along a logarithmic axis.

    Args:
        recalls: What each curve is called, and its Recall@K for K = 1, 2, ... as fractions.
        before: Metrics before training, of which only some Recall@K are known, drawn as single points.
    """
    curves: dict[str, Curve] = {
        name: {k: 100 * y for k, y in enumerate(values.tolist(), 1)} for name, values in recalls.items()
    }
    deepest = max(map(len, curves.values()), default=0)
    if not deepest:
        return Markup("<p>No query has an image of its class to find.</p>")
    found = {int(key[7:]): 100 * y for key, y in (before or {}).items() if re.fullmatch(r"recall@\d+", key)}
    points = "before training"
    curves[points] = {k: y for k, y in sorted(found.items()) if k <= deepest}
    rows = sorted({k for k in (*_KS, deepest) if k <= deepest})
    title, y_label = "Recall@K, in percent", "Recall@K, %"
    return curves_html(title, curves, "K", y_label, percent=True, rows=rows, log_x=True, points=points)


def training_curves(histories: Mapping[str, Records]) -> Markup:
    """Recall@1 after each epoch.

    Args:
        histories: What each curve is called, and one mapping per epoch with `epoch` and `recall@1`, a fraction; others
            are skipped.
    """
    curves = {name: _points(records, "epoch", "recall@1", 100) for name, records in histories.items()}
    title, best = "Recall@1 per epoch, in percent", len(histories) == 1
    drawn = curves_html(title, curves, "epoch", "Recall@1, %", percent=True, best=best)
    return drawn or Markup("<p>Nothing was measured during training.</p>")


def _points(records: Records, along: str, key: str, factor: float = 1) -> dict[float, float]:
    known = [r for r in records if r.get(along) is not None and r.get(key) is not None and np.isfinite(r[key])]
    return dict(sorted((float(r[along]), factor * float(r[key])) for r in known))


# What papers draw of `generalization` along the training: title, unit, and what each curve is called.
_GENERALIZATION = (
    ("λ and the H-divergence", "λ up to 2, divergence up to 1", {"lambda": "λ", "h_divergence": "H-divergence"}),
    (
        "Density of the classes, all images",
        "mean D",
        {"unseen_d_avg_mean": "unseen classes", "seen_d_avg_mean": "seen classes"},
    ),
)


def objectives_html(records: Records) -> Markup:
    """Return values and reports of the objectives, generalization and the rate by epoch; empty without numbers.

    Args:
        records: One mapping per epoch, as `metrics.jsonl` holds them: `epoch`, under `train` what `fit` reports, and
            perhaps `generalization`, what `evaluate_generalization` gives, and `learning_rate`. What an objective
            reports next to its value begins with its name, as `density_target`.
    """
    records = [record for record in records if record.get("epoch") is not None]
    train, generalization = (
        [{**record[key], "epoch": record["epoch"]} for record in records if record.get(key)]
        for key in ("train", "generalization")
    )
    reported = dict.fromkeys(key for record in train for key in record)
    own = [key for key in reported if any(key.startswith(f"{name}_") for name in reported)]
    values = [key for key in reported if key not in (*own, "epoch", "loss", "d_pos", "d_neg", "violations")]
    figures: list[_Figure] = [("Values of the objectives", "in training batches", train, {key: key for key in values})]
    figures += [(key, "in training batches", train, {key: key}) for key in own]
    figures += [(title, unit, generalization, curves) for title, unit, curves in _GENERALIZATION]
    if len({record["learning_rate"] for record in records if "learning_rate" in record}) > 1:
        figures.append(("Learning rate", "rate", records, {"learning_rate": "learning rate"}))
    return _several(figures, "epoch")


def watched_html(watch: Mapping[str, Any]) -> Markup:
    """Render a run's alarms in the order in which they came, and curves of the samples; empty without any.

    Args:
        watch: What `watch.json` holds: `alarms`, each with its `line`, and `samples`.

    Example:
        >>> str(watched_html({"every": 100, "samples": [], "alarms": []}))
        ''
    """
    alarms, samples = watch.get("alarms", ()), watch.get("samples", ())
    if not alarms and not samples:
        return Markup()
    norms, shares = (
        [{**sample[key], "step": sample["step"]} for sample in samples] for key in ("gradient_norm", "gradient_share")
    )
    parts, terms = ({key: key for record in found for key in record if key != "step"} for found in (norms, shares))
    ranks = {"effective_rank": "effective rank", "participation_ratio": "participation ratio"}
    figures: list[_Figure] = [
        ("Directions of a batch of embeddings", "directions", samples, ranks),
        ("Variance of a batch of embeddings", "of at most 1", samples, {"variance": "variance"}),
        ("Gradient norms", "before clipping", norms, parts),
        # That of a single term is 1.
        ("Terms of the embedder's gradient", "share", shares, terms if len(terms) > 1 else {}),
    ]
    return render("watched.html", alarms=alarms, samples=samples, figures=_several(figures, "step"))


def _several(figures: Sequence[_Figure], along: str) -> Markup:
    """Figures next to one another, those of which there are values; empty where there are none.

    Args:
        figures: The figures.
        along: What of the records is counted.
    """
    drawn = []
    for title, unit, records, names in figures:
        curves = {name: _points(records, along, key) for key, name in names.items()}
        if figure := curves_html(f"{title} per {along}", curves, along, unit):
            drawn.append((title, figure))
    return render("several.html", figures=drawn) if drawn else Markup()


# Histograms


def histogram_html(
    histogram: PairHistogram | None, distance: str, run: str = "", threshold: float | None = None
) -> Markup:
    """Two histograms of distances over one axis, each in percent of its own pairs, and in numbers how they overlap.

    Args:
        histogram: The pairs; None: there are not both kinds.
        distance: As `nearest_neighbors`.
        run: Whose they are, where the report shows several; its text is then below the figure.
        threshold: A distance to mark; None marks the mean of each kind.
    """
    if histogram is None:
        return render("histogram.html", figure=None)
    shown = histogram.rebinned(_BINS)
    counts = shown.positive, shown.negative
    means = histogram.mean_positive, histogram.mean_negative
    marks = f"Mean of d+ {means[0]:.3g}, mean of d- {means[1]:.3g}"

    def plot(axes: Axes) -> None:
        positive, negative = (100 * count / count.sum() for count in counts)
        axes.stairs(negative, shown.edges, fill=True, fc="none", ec=color("s1"), hatch="///", lw=1.5)
        axes.stairs(positive, shown.edges, fill=True, fc=(color("s0"), 0.38), ec=color("s0"), lw=1.5)
        axes.set(xlim=(shown.edges[0], shown.edges[-1]), ylim=(0, 1.12 * max(positive.max(), negative.max())))
        if threshold is not None:
            _plot_line(axes, threshold, f"threshold {threshold:.3g}", "ink")
            return
        # The label of the smaller mean goes to the left of its line, so that close means do not overprint.
        _plot_line(axes, means[0], f"d⁺ {means[0]:.3g}", "s0", means[0] <= means[1])
        _plot_line(axes, means[1], f"d⁻ {means[1]:.3g}", "s1", means[0] > means[1])

    title = f"Histogram of pair distances{' of ' if run else ''}{run}"
    label = f"{title}. {marks}"
    label += "" if threshold is None else f", threshold {threshold:.3g}"
    heads = ["from", "to", "pairs of one class", "pairs of different classes"]
    rows = zip(*(column.tolist() for column in (shown.edges[:-1], shown.edges[1:], *counts)), strict=True)
    return render(
        "histogram.html",
        figure=_draw_axes(plot, label, DISTANCE_NAMES[distance], "% of pairs", (title, heads, rows)),
        overlap=overlap_coefficient(*counts),
        ordered=probability_nearer(histogram.positive, histogram.negative),
        pairs=[int(count.sum()) for count in counts],
        key=not run,
    )


def roc_curve(measured: Verification, chosen: OperatingPoint) -> Markup:
    """Return the true accept rate by the false accept rate, along a logarithmic axis.

    Args:
        measured: What `verification` gave.
        chosen: The operating point that is marked.
    """

    def plot(axes: Axes) -> None:
        from matplotlib import ticker

        shown = measured.roc["far"] > 0
        axes.plot(
            measured.roc["far"][shown],
            100 * measured.roc["tar"][shown],
            color=color("s0"),
            drawstyle="steps-post",
            clip_on=False,
        )
        axes.set(xscale="log", xlim=(max(1 / measured.num_different, 1e-7), 1), ylim=(0, 100))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        far, tar = chosen.far.mean, 100 * chosen.tar.mean
        if far:
            axes.plot(far, tar, "o", ms=9, mec=color("s0"), mfc=color("card"), mew=2.5, clip_on=False)
            axes.annotate(
                f"threshold {chosen.threshold:.3g}", (far, tar), (-10, 6), "data", "offset points", ha="right"
            )

    points = "; ".join(f"{100 * point.tar.mean:.1f} % at {far:g}" for far, point in measured.points.items())
    label = f"ROC curve: true accept rate by false accept rate. {points}"
    values = "ROC curve", list(measured.roc), zip(*(column.tolist() for column in measured.roc.values()), strict=True)
    return _draw_axes(plot, label, "false accept rate", "true accept rate, %", values)
